"""Lab 6, find the hang: this schedule does not come to its end. labs/hang.md has the picture as far as it goes.

megapipe prove labs/hang.py:my_eager --like labs/answers/hang.py:solution
"""

from megapipe import schedule
from megapipe.plan import loop
from megapipe.schedules import BW, F


@schedule("my_eager", placement=loop)
def my_eager(pipe):
    # 1F1B with two forwards more, so that messages are hidden. But on which ranks?
    num_warmup = pipe.pp_size - pipe.pp_rank - 1 + (2 if pipe.pp_rank % 2 else 0)
    num_warmup = min(num_warmup, pipe.num_microbatches)

    for _ in range(num_warmup):
        F(pipe)
    for _ in range(pipe.num_microbatches):
        F(pipe)
        BW(pipe)

    return pipe.finish()

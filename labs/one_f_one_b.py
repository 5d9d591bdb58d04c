"""Lab 2, 1F1B: fill in the hole. labs/one_f_one_b.md has the picture.

megapipe prove labs/one_f_one_b.py:my_1f1b --like 1f1b
"""

from megapipe import schedule
from megapipe.plan import loop
from megapipe.schedules import BW, F


@schedule("my_1f1b", placement=loop)
def my_1f1b(pipe):
    # How many forwards does a rank run before its first backward? It depends on pipe.pp_rank and pipe.pp_size, and is
    # never more than there are microbatches.
    num_warmup = ...

    for _ in range(num_warmup):
        F(pipe)
    for _ in range(pipe.num_microbatches - num_warmup):
        F(pipe)
        BW(pipe)
    for _ in range(num_warmup):
        BW(pipe)

    return pipe.finish()

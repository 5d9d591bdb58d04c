"""Lab 3, interleaving: fill in the hole. labs/interleaving.md has the picture.

megapipe prove labs/interleaving.py:my_interleaved --like interleaved_1f1b
"""

from megapipe import schedule
from megapipe.plan import loop
from megapipe.schedules import BW, F


@schedule("my_interleaved", placement=loop, num_chunks=2)
def my_interleaved(pipe):
    p, m = pipe.pp_size, pipe.num_microbatches
    if m % p:
        raise ValueError("m must be a multiple of p: rounds are full")

    # The chunk of each forward of this rank, 2 m of them: p microbatches through chunk 0, then these through chunk 1.
    forwards = ...

    # Backwards take the chunks the other way round. This rank runs so many forwards before its first backward:
    num_warmup = ...

    backwards = [1 - chunk for chunk in forwards]
    for chunk in forwards[:num_warmup]:
        F(pipe, chunk)
    for chunk, other in zip(forwards[num_warmup:], backwards):
        F(pipe, chunk)
        BW(pipe, other)
    for chunk in backwards[len(forwards) - num_warmup :]:
        BW(pipe, chunk)

    return pipe.finish()

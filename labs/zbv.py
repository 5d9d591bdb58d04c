"""Lab 5, ZB-V: fill in the holes. labs/zbv.md has the picture.

megapipe prove labs/zbv.py:my_v --like zbv
"""

from megapipe import schedule
from megapipe.plan import loop, v_shape  # noqa: F401
from megapipe.schedules import B, F, W


@schedule("my_v", placement=loop, num_chunks=2)  # is loop right?
def my_v(pipe):
    p, r, m = pipe.pp_size, pipe.pp_rank, pipe.num_microbatches

    # Warmup 1: forwards of chunk 0, until the first microbatch is back at this rank, on its way up.
    for _ in range(...):
        F(pipe, 0)
    # Warmup 2: chunk 1 and chunk 0 take turns, until the first microbatch is up at rank 0, which turns it round.
    for _ in range(...):
        F(pipe, 1)
        F(pipe, 0)
    # Warmup 3: forward and backward of chunk 1, until the first microbatch comes down again on chunk 0.
    for _ in range(...):
        F(pipe, 1)
        B(pipe, 1)
        W(pipe, 1)

    # Steady state: one forward and one backward of each chunk. F, B and W do nothing where nothing is left.
    for _ in range(max(m, 2 * p - 1) - p):
        F(pipe, 0)
        B(pipe, 0)
        W(pipe, 0)
        F(pipe, 1)
        B(pipe, 1)
        W(pipe, 1)

    # Cooldown: others wait for input gradients, and nobody for weight gradients.
    for _ in range(r):
        B(pipe, 0)
        B(pipe, 1)
    for _ in range(p - r):
        B(pipe, 0)
        W(pipe, 0)
    for chunk in (1, 0):
        while pipe.num_pending_weights(chunk):
            W(pipe, chunk)

    return pipe.finish()

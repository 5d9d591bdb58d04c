"""Lab 4, the split backward: fill in the hole. labs/split_backward.md has the picture.

megapipe prove labs/split_backward.py:my_zb1p --like zb1p
"""

from megapipe import schedule
from megapipe.plan import loop
from megapipe.schedules import B, F


@schedule("my_zb1p", placement=loop)
def my_zb1p(pipe):
    num_warmup = min(pipe.pp_size - pipe.pp_rank - 1, pipe.num_microbatches)

    for _ in range(num_warmup):
        F(pipe)
    for _ in range(pipe.num_microbatches):
        F(pipe)
        B(pipe)
        # A W behind this B, but not yet in the first ones: as many Ws stay pending as there are ranks before this one.
        # Their time comes at the end, where those ranks still send gradients. pipe.num_pending_weights() counts them.

    # The rest of the Ws.

    return pipe.finish()

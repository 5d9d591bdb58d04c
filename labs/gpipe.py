"""Lab 1, GPipe: fill in the hole. labs/gpipe.md has the picture.

megapipe prove labs/gpipe.py:my_gpipe --like gpipe
"""

from megapipe import schedule
from megapipe.plan import loop
from megapipe.schedules import BW, F  # noqa: F401


@schedule("my_gpipe", placement=loop)
def my_gpipe(pipe):
    # All forwards, then all backwards. pipe.num_microbatches says how many there are.

    return pipe.finish()

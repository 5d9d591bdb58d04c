"""Cases: a schedule with its sizes and features, each of them a class of its own, by the hooks of case.py.

Losses, gradients and weights are to be, to the bit, those of all stages run one after the other in one process, and
slice by slice where sequences are cut; or every rank is to raise an error that the case's features allow. A test of
numbers is a row of `rows.py`; `make fuzz` draws others. What prints as `Case(...)` runs again by

    python tests/fuzz "Case('1f1b', 2, 5, [Slices(3), Recompute('all')])"
"""

from .between import *  # noqa: F403
from .case import FEATURES, Case, Feature, draw_case
from .given import *  # noqa: F403
from .model import *  # noqa: F403
from .training import *  # noqa: F403
from .trial import run_case, run_rows

__all__ = ["Case", "Feature", "draw_case", "run_case", "run_rows"]
__all__ += [kind.__name__ for kind in FEATURES]

"""Random cases against the unpartitioned model: `make fuzz`, or

    python tests/fuzz --minutes 10 --seed 1
    python tests/fuzz --seed 1 --case 17      # one of them again

A case is a schedule with its sizes, and features that are drawn at random, each by a class of its own: what a case can
have besides, one class more adds (model.py and training.py, by the hooks of cases.py). Losses, gradients and weights
are to be, to the bit, those of all stages run one after the other in one process, and slice by slice where sequences
are cut; or every rank is to raise an error that its features allow. What a case is depends on the seed and its number
alone, and on what this torch can do.
"""

from . import model, training
from .cases import Case, make_case
from .trial import run_case

__all__ = ["Case", "make_case", "model", "run_case", "training"]

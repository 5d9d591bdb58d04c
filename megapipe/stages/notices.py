"""Warnings of steps that succeed, but perhaps train other things than was meant."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from pathlib import Path

import torch

_TORCHS_PIPELINING = f"{Path(torch.__file__).parent / 'distributed' / 'pipelining'}{os.sep}"
NOT_THE_CALLERS = (f"{Path(__file__).parents[1]}{os.sep}", contextlib.__file__, _TORCHS_PIPELINING)
"""Files that lie between a warning and the line that called the step."""


class TrainingWarning(UserWarning):
    """A step has done what it was told, but few mean that. Each chunk is looked at once; to silence this class
    silences them all."""


class NoGradientWarning(TrainingWarning):
    """A stage, a part of it or the stages before it are not trained: by a mistake, or on purpose."""


class UnsplitBackwardWarning(TrainingWarning):
    """The schedule splits backwards, but no layer of a stage leaves anything to the second part. One warning
    names all such stages of a pipeline, on its first rank."""


def warn(text: str, category: type[TrainingWarning]) -> None:
    """A warning that points at the line that called the step."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(NOT_THE_CALLERS):
        level, frame = level + 1, frame.f_back
    warnings.warn(
        f"{text}. If that is meant, silence it by warnings.filterwarnings('ignore', "
        f"category=megapipe.{category.__name__}).",
        category,
        stacklevel=level,
    )

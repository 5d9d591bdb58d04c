"""Warnings of steps that succeed, but perhaps train other things than was meant."""

from __future__ import annotations

import warnings

__all__ = ["NoGradientWarning", "TrainingWarning", "UnsplitBackwardWarning", "warn"]


class TrainingWarning(UserWarning):
    """A step has done what it was told, but few mean that. Each is given once for each chunk; to silence this class
    silences them all."""


class NoGradientWarning(TrainingWarning):
    """A stage, a part of it or the stages before it are not trained: by a mistake, or on purpose."""


class UnsplitBackwardWarning(TrainingWarning):
    """The schedule splits backwards, but no layer of a stage leaves anything to the second part."""


def warn(text: str, category: type[TrainingWarning]) -> None:
    warnings.warn(
        f"{text}. If that is meant, silence it by warnings.filterwarnings('ignore', "
        f"category=megapipe.{category.__name__}).",
        category,
        stacklevel=3,
    )

"""Sequences that are computed slice by slice: what a slice keeps for the slices after it, gradients included."""

from typing import TYPE_CHECKING

from ..first_use import names_on_first_use

if TYPE_CHECKING:
    from .attending import attention
    from .state import CarriedState, SequenceSlice, current, cut, earlier, keep, positions

__all__ = ["SequenceSlice", "attention", "current", "cut", "earlier", "keep", "positions"]

__getattr__, __dir__ = names_on_first_use(__name__)

"""Options of a step, as extensions of its runner (`config.OPTIONS` names them)."""

from typing import TYPE_CHECKING

from ..first_use import names_on_first_use

if TYPE_CHECKING:
    from .activations import Recompute
    from .autocast import Autocast
    from .slicing import sequence_slices

__all__: list[str] = []

__getattr__, __dir__ = names_on_first_use(__name__)

"""Save under any arrangement of ranks, load under any other."""

from typing import TYPE_CHECKING

from ..first_use import names_on_first_use

if TYPE_CHECKING:
    from .checkpointer import Checkpointer
    from .export import save_safetensors
    from .optimizer_alone import load_optimizer, save_optimizer
    from .reading import read_position
    from .sending import named_weights

__all__ = ["Checkpointer", "load_optimizer", "named_weights", "read_position", "save_optimizer", "save_safetensors"]

__getattr__, __dir__ = names_on_first_use(__name__)

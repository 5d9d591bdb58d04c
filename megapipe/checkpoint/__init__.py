"""Save under any arrangement of ranks, load under any other."""

from .checkpointer import Checkpointer
from .export import save_safetensors
from .files import read_position

__all__ = [
    "Checkpointer",
    "read_position",
    "save_safetensors",
]

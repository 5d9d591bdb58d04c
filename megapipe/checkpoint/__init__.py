"""Save under any arrangement of ranks, load under any other."""

from .checkpointer import Checkpointer, read_position
from .export import save_safetensors

__all__ = [
    "Checkpointer",
    "read_position",
    "save_safetensors",
]

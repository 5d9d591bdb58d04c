"""Chunks sharded by torch's `fully_shard`, over one step of a schedule."""

from typing import TYPE_CHECKING

from ..first_use import names_on_first_use

if TYPE_CHECKING:
    from .fsdp import ShardedChunks, output_dtype

__all__: list[str] = []

__getattr__, __dir__ = names_on_first_use(__name__)

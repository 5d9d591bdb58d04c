"""Chunks sharded by torch's `fully_shard`, over one step of a schedule."""

from .fsdp import ShardedChunks, output_dtype

__all__ = [
    "ShardedChunks",
    "output_dtype",
]

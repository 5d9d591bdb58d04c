"""Memory for what is received."""

from __future__ import annotations

import math

import torch

__all__ = ["LARGE", "Memory"]

LARGE = 2**20
"""Bytes from which on it is worth it: up to 32 MiB an allocator may keep a block, above glibc's never does."""


class Memory:
    """What one channel receives into. On CPU large blocks are used again once nobody holds them: fresh ones come from
    the system page by page, which may take longer than the message. A device's allocator sees to that by itself."""

    NUM_KEPT = 2
    """Most blocks that are kept for what is yet to come."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._blocks: list[torch.UntypedStorage] = []

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A fresh tensor each time: it becomes a leaf of the stage's graph and must not remember an earlier one."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if self._device.type != "cpu" or num_bytes < LARGE:
            return torch.empty(shape, dtype=dtype, device=self._device)
        block = next((block for block in self.trim() if block.nbytes() == num_bytes), None)
        if block is None:
            block = torch.empty(num_bytes, dtype=torch.uint8, device="cpu").untyped_storage()
            self._blocks.append(block)
        return torch.empty(0, dtype=dtype, device="cpu").set_(block).view(shape)

    def trim(self) -> list[torch.UntypedStorage]:
        """Let go of all but `NUM_KEPT` of the blocks that nobody holds. Returns those."""
        free = [block for block in self._blocks if torch._C._storage_Use_Count(block._cdata) == 1]
        surplus = {id(block) for block in free[self.NUM_KEPT :]}
        self._blocks = [block for block in self._blocks if id(block) not in surplus]
        return free[: self.NUM_KEPT]

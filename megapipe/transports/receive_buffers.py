"""Host memory for received messages, used again by later ones."""

from __future__ import annotations

import math

import torch

__all__ = ["ReceiveBufferPool"]


class ReceiveBufferPool:
    """Buffers of one channel. A large one is used again once nothing refers to it: fresh host memory comes from the
    system page by page, which may take longer than the message. (A device's allocator keeps memory by itself.)"""

    MIN_REUSED_BYTES = 2**20
    """Smaller ones malloc keeps by itself. It may keep more, up to 32 MiB with glibc, and never more than that: there
    this saves up to a sixth of a step."""
    NUM_KEPT = 2
    """Unused buffers that are kept: as many as a channel has receives posted ahead."""

    def __init__(self) -> None:
        self._buffers: list[torch.UntypedStorage] = []

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A fresh tensor each time: it becomes a leaf of the stage's graph and must not remember an earlier one."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes < self.MIN_REUSED_BYTES:
            return torch.empty(shape, dtype=dtype, device="cpu")
        buffer = next((buffer for buffer in self.release() if buffer.nbytes() == num_bytes), None)
        if buffer is None:
            buffer = torch.empty(num_bytes, dtype=torch.uint8, device="cpu").untyped_storage()
            self._buffers.append(buffer)
        return torch.empty(0, dtype=dtype, device="cpu").set_(buffer).view(shape)

    def release(self) -> list[torch.UntypedStorage]:
        """Free all but `NUM_KEPT` of the unused buffers. Returns those."""
        if not self._buffers:
            return []
        unused = [buffer for buffer in self._buffers if torch._C._storage_Use_Count(buffer._cdata) == 1]
        surplus = {id(buffer) for buffer in unused[self.NUM_KEPT :]}
        self._buffers = [buffer for buffer in self._buffers if id(buffer) not in surplus]
        return unused[: self.NUM_KEPT]

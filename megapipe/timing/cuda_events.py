"""CUDA events that are used again: a message takes up to three, and an action of a recorded step up to four."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["CudaEvents", "RecordedEvent"]


class RecordedEvent:
    """An event that has been recorded. When this is dropped, the event is recorded anew for somebody else."""

    __slots__ = ("_unused", "event")

    def __init__(self, event: Any, unused: list[Any]) -> None:
        self.event = event
        """torch.cuda.Event"""
        self._unused = unused

    def query(self) -> bool:
        """Whether the device has come to it."""
        return bool(self.event.query())

    def synchronize(self) -> None:
        """Wait until the device has come to it."""
        self.event.synchronize()

    def __del__(self) -> None:
        self._unused.append(self.event)


class CudaEvents:
    """Events on the current streams of one device.

    Args:
        options: of `torch.cuda.Event`.
    """

    def __init__(self, device: torch.device, **options: Any) -> None:
        self._device = device
        self._options = options
        self._unused: list[Any] = []  # filled from any thread

    def record(self) -> RecordedEvent:
        """Mark this point of the current stream."""
        try:
            event = self._unused.pop()
        except IndexError:
            event = torch.cuda.Event(**self._options)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return RecordedEvent(event, self._unused)

"""When a rank computes and when it waits, on the clock of its device."""

from .cuda_events import CudaEvents, RecordedEvent
from .records import Clock, HostClock, StepRecord, clock_of
from .storages import LiveStorages, uncounted

__all__ = [
    "Clock",
    "CudaEvents",
    "HostClock",
    "LiveStorages",
    "RecordedEvent",
    "StepRecord",
    "clock_of",
    "uncounted",
]

"""When a rank computes and when it waits, on the clock of its device."""

from .cuda_events import CudaEvents, RecordedEvent
from .records import ActionBytes, Clock, HostClock, RankStep, StepRecord, Wait, clock_of
from .storages import LiveStorages, uncounted

__all__ = [
    "ActionBytes",
    "Clock",
    "CudaEvents",
    "HostClock",
    "LiveStorages",
    "RankStep",
    "RecordedEvent",
    "StepRecord",
    "Wait",
    "clock_of",
    "uncounted",
]

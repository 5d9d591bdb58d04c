"""When a rank computes and when it waits, on the clock of its device."""

from .cuda_events import CudaEvents, RecordedEvent
from .records import Clock, HostClock, RankStep, StepRecord, Wait, clock_of

__all__ = ["Clock", "CudaEvents", "HostClock", "RankStep", "RecordedEvent", "StepRecord", "Wait", "clock_of"]

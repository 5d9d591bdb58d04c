"""When a rank computes and when it waits, on the clock of its device."""

from typing import TYPE_CHECKING

from ..first_use import names_on_first_use

if TYPE_CHECKING:
    from .records import Clock, CudaEvents, HostClock, StepRecord, clock_of
    from .storages import LiveStorages, uncounted

__all__: list[str] = []

__getattr__, __dir__ = names_on_first_use(__name__)

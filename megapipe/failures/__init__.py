"""One failure anywhere becomes one clear error everywhere."""

from .errors import PipelineError, check_failures
from .progress import Position
from .store import Meeting
from .watchdog import Watchdog

__all__ = [
    "Meeting",
    "PipelineError",
    "Position",
    "Watchdog",
    "check_failures",
]

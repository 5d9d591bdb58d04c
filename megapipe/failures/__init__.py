"""One failure anywhere becomes one clear error everywhere."""

from .agreement import Agreement
from .errors import PipelineError
from .mailbox import Mailbox
from .progress import Progress
from .store import InterruptibleStore
from .watchdog import Watchdog, check_failures, collective, single_rank_step
from .world import World

__all__ = [
    "Agreement",
    "InterruptibleStore",
    "Mailbox",
    "PipelineError",
    "Progress",
    "Watchdog",
    "World",
    "check_failures",
    "collective",
    "single_rank_step",
]

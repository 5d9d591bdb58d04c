"""One failure anywhere becomes one clear error everywhere."""

from .agreement import Agreement
from .board import Board, join_ranks
from .errors import PipelineError, is_disk_full
from .mailbox import Mailbox
from .progress import Progress
from .status import add_status_command
from .store import InterruptibleStore
from .timing import TIMING
from .watchdog import Watchdog, check_failures, collective, single_rank_step

__all__ = [
    "TIMING",
    "Agreement",
    "Board",
    "InterruptibleStore",
    "Mailbox",
    "PipelineError",
    "Progress",
    "Watchdog",
    "add_status_command",
    "check_failures",
    "collective",
    "is_disk_full",
    "join_ranks",
    "single_rank_step",
]

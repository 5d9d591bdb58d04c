"""One failure anywhere becomes one clear error everywhere."""

from typing import TYPE_CHECKING

from ..first_use import names_on_first_use

if TYPE_CHECKING:
    from .agreement import Agreement
    from .board import Board, join_ranks
    from .errors import PipelineError, is_disk_full, text_of
    from .mailbox import Mailbox
    from .positions import read_positions
    from .progress import Progress
    from .store import InterruptibleStore
    from .timing import TIMING
    from .watchdog import Watchdog, check_failures, collective, single_rank_step

__all__ = ["PipelineError"]

__getattr__, __dir__ = names_on_first_use(__name__)

"""Whether a schedule, a model or a trainer is right, and if not, what is wrong."""

from typing import TYPE_CHECKING

from ..first_use import names_on_first_use

if TYPE_CHECKING:
    from .local_ranks import RanksError
    from .proof import Difference, Proof
    from .proving import prove
    from .schedule_proof import ScheduleProof, prove_schedule
    from .sizes import Size, Sizes, check_sizes

__all__ = ["Difference", "Proof", "RanksError", "ScheduleProof", "prove", "prove_schedule"]

__getattr__, __dir__ = names_on_first_use(__name__)

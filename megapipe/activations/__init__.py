"""What a forward saves for its backward, where that is not simply kept: computed again, or moved to host memory."""

from typing import TYPE_CHECKING

from ..first_use import names_on_first_use

if TYPE_CHECKING:
    from .offload import Offload, storages_of
    from .replay import recomputing, regions_of
    from .saver import as_it_is, saving
    from .state import autocasts, noting_draws, restores_of, tensors_kept, undoing_changes

__all__: list[str] = []

__getattr__, __dir__ = names_on_first_use(__name__)

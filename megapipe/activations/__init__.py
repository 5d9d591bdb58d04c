"""What a forward saves for its backward, where that is not simply kept: computed again, or moved to host memory."""

from .offload import Offload, storages_of
from .regions import Region, regions_of
from .replay import Replay, random_generators, recomputing
from .saver import as_it_is, saving

__all__ = [
    "Offload",
    "Region",
    "Replay",
    "as_it_is",
    "random_generators",
    "recomputing",
    "regions_of",
    "saving",
    "storages_of",
]

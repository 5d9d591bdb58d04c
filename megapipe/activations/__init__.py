"""What a forward saves for its backward, where that is not simply kept: computed again."""

from .regions import Region, regions_of
from .replay import Replay, random_generators, recomputing, saving

__all__ = ["Region", "Replay", "random_generators", "recomputing", "regions_of", "saving"]

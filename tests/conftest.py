import atexit
import gc
from collections.abc import Iterator

import pytest
from tools.ranks import RankPool

gc.disable()  # what is imported stays


def pytest_collection_finish() -> None:
    gc.freeze()  # what is imported: else each collection looks at all of it
    gc.enable()
    gc.set_threshold(10_000, 20, 20)


# What is frozen when a process ends is a leak to torch 2.15. Not before, since pytest collects five times when it ends.
atexit.register(gc.unfreeze)


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Runs a function on several ranks: `ranks.run(4, function, ...)`. Side by side (`-n 3`), each pytest process
    has a pool of its own."""
    pool = RankPool()
    yield pool
    pool.stop()


@pytest.fixture(scope="session")
def eight_ranks() -> Iterator[RankPool]:
    """The same for the few tests that take more ranks."""
    pool = RankPool(8)
    yield pool
    pool.stop()

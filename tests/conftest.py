from collections.abc import Iterator

import pytest
from ranks import RankPool


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Side by side (`-n 2`), all tests with ranks share one pool, and the others run beside them."""
    for item in items:
        if "ranks" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("ranks"))


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Runs a function on several ranks: `ranks.run(4, function, ...)`."""
    pool = RankPool()
    yield pool
    pool.stop()

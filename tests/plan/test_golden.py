"""Plans are what they were: their actions, by hashes of all schedules, sizes and settings.

A schedule that is meant to change is written anew: `python tests/plan/test_golden.py`. The diff says which ones did.
"""

import itertools
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

import megapipe
from megapipe.plan import ScheduleError, Settings, find_schedule, make_plan

GOLDEN = Path(__file__).with_suffix(".txt")
ALL_SIZES = list(itertools.product((1, 2, 3, 5), (1, 2, 5, 8)))
SOME_SIZES = list(itertools.product((1, 3), (3, 12)))
SETTINGS: dict[str, Any] = {
    "plain": {},
    "recompute": {"settings": Settings(recompute=True)},
    "forwards": {"forward_only": True},
    "offload": {"settings": Settings(offload=1.0)},
    "offload and recompute": {"settings": Settings(recompute=True, offload=2.0, max_pending_weights=2)},
    "3 in flight": {"settings": Settings(max_in_flight=3.0)},
    "10 in flight": {"settings": Settings(max_in_flight=10.0)},
    "2 Ws pending": {"settings": Settings(min_pending_weights=2)},
    "1 W pending": {"settings": Settings(max_pending_weights=1)},
    "groups of 3": {"settings": Settings(microbatch_group_size=3)},
    "2 slices": {"num_slices": 2},
    "4 slices, recompute": {"num_slices": 4, "settings": Settings(recompute=True)},
}


def lines_of(name: str) -> Iterator[str]:
    """Settings that make the same plans of a schedule with so many chunks, and a hash for each number of ranks; "-"
    where all are refused."""
    found = find_schedule(name)
    for num_chunks in (found.num_chunks,) if found.num_chunks else (1, 3):
        alike: dict[str, list[str]] = {}
        for label, options in SETTINGS.items():
            sizes = ALL_SIZES if label == "plain" else SOME_SIZES
            alike.setdefault(hashes(name, num_chunks, sizes, options), []).append(label)
        for found_hashes, labels in alike.items():
            yield f"{name} x {num_chunks}: {', '.join(labels)}: {found_hashes}"


def hashes(name: str, num_chunks: int, sizes: list[tuple[int, int]], options: dict[str, Any]) -> str:
    cells: dict[int, list[str]] = {}
    for pp_size, m in sizes:
        try:
            found = str(make_plan(name, pp_size, m, num_chunks, **options).cells())
        except (ValueError, ScheduleError):
            found = ""
        cells.setdefault(pp_size, []).append(found)
    return " ".join(sha256("|".join(each).encode()).hexdigest()[:10] if any(each) else "-" for each in cells.values())


@pytest.mark.parametrize("name", megapipe.schedule_names())
def test_plans_are_what_they_were(name: str) -> None:
    kept = [line for line in GOLDEN.read_text().splitlines() if line.startswith(f"{name} x ")]
    assert list(lines_of(name)) == kept


if __name__ == "__main__":
    GOLDEN.write_text("".join(f"{line}\n" for name in megapipe.schedule_names() for line in lines_of(name)))

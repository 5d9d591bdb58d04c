"""The panel of a running job."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console
from tools.measured import as_measured
from tools.models import build, run
from tools.ranks import on_ranks

from megapipe import TimelineRecorder, parallel_state
from megapipe.analysis import LiveView, Timeline
from megapipe.analysis.live import panel_of
from megapipe.plan import make_plan


def printed(panel: object) -> str:
    console = Console(file=io.StringIO(), width=100)
    console.print(panel)
    return console.file.getvalue()


def test_what_the_panel_shows() -> None:
    """Steps of 150 ms that begin every 200: tokens per second count the time between them too."""
    simulation = make_plan("1f1b", 2, 4).simulate(10.0, 10.0, 10.0)
    timeline = Timeline("1f1b", [as_measured(simulation, start) for start in (0.0, 200.0, 400.0)])
    shown = printed(panel_of(timeline, [1.5, 2.25], 1000, 30, {"loss": "2.345"}))
    assert "1f1b: 2 ranks, 4 microbatches, step 30" in shown
    assert "step 150 ms   tokens/s 5,000   loss 2.345" in shown
    assert re.search(r"all +20\.0% +█{6} ", shown)
    assert re.search(r"the schedule's own +20\.0% ", shown)
    assert re.search(r" 0 +120 ms +30 ms +0 ms +1\.50 GiB +█{24} ", shown)
    assert re.search(r" 1 +120 ms +30 ms +0 ms +2\.25 GiB ", shown)
    assert "means of the last 3 steps" in shown


class Recorder(TimelineRecorder):
    """Has recorded steps of 150 ms that began every 200."""

    def gather(self, group: object = None) -> Timeline:
        simulation = make_plan("1f1b", 1, 4).simulate(25.0, 6.25, 6.25)
        return Timeline("1f1b", [as_measured(simulation, start) for start in (0.0, 200.0, 400.0)])


def test_it_is_drawn_each_second() -> None:
    """It was drawn at each line of the log only: in a run of 12 steps it showed the first one all the time."""
    live = LiveView(Recorder(), 64, Console(file=io.StringIO()))
    assert live.is_due(1)
    live.update(1)
    assert [step for step in range(1, 10) if live.is_due(step)] == [6, 7, 8, 9]


@on_ranks(2)
def test_the_first_rank_shows_all(rank: int) -> None:
    recorder = TimelineRecorder(num_steps=2)
    chunks = build("1f1b", 2, 4)
    for chunk in chunks:
        chunk.config.record_timeline = recorder
    console = Console(file=io.StringIO(), width=100)
    with LiveView(recorder, 64, console) as live:
        with pytest.raises(ValueError, match="no training step was recorded"):
            live.update(0)
        for step in (1, 2, 3):
            run("1f1b", chunks, 4)
            live.update(step)
        due = parallel_state.all_gather_json([step for step in range(4, 2000) if live.is_due(step)])
    assert due[0] == due[1]
    shown = console.file.getvalue()
    if rank > 0:
        assert shown == ""
    else:
        assert "1f1b: 2 ranks, 4 microbatches, step 3" in shown
        assert "means of the last 2 steps" in shown
        assert len(re.findall(r"GiB", shown)) == 2

"""Measured timelines: recorded on ranks, put on one clock, and split into what the idle time was for."""

from __future__ import annotations

import itertools
import json
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tools.measured import as_measured
from tools.models import build, run
from tools.ranks import RankPool, start_again

from megapipe import PipelineError, StageInfo, TimelineRecorder, distribute_layers
from megapipe.analysis import BubbleSplit, Timeline, load_timeline, split_bubble
from megapipe.analysis.recorder import align
from megapipe.analysis.timeline import measured_messages
from megapipe.plan import Action, Costs, RankStep, Span, make_plan, play
from megapipe.timing import StepRecord
from megapipe.timing.records import CudaClock

SCHEDULES = ["gpipe", "interleaved_1f1b"]


# Recording


def test_a_device_is_put_on_the_clock_of_the_host_by_its_fastest_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's clock was read after one wait for the device, late by as long as the host took to wake up: messages
    between ranks of one machine seemed to arrive before they were sent."""

    class Event:
        """Passed at once, 1 ms after the one before."""

        def __init__(self) -> None:
            self.event, self.time = self, float(next(numbers))

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, other: Event) -> float:
            return other.time - self.time

    numbers = itertools.count()
    clock = CudaClock(torch.device("cuda"))
    monkeypatch.setattr(clock, "now", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    record = StepRecord("1f1b", 1, clock)
    record.finish()
    late = iter([0.3, 0.2, 0.9, 0.05, *[0.5] * 6])  # milliseconds
    host = (0.001 * (100 + number + next(late)) for number in itertools.count(2))
    monkeypatch.setattr(time, "perf_counter", lambda: next(host))
    (step,) = clock.read([record])
    assert [step.begin, step.end] == pytest.approx([100.05, 101.05])


def record(rank: int, schedule: str, pp_size: int, m: int, folder: Path) -> Timeline:
    recorder = TimelineRecorder(num_steps=2)
    chunks = build(schedule, pp_size, 8)
    for chunk in chunks:
        chunk.config.record_timeline = recorder
    run(schedule, chunks, m + 1)  # forgotten: another plan
    for seed in range(3):
        run(schedule, chunks, m, seed=seed)
        run(schedule, chunks, m + 2, seed=seed, forward_only=True)  # left out: another plan
    return recorder.save(folder / "timeline.json")


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_is_recorded(ranks: RankPool, tmp_path: Path, schedule: str) -> None:
    timelines = ranks.run(3, record, schedule, 3, 5, tmp_path)
    timeline = load_timeline(tmp_path / "timeline.json")
    assert timeline is not None
    assert all(one.plan.actions == timeline.plan.actions for one in timelines)
    plan = make_plan(schedule, 3, 5)
    assert timeline.plan.actions == plan.actions
    assert timeline.plan.num_messages == plan.num_messages
    assert len(timeline.steps) == 2
    for step in timeline.steps:
        for rank, one in enumerate(step):
            times = [one.begin, *(time for span in one.spans for time in span[1:]), one.end]
            assert times == sorted(times)
            waited_for = [wait.action for wait in one.waits]
            needing = [
                event.action
                for event in plan.events[rank]
                if (needed := plan.needs(event)) is not None
                and (plan.rank_of(needed.stage) != rank or not needed.verb.endswith("forward"))
            ]
            assert waited_for == [*needing, None]
    check_split(timeline)


def check_split(timeline: Timeline) -> None:
    """The four parts of the bubble add up to what was measured, on every rank."""
    split = split_bubble(timeline)
    parts = zip(split.schedule, split.imbalance, split.jitter, split.host_overhead, split.communication)
    for rank, (schedule, imbalance, jitter, host, communication) in enumerate(parts):
        busy = sum(step[rank].busy for step in timeline.steps) / len(timeline.steps)
        assert schedule + imbalance + jitter + host + communication == pytest.approx(split.step_time - busy)
        assert schedule >= 0
        assert host >= -1e-3
        assert communication >= -1e-3


def record_alone(rank: int) -> Timeline:
    recorder = TimelineRecorder()
    (chunk,) = build("no_pipelining", 1, 2, record_timeline=recorder)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run("no_pipelining", [chunk], 2)
    assert {"0F0", "0B0", "0F1", "0B1"} <= {event.key for event in profile.key_averages()}
    return recorder.gather()


def test_a_pipeline_of_one_rank(ranks: RankPool) -> None:
    (timeline,) = ranks.run(1, record_alone)
    assert [str(span.action) for span in timeline.steps[0][0].spans] == ["0F0", "0B0", "0F1", "0B1"]
    split = split_bubble(timeline)
    assert split.schedule == split.communication == [0]
    assert split.host_overhead[0] > 0


def record_a_failure(rank: int) -> int:
    recorder = TimelineRecorder()
    chunks = build("1f1b", 2, 2, record_timeline=recorder)
    for num_microbatches in (2, 2):
        run("1f1b", chunks, num_microbatches)
    with pytest.raises((ValueError, PipelineError), match="data_iterator ended"):
        run("1f1b", chunks, 2, data_iterator=iter([]))
    start_again()
    chunks = build("1f1b", 2, 2, record_timeline=recorder)
    run("1f1b", chunks, 2)
    return len(recorder.gather().steps)


def test_a_step_that_failed_is_left_out(ranks: RankPool) -> None:
    assert ranks.run(2, record_a_failure) == [3, 3]


def test_wrong_use() -> None:
    with pytest.raises(ValueError, match="at least 1 step, got num_steps=0"):
        TimelineRecorder(0)
    with pytest.raises(ValueError, match="no training step was recorded"):
        TimelineRecorder().gather()


# Clocks


def record_on_another_host(rank: int) -> Timeline:
    """Every rank pretends to be on a host whose clock is 1000 s ahead of the rank before."""
    recorder = TimelineRecorder()
    recorder._clock.now = lambda: time.perf_counter() + 1000 * rank
    monkeypatch = pytest.MonkeyPatch()  # workers are lent to other tests afterwards
    monkeypatch.setattr("megapipe.analysis.recorder._clock_name", lambda: f"host {rank}")
    chunks = build("1f1b", 3, 3, record_timeline=recorder)
    for seed in range(4):
        run("1f1b", chunks, 6, seed=seed)
    timeline = recorder.gather()
    monkeypatch.undo()
    return timeline


def test_recorded_on_several_hosts(ranks: RankPool) -> None:
    for timeline in ranks.run(3, record_on_another_host):
        assert max(rank.end for step in timeline.steps for rank in step) < 1e5  # and not a million ms
        for step in timeline.steps:
            assert all(message.sent <= message.received for message in measured_messages(timeline.plan, step))
        check_split(timeline)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_clocks_of_other_hosts_are_brought_into_line(schedule: str) -> None:
    plan = make_plan(schedule, 4, 8)
    steps = [as_measured(plan.simulate(1.0, 1.2, 0.9, p2p=0.3), start) for start in (0.0, 50.0)]
    offsets = [0.0, 0.0, 1e6, -7e4]
    apart = [[rank.moved(offset) for rank, offset in zip(step, offsets)] for step in steps]
    assert align(plan, steps, ["a"] * 4) == steps
    together = align(plan, apart, ["a", "a", "b", "c"])
    for step, expected in zip(together, steps):
        for rank, other in zip(step, expected):
            assert rank.begin == pytest.approx(other.begin, abs=1e-6)
            assert rank.spans[3].start == pytest.approx(other.spans[3].start, abs=1e-6)


def test_clocks_where_messages_go_one_way() -> None:
    plan = make_plan("inference", 3, 4)
    steps = [as_measured(plan.simulate(1.0, p2p=0.3))]
    apart = [[rank.moved(1e5 * index) for index, rank in enumerate(steps[0])]]
    together = align(plan, apart, ["a", "b", "c"])
    for index, rank in enumerate(together[0]):
        assert rank.begin == pytest.approx(-0.3 * index, abs=1e-6)  # the latency is taken for nothing


# The bubble


def test_each_flaw_is_put_down_to_its_cause() -> None:
    plan = make_plan("1f1b", 4, 8)
    flawless = plan.simulate().makespan
    split = split_bubble(Timeline("1f1b", [as_measured(plan.simulate())]))
    assert split.schedule == pytest.approx([9.0] * 4)  # 3 (F + B)
    assert causes_of(split, "imbalance", "jitter", "host_overhead", "communication") == pytest.approx([0.0] * 16)
    slow_messages = split_bubble(Timeline("1f1b", [as_measured(plan.simulate(p2p=0.25))]))
    assert slow_messages.communication == pytest.approx([plan.simulate(p2p=0.25).makespan - flawless] * 4)
    assert causes_of(slow_messages, "imbalance", "jitter", "host_overhead") == pytest.approx([0.0] * 12)

    times = [1.0, 1.0, 1.0, 2.0]
    uneven = split_bubble(Timeline("1f1b", [as_measured(plan.simulate(times, times, times))]))
    assert sum(uneven.imbalance) > 4
    assert causes_of(uneven, "jitter", "host_overhead", "communication") == pytest.approx([0.0] * 12)

    busy_host = replace(plan.simulate(), spans=[[] for _ in range(4)])
    play(plan, lambda action: 1.0 if action.kind == "F" else 2.0, Costs(), [0.5] * 4, busy_host.spans, lambda _: 0.5)
    host = split_bubble(Timeline("1f1b", [as_measured(busy_host, pause=0.5)]))
    assert host.host_overhead == pytest.approx([busy_host.makespan - flawless] * 4)
    assert causes_of(host, "imbalance", "jitter", "communication") == pytest.approx([0.0] * 12)


def causes_of(split: BubbleSplit, *names: str) -> list[float]:
    return [time for name in names for time in getattr(split, name)]


def test_microbatches_that_vary_are_not_taken_for_uneven_stages() -> None:
    """Jitter was reported as uneven stages: users moved layers about between stages that were alike."""
    plan = make_plan("1f1b", 4, 8)
    simulation = plan.simulate()
    spans: list[list[Span]] = [[] for _ in range(4)]
    # On every stage one microbatch takes three times as long, each time another one.
    play(
        plan,
        lambda a: (2.0 if a.kind == "BW" else 1.0) * (3 if a.microbatch == a.stage else 1),
        Costs(),
        [0.0] * 4,
        spans,
    )
    split = split_bubble(Timeline("1f1b", [as_measured(replace(simulation, spans=spans))]))
    assert sum(split.jitter) > 4
    assert causes_of(split, "imbalance", "host_overhead", "communication") == pytest.approx([0.0] * 12)


def test_slices_that_take_longer_each_time_are_no_jitter() -> None:
    simulation = make_plan("seq1f1b", 2, 4, num_slices=2).simulate(slices=[1.0, 3.0])
    assert split_bubble(Timeline("seq1f1b", [as_measured(simulation)])).jitter == pytest.approx([0.0] * 2)


def test_ranks_that_begin_before_the_others_have_ended_their_step() -> None:
    """Without a barrier the last ranks begin a step while the first one is still in the step before."""
    plan = make_plan("1f1b", 4, 8)
    step = as_measured(plan.simulate(p2p=0.25))
    early = [step[0]]
    for rank, one in enumerate(step[1:], 1):
        first = one.waits[0]._replace(start=-float(rank))
        early.append(replace(one, begin=first.start, waits=[first, *one.waits[1:]]))
    assert split_bubble(Timeline("1f1b", [early])) == split_bubble(Timeline("1f1b", [step]))
    assert Timeline("1f1b", [early]).typical_step[1].waits == step[1].waits


def test_a_rank_that_begins_late_is_the_hosts() -> None:
    first, second = Action(0, "F", 0), Action(1, "F", 0)
    late = RankStep(1.5, 2.5, [Span(second, 1.5, 2.5)], [])
    split = split_bubble(Timeline("inference", [[RankStep(0.0, 1.0, [Span(first, 0.0, 1.0)], []), late]]))
    assert split.schedule == [1.0, 1.0]
    assert split.host_overhead == [0.5, 0.5]
    assert split.imbalance == split.jitter == split.communication == [0.0, 0.0]


def test_the_typical_step_is_of_median_length() -> None:
    steps = [as_measured(make_plan("1f1b", 2, 4).simulate(p2p=p2p), start=100.0) for p2p in (2.0, 0.0, 0.5)]
    typical = Timeline("1f1b", steps).typical_step
    assert [rank.spans for rank in typical] == make_plan("1f1b", 2, 4).simulate(p2p=0.5).spans


def test_costs_and_prediction() -> None:
    plan = make_plan("interleaved_1f1b", 2, 4)
    costs: dict[str, Any] = {"forward": [1.0, 2.0, 3.0, 4.0], "backward_input": [2.0] * 4, "backward_weight": [1.0] * 4}
    simulation = plan.simulate(**costs, p2p=0.125)
    timeline = Timeline(plan.name, [as_measured(simulation)])
    assert timeline.latency == pytest.approx(0.125)
    assert timeline.costs().forward == pytest.approx([1, 2, 3, 4])
    assert timeline.costs().backward_input == timeline.costs().backward_weight == pytest.approx([1.5] * 4)
    assert timeline.predict().makespan == pytest.approx(simulation.makespan)
    assert timeline.even_costs().forward == pytest.approx(5.0)


def test_costs_of_layers() -> None:
    simulation = make_plan("zb1p", 4, 6).simulate(*[[5.0, 3.0, 4.0, 7.0]] * 3)
    timeline = Timeline("zb1p", [as_measured(simulation)])
    with pytest.raises(ValueError, match=r"a layer takes 2 times as long on rank 2 as on rank 0: pass speeds=timeline"):
        timeline.layer_costs([2, 3, 2, 1])
    costs, embedding, head = timeline.layer_costs([2, 3, 2, 1], [1] * 4)
    mean = (9 + 12) / 5
    assert costs == pytest.approx([mean, mean, 3, 3, 3, 6, 6, mean])
    assert (embedding, head) == pytest.approx((15 - 2 * mean, 21 - mean))
    assert timeline.layer_costs([7, 3, 2, 1], [1] * 4)[1] == 0
    sizes = [len(distribute_layers(8, StageInfo(k, 4), embedding, head, costs=costs)) for k in range(4)]
    assert sizes == [1, 4, 3, 0]
    for num_layers in ([3, 5], [4, 0, 0, 4]):
        with pytest.raises(ValueError, match=r"num_layers must be 4 numbers, .* measure with at least 3 stages"):
            timeline.layer_costs(num_layers)


def test_slow_ranks_are_no_slow_layers() -> None:
    """Layers that are all alike were 7 to 13 ms on ranks that differ, and a head of 2 of them was one of 4."""
    stages = [[layers * 10 / 3 for layers in (6, 6, 6, 8)]] * 3
    timeline = Timeline("1f1b", [as_measured(make_plan("1f1b", 4, 8).simulate(*stages, speeds=[1, 1, 0.5, 0.5]))])
    speeds = timeline.speeds([6, 6, 6, 6])
    assert speeds == pytest.approx([1, 1, 0.5, 0.5])
    costs, embedding, head = timeline.layer_costs([6, 6, 6, 6], speeds)
    assert [*costs, embedding, head] == pytest.approx([10] * 24 + [0, 20], abs=1e-6)
    ends = (StageInfo(index, 4) for index in range(4))
    plan = make_plan("1f1b", 4, 8)
    sizes = [len(distribute_layers(24, end, embedding, head, costs=costs, plan=plan, speeds=speeds)) for end in ends]
    assert sizes == [9, 9, 4, 2]


# Files


STEP = {"begin": 0, "end": 2, "actions": [[0, "F", 0, 0, 1]], "waits": []}


def text_of(**changes: Any) -> str:
    return json.dumps({"timeline": "1f1b", "steps": [[{**STEP, **changes}]]})


DAMAGED = "does not hold a timeline as it was recorded"
UNREADABLE = {
    **{f'{{"timeline": "1f1b", "steps": {steps}}}': r"does not hold .*: record a new one\." for steps in (
        "3", "[]", "[[]]", "[[{}]]", '[[{"begin": 0, "end": 1, "actions": [[0, "Q", 0]]}]]',
    )},
    **{text_of(actions=[part]): DAMAGED for part in (
        [math.inf, "F", 0, 0, 1], [0.5, "F", 0, 0, 1], [0, "F", 0, 0, math.nan], [0, "F", 0, 0, 10**400], [],
        [0, "Q", 0, 0, 1], [0, "F", 0, 2, 1],
    )},
    **{text_of(pairs=pairs): DAMAGED for pairs in ([0], [-1], "0", 0)},
    text_of(actions=[[0, "F", 0, 1, 1]]): "holds a step that takes no time",
    '{"timeline": ' + "[" * 200_000: "is no JSON that can be read",
}  # fmt: skip


def test_files_that_are_no_timelines(tmp_path: Path) -> None:
    """A damaged timeline made the command fail with a traceback."""
    path = tmp_path / "timeline.json"
    make_plan("1f1b", 2, 2).save_json(path)
    assert load_timeline(path) is None
    path.write_text("0F0,0B0\n")
    assert load_timeline(path) is None
    path.write_text("\ufeff" + text_of(), encoding="utf-8")
    assert load_timeline(path) is not None
    Timeline("1f1b", [as_measured(make_plan("1f1b", 2, m).simulate()) for m in (2, 3)]).save(path)
    for text, message in {path.read_text(): "one and the same plan", **UNREADABLE}.items():
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            load_timeline(path)

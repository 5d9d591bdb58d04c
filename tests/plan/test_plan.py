"""Plans played through time, checked, saved and read back; and how they compare with torch.distributed.pipelining's."""

import random
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.pipelining.schedules as theirs
from tools.measured import as_measured
from tools.torchs import torch_order, torchs_schedule

from megapipe.analysis import load_timeline
from megapipe.analysis.recorder import merge
from megapipe.analysis.timeline_cells import kinds_in
from megapipe.plan import (
    Action,
    Event,
    Placement,
    Plan,
    Schedule,
    ScheduleError,
    Settings,
    StageBytes,
    Verbs,
    find_schedule,
    load_plan,
    make_plan,
    v_shape,
)

# Time


@pytest.mark.parametrize(("name", "sizes"), [("gpipe", (2, 1)), ("1f1b", (3, 4)), ("interleaved_1f1b", (4, 8))])
def test_what_holds_for_every_simulation(name: str, sizes: tuple[int, int]) -> None:
    simulation = make_plan(name, *sizes).simulate(1.0, 1.3, 0.8, p2p=0.1, message=0.05)
    assert simulation.makespan >= simulation.lower_bound - 1e-9
    for spans in simulation.spans:
        assert all(before.end <= after.start + 1e-9 for before, after in pairwise(spans))
    assert all(0 <= inner <= outer + 1e-9 for inner, outer in zip(simulation.inner_bubble, simulation.bubble))


def test_times_of_each_stage() -> None:
    simulation = make_plan("gpipe", 2, 3).simulate([1.0, 2.0], [1.0, 2.0], [1.0, 2.0])
    # Rank 1 is the slower one: it starts after one forward and is busy from then on; then one backward of rank 0.
    assert simulation.makespan == 1 + 3 * 2 + 3 * 4 + 2
    assert simulation.bubble == pytest.approx([1 - 9 / 21, 1 - 18 / 21])
    with pytest.raises(ValueError, match="one for each of the 2 stages, got 3"):
        make_plan("gpipe", 2, 3).simulate([1.0, 2.0, 3.0])


def test_times_of_each_microbatch() -> None:
    """The times of a plan are those of a microbatch of mean length: so one rank takes as long in all, and each of its
    actions its share."""
    lengths = [3.0, 1.0, 2.0, 6.0]
    plan = make_plan("1f1b", 1, 4)
    simulation = plan.simulate(microbatches=lengths)
    assert simulation.makespan == pytest.approx(12.0)
    assert (simulation.lower_bound, simulation.bubble) == (pytest.approx(12.0), pytest.approx([0]))
    spans = {action: end - start for action, start, end in simulation.spans[0]}
    assert [spans[action] for action in spans if action.kind == "F"] == pytest.approx([1.0, 1 / 3, 2 / 3, 2.0])
    for name in ("1f1b", "zbv", "interleaved_1f1b"):
        unequal = make_plan(name, 4, 4).simulate(microbatches=lengths)
        assert unequal.makespan >= unequal.lower_bound - 1e-9
        assert make_plan(name, 4, 4).simulate(microbatches=[5, 5, 5, 5]).makespan == pytest.approx(
            make_plan(name, 4, 4).simulate().makespan
        )
    with pytest.raises(ValueError, match="one relative time for each of the 4, got 3"):
        plan.simulate(microbatches=[1, 2, 3])
    with pytest.raises(ValueError, match="microbatches are relative times of which one at least is more than 0"):
        plan.simulate(microbatches=[0, 0, 0, 0])


def test_messages_take_latency_and_bandwidth() -> None:
    plan = make_plan("gpipe", 2, 4)
    assert plan.simulate(p2p=0.5).makespan == plan.simulate().makespan + 2 * 0.5
    assert make_plan("1f1b", 1, 4).simulate(p2p=0.5).makespan == 12  # between ranks only
    # A message as long as two forwards: the channel and not the rank is what the next rank waits for.
    spans = plan.simulate(1.0, message=2.0).spans
    assert [span.start for span in spans[1][:4]] == [3, 5, 7, 9]


def test_steps_overlap_unless_the_optimizer_waits_for_all() -> None:
    plan = make_plan("1f1b", 4, 8)
    alone = plan.simulate(optimizer=1.0)
    together = plan.simulate(optimizer=1.0, num_steps=5)
    assert len(together.step_ends) == 5
    assert together.step_time == pytest.approx(alone.makespan + 1)  # rank 0 begins and ends every step of 1F1B
    uneven = plan.simulate([1, 1, 1, 2], [1, 1, 1, 2], [1, 1, 1, 2], num_steps=5)
    waiting = plan.simulate([1, 1, 1, 2], [1, 1, 1, 2], [1, 1, 1, 2], num_steps=5, synchronize=True)
    assert uneven.step_time <= waiting.step_time
    inference = make_plan("inference", 4, 8)
    assert inference.simulate(num_steps=5).step_time == 8  # the parallelogram: no bubble at all
    assert inference.simulate(num_steps=5, synchronize=True).step_time == 11


# Files


@pytest.mark.parametrize("name", ["1f1b", "interleaved_1f1b"])
def test_plans_come_back_from_files(name: str, tmp_path: Path) -> None:
    plan = make_plan(name, 3, 4)
    for path, save in ((tmp_path / f"{name}.csv", plan.save_csv), (tmp_path / f"{name}.json", plan.save_json)):
        save(path)
        path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())  # a mark of the byte order is no part of a file
        loaded = load_plan(path)
        assert loaded.actions == plan.actions
        assert (loaded.name, loaded.num_chunks, loaded.num_microbatches) == (name, plan.num_chunks, 4)
        loaded.check()
        assert loaded.simulate().makespan == plan.simulate().makespan


def test_cells_of_older_torch(tmp_path: Path) -> None:
    """Torch 2.5 wrote `2BW0` for a whole backward, beside `2B0` for one whose W comes later. Its files were refused."""
    (path := tmp_path / "plan.csv").write_text("0F0,0F1,0BW0,0B1,0W1\n1F0,1BW0,1F1,1B1,1W1\n")
    plan = load_plan(path)
    plan.check()
    assert [[action.kind for action in row] for row in plan.actions] == [
        ["F", "F", "BW", "B", "W"],
        ["F", "BW", "F", "B", "W"],
    ]


def turn(rank: int, chunk: int, pp_size: int) -> int:
    return (rank + chunk) % pp_size


TURNED = Placement("turned", turn, lambda place, chunk, pp_size: (place - chunk) % pp_size)


def test_a_placement_of_ones_own_comes_back(tmp_path: Path) -> None:
    """A plan whose placement is neither a loop nor a V could not be loaded from its own file, and its timeline not be
    gathered at the end of a run: the placement was guessed, where the actions say it."""
    loops = find_schedule("looped_bfs").loops
    plan = make_plan(Schedule("mine", loops, TURNED, num_chunks=3), 4, 5)
    plan.save_json(tmp_path / "plan.json")
    plan.save_csv(tmp_path / "plan.csv")
    for name in ("plan.json", "plan.csv"):
        loaded = load_plan(tmp_path / name)
        loaded.check()
        assert loaded.actions == plan.actions
        assert [loaded.messages(rank) for rank in range(4)] == [plan.messages(rank) for rank in range(4)]
        assert loaded.simulate(p2p=0.1).makespan == plan.simulate(p2p=0.1).makespan
    load_plan(tmp_path / "plan.json").save_json(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_text() == (tmp_path / "plan.json").read_text()
    step = as_measured(plan.simulate(3.0, 3.0, 3.0))
    timeline = merge("mine", ["clock"] * len(step), [{1: rank} for rank in step])
    assert timeline.plan.num_messages == plan.num_messages
    timeline.save(tmp_path / "timeline.json")
    assert load_timeline(tmp_path / "timeline.json") == timeline


def test_a_placement_with_a_wrong_inverse() -> None:
    message = "the placement 'turned' is not its own inverse: on 3 ranks stage 4 is on rank 0 .*, but on rank 2"
    with pytest.raises(ValueError, match=message):
        make_plan(Schedule("mine", find_schedule("looped_bfs").loops, Placement("turned", turn), num_chunks=2), 3, 5)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("0F0,0X0\n1F0,1B0\n", "'0X0' is not an action like 2F0, 2B0 or 2W0"),
        ("0F\u00b2\n", "'0F\u00b2' is not an action"),
        ("0F" + "1" * 5000, "'0F1{38}' is not an action"),
        ("0F1234567890\n", "'0F1234567890' is not an action"),
        ("0F0,3F0\n1F0,5F0\n", r"the stages \[\[0, 3\], \[1, 5\]\] of the ranks are no placement: .* has 2 stages"),
        ("0F0,4F0\n1F0,5F0\n2F0,6F0\n", r"the stages \[\[0, 4\], \[1, 5\], \[2, 6\]\] of the ranks are no placement"),
        ("0F0," + "x" * 200_000, "'x{40}' is not an action"),
        (bytes(range(256)), "plan.csv is no text: .* can't decode byte 0x80"),
        ('{"name": "x", "actions": ' + "[" * 200_000, "plan.csv is no JSON that can be read"),
        ("0UNSHARD,0RECV_F1", "plan.csv holds no plan: none of its cells is an action"),
        ('{"name": "x"', "plan.csv is no JSON that can be read: Expecting"),
        (
            '{"name": "x", "pp_size": 4, "actions": [["0F0"]]}',
            "says that it has {'pp_size': 4, .*}, but its actions have {'pp_size': 1, .*}: it is not as it was saved",
        ),
        ("\n,\n", "it has no row of actions"),
        ('{"name": "", "actions": 3}', "it has no row of actions"),
        ('{"name": "", "actions": [[1]]}', "'1' is not an action like"),
        # Of plans that do not work
        ("0F0,0F1,0B0,0B1\n1F1,1F0,1B0,1B1\n", r"the microbatches \[0, 1\], but \[1, 0\] are received"),
        ("0F0,0F1,0B0,0B1\n1F0,1B0,1B1\n", r"the microbatches \[0, 1\], but \[0\] are received"),
        ("0F0,0F0.1,0B0.1,0B0\n1F0.1,1F0,1B0.1,1B0\n", r"microbatches \[0, 0.1\], but \[0.1, 0\] are received"),
        ("0F0,0F0,0B0\n", "recv_forward.0. more often than there are microbatches .1."),
        ("0F0,0F2,0B0,0B2\n", "0RECV_F2 on rank 0 where 0RECV_F1 is next"),
        ("0F0,0F1,0B0\n", "after 1 calls of recv_backward.0.; there are 2 microbatches"),
        ("0B0,0F0\n", "recv_backward.0. for microbatch 0 before send_forward.0."),
        ("0F0,0W0,0B0\n", "has no deferred weight gradient of that chunk"),
    ],
)
def test_files_without_a_plan_that_works(content: str | bytes, message: str, tmp_path: Path) -> None:
    """The check of plans trusted that a rank does everything once and a backward after its forward, which is so of
    schedules but not of files. Those without a plan raised whatever the reader stumbled over."""
    path = tmp_path / "plan.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=message):
        load_plan(path).check()


def test_sizes_that_are_no_whole_numbers() -> None:
    for sizes, message in (
        (("2", 3), "pp_size is a whole number, got '2', a str"),
        ((2, 3.0), "num_microbatches is a whole number, got 3.0, a float"),
        ((2, 3, 1.0), "num_chunks is a whole number, got 1.0, a float"),
    ):
        with pytest.raises(TypeError, match=message):
            make_plan("1f1b", *sizes)
    assert make_plan("1f1b", np.int64(2), torch.tensor(3)).sizes == make_plan("1f1b", 2, 3).sizes


# torch.distributed.pipelining


@pytest.mark.parametrize(("pp_size", "m"), [(2, 2), (3, 6)])
def test_same_orders_as_torch(pp_size: int, m: int) -> None:
    plan = make_plan("gpipe", pp_size, m)
    assert torch_order(torchs_schedule("ScheduleGPipe", pp_size, m)) == plan_order(plan)
    plan = make_plan("1f1b", pp_size, m)
    order = torch_order(torchs_schedule("Schedule1F1B", pp_size, m))
    assert order[:-1] == plan_order(plan)[:-1]
    # On the last rank torch 2.13 writes the forwards down as 1, 2, ..., m, one more than it runs: there is no
    # microbatch m. Its letters are ours.
    last = pp_size - 1
    assert order[-1] == [text for k in range(m) for text in (f"{last}F{k + 1}", f"{last}B{k}")]
    assert plan_order(plan)[-1] == [text for k in range(m) for text in (f"{last}F{k}", f"{last}B{k}")]
    plan = make_plan("interleaved_1f1b", pp_size, m, 2)
    assert torch_order(torchs_schedule("ScheduleInterleaved1F1B", pp_size, m)) == plan_order(plan)
    # torch's breadth-first schedule runs the backwards of a chunk from the last microbatch to the first. Both are
    # right; ours adds gradients up in the order of the microbatches, as every other schedule does.
    plan = make_plan("looped_bfs", pp_size, m, 2)
    order = torch_order(torchs_schedule("ScheduleLoopedBFS", pp_size, m))
    for ours, other in zip(plan_order(plan), order):
        assert ours[: 2 * m] == other[: 2 * m]
        assert [ours[2 * m + k] for k in range(m)] == other[2 * m : 3 * m][::-1]
        assert [ours[3 * m + k] for k in range(m)] == other[3 * m :][::-1]


@pytest.mark.parametrize(("pp_size", "m"), [(1, 2), (2, 3), (4, 7)])
def test_same_order_as_torchs_zbv(pp_size: int, m: int) -> None:
    """Every F and B at the same place. torch calls our B, the input's part, I; a W that it cannot fit into the loops it
    runs at the end chunk by chunk, as we do."""
    plan = make_plan("zbv", pp_size, m)
    order = torch_order(torchs_schedule("ScheduleZBVZeroBubble", pp_size, m))
    assert [[text.replace("B", "I") for text in rank] for rank in plan_order(plan)] == order


@pytest.mark.parametrize(("pp_size", "m"), [(1, 2), (2, 5), (4, 8)])
def test_same_order_as_torchs_dualpipev(pp_size: int, m: int) -> None:
    plan = make_plan("dualpipev", pp_size, m)
    schedule = torchs_schedule("ScheduleDualPipeV", pp_size, m)
    for ours, other in zip(plan.events, (schedule.pipeline_order[rank] for rank in range(pp_size))):
        pairs = [(str(e.action), str(nth_action(ours, i + 1))) for i, e in enumerate(ours) if is_pair(e)]
        assert pairs == [tuple(map(str, action.sub_actions)) for action in other if action.sub_actions]
        order = [str(part) for action in other for part in action.sub_actions or (action,)]
        actions = [event.action for event in ours if event.action is not None]
        assert order == [str(action._replace(kind="I") if action.kind == "B" else action) for action in actions]


def is_pair(event: Event) -> bool:
    return event.verb == "overlapped_forward_step"


def nth_action(events: list[Event], index: int) -> Action | None:
    return next(event.action for event in events[index:] if event.action is not None)


def plan_order(plan: Plan) -> list[list[str]]:
    return [[str(action) for action in rank] for rank in plan.actions]


def test_torch_reads_our_files(tmp_path: Path) -> None:
    plan = make_plan("looped_bfs", 2, 4, 2)
    plan.save_csv(tmp_path / "plan.csv")
    schedule = torchs_schedule("ScheduleInterleaved1F1B", 2, 4)
    theirs.PipelineScheduleMulti._load_csv(schedule, str(tmp_path / "plan.csv"))
    assert torch_order(schedule) == plan_order(plan)


def test_bounds_of_overlapped_pairs() -> None:
    """A pair's chunks were taken for the same one in the lower bound, which came out above the step itself."""
    uneven = make_plan("dualpipev", 1, 8).simulate([10, 1], [0.5, 5], [0.5, 5], exchange=[0.5, 1])
    assert uneven.lower_bound <= uneven.makespan
    draw = random.Random(0)
    for pp_size, m in ((2, 5), (4, 8)):
        for _ in range(4):
            times = ([draw.uniform(0.3, 2.0) for _ in range(2 * pp_size)] for _ in range(3))
            simulation = make_plan("dualpipev", pp_size, m).simulate(*times, p2p=0.1, exchange=0.6 * draw.random())
            assert simulation.lower_bound <= simulation.makespan + 1e-9


def test_a_limit_in_flight_that_fits_exactly() -> None:
    """A chunk's share of a microbatch is a third, and forty-eight of those add up to a little more than sixteen."""
    assert make_plan("looped_bfs", 2, 16, 3, settings=Settings(max_in_flight=16.0)).num_microbatches == 16


def receives_too_early(pipe: Verbs) -> None:
    pipe.recv_forward(0)
    pipe.recv_forward(1)
    pipe.forward_step(0)
    pipe.send_forward(0)
    pipe.forward_step(1)
    pipe.send_forward(1)
    return pipe.finish()


def test_a_receive_from_the_same_rank_before_its_send() -> None:
    """A rank hands tensors to itself, and cannot take what it has not made. The check of plans let that pass, and an
    assertion failed in the step."""
    early = Schedule("early", receives_too_early, v_shape, 2, forward_only=True)
    with pytest.raises(ScheduleError, match="takes 1RECV_F0 on rank 0 before 0SEND_F0, which is on the same rank"):
        make_plan(early, 1, 1).check()


def test_times_that_cannot_be() -> None:
    """Where nothing takes any time, the bubble was a division by zero. Negative times, and those that are no numbers,
    were simulated without a word, to bubbles above 100% and steps shorter than nothing."""
    plan = make_plan("1f1b", 2, 3)
    nothing = plan.simulate(0.0, 0.0, 0.0)
    assert nothing.bubble == nothing.inner_bubble == [0.0, 0.0]
    for name, value in (("forward", -1.0), ("p2p", float("nan")), ("backward_weight", [1.0, float("inf")])):
        with pytest.raises(ValueError, match=f"{name} must be a finite number from 0 on"):
            plan.simulate(**{name: value})
    with pytest.raises(ValueError, match="num_steps must be at least 1, got 0"):
        plan.simulate(num_steps=0)


def test_numbers_of_numpy() -> None:
    """Times as NumPy's float32 were "not iterable", and bytes of its integers had "no len()"."""
    found, wanted = (
        make_plan("zbv", 2, 3).simulate(kind(2), [kind(1)] * 4, memory=StageBytes(saved=kind(8)))
        for kind in (np.float32, float)
    )
    assert (found.spans, found.peak_bytes) == (wanted.spans, wanted.peak_bytes)


@pytest.mark.parametrize("name", ["combined_1f1b", "dualpipev"])
def test_forwards_of_pairs_are_no_pairs(name: str) -> None:
    """A step of forwards only, of a schedule with pairs, was written down with halves of pairs, and each was taken for
    the partner of the next. Such plans of dualpipev's calls were said to hang."""
    schedule = find_schedule(make_plan(name, 2, 6))
    plan = make_plan(schedule, 2, 6, forward_only=True)
    assert not any(plan.program.pairs)
    plan.check()


def test_settings_of_each_stage_in_a_list() -> None:
    """Any list was true: all stages were computed again, also those for which it said False."""
    plan = make_plan("1f1b", 2, 4, settings=Settings(recompute=[False, True]))  # type: ignore[arg-type]
    assert plan == make_plan("1f1b", 2, 4, settings=Settings(recompute=(False, True)))
    assert not any(plan.recomputed)


def test_weights_of_one_rank_alone(tmp_path: Path) -> None:
    """Only the first rank was looked at: no W was said to be there, nor was it in legends."""
    (path := tmp_path / "plan.txt").write_text("0F0 0B0\n1F0 1B0 1W0\n")
    plan = load_plan(path)
    assert plan.splits_backward
    assert [kind.name for kind in kinds_in(plan)] == ["F", "BW", "B", "W"]

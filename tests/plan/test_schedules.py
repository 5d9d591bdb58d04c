"""Every schedule against its picture, and every plan against what must hold for all of them.

In the pictures a row is a rank, a column a unit of time; a forward takes one unit, a backward two, as in the papers.
"""

import inspect
import itertools
import pydoc
import re
import textwrap
from typing import Any

import pytest

import megapipe
from megapipe.analysis import as_text
from megapipe.plan import Schedule, ScheduleError, Settings, Verbs, find_schedule, loop, make_plan
from megapipe.plan.recorder import PlanRecorder

PICTURES = {
    "no_pipelining": (
        (1, 3),
        """
        0F0 0B0 0B0 0F1 0B1 0B1 0F2 0B2 0B2
        """,
    ),
    "inference": (
        (3, 5),
        """
        0F0 0F1 0F2 0F3 0F4 .   .
        .   1F0 1F1 1F2 1F3 1F4 .
        .   .   2F0 2F1 2F2 2F3 2F4
        """,
    ),
    "gpipe": (
        (3, 4),
        """
        0F0 0F1 0F2 0F3 .   .   .   .   .   .   0B0 0B0 0B1 0B1 0B2 0B2 0B3 0B3
        .   1F0 1F1 1F2 1F3 .   .   .   1B0 1B0 1B1 1B1 1B2 1B2 1B3 1B3 .   .
        .   .   2F0 2F1 2F2 2F3 2B0 2B0 2B1 2B1 2B2 2B2 2B3 2B3 .   .   .   .
        """,
    ),
    "1f1b": (
        (4, 6),
        """
        0F0 0F1 0F2 0F3 .   .   .   .   .   .   0B0 0B0 0F4 0B1 0B1 0F5 0B2 0B2 .   0B3 0B3 .   0B4 0B4 .   0B5 0B5
        .   1F0 1F1 1F2 .   .   .   .   1B0 1B0 1F3 1B1 1B1 1F4 1B2 1B2 1F5 1B3 1B3 .   1B4 1B4 .   1B5 1B5 .   .
        .   .   2F0 2F1 .   .   2B0 2B0 2F2 2B1 2B1 2F3 2B2 2B2 2F4 2B3 2B3 2F5 2B4 2B4 .   2B5 2B5 .   .   .   .
        .   .   .   3F0 3B0 3B0 3F1 3B1 3B1 3F2 3B2 3B2 3F3 3B3 3B3 3F4 3B4 3B4 3F5 3B5 3B5 .   .   .   .   .   .
        """,
    ),
    "looped_bfs": (
        (3, 3),
        """
        0F0 0F1 0F2 3F0 3F1 3F2 .   .   .   .   .   .   3B0 3B0 3B1 3B1 3B2 3B2 0B0 0B0 0B1 0B1 0B2 0B2
        .   1F0 1F1 1F2 4F0 4F1 4F2 .   .   .   4B0 4B0 4B1 4B1 4B2 4B2 1B0 1B0 1B1 1B1 1B2 1B2 .   .
        .   .   2F0 2F1 2F2 5F0 5F1 5F2 5B0 5B0 5B1 5B1 5B2 5B2 2B0 2B0 2B1 2B1 2B2 2B2 .   .   .   .
        """,
    ),
    "interleaved_1f1b": (
        (2, 4),
        """
        0F0 0F1 2F0 2F1 0F2 .   2B0 2B0 0F3 2B1 2B1 2F2 0B0 0B0 2F3 0B1 0B1 .   2B2 2B2 .   2B3 2B3 0B2 0B2 0B3 0B3
        .   1F0 1F1 3F0 3B0 3B0 3F1 3B1 3B1 1F2 1B0 1B0 1F3 1B1 1B1 3F2 3B2 3B2 3F3 3B3 3B3 1B2 1B2 1B3 1B3 .   .
        """,
    ),
    "zb1p": (
        (3, 4),
        """
        0F0 0F1 0F2 .   .   0B0 0W0 0F3 0B1 0W1 0B2 0W2 0B3 0W3
        .   1F0 1F1 .   1B0 1F2 1B1 1W0 1F3 1B2 1W1 1B3 1W2 1W3
        .   .   2F0 2B0 2F1 2B1 2F2 2B2 2W0 2F3 2B3 2W1 2W2 2W3
        """,
    ),
    "zb2p": (
        (3, 6),
        """
        0F0 0F1 0F2 0F3 0F4 0B0 0W0 0F5 0B1 0W1 0B2 0W2 0B3 0W3 0B4 0W4 0B5 0W5 .   .
        .   1F0 1F1 1F2 1B0 1F3 1B1 1F4 1B2 1W0 1F5 1B3 1W1 1B4 1W2 1B5 1W3 1W4 1W5 .
        .   .   2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 2F4 2B4 2W0 2F5 2B5 2W1 2W2 2W3 2W4 2W5
        """,
    ),
    "interleaved_zb1p": (
        (2, 4),
        """
        0F0 0F1 2F0 2F1 0F2 2B0 2W0 0F3 2B1 2W1 2F2 0B0 0W0 2F3 0B1 0W1 2B2 2W2 .   2B3 2W3 0B2 0W2 0B3 0W3
        .   1F0 1F1 3F0 3B0 3F1 3B1 3W0 1F2 1B0 3W1 1F3 1B1 1W0 3F2 3B2 1W1 3F3 3B3 3W2 1B2 3W3 1B3 1W2 1W3
        """,
    ),
    "zbv": (
        (2, 4),
        """
        0F0 0F1 0F2 3F0 3B0 3W0 3F1 3B1 3W1 0F3 0B0 0W0 3F2 3B2 3W2 0B1 0W1 3F3 3B3 3W3 0B2 0W2 0B3 0W3 .
        .   1F0 2F0 1F1 2F1 2B0 2W0 1F2 1B0 1W0 2F2 2B1 2W1 1F3 1B1 1W1 2F3 2B2 2W2 1B2 2B3 1B3 1W2 2W3 1W3
        """,
    ),
    "v_half": (
        (3, 4),
        """
        0F0 0F1 .   .   .   5F0 5B0 5W0 0F2 .   5F1 5B1 0B0 5W1 0F3 0W0 5F2 5B2 0B1 5W2 0W1 .   5F3 5B3 0B2 5W3 0W2 .   0B3 0W3
        .   1F0 .   .   4F0 1F1 .   4B0 4W0 4F1 1F2 1B0 1W0 4B1 4W1 4F2 1F3 1B1 1W1 4B2 4W2 4F3 1B2 1W2 4B3 4W3 .   1B3 1W3 .
        .   .   2F0 3F0 .   .   2F1 3F1 3B0 2B0 3W0 2F2 2W0 3F2 3B1 2B1 3W1 2F3 2W1 3F3 3B2 2B2 3W2 2W2 .   3B3 2B3 3W3 2W3 .
        """,  # noqa: E501
    ),
    "v_min": (
        (2, 4),
        """
        0F0 .   .   3F0 3B0 3W0 0F1 0B0 0W0 3F1 3B1 3W1 0F2 0B1 0W1 3F2 3B2 3W2 0F3 0B2 0W2 3F3 3B3 3W3 .   0B3 0W3
        .   1F0 2F0 .   .   2B0 1B0 1F1 2F1 2W0 1W0 2B1 1B1 1F2 2F2 2W1 1W1 2B2 1B2 1F3 2F3 2W2 1W2 2B3 1B3 2W3 1W3
        """,
    ),
    "combined_1f1b": (
        (2, 4),
        """
        0F0 0F1 2F0 2F1 0F2 0F3 .   2B0 2B0 2F2 2B1 2B1 2F3 0B0 0B0 .   0B1 0B1 .   2B2 2B2 2B3 2B3 0B2 0B2 0B3 0B3
        .   1F0 1F1 3F0 3F1 3B0 3B0 1F2 3B1 3B1 1F3 1B0 1B0 3F2 1B1 1B1 3F3 3B2 3B2 3B3 3B3 1B2 1B2 1B3 1B3 .   .
        """,
    ),
    "combined_zb1p": (
        (2, 4),
        """
        0F0 0F1 2F0 2F1 0F2 0F3 2B0 2W0 2F2 2B1 2W1 2F3 0B0 0W0 0B1 0W1 .   2B2 2W2 2B3 2W3 0B2 0W2 0B3 0W3
        .   1F0 1F1 3F0 3F1 3B0 1F2 3B1 3W0 1F3 1B0 3W1 3F2 1B1 1W0 3F3 3B2 1W1 3B3 3W2 1B2 3W3 1B3 1W2 1W3
        """,
    ),
    "dualpipev": (
        (2, 4),
        """
        0F0 0F1 0F2 3F0 3B0 3W0 3F1 0F3 3B1 3B1 3F2 0B0 0B0 3B2 3B2 3F3 .   0B1 0B1 3B3 3B3 0B2 0W2 0B3 0W3
        .   1F0 2F0 1F1 2F1 1F2 2B0 2B0 2F2 1B0 1B0 1F3 2B1 2B1 2F3 1B1 1B1 2B2 2B2 1B2 1B2 2B3 1B3 2W3 1W3
        """,
    ),
    "seq1f1b with two slices": (
        (3, 3),
        """
        0F0   0F0.1 0F1   0F1.1 .     .     .     .     0B0.1 0B0.1 0F2   0B0   0B0   0F2.1 0B1.1 0B1.1 .     0B1   0B1   .     0B2.1 0B2.1 0B2   0B2
        .     1F0   1F0.1 1F1   .     .     1B0.1 1B0.1 1F1.1 1B0   1B0   1F2   1B1.1 1B1.1 1F2.1 1B1   1B1   .     1B2.1 1B2.1 1B2   1B2   .     .
        .     .     2F0   2F0.1 2B0.1 2B0.1 2F1   2B0   2B0   2F1.1 2B1.1 2B1.1 2F2   2B1   2B1   2F2.1 2B2.1 2B2.1 2B2   2B2   .     .     .     .
        """,  # noqa: E501
    ),
    "seq_interleaved_1f1b with two slices": (
        (2, 3),
        """
        0F0   0F0.1 2F0   2F0.1 0F1   0F1.1 .     2B0.1 2B0.1 2F1   2B0   2B0   2F1.1 0B0.1 0B0.1 0F2   0B0   0B0   0F2.1 2B1.1 2B1.1 2F2   2B1   2B1   2F2.1 0B1.1 0B1.1 .     0B1   0B1   .     2B2.1 2B2.1 2B2   2B2   0B2.1 0B2.1 0B2   0B2
        .     1F0   1F0.1 3F0   3F0.1 3B0.1 3B0.1 1F1   3B0   3B0   1F1.1 1B0.1 1B0.1 3F1   1B0   1B0   3F1.1 3B1.1 3B1.1 1F2   3B1   3B1   1F2.1 1B1.1 1B1.1 3F2   1B1   1B1   3F2.1 3B2.1 3B2.1 3B2   3B2   1B2.1 1B2.1 1B2   1B2   .     .
        """,  # noqa: E501
    ),
    "seq_zb1p with two slices": (
        (3, 3),
        """
        0F0   0F0.1 0F1   0F1.1 .     .     0B0.1 0W0.1 0F2   0B0   0W0   0F2.1 0B1.1 0W1.1 0B1   0W1   0B2.1 0W2.1 0B2   0W2
        .     1F0   1F0.1 1F1   .     1B0.1 1F1.1 1B0   1W0.1 1F2   1B1.1 1W0   1F2.1 1B1   1W1.1 1B2.1 1W1   1B2   1W2.1 1W2
        .     .     2F0   2F0.1 2B0.1 2F1   2B0   2F1.1 2B1.1 2W0.1 2F2   2B1   2W0   2F2.1 2B2.1 2W1.1 2B2   2W1   2W2.1 2W2
        """,  # noqa: E501
    ),
}

# Schedules that leave the number of chunks open are tried with these.
CHUNKS: dict[str, list[int]] = {
    "inference": [1, 2, 3],
    "looped_bfs": [1, 2, 3],
    "interleaved_1f1b": [1, 2, 3, 4],
    "interleaved_zb1p": [1, 2, 3, 4],
    "combined_1f1b": [2, 3, 4],
    "combined_zb1p": [2, 3, 4],
}
# Those that cut sequences have the plans of others with one slice: test_slices.py tries them with several.
SLICED = [name for name in megapipe.schedule_names() if find_schedule(name).slices]
PIPELINED = [name for name in megapipe.schedule_names() if name not in ("no_pipelining", *SLICED)]
SOME_SIZES = [*itertools.product((1, 2, 3), (1, 2, 3, 5)), (5, 8), (8, 13)]
ALL_SIZES = [*itertools.product(range(1, 9), (*range(1, 9), 13, 16, 31, 32))]


@pytest.mark.parametrize("name", PICTURES)
def test_picture(name: str) -> None:
    sizes, picture = PICTURES[name]
    num_slices = 2 if "slices" in name else 1
    assert as_text(make_plan(name.split()[0], *sizes, num_slices=num_slices)) == textwrap.dedent(picture).strip()


def test_every_schedule_has_a_picture() -> None:
    assert {name.split()[0] for name in PICTURES} == set(megapipe.schedule_names())


@pytest.mark.parametrize(
    "sizes", [SOME_SIZES, pytest.param(ALL_SIZES, marks=pytest.mark.soak)], ids=["some sizes", "all sizes"]
)
@pytest.mark.parametrize("name", PIPELINED)
def test_no_plan_hangs(name: str, sizes: list[tuple[int, int]]) -> None:
    """Nor does one lack anything: `check` goes through the calls of each rank again."""
    for num_chunks, (pp_size, num_microbatches) in itertools.product(CHUNKS.get(name, [None]), sizes):
        make_plan(name, pp_size, num_microbatches, num_chunks).check()


@pytest.mark.parametrize("name", PIPELINED)
def test_plans_that_recompute(name: str) -> None:
    """A B has an R, unless it follows its F at once, alone or in a pair with another F; and no more than one W is
    pending."""
    for pp_size, num_microbatches in SOME_SIZES:
        plan = make_plan(name, pp_size, num_microbatches, settings=Settings(recompute=True))
        plan.check()
        for row in plan.actions if not plan.forward_only else ():
            actions, num_pending = list(row), 0
            for at, action in enumerate(actions):
                if action.kind in ("B", "BW"):
                    forward, again = (action._replace(kind=kind) for kind in ("F", "R"))
                    assert (again in actions[:at]) != (forward in actions[max(0, at - 2) : at])
                num_pending += {"B": 1, "W": -1}.get(action.kind, 0)
                assert num_pending <= 1 + (action.kind == "B")


def test_validation_sends_forwards_in_the_order_of_training() -> None:
    for name in PIPELINED:
        for pp_size, m in ((2, 3), (4, 6)):
            plan = make_plan(name, pp_size, m)
            schedule = find_schedule(name)
            for rank in range(pp_size):
                recorder = PlanRecorder(plan.placement, rank, pp_size, m, plan.num_chunks, forward_only=True)
                schedule.loops(recorder)
                sends = [event for event in plan.events[rank] if event.verb == "send_forward"]
                assert [event for event in recorder.events if event.verb == "send_forward"] == sends


def test_groups_of_any_size() -> None:
    """Megatron's formula: warmup and one more are in flight."""
    for pp_size, num_chunks in ((2, 4), (3, 3)):
        for group_size in (pp_size + 1, 2 * pp_size):
            plan = make_plan("interleaved_1f1b", pp_size, 2 * group_size, num_chunks, settings=Settings(group_size))
            peaks = [2 * (pp_size - rank - 1) + (num_chunks - 1) * group_size + 1 for rank in range(pp_size)]
            assert [plan.peak_in_flight(rank) for rank in range(pp_size)] == peaks


def test_every_number_of_microbatches_interleaves() -> None:
    """Also those that Megatron refuses, whose last group is smaller than the pipeline."""
    for pp_size, num_chunks in ((2, 2), (3, 3)):
        for group_size in (pp_size, pp_size + 1):
            for m in range(1, 2 * group_size):
                make_plan("interleaved_1f1b", pp_size, m, num_chunks, settings=Settings(group_size)).check()
    with pytest.raises(ValueError, match="must be at least the 4 ranks of the pipeline, got 3"):
        make_plan("interleaved_1f1b", 4, 8, 2, settings=Settings(3))


# Schedules that are wrong


def no_weights(pipe: Verbs) -> None:
    for _ in range(pipe.num_microbatches):
        pipe.recv_forward()
        pipe.forward_step()
        pipe.send_forward()
        pipe.recv_backward()
        pipe.backward_input_step()
        pipe.send_backward()
    return pipe.finish()


def no_finish(pipe: Verbs) -> None:
    """Plans and their check took it, and training refused it at the end of its first step."""
    for _ in range(pipe.num_microbatches):
        megapipe.schedules.F(pipe)
        megapipe.schedules.BW(pipe)


@pytest.mark.parametrize(
    ("loops", "text"),
    [
        (no_finish, "rank 0 did not end its step with `return pipe.finish()`."),
        (no_weights, "rank 0 ended its step without the Ws of 2 microbatches of chunk 0."),
    ],
)
def test_a_schedule_that_is_wrong_in_itself_is_refused(loops: Any, text: str) -> None:
    """test_plan.py has those that a file can have, too."""
    with pytest.raises(ScheduleError, match=re.escape(text)):
        make_plan(Schedule("mine", loops, loop), 2, 2)


# Finding a schedule


def test_unknown_schedule() -> None:
    for name, meant in (
        ("1f2b", "1f1b"),
        ("ScheduleGPipe", "gpipe"),
        ("InterleavedZeroBubble", "interleaved_zb1p"),
        ("zero_bubble", "zb1p"),
        ("interleaved", "interleaved_1f1b"),
    ):
        with pytest.raises(
            ValueError, match=rf"no schedule '{name}' \(do you mean '{meant}'\?\); choose one of no_pipe"
        ):
            find_schedule(name)
    with pytest.raises(TypeError, match="by its name, as a plan, or by the path of one's file, got None"):
        find_schedule(None)
    with pytest.raises(ValueError, match=r"no schedule '1f2b'"):
        megapipe.get_forward_backward_func("1f2b")


def test_impossible_sizes() -> None:
    with pytest.raises(ValueError, match="no_pipelining runs on 1 pipeline rank, got 2"):
        make_plan("no_pipelining", 2, 4)
    with pytest.raises(ValueError, match="1f1b runs 1 chunk"):
        make_plan("1f1b", 2, 4, 2)
    with pytest.raises(ValueError, match="at least 1 rank and 1 microbatch, got 2 and 0"):
        make_plan("1f1b", 2, 0)


def test_megatrons_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    get = megapipe.get_forward_backward_func
    assert get() is megapipe.schedules.forward_backward_no_pipelining
    assert get(pp_size=4) is megapipe.schedules.forward_backward_pipelining_without_interleaving
    assert get(pp_size=1, vp_size=2) is megapipe.schedules.forward_backward_no_pipelining
    # As Megatron's trainers call it: (pp_size, vp_size), and from 0.19 on with the groups.
    assert get(4, 2) is megapipe.schedules.forward_backward_pipelining_with_interleaving
    assert get(4, None, None) is megapipe.schedules.forward_backward_pipelining_without_interleaving
    assert get(None, 2) is megapipe.schedules.forward_backward_no_pipelining
    assert get(schedule_pg_collection=object()) is megapipe.schedules.forward_backward_no_pipelining
    with pytest.raises(TypeError, match="pp_size is given twice, as 4 and as 2"):
        get(4, pp_size=2)
    monkeypatch.setenv("MEGAPIPE_SCHEDULE", "gpipe")
    assert get() is get("gpipe")
    for text in ("GPipe", "Every rank of the pipeline calls it alike", "forward_only: no gradients"):
        assert text in pydoc.render_doc(get("gpipe"))
    assert list(inspect.signature(get("gpipe")).parameters)[:2] == ["forward_step_func", "data_iterator"]


def test_the_name_of_a_schedule_of_megapipes_is_refused() -> None:
    """A schedule of one's own took the name, and every later look for zbv, also by plans, found that one."""
    with pytest.raises(ValueError, match="'zbv' is the name of a schedule of megapipe's: give yours another one"):
        megapipe.schedule("zbv", placement=loop)(lambda pipe: pipe.finish())
    assert find_schedule("zbv").placement.name == "v"

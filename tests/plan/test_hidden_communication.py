"""Communication within stages, as plans hide it."""

import pytest

from megapipe.plan import Settings, make_plan, plan_of
from megapipe.plan.verbs import Action

COMPUTE, EXCHANGE = 1.0, 0.6  # of F, B and W, and of F and B: three eighths of an F are communication


def step(name: str, pp_size: int, num_microbatches: int, num_chunks: int | None, hides: bool) -> float:
    """In microbatches of pure computation."""
    plan = make_plan(name, pp_size, num_microbatches, num_chunks)
    whole = COMPUTE + EXCHANGE
    makespan = plan.simulate(whole, whole, COMPUTE, exchange=EXCHANGE if hides else 0.0).makespan
    return makespan / num_microbatches / 3 / COMPUTE


def test_a_pair_ends_as_a_whole() -> None:
    """By hand, on two ranks. Rank 0 runs F0, F1 and the pair F2B0, whose exchanges are hidden: its output leaves with
    the gradient when both are done. It left in the middle of the pair, sooner than a model that runs it can send it."""
    rows = [["0F0", "0F1", "0F2", "0B0", "0B1", "0B2"], ["1F0", "1B0", "1F1", "1B1", "1F2", "1B2"]]
    actions = [[Action(int(a[0]), "F" if a[1] == "F" else "BW", int(a[2])) for a in row] for row in rows]
    plan = plan_of("mine", actions, [[2], []])
    plan.check()
    simulation = plan.simulate(1.5, 1.5, 1.0, exchange=0.5)
    spans = [{str(span.action): (span.start, span.end) for span in rank} for rank in simulation.spans]
    # A whole backward alone takes F's 1.5, and 1 less the quarter that its Ws hide; its gradient leaves before its Ws.
    assert spans[1]["1B0"] == pytest.approx((3.0, 5.25))
    assert spans[0]["0F2"][0] == pytest.approx(4.5)
    assert spans[0]["0B0"][1] == pytest.approx(7.5)  # 1 + 1 + 1
    assert spans[1]["1F2"][0] == pytest.approx(9.0)  # after 1B1; its input came at 6.5, when the pair's Ws began
    assert spans[1]["1F1"][0] == pytest.approx(5.25)


@pytest.mark.parametrize(
    ("name", "pp_size", "num_chunks", "of_without"),
    [
        ("dualpipev", 4, None, (0.862, 0.791)),
        ("combined_1f1b", 4, 2, (0.778, 0.749)),
        ("combined_1f1b", 4, 4, (0.798, 0.758)),
        ("combined_1f1b", 1, 1, (0.741, 0.728)),
    ],
)
def test_no_step_of_pairs_is_shorter_than_this(
    name: str, pp_size: int, num_chunks: int | None, of_without: tuple[float, ...]
) -> None:
    """Against the same without overlap, at 8 and 16 microbatches: as a simulation of messages within actions had
    it, written apart from this one. It did not know that Ws fill windows of dualpipev, for half a percent."""
    without = {"dualpipev": "dualpipev"}.get(name, "interleaved_1f1b" if pp_size > 1 else "no_pipelining")
    for m, expected in zip((8, 16), of_without):
        ratio = step(name, pp_size, m, num_chunks, True) / step(without, pp_size, m, num_chunks, False)
        assert ratio == pytest.approx(expected, abs=0.0006)


def test_exchanges_are_a_part_of_an_action() -> None:
    plan = make_plan("dualpipev", 2, 4)
    with pytest.raises(ValueError, match=r"exchange is a part of backward_input, got 0.6 of 0.5"):
        plan.simulate(2.0, 1.0, exchange=1.2)


def test_weights_of_one_chunk_hide_exchanges_of_another() -> None:
    """The bound had each chunk's hidden by its own Ws only: a step was said to be shorter than possible."""
    plan = make_plan("v_half", 1, 4, settings=Settings(min_pending_weights=5))
    simulation = plan.simulate([0.36, 0.36], [0.32, 0.32], [2.6, 0.0], exchange=[0.2, 0.2])
    assert simulation.lower_bound <= simulation.makespan


def test_pending_weights_hide_exchanges() -> None:
    """By hand, on one rank. F0 has nothing to run meanwhile. B0 runs a part of its own W, in half of its window. F1 and
    B1 run the rest of that W, and then B1 a part of its own."""
    actions = [Action(0, kind, m) for kind, m in (("F", 0), ("B", 0), ("F", 1), ("B", 1), ("W", 0), ("W", 1))]
    simulation = plan_of("mine", [actions]).simulate(1.6, 1.6, 1.0, exchange=0.6)
    times = {str(span.action): span.end - span.start for span in simulation.spans[0]}
    assert times == pytest.approx({"0F0": 1.6, "0B0": 1.6, "0F1": 1.6, "0B1": 1.6, "0W0": 0.0, "0W1": 0.7})
    assert simulation.makespan >= simulation.lower_bound


@pytest.mark.parametrize(
    ("name", "num_chunks", "most", "expected"),
    [
        ("zbv", None, 8.5, (1.150, 1.075)),
        ("interleaved_zb1p", 4, 10.0, (1.094, 1.047)),
        ("combined_zb1p", 4, 10.25, (1.092, 1.046)),
    ],
)
def test_one_more_pending_weight(name: str, num_chunks: int | None, most: float, expected: tuple[float, ...]) -> None:
    """On 8 ranks, with a fifth of F and B communication. The first is as a simulation written apart from this one has
    it."""
    for m, of_ideal in zip((16, 32), expected):
        plan = make_plan(name, 8, m, num_chunks, settings=Settings(min_pending_weights=1))
        plan.check()
        simulation = plan.simulate(1.25, 1.25, 1.0, exchange=0.25)
        assert max(simulation.peak_activations) == most
        assert simulation.makespan / 3 / m == pytest.approx(of_ideal, abs=0.0006)


@pytest.mark.parametrize("name", ["zb1p", "zb2p", "interleaved_zb1p", "combined_zb1p", "zbv", "v_half", "v_min"])
def test_limits_of_pending_weights(name: str) -> None:
    """Both settings only move Ws."""
    for p in (1, 3):
        for m in (2, 7):
            own = make_plan(name, p, m)
            for settings in (
                Settings(min_pending_weights=2),
                *(Settings(max_pending_weights=most) for most in (0, 1, 3)),
            ):
                plan = make_plan(name, p, m, settings=settings)
                plan.check()
                for actions, before in zip(plan.actions, own.actions):
                    assert [a for a in actions if a.kind != "W"] == [a for a in before if a.kind != "W"]
                    pending = 0
                    for number, action in enumerate(actions):
                        pending += {"B": 1, "W": -1}.get(action.kind, 0)
                        if action.kind == "B" and settings.max_pending_weights is not None:
                            following = [a.kind for a in actions[number + 1 :]]
                            num_ws = next((k for k, kind in enumerate(following) if kind != "W"), len(following))
                            assert pending - num_ws <= settings.max_pending_weights
                        if action.kind == "W" and any(a.kind == "B" for a in actions[number:]):
                            assert pending >= settings.min_pending_weights


@pytest.mark.parametrize("least", [0, 1, 3])
def test_weights_are_completed_in_order(least: int) -> None:
    """A whole backward of dualpipev overtook a W of the same chunk that was kept pending: gradients were added up in
    another order, and rounded otherwise."""
    for p in (1, 2, 3):
        for m in (2 * p, 2 * p + 3):
            plan = make_plan("dualpipev", p, m, settings=Settings(min_pending_weights=least))
            plan.check()
            for actions in plan.actions:
                for stage in {action.stage for action in actions}:
                    done = [a.microbatch for a in actions if a.stage == stage and a.kind in ("W", "BW")]
                    assert done == list(range(m))

"""Ws where they make a step shortest, on the plan alone."""

import pytest

from megapipe.plan import Action, Costs, Schedule, Verbs, make_plan, place_weights, schedule_names, simulate, v_shape
from megapipe.plan.weight_placement import fill
from megapipe.schedules import FB, B, F, W

SPLIT = [name for name in schedule_names() if any(action.kind == "W" for action in make_plan(name, 1, 2).actions[0])]


def costs(num_stages: int, num_chunks: int, times: tuple[float, float, float], uneven: bool) -> Costs:
    scale = [1.0] * num_stages
    if uneven:
        scale[num_stages // 3], scale[-1] = 1.5, 1.3
    return Costs(*([time * s / num_chunks for s in scale] for time in times), p2p=0.05)


@pytest.mark.parametrize("name", SPLIT)
@pytest.mark.parametrize(("pp_size", "m"), [(2, 1), (3, 5)])
def test_never_longer_and_within_the_memory(name: str, pp_size: int, m: int) -> None:
    plan = make_plan(name, pp_size, m)
    num_stages = pp_size * plan.num_chunks
    for times, uneven in (((1.0, 1.4, 0.6), False), ((0.7, 1.0, 1.3), True)):
        measured = costs(num_stages, plan.num_chunks, times, uneven)
        before = simulate(plan, measured)
        for extra in (0.0, pp_size / 4):
            limit = max(before.peak_activations) + extra
            moved = place_weights(plan, measured, limit)
            moved.check()
            after = simulate(moved, measured)
            assert after.makespan <= before.makespan + 1e-9
            assert max(after.peak_activations) <= limit + 1e-9
            assert after.makespan >= after.lower_bound - 1e-9
            for actions, others in zip(moved.actions, plan.actions):
                assert [a for a in actions if a.kind != "W"] == [a for a in others if a.kind != "W"]
                assert_in_order(actions)
                assert sorted(actions) == sorted(others)


@pytest.mark.parametrize("name", SPLIT)
def test_every_rule_gives_a_plan_that_can_run(name: str) -> None:
    """Ws were put between the halves of overlapped pairs, which run side by side."""
    plan = make_plan(name, 3, 8)
    for exchange, message, share in ((0.0, 0.0, 0.0), (0.7, 0.0, 9.0), (0.0, 1.3, 0.5), (0.3, 0.8, 1.0)):
        moved = fill(plan, Costs(1.0, 1.4, 0.6, p2p=0.1, message=message, exchange=exchange), 6.0, share)
        moved.check()
        for actions, others, pairs in zip(moved.actions, plan.actions, moved.program.pairs):
            assert all(backward == forward + 1 for forward, backward in pairs.items())
            assert sorted(actions) == sorted(others)
            assert last_to_gradients(actions) == last_to_gradients(others), "replicas synchronise gradients in it"
            assert_in_order(actions)


def assert_in_order(actions: list[Action]) -> None:
    """Each chunk's gradients are added up in the order of the microbatches."""
    for stage in {action.stage for action in actions}:
        order = [action.microbatch for action in actions if "W" in action.kind and action.stage == stage]
        assert order == sorted(order)


def one_pair(pipe: Verbs) -> None:
    """F0 F1 B1, then the pair F0B0, then F1 B1 B0 and the Ws. The first W is pending during the pair."""
    for step, chunk in ((F, 0), (F, 1), (B, 1)):
        step(pipe, chunk)
    FB(pipe, 0, 0)
    for step, chunk in ((F, 1), (B, 1), (B, 0), (W, None), (W, None), (W, None)):
        step(pipe, chunk)
    return pipe.finish()


def test_no_w_has_its_place_between_the_halves_of_a_pair() -> None:
    plan = make_plan(Schedule("mine", one_pair, v_shape, num_chunks=2), 1, 2)
    for share in (0.0, 1.0):
        for most in (0.0, 100.0):
            (pair,) = fill(plan, Costs(), most, share).program.pairs
            assert pair == {at: at + 1 for at in pair}


def test_zbv_comes_closer_to_what_no_order_can_beat() -> None:
    plan, times = make_plan("zbv", 4, 8), (1.0, 1.2, 0.8)
    measured = costs(8, 2, times, uneven=False)
    own, bound = simulate(plan, measured).makespan, plan.simulate(*times, p2p=0.05).lower_bound
    assert simulate(place_weights(plan, measured), measured).makespan - bound < 0.86 * (own - bound)


def test_without_better_places_a_plan_stays_as_it_is() -> None:
    for plan, costs in (
        (make_plan("zbv", 4, 8), Costs(1.0, 1.0, 1.0)),
        (make_plan("1f1b", 4, 8), Costs(1.0, 1.4, 0.6)),
    ):
        assert place_weights(plan, costs) is plan


def test_more_memory_for_deferred_weights() -> None:
    plan, slow = make_plan("zb1p", 4, 16), Costs(1.0, 1.3, 0.7, p2p=0.2)
    makespans = []
    for limit in (4, 5, 6, 7):
        placed = simulate(place_weights(plan, slow, limit), slow)
        makespans.append(placed.makespan)
        assert max(placed.peak_activations) <= limit
    assert makespans == sorted(makespans, reverse=True)
    assert makespans[-1] < 0.99 * makespans[0]


def last_to_gradients(actions: list[Action]) -> list[int]:
    """The stages in the order in which their gradients are complete."""
    last = {action.stage: index for index, action in enumerate(actions) if "W" in action.kind}
    return sorted(last, key=last.__getitem__)

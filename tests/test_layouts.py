"""Which layers a stage holds."""

import importlib.util
import itertools
import math
import operator
import random
from collections.abc import Sequence
from typing import Any

import pytest
from tools.ranks import RankPool

from megapipe import StageInfo, distribute_layers
from megapipe.plan import Plan, StageBytes, make_plan


def layers(num_layers: int, num_stages: int, *virtual: int, **options: Any) -> list[list[int]]:
    return [
        list(distribute_layers(num_layers, StageInfo(i, num_stages), *virtual, **options)) for i in range(num_stages)
    ]


def sizes(num_layers: int, num_stages: int, *virtual: float, **options: Any) -> list[int]:
    parts = layers(num_layers, num_stages, *virtual, **options)
    assert [layer for part in parts for layer in part] == list(range(num_layers))
    return [len(part) for part in parts]


def test_layers_are_shared_out_evenly_and_none_is_lost() -> None:
    assert layers(8, 4) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert sizes(30, 4) == [8, 8, 7, 7]
    for num_layers in range(4, 40):
        assert sum(sizes(num_layers, 4)) == num_layers


def test_virtual_layers_weigh_the_ends() -> None:
    assert sizes(10, 4, 1, 1) == [2, 3, 3, 2]
    assert sizes(13, 4, 2, 1) == [2, 4, 4, 3]


def test_a_stage_without_layers_is_an_error() -> None:
    with pytest.raises(ValueError, match="3 layers, with 0 virtual ones in front and 0 behind, leave stage 3 of 4"):
        layers(3, 4)
    with pytest.raises(ValueError, match="leave stage 0 of 4 without a layer"):
        layers(8, 4, 3)


# Layouts

DEEPSEEK = "Et*3|(tt|)*29,m|L"


def test_a_list_of_counts() -> None:
    assert layers(5, 3, layout=[0, 2, 3]) == [[], [0, 1], [2, 3, 4]]


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ("Ett|tt|ttL", [2, 2, 2]),
        ("E|tt|t|L", [0, 2, 1, 0]),
        ("E,t*2 | t*3 | ,L", [2, 3, 0]),
        ("E|(t|tt|)*2,mL", [0, 1, 2, 1, 2, 0]),
        ("Et|((t|)*2t*2|)*2L", [1, 1, 1, 2, 1, 1, 2, 0]),
        ("Et|*3,tL", [1, 0, 0, 1]),
        (DEEPSEEK, [3, *[2] * 29, 0, 0]),
    ],
)
def test_a_layout_in_letters(layout: str, expected: list[int]) -> None:
    assert sizes(sum(expected), len(expected), layout=layout) == expected


def megatrons(rank: int, layouts: list[str]) -> list[list[int]]:
    """Read by Megatron-LM, on a rank, which has imported it."""
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

    parsed = map(PipelineParallelLayerLayout.parse_str_to_list, layouts)
    return [[sum(kind.name == "decoder" for kind in held) for held in stages] for stages in parsed]


def test_layouts_mean_what_they_mean_to_megatron(ranks: RankPool) -> None:
    if importlib.util.find_spec("megatron") is None:
        pytest.skip("megatron-core is not installed")
    layouts = [DEEPSEEK, "Ettt|(tt|)*29,m|L", "E|t*3|(t|)*4,L", "Et*2|(t|tt|)*3L"]
    for layout, counts in zip(layouts, ranks.run(1, megatrons, layouts)[0]):
        assert sizes(sum(counts), len(counts), layout=layout) == counts


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "layout", "message"),
    [
        (6, 2, [3, 3, 0], r"has 6 layers on 3 stages, but there are 6 layers and 2 stages"),
        (7, 2, "Ett|ttL", r"'Ett\|ttL' has 4 layers on 2 stages, but there are 7 layers and 2 stages"),
        (2, 2, [3, -1], r"make them the same"),
        (4, 2, "tt|tt", r"holds 'tttt': it must be one E, then t for each layer"),
        (4, 2, "Ett|mttL", r"holds 'EttmttL'"),
        (4, 2, "Ett|(ttL", r"holds 'Ett\(ttL'"),
        (4, 2, "Ettx|ttL", r"holds 'EttxttL'"),
    ],
)
def test_layouts_that_do_not_fit(num_layers: int, num_stages: int, layout: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        layers(num_layers, num_stages, layout=layout)


# Costs


def test_equal_costs_are_shared_out_evenly() -> None:
    for num_layers, num_stages in ((8, 4), (30, 4), (7, 3), (5, 5)):
        costs = [2.0] * num_layers
        assert sizes(num_layers, num_stages, costs=costs) == sizes(num_layers, num_stages)
    assert sizes(2, 4, costs=[1.0, 1.0]) == [1, 1, 0, 0]


def test_the_slowest_stage_is_as_fast_as_can_be() -> None:
    """Against all splits there are."""
    choose = random.Random(0)
    for _ in range(40):
        num_layers, num_stages = choose.randint(1, 8), choose.randint(1, 4)
        costs = [choose.randint(0, 9) for _ in range(num_layers)]
        memory = [choose.randint(1, 4) for _ in range(num_layers)]
        limits = [choose.randint(3, 12) for _ in range(num_stages)]
        ends = choose.randint(0, 9), choose.randint(0, 9)

        def slowest(bounds: tuple[int, ...]) -> float:
            times = [sum(costs[a:b]) for a, b in itertools.pairwise(bounds)]  # noqa: B023
            held = [sum(memory[a:b]) for a, b in itertools.pairwise(bounds)]  # noqa: B023
            if any(map(int.__gt__, held, limits)):  # noqa: B023
                return float("inf")
            times[0] += ends[0]  # noqa: B023
            times[-1] += ends[1]  # noqa: B023
            return max(times)

        inner = itertools.combinations_with_replacement(range(num_layers + 1), num_stages - 1)
        best = min(slowest((0, *bounds, num_layers)) for bounds in inner)
        options = {"costs": costs, "memory": memory, "memory_limit": limits}
        if best == float("inf"):
            with pytest.raises(ValueError, match="raise memory_limit, or use more stages"):
                layers(num_layers, num_stages, *ends, **options)
        else:
            found = sizes(num_layers, num_stages, *ends, **options)
            assert slowest((0, *itertools.accumulate(found))) == best


def test_the_other_stages_are_even() -> None:
    """The slowest stage is given, by one slow layer: the rest would fit into one stage as well."""
    assert sizes(9, 4, costs=[10, *[1] * 8]) == [1, 3, 3, 2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"costs": [1, 2]}, r"costs must be 4 numbers from 0 on, one for each layer, got \[1, 2\]"),
        ({"costs": [1, 2, 3, -1]}, "from 0 on"),
        ({"costs": [1] * 4, "memory": [1] * 4}, "memory and memory_limit go together"),
        ({"costs": [1] * 4, "memory": [1], "memory_limit": 2}, "memory must be 4 numbers, one for each layer, got 1"),
        ({"costs": [1] * 4, "memory": [1] * 4, "memory_limit": [1, 2, 3]}, "or 2, one for each stage, got 3"),
        ({"memory": [1] * 4, "memory_limit": 2}, "needs the costs of layers"),
        ({"layout": [2, 2], "costs": [1] * 4}, "pass no costs or virtual layers with it"),
        ({"num_virtual_layers_pre": 0.5}, "must be whole numbers without costs, got 0.5 in front"),
    ],
)
def test_costs_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        layers(4, 2, **options)


@pytest.mark.parametrize("index", [-1, 4])
def test_a_stage_that_there_is_not(index: int) -> None:
    """One below 0 was taken for one from the end."""
    with pytest.raises(ValueError, match=f"a stage of 4 is one from 0 to 3, got {index}"):
        distribute_layers(8, StageInfo(index, 4))


# By a plan


def sizes_by(plan: Plan, num_layers: int, **arguments: Any) -> list[int]:
    num_stages = plan.pp_size * plan.num_chunks
    stages = [StageInfo(index, num_stages) for index in range(num_stages)]
    return [len(distribute_layers(num_layers, stage, 0, 2, plan=plan, **arguments)) for stage in stages]


def test_four_unequal_devices() -> None:
    """No speed could be given: [7, 7, 6, 4] was found for devices of which two are half as fast, with a step a quarter
    longer than need be."""
    memory = {"memory": [0.93] * 24, "activations": [0.13] * 24}
    unequal = {"speeds": [1, 1, 0.5, 0.5], **memory}
    plan = make_plan("1f1b", 4, 8)
    assert sizes_by(plan, 24, **unequal, memory_limit=[19.6, 21.6, 10.8, 4.5]) == [9, 9, 4, 2]
    # A rank's activations are those of as many microbatches as it has in flight: four on the first one.
    assert sizes_by(plan, 24, **unequal, memory_limit=[8 * (0.93 + 4 * 0.13) + 0.01, 21.6, 10.8, 4.5])[0] == 8


@pytest.mark.parametrize("seed", range(3))
def test_the_layout_is_the_best_of_all(seed: int) -> None:
    rng = random.Random(seed)
    pp_size, num_layers = rng.choice([2, 3, 4]), rng.randrange(6, 10)
    plan = make_plan(rng.choice(["1f1b", "zb1p", "gpipe"]), pp_size, 6)
    speeds = [rng.choice([0.3, 0.5, 0.7, 1.0]) for _ in range(pp_size)]
    limits = [rng.uniform(20, 40) for _ in range(pp_size)]

    def step(sizes: Sequence[int]) -> float:
        thirds = [(size + 2 * (stage == pp_size - 1)) / 3 for stage, size in enumerate(sizes)]
        memory = StageBytes(saved=[*map(float, sizes)], model=[*map(float, sizes)])
        simulation = plan.simulate(thirds, thirds, thirds, speeds=speeds, memory=memory)
        return simulation.makespan if all(map(operator.le, simulation.peak_bytes, limits)) else math.inf

    cuts = itertools.combinations_with_replacement(range(num_layers + 1), pp_size - 1)
    best = min(step([b - a for a, b in itertools.pairwise((0, *cut, num_layers))]) for cut in cuts)
    ones = [1.0] * num_layers
    if best == math.inf:
        with pytest.raises(ValueError, match="no layout of"):
            sizes_by(plan, num_layers, speeds=speeds, memory=ones, activations=ones, memory_limit=limits)
    else:
        found = sizes_by(plan, num_layers, speeds=speeds, memory=ones, activations=ones, memory_limit=limits)
        assert step(found) == pytest.approx(best)


def test_a_plan_of_several_chunks_on_one_rank() -> None:
    """It was refused: "a list of times has one for each of the 2 stages, got 1"."""
    assert sizes_by(make_plan("zbv", 1, 4), 8) == [5, 3]


def test_what_a_plan_needs() -> None:
    plan, stage = make_plan("1f1b", 4, 8), StageInfo(0, 4)
    for arguments, message in (
        ({"speeds": [1, 1, 1, 1]}, "speeds and activations need the plan of the steps"),
        ({"plan": plan, "speeds": [1, 1]}, "speeds has one for each of the 4 ranks, got 2"),
        ({"plan": plan, "layout": [2] * 4}, "a layout says how many layers"),
        ({"plan": make_plan("1f1b", 2, 8)}, "the plan has 2 ranks and 1 chunks on each, but there are 4 stages"),
        ({"plan": plan, "memory": [1.0]}, "memory must be 8 numbers from 0 on"),
        ({"plan": plan, "memory_limit": [1.0]}, "one memory_limit, or one for each of 4 ranks"),
        ({"plan": plan, "memory": [1.0] * 8, "memory_limit": 1.0}, "no layout of 8 layers was found that fits"),
    ):
        with pytest.raises(ValueError, match=message):
            distribute_layers(8, stage, **arguments)  # type: ignore[arg-type]

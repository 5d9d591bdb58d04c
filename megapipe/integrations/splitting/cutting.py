"""Chunks of an unmodified module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ...config import PipelineConfig
from ...layouts import distribute_layers
from ...plan import StageInfo
from ...runtime import stages_for_rank
from ...stages import PipelineStage
from ...training import TiedWeights
from .part import Share, part_of
from .running import CannotSplitError, Run, run_once, units_of

__all__ = ["CannotSplitError", "split"]


def split(
    model: nn.Module,
    example: Any,
    schedule: Any,
    *,
    num_chunks: int | None = None,
    points: Sequence[str] | None = None,
    costs: Sequence[float] | None = None,
    config: PipelineConfig | None = None,
) -> list[PipelineStage]:
    """This rank's stages of a module that knows nothing of pipelines. Every rank calls it, with the same module, after
    `parallel_state.initialize_model_parallel`.

    Stages begin where the module calls one of its units: members of its ModuleLists and Sequentials, and other
    children. The code between units runs on every stage. Outputs of units that later stages read travel through the
    stages between, also those of skip connections. Names and parameters are those of `model`: delete it afterwards, so
    that only this rank's parameters are left. A module on the meta device stays there.

    Args:
        model: its forward takes tensors by position. It is not changed.
        example: what it is called with, a tensor or a tuple. All microbatches must have its shapes.
        schedule: its name, or what `get_forward_backward_func` returned.
        num_chunks: per rank, where the schedule leaves that open.
        points: the names of the units with which the second stage and those behind it begin. None shares units out by
            the floating-point operations of their forwards.
        costs: of each call of a unit, in the order of calls, instead of these operations.
        config: of the pipeline, for all stages. Where stages share a weight, its `finalize_model_grads_func` is set.

    Returns:
        One `PipelineStage` for each of this rank's stages.

    Raises:
        CannotSplitError: a ValueError, where the forward depends on the values of tensors, or a parameter would be
            needed on several stages.
        ValueError: there are too few units, or a point is none.
    """
    arguments = example if isinstance(example, tuple) else (example,)
    own = stages_for_rank(schedule, num_chunks=num_chunks)
    num_stages = own[0].num_stages
    units = units_of(model, num_stages)
    run = run_once(model, units, arguments)
    stage_of = _stages_of_calls(run, num_stages, points, costs, model)
    shares, homes = _shares(run, stage_of, num_stages, arguments)
    settings = PipelineConfig() if config is None else config
    outside = [n for n, _ in model.named_parameters(remove_duplicate=False) if not _is_within(n, units)]
    kept = _stages_of_parameters(run, outside, shares, num_stages, type(model).__name__)
    chunks = []
    for info in own:
        drop = [name for name in outside if kept[name] != info.index]
        chunks.append(PipelineStage(part_of(model, units, shares[info.index], drop), info, settings))
    _tie(model, chunks, units, kept, homes, settings)
    return chunks


def _is_within(name: str, units: Sequence[str]) -> bool:
    return any(name.startswith(f"{unit}.") for unit in units)


def _stages_of_calls(
    run: Run, num_stages: int, points: Sequence[str] | None, costs: Sequence[float] | None, model: nn.Module
) -> list[int]:
    """The stage of each call. A unit with weights that is called again runs where it ran first."""
    calls, name = run.calls, type(model).__name__
    if len(calls) < num_stages:
        raise ValueError(f"{name} calls {len(calls)} units, which are too few for {num_stages} stages.")
    if points is not None:
        names = [call.unit for call in calls]
        if unknown := [point for point in points if point not in names]:
            raise ValueError(f"{unknown[0]!r} is no unit that {name} calls: take some of {', '.join(names[:20])}.")
        starts = [names.index(point) for point in points]
        if len(points) != num_stages - 1 or sorted(starts) != starts:
            raise ValueError(
                f"{num_stages} stages take {num_stages - 1} points in the order of calls, got {list(points)}."
            )
        found = [sum(start <= number for start in starts) for number in range(len(calls))]
    else:
        weights = list(costs) if costs is not None else [call.cost for call in calls]
        if len(weights) != len(calls):
            raise ValueError(f"{name} calls {len(calls)} units, and there are {len(weights)} costs: give one for each.")
        least = max(sum(weights), 1.0) * 1e-6
        weights = [max(weight, least) for weight in weights]
        ranges = [distribute_layers(len(calls), StageInfo(n, num_stages), costs=weights) for n in range(num_stages)]
        found = [stage for stage, one in enumerate(ranges) for _ in one]
    first: dict[str, int] = {}
    units = {call.unit: model.get_submodule(call.unit) for call in calls}
    stays = {unit for unit, module in units.items() if [*module.parameters(), *module.buffers()]}
    return [first.setdefault(call.unit, stage) if call.unit in stays else stage for call, stage in zip(calls, found)]


def _shares(
    run: Run, stage_of: list[int], num_stages: int, arguments: tuple[Any, ...]
) -> tuple[list[Share], dict[str, int]]:
    """What each stage runs, receives and hands on, and the stage of each unit."""
    made = {key: stage for call, stage in zip(run.calls, stage_of) for key in call.outputs}
    made.update(dict.fromkeys(run.inputs, 0))
    needed: dict[str, int] = {}  # the last stage that reads it
    for reads, stage in [
        *((call.reads, stage) for call, stage in zip(run.calls, stage_of)),
        (run.reads, num_stages - 1),
    ]:
        for key in reads & made.keys():
            if made[key] > stage:
                raise CannotSplitError(
                    f"stage {stage} would need {key} of stage {made[key]}: a unit that is called again runs where "
                    "it ran first. Give points by which all of its calls are on one stage."
                )
            needed[key] = max(needed.get(key, 0), stage)
    crossing = [[key for key in made if made[key] < n <= needed.get(key, -1)] for n in range(num_stages + 1)]
    leaves, structure = pytree.tree_flatten(arguments)
    example = pytree.tree_unflatten([0 if torch.is_tensor(leaf) else leaf for leaf in leaves], structure)
    like = {name: tensor.detach().to("meta") for name, tensor in run.inputs.items()}
    shares = [
        Share(
            stage=n,
            calls=run.calls,
            own=frozenset(number for number, stage in enumerate(stage_of) if stage == n),
            takes=crossing[n],
            gives=crossing[n + 1],
            inputs=like,
            example=example,
            is_last=n == num_stages - 1,
        )
        for n in range(num_stages)
    ]
    return shares, {call.unit: stage for call, stage in zip(run.calls, stage_of)}


def _stages_of_parameters(
    run: Run, outside: Sequence[str], shares: Sequence[Share], num_stages: int, model: str
) -> dict[str, int]:
    """The stage that reads each parameter outside units. One that is never read is on the first."""
    found: dict[str, int] = {}
    for name in outside:
        readers = {share.stage for share in shares for n in share.own if name in run.calls[n].reads}
        readers |= {num_stages - 1} if name in run.reads else set()
        if len(readers) > 1:
            raise CannotSplitError(
                f"{model} cannot be split here: the code between its units reads {name} for stages "
                f"{sorted(readers)}. Give points by which one stage does."
            )
        found[name] = readers.pop() if readers else 0
    return found


def _tie(
    model: nn.Module,
    chunks: Sequence[PipelineStage],
    units: Sequence[str],
    kept: dict[str, int],
    homes: dict[str, int],
    config: PipelineConfig,
) -> None:
    """Tie parameters that are one and the same in the model, and on several stages now."""
    names: dict[nn.Parameter, dict[int, str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        unit = next((one for one in units if name.startswith(f"{one}.")), None)
        if unit is not None and unit not in homes:
            continue  # it is never called, and on no stage
        stage = kept[name] if unit is None else homes[unit]
        names.setdefault(parameter, {}).setdefault(stage, name)
    shared = [list(by_stage.values()) for by_stage in names.values() if len(by_stage) > 1]
    if len(shared) > 1:
        raise CannotSplitError(
            f"{type(model).__name__} ties several weights across stages ({shared}), and only one can be."
        )
    if shared:
        config.finalize_model_grads_func = TiedWeights(chunks, shared[0]).sum_gradients

"""What may change in how the schedule is called, and in what the chunks of a rank are: functions by name, called with a
trial. A new kind is a function here, with the cases that it goes with.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from torch import nn
from torch.distributed.fsdp import fully_shard

import megapipe
from megapipe import PipelineConfig, parallel_state, stages_for_rank, weight_grad
from megapipe.plan import find_schedule

from . import changes
from .case import SCHEDULES, Case
from .model import CANNOT_BE_CAPTURED, LEAVE_TRACES, Forms, Recompute
from .training import MistakeError, Wrapper, everything

__all__ = ["CALLS", "GOES", "are_refused", "is_plain"]

Call = Callable[[Any, Any], None]
CALLS: dict[str, Call] = {}
GOES: dict[str, Callable[[Case], Any]] = {}
"""Where a kind goes, if not everywhere."""


def call(name: str, goes: Callable[[Case], Any] = lambda case: True) -> Callable[[Call], Call]:
    def register(function: Call) -> Call:
        CALLS[name], GOES[name] = function, goes
        return function

    return register


def is_plain(case: Case) -> bool:
    """Stages run as they are: neither as graphs nor sharded."""
    return not (case.get("Split") or "captured" in case.forms or case.of("Replicas", "kind", "reducer") != "reducer")


def can_be_captured(case: Case) -> bool:
    odd = case.any("needs_seed") or case.any("has_entries") or case.can_cut or case.get("Mask")
    is_odd = odd or CANNOT_BE_CAPTURED & case.odd or case.kind != "tensor" or len({*case.seq_lengths}) > 1
    return is_plain(case) and not is_odd and not case.get("Autocast") and not case.forms.strip()


# How the schedule is called


@call(
    "another number of microbatches", lambda case: not (case.of("Shapes", "seq_lengths", None) or case.get("Failure"))
)
def other_number(trial: Any, own: Any) -> None:
    trial.become(replace(trial.case, m=own.rng().choice([m for m in range(1, trial.case.m + 3) if m != trial.case.m])))


def can_have_other_sizes(case: Case) -> bool:
    return is_plain(case) and not case.can_cut and case.of("Shapes", "kind", "") != "computed"


@call("other sizes", lambda case: can_have_other_sizes(case) and not case.of("Shapes", "seq_lengths", None))
def other_sizes(trial: Any, own: Any) -> None:
    trial.become(replace(trial.case, sequence=own.rng().choice([3, 5, 9])))


def schedules_like(case: Case, placement: str) -> list[str]:
    """Others that run as many chunks on each rank, placed like this."""
    found = {name: find_schedule(name) for name in SCHEDULES if name not in ("no_pipelining", case.schedule)}
    return [
        name
        for name, one in found.items()
        if one.placement.name == placement
        and (one.num_chunks or max(case.num_chunks, one.min_chunks)) == case.num_chunks
        and bool(one.slices) == case.can_cut
        and not (case.of("Settings", "values", {}).get("max_in_flight") and name not in ("1f1b", "zb1p", "zb2p"))
    ]


def placement_of(case: Case) -> str:
    return find_schedule(case.schedule).placement.name


@call("another schedule", lambda case: case.schedule != "no_pipelining" and schedules_like(case, placement_of(case)))
def other_schedule(trial: Any, own: Any) -> None:
    case = trial.case
    trial.become(replace(case, schedule=own.rng().choice(schedules_like(case, placement_of(case)))))


MAY_MOVE = {"Accumulated", "Between", "Double", "Forms", "Frozen", "Message", "NumTokens", "Validated", "Settings"}
MAY_MOVE |= {"Companions", "Auxiliary", "Shapes", "AsPipelineStage", "Mask", "OddLayers", "Recompute"}


CANNOT_BE_COPIED = {"noise", "forward replaced", "forward of a stage replaced", "part of another model"}


def can_move(case: Case) -> bool:
    kinds = {type(feature).__name__ for feature in case.features}
    can_be_copied = not {*LEAVE_TRACES, "weight in closure"} & case.odd and not CANNOT_BE_COPIED & case.changes
    return kinds <= MAY_MOVE and is_plain(case) and case.pp > 1 and case.num_chunks == 2 and can_be_copied


@call("another placement", lambda case: can_move(case) and not case.can_cut)
def other_placement(trial: Any, own: Any) -> None:
    """Stages that stay on their rank are those that they were. Others are made like those of the whole model."""
    case, rng = trial.case, own.rng()
    schedule = rng.choice(schedules_like(case, "loop" if placement_of(case) == "v" else "v"))
    before = {stage.info.index: (stage, chunk) for stage, chunk in zip(trial.stages, trial.chunks)}
    trial.stages, trial.chunks = [], []
    for info in stages_for_rank(schedule, num_chunks=case.num_chunks):
        if info.index not in before:
            stage = copy.deepcopy(trial.reference.stages[info.index])
            before[info.index] = stage, case.fold("chunk", stage, stage)
        stage, chunk = before[info.index]
        trial.stages.append(stage)
        trial.chunks.append(chunk)
    trial.become(replace(case, schedule=schedule))
    trial.make_again()


@call("forward only")
def forward_only(trial: Any, own: Any) -> None:
    trial.compare_losses(600 + own.step, forward_only=True)


@call("a second model", lambda case: case.num_replicas == 1)
def second_model(trial: Any, own: Any) -> None:
    """It is trained by itself in between, and once more after the step."""
    kept = [one for one in trial.case.features if type(one).__name__ not in ("Between", "Failure", "WarmUp", "Saved")]
    other = type(trial)(replace(trial.case, features=kept, steps=1), trial.rank)
    other.train(700)
    trial.kept.setdefault("afterwards", []).append(lambda: other.train(710))


@call("scale left out", lambda case: case.of("Tied", "what", "") == "scale")
def leave_out_scale(trial: Any, own: Any) -> None:
    """By the first stage and the last, or by one of them."""
    ends = own.rng().choice([(0, trial.case.num_stages - 1), (0,), (trial.case.num_stages - 1,)])
    for stage in trial.all_stages():
        if stage.info.index in ends:
            stage.leaves_out_scale = True


@call(
    "gradients forgotten", lambda case: case.get("Accumulated") and "gradients gathered by a hook" not in case.changes
)
def forget(trial: Any, own: Any) -> None:
    """A call whose gradients are thrown away: what follows counts by itself."""
    trial.forget_gradients(set_to_none=own.seed % 2 == 0)
    if trial.case.get("NumTokens"):
        megapipe.discard_gradients(trial.chunks)


def are_refused(trial: Any, what: str, run: Callable[[], Any], text: str, kind: Any = ValueError) -> None:
    """A call is refused on every rank, and has changed nothing."""
    if trial.optimizer is not None:
        trial.optimizer.finalize()
    before, num_tokens = everything(trial), trial.num_tokens
    try:
        run()
        wrong = f"{what} is not refused"
    except Exception as error:
        after = everything(trial)
        changed = [name for name in {**before, **after} if before.get(name) != after.get(name)]
        wrong = f"{what} is refused, but has changed {', '.join(changed)}" if changed else ""
        if not isinstance(error, kind) or not re.search(text, str(error)):
            wrong = f"{what} is refused by {type(error).__name__}: {error}"
    trial.num_tokens = num_tokens
    trial.agree(wrong)


@call("a call refused", lambda case: case.num_replicas == 1)
def refused_call(trial: Any, own: Any) -> None:
    """Of one rank by itself, or since ranks disagree."""
    if own.seed % 2:
        arguments: dict[str, Any] = {"num_microbatches": 0}
    else:
        arguments = {"num_microbatches": 50 + trial.case.m + (trial.rank == 0)}
        if trial.case.pp == 1:
            arguments = {"forward_step_func": None}
    are_refused(trial, f"a call with {arguments}", lambda: trial.run(900, **arguments), "", (ValueError, TypeError))


@call("a call failed", lambda case: case.num_ranks == 1 and not LEAVE_TRACES & case.odd)
def failed_call(trial: Any, own: Any) -> None:
    """Ranks that are alone go on, with gradients cleared."""
    count = iter(range(100))

    def fail(*_: Any) -> None:
        if next(count) == own.seed % trial.case.m:
            raise MistakeError

    handle = trial.stages[-1].register_forward_pre_hook(fail)
    with pytest.raises(MistakeError):
        trial.run(900)
    handle.remove()
    trial.forget_gradients()


SETTINGS: dict[str, list[Any]] = {
    "min_pending_weights": [2],
    "p2p_lookahead": [0, 1, None],
    "max_pending_weights": [0, None],
    "timeout": [50.0],
    "recompute": ["all"],
}


def may_be_set(case: Case) -> list[str]:
    is_free = not (case.get("Recompute") or case.get("Offload") or case.get("Planned"))
    can_recompute = is_free and Recompute.goes(case) and "noise" not in case.changes
    also = ["max_pending_weights", "min_pending_weights"] * is_free + ["recompute"] * can_recompute
    return ["p2p_lookahead", "timeout", *also]


@call("a setting for one step")
def set_once(trial: Any, own: Any) -> None:
    name = own.rng().choice(may_be_set(trial.case))
    before = [getattr(stage.config, name, getattr(PipelineConfig(), name)) for stage in trial.stages]
    trial.configure(**{name: own.rng().choice(SETTINGS[name])})

    def put_back() -> None:
        for stage, value in zip(trial.stages, before):
            setattr(stage.config, name, value)

    trial.kept.setdefault("afterwards", []).append(put_back)


def can_be_refused(case: Case) -> bool:
    """A mistake in one replica ends the others."""
    return case.num_replicas == 1 and not (case.get("Recompute") or case.get("Offload") or case.get("Planned"))


@call("a wrong setting", can_be_refused)
def set_wrongly(trial: Any, own: Any) -> None:
    """In a new list, which is refused; or in the caller's own list of a setting, which the config does not keep."""
    values: list[Any] = ["all" if Recompute.goes(trial.case) else None, *[None] * (trial.case.num_stages - 1)]

    def run() -> None:
        trial.configure(recompute=values)
        trial.run(900)  # which reads a config that is any object

    if own.seed % 2 and isinstance(getattr(trial.chunks[0], "config", None), PipelineConfig):
        trial.configure(recompute=values)
        values[0] = "al"
        trial.kept.setdefault("afterwards", []).append(lambda: trial.configure(recompute=None))
    else:
        values[0] = "al"
        are_refused(trial, "config.recompute[0] = 'al'", run, "recompute")
        trial.configure(recompute=None)


# What only the pipeline's stage becomes


def chunk_of(trial: Any, own: Any) -> int | None:
    return next((k for k, stage in enumerate(trial.stages) if own.is_at(stage)), None)


@call("wrapped later", lambda case: is_plain(case))
def wrap(trial: Any, own: Any) -> None:
    """One chunk, or all of them."""
    name, one = own.rng().choice(["module", "_orig_mod"]), chunk_of(trial, own)
    for k, chunk in enumerate(trial.chunks):
        if own.seed % 2 or k == one:
            trial.chunks[k] = Wrapper({name: chunk})
    trial.make_again()


class Around(nn.Module):
    """A model with a part called `module`."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **keywords: Any) -> Any:
        return changes.halved(self.module(*args, **keywords))


@call("part of another model", lambda case: is_plain(case) and case.kind == "tensor" and case.pp == 1)
def put_around(trial: Any, own: Any) -> None:
    if (k := chunk_of(trial, own)) is not None:
        trial.chunks[k] = Around(trial.chunks[k])
    changes.replace_forward_of_stage(trial.reference.stages[own.at % trial.case.num_stages], own.rng())
    trial.make_again()


@call("deferring later", lambda case: is_plain(case))
def defer(trial: Any, own: Any) -> None:
    if (k := chunk_of(trial, own)) is not None:
        weight_grad.convert(trial.stages[k])


@call("captured later", lambda case: can_be_captured(case))
def capture(trial: Any, own: Any) -> None:
    if (k := chunk_of(trial, own)) is not None:
        Forms(["captured"]).chunk(trial.chunks[k], trial.stages[k])


@call("compiled later", lambda case: is_plain(case) and not case.can_cut and not CANNOT_BE_CAPTURED & case.odd)
def compile_later(trial: Any, own: Any) -> None:
    if (k := chunk_of(trial, own)) is not None:
        own.rng().choice([*trial.stages[k].layers.values()]).compile(backend="eager")


def can_be_sharded(case: Case) -> bool:
    is_odd = CANNOT_BE_CAPTURED & case.odd or case.get("Delays") or case.get("Offload")
    is_odd = is_odd or case.get("Accumulated")  # shards are added up in another order
    return is_plain(case) and case.num_replicas == 1 and not is_odd


@call("sharded later", lambda case: can_be_sharded(case) and not case.of("Frozen", "changes", False))
def shard(trial: Any, own: Any) -> None:
    if (k := chunk_of(trial, own)) is not None:
        for module in (*trial.stages[k].layers.values(), trial.chunks[k]):
            fully_shard(module, mesh=parallel_state.get_data_parallel_mesh())
    trial.make_again()

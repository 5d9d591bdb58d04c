"""The bytes of each stage, found by running it once by itself: without ranks, and on fake tensors without memory."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from ..config import StepConfig, check_whole_number
from ..messages import MessageSpec
from ..options import Autocast, Recompute
from ..p2p_communication import Transfer
from ..plan import Action, StageBytes, StageInfo
from ..runtime import action_functions
from ..stages import ActionFunction, Call, Extension, Stage, UnitState
from ..structure import structure_of
from ..timing import LiveStorages


def bytes_of_stages(
    make_stage: Callable[[StageInfo], nn.Module],
    num_stages: int,
    forward_step_func: Callable[..., Any],
    microbatch: Any,
    *,
    optimizer_state: float = 2.0,
    replicas: int = 1,
    fake: bool = True,
    posted: int = 2,
    posted_bytes: int = 2**20,
    outbox: int = 2**20,
) -> StageBytes:
    """Run one microbatch through every stage, one after the other in this process, and count what each holds.

    Args:
        make_stage: makes the module of a stage, as for `get_forward_backward_func`.
        num_stages: of the pipeline: ranks times chunks.
        forward_step_func: as in a step.
        microbatch: what the data iterator yields for one microbatch.
        optimizer_state: how many tensors of a weight's size the optimizer keeps for it: 2 for Adam.
        replicas: how many share out weights, gradients and optimizer state by `fully_shard`. A chunk has whole weights
            while it is gathered, and whole gradients until they are reduced.
        fake: run on torch's fake tensors, which have no memory, on the device that the stages are made for. False for
            stages that cannot: captured ones, for example. Each then takes its memory, one at a time.
        posted, posted_bytes, outbox: how messages travel, as in `StageBytes`. The defaults are gloo's; over NCCL all
            are 0, but a large message whose receive is posted early takes its size once more on a rank.

    Raises:
        ValueError, TypeError: as in a step.
    """
    check_whole_number("num_stages", num_stages, 1)
    check_whole_number("replicas", replicas, 1)
    found: defaultdict[str, Any] = defaultdict(list)
    most: int | None = None
    received: MessageSpec | None = None
    around: AbstractContextManager[Any] = nullcontext()
    if fake:
        from torch._subclasses.fake_tensor import FakeTensorMode

        around = mode = FakeTensorMode()
        microbatch = torch.utils._pytree.tree_map_only(Tensor, mode.from_tensor, microbatch)
    with around:
        for index in range(num_stages):
            info = StageInfo(index, num_stages)
            module = make_stage(info)
            call = _call_of(module, forward_step_func, microbatch)
            of_stage, received = _measure(info, module, call, received)
            weights = sum(p.nbytes for p in module.parameters())
            trained = sum(p.nbytes for p in module.parameters() if p.requires_grad)
            of_stage["model"] = (weights + (1 + optimizer_state) * trained) / replicas
            of_stage["gathered"], of_stage["gradients"] = (0, 0) if replicas == 1 else (weights, trained)
            for component, number in of_stage.items():
                found[component].append(number)
            most = call.config.max_gathered_chunks
            del module, call
    return StageBytes(**found, posted=posted, posted_bytes=posted_bytes, outbox=outbox, max_gathered=most)


def _call_of(module: nn.Module, forward_step_func: Callable[..., Any], microbatch: Any) -> Call:
    device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
    return Call(
        forward_step_func=forward_step_func,
        data_iterators=[itertools.repeat(microbatch)],
        models=[module],
        num_microbatches=1,
        config=StepConfig.of(getattr(module, "config", None)),
        device=device,
        num_tokens=torch.zeros((), dtype=torch.float64, device=device),
        structures=[structure_of(module)],
    )


def _measure(
    info: StageInfo, module: nn.Module, call: Call, received: MessageSpec | None
) -> tuple[dict[str, float], MessageSpec | None]:
    """What the actions of a stage hold, and the message that it sends. The first microbatch makes the gradients."""
    found: dict[str, float] = {}
    plain: dict[str, float] = {}
    output: MessageSpec | None = None
    recomputes = call.config.settings.recomputes_stage(info.index)
    for is_recomputed in (False, True) if recomputes else (False,):
        stage = Stage(info, 0, call, None)
        runs = action_functions(stage, _extensions(call, info, is_recomputed))
        for _, is_split in itertools.product(range(2), (False, True)):
            with LiveStorages(call.device) as storages:
                of_run, output = _run(runs, received, storages, call, is_split)
                stage.forget_input()
            found |= of_run
            call.results.clear()
        plain = plain or {component: found[component] for component in ("saved", "forward")}
        found["replayed"], found["replayed_forward"] = found["saved"], found["forward"]
    return {**found, **plain}, output


def _extensions(call: Call, info: StageInfo, is_recomputed: bool) -> list[Extension]:
    """The options that change what a stage saves."""
    call.stages = [info]
    planned: Any = SimpleNamespace(recomputed=[frozenset([Action(info.index, "F", 0)])])
    place = (call.config, lambda: planned, 0, None)
    extensions: list[Extension] = [Autocast(*place)] if call.config.enable_autocast else []
    if is_recomputed:
        recompute = Recompute(*place)
        recompute.compares = False
        recompute.takes_part(call)
        extensions.append(recompute)
    return extensions


def _run(
    runs: Mapping[str, ActionFunction], received: MessageSpec | None, storages: LiveStorages, call: Call, is_split: bool
) -> tuple[dict[str, float], MessageSpec | None]:
    """One microbatch. What was there before it, such as reported losses, does not count."""
    device = call.device

    def message(spec: MessageSpec) -> list[Tensor]:
        return [torch.zeros(of.shape, dtype=of.dtype, device=device) for of in spec.tensors]

    def most(held_after: int) -> float:
        peak = storages.peak
        storages.restart()
        return max(0, peak - held_after)

    found: dict[str, float] = {}
    before = storages.held
    storages.restart()
    unit = UnitState(0)
    unit.received = None if received is None else Transfer(received, message(received))
    runs["F"](unit)
    output = None if unit.output is None else unit.output.spec
    found["message"] = 0 if unit.output is None else sum(tensor.nbytes for tensor in unit.output.tensors)
    unit.output = None
    unrecomputed = storages.held
    found["forward"] = most(unrecomputed)
    runs["R"](unit)
    saved = storages.held
    found["recompute"] = most(saved)
    found["saved"], found["recomputed"] = saved - before, saved - unrecomputed
    if output is not None:
        unit.output_grads = message(output.gradient_spec())
    if not is_split:
        runs["BW"](unit)
        found["backward"] = most(saved)
    else:
        runs["B"](unit)
        peak = storages.peak
        unit.input_grads = None
        storages.restart()
        kept = storages.held
        found["kept"], found["backward_input"] = kept - before, max(0, peak - max(saved, kept))
        runs["W"](unit)
        found["backward_weight"] = most(kept)
    return found, output

"""The first forward and the first backward of every stage, on all ranks at once and before the first step: no stage
waits, since each is given random numbers for a message.

Nothing of it remains but what was compiled. Stages run on copies of their parameters, which share their memory and
have no gradients and no hooks; buffers and random numbers are put back. A parameter that a stage reaches by another way
than its attribute is seen when it is about to get a gradient.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin

from ..activations import restores_of
from ..chunks import device_of, find_attribute, named_parameters, parameters_replaced, wrapped_in
from ..frameworks import frameworks
from ..messages import MessageSpec, can_have_gradient
from ..p2p_communication import Transfer
from ..plan import FORWARD, KINDS, WEIGHTS, Schedule
from ..stages import Call, UnitState, as_sent
from ..structure import structure_of
from .arguments import check_call, chunks_of, config_of, pipeline_group
from .pipeline import action_functions, checkpoint_arguments
from .runner import Runner, call_key
from .session import Alone, Session, one_step
from .shapes import message_specs, spec_of


def warm_up(
    schedule: Schedule,
    forward_step_func: Callable[..., Any],
    microbatch: Any,
    model: Any,
    num_microbatches: int,
    *,
    received: Any = None,
    p2p_communicator: Any = None,
    pg_collection: Any = None,
    **sizes: Any,
) -> None:
    """Run each stage once on all ranks at the same time, so that what happens in a first run happens side by side.

    Stages compile there (torch.compile, or captured with `compile="inductor"`), kernels are loaded and tuned, memory is
    allocated, and the channels between the ranks are connected. In the first step, stages would do so one after the
    other. Every rank of the pipeline calls it alike, at any time before a step; where models communicate by themselves
    (tensor parallelism, experts) all replicas do.

    It changes nothing but attributes that a model's forward changes: gradients (`main_grad` too), buffers and random
    numbers (torch, Python, NumPy) are as before, hooks of parameters are not called, and training goes on bit for bit.
    Memory for the gradients of a chunk is needed meanwhile.

    Args:
        schedule: what `get_forward_backward_func` returns.
        forward_step_func, model, num_microbatches, p2p_communicator, pg_collection, sizes: as in its steps. Sizes are
            `seq_length`, `micro_batch_size`, `decoder_seq_length`, `adjust_tensor_shapes_fn`, `pipeline_inputs`.
        microbatch: what `data_iterator` yields, on ranks that read data; otherwise None. It is yielded again and again.
        received: an example of the message that the chunks of this rank receive, as the stage before returns it. Only
            shapes and dtypes matter. It is needed after the first stage where neither sizes nor the model tell it
            (`infer_stage_inputs_from_pipeline_inputs`), as with a `PipelineStage`.

    Raises:
        ValueError, TypeError: for wrong arguments; where no message is described; for parameters without a shape, under
            `fully_shard` or DistributedDataParallel, or not reached by their modules' attributes (a list, a closure).
        PipelineError: when another rank failed.
    """
    in_use = frameworks()
    with one_step(pipeline_group(in_use, pg_collection, p2p_communicator)) as session:
        models = chunks_of(model)
        if len(models) > 1:  # as in steps
            sizes["decoder_seq_length"] = None
        call = Call(
            forward_step_func,
            [None if microbatch is None else itertools.repeat(microbatch)] * len(models),
            models,
            num_microbatches,
            config=replace(config_of(in_use, schedule, models, pg_collection), timers=None),
            device=device_of(models),
            num_tokens=torch.zeros((), dtype=torch.float64, device=device_of(models)),
            structures=[*map(structure_of, models)],
            forward_only=schedule.forward_only,
            schedule=schedule,
            frameworks=in_use,
            **sizes,
        )
        check_call(call, len(session.ranks))
        runner = Runner(call_key(schedule, call), call, session)
        _refuse_what_cannot_be_left_alone(call, runner)
        inputs = _inputs(call, runner, received)
        runner.agree(call, ", in megapipe.warm_up")
        runner.connect(call)
        with _without_a_trace(call, runner):
            for chunk in range(len(models)):
                _run(call, runner, chunk, inputs[chunk], session)


def _refuse_what_cannot_be_left_alone(call: Call, runner: Runner) -> None:
    for info, model in zip(runner.stages, call.models):
        for module in model.modules():
            if isinstance(module, LazyModuleMixin) and module.has_uninitialized_params():
                raise ValueError(
                    f"stage {info.index} holds a {type(module).__name__}, whose parameters its first forward makes, "
                    "but warm_up leaves nothing behind: give it its sizes, run it once before, or leave warm_up out."
                )
    is_ddp = any(isinstance(m, nn.parallel.DistributedDataParallel) for model in call.models for m in wrapped_in(model))
    if is_ddp or any(extension.hides_gradients for extension in runner.extensions(call)):
        by = "DistributedDataParallel" if is_ddp else "fully_shard"
        raise ValueError(
            f"warm_up would start the communication of {by} between replicas: call it before {by}, or leave it out."
        )


def _inputs(call: Call, runner: Runner, received: Any) -> list[list[MessageSpec | None]]:
    """The messages that each chunk receives, one for each slice of a sequence; None on the first stage.

    Raises:
        ValueError: one is not described.
    """
    inputs: list[list[MessageSpec | None]] = []
    for model, stage in zip(call.models, runner.stages):
        message = as_sent(received) if find_attribute(model, "finds_shapes") else received
        example = None if received is None else spec_of(message, "received must be")
        parts = call.of_slices(call.slices)
        described = [None if stage.is_first else message_specs(model, stage, part)[0] or example for part in parts]
        if None in described and not stage.is_first:
            raise ValueError(
                f"the message from stage {stage.index - 1} to stage {stage.index} is not described before the "
                "first step, and without it the stage cannot run: pass warm_up received=, an example of it."
            )
        inputs.append(described)
    return inputs


@contextmanager
def _without_a_trace(call: Call, runner: Runner) -> Iterator[None]:
    with ExitStack() as after:
        for restore in restores_of(call.device, call.models):
            after.callback(restore)
        for info, model in zip(runner.stages, call.models):
            for name, parameter in named_parameters(model):
                if parameter.requires_grad:
                    hook = parameter.register_hook(partial(_refuse_gradient, name, info.index))  # type: ignore[no-untyped-call]
                    after.callback(hook.remove)
        after.enter_context(parameters_replaced(call.models, _copy_of))
        with torch.set_grad_enabled(not call.forward_only):
            yield


def _refuse_gradient(name: str, stage: int, grad: Tensor) -> NoReturn:
    raise ValueError(
        f"warm_up would leave a gradient in {name}, which stage {stage} reaches by another way than the attribute of "
        "its module (a list, a closure, a functools.partial): use the attribute, or leave warm_up out."
    )


def _copy_of(parameter: nn.Parameter) -> nn.Parameter:
    """A parameter with the same memory and attributes."""
    copy = nn.Parameter(parameter.detach(), parameter.requires_grad)
    for name, value in vars(parameter).items():
        setattr(copy, name, torch.zeros_like(value) if name == "main_grad" and value is not None else value)
    return copy


def _run(
    call: Call, runner: Runner, chunk: int, inputs: Sequence[MessageSpec | None], session: Session | Alone
) -> None:
    """One chunk: a microbatch for each way of computing a backward that the schedule takes there."""
    info = runner.stages[chunk]
    if session.watchdog is not None:
        session.watchdog.check()
        session.watchdog.progress.action = f"the warm-up of stage {info.index}"
    own = {action.kind for action in runner.plan_key.plan.actions[runner.pp_rank] if action.stage == info.index}
    backwards = [kind.name for kind in KINDS.values() if kind.name in own and kind.direction == "backward"]
    stage = runner.make_stages(call)[chunk]
    if chunk in runner.found_shapes:
        stage.output_specs = None  # what steps have found may change
    runs = action_functions(stage, runner.extensions(call))
    extra = next(checkpoint_arguments(runner.plan_key, runner.pp_rank, call))
    for backward in backwards or [""]:
        units = [UnitState(0, part) for part in range(len(inputs))]
        for unit, spec in zip(units, inputs):
            unit.received = None if spec is None else Transfer(spec, _random(spec, call.device))
            runs[FORWARD.name](unit, *extra)
        for unit in units[::-1] if backward else ():  # of slices, the last first
            if unit.output is not None:
                assert unit.output.spec is not None
                unit.output_grads = _random(unit.output.spec.gradient_spec(), unit.output.tensors[0].device)
            runs[backward](unit)
            if unit.deferred is not None:
                runs[WEIGHTS.name](unit)
    stage.forget_input()


def _random(message: MessageSpec, device: torch.device) -> list[Tensor]:
    """Normal numbers; zeros where the type has none."""
    tensors = [torch.zeros(spec.shape, dtype=spec.dtype, device=device) for spec in message.tensors]
    for tensor in tensors:
        if can_have_gradient(tensor.dtype) and tensor.dtype.itemsize > 1:
            tensor.normal_()
    return tensors

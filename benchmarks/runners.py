"""megapipe and its peers behind one face: build the stages of this rank, and run a step.

Each runs the same emulated or tiny stages, in one process group, so that steps of all can take turns.
"""

from __future__ import annotations

import functools
import importlib
import sys
import warnings
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megapipe import get_forward_backward_func, parallel_state, schedule_names, slices, stages_for_rank
from megapipe.overlap import in_segments
from megapipe.plan import make_plan
from megapipe.weight_grad import DeferredGrads

MEGAPIPE = [name for name in schedule_names() if not name.startswith(("no_", "inference", "seq", "combined"))]
SLICED = ["seq1f1b x2", "seq1f1b x4", "seq_zb1p x4"]
"""Behind the x, how many slices each sequence is cut into."""
TORCH = ["GPipe", "LoopedBFS", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]
MEGATRON = ["1f1b", "interleaved"]
ALL = (
    ["bare-loop 1f1b", "bare-loop zbv"]
    + [f"megapipe {n}" for n in MEGAPIPE + SLICED]
    + [f"torch {n}" for n in TORCH]
    + [f"megatron-core {n}" for n in MEGATRON]
    + ["dualpipe dualpipe"]
)

MakeStage = Callable[[int, int, str, Any], nn.Module]
"""(stage, number of stages, how its backward is written, config) -> module. The second but last is "whole", "deferring"
for megapipe, "splitting" for torch, or "storing" for DualPipe."""
Arriving = tuple[Tensor, Any]
"""A tensor, and what to wait for before it is there; None where it comes from the same rank."""
Loss = Callable[..., Tensor]
"""(output, target or nothing) -> the loss of a microbatch."""


class Runner:
    """One schedule of one package on this rank.

    Attributes:
        name: "package schedule".
        num_chunks: stages per rank.
        num_slices: of each sequence.
        splits: whether B and W are two actions.
        is_two_way: two pipelines run on the same ranks, in opposite directions.
        averages: whether gradients are the mean over the microbatches; otherwise they are the sum.
    """

    name: str
    num_chunks: int
    num_slices = 1
    splits: bool
    is_two_way = False
    averages = False
    num_rows: int
    modules: list[nn.Module]

    def step(self) -> None:
        raise NotImplementedError


class FedStage(nn.Module):
    """A stage for any of the runners: Megatron's hook sets its input, others pass it.

    Args:
        example: what the first stage takes; None on others.
    """

    def __init__(self, config: Any, example: Tensor | None) -> None:
        super().__init__()
        self.config = config
        self._example = example
        self._input: Tensor | None = None

    def set_input_tensor(self, inputs: Any) -> None:
        self._input = inputs[0] if isinstance(inputs, list) else inputs

    def fed(self, x: Tensor | None = None) -> Tensor:
        given = self._input if x is None else x
        given = self._example if given is None else given
        assert given is not None
        return given


def zero_loss(output: Tensor, target: Any = None) -> Tensor:
    """Of no size, so that what it costs is the same for all."""
    return output.sum() * 0


def make_runner(
    name: str, num_microbatches: int, make_stage: MakeStage, num_rows: int, loss: Loss = zero_loss, **config: Any
) -> Runner:
    """`num_rows`: a message is [num_rows, 1, width of the stages], also that of a slice. `loss`: of the last stage's
    output. `config`: settings of megapipe."""
    package, _, schedule = name.partition(" ")
    kinds = {"megapipe": Megapipe, "torch": Torch, "megatron-core": Megatron, "bare-loop": ByHand, "dualpipe": Dual}
    runner = kinds[package](schedule, num_microbatches, make_stage, num_rows, loss, **config)
    runner.name = name
    return runner


class Megapipe(Runner):
    averages = True

    def __init__(self, schedule: str, m: int, make_stage: MakeStage, num_rows: int, loss: Loss, **config: Any) -> None:
        if not parallel_state.model_parallel_is_initialized():
            parallel_state.initialize_model_parallel(dist.get_world_size())
        rank = parallel_state.get_pipeline_model_parallel_rank()
        size = parallel_state.get_pipeline_model_parallel_world_size()
        schedule, _, count = schedule.partition(" x")
        self.num_slices = int(count or 1)
        infos = stages_for_rank(schedule, rank, size, config.pop("num_chunks", None))
        config["num_sequence_slices"] = self.num_slices
        self.config = SimpleNamespace(hidden_size=config.pop("width", 1024), **config)
        self.num_chunks, self.num_rows, self._m = len(infos), num_rows, m
        actions = make_plan(schedule, size, m, len(infos), num_slices=self.num_slices).actions
        self.splits = any(action.kind == "W" for row in actions for action in row)
        how = "deferring" if self.splits else "whole"
        self.modules = [make_stage(info.index, info.num_stages, how, self.config) for info in infos]
        self.function = get_forward_backward_func(schedule)
        forward_step = _forward_slice if self.num_slices > 1 else _forward_step
        if hasattr(self.modules[0], "forward_segments"):
            forward_step = _forward_segments
        self._forward_step = functools.partial(forward_step, loss)

    def step(self) -> None:
        self.function(
            forward_step_func=self._forward_step,
            data_iterator=None,
            model=self.modules,
            num_microbatches=self._m,
            seq_length=self.num_rows * self.num_slices,
            micro_batch_size=1,
        )


def _forward_step(loss: Loss, data_iterator: Any, model: nn.Module) -> tuple[Any, Any]:
    return model(), lambda output: (loss(output), {})


def _forward_slice(loss: Loss, data_iterator: Any, model: nn.Module) -> tuple[Any, Any]:
    slices.current()  # whose length these stages have by themselves
    return _forward_step(loss, data_iterator, model)


def _forward_segments(loss: Loss, data_iterator: Any, model: nn.Module) -> tuple[Any, Any]:
    return in_segments(model), lambda output: (loss(output), {})


class Torch(Runner):
    def __init__(self, schedule: str, m: int, make_stage: MakeStage, num_rows: int, loss: Loss, **config: Any) -> None:
        from torch.distributed.pipelining import PipelineStage
        from torch.distributed.pipelining.schedules import get_schedule_class

        kind: Any = get_schedule_class(schedule)
        rank, size = dist.get_rank(), dist.get_world_size()
        self.splits = "ZeroBubble" in schedule or schedule == "DualPipeV"
        self.num_chunks = 1 if schedule in ("1F1B", "GPipe") else 2
        indices = [rank] if self.num_chunks == 1 else [rank, size + rank]
        if schedule.startswith(("ZBV", "DualPipeV")):
            indices = [rank, 2 * size - 1 - rank]
        num_stages = self.num_chunks * size
        how = "splitting" if self.splits else "whole"
        self.modules = [make_stage(index, num_stages, how, None) for index in indices]
        sample = next(self.modules[0].parameters(), torch.empty(0))
        stages = [
            PipelineStage(module, index, num_stages, sample.device, group=config.get("group"))
            for module, index in zip(self.modules, indices)
        ]
        argument = stages[0] if self.num_chunks == 1 else stages
        self._schedule = kind(argument, n_microbatches=m, loss_fn=loss, scale_grads=False)
        width = config.get("width", 1024)
        is_first, is_last = 0 in indices, num_stages - 1 in indices
        self._inputs = (sample.new_zeros(m * num_rows, 1, width),) if is_first else ()
        self._target = sample.new_zeros(m) if is_last else None
        self.num_rows = num_rows

    def step(self) -> None:
        losses: list[Tensor] | None = [] if self._target is not None else None
        self._schedule.step(*self._inputs, target=self._target, losses=losses, return_outputs=False)


class Megatron(Runner):
    averages = True

    def __init__(self, schedule: str, m: int, make_stage: MakeStage, num_rows: int, loss: Loss, **config: Any) -> None:
        prepare_megatron()
        from megatron.core.enums import ModelType
        from megatron.core.pipeline_parallel import schedules
        from megatron.core.transformer.transformer_config import TransformerConfig

        rank, size = dist.get_rank(), dist.get_world_size()
        self.splits, self._m, self.num_rows = False, m, num_rows
        self.num_chunks = 1 if schedule == "1f1b" else 2
        settings = TransformerConfig(
            num_layers=self.num_chunks * size,
            hidden_size=config.get("width", 1024),
            num_attention_heads=1,
            pipeline_model_parallel_size=size,
            virtual_pipeline_model_parallel_size=None if self.num_chunks == 1 else 2,
            pipeline_dtype=torch.float32,
            # Its batched messages mix up the neighbours where there are two ranks with two chunks each.
            batch_p2p_comm=self.num_chunks == 1,
            overlap_p2p_comm=self.num_chunks == 2,
            # With overlap it frees what gloo has not sent yet, and the peer receives garbage.
            deallocate_pipeline_outputs=self.num_chunks == 1,
        )
        num_stages = self.num_chunks * size
        self.modules = [make_stage(rank + k * size, num_stages, "whole", settings) for k in range(self.num_chunks)]
        for k, module in enumerate(self.modules):
            module.model_type = ModelType.encoder_or_decoder
            module.vp_stage = k if self.num_chunks == 2 else None
        self._forward_step = functools.partial(_forward_step, loss)
        self._step = schedules.forward_backward_pipelining_without_interleaving
        if size == 1:
            self._step = schedules.forward_backward_no_pipelining
        elif self.num_chunks == 2:
            self._step = schedules.forward_backward_pipelining_with_interleaving

    def step(self) -> None:
        from megatron.core import parallel_state as theirs

        theirs.set_virtual_pipeline_model_parallel_world_size(None if self.num_chunks == 1 else 2)
        self._step(
            forward_step_func=self._forward_step,
            data_iterator=[None] * self.num_chunks,
            model=self.modules,
            num_microbatches=self._m,
            seq_length=self.num_rows,
            micro_batch_size=1,
        )


class ByHand(Runner):
    """The actions of one of megapipe's schedules over isend and irecv, in their order and with nothing around them: no
    checks, no errors told, nothing but what every runner has to do. The floor."""

    def __init__(self, schedule: str, m: int, make_stage: MakeStage, num_rows: int, loss: Loss, **config: Any) -> None:
        self._rank, size = dist.get_rank(), dist.get_world_size()
        infos = stages_for_rank(schedule, self._rank, size)
        plan = make_plan(schedule, size, m, len(infos))
        self._actions = list(plan.actions[self._rank])
        self._rank_of = [plan.rank_of(stage) for stage in range(size * len(infos))]
        self.num_chunks, self.num_rows, self._m = len(infos), num_rows, m
        self.splits = any(action.kind == "W" for action in self._actions)
        how = "deferring" if self.splits else "whole"
        self._modules = {info.index: make_stage(info.index, info.num_stages, how, None) for info in infos}
        self.modules = list(self._modules.values())
        self._loss = loss
        self._shape = (num_rows, 1, config.get("width", 1024))
        self._sends: list[Any] = []
        self._inputs: dict[int, deque[Arriving]] = {stage: deque() for stage in self._modules}
        self._grads: dict[int, deque[Arriving]] = {stage: deque() for stage in self._modules}
        self._in_flight: dict[int, deque[tuple[Tensor, Tensor]]] = {stage: deque() for stage in self._modules}
        self._deferred: dict[int, deque[DeferredGrads]] = {stage: deque() for stage in self._modules}

    def step(self) -> None:
        for stage in self._modules:
            for _ in range(self._m):  # all at once: there are few, and small
                self._post(self._inputs, stage, stage - 1)
        for stage, kind, *_ in self._actions:
            if kind == "F":
                self._forward(stage)
            elif kind == "W":
                self._deferred[stage].popleft().run()
            else:
                self._backward(stage, DeferredGrads() if kind == "B" else None)
        for work in self._sends:
            work.wait()
        self._sends.clear()
        for transfers in (*self._inputs.values(), *self._grads.values()):
            assert not transfers

    def _forward(self, stage: int) -> None:
        x = torch.empty(0)
        if stage > 0:
            x = self._take(self._inputs[stage]).requires_grad_()
            self._modules[stage].set_input_tensor(x)
        y = self._modules[stage]()
        if stage == len(self._rank_of) - 1:
            y = self._loss(y)
        else:
            self._hand_over(y.detach(), self._inputs, stage + 1, stage)
            self._post(self._grads, stage, stage + 1)
        self._in_flight[stage].append((x, y))

    def _backward(self, stage: int, deferred: DeferredGrads | None) -> None:
        x, y = self._in_flight[stage].popleft()
        grad = self._take(self._grads[stage]) if stage < len(self._rank_of) - 1 else None
        if deferred is None:
            y.backward(grad)
        else:
            with deferred:
                y.backward(grad)
            self._deferred[stage].append(deferred)
        if stage > 0:
            assert x.grad is not None
            self._hand_over(x.grad, self._grads, stage - 1, stage)

    def _hand_over(self, tensor: Tensor, to: dict[int, deque[Arriving]], stage: int, source: int) -> None:
        if self._rank_of[stage] == self._rank:
            to[stage].append((tensor, None))
        else:
            self._sends.append(dist.isend(tensor, self._rank_of[stage], tag=_tag(stage, source)))

    def _post(self, to: dict[int, deque[Arriving]], stage: int, source: int) -> None:
        if source >= 0 and self._rank_of[source] != self._rank:
            buffer = torch.empty(self._shape)
            to[stage].append((buffer, dist.irecv(buffer, self._rank_of[source], tag=_tag(stage, source))))

    def _take(self, arriving: deque[Arriving]) -> Tensor:
        tensor, work = arriving.popleft()
        if work is not None:
            work.wait()
        return tensor


def _tag(stage: int, source: int) -> int:
    """Of what `source` sends to `stage`, its neighbour."""
    return 2 * max(stage, source) + (stage > source)


class Dual(Runner):
    """DualPipe, which holds two stages' parameters on each rank and sends half of the microbatches each way. It is
    written for CUDA, but all that keeps it there is where it makes its buffers."""

    def __init__(self, schedule: str, m: int, make_stage: MakeStage, num_rows: int, loss: Loss, **config: Any) -> None:
        from dualpipe import DualPipe, comm

        if not torch.cuda.is_available():
            torch.cuda.current_device = lambda: torch.device("cpu")
            comm.build_from_tensor_shapes = lambda: [
                torch.empty(shape, dtype=comm.TENSOR_DTYPE, requires_grad=True) for shape in comm.TENSOR_SHAPES
            ]
        rank, size = dist.get_rank(), dist.get_world_size()
        self.num_chunks, self.splits, self.is_two_way, self.num_rows, self._m = 1, True, True, num_rows, m
        self.modules = [make_stage(index, 2 * size, "storing", None) for index in (rank, 2 * size - 1 - rank)]
        self._shape = (num_rows, 1, config.get("width", 1024))
        self._loss = loss
        self._pipe = DualPipe(tuple(self.modules))
        is_end = rank in (0, size - 1)
        self._inputs = (torch.zeros(m // 2 * num_rows, *self._shape[1:]),) if is_end else ()
        self._labels = [torch.zeros(m // 2)] if is_end else []

    def step(self) -> None:
        from dualpipe import comm

        comm.set_p2p_tensor_shapes([self._shape])
        comm.set_p2p_tensor_dtype(torch.float32)
        self._pipe.step(*self._inputs, num_chunks=self._m, criterion=self._loss, labels=self._labels)


def is_there(name: str) -> bool:
    """Whether the package of a runner can be imported."""
    module = {"megatron-core": "megatron.core", "dualpipe": "dualpipe"}.get(name.partition(" ")[0], "torch")
    try:
        importlib.import_module(module)
    except ImportError:
        return False
    return True


def find_tests() -> None:
    """The tests' fakes can be imported then."""
    tests = str(Path(__file__).parent.parent / "tests")
    if tests not in sys.path:
        sys.path.append(tests)


def prepare_megatron() -> None:
    """Its process groups, and what it takes to run it without CUDA, which the tests know."""
    find_tests()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # apex and transformer-engine are not there
        from fakes import megatron_on_cpu

        megatron_on_cpu.prepare()
        from megatron.core import parallel_state as theirs
    if not theirs.model_parallel_is_initialized():
        theirs.initialize_model_parallel(pipeline_model_parallel_size=dist.get_world_size())

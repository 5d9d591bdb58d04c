"""What a stage may do with its input and its output, and what becomes of gradients that are none."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from models import assert_same_gradients, build, reference, run
from ranks import RankPool
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

import megapipe
from megapipe import PipelineError, StageInfo, parallel_state, stages_for_rank
from megapipe.messages import check_sendable
from megapipe.overlap import run_parts
from megapipe.overlap.gaps import fill_gap
from megapipe.placement import loop
from megapipe.step import ForwardBackward
from megapipe.verbs import Verbs

SIZE = 4


class Layer(nn.Module):
    """One stage, of one layer. What it does with its input is a function of the layer and the input."""

    def __init__(self, info: StageInfo, function: Any, **config: Any) -> None:
        super().__init__()
        self.info = info
        self.config = SimpleNamespace(variable_seq_lengths=True, **config)
        self.function = function
        self.weight = nn.Parameter(torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(info.index)))
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("memory", torch.zeros(3, SIZE))
        self.input: Any = None

    def set_input_tensor(self, received: Any) -> None:
        self.input = received

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x if self.info.is_first else self.input)


def layers(schedule: str, function: Any, pp_size: int = 2, **config: Any) -> list[Layer]:
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(pp_size)
    return [Layer(info, function, **config) for info in stages_for_rank(schedule)]


def inputs(count: int) -> list[Tensor]:
    return [torch.randn(3, SIZE, generator=torch.Generator().manual_seed(100 + k)) for k in range(count)]


def loss_func(output: Any) -> tuple[Tensor, float]:
    loss = (output[0] if isinstance(output, list) else output).square().mean()
    return loss, loss.item()


def step(schedule: str, chunks: list[Layer], data: list[Tensor], **options: Any) -> list[Any]:
    def forward_step_func(iterator: Iterator[Tensor], model: Layer) -> Any:
        return model(next(iterator)), loss_func

    arguments = {"forward_step_func": forward_step_func, "data_iterator": iter(data), "num_microbatches": len(data)}
    return megapipe.get_forward_backward_func(schedule)(model=chunks, **{**arguments, **options})


def whole(
    chunks: list[Layer], data: list[Tensor], function: Any, forward_only: bool
) -> tuple[list[Layer], list[float]]:
    """The same without a pipeline."""
    num_stages = chunks[0].info.num_stages
    stages = [Layer(StageInfo(index, num_stages), function) for index in range(num_stages)]
    losses = []
    for x in data:
        with torch.set_grad_enabled(not forward_only):
            for stage in stages:
                stage.set_input_tensor([x] if isinstance(x, Tensor) else x)
                x = stage(x)
            loss, report = loss_func(x)
        losses.append(report)
        if not forward_only:
            (loss / len(data)).backward()
    return stages, losses


def compare(schedule: str, function: Any, forward_only: bool = False) -> None:
    """A step of the pipeline with one without. Gradients that are None are so in both."""
    chunks, data = layers(schedule, function), inputs(6)
    reports = step(schedule, chunks, data, forward_only=forward_only)
    stages, losses = whole(chunks, data, function, forward_only)
    if any(chunk.info.is_last for chunk in chunks):
        assert reports == losses
    for chunk in chunks:
        expected = stages[chunk.info.index].weight.grad
        assert (chunk.weight.grad is None) == (expected is None), chunk.info
        if expected is not None:
            assert torch.equal(chunk.weight.grad, expected), chunk.info


def first(received: Any) -> Tensor:
    return received if isinstance(received, Tensor) else received[0]


# What is sent on


def with_counter(layer: Layer, x: Any) -> Any:
    layer.count += 1
    if layer.info.is_first:
        return [x @ layer.weight, layer.count]
    return [(x[0] @ layer.weight) * x[1], x[1]]


def into_a_buffer(layer: Layer, x: Any) -> Tensor:
    layer.memory.copy_(first(x) @ layer.weight)
    return layer.memory


class Reused(torch.autograd.Function):
    """Its output is in the same memory every time, as a CUDA graph's."""

    @staticmethod
    def forward(ctx: Any, memory: Tensor, x: Tensor) -> Tensor:
        memory.copy_(x)
        return memory.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, grad.clone()


def from_a_function(layer: Layer, x: Any) -> Tensor:
    output = first(x) @ layer.weight
    return output if layer.info.is_last else Reused.apply(layer.memory, output)


def outputs_that_are_written_over(rank: int) -> None:
    for schedule in ("gpipe", "zbv"):
        compare(schedule, with_counter)
        compare(schedule, into_a_buffer, forward_only=True)
        compare(schedule, from_a_function)


def test_what_is_sent_is_what_was_returned(ranks: RankPool) -> None:
    """A stage that sent a counter, or had a buffer of its own for its output, wrote the next microbatch's values there
    before the last ones had left, or before the next stage of the same rank had used them."""
    ranks.run(2, outputs_that_are_written_over)


class Marked(Layer):
    """Says itself what travels, and what of it has a gradient."""

    def __init__(self, info: StageInfo, received: tuple[bool, bool], sent: tuple[bool, bool]) -> None:
        super().__init__(info, None, timeout=20.0)
        self.config.variable_seq_lengths = False
        self.marks = (received, sent)

    def infer_stage_inputs_from_pipeline_inputs(self, *_: Any) -> list[Tensor]:
        return [torch.empty(3, SIZE, requires_grad=mark) for mark in self.marks[0]]

    def infer_stage_outputs_from_pipeline_inputs(self, *_: Any) -> list[Tensor]:
        return [torch.empty(3, SIZE, requires_grad=mark) for mark in self.marks[1]]


def marked_otherwise(rank: int) -> str:
    parallel_state.initialize_model_parallel(2)
    chunk = Marked(StageInfo(rank, 2), received=(False, False), sent=(True, False))
    with pytest.raises(ValueError, match="disagree") as caught:
        step("1f1b", [chunk], inputs(2))
    return str(caught.value)


def test_stages_agree_on_what_has_a_gradient(ranks: RankPool) -> None:
    """One stage meant that the first of two tensors has a gradient, the next one that both have. The gradients of
    different microbatches were taken for each other, or a rank waited for one that never came."""
    for message in ranks.run(2, marked_otherwise):
        assert "list of float32[3, 4], float32[3, 4] without gradient on rank 0; " in message
        assert "list of float32[3, 4], float32[3, 4] on rank 1." in message


UNSENDABLE = {
    "on meta, but the model is on cpu": lambda x: x.to("meta"),
    "of layout sparse_coo": lambda x: x.to_sparse(),
    "quantized": lambda x: torch.quantize_per_tensor(x.detach(), 0.1, 0, torch.quint8),
    "nested": lambda x: torch.nested.as_nested_tensor([x[:1], x[1:]], layout=torch.jagged),
    "the key (0, 1), which is neither a string nor a whole number": lambda x: {(0, 1): x},
}


def unsendable(rank: int) -> None:
    for text, convert in UNSENDABLE.items():

        def function(layer: Layer, x: Any, convert: Any = convert) -> Any:
            return convert(x @ layer.weight) if layer.info.is_first else first(x)

        chunks = layers("1f1b", function, timeout=20.0)
        with pytest.raises(TypeError if rank == 0 else PipelineError, match="cannot be sent on") as caught:
            step("1f1b", chunks, inputs(2))
        assert text in str(caught.value)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_what_has_no_memory_is_refused(ranks: RankPool) -> None:
    """Such an output brought the process down within gloo, or failed with a word of torch's or json's."""
    ranks.run(2, unsendable)


def test_wrappers_of_tensors_are_refused() -> None:
    class Wrapper(Tensor):
        def __tensor_flatten__(self) -> Any: ...

    with pytest.raises(TypeError, match="a Wrapper, which keeps its values in other tensors"):
        check_sendable(torch.ones(2).as_subclass(Wrapper), torch.device("cpu"))
    check_sendable(nn.Parameter(torch.ones(2)), torch.device("cpu"))


# What a stage does with its input


def checkpointed(layer: Layer, x: Any) -> Tensor:
    def run_it(_: Any) -> Tensor:
        received = x if layer.info.is_first else first(layer.input)
        return ((received @ layer.weight).tanh() @ layer.weight).sin()

    return checkpoint(run_it, x, use_reentrant=False)


def recomputed(rank: int) -> None:
    for schedule in ("gpipe", "zb1p", "zbv", "dualpipev"):
        compare(schedule, checkpointed)
        chunks = [checkpoint_wrapper(chunk) for chunk in build(schedule, 2, 4)]
        run(schedule, chunks, 6)
        model, _ = reference(4, 6)
        assert_same_gradients([chunk._checkpoint_wrapped_module for chunk in chunks], model)


def test_a_chunk_is_recomputed_with_its_own_input(ranks: RankPool) -> None:
    """A checkpoint around a whole chunk runs it again in the backward, where the chunk had the input of the last
    forward: the weight gradients were silently those of other microbatches."""
    ranks.run(2, recomputed)


class Gap(torch.autograd.Function):
    """Stands for a communication in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        fill_gap()
        return grad


class InParts(Layer):
    """Each part reads the input anew, and so does what is computed again in the backward."""

    def part(self, x: Tensor) -> Tensor:
        return ((x if self.info.is_first else x + first(self.input)) @ self.weight).tanh()

    def forward_parts(self, x: Tensor) -> Iterator[None]:
        for _ in range(3):
            x = Gap.apply(checkpoint(self.part, x, use_reentrant=False))
            yield
        return x

    def forward(self, x: Tensor) -> Tensor:
        return run_parts(self.forward_parts(x))


def one_chunk_overlapped(pipe: Verbs) -> Any:
    """1F1B in which each forward of a chunk is overlapped with a backward of the same chunk."""
    num_warmup = pipe.pp_size - pipe.pp_rank
    for _ in range(num_warmup):
        pipe.recv_forward()
        pipe.forward_step()
        pipe.send_forward()
    for _ in range(pipe.num_microbatches - num_warmup):
        pipe.recv_forward()
        pipe.recv_backward()
        pipe.forward_backward_step(0, 0)
        pipe.send_forward()
        pipe.send_backward()
    for _ in range(num_warmup):
        pipe.recv_backward()
        pipe.backward_step()
        pipe.send_backward()
    return pipe.finish()


def overlapped_with_itself(rank: int) -> None:
    parallel_state.initialize_model_parallel(2)
    mine = ForwardBackward("mine", one_chunk_overlapped, loop, 1, None, False, 1)
    chunk, data = InParts(StageInfo(rank, 2), None), inputs(6)
    reports = mine(
        forward_step_func=lambda iterator, model: (model(next(iterator)), loss_func),
        data_iterator=iter(data),
        model=chunk,
        num_microbatches=6,
    )
    stages = [InParts(StageInfo(index, 2), None) for index in range(2)]
    losses = []
    for x in data:
        first_output = stages[0](x)
        stages[1].set_input_tensor([first_output])
        loss, report = loss_func(stages[1](x))
        (loss / 6).backward()
        losses.append(report)
    assert rank == 0 or reports == losses
    assert torch.equal(chunk.weight.grad, stages[rank].weight.grad)


def test_a_chunk_overlapped_with_itself_has_two_inputs(ranks: RankPool) -> None:
    ranks.run(2, overlapped_with_itself)

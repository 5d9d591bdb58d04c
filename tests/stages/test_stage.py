"""What a stage may do with its input and its output, and what becomes of gradients that are none."""

import re
import warnings
from typing import Any

import pytest
import torch
from tools import against
from tools.against import (
    Received,
    add_gradients,
    assert_same_gradients,
    chunks_of,
    normal,
    same_as_whole,
    unlabelled,
    use_groups,
)
from tools.failing import heard
from tools.models import Window, build, forward_step, reference, run
from tools.ranks import on_ranks, start_again
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

from megapipe import NoGradientWarning, PipelineError, StageInfo
from megapipe.config import StepConfig
from megapipe.messages import check_sendable
from megapipe.process_groups import all_gather_json
from megapipe.stages import Call
from megapipe.stages.stage import Stage
from megapipe.stages.unit import UnitState
from megapipe.structure import structure_of

SIZE = 4


class Layer(Received):
    """One stage, of one layer. What it does with its input is a function of the layer and the input."""

    def __init__(self, info: StageInfo, function: Any, **config: Any) -> None:
        super().__init__(info, variable_seq_lengths=True, **config)
        self.function = function
        self.weight = nn.Parameter(normal(SIZE, SIZE, seed=info.index))
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("memory", torch.zeros(3, SIZE))

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x if self.info.is_first else self.input_tensor)


def layers(schedule: str, function: Any, **config: Any) -> list[Layer]:
    return chunks_of(lambda info: Layer(info, function, **config), schedule)


def inputs(count: int) -> list[tuple[Tensor, None]]:
    return unlabelled(normal(3, SIZE, seed=100 + k) for k in range(count))


def loss_of(output: Any, target: None = None) -> Tensor:
    return (output[0] if isinstance(output, list) else output).square().mean()


def step(schedule: Any, chunks: Any, data: Any, **options: Any) -> list[Any]:
    return against.step(schedule, chunks, data, loss_of, **options)


def compare(*schedules: str, function: Any, **options: Any) -> None:
    same_as_whole(lambda info: Layer(info, function), schedules, inputs(6), loss_of, **options)


# What is sent on


def with_counter(layer: Layer, x: Any) -> Any:
    layer.count += 1
    if layer.info.is_first:
        return [x @ layer.weight, layer.count]
    return [(x[0] @ layer.weight) * x[1], x[1]]


def into_a_buffer(layer: Layer, x: Any) -> Tensor:
    layer.memory.copy_(x @ layer.weight)
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
    output = x @ layer.weight
    return output if layer.info.is_last else Reused.apply(layer.memory, output)


def kept_and_cleared(layer: Layer, x: Any) -> Tensor:
    if layer.info.is_last:
        return x @ layer.weight
    with torch.no_grad():
        getattr(layer, "kept", layer.memory).zero_()
    layer.kept = x @ layer.weight
    return layer.kept


@on_ranks(2)
def test_what_is_sent_is_what_was_returned(rank: int) -> None:
    """A stage that sent a counter, or had a buffer of its own for its output, wrote the next microbatch's values there
    before the last ones had left, or before the next stage of the same rank had used them. So did a stage that kept its
    output: autograd had made it, so it was sent without a copy."""
    for function in (kept_and_cleared, with_counter, from_a_function):
        compare("zbv", function=function)
    compare("gpipe", "zbv", function=into_a_buffer, forward_only=True)


def used_often(layer: Layer, x: Any) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return x + x @ layer.weight + x @ layer.weight.t() + x @ layer.weight.square()


@on_ranks(2)
def test_autocast_does_not_remember_what_is_received(rank: int) -> None:
    """autocast keeps the cast of a leaf for all who use it, and their gradients are then added up in bfloat16. What a
    stage received was such a leaf, and so its gradient was not the whole model's, where it is none."""
    compare("1f1b", "zbv", function=used_often)


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


@on_ranks(2)
def test_stages_agree_on_what_has_a_gradient(rank: int) -> None:
    """One stage meant that the first of two tensors has a gradient, the next one that both have. The gradients of
    different microbatches were taken for each other, or a rank waited for one that never came."""
    use_groups()
    chunk = Marked(StageInfo(rank, 2), received=(False, False), sent=(True, False))
    with pytest.raises(ValueError, match="disagree") as caught:
        step("1f1b", [chunk], inputs(2))
    assert "list of float32[3, 4], float32[3, 4] without gradient on rank 0; " in str(caught.value)
    assert "list of float32[3, 4], float32[3, 4] on rank 1." in str(caught.value)


UNSENDABLE = {
    "on meta, but the model is on cpu": lambda x: x.to("meta"),
    "of layout sparse_coo": lambda x: x.to_sparse(),
    "quantized": lambda x: torch.quantize_per_tensor(x.detach(), 0.1, 0, torch.quint8),
    "nested": lambda x: torch.nested.as_nested_tensor([x[:1], x[1:]], layout=torch.jagged),
    "the key (0, 1), which is no plain string or whole number": lambda x: {(0, 1): x},
}


@on_ranks(2)
def test_what_has_no_memory_is_refused(rank: int) -> None:
    """Such an output brought the process down within gloo, or failed with a word of torch's or json's."""
    for text, made in UNSENDABLE.items():

        def function(layer: Layer, x: Any, made: Any = made) -> Any:
            return made(x @ layer.weight) if layer.info.is_first else x

        with pytest.raises(TypeError if rank == 0 else PipelineError, match="cannot be sent on") as caught:
            step("1f1b", layers("1f1b", function, timeout=20.0), inputs(2))
        assert text in str(caught.value)
        start_again()


def test_wrappers_of_tensors_are_refused() -> None:
    class Wrapper(Tensor):
        def __tensor_flatten__(self) -> Any: ...

    with pytest.raises(TypeError, match="a Wrapper, which keeps its values in other tensors"):
        check_sendable(torch.ones(2).as_subclass(Wrapper), torch.device("cpu"))
    check_sendable(nn.Parameter(torch.ones(2)), torch.device("cpu"))


# Gradients that are none


def detaching(layer: Layer, x: Any) -> Tensor:
    detach = layer.info.index == layer.info.num_stages // 2
    return ((x.detach() if detach else x) @ layer.weight).tanh()


def detaching_now_and_then(layer: Layer, x: Any) -> Tensor:
    layer.count += 1
    detach = layer.info.is_last and layer.count % 2 == 0
    return ((x.detach() if detach else x) @ layer.weight).tanh()


def detaching_one_of_two(layer: Layer, x: Any) -> Any:
    if layer.info.is_first:
        return [(x @ layer.weight).tanh(), (x @ layer.weight).sin()]
    if layer.info.is_last:
        return (x[0] @ layer.weight + x[1].detach()).tanh()
    return [(x[0] @ layer.weight).tanh(), x[1]]


def with_nothing_beside(layer: Layer, x: Any) -> Any:
    """A message with a tensor without elements, and no gradient for either."""
    if layer.info.is_first:
        return [(x @ layer.weight).tanh(), x[:0] @ layer.weight]
    y = (x[0] @ layer.weight + x[1].sum()).tanh()
    return y.detach() @ layer.weight if layer.info.is_last else [y, x[1]]


@pytest.mark.filterwarnings("ignore::megapipe.NoGradientWarning")
@on_ranks(2)
def test_stages_before_one_that_detaches_get_zeros(rank: int) -> None:
    """They got none on the CPU, unless a message had a tensor without elements, and zeros on a device from the second
    step on: weight decay made the same weights smaller on one and not on the other."""
    compare("zbv", function=detaching_now_and_then)
    compare("zb1p", "dualpipev", function=detaching_one_of_two)
    for function, schedule in ((detaching, "zbv"), (with_nothing_beside, "1f1b")):
        chunks = layers(schedule, function)
        num_stages = chunks[0].info.num_stages
        expected = [Layer(StageInfo(index, num_stages), function) for index in range(num_stages)]
        step(schedule, chunks, inputs(6))
        add_gradients(expected, inputs(6), loss_of)
        wanted = [stage.weight.grad for stage in expected]
        assert wanted[0] is None
        for chunk in chunks:
            want = wanted[chunk.info.index]
            assert torch.equal(chunk.weight.grad, torch.zeros(SIZE, SIZE) if want is None else want)


class Delayed(Layer):
    """As transformer-engine's modules, which fail in W where there was no B. Detaches its input."""

    def __init__(self, info: StageInfo) -> None:
        super().__init__(info, None)
        self.kept: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        output = (x if self.info.is_first else self.input_tensor.detach()) @ self.weight
        output.register_hook(lambda _: self.kept.append(1))
        return output

    def backward_dw(self) -> None:
        self.kept.pop()


@pytest.mark.filterwarnings("ignore::megapipe.NoGradientWarning")
@on_ranks(2)
def test_no_w_of_modules_own_without_a_b(rank: int) -> None:
    for schedule in ("1f1b", "zbv"):
        chunks = chunks_of(Delayed, schedule)
        step(schedule, chunks, inputs(4))
        assert not any(chunk.kept for chunk in chunks)


# What is not trained

MISTAKES = {
    "the loss of stage 1 has no gradient .*stages 0 to 1 are not": lambda layer, x: (
        (x @ layer.weight).detach() if layer.info.is_last else x @ layer.weight
    ),
    "the output of stage 0 has no gradient .*it is not": lambda layer, x: (
        (x @ layer.weight).detach() if layer.info.is_first else x @ layer.weight
    ),
    "stage 1 gives stage 0 no gradient": lambda layer, x: (
        (x if layer.info.is_first else torch.ones(3, SIZE)) @ layer.weight
    ),
}


def through(layer: Layer, x: Any) -> Tensor:
    return x @ layer.weight


@on_ranks(2)
def test_a_stage_that_trains_nothing_says_so_once(rank: int) -> None:
    """A loss or an output that was detached by mistake, or an input that was not used, trained nothing, and nobody said
    so. Stages that are frozen mean it."""
    for text, function in MISTAKES.items():
        chunks = layers("1f1b", function)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                step("1f1b", chunks, inputs(4))
            warnings.simplefilter("ignore", NoGradientWarning)
            step("1f1b", layers("1f1b", function), inputs(4))
        said = [str(one.message) for one in caught if one.category is NoGradientWarning]
        at_first, at_last = all_gather_json(said)
        (warned,) = at_first + at_last
        assert re.match(text, warned), warned
    (chunk,) = layers("1f1b", through)
    chunk.weight.requires_grad_(chunk.info.is_last)  # a frozen first stage
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step("1f1b", [chunk], inputs(2))


# What a stage does with its input


def checkpointed(layer: Layer, x: Any) -> Tensor:
    def run_it(batch: Any) -> Tensor:
        received = batch if layer.info.is_first else layer.input_tensor
        return ((received @ layer.weight).tanh() @ layer.weight).sin()

    return checkpoint(run_it, x, use_reentrant=False)


@on_ranks(2)
def test_a_chunk_is_recomputed_with_its_own_input(rank: int) -> None:
    """A checkpoint around a whole chunk runs it again in the backward, where the chunk had the input of the last
    forward: the weight gradients were silently those of other microbatches."""
    compare("zbv", function=checkpointed)
    chunks = [checkpoint_wrapper(chunk) for chunk in build("dualpipev", 2, 4)]
    run("dualpipev", chunks, 4)
    assert_same_gradients([chunk._checkpoint_wrapped_module for chunk in chunks], reference(4, 4)[0])


def in_place(layer: Layer, x: Any) -> Tensor:
    return x.relu_() @ layer.weight


def stop_iteration(layer: Layer, x: Any) -> Tensor:
    return next(iter([]))


@on_ranks(2)
def test_what_a_model_does_wrong_is_said(rank: int) -> None:
    """An operation in place on what a stage received failed with torch's word on leaves, and StopIteration within a
    model was reported as the end of data_iterator."""
    found = []
    for function in (in_place, stop_iteration):
        chunks = layers("1f1b", function, timeout=20.0)
        found.append(heard(lambda: step("1f1b", chunks, inputs(2)), Exception))  # noqa: B023
        start_again()
    assert re.search("stage 1 failed for microbatch 0: a (view of a )?leaf Variable that requires grad", found[0])
    assert "That is what it received: compute its first result out of place" in found[0]
    assert "the model of stage 0 raised StopIteration for microbatch 0" in found[1]


def in_a_function(layer: Layer, x: Any) -> Tensor:
    return Window.apply(x @ layer.weight)


@on_ranks(2)
def test_a_stage_may_end_in_a_python_function(rank: int) -> None:
    """A stage is kept as the edges of its graph. The node of a Python Function goes with its outputs, though an edge to
    it is held, so that the backward of a stage that ends in one found no graph any more."""
    compare("gpipe", function=in_a_function)


class Shifted(Received):
    """Scales its input, or shifts it, both seen as matrices: then the shift's gradient is a view, and the input's."""

    def __init__(self, info: StageInfo) -> None:
        super().__init__(info, hidden_size=3)
        self.weight = nn.Parameter(torch.arange(12.0 if info.index % 2 else 3.0))

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.info.is_first else self.input_tensor
        if self.info.index % 2:
            return (x.view(4, 3) + self.weight.view(4, 3)).view(2, 2, 3)
        return x * self.weight


@on_ranks(1)
def test_an_input_gradient_shares_no_memory_with_a_parameters(rank: int) -> None:
    """Autograd may make a view of one and the same tensor a parameter's `.grad` and another one the input's gradient.
    The next microbatch was then added to both, and what was on its way to the stage below was silently wrong."""
    data = [(torch.full((2, 2, 3), float(number)), None) for number in range(1, 5)]
    same_as_whole(Shifted, ["looped_bfs"], data, lambda output, _: output.square().sum())


def test_an_input_gradient_is_not_what_a_hook_keeps() -> None:
    """A hook that kept the gradient of its stage's input, and wrote to it for the next microbatch, as one that averages
    them does, wrote to what had not been sent yet."""
    leaf, kept = torch.ones(2, requires_grad=True), []
    leaf.register_post_accumulate_grad_hook(lambda x: kept.append(x.grad))
    unit = UnitState(0)
    unit.inputs, unit.edges = [leaf], [torch.autograd.graph.get_gradient_edge(leaf * 2)]
    unit.output_grads = [torch.ones(2)]
    module = nn.Identity()
    step = forward_step, [None], [module], 1, StepConfig(), torch.device("cpu"), torch.zeros(())
    Stage(StageInfo(1, 3), 0, Call(*step, [structure_of(module)]), None).BW(unit)
    kept[0].zero_()
    assert unit.input_grads is not None
    (grad,) = unit.input_grads.tensors
    assert grad.tolist() == [2, 2]


@on_ranks(1)
def test_an_error_about_another_list_is_left_as_it_is(rank: int) -> None:
    """A list of the model's own that cannot be called was taken for the one of set_input_tensor, by the word in the
    error's text. The sentence that followed said to keep input[0], where there was nothing to keep."""
    use_groups()
    chunks = layers("1f1b", lambda layer, x: layer.weight.tolist()())
    with pytest.raises(TypeError, match=r"^'list' object is not callable$"):
        against.step("1f1b", chunks, inputs(1))

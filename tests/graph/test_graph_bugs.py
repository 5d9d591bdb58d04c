"""What captured stages once got wrong."""

from __future__ import annotations

import copy
import dataclasses
import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from graphs import skip_without_tracer
from torch import Tensor, nn

from megapipe import graph
from megapipe.weight_grad import DeferredGrads, deferring

skip_without_tracer()

H = 8


def example() -> Tensor:
    return torch.randn(5, 2, H, requires_grad=True)


def assert_same_as_eager(module: nn.Module, num_microbatches: int = 1, **options: Any) -> None:
    """Gradients, also where several Bs come before their Ws."""
    captured = graph.capture(copy.deepcopy(module), (example(),), **options)
    inputs = [example().detach() for _ in range(num_microbatches)]
    for one, is_split in ((module, False), (captured, True)):
        all_deferred = []
        for x in inputs:
            deferred = DeferredGrads() if is_split else None
            y = one(x.clone().requires_grad_())
            with deferring(deferred):
                y.sin().sum().backward()
            all_deferred.append(deferred)
        for deferred in filter(None, all_deferred):
            deferred.run()
    for (name, expected), found in zip(module.named_parameters(), captured.parameters()):
        assert torch.equal(found.grad, expected.grad), name


class Rotary(nn.Module):
    """As in Llama, by complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(H, H)
        self.register_buffer("angles", torch.polar(torch.ones(4), torch.arange(4.0)))

    def forward(self, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(self.linear(x).unflatten(-1, (4, 2)))
        return torch.view_as_real(pairs * self.angles).flatten(-2)


def test_complex_numbers() -> None:
    """A conjugate looked like the tensor it is of, in shape, stride, offset and dtype, and was dropped as a view that
    changes nothing. Rotary embeddings had wrong gradients, silently."""
    for options in ({}, {"recompute": True}):
        assert_same_as_eager(Rotary(), **options)


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(H, H)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def test_a_stage_that_cannot_be_given_an_input() -> None:
    """Every captured stage had a set_input_tensor, which those without one of their own then ignored. What the stage
    before sent was lost, where an eager stage is refused."""
    assert not hasattr(graph.capture(Plain(), (example(),)), "set_input_tensor")


class KeepsInList(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.losses: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.losses.append(y.square().mean())
        return y


class KeepsInDict(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.cache: dict[int, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        if len(x) not in self.cache:
            self.cache[len(x)] = torch.arange(float(len(x))).view(-1, 1, 1)
        return self.linear(x) * self.cache[len(x)]


@pytest.mark.parametrize("kind", [KeepsInList, KeepsInDict])
def test_tensors_kept_in_containers(kind: type[nn.Module]) -> None:
    """Attributes were compared as a whole, so a tensor put into a list was not noticed, and auxiliary losses vanished.
    What tracing had put there stayed, and the module could not even be run eagerly any more."""
    module = kind()
    with pytest.raises(graph.CaptureError, match=r"keeps a tensor as Keeps\w+\.(losses|cache)"):
        graph.capture(module, (example(),))
    module(example()).sum().backward()


class UsesAttribute(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.mask = torch.ones(H)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.mask


def test_a_tensor_that_is_not_registered() -> None:
    """Torch's own assertion came through, about fake tensors. It says neither which stage nor what to do."""
    with pytest.raises(graph.CaptureError, match=r"test_graph_bugs.*no parameter, buffer or input.*register it"):
        graph.capture(UsesAttribute(), (example(),))


def test_modules_changed_after_capture() -> None:
    """A layer put in place of another after capture, as low-rank adapters are, was never run nor trained: the graph had
    the old one."""
    stage = graph.capture(nn.Sequential(nn.Linear(H, H), nn.Tanh()), (example(),))
    stage[0].weight = nn.Parameter(torch.zeros(H, H))  # another parameter is looked up anew
    assert torch.equal(stage(example()), stage[0].bias.tanh().expand(5, 2, H))
    stage[0] = nn.Linear(H, H)
    with pytest.raises(RuntimeError, match="other modules or ties than when it was captured"):
        stage(example())


def test_a_parameter_that_is_a_buffer_too() -> None:
    """It had two names, which torch's functional_call refuses."""
    module = Plain()
    module.register_buffer("again", module.linear.weight)
    assert_same_as_eager(module)


class HandsOutWhatItSaved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, p: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x + p.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        (x,) = ctx.saved_tensors
        return grad, x.reshape(10, H)


class SavedIsGradient(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.linear = nn.Linear(H, H), nn.Linear(H, H)
        self.p = nn.Parameter(torch.randn(10, H))

    def forward(self, x: Tensor) -> Tensor:
        y = self.before(x).tanh()
        return self.linear(y) + HandsOutWhatItSaved.apply(y, self.p)


def test_a_gradient_in_memory_that_w_reads() -> None:
    """A saved tensor handed out as a gradient became `.grad`, and the next B added to it in place. The W of the first
    read it only afterwards."""
    assert_same_as_eager(SavedIsGradient(), num_microbatches=3)


class DropsNothing(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(torch.native_dropout(self.linear(x), 0.5, False)[0])


def test_recomputed_dropout_that_does_not_train() -> None:
    """Recomputing multiplied with the mask over 1 - p, whether the dropout was in training or not."""
    assert_same_as_eager(DropsNothing(), recompute=True)


def test_a_forward_of_its_own() -> None:
    """An attribute hides the class's method, and so it hid the graph: the stage stayed eager without a word."""
    module = Plain()
    module.forward = module.linear.forward
    with pytest.raises(ValueError, match="has a forward of its own"):
        graph.capture(module, (example(),))


@dataclasses.dataclass
class Output:
    y: Tensor


class ReturnsObject(Plain):
    def forward(self, x: Tensor) -> tuple[Tensor, Output]:
        y = self.linear(x)
        return y, Output(y * 2)


class DropsLayers(Plain):
    """As LayerDrop does."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) if self.draw() < 0.5 else x


def test_what_a_graph_would_not_do() -> None:
    """Tensors in an object that torch's pytrees do not know were those of the tracing, and Python's random numbers were
    drawn once, for ever. Nothing was said of either."""
    with pytest.raises(graph.CaptureError, match=r"returns a Output with tensors in it.*dict, list or tuple"):
        graph.capture(ReturnsObject(), (example(),))
    for draw in (random.random, numpy.random.rand):
        before = random.getstate(), numpy.random.get_state()[2]
        with pytest.raises(graph.CaptureError, match=r"draws random numbers of (Python|NumPy)"):
            graph.capture(DropsLayers(draw), (example(),))
        assert before == (random.getstate(), numpy.random.get_state()[2])


class Scales(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scales", torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scales.sum() / len(self.scales)


def test_a_buffer_of_another_shape() -> None:
    """The shapes of parameters and buffers are in the graph, and nobody looked whether they were still the same."""
    stage = graph.capture(Scales(), (example(),))
    stage.scales = torch.ones(4)
    x = example()
    assert torch.equal(stage(x), stage.linear(x))


def test_captured_again_in_inference_mode() -> None:
    """A mode that was first run in validation, under torch.inference_mode, was captured without a backward. Run in
    training afterwards, it had none."""
    stage = graph.capture(Plain(), (example(),)).eval()
    with torch.inference_mode():
        stage(example())
    stage(example()).sum().backward()
    assert stage.linear.weight.grad is not None


def test_copies_of_a_captured_stage() -> None:
    """Which modules a stage has was kept by where they lie in memory, so a copy, as averages of weights are kept in,
    was refused: it had "other modules"."""
    module = nn.Sequential(Plain(), nn.GELU(), Plain(), nn.Dropout(0.5))
    plain, captured = copy.deepcopy(module), graph.capture(module, (example(),))
    captured(example())
    copied = copy.deepcopy(captured)
    for one in (plain, copied):
        torch.manual_seed(3)
        for parameter in one.parameters():
            nn.init.normal_(parameter)
    for is_training in (True, False):  # evaluation is captured after it was copied
        for x in (example(), example()):
            results = []
            for one in (plain, copied):
                torch.manual_seed(4)
                one.train(is_training)(x).sin().sum().backward()
                results.append([x.grad, *(parameter.grad for parameter in one.parameters())])
                x.grad = None
            assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
    assert all(parameter.grad is None for parameter in captured.parameters())
    copied[0] = Plain()
    with pytest.raises(RuntimeError, match="has other modules"):
        copied(example())
    captured(example())


def test_an_input_changed_between_b_and_w() -> None:
    """Autograd watches what a stage saved until B, and nobody watched it from there to W: the gradient was wrong."""
    stage, x, deferred = graph.capture(Plain(), (example(),)), example(), DeferredGrads()
    output = stage(x)
    with deferring(deferred):
        output.sum().backward()
    x.detach().zero_()
    with pytest.raises(RuntimeError, match="was changed in place between its B and its W"):
        deferred.run()

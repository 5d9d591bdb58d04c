"""A stage that cannot be a graph, or that is used otherwise than it was captured, is refused, with the line."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from tools.graphs import H, Part, Plain, sequence, skip_without_tracer
from torch import Tensor, nn

from megapipe import graph, weight_grad

skip_without_tracer()


class Refused(nn.Module):
    """Forwards that cannot be graphs."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.linear, self.dropout = nn.Linear(H, H), nn.Dropout(0.5)
        self.register_buffer("count", torch.zeros(4))
        self.register_buffer("part", self.count[:2])

    def forward(self, x: Tensor) -> Tensor:
        return getattr(self, self.how)(self.linear(x), x)

    def branch(self, y: Tensor, x: Tensor) -> Tensor:
        if y.sum() > 0:
            return y
        return -y

    def mask(self, y: Tensor, x: Tensor) -> Tensor:
        return y[y > 0].sum()

    def number(self, y: Tensor, x: Tensor) -> Tensor:
        return y * y.detach().max().item()

    def seeded(self, y: Tensor, x: Tensor) -> Tensor:
        torch.manual_seed(3)
        return self.dropout(y)

    def forked(self, y: Tensor, x: Tensor) -> Tensor:
        with torch.random.fork_rng(devices=[]):
            return self.dropout(y)

    def state(self, y: Tensor, x: Tensor) -> Tensor:
        torch.set_rng_state(torch.get_rng_state())
        return self.dropout(y)

    def data(self, y: Tensor, x: Tensor) -> Tensor:
        self.linear.bias.data = self.linear.bias.data + 1
        return y

    def view(self, y: Tensor, x: Tensor) -> Tensor:
        self.part.add_(1)
        return y * self.count.sum()

    def attribute(self, y: Tensor, x: Tensor) -> Tensor:
        self.last = y
        return y

    def buffer(self, y: Tensor, x: Tensor) -> Tensor:
        self.count = self.count + 1
        return y

    def in_place(self, y: Tensor, x: Tensor) -> Tensor:
        self.linear.bias.detach().add_(1)
        return y

    def deferring(self, y: Tensor, x: Tensor) -> Tensor:
        return Deferring.apply(y, self.linear.weight)


class Deferring(torch.autograd.Function):
    """Somebody's own that puts its weight gradient off."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        weight_grad.defer(ctx.weight, lambda: grad.flatten(0, 1).t() @ x.flatten(0, 1))
        return grad @ ctx.weight, None


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("branch", r"test_graph_refusals.py:\d+ \(if y.sum\(\) > 0:\) .*leave this stage eager"),
        ("mask", r"test_graph_refusals.py:\d+ \(return y\[y > 0\].sum\(\)\)"),
        ("number", r"test_graph_refusals.py:\d+ \(return y \* y.detach\(\).max\(\).item\(\)\)"),
        ("seeded", r"test_graph_refusals.py:\d+ \(torch.manual_seed\(3\)\) it sets the seed"),
        ("forked", r"test_graph_refusals.py:\d+ \(with torch.random.fork_rng.*\) it sets the seed or the state"),
        ("state", r"test_graph_refusals.py:\d+ \(torch.set_rng_state.*\) it sets the seed or the state"),
        ("data", r"test_graph_refusals.py:\d+ \(self.linear.bias.data = .*\) it replaces the .data"),
        ("view", "shares its memory with another"),
        ("attribute", "keeps a tensor as Refused.last"),
        ("buffer", "replaces the buffer count of Refused"),
        ("in_place", "changes linear.bias in place"),
        ("deferring", "return the gradient from the Function's backward"),
    ],
)
def test_refused(how: str, said: str) -> None:
    stage, x = Refused(how), sequence()
    state = torch.get_rng_state()
    with pytest.raises((ValueError, TypeError), match=said):
        graph.capture(stage, (x,))
    assert type(stage) is Refused, "as it was"
    assert not hasattr(stage, "last")
    assert torch.equal(torch.get_rng_state(), state)


class Outputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(H, H)

    def forward(self, x: Tensor, scale: float = 1.0, flag: bool = False) -> dict[str, Any]:
        return {"y": self.linear(x) * scale, "flag": flag}


def test_called_otherwise_than_captured() -> None:
    stage = graph.capture(Outputs(), (sequence(),), input_tensor=None)
    with pytest.raises(ValueError, match=r"captured with \[5, 2, 16\] float32 on cpu, but called with tensor 0 as \[6"):
        stage(torch.randn(6, 2, H))
    with pytest.raises(ValueError, match=r"captured with 1\.0, but called with the value 2\.0"):
        stage(sequence(), scale=2.0)
    with pytest.raises(
        ValueError, match=r"captured with \(\[None\], \(tensor, 1.0, False\), .* but called with \(\[None\], \(\[tensor"
    ):
        stage([sequence()])
    part = graph.capture(Part(nn.Linear(H, H)), (None,), input_tensor=torch.empty(5, 2, H))
    with pytest.raises(ValueError, match=r"but called with \(\[None\]"):
        part(None)  # set_input_tensor was not called
    first = graph.capture(nn.Linear(H, H), (sequence().detach(),))
    with pytest.raises(ValueError, match="with requires_grad"):
        first(sequence())
    x = torch.randn(2, 5, H).transpose(0, 1)  # laid out otherwise
    assert torch.equal(first(x), F.linear(x, first.weight, first.bias))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("no module", ()), "takes a module"),
        ((nn.Linear(2, 2), torch.zeros(2, 2)), r"write \(x,\) for one tensor"),
        ((nn.Linear(2, 2), (torch.zeros(2, 2),), None, torch.zeros(1)), "has no set_input_tensor"),
    ],
)
def test_wrong_use(arguments: tuple[Any, ...], said: str) -> None:
    *positional, input_tensor = (*arguments, None) if len(arguments) < 4 else arguments
    with pytest.raises((TypeError, ValueError), match=said):
        graph.capture(*positional, input_tensor=input_tensor)
    if isinstance(arguments[0], nn.Module):
        captured = graph.capture(nn.Linear(2, 2), (torch.zeros(2, 2),))
        with pytest.raises(ValueError, match="is captured already"):
            graph.capture(captured, (torch.zeros(2, 2),))


# Once not refused


def test_a_stage_that_cannot_be_given_an_input() -> None:
    """Every captured stage had a set_input_tensor, which those without one of their own then ignored. What the stage
    before sent was lost, where an eager stage is refused."""
    assert not hasattr(graph.capture(Plain(), (sequence(),)), "set_input_tensor")


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
        graph.capture(module, (sequence(),))
    module(sequence()).sum().backward()


class UsesAttribute(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.mask = torch.ones(H)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.mask


def test_a_tensor_that_is_not_registered() -> None:
    """Torch's own assertion came through, about fake tensors. It says neither which stage nor what to do."""
    with pytest.raises(graph.CaptureError, match=r"test_graph_refusals.*no parameter, buffer or input.*register it"):
        graph.capture(UsesAttribute(), (sequence(),))


def test_modules_changed_after_capture() -> None:
    """A layer put in place of another after capture, as low-rank adapters are, was never run nor trained: the graph had
    the old one."""
    stage = graph.capture(nn.Sequential(nn.Linear(H, H), nn.Tanh()), (sequence(),))
    stage[0].weight = nn.Parameter(torch.zeros(H, H))  # another parameter is looked up anew
    assert torch.equal(stage(sequence()), stage[0].bias.tanh().expand(5, 2, H))
    stage[0] = nn.Linear(H, H)
    with pytest.raises(RuntimeError, match="other modules or ties than when it was captured"):
        stage(sequence())


def test_a_forward_of_its_own() -> None:
    """An attribute hides the class's method, and so it hid the graph: the stage stayed eager without a word."""
    module = Plain()
    module.forward = module.linear.forward
    with pytest.raises(ValueError, match="has a forward of its own"):
        graph.capture(module, (sequence(),))


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
        graph.capture(ReturnsObject(), (sequence(),))
    for draw in (random.random, numpy.random.rand):
        before = random.getstate(), numpy.random.get_state()[2]
        with pytest.raises(graph.CaptureError, match=r"draws random numbers of (Python|NumPy)"):
            graph.capture(DropsLayers(draw), (sequence(),))
        assert before == (random.getstate(), numpy.random.get_state()[2])

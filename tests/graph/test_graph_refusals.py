"""A stage that cannot be a graph, or that is used otherwise than it was captured, is refused, with the line."""

from __future__ import annotations

import dataclasses
import random
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
        self.scale, self.losses, self.cache = torch.ones(H), [], {"calls": 0}

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

    def seeded_itself(self, y: Tensor, x: Tensor) -> Tensor:
        torch.default_generator.manual_seed(3)
        return self.dropout(y)

    def seeded_on_device(self, y: Tensor, x: Tensor) -> Tensor:
        torch.cuda.default_generators[0].manual_seed(3)
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

    def late(self, y: Tensor, x: Tensor) -> Tensor:
        if not hasattr(self, "scale_late"):
            self.register_buffer("scale_late", torch.arange(float(H)))
        return y * self.scale_late

    def late_weight(self, y: Tensor, x: Tensor) -> Tensor:
        self.register_parameter("bias", nn.Parameter(torch.zeros(H)))
        return y + self.bias

    def removed(self, y: Tensor, x: Tensor) -> Tensor:
        del self.part
        return y

    def counted(self, y: Tensor, x: Tensor) -> Tensor:
        self.cache["calls"] += 1
        return y * self.cache["calls"]

    def in_place(self, y: Tensor, x: Tensor) -> Tensor:
        self.linear.bias.detach().add_(1)
        return y

    def deferring(self, y: Tensor, x: Tensor) -> Tensor:
        return Deferring.apply(y, self.linear.weight)

    def in_list(self, y: Tensor, x: Tensor) -> Tensor:
        self.losses.append(y.square().mean())
        return y

    def in_dict(self, y: Tensor, x: Tensor) -> Tensor:
        if len(x) not in self.cache:
            self.cache[len(x)] = torch.arange(float(len(x))).view(-1, 1, 1)
        return y * self.cache[len(x)]

    def written(self, y: Tensor, x: Tensor) -> Tensor:
        return y * self.scale.add_(1)

    def unregistered(self, y: Tensor, x: Tensor) -> Tensor:
        return y * self.scale

    def addressed(self, y: Tensor, x: Tensor) -> Tensor:
        return y if y.data_ptr() % 2 else x

    def to_numpy(self, y: Tensor, x: Tensor) -> Tensor:
        return y * float(y.detach().numpy().max())

    def in_object(self, y: Tensor, x: Tensor) -> tuple[Tensor, Output]:
        return y, Output(y * 2)

    def in_slots(self, y: Tensor, x: Tensor) -> tuple[Tensor, Slotted]:
        return y, Slotted(y * 2)

    def dropped(self, y: Tensor, x: Tensor) -> Tensor:
        return y if random.random() < 0.5 else x

    def dropped_by_numpy(self, y: Tensor, x: Tensor) -> Tensor:
        return y if numpy.random.rand() < 0.5 else x


@dataclasses.dataclass
class Output:
    y: Tensor


@dataclasses.dataclass(slots=True)
class Slotted:
    y: Tensor


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
        ("seeded_itself", "it sets the seed or the state"),
        ("seeded_on_device", r"test_graph_refusals.py:\d+ \(torch.cuda.default_gen.*\) it sets the seed or the state"),
        ("forked", r"test_graph_refusals.py:\d+ \(with torch.random.fork_rng.*\) it sets the seed or the state"),
        ("state", r"test_graph_refusals.py:\d+ \(torch.set_rng_state.*\) it sets the seed or the state"),
        ("data", r"test_graph_refusals.py:\d+ \(self.linear.bias.data = .*\) it replaces the .data"),
        ("view", "shares its memory with another"),
        ("attribute", "keeps a tensor as Refused.last"),
        ("buffer", "registers, replaces or removes count of Refused"),
        ("late", "registers, replaces or removes scale_late of Refused"),
        ("late_weight", "registers, replaces or removes bias of Refused"),
        ("removed", "registers, replaces or removes part of Refused"),
        ("counted", "changes calls, a number.*Keep it in a buffer"),
        ("in_place", "changes linear.bias in place"),
        ("deferring", "return the gradient from the Function's backward"),
        ("in_list", r"keeps a tensor as Refused\.losses"),
        ("in_dict", r"keeps a tensor as Refused\.cache"),
        ("unregistered", r"test_graph_refusals.*no parameter, buffer or input.*register it"),
        ("written", r"test_graph_refusals.*no parameter, buffer or input.*register it"),
        ("addressed", r"test_graph_refusals.py:\d+ \(return y if .*\) it reads a tensor's memory"),
        ("to_numpy", r"test_graph_refusals.py:\d+ \(return y \* float\(.*\)\) it reads a tensor's memory"),
        ("in_slots", r"returns a Slotted with tensors in it"),
        ("in_object", r"returns a Output with tensors in it.*dict, list or tuple"),
        ("dropped", "draws random numbers of Python"),
        ("dropped_by_numpy", "draws random numbers of NumPy"),
    ],
)
def test_refused(how: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some once were not: tensors in containers and objects were those of the tracing, for ever, and what tracing had
    put there stayed, so that the module could not be run eagerly any more; random numbers besides torch's were drawn
    once; of what is not registered torch's own assertion spoke, about fake tensors, and it was written to. What a
    forward registered stayed, as a tensor of the tracing, or was captured as a constant; counts of calls stood
    still. Where a tensor's memory was read, as cuDNN's LSTM does, torch's own error spoke, without a line."""
    if not torch.cuda.default_generators:
        monkeypatch.setattr(torch.cuda, "default_generators", (torch.Generator(),))
    stage, x = Refused(how), sequence()
    states = torch.get_rng_state().tolist(), random.getstate(), numpy.random.get_state()[2]
    with pytest.raises((ValueError, TypeError), match=said):
        graph.capture(stage, (x,))
    assert type(stage) is Refused, "as it was"
    assert not hasattr(stage, "last")
    assert (stage.losses, stage.cache) == ([], {"calls": 0})
    assert torch.equal(stage.scale, torch.ones(H))
    assert ([*stage._parameters], [*stage._buffers]) == ([], ["count", "part"])
    assert states == (torch.get_rng_state().tolist(), random.getstate(), numpy.random.get_state()[2])


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

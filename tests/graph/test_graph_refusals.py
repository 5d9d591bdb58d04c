"""A stage that cannot be a graph, or that is used otherwise than it was captured, is refused, with the line."""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from fuzz.forwards import Forward, judge
from tools.graphs import H, Part, Plain, sequence, skip_without_tracer
from tools.ranks import on_ranks
from torch import Tensor, nn

from megapipe import graph, weight_grad

skip_without_tracer()


class Refused(nn.Module):
    """Forwards that cannot be graphs."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.linear = nn.Linear(H, H)
        self.register_buffer("count", torch.zeros(4))
        self.register_buffer("part", self.count[:2])

    def forward(self, x: Tensor) -> Tensor:
        return getattr(self, self.how)(self.linear(x), x)

    def size_of_output(self, y: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return y, y[y > 0] * 2

    def exchange(self, y: Tensor, x: Tensor) -> Tensor:
        total = y.detach().clone()
        torch.distributed.all_reduce(total)
        return y + total

    def view(self, y: Tensor, x: Tensor) -> Tensor:
        self.part.add_(1)
        return y * self.count.sum()

    def deferring(self, y: Tensor, x: Tensor) -> Tensor:
        return Deferring.apply(y, self.linear.weight)

    def in_object(self, y: Tensor, x: Tensor) -> tuple[Tensor, Output]:
        return y, Output(y * 2)

    def in_slots(self, y: Tensor, x: Tensor) -> tuple[Tensor, Slotted]:
        return y, Slotted(y * 2)


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
        ("size_of_output", r"refusals.py:\d+ \(return y, y\[y > 0\] \* 2\) a size depends .* the stage returns"),
        ("view", "shares its memory with another"),
        ("deferring", "return the gradient from the Function's backward"),
        ("in_slots", r"returns a Slotted with tensors in it"),
        ("in_object", r"returns a Output with tensors in it.*dict, list or tuple"),
    ],
)
def test_refused(how: str, said: str) -> None:
    stage, x = Refused(how), sequence()
    states = torch.get_rng_state().tolist(), random.getstate(), numpy.random.get_state()[2]
    with pytest.raises((ValueError, TypeError), match=said):
        graph.capture(stage, (x,))
    assert type(stage) is Refused, "as it was"
    assert [*stage._buffers] == ["count", "part"]
    assert states == (torch.get_rng_state().tolist(), random.getstate(), numpy.random.get_state()[2])


@on_ranks(2)
def test_plain_functions_of_torch_distributed(rank: int) -> None:
    """Stages with them were said to draw random numbers of Python, which torch does for them while it traces."""
    with pytest.raises(ValueError, match=r"refusals.py:\d+ \(torch.distributed.all_reduce\(total\)\) it calls a func"):
        graph.capture(Refused("exchange"), (sequence(),))


CACHE = 'cache = vars(self).setdefault("cache", {"calls": 0});'


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("made[-1] if len(made[-1][made[-1] > 0]) > 3 else made[0]", r"forwards.py:\d+ \(.*goes by the values"),
        ("made[-1] * (made[-1].max() > 0).item()", r"forwards.py:\d+ \(.*reads whether something is so"),
        ("made[-1] if made[-1].sum() > 0 else made[0]", r"forwards.py:\d+ \(.*leave this stage eager"),
        ("made[-1] if random.random() < 0.5 else made[0]", "draws random numbers of Python"),
        ("made[-1] if numpy.random.rand() < 0.5 else made[0]", "draws random numbers of NumPy"),
        ("made[-1] * made[-1].detach().max().item()", r"forwards.py:\d+ \(.*a number with a fraction"),
        ("torch.manual_seed(3); z = made[-1]", r"forwards.py:\d+ \(.* it sets the seed"),
        ("torch.cuda.default_generators[0].manual_seed(3); z = made[-1]", "it sets the seed or the state"),
        ("with torch.random.fork_rng(devices=[]): F.dropout(made[-1])", "it sets the seed or the state"),
        ("torch.set_rng_state(torch.get_rng_state())", "it sets the seed or the state"),
        ("self.head.bias.data = self.head.bias.data + 1", r"forwards.py:\d+ \(.* it replaces the .data"),
        ("self.last = made[-1]", "keeps a tensor as Net.last"),
        ("self.mean = self.mean + 1", "registers, replaces or removes mean of Net"),
        ("late(self); z = made[-1] * self.late", "registers, replaces or removes late of Net"),
        ('self.register_parameter("weight", nn.Parameter(torch.ones(D)))', "replaces or removes weight of Net"),
        (f'{CACHE} cache["calls"] += 1; z = made[-1] * cache["calls"]', "changes calls, a number.*Keep it in a buffer"),
        ("self.head.bias.detach().add_(1)", "changes head.bias in place"),
        ("self.kept.append(made[-1].square().mean())", r"keeps a tensor as Net\.kept"),
        (f"{CACHE} cache[B] = made[-1]", r"keeps a tensor as Net\.cache"),
        ("made[-1] * self.plain", r"forwards.py.*no parameter, buffer or input.*register it"),
        ("made[-1] * self.plain.add_(1)", r"forwards.py.*no parameter, buffer or input.*register it"),
        ("made[-1] if made[-1].data_ptr() % 2 else made[0]", r"forwards.py:\d+ \(.* it reads a tensor's memory"),
        ("made[-1] * float(made[-1].detach().numpy().max())", r"forwards.py:\d+ \(.* it reads a tensor's memory"),
    ],
)
def test_lines_that_are_refused(line: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some once were not: tensors in containers and objects were those of the tracing, for ever, and what tracing had
    put there stayed, so that the module could not be run eagerly any more; random numbers besides torch's were drawn
    once; of what is not registered torch's own assertion spoke, about fake tensors, and it was written to. What a
    forward registered stayed, as a tensor of the tracing, or was captured as a constant; counts of calls stood
    still. Where a tensor's memory was read, as cuDNN's LSTM does, torch's own error spoke, without a line."""
    if not torch.cuda.default_generators:
        monkeypatch.setattr(torch.cuda, "default_generators", (torch.Generator(),))
    forward = Forward("captured 1f1b", ("torch.tanh(own(nn.Linear, D, D)(made[-1]))", line))
    assert re.match(f"refused: the stage Net cannot be captured: .*{said}", found := judge(forward)), found


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
    with pytest.raises(ValueError, match="its graphs do not know that its part 0 has been exchanged, added or removed"):
        stage(sequence())


def test_a_layer_without_a_shape_yet() -> None:
    """A lazy layer gave torch's RuntimeError, that the shape of an uninitialized parameter cannot be accessed. It named
    neither the parameter nor what to do."""
    stage = nn.Sequential(nn.LazyLinear(H), nn.Tanh())
    with pytest.raises(ValueError, match=r"0\.weight has no shape yet .*: run the module once"):
        graph.capture(stage, (sequence(),))
    x = sequence()
    expected = stage(x)
    assert torch.equal(graph.capture(stage, (x,))(x), expected)


def test_a_forward_of_its_own() -> None:
    """An attribute hides the class's method, and so it hid the graph: the stage stayed eager without a word."""
    module = Plain()
    module.forward = module.linear.forward
    with pytest.raises(ValueError, match="has a forward of its own"):
        graph.capture(module, (sequence(),))


class Adapted(nn.Linear):
    def __init__(self) -> None:
        super().__init__(H, H)
        self.dropout, self.scaling = nn.Dropout(0.25), {"default": 0.5}

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.dropout(x)) * self.scaling["default"]


class Other(Adapted):
    """A layer of another class."""


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: m[0].scaling.update(default=2.0), r"0.scaling, which was \(\('default', 0.5\),\) then"),
        (lambda m: setattr(m[0], "__class__", Other), "its part 0 has another type than then"),
    ],
)
def test_what_changes_after_the_capture(change: Callable[[nn.Module], object], words: str) -> None:
    """It had no effect. Hooks, forwards, numbers, dropout and adapters are changed in rows of tests/cases. A change
    that is taken back is none."""
    stage = graph.capture(nn.Sequential(Adapted()), (sequence(),))
    stage[0].dropout.p = 0.0
    hook = stage[0].register_forward_hook(lambda *_: None)
    assert stage.find_change() is not None
    stage[0].dropout.p = 0.25
    hook.remove()
    assert stage.find_change() is None
    change(stage)
    with pytest.raises(ValueError, match=words):
        stage(sequence())

"""What slices keep for each other, with a recurrent layer."""

from __future__ import annotations

import contextlib
import inspect
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tools.by_slices import Run, make_slices, plain, recomputed, recomputed_reentrant, run_by_slices
from torch import Tensor, nn

from megapipe import slices
from megapipe.slices import CarriedState, SequenceSlice

SEQUENCE, BATCH, HIDDEN = 12, 2, 4
CUTS = [[5, 4, 3], [1] * 12]


class Recurrent(nn.Module):
    """A layer that goes on from the state that the slice before it ended with."""

    def __init__(self) -> None:
        super().__init__()
        self.input = nn.Linear(HIDDEN, HIDDEN)
        self.state = nn.Linear(HIDDEN, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        earlier = slices.earlier(self)
        state = earlier[-1][0] if earlier else torch.zeros_like(x[0])
        outputs = []
        for now in self.input(x):
            state = torch.tanh(now + self.state(state))
            outputs.append(state)
        slices.keep(self, state)
        return torch.stack(outputs)


def make_layers(num_layers: int = 2) -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(Recurrent() for _ in range(num_layers)).double()


def step(layers: nn.ModuleList, x: Tensor, run: Run) -> Tensor:
    x = slices.cut(x, 0)
    for layer in layers:
        x = run(layer, x)
    return x.square().sum()


def whole_gradients() -> tuple[Tensor, Tensor, list[Tensor]]:
    layers = make_layers()
    x = torch.randn(SEQUENCE, BATCH, HIDDEN, dtype=torch.float64, requires_grad=True)
    loss = step(layers, x, plain)
    return x, loss.detach(), list(torch.autograd.grad(loss, [x, *layers.parameters()]))


@pytest.mark.parametrize("run", [plain, recomputed, recomputed_reentrant])
@pytest.mark.parametrize("lengths", CUTS, ids=str)
def test_a_recurrent_layer_has_the_gradients_of_the_whole_sequence(lengths: list[int], run: Run) -> None:
    x, loss, grads = whole_gradients()
    layers = make_layers()
    sliced = run_by_slices(lambda: step(layers, x, run), lengths)
    torch.testing.assert_close(sliced, loss, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close([x.grad, *(p.grad for p in layers.parameters())], grads, rtol=1e-12, atol=1e-12)


def test_what_another_thread_computes_is_whole() -> None:
    """A model that a thread evaluates meanwhile was cut like that of the action under way."""
    x, found = torch.arange(6.0), []
    state, this = CarriedState(needs_grad=False), make_slices([2, 4])[0]
    with state.forward(this):
        thread = threading.Thread(target=lambda: found.append(slices.cut(x, 0)))
        thread.start()
        thread.join()
        found.append(slices.cut(x, 0))
    assert [tensor.tolist() for tensor in found] == [x.tolist(), [0.0, 1.0]]


def test_whole_sequences_keep_nothing() -> None:
    whole = torch.ones(3)
    assert slices.current() is None
    assert slices.cut(whole, 0) is whole
    slices.keep("key", whole)
    assert slices.earlier("key") == []
    assert slices.positions(3).tolist() == [0, 1, 2]


@pytest.mark.parametrize("context", [contextlib.nullcontext, torch.inference_mode])
def test_what_is_kept_comes_in_the_order_of_slices(context: Any) -> None:
    """Each slice knows which it is."""
    state = CarriedState(needs_grad=False)
    parameter = nn.Parameter(torch.ones(()))
    for this in make_slices([2, 3, 1]):
        with context(), state.forward(this):
            assert slices.current() == this
            assert slices.positions(this.length).tolist() == list(range(this.start, this.stop))
            values = [[one.item() for one in kept] for kept in slices.earlier("a")]
            assert values == [[index, -index] for index in range(this.index)]
            assert not any(one.requires_grad for kept in slices.earlier("a") for one in kept)
            slices.keep("a", parameter * this.index, -torch.tensor(this.index))


def test_gradients_of_later_slices_are_freed_when_they_are_given_back() -> None:
    state, (first, second) = CarriedState(needs_grad=True), make_slices([1, 1])
    with state.forward(first):
        slices.keep("key", torch.ones(2, requires_grad=True) * 2)
    with state.forward(second):
        slices.earlier("key")[0][0].sum().backward()
    ((_, grad),) = state.roots(0)
    assert grad.tolist() == [1, 1]
    assert state.roots(0) == []


def test_mistakes_are_explained() -> None:
    with CarriedState(needs_grad=True).forward(SequenceSlice(0, 2, 0, 4)):
        slices.keep("key", torch.ones(1))
        with pytest.raises(RuntimeError, match="slice 0 of 2 has kept something under the key 'key' already"):
            slices.keep("key", torch.ones(1))
        with pytest.raises(
            ValueError, match=r"positions 0 to 3, but dimension 1 of a tensor of shape \[2, 3\] has 3: cut"
        ):
            slices.cut(torch.ones(2, 3), 1)


def test_gradients_that_cannot_be_returned_are_an_error() -> None:
    state = CarriedState(needs_grad=True)
    first, second = make_slices([1, 1])
    with state.forward(first), torch.no_grad():
        slices.keep("key", torch.ones(1))
    with state.forward(second):
        slices.earlier("key")[0][0].sum().backward()
    assert state.roots(0) == []
    with pytest.raises(RuntimeError, match="the key 'key' without a graph"), state.backward(first):
        pass


class Tail(nn.Module):
    """Reads the last positions before it, as a convolution over the sequence does."""

    def __init__(self, records: bool) -> None:
        super().__init__()
        self.records = records
        self.mix = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        before = [tail for (tail,) in slices.earlier(self)] or [torch.zeros_like(x[:2])]
        with torch.set_grad_enabled(self.records and torch.is_grad_enabled()):
            tail = x[-2:]
        slices.keep(self, tail)
        joined = torch.cat([before[-1], x])
        return torch.tanh(self.mix(joined[:-2] + joined[1:-1]) + x)


@pytest.mark.parametrize(("records", "run"), [(False, plain), (True, recomputed_reentrant)])
def test_views_made_without_gradients_are_refused(records: bool, run: Run) -> None:
    """A view made under no_grad, as by a layer that reentrant checkpointing runs, says that it requires a gradient and
    hands none on. So what later slices gave back was lost, without a word."""
    torch.manual_seed(0)
    layers = nn.ModuleList([nn.Linear(HIDDEN, HIDDEN), Tail(records)]).double()
    x = torch.randn(SEQUENCE, BATCH, HIDDEN, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="the key of a Tail without a graph, so that gradients of later slices"):
        run_by_slices(lambda: run(layers[1], layers[0](slices.cut(x, 0))).square().sum(), [6, 6])


@pytest.mark.parametrize("needs_grad", [False, True])
def test_what_is_kept_does_not_change(needs_grad: bool) -> None:
    """Later slices read what the layer had made of a kept tensor in place since."""
    state, (first, second) = CarriedState(needs_grad), make_slices([1, 1])
    kept = torch.ones(2, requires_grad=needs_grad) * 1
    with state.forward(first):
        slices.keep("key", kept)
    kept.mul_(2)
    with (
        state.forward(second),
        pytest.raises(RuntimeError, match=r"shape \[2\], kept under the key 'key' by slice 0, was changed in place"),
    ):
        slices.earlier("key")


def test_the_documentation_shows_this_layer() -> None:
    page = (Path(__file__).parents[2] / "docs" / "long_context.md").read_text()
    assert inspect.getsource(Recurrent) in page

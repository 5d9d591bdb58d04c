"""Forwards in segments and overlap windows of backwards: who computes while whose data is under way."""

import functools
import threading
from collections.abc import Callable, Generator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as reference
from tools.collectives import watching
from tools.ranks import on_ranks
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_reduce

from megapipe.overlap import (
    Pending,
    filling_windows,
    in_segments,
    run_segments,
    start_all_gather,
    start_all_reduce,
    start_all_to_all,
    start_reduce_scatter,
)

# Communication

SPLITS = [[2, 0, 3], [1, 4, 0], [0, 0, 0]]  # how many rows rank r sends to each


@on_ranks(3)
def test_exchanges_what_torch_exchanges(rank: int) -> None:
    input_splits = SPLITS[rank]
    output_splits = [splits[rank] for splits in SPLITS]
    rows = torch.arange(sum(input_splits) * 4.0).view(-1, 4) + 100 * rank
    weights = torch.arange(sum(output_splits) * 4.0).view(-1, 4) + rank
    ours, theirs = rows.clone().requires_grad_(), rows.clone().requires_grad_()
    output = start_all_to_all(ours * 2, output_splits, input_splits, dist.group.WORLD).wait()
    expected = reference.all_to_all_single(
        torch.empty(sum(output_splits), 4), theirs * 2, output_splits, input_splits, dist.group.WORLD
    )
    assert torch.equal(output, expected)
    (output * weights).sum().backward()
    (expected * weights).sum().backward()
    assert ours.grad is not None
    assert theirs.grad is not None
    assert torch.equal(ours.grad, theirs.grad)


OTHERS = {start_all_gather: 6, start_reduce_scatter: 2, start_all_reduce: 2}


@pytest.mark.parametrize("start", OTHERS)
@on_ranks(3)
def test_communicates_as_torch_does(rank: int, start: Callable[..., Pending]) -> None:
    """Gradients are those of the sum of what all ranks compute."""
    num_rows = 6 if start is start_reduce_scatter else 2
    everyones = [torch.arange(num_rows * 4.0).view(-1, 4) * (r + 1) for r in range(3)]
    weights = [torch.arange(OTHERS[start] * 4.0).view(-1, 4) + r for r in range(3)]
    x = everyones[rank].clone().requires_grad_()
    # A transpose is not contiguous, there and back.
    output = start((x * 2).T.contiguous().T, dist.group.WORLD).wait()
    (output * weights[rank]).T.contiguous().sum().backward()
    if start is start_all_gather:
        expected, gradient = torch.cat(everyones) * 2, 2 * sum(weights).chunk(3)[rank]  # type: ignore[union-attr]
    elif start is start_reduce_scatter:
        expected, gradient = 2 * sum(everyones).chunk(3)[rank], 2 * torch.cat(weights)  # type: ignore[union-attr]
    else:
        expected, gradient = 2 * sum(everyones), 2 * sum(weights)  # type: ignore[assignment]
    assert torch.equal(output, expected)
    assert x.grad is not None
    assert torch.equal(x.grad, gradient)


@on_ranks(3)
def test_rows_that_cannot_be_shared_out(rank: int) -> None:
    with pytest.raises(ValueError, match="4 rows cannot be shared out evenly among 3 ranks: pad them"):
        start_reduce_scatter(torch.ones(4, 2), dist.group.WORLD)


@pytest.mark.parametrize("start", OTHERS)
def test_alone(start: Callable[..., Pending]) -> None:
    for pending_of in (start, lambda x, group: start_all_to_all(x, [3], [3], group)):
        x = torch.ones(3, 2, requires_grad=True)
        pending_of(x, None).wait().sum().backward()
        assert x.grad is not None
        assert torch.equal(x.grad, torch.ones(3, 2))


@on_ranks(2)
def test_waits_are_windows(rank: int) -> None:
    """Of a forward that does not yield, too, and of those of torch's functional collectives. A thread with other things
    to do has none: it reduced gradients, and would have computed Ws. So would the backward of another model there."""
    calls: list[str] = []

    def forward() -> Tensor:
        x = start_all_to_all(torch.ones(2, 3, requires_grad=True), [1, 1], [1, 1], dist.group.WORLD).wait()
        return all_reduce(x.detach(), "sum", dist.group.WORLD) + 0 * x

    def reduce(*gradient: Tensor) -> None:
        all_reduce(torch.ones(1), "sum", dist.group.WORLD) + 1
        if not gradient:
            parameter = torch.ones(1, requires_grad=True)
            parameter.register_hook(reduce)
            parameter.sum().backward()

    with filling_windows(lambda: calls.append("forward")):
        output = forward()
        thread = threading.Thread(target=reduce)
        thread.start()
        thread.join()
    with filling_windows(lambda: calls.append("backward")):
        output.sum().backward()
    forward()
    assert calls == ["forward", "forward", "backward"]


@on_ranks(2)
def test_without_gradients(rank: int) -> None:
    x = torch.full((2, 1), float(rank))
    with torch.no_grad():
        y = start_all_to_all(x.requires_grad_(), [1, 1], [1, 1], dist.group.WORLD).wait()
    assert not y.requires_grad
    assert y.flatten().tolist() == [0, 1]


# Who computes when


class Layer(nn.Module):
    """Doubles its rows, lets them travel, adds one; says when it does what."""

    def __init__(self, name: str, events: list[str]) -> None:
        super().__init__()
        self.name = name
        self.events = events

    def forward(self, x: Tensor) -> Tensor:
        return run_segments(self.forward_segments(x))

    def forward_segments(self, x: Tensor) -> Generator[None, None, Tensor]:
        pending = start_all_to_all(Told.apply(x, self.events, f"{self.name} before"), [1, 1], [1, 1], dist.group.WORLD)
        yield
        return Told.apply(pending.wait(), self.events, f"{self.name} after")


class Told(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, events: list[str], what: str) -> Tensor:
        ctx.events, ctx.what = events, what
        events.append(f"F {what}")
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        ctx.events.append(f"B {ctx.what}")
        return grad * 2, None, None


class Model(nn.Module):
    def __init__(self, name: str, events: list[str], num_layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(f"{name}{number}", events) for number in range(num_layers))

    def forward(self, x: Tensor) -> Tensor:
        return run_segments(self.forward_segments(x))

    def forward_segments(self, x: Tensor) -> Generator[None, None, Tensor]:
        for layer in self.layers:
            x = yield from in_segments(layer, x)
        return x


@on_ranks(2)
def test_each_computes_while_the_other_waits(rank: int) -> None:
    events: list[str] = []
    x = torch.full((2, 3), rank + 1.0, requires_grad=True)
    loss = Model("b", events)(x).sum()
    segments = in_segments(Model("f", events), torch.ones(2, 3, requires_grad=True))
    events.clear()
    with watching(lambda *_: events.append("start"), lambda: events.append("wait")):
        assert segments.advance()
        with filling_windows(segments.advance):
            loss.backward()
        output = segments.finish()
    assert not segments.advance()
    assert torch.equal(output, torch.full((2, 3), 16.0))
    assert output.requires_grad
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full((2, 3), 16.0))
    assert events == [
        *["F f0 before", "start"],
        *["B b1 after", "start"],  # b1's gradients travel
        *["wait", "F f0 after", "F f1 before", "start"],  # f0's rows have arrived, f1's travel
        *["wait", "B b1 before", "B b0 after", "start"],
        *["wait", "F f1 after"],
        *["wait", "B b0 before"],
    ]


@on_ranks(2)
def test_what_is_left_runs_in_the_end(rank: int) -> None:
    """Of a forward with more segments than the backward has windows."""
    events: list[str] = []
    loss = Model("b", events, 1)(torch.ones(2, 3, requires_grad=True)).sum()
    segments = in_segments(Model("f", events, 3), torch.ones(2, 3))
    events.clear()
    segments.advance()
    with filling_windows(segments.advance):
        loss.backward()
    events.append("finish")
    assert torch.equal(segments.finish(), torch.full((2, 3), 64.0))
    loss = Model("b", [], 1)(torch.ones(2, 3, requires_grad=True)).sum()
    loss.backward()  # its windows stay empty
    expected = ["F f0 before", "B b0 after", "F f0 after", "F f1 before", "B b0 before", "finish"]
    assert events == [*expected, "F f1 after", "F f2 before", "F f2 after"]


class ForwardError(Exception):
    pass


class Fails(nn.Module):
    def forward_segments(self) -> Generator[None, None, None]:
        yield
        raise ForwardError("in the second segment")


@on_ranks(2)
def test_an_exception_in_a_window_is_the_forwards(rank: int) -> None:
    segments = in_segments(Fails())
    segments.advance()
    loss = Model("b", [])(torch.ones(2, 3, requires_grad=True)).sum()
    with pytest.raises(ForwardError, match="in the second segment"), filling_windows(segments.advance):
        loss.backward()


@on_ranks(2)
def test_a_backward_in_a_window_has_no_windows(rank: int) -> None:
    """As a gradient penalty in a forward has it."""
    calls = []

    @torch.enable_grad()
    def advance() -> None:
        calls.append(1)
        Model("inner", [])(torch.ones(2, 3, requires_grad=True)).sum().backward()

    loss = Model("b", [])(torch.ones(2, 3, requires_grad=True)).sum()
    with filling_windows(advance):
        loss.backward()
    assert len(calls) == 2


# Segments


class Chunk(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        self.calls.append("forward")
        return run_segments(self.forward_segments(x, scale))

    def forward_segments(self, x: Tensor, scale: float = 1.0) -> Generator[None, None, Tensor]:
        self.calls.append("forward_segments")
        yield
        yield
        return x * scale


class Wrapper(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


class Halving(Wrapper):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs) / 2


@pytest.mark.parametrize("wrap", [lambda chunk: chunk, functools.partial(torch.compile, backend="eager")])
def test_segments(wrap: Callable[[nn.Module], nn.Module]) -> None:
    """Nothing runs before the first `advance`."""
    chunk = Chunk()
    segments = in_segments(wrap(chunk), torch.ones(2), scale=3.0)
    assert chunk.calls == []
    assert not segments.has_stopped
    assert [segments.advance() for _ in range(4)] == [True, True, False, False]
    assert segments.has_stopped
    assert torch.equal(segments.finish(), torch.full((2,), 3.0))
    assert torch.equal(in_segments(wrap(chunk), torch.ones(2), scale=3.0).finish(), torch.full((2,), 3.0))
    assert chunk.calls == ["forward_segments"] * 2
    assert torch.equal(chunk(torch.ones(2)), torch.ones(2))


def with_hook(chunk: nn.Module) -> nn.Module:
    chunk.register_forward_hook(lambda *_: None)
    return chunk


class WithHead(Wrapper):
    """No wrapper, but a model with a part of this name."""

    def __init__(self, module: nn.Module, head: nn.Module) -> None:
        super().__init__(module)
        self.head = head

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.head(super().forward(*args, **kwargs))


class Adapted(Chunk):
    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return super().forward(x, scale) + 1


class AdaptedSegments(Adapted):
    def forward_segments(self, x: Tensor, scale: float = 1.0) -> Generator[None, None, Tensor]:
        return (yield from super().forward_segments(x, scale)) + 1


def replaced(chunk: nn.Module) -> nn.Module:
    """As libraries for adapters and tracing do."""
    forward = chunk.forward
    chunk.forward = lambda *args, **kwargs: forward(*args, **kwargs) + 1
    return chunk


@pytest.mark.parametrize(
    ("module", "is_whole"),
    [
        (lambda: Wrapper(with_hook(Chunk())), True),
        (lambda: with_hook(Wrapper(Chunk())), True),
        (lambda: Halving(Chunk()), True),
        (lambda: Wrapper(nn.Identity()), True),
        (lambda: Wrapper(WithHead(Chunk(), nn.Tanh())), True),
        (lambda: replaced(Chunk()), True),
        (lambda: Wrapper(Adapted()), True),
        (AdaptedSegments, False),
    ],
)
def test_segments_are_the_whole_forward(module: Callable[[], nn.Module], is_whole: bool) -> None:
    """The rest of a model with a part called `module` was skipped, and so was what a wrapper does besides or what
    somebody else had made of a forward: the output was another one, without a word."""
    model, x = module(), torch.ones(2)
    segments = in_segments(model, x)
    assert segments.advance() != is_whole
    assert segments.has_stopped != is_whole
    assert torch.equal(segments.finish(), model(x) if is_whole else x + 1)


class SeesItsContext(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def forward_segments(self) -> Generator[None, None, None]:
        while True:
            x = torch.ones(2, 2) @ torch.ones(2, 2, requires_grad=True)
            self.seen.append((x.dtype, x.requires_grad))
            yield


def test_segments_keep_gradients_and_autocast() -> None:
    """Of where `in_segments` was called, which may be in the caller's own autocast: autograd's threads know neither."""
    module = SeesItsContext()
    with torch.autocast("cpu", torch.bfloat16):
        segments = in_segments(module)
    segments.advance()
    with torch.no_grad():
        segments.advance()
        assert not torch.is_autocast_enabled("cpu")
    thread = threading.Thread(target=segments.advance)
    thread.start()
    thread.join()
    assert module.seen == [(torch.bfloat16, True)] * 3
    with torch.no_grad():
        segments = in_segments(module)
    segments.advance()
    assert module.seen[-1] == (torch.float32, False)


class InContexts(nn.Module):
    """Yields within contexts of its own."""

    def __init__(self, context: Any) -> None:
        super().__init__()
        self.context, self.inner = context, SeesItsContext()

    def forward_segments(self) -> Generator[None, None, None]:
        with self.context:
            next(segments := self.inner.forward_segments())
            yield
            next(segments)
        next(segments)


@pytest.mark.parametrize(
    ("context", "seen"),
    [
        (torch.no_grad(), (torch.float32, False)),
        (torch.autocast("cpu", torch.bfloat16), (torch.bfloat16, True)),
        (torch.autocast("cpu", enabled=False), (torch.float32, True)),
    ],
)
def test_contexts_around_a_yield_go_on_behind_it(context: Any, seen: tuple[torch.dtype, bool]) -> None:
    """They ended at the first yield, so that frozen parts were trained; and nothing of them is left between."""
    module = InContexts(context)
    is_around = isinstance(context, torch.autocast) and not context._enabled
    with torch.autocast("cpu", torch.bfloat16, enabled=is_around):
        segments = in_segments(module)
    while segments.advance():
        assert torch.is_grad_enabled()
        assert not torch.is_autocast_enabled("cpu")
    outside = (torch.bfloat16 if is_around else torch.float32, True)
    assert module.inner.seen == [seen, seen, outside]

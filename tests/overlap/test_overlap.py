"""Forwards in parts and gaps in backwards: who computes while whose data is under way."""

import threading
from collections.abc import Callable, Generator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as reference
from ranks import RankPool
from torch import Tensor, nn

from megapipe.overlap import Parts, call_in_parts, filling_gaps, in_parts, run_parts, start_all_to_all

# all_to_all

SPLITS = [[2, 0, 3], [1, 4, 0], [0, 0, 0]]  # how many rows rank r sends to each


def same_as_torch(rank: int, dtype: torch.dtype) -> None:
    input_splits = SPLITS[rank]
    output_splits = [splits[rank] for splits in SPLITS]
    rows = torch.arange(sum(input_splits) * 4, dtype=dtype).view(-1, 4) + 100 * rank
    weights = torch.arange(sum(output_splits) * 4, dtype=dtype).view(-1, 4) + rank
    ours, theirs = rows.clone().requires_grad_(), rows.clone().requires_grad_()
    output = start_all_to_all(ours * 2, output_splits, input_splits, dist.group.WORLD).wait()
    expected = reference.all_to_all_single(
        torch.empty(sum(output_splits), 4, dtype=dtype), theirs * 2, output_splits, input_splits, dist.group.WORLD
    )
    assert torch.equal(output, expected)
    (output * weights).sum().backward()
    (expected * weights).sum().backward()
    assert ours.grad is not None
    assert theirs.grad is not None
    assert torch.equal(ours.grad, theirs.grad)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_exchanges_what_torch_exchanges(ranks: RankPool, dtype: torch.dtype) -> None:
    ranks.run(3, same_as_torch, dtype)


def test_alone() -> None:
    x = torch.ones(3, 2, requires_grad=True)
    start_all_to_all(x, [3], [3], None).wait().sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.ones(3, 2))


def without_gradients(rank: int) -> None:
    x = torch.full((2, 1), float(rank))
    with torch.no_grad():
        y = start_all_to_all(x.requires_grad_(), [1, 1], [1, 1], dist.group.WORLD).wait()
    assert not y.requires_grad
    assert y.flatten().tolist() == [0, 1]


def test_without_gradients(ranks: RankPool) -> None:
    ranks.run(2, without_gradients)


# Who computes when


class Layer(nn.Module):
    """Doubles its rows, lets them travel, adds one; says when it does what."""

    def __init__(self, name: str, events: list[str]) -> None:
        super().__init__()
        self.name = name
        self.events = events

    def forward(self, x: Tensor) -> Tensor:
        return run_parts(self.forward_parts(x))

    def forward_parts(self, x: Tensor) -> Generator[None, None, Tensor]:
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
        return run_parts(self.forward_parts(x))

    def forward_parts(self, x: Tensor) -> Generator[None, None, Tensor]:
        for layer in self.layers:
            x = yield from in_parts(layer, x)
        return x


def record_communication(events: list[str]) -> Callable[[], None]:
    """Notes each start and wait. Returns what ends that."""
    original = dist.all_to_all_single

    class Work:
        def __init__(self, work: Any) -> None:
            self._work = work

        def wait(self) -> None:
            events.append("wait")
            self._work.wait()

    def recorded(*args: Any, **kwargs: Any) -> Work:
        events.append("start")
        return Work(original(*args, **kwargs))

    def restore() -> None:
        dist.all_to_all_single = original

    dist.all_to_all_single = recorded
    return restore


def interleave(rank: int) -> list[str]:
    events: list[str] = []
    x = torch.full((2, 3), rank + 1.0, requires_grad=True)
    loss = Model("b", events)(x).sum()
    parts = Parts(Model("f", events).forward_parts(torch.ones(2, 3, requires_grad=True)))
    events.clear()
    restore = record_communication(events)
    try:
        assert parts.advance()
        with filling_gaps(parts.advance):
            loss.backward()
        output = parts.finish()
    finally:
        restore()
    assert not parts.advance()
    assert torch.equal(output, torch.full((2, 3), 16.0))
    assert output.requires_grad
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full((2, 3), 16.0))
    return events


def test_each_computes_while_the_other_waits(ranks: RankPool) -> None:
    for events in ranks.run(2, interleave):
        assert events == [
            *["F f0 before", "start"],
            *["B b1 after", "start"],  # b1's gradients travel
            *["wait", "F f0 after", "F f1 before", "start"],  # f0's rows have arrived, f1's travel
            *["wait", "B b1 before", "B b0 after", "start"],
            *["wait", "F f1 after"],
            *["wait", "B b0 before"],
        ]


def more_parts_than_gaps(rank: int) -> list[str]:
    events: list[str] = []
    loss = Model("b", events, 1)(torch.ones(2, 3, requires_grad=True)).sum()
    parts = Parts(Model("f", events, 3).forward_parts(torch.ones(2, 3)))
    events.clear()
    parts.advance()
    with filling_gaps(parts.advance):
        loss.backward()
    events.append("finish")
    assert torch.equal(parts.finish(), torch.full((2, 3), 64.0))
    loss = Model("b", [], 1)(torch.ones(2, 3, requires_grad=True)).sum()
    loss.backward()  # nobody fills these gaps
    return events


def test_what_is_left_runs_in_the_end(ranks: RankPool) -> None:
    expected = ["F f0 before", "B b0 after", "F f0 after", "F f1 before", "B b0 before", "finish"]
    expected += ["F f1 after", "F f2 before", "F f2 after"]
    for events in ranks.run(2, more_parts_than_gaps):
        assert events == expected


class ForwardError(Exception):
    pass


def fail_in_the_gap(rank: int) -> None:
    def forward() -> Generator[None, None, None]:
        yield
        raise ForwardError("in the second part")

    parts = Parts(forward())
    parts.advance()
    loss = Model("b", [])(torch.ones(2, 3, requires_grad=True)).sum()
    with pytest.raises(ForwardError, match="in the second part"), filling_gaps(parts.advance):
        loss.backward()


def test_an_exception_in_a_gap_is_the_forwards(ranks: RankPool) -> None:
    ranks.run(2, fail_in_the_gap)


def backward_in_a_gap(rank: int) -> None:
    """As a gradient penalty in a forward has it."""
    calls = []

    @torch.enable_grad()
    def advance() -> None:
        calls.append(1)
        Model("inner", [])(torch.ones(2, 3, requires_grad=True)).sum().backward()

    loss = Model("b", [])(torch.ones(2, 3, requires_grad=True)).sum()
    with filling_gaps(advance):
        loss.backward()
    assert len(calls) == 2


def test_a_backward_in_a_gap_has_no_gaps(ranks: RankPool) -> None:
    ranks.run(2, backward_in_a_gap)


# Parts


def test_parts() -> None:
    def forward() -> Generator[None, None, str]:
        yield
        yield
        return "result"

    parts = Parts(forward())
    assert [parts.advance() for _ in range(4)] == [True, True, False, False]
    assert parts.finish() == "result"
    assert Parts(forward()).finish() == "result"
    assert run_parts(forward()) == "result"


def test_parts_keep_gradients_and_autocast() -> None:
    """Autograd's threads know neither."""
    seen = []

    def forward() -> Generator[None, None, None]:
        while True:
            x = torch.ones(2, 2) @ torch.ones(2, 2, requires_grad=True)
            seen.append((x.dtype, x.requires_grad))
            yield

    with torch.autocast("cpu", torch.bfloat16):
        parts = Parts(forward())
        parts.advance()
    with torch.no_grad():
        parts.advance()
        assert not torch.is_autocast_enabled("cpu")
    thread = threading.Thread(target=parts.advance)
    thread.start()
    thread.join()
    assert seen == [(torch.bfloat16, True)] * 3
    with torch.no_grad():
        parts = Parts(forward())
    parts.advance()
    assert seen[-1] == (torch.float32, False)


# The caller's forward_step_func


class Chunk(nn.Module):
    name = "chunk"

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return run_parts(self.forward_parts(x, scale))

    def forward_parts(self, x: Tensor, scale: float = 1.0) -> Generator[None, None, Tensor]:
        yield
        return x * scale


class Wrapper(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


@pytest.mark.parametrize("wrap", [lambda chunk: chunk, lambda chunk: Wrapper(Wrapper(chunk))])
def test_forward_step_func_is_interrupted(wrap: Callable[[nn.Module], nn.Module]) -> None:
    chunk = wrap(Chunk())

    def forward_step(data_iterator: Any, model: Any) -> Any:
        assert isinstance(model, type(chunk))
        inner = model
        while hasattr(inner, "module"):
            inner = inner.module
        assert inner.name == "chunk"
        model.note = "passed on"
        # A loss function may keep the model, and call it.
        return model(next(data_iterator), scale=3.0), lambda output: model(output)

    data = iter([torch.ones(2), torch.ones(2)])
    parts, loss_func = call_in_parts(forward_step, data, chunk)
    assert chunk.note == "passed on"
    assert next(parts) is None
    output = run_parts(parts)
    assert torch.equal(output, torch.full((2,), 3.0))
    assert torch.equal(loss_func(output), output)
    assert len(list(data)) == 1


def test_extra_arguments_are_passed_on() -> None:
    def forward_step(data_iterator: Any, model: Any, checkpoint: bool) -> Any:
        return model(torch.ones(1), 2.0 if checkpoint else 1.0), None

    parts, _ = call_in_parts(forward_step, None, Chunk(), True)
    assert run_parts(parts).item() == 2.0


def never(*_: Any) -> Any:
    raise AssertionError("called for nothing")


def test_modules_without_parts_are_not_called() -> None:
    hooked = Chunk()
    hooked.register_forward_hook(lambda *_: None)
    assert call_in_parts(never, None, nn.Linear(1, 1)) is None
    assert call_in_parts(never, None, Wrapper(nn.Linear(1, 1))) is None
    assert call_in_parts(never, None, hooked) is None
    assert call_in_parts(never, None, Wrapper(hooked)) is None
    assert run_parts(in_parts(nn.Identity(), 3)) == 3


def test_an_output_got_in_another_way_is_as_it_is() -> None:
    def forward_step(_: Any, model: Any) -> Any:
        return model.module(torch.ones(1), 5.0), "loss"

    parts, loss_func = call_in_parts(forward_step, None, Wrapper(Chunk()))
    assert run_parts(parts).item() == 5.0
    assert loss_func == "loss"
    assert call_in_parts(lambda *_: "no pair", None, Chunk()) == "no pair"


WRONG_USES: dict[str, Callable[[Any], Any]] = {
    "asked its output for float": lambda model: model(1).float(),
    "passed its output to relu": lambda model: torch.relu(model(1)),
    r"used its output \(__mul__\)": lambda model: model(1) * 2,
    r"used its output \(__rsub__\)": lambda model: 2 - model(1),
    r"used its output \(__getitem__\)": lambda model: model(1)[0],
    r"used its output \(__iter__\)": lambda model: list(model(1)),
    r"used its output \(__bool__\)": lambda model: model(1) or 0,
    "returned something else": lambda model: (model(1), model.name),
    "called it again": lambda model: (model(1), model(1)),
}


@pytest.mark.parametrize("what", WRONG_USES)
def test_using_the_output_is_refused(what: str) -> None:
    with pytest.raises(TypeError, match=rf"called its model and {what}.*: return model\(...\) as it is"):
        call_in_parts(lambda _, model: (WRONG_USES[what](model), None), None, Chunk())

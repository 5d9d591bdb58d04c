"""Activations that are computed again by an action of their own, R: gradients are those of a step that keeps them."""

import copy
import itertools
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from tools.against import mean_square, normal, step, unlabelled, use_groups
from tools.alive import Stored
from tools.models import BATCH, HIDDEN
from tools.ranks import on_ranks
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from megapipe import PipelineConfig, PipelineStage, get_forward_backward_func, stages_for_rank
from megapipe.overlap import in_segments
from megapipe.plan import Settings, make_plan
from megapipe.weight_grad import convert


class Layer(nn.Module):
    """Draws random numbers that nobody seeds, and has statistics that each forward moves on."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 2 * HIDDEN), nn.Linear(2 * HIDDEN, HIDDEN)
        self.calls: Counter[bool] = Counter()

    def forward(self, x: Tensor) -> Tensor:
        self.calls[torch.is_grad_enabled()] += 1
        return x + nn.functional.dropout(self.down(torch.relu(self.up(self.norm(x)))), 0.3)


def train(schedule: Any, num_microbatches: int, **config: Any) -> Any:
    """One step of a model of three layers a stage. Returns its gradients and statistics, the calls of each layer, and
    the state of the random numbers after it."""
    use_groups()
    chunks = []
    for info in stages_for_rank(schedule):
        torch.manual_seed(info.index)
        module = convert(nn.Sequential(*(Layer() for _ in range(3))))
        chunks.append(PipelineStage(module, info, PipelineConfig(**config)))
    data = normal(num_microbatches, BATCH, HIDDEN)
    torch.manual_seed(7)
    step(schedule, chunks, unlabelled(data), mean_square)
    tensors = [p.grad for chunk in chunks for p in chunk.parameters()] + [b for c in chunks for b in c.buffers()]
    layers = [layer for chunk in chunks for layer in chunk.module]
    return tensors, [layer.calls.total() for layer in layers], torch.get_rng_state()


def assert_same(one: list[Tensor], other: list[Tensor]) -> None:
    assert len(one) == len(other)
    assert all(map(torch.equal, one, other))


@on_ranks(2)
def test_random_numbers_and_statistics(rank: int) -> None:
    """Each call is run again once, and only those with an R in the plan."""
    kept, calls, state = train("zbv", 4, max_pending_weights=1)
    again, calls_again, state_again = train("zbv", 4, recompute="all")
    assert_same(kept, again)
    assert torch.equal(state, state_again)
    plan = make_plan("zbv", 2, 4, settings=Settings(recompute=True))
    counts = Counter(action.stage for action in plan.actions[rank] if action.kind == "R")
    num_replays = [counts[info.index] for info in stages_for_rank("zbv") for _ in range(3)]
    assert calls_again == [before + more for before, more in zip(calls, num_replays)]
    assert any(num_replays)


@on_ranks(2)
def test_the_last_layers_and_single_stages(rank: int) -> None:
    kept, calls, _ = train("gpipe", 2)
    for recompute, replayed in ((2, [0, 1, 1]), (5, [1, 1, 1]), ((None, 1), [0, 0, rank])):
        again, calls_again, _ = train("gpipe", 2, recompute=recompute)
        assert_same(kept, again)
        # No backward of gpipe follows its own forward, so that all are computed again.
        assert calls_again == [before + 2 * more for before, more in zip(calls, replayed)]


@on_ranks(2)
def test_a_plan_that_recomputes_runs_from_a_file_without_the_setting(rank: int, tmp_path: Path) -> None:
    kept, calls, _ = train("1f1b", 3)
    make_plan("1f1b", 2, 3, settings=Settings(recompute=True)).save_json(tmp_path / f"{rank}.json")
    again, calls_again, _ = train(str(tmp_path / f"{rank}.json"), 3)
    assert_same(kept, again)
    assert calls_again == [before + (3 if rank == 0 else 0) for before in calls]


class Calling(nn.Module):
    """A layer of any forward, with buffers and attributes."""

    def __init__(self, function: Any, **state: Any) -> None:
        super().__init__()
        self.a, self.function = nn.Linear(HIDDEN, HIDDEN), function
        for name, value in state.items():
            (self.register_buffer if isinstance(value, Tensor) else self.__setattr__)(name, value)

    def forward(self, *given: Any) -> Any:
        return self.function(self, *given)


def moves_on(self: Calling, x: Tensor) -> Tensor:
    self.n += 1
    return torch.tanh(self.a(x) * (1 + self.n / 3))


def makes_anew(self: Calling, x: Tensor) -> Tensor:
    self.n = self.n + 1
    return torch.tanh(self.a(x) * self.n)


def subtracts_mean(self: Calling, x: Tensor) -> Tensor:
    h = self.a(x)
    with torch.no_grad():
        self.n.mul_(0.5).add_(h.mean(0), alpha=0.5)
    return torch.tanh(h - self.n)


def moves_large_buffer(self: Calling, x: Tensor) -> Tensor:
    self.n += 1
    return torch.tanh(self.a(x))


def writes_to_saved(self: Calling, x: Tensor) -> Tensor:
    return self.a(x).exp().add_(1)


def differentiates(self: Calling, x: Tensor) -> Tensor:
    y = x.detach().requires_grad_()
    return self.a(x) + torch.autograd.grad(torch.tanh(self.a(y)).sum(), y)[0]


def swallows(self: Calling, x: Tensor) -> Tensor:
    try:
        h = torch.tanh(self.a(x))
    except:  # noqa: E722
        h = x
    return h


def says_otherwise(self: Calling, x: Tensor) -> Tensor:
    try:
        h = torch.tanh(self.a(x))
    except BaseException as error:
        raise ValueError("the layer has failed") from error
    return h


def norm(self: Calling, x: Tensor) -> Tensor:
    return torch.tanh(nn.functional.batch_norm(self.a(x), self.mean, self.n, training=True))


class Outer(Calling):
    """Calls another of the last layers."""

    def __init__(self, other: nn.Module) -> None:
        super().__init__(lambda self, x: torch.sigmoid(self.a(self.other(torch.sin(self.b(x))))))
        self.b, self.other = linear(), other


def nested() -> list[nn.Module]:
    inner = Calling(lambda self, x: torch.tanh(self.a(x)) * x)
    return [nn.Sequential(Layer(), inner, Outer(inner))]


def one(function: Any, **state: Any) -> Any:
    """Makes a stage of which a layer has these buffers and attributes."""
    return lambda: [nn.Sequential(Layer(), Calling(function, **{name: make() for name, make in state.items()}))]


def zeros() -> Tensor:
    return torch.zeros(HIDDEN)


def linear() -> nn.Module:
    return nn.Linear(HIDDEN, HIDDEN)


def with_own_forward() -> list[nn.Module]:
    """A module whose forward is the instance's, as other libraries' hooks set it."""
    module = linear()
    module.forward = lambda x: torch.tanh(nn.functional.linear(x, module.weight, module.bias))
    return [module]


RIGHT: dict[str, tuple[Any, str | int]] = {
    "a buffer that is read and moved on": (one(moves_on, n=lambda: torch.zeros(())), "all"),
    "a number that is read and moved on": (one(moves_on, n=int), "all"),
    "a buffer that is made anew": (one(makes_anew, n=zeros), "all"),
    "a running mean that is subtracted": (one(subtracts_mean, n=zeros), "all"),
    "statistics that torch moves on unseen": (one(norm, mean=zeros, n=lambda: torch.ones(HIDDEN)), "all"),
    "spectral_norm": (one(lambda s, x: s.c(s.a(x)), c=lambda: spectral_norm(linear())), "all"),
    "its older form": (one(lambda s, x: s.c(s.a(x)), c=lambda: nn.utils.spectral_norm(linear())), "all"),
    "Python's random numbers": (one(lambda s, x: s.a(x * (1 + random.random()))), "all"),
    "NumPy's random numbers": (one(lambda s, x: s.a(x * (1 + float(numpy.random.rand())))), "all"),
    "a generator of torch's": (one(lambda s, x: s.a(x * torch.rand(HIDDEN, generator=s.g)), g=torch.Generator), "all"),
    "a generator of Python's": (one(lambda s, x: s.a(x * s.g.random()), g=lambda: random.Random(3)), "all"),
    "a generator of NumPy's": (one(lambda s, x: s.a(x * s.g.random()), g=lambda: numpy.random.default_rng(3)), "all"),
    "a bare except": (one(swallows), "all"),
    "an except that raises another error": (one(says_otherwise), "all"),
    "a recurrent layer": (one(lambda s, x: s.r(s.a(x)[:, None])[0][:, 0], r=lambda: nn.LSTM(HIDDEN, HIDDEN)), "all"),
    "a forward of the instance's own": (with_own_forward, "all"),
    **{f"the last {number} layers, of which one calls another": (nested, number) for number in (1, 2, 3)},
}  # fmt: skip


@pytest.mark.parametrize(("make", "recompute"), RIGHT.values(), ids=RIGHT)
def test_what_a_call_reads_is_as_it_was(make: Any, recompute: str | int) -> None:
    """Replays read what forwards had left of containers, buffers and random numbers besides torch's own."""
    kept, again = (train_alone(make, way) for way in (None, recompute))
    assert_same(kept, again)


def train_alone(make: Any, recompute: str | int | None, schedule: Any = "looped_bfs", m: int = 3) -> list[Tensor]:
    """Two steps of all stages in one process. Returns gradients, buffers, and random numbers drawn afterwards."""
    torch.manual_seed(0)
    config = PipelineConfig(recompute=recompute)
    modules = make()
    infos = stages_for_rank(schedule, 0, 1, len(modules))
    chunks = [PipelineStage(module, info, config) for module, info in zip(modules, infos)]
    random.seed(5)
    numpy.random.seed(5)
    for seed in range(2):
        step(schedule, chunks, unlabelled(normal(m, BATCH, HIDDEN, seed=seed)), mean_square)
    drawn = torch.tensor([random.random(), numpy.random.rand(), torch.rand(()).item()])
    return [
        *(p.grad for c in chunks for p in c.parameters() if p.grad is not None),
        *(b for c in chunks for b in c.buffers()),
        drawn,
    ]


def test_batch_norm_of_which_only_some_microbatches_are_recomputed(tmp_path: Path) -> None:
    """Its statistics were put back by a copy, which autograd took for a change of what the others had saved."""
    plans = {"kept": "0F0 0F1 0B0 0B1", "mixed": "0F0 0F1 0R0 0B0 0B1"}
    for name, text in plans.items():
        (tmp_path / f"{name}.txt").write_text(text)
    assert_same(*(train_alone(lambda: [Layer()], None, str(tmp_path / f"{name}.txt"), 2) for name in plans))


@on_ranks(2)
def test_activations_live_from_r_to_w(rank: int) -> None:
    """What `peak_activations` of the plan counts."""
    use_groups()
    schedule = "zb1p"
    (info,) = stages_for_rank(schedule)
    for recompute in (None, "all"):
        stored = convert(Stored())
        chunk = PipelineStage(stored, info, PipelineConfig(recompute=recompute, max_pending_weights=1))
        step(schedule, chunk, unlabelled(normal(6, BATCH, HIDDEN)), mean_square)
        plan = make_plan(schedule, 2, 6, settings=Settings(recompute=recompute is not None, max_pending_weights=1))
        assert stored.most == plan.simulate().peak_activations[rank], recompute
        assert stored.num_alive() == 0


class Skipping(nn.Module):
    """A layer that is left out of all microbatches but the first, and a counter that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)])
        self.calls = [torch.zeros(())]

    def forward(self, x: Tensor) -> Tensor:
        self.calls[0] += 1
        x = torch.tanh(self.layers[0](x) * float(self.calls[0]))
        return self.layers[1](x) if self.calls[0] <= 1 else x


@pytest.mark.parametrize("recompute", [1, "all"])
def test_layers_that_are_left_out_and_counters_that_are_no_buffers(recompute: Any) -> None:
    """Training broke off at the first microbatch that left the layer out. A tensor among a module's attributes was
    counted on twice, by the forward and by R, and gradients were those of another count."""
    modules = [[Skipping(), Skipping()] for _ in range(2)]
    modules[1] = copy.deepcopy(modules[0])
    kept, again = train_alone(lambda: modules[0], None), train_alone(lambda: modules[1], recompute)
    assert_same(kept, again)
    assert [m.calls for m in modules[0]] == [m.calls for m in modules[1]] == [[torch.tensor(6.0)]] * 2


def moody(saves: Any) -> Calling:
    """Saves another number of tensors each time, or of another shape, or other ones: the state is no module's."""
    calls = itertools.count()
    return Calling(lambda self, x: saves(self.a(x), next(calls)))


def overwrites(self: Calling, x: Any) -> Tensor:
    x = x[0] if isinstance(x, list) else x
    out = self.a(x)
    with torch.no_grad():
        x.add_(1)
    return out


MISTAKES = [
    (lambda: moody(lambda h, n: (h if n else h.exp()).exp()), {}, RuntimeError,
     r"Calling cannot be .* again: it saves \d+ tensors"),
    (lambda: moody(lambda h, n: h.repeat(n + 1, 1).exp().sum(0, keepdim=True)), {}, RuntimeError,
     r"Calling .* has a tensor of shape .* its forward had"),
    (lambda: moody(lambda h, n: (n * h).exp()), {}, RuntimeError,
     r"Calling .*: a tensor \(.*32 of shape \[2, 16\]\) is not"),
    (lambda: moody(lambda h, n: h.exp() + n), {}, RuntimeError, r"Calling cannot .* Leave it out of config.recompute"),
    (lambda: Calling(moves_large_buffer, n=torch.zeros(2**18)), {}, RuntimeError, r"Calling .* a buffer, .* of 1 MiB"),
    (lambda: Calling(writes_to_saved), {}, RuntimeError, "modified by an inplace operation"),
    (lambda: Calling(differentiates), {}, RuntimeError, r"its forward runs a backward of its own \(torch"),
    (lambda: Calling(overwrites), {}, RuntimeError, r"Calling cannot .* its input of shape \[2, 16\] was changed"),
    (lambda: Calling(overwrites),
     {"forward_step": lambda items, chunk: (chunk([next(items)]), lambda out: (out.mean(), 0))},
     RuntimeError, r"Calling cannot .* its input of shape \[2, 16\] was changed"),
    (Layer, {"recompute": 1}, ValueError, r"last 1 layers of stage 0, but they are not to be found in its"),
    (Layer, {"recompute": ["all"] * 3}, ValueError, r"a sequence of 3 but the pipeline has 1 stages"),
    (Layer, {"forward_step": lambda items, chunk: (chunk.module.up(next(items)), lambda out: (out.mean(), 0))},
     ValueError, r"forward_step_func has not called Layer, whose activations"),
    (Layer, {"forward_step": lambda items, chunk: (in_segments(Segmented(), next(items)), lambda out: (out.mean(), 0))},
     ValueError, r"forward_step_func has not called Layer, .* not in segments"),
]  # fmt: skip


class Segmented(nn.Module):
    def forward_segments(self, x: Tensor) -> Any:
        yield
        return x


@pytest.mark.parametrize(("make", "options", "error", "text"), MISTAKES, ids=range(len(MISTAKES)))
def test_mistakes(make: Any, options: dict[str, Any], error: type[Exception], text: str) -> None:
    (info,) = stages_for_rank("gpipe", 0, 1)
    chunk = PipelineStage(make(), info, PipelineConfig(recompute=options.get("recompute", "all")))

    def forward_step(items: Any, chunk: nn.Module) -> Any:
        return chunk(next(items)), lambda out: (out.mean(), 0)

    with pytest.raises(error, match=text):
        get_forward_backward_func("gpipe")(
            forward_step_func=options.get("forward_step", forward_step),
            data_iterator=iter(torch.randn(2, BATCH, HIDDEN)),
            model=chunk,
            num_microbatches=2,
        )


def test_what_is_recomputed_in_later_steps_is_compared_too() -> None:
    """A chunk was compared once: where more of it was recomputed later, another layer was put in, or it began to train,
    what was not as in the forward went into the gradients without a word."""
    generator = torch.Generator()  # of no module

    def drops(self: Calling, x: Tensor) -> Tensor:
        return self.a(x) * torch.rand(x.shape, generator=generator) if self.training else self.a(x)

    def run() -> None:
        step("gpipe", chunk, unlabelled(torch.randn(2, BATCH, HIDDEN)), mean_square)

    (info,) = stages_for_rank("gpipe", 0, 1)
    for change in ("more is recomputed", "another layer", "training"):
        layers = nn.Sequential(nn.Tanh() if change == "another layer" else Calling(drops), nn.Linear(HIDDEN, HIDDEN))
        recompute = 1 if change == "more is recomputed" else "all"
        chunk = PipelineStage(layers.train(change != "training"), info, PipelineConfig(recompute=recompute))
        run()
        chunk.config.recompute = "all"
        if change == "another layer":
            layers[0] = Calling(drops)
        chunk.train()
        with pytest.raises(RuntimeError, match="cannot be computed again: a tensor"):
            run()

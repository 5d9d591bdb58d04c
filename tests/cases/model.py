"""Features of the model, its data and its messages."""

from __future__ import annotations

import queue
import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from tools.models import BATCH, HIDDEN, Block, seed_cpu
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import megapipe
from megapipe import slices, weight_grad
from megapipe.graph import capture
from megapipe.plan import Costs, Plan, load_plan, make_plan, place_weights
from megapipe.runtime.combinations import TRAITS

from .case import SEQUENCE, Case, Feature
from .messages import OF_ENTRIES, OF_X
from .stages import example_message


class Looking(nn.Module):
    """A block whose positions look back: to the one before them, and by attention."""

    def __init__(self, block: nn.Module, window: int | None) -> None:
        super().__init__()
        self.window, self.block = window, block
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        before = [last for (last,) in slices.earlier((self, "last"))] or [torch.zeros_like(x[:1])]
        slices.keep((self, "last"), x[-1:])
        x = 0.5 * (x + torch.cat([before[-1], x[:-1]]))
        q, k, v = self.qkv(F.layer_norm(x, x.shape[-1:])).unflatten(-1, (3, 2, -1)).permute(2, 1, 3, 0, 4)
        seen = slices.attention(q, k, v, owner=self, window=self.window)
        return self.block(x + seen.permute(2, 0, 1, 3).flatten(2))


@dataclass(frozen=True)
class Slices(Feature):
    """Sequences are cut into so many slices, or into those of these lengths."""

    cut: int | Sequence[int]
    window: int | None = None

    traits = property(lambda self: {"num_sequence_slices"} if len(self.lengths) > 1 else ())
    chance = 0.9
    goes = staticmethod(lambda case: case.can_cut)

    @classmethod
    def draw(cls, rng: Random, case: Case) -> Feature:
        num_slices = rng.randint(1, SEQUENCE)
        stops = [0, *sorted(rng.sample(range(1, SEQUENCE), num_slices - 1)), SEQUENCE]
        lengths = [stop - start for start, stop in pairwise(stops)]
        return cls(rng.choice([num_slices, lengths]), rng.choice([None, 1, 3]))

    @property
    def lengths(self) -> Sequence[int]:
        if not isinstance(self.cut, int):
            return self.cut
        return [SEQUENCE // self.cut + (k < SEQUENCE % self.cut) for k in range(self.cut)]

    def config(self, config: dict[str, Any]) -> None:
        config["num_sequence_slices"] = len(self.lengths)
        config["sequence_slice_lengths"] = None if isinstance(self.cut, int) else self.cut

    def layer(self, layer: nn.Module, number: int) -> nn.Module:
        return Looking(layer, self.window)


def one_by_one(kept: list[Tensor]) -> Tensor:
    return sum(kept[1:], kept[0])


SUMS: dict[str, Callable[[list[Tensor]], Tensor]] = {
    "one by one": one_by_one,
    "stack": lambda kept: torch.stack(kept).sum(0),
    "mean": lambda kept: torch.stack(kept, 1).mean(1) * len(kept),
    "views": lambda kept: one_by_one([one.view(-1) for one in kept]).view(BATCH, HIDDEN),
    "cat": lambda kept: torch.cat([one[None] for one in kept]).sum(0),
}


class Sums(nn.Module):
    """Behind a layer: each position adds up all positions before it, those of earlier slices by `how`."""

    def __init__(self, layer: nn.Module, how: str, kept: str) -> None:
        super().__init__()
        self.inner, self.how, self.kept = layer, how, kept
        self.weight = nn.Parameter(torch.randn(HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        before = [one for (one,) in slices.earlier(self)]
        weighted = self.inner(x) * self.weight
        sums = weighted.cumsum(0)
        total = sums[-1] if self.kept == "view" else weighted.sum(0)
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.kept != "without gradients"):
            slices.keep(self, total.view(BATCH, HIDDEN))
        if self.kept == "changed":
            total.mul_(2)
        for one in before if self.how == "broadcast" or not before else [SUMS[self.how](before)]:
            sums = sums + one
        return x + torch.tanh(0.3 * sums)


@dataclass(frozen=True)
class KeptSums(Feature):
    """A layer adds up what earlier slices have kept: right, or in ways that may be refused."""

    number: int
    how: str
    kept: str = "sum"

    chance = 0.6
    goes = staticmethod(lambda case: case.is_cut)
    mistakes = {"without gradients": "gradients of later slices", "changed": "in ?place"}  # noqa: RUF012
    refusal = property(lambda self: self.mistakes.get(self.kept, ""))

    @classmethod
    def draw(cls, rng: Random, case: Case) -> Feature:
        kept = rng.choice(["sum", "sum", "sum", "view", *cls.mistakes])
        return cls(rng.randrange(case.num_layers), rng.choice([*SUMS, "broadcast"]), kept)

    def layer(self, layer: nn.Module, number: int) -> nn.Module:
        return Sums(layer, self.how, self.kept) if number == self.number else layer


class Odd(nn.Module):
    """A layer, and behind it something unusual."""

    def __init__(self, layer: nn.Module, kind: str) -> None:
        super().__init__()
        self.inner, self.kind = layer, kind
        self.linear = nn.LazyLinear(HIDDEN) if kind == "lazy" else nn.Linear(HIDDEN, HIDDEN)
        self.in_list = weights = [self.linear.weight]
        self.closure = lambda x: x @ weights[0]
        self.last: Tensor | None = None
        if kind == "experts":
            self.experts = weight_grad.GroupedLinear(2, HIDDEN, HIDDEN)
        if kind == "late buffer":
            self.register_buffer("mean", None)

    def forward(self, x: Tensor) -> Tensor:
        return ODD[self.kind](self, self.inner(x))

    def bend(self, x: Tensor) -> Tensor:
        if isinstance(self.linear, nn.LazyLinear):
            seed_cpu(5)
        return x + torch.tanh(self.linear(x))


def with_statistics(odd: Odd, x: Tensor) -> Tensor:
    """In a buffer that is not there before the first forward."""
    before = getattr(odd, "mean", None)
    odd.register_buffer("mean", x.detach().mean() if before is None else 0.9 * before + 0.1 * x.detach().mean())
    return odd.bend(x - odd.mean)


def keeping_output(odd: Odd, x: Tensor) -> Tensor:
    """It is written to in the next forward."""
    if odd.last is not None:
        with torch.no_grad():
            odd.last.zero_()
    odd.last = x + odd.linear.bias
    return odd.last


def conjugated(z: Tensor) -> Tensor:
    """A tensor and its conjugate share memory. The imaginary part of one is the other's, marked as negative."""
    return torch.tanh((z.conj() * z * z).real + torch.sin(z.conj().imag))


def by_experts(odd: Odd, x: Tensor) -> Tensor:
    """Each token goes to the one of two experts that it chooses, none to be dropped."""
    tokens = x.flatten(0, -2)
    shares, chosen = odd.linear(tokens)[:, :2].softmax(1).max(1)
    counts = (chosen == torch.arange(2).unsqueeze(1)).sum(1)
    order = chosen.argsort(stable=True)
    routed = odd.experts(tokens[order], counts)[order.argsort()]
    return x + torch.tanh(routed * shares.unsqueeze(1)).view_as(x)


def by_mask(odd: Odd, x: Tensor) -> Tensor:
    """Only some tokens are changed, as many as there are."""
    mask = x.mean(-1) > 0
    return x.index_put((mask,), torch.tanh(odd.linear(x[mask])).to(x.dtype))  # under autocast it is another


ODD: dict[str, Callable[[Odd, Tensor], Tensor]] = {
    "idle": lambda odd, x: x,
    "strided": lambda odd, x: odd.bend(x.transpose(0, 1)).transpose(0, 1),
    "dropout": lambda odd, x: F.dropout(odd.bend(x).contiguous(), 0.3),
    "Python's random numbers": lambda odd, x: odd.bend(x) if random.random() < 0.5 else x,
    "NumPy's random numbers": lambda odd, x: odd.bend(x) if numpy.random.random() < 0.5 else x,
    "complex": lambda odd, x: x + conjugated(torch.complex(odd.linear(x), x)),
    "weight in list": lambda odd, x: x + torch.tanh(x @ odd.in_list[0]),
    "weight in closure": lambda odd, x: x + torch.tanh(odd.closure(x)),
    "used twice": lambda odd, x: odd.bend(odd.bend(x)),
    "experts": by_experts,
    "rows of a mask": by_mask,
    "lazy": Odd.bend,
    "late buffer": with_statistics,
    "new buffer": with_statistics,
    "kept output": keeping_output,
}
LEAVE_TRACES = {"late buffer", "new buffer", "kept output"}
RANDOM = {"dropout", "Python's random numbers", "NumPy's random numbers"}
CANNOT_RUN_TWICE = {*RANDOM, *LEAVE_TRACES} - {"dropout"}
CANNOT_BE_CAPTURED = CANNOT_BE_SHARDED = {"weight in list", "weight in closure", "lazy", *LEAVE_TRACES}


@dataclass(frozen=True)
class OddLayers(Feature):
    of_layers: dict[int, str]

    chance = 0.4
    needs_seed = property(lambda self: any(RANDOM & {*self.of_layers.values()}))
    is_whole = property(lambda self: "dropout" not in self.of_layers.values())
    refusal = property(lambda self: "in ?place" if "kept output" in self.of_layers.values() else "")

    @classmethod
    def draw(cls, rng: Random, case: Case) -> Feature:
        kinds = [kind for kind in ODD if not (case.is_cut and kind in LEAVE_TRACES)]
        return cls({rng.randrange(case.num_layers): rng.choice(kinds) for _ in range(rng.randint(1, 2))})

    def layer(self, layer: nn.Module, number: int) -> nn.Module:
        return Odd(layer, self.of_layers[number]) if number in self.of_layers else layer


@dataclass(frozen=True)
class Companions(Feature):
    """Messages hold tensors of other dtypes, with and without gradients."""

    has_entries = True
    is_whole = False  # half precision rounds

    def take(self, x: Tensor, stage: Any, entries: dict[str, Any], tokens: Tensor | None) -> Tensor:
        if tokens is not None:
            entries |= {"mask": tokens % 2, "count": 0.1 * tokens.to(x.dtype).unsqueeze(-1)}
            return x
        return x + 0.25 * entries.pop("half").to(x.dtype) + entries["mask"].unsqueeze(-1) * entries["count"]

    def give(self, stage: Any, entries: dict[str, Any]) -> None:
        entries["half"] = (2 * entries["x"]).bfloat16()


@dataclass(frozen=True)
class Auxiliary(Feature):
    """Each stage adds to a loss, a tensor of one element, which counts by a coefficient: also by none."""

    coefficient: float

    has_entries = True

    @classmethod
    def draw(cls, rng: Random, case: Case) -> Feature:
        return cls(rng.choice([0.0, 0.0, 0.25]))

    def stage(self, stage: Any) -> None:
        stage.gate = nn.Parameter(torch.ones(3))

    def give(self, stage: Any, entries: dict[str, Any]) -> None:
        loss = entries.get("loss", 0.0) + (stage.gate**2).sum()
        entries["loss"] = self.coefficient * loss if stage.info.is_last else loss


@dataclass(frozen=True)
class Number(Feature):
    """Messages hold plain values, others in each microbatch from the second step on."""

    has_entries = True
    is_whole = False  # slices have numbers of their own
    chance = 0.2

    def before(self, trial: Any, step: int) -> None:
        for stage in trial.all_stages():
            stage.number = step

    def take(self, x: Tensor, stage: Any, entries: dict[str, Any], tokens: Tensor | None) -> Tensor:
        if tokens is not None:
            number = getattr(stage, "number", 0) * int(tokens.sum())
            entries |= {"number": number, "text": "x" * number, "rest": (number / 2, number > 2)}
        assert entries["text"] == "x" * entries["number"]
        return x * (1 + 0.01 * sum(entries["rest"]))


@dataclass(frozen=True)
class Message(Feature):
    kind: str

    chance = 0.8
    tolerance = property(lambda self: 1e-5 if self.kind == "strided" else 0.0)  # messages are made contiguous
    refusal = property(lambda self: "torch's pytrees do not know" if self.kind.startswith("unknown") else "")

    @classmethod
    def draw(cls, rng: Random, case: Case) -> Feature:
        return cls(rng.choice(list(OF_ENTRIES if case.any("has_entries") or rng.random() < 0.5 else OF_X)))


@dataclass(frozen=True)
class Mask(Feature):
    """Every stage is called with a keyword argument of its microbatch."""

    chance = 0.25


@dataclass(frozen=True)
class AsPipelineStage(Feature):
    """Modules know nothing of stages. Their config is megapipe's own."""

    def stage(self, stage: Any) -> None:
        known = megapipe.PipelineConfig.__annotations__
        stage.config = megapipe.PipelineConfig(**{k: value for k, value in vars(stage.config).items() if k in known})

    def chunk(self, chunk: nn.Module, stage: Any) -> nn.Module:
        return megapipe.PipelineStage(chunk, stage.info, stage.config)


@dataclass(frozen=True)
class Double(Feature):
    """All in float64."""

    chance = 0.25

    def stage(self, stage: Any) -> None:
        stage.double()


@dataclass(frozen=True)
class Autocast(Feature):
    """Forwards run in bfloat16 where torch says so, losses in float32. How a product rounds there depends on strides,
    which messages do not keep."""

    traits = frozenset({"enable_autocast"})
    chance = 0.15
    is_whole = False
    goes = staticmethod(
        lambda case: not (case.get("Double") or {"used twice", "complex", "strided"} & {*case.odd, case.kind})
    )

    def config(self, config: dict[str, Any]) -> None:
        config |= {"enable_autocast": True, "autocast_dtype": torch.bfloat16}


@dataclass(frozen=True)
class Frozen(Feature):
    """Step by step, how the names of parameters begin that are frozen."""

    of_step: Sequence[Sequence[str]]

    traits = property(lambda self: {"frozen parameters"} if self.of_step[0] else ())
    changes = property(lambda self: len({*self.of_step}) > 1)

    @classmethod
    def draw(cls, rng: Random, case: Case) -> Feature:
        first = ("embedding.", "gate", *(f"layers.{number}." for number in range(rng.randrange(case.num_layers))))
        choices = [(), (f"layers.{rng.randrange(case.num_layers)}.",), first]
        return cls([rng.choice(choices) for _ in range(rng.randint(1, 3))])

    def stage(self, stage: Any, step: int = 0) -> None:
        for name, parameter in stage.named_parameters():
            parameter.requires_grad = not name.startswith(tuple(self.of_step[step % len(self.of_step)]))

    def before(self, trial: Any, step: int) -> None:
        for stage in trial.all_stages():
            self.stage(stage, step)


@dataclass(frozen=True)
class Forms(Feature):
    """Of each stage, the first of them again behind the last: "deferring", "in segments", "recomputed"; or captured."""

    of_stages: Sequence[str]

    traits = property(lambda self: {"a captured stage"} if "captured" in str(self.of_stages) else ())
    chance = 0.8

    @classmethod
    def draw(cls, rng: Random, case: Case) -> Feature:
        is_plain = not (case.any("needs_seed") or case.any("has_entries") or case.can_cut or case.get("Mask"))
        is_plain = is_plain and not case.get("Autocast")
        is_plain = is_plain and not CANNOT_BE_CAPTURED & case.odd
        forms = [["", "deferring"], ["", "in segments"]]
        if not CANNOT_RUN_TWICE & case.odd:
            forms.append(["", "", "recomputed", "recomputed" if case.can_cut else "reentrant recomputed"])
        if is_plain and case.kind in OF_X and case.kind not in ("strided", "complex", "empty") and rng.random() < 0.4:
            forms = [["", "captured", "captured recomputed", "deferring"]]  # which takes its time
        return cls([" ".join(filter(None, map(rng.choice, forms))) for _ in range(case.num_stages)])

    def chunk(self, chunk: nn.Module, stage: Any) -> nn.Module:
        form = self.of_stages[stage.info.index % len(self.of_stages)]
        if "deferring" in form:
            weight_grad.convert(stage)
        if "captured" not in form:
            stage.form = form
            return chunk
        first, received = torch.zeros(SEQUENCE, BATCH, dtype=torch.long), None
        if not stage.info.is_first:
            example = tree_map(lambda t: t.detach().requires_grad_(), example_message(stage.case))
            if stage.case.get("AsPipelineStage"):
                first = example
            else:
                received = example[0] if stage.case.kind == "list of one" else example
        capture(stage, (first,), input_tensor=received, recompute="recomputed" in form)
        return chunk


class Delayed(nn.Linear):
    """Puts its weight gradient off by itself, as transformer-engine's layers do, of which some show their queue."""

    def __init__(self, plain: nn.Linear, way: str) -> None:
        super().__init__(plain.in_features, plain.out_features)
        self.weight, self.bias, self.way = plain.weight, plain.bias, way
        self.put_off: queue.Queue[tuple[Tensor, Tensor]] = queue.Queue()
        if way in ("assigned", "with its bias"):
            self.wgrad_store = SimpleNamespace(context=self.put_off)
        if "main_grad" in way:
            self.weight.main_grad = torch.zeros_like(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        bias = self.bias.detach() if self.way == "with its bias" else self.bias
        out = F.linear(x, self.weight.detach(), bias)
        if out.requires_grad and self.weight.requires_grad:
            out.register_hook(lambda grad: self.put_off.put((x.detach(), grad)))
        return out

    def backward_dw(self) -> None:
        x, grad = (part.flatten(0, 1) for part in self.put_off.get_nowait())
        product = (grad.t() @ x.to(grad.dtype)).to(self.weight.dtype)
        if self.way == "to main_grad":
            self.weight.main_grad += product
        elif self.way == "added" and self.weight.grad is not None:
            self.weight.grad += product
        elif self.way != "kept" or self.weight.grad is None:
            self.weight.grad = product
        if hasattr(self, "wgrad_store") and self.bias.grad is None and self.bias.requires_grad:
            assert self.way == "with its bias", "that came with B, as in fp8"
            self.bias.grad = grad.sum(0).to(self.bias.dtype)


class Used(nn.Module):
    """A linear layer that is used in every microbatch, in every second one, or twice."""

    def __init__(self, linear: nn.Linear, how: str) -> None:
        super().__init__()
        self.linear, self.how, self.num_calls = linear, how, 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        if self.how == "every second" and self.num_calls % 2:
            return x[..., : self.linear.out_features]
        once = self.linear(x)
        padded = (0, self.linear.in_features - self.linear.out_features)
        return self.linear(F.pad(once, padded)) if self.how == "twice" else once


@dataclass(frozen=True)
class Delays(Feature):
    """The last products of blocks put their weight gradients off by themselves."""

    way: str
    """What W does with one: "assigned", "with its bias", "added", "kept" where there was one before; "to main_grad", or
    "assigned beside main_grad"."""
    how: str = "always"

    traits = frozenset({"layers that put off weight gradients by themselves"})
    chance = 0.0  # of rows only
    tolerance = property(lambda self: 1e-5 if self.how == "twice" else 0.0)

    def layer(self, layer: nn.Module, number: int) -> nn.Module:
        for block in [module for module in layer.modules() if isinstance(module, Block)]:
            block.down = Used(block.down, self.how)
        return layer

    def chunk(self, chunk: nn.Module, stage: Any) -> nn.Module:
        for used in stage.modules():
            if isinstance(used, Used):
                used.linear = Delayed(used.linear, self.way)
        return chunk

    def made(self, trial: Any) -> None:
        layers = [module for stage in trial.stages for module in stage.modules() if isinstance(module, Delayed)]

        def finalize(*_: Any) -> None:
            for layer in layers:
                assert layer.put_off.empty()
                if "main_grad" in self.way:
                    assert layer.weight.grad is None
                    layer.weight.grad, layer.weight.main_grad = layer.weight.main_grad, torch.zeros_like(layer.weight)

        trial.finalizers.append(finalize)


@dataclass(frozen=True)
class Shapes(Feature):
    """How the shapes of messages are known: "found" in the first step, "described" by headers, "computed", "config"."""

    kind: str
    seq_lengths: Sequence[int] | None = None

    traits = property(lambda self: {"variable_seq_lengths"} if self.kind == "described" else ())
    chance = 0.6

    @classmethod
    def draw(cls, rng: Random, case: Case) -> Feature:
        kinds = ["found", "described"]
        if not case.get("AsPipelineStage") and not case.get("Number") and case.kind != "registered class":
            kinds += ["computed", "config"] if case.kind == "tensor" else ["computed"]
        kind = rng.choice(kinds)
        varies = kind == "described" and "captured" not in case.forms and rng.random() < 0.6
        return cls(kind, [rng.randint(1, 7) for _ in range(case.m)] if varies else None)

    def config(self, config: dict[str, Any]) -> None:
        config["hidden_size"] = HIDDEN if self.kind == "config" else None
        config["variable_seq_lengths"] = self.kind == "described"

    def chunk(self, chunk: nn.Module, stage: Any) -> nn.Module:
        if self.kind == "computed":
            examples = {length: example_message(stage.case, length) for length in {SEQUENCE, *stage.case.slice_lengths}}
            infer = lambda inputs, num_microbatches: examples[inputs["input_ids"].shape[1]]  # noqa: E731
            chunk.infer_stage_inputs_from_pipeline_inputs = chunk.infer_stage_outputs_from_pipeline_inputs = infer
        return chunk


@dataclass(frozen=True)
class NumTokens(Feature):
    """The loss function returns the number of tokens, too, as whole numbers. Slices are divided by their sum; or by
    nothing, and whoever finalizes the gradients is given that sum."""

    per_token: bool = False

    traits = property(lambda self: {"calculate_per_token_loss"} if self.per_token else ())

    @classmethod
    def draw(cls, rng: Random, case: Case) -> Feature:
        return cls(rng.random() < 0.3)

    def config(self, config: dict[str, Any]) -> None:
        config["calculate_per_token_loss"] = self.per_token

    def made(self, trial: Any) -> None:
        has_loss = any(stage.info.is_last for stage in trial.stages)

        def check(models: Any, given: Any) -> None:
            assert given == (trial.num_tokens if has_loss else 0) if self.per_token else given is None

        trial.finalizers.append(check)


class Settings(Feature):
    """Fields of the config."""

    traits = property(
        lambda self: {name for name, value in self.values.items() if name in TRAITS and value is not None}
    )
    chance = 0.7

    def __init__(self, **values: Any) -> None:
        self.values = values

    def __repr__(self) -> str:
        return f"Settings({', '.join(f'{name}={value!r}' for name, value in self.values.items())})"

    @classmethod
    def draw(cls, rng: Random, case: Case) -> Feature:
        values = {
            "overlap_p2p_comm": rng.random() < 0.8,
            "p2p_lookahead": rng.choice([None, None, 1, 3]),
            "microbatch_group_size_per_vp_stage": rng.choice([None, case.pp, case.pp + 1]),
        }
        if case.schedule in ("1f1b", "zb1p", "zb2p") and rng.random() < 0.3:
            values["max_in_flight"] = 2.0 * case.pp
        return cls(**values)

    def config(self, config: dict[str, Any]) -> None:
        config |= self.values


@dataclass(frozen=True)
class Recompute(Feature):
    """By actions of their own: all, or the last layers, or by stages."""

    what: Any = "all"

    traits = property(lambda self: {"recompute"} if any(self.what or ()) else ())

    @staticmethod
    def goes(case: Case) -> Any:
        if case.kind == "registered class":  # what it is registered with is no container's item, and stays written
            return False
        return not (CANNOT_RUN_TWICE & case.odd or "in segments" in case.forms)

    @classmethod
    def draw(cls, rng: Random, case: Case) -> Feature:
        return cls(rng.choice(["all", [rng.choice(["all", None]) for _ in range(case.num_stages)]]))

    def config(self, config: dict[str, Any]) -> None:
        config["recompute"] = self.what


@dataclass(frozen=True)
class Offload(Feature):
    """Activations go to host memory, where a copy takes so many times as long as an F."""

    time: float = 1.0

    traits = frozenset({"offload_activations"})
    chance = 0.2

    @classmethod
    def draw(cls, rng: Random, case: Case) -> Feature:
        return cls(rng.choice([0.3, 1.0, 2.5]))

    def config(self, config: dict[str, Any]) -> None:
        config["offload_activations"] = self.time


@dataclass(frozen=True)
class Planned(Feature):
    """A plan of the schedule, or its file, runs in its place, with the Ws where these times of F, B and W want them."""

    times: Sequence[float]
    file: str = ""
    recompute: bool = False
    """It has Rs."""

    traits = property(lambda self: {"a plan"} if self.recompute else {"a plan", "a plan without R"})
    chance = 0.15

    @classmethod
    def draw(cls, rng: Random, case: Case) -> Feature:
        return cls([round(rng.uniform(0.2, 2.0), 1) for _ in range(3)], rng.choice(["", "plan.json", "plan.csv"]))

    def plan(self, case: Case) -> Plan | Path:
        sizes = (case.schedule, case.pp, case.m, case.num_chunks)
        settings = megapipe.plan.Settings(recompute=self.recompute)
        plan = make_plan(*sizes, num_slices=len(case.slice_lengths), settings=settings)
        plan = place_weights(plan, Costs(*self.times))
        if not self.file:
            return plan
        path = Path(tempfile.mkdtemp()) / self.file
        plan.save_json(path) if self.file.endswith("json") else plan.save_csv(path)
        assert load_plan(path).cells() == plan.cells()
        return path

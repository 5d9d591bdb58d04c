"""Forwards as people write them, line by line, drawn by a seed: `make fuzz` draws them, too.

Run through `megapipe.split`, as a captured stage, and with R, O or W, each is to give losses, gradients, buffers and
numbers of the module itself, to the bit, or to be refused in a sentence that leaves the module as it was.
"""

from __future__ import annotations

import copy
import functools
import random  # noqa: F401, for lines
import re
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import numpy  # noqa: F401, for lines
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint  # noqa: F401, for lines

import megapipe
from megapipe.proving.whole import Whole

B, T, D = 3, 4, 8
WAYS = ["split zbv", "split no_pipelining", "R gpipe", "O gpipe", "W zb1p", "R and W zb1p"]
WAYS += ["captured 1f1b", "captured zb1p", "captured recomputed 1f1b"]
REFUSED_AT_WORK = "cannot be computed again|modified by an inplace operation|don't yet support saved tensor hooks"
SUMMED_OTHERWISE = r"linear\(|LSTM|GRU|MultiheadAttention|Scale"
"""Lines of weights whose gradients have several summands (also of nothing: copies of tied weights have zeros then),
which a graph has in operators of their own, or where strided gradients may cross stages, as contiguous ones."""
ROUNDED_OTHERWISE = r"F\.unfold.*bfloat16"
"""Lines whose strides the tracer takes for others: a product behind them is another kernel's in a captured stage."""

LINES = r"""
torch.tanh(own(nn.Linear, D, D)(x))
torch.tanh(own(nn.Linear, D, D, bias=False)(x))
x + own(MLP)(x)
torch.tanh(linear(self)(x))
F.linear(x, linear(self).weight.t())
x @ linear(self).weight
torch.einsum("btd,de->bte", x, linear(self).weight)
x * linear(self).weight[0] + F.linear(y, linear(self).weight * 0.5)
tie(own(nn.Linear, D, D), linear(self))(x)
F.linear(x, own(nn.Linear, D, D).weight.detach(), own(nn.Linear, D, D).bias)
torch.tanh(frozen(own(nn.Linear, D, D))(x))
own(nn.BatchNorm1d, T)(x)
own(nn.BatchNorm1d, T, track_running_stats=False)(x)
own(nn.BatchNorm1d, T, momentum=None)(x)
own(nn.GroupNorm, 2, T)(x) + own(nn.LayerNorm, D)(y)
own(nn.InstanceNorm1d, T, affine=True, track_running_stats=True)(x)
own(nn.Conv1d, T, T, 3, padding=1)(x)
own(nn.Conv1d, T, T, 3, padding="same", groups=2)(x)
own(nn.ConvTranspose1d, T, T, 3, padding=1)(x)
own(nn.Conv2d, 1, 1, 3, padding=1)(x[:, None])[:, 0]
z, (other["state"], _) = own(nn.LSTM, D, D, batch_first=True)(x)
z, other["state"] = own(nn.GRU, D, D, batch_first=True)(x, other.get("state"))
x + own(nn.Embedding, D, D)(other["tokens"])
x + own(nn.Embedding, D, D, padding_idx=0, scale_grad_by_freq=True)(other["tokens"])
x + own(nn.Embedding, D, D, max_norm=0.5)(other["tokens"])
own(nn.MultiheadAttention, D, 2, 0.1, batch_first=True)(x, y, x, need_weights=False)[0]
own(nn.MultiheadAttention, D, 2, batch_first=True)(x, x, x)[0]
heads(own(nn.Linear, D, 3 * D)(x), None, is_causal=True)
heads(own(nn.Linear, D, 3 * D)(x), other["mask"][:, None, None] | torch.eye(T, dtype=torch.bool))
(x @ y.transpose(-1, -2) + torch.triu(torch.full((x.shape[1], T), float("-inf")), diagonal=1)).softmax(-1) @ x
F.dropout(x, 0.3, self.training)
own(nn.Dropout, 0.2)(x) + own(nn.AlphaDropout, 0.1)(y.contiguous())
nn.Dropout(0.2, inplace=True)(x.clone(memory_format=torch.contiguous_format))
torch.tanh(made_by(nn.utils.parametrizations.weight_norm, own(nn.Linear, D, D))(x))
torch.tanh(made_by(nn.utils.parametrizations.spectral_norm, own(nn.Linear, D, D))(x))
torch.tanh(made_by(nn.utils.weight_norm, own(nn.Linear, D, D))(x))
torch.tanh(made_by(nn.utils.spectral_norm, own(nn.Linear, D, D))(x))
x * own(Scale).weight
x * own(Scale, T, 1).weight.expand(B, T, D)
x * own(Scale, 2, 1, 1, D).weight.sum(0)
x + y
x * y.sigmoid() - y.mean(1, keepdim=True)
x * torch.tensor([0.5, 2.0]).repeat(D // 2) + torch.arange(T)[:, None]
torch.addcmul(x, y, torch.lerp(x, y, 0.3), value=0.1)
x / (1 + y.abs().amax((0, 1))) * len(made)
torch.linalg.norm(x) * y
F.pad(x, (1, 0))[..., :-1].cumsum(1).flip(2).roll(1, 0)
torch.where(x > 0, x, torch.maximum(x, y))
(x.double() / 3).float() + y.bfloat16()
x.softmax(-1).log() + x[:, :0].sum()
torch.zeros_like(x) + torch.ones(D).cumsum(0)
torch.cat(x.chunk(2, -1)[::-1], -1)
torch.cat(x.split([1, 3], 1)[::-1], 1)
torch.stack(x.unbind(1)[::-1], 1)
x.transpose(0, 1).contiguous().transpose(0, 1)
x.view(B, T, 2, D // 2).transpose(2, 3).reshape(B, T, D)
x[:, [1, 0, 3, 2]]
x[:1].expand(B, T, D)
x[..., :1] + y[..., 1:2].expand_as(x)
x.view_as(x)
x.detach()
x.sort(-1).values + y.argsort(-1)
x.topk(2, 1).values.repeat(1, 2, 1) + y.max(1, keepdim=True)[0]
torch.zeros_like(x).scatter_add(1, y.argsort(1), torch.gather(x, 2, y.argsort(-1)))
x.as_strided((B, T, D), x.stride())
F.unfold(x[:, None], (1, D)).view(B, D, T).transpose(1, 2)
torch.broadcast_tensors(x.sum(1, keepdim=True), y)[0]
torch.vmap(lambda row: row * 2)(x)
x + torch.func.grad(lambda a: a.pow(2).sum())(x.detach())
other["mask"] = x.sum(-1) > 0
x.masked_fill(other["mask"][..., None], 0.1)
other["tokens"] = x.argmax(-1)
other["tokens"] = other["tokens"].roll(1, 1)
x + F.one_hot(other["tokens"], D)
other["complex"] = torch.fft.rfft(x) * (0.5 + 1j)
torch.fft.irfft(other["complex"], n=D)
x + other["complex"].conj().imag.sum(-1)[..., None]
x.mul_(0.5)
x.add_(y)
x[:, :2] = y[:, 2:]
x.transpose(0, 1)[1] = 1.0
x.view(-1)[::2] *= 0.5
x.chunk(2, -1)[1].copy_(y.chunk(2, -1)[0])
F.relu(x, inplace=True)
x.clone().masked_fill_(y > 1, 0.0).index_add_(1, torch.tensor([0, 2]), y[:, :2])
x.detach().add_(1)
torch.add(x.detach(), y.detach(), out=torch.empty_like(x))
torch._foreach_mul([x], 0.5)[0]
x.unsqueeze_(0).squeeze_(0)
z = (x + 0.0).index_put_((torch.tensor([0, 1]), torch.tensor([1, 2])), y[0, :2])
made += [x + 0.0]; made += [made[-1][:]]; made[-1].add_(y.detach())
made += [x * 1.0]; made += [made[-1].view(B * T, D).view(B, T, D)]
made += [x * 1.0]; made += [made[-1].detach()]; made[-2].mul_(0.5)
self.mean.mul_(0.9).add_(x.detach().mean((0, 1))); z = x - self.mean
self.mean = 0.9 * self.mean + x.detach().mean((0, 1)); z = x - self.mean
self.mean.data.copy_(x.detach().mean((0, 1))); z = x - self.mean
self.count += 1; z = x / self.count
x - self.mean + self.plain
self.last = x; z = self.last * 2
self.kept.append(x.detach()); z = x + len(self.kept)
self.calls += 1; z = x * self.calls
self.plain = x.detach().mean((0, 1)); z = x + self.plain
self.plain.add_(1); z = x + self.plain
late(self); z = x * self.late
with torch.no_grad(): z = x + own(nn.Linear, D, D)(y)
with torch.no_grad(): self.mean.copy_(x.mean((0, 1)))
with torch.autocast("cpu", torch.bfloat16): z = x + own(nn.Linear, D, D)(y).float()
with torch.no_grad(), torch.autocast("cpu", torch.bfloat16): z = x + own(nn.Linear, D, D)(y).float()
with torch.autocast("cpu", enabled=False): z = x + own(nn.Linear, D, D)(y)
checkpoint(lambda a, b, part: F.dropout(part(a), 0.2) * b, x, y, own(nn.Linear, D, D), use_reentrant=False)
x + torch.randn(D)
x * torch.bernoulli(torch.full_like(x, 0.5)) + torch.rand_like(x)
x[:, torch.randperm(T)] + torch.normal(x.detach(), 0.1)
Reversed.apply(x)
hooked(x * 1.0)
x * x.detach().max().item()
x if x.sum() > 0 else -x
x + torch.nonzero(x.detach() > 0).shape[0]
x + x[x > 0.3].sum()
x + own(nn.Linear, D, D)(x[x.mean(-1) > 0]).square().sum(0)
x.index_put((x.mean(-1) > 0,), own(nn.Linear, D, D)(x[x.mean(-1) > 0]))
x + x.new_ones((x > 0).sum().item()).sum() / D
x if self.training else x * 2
"""


# What lines use


class MLP(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.LayerNorm(D), nn.Linear(D, 2 * D), nn.GELU(), nn.Linear(2 * D, D))


class Encoder(nn.TransformerEncoder):
    """torch's own, which reads attributes of its layers."""

    def __init__(self) -> None:
        super().__init__(nn.TransformerEncoderLayer(D, 2, 2 * D, 0.0, batch_first=True), 2)


class Scale(nn.Module):
    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(sizes))


def linear(net: Net) -> nn.Linear:
    return next((part for part in net.parts.values() if isinstance(part, nn.Linear)), net.head)


def tie(part: nn.Linear, other: nn.Linear) -> nn.Linear:
    if (
        part.weight is not other.weight
        and type(part) is type(other) is nn.Linear
        and isinstance(other.weight, nn.Parameter)
    ):
        part.weight = other.weight
    return part


def frozen(part: nn.Linear) -> nn.Linear:
    return part.requires_grad_(False)


def made_by(way: Any, part: nn.Linear) -> nn.Linear:
    if isinstance(part._parameters.get("weight"), nn.Parameter):
        way(part)
    return part


def heads(qkv: Tensor, mask: Any, **options: Any) -> Tensor:
    q, k, v = qkv.view(B, T, 3, 2, D // 2).permute(2, 0, 3, 1, 4)
    return F.scaled_dot_product_attention(q, k, v, mask, **options).transpose(1, 2).reshape(B, T, D)


def late(net: Net) -> None:
    if "late" not in net._buffers:
        net.register_buffer("late", torch.arange(D) / D)


def hooked(x: Tensor) -> Tensor:
    if x.requires_grad:
        x.register_hook(lambda grad: grad * 2)
    return x


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return -grad * ctx.saved_tensors[0].sigmoid()


class Net(nn.Module):
    """Its parts are made in a first forward."""

    def __init__(self, lines: Sequence[str]) -> None:
        super().__init__()
        self.lines, self.parts, self.head = [*lines], nn.ModuleDict(), nn.Linear(D, D)
        self.register_buffer("mean", torch.zeros(D))
        self.register_buffer("count", torch.zeros((), dtype=torch.long), persistent=False)
        self.is_made = False
        self.forget()
        with torch.no_grad():
            self(*batch_of(0))
        self.is_made = True
        self.forget()

    def forget(self) -> None:
        self.plain, self.calls, self.kept = torch.zeros(D), 0, []
        self._buffers.pop("late", None)

    def own(self, number: int, kind: type[nn.Module], *arguments: Any, **options: Any) -> nn.Module:
        name = f"{kind.__name__}_{number}"
        if not self.is_made and name not in self.parts:
            self.parts[name] = kind(*arguments, **options)
        return self.parts[name]

    def forward(self, x: Tensor, tokens: Tensor) -> Any:
        made, other = [x], {"tokens": tokens, "mask": tokens > 3, "complex": torch.fft.rfft(x)}
        for number, line in enumerate(self.lines):
            names = {"self": self, "made": made, "other": other, "own": functools.partial(self.own, number)}
            code, is_value = compiled(line)
            value = eval(code, {**globals(), **names}) if is_value else exec(code, names := {**globals(), **names})
            value = value if is_value else names.get("z")
            if value is not None:
                made.append(value)
        y = self.head(made[-1] + made[-2] if len(made) % 2 else made[-1])
        outputs: list[Any] = [y, {"y": y, "none": None}, (y, made[0]), {"y": [y], "steps": len(made)}]
        return outputs[len(made) % len(outputs)]


@functools.cache
def compiled(line: str) -> tuple[Any, bool]:
    try:
        return compile(line, "<line>", "eval"), True
    except SyntaxError:
        return compile(line, "<line>", "exec"), False


def batch_of(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(B, T, D, generator=generator), torch.randint(D, (B, T), generator=generator)


def loss_of(output: Any) -> Tensor:
    y: Tensor = next(leaf for leaf in pytree.tree_leaves(output) if torch.is_tensor(leaf))
    return y.pow(2).mean() + y.mean()


# Whether a forward is right


@dataclass(frozen=True)
class Forward:
    """A forward, and how it is run. It prints as what makes it again."""

    way: str
    lines: tuple[str, ...]

    features = property(lambda self: self.lines)

    def without(self, feature: str) -> Forward:
        return replace(self, lines=tuple(line for line in self.lines if line != feature))


def draw_forward(seed: int, number: int) -> Forward:
    """Lines read what was made by one of the last lines, or the first, with skips over stages."""
    rng, lines = Random(f"{seed} {number}"), LINES.strip().splitlines()
    drawn = ["made[0] * 1.0"]
    for length in range(1, rng.randint(3, 8)):
        x, y = (f"made[-{rng.choice([1, 1, 1, rng.randint(1, length)])}:][0]" for _ in "xy")
        line = rng.choice(lines) if rng.random() < 0.8 else lines[0]
        drawn.append(re.sub(r"(?<![\w.])y(?![\w=])", y, re.sub(r"(?<![\w.])x(?![\w=])", x, line)))
    return Forward(rng.choice(WAYS), tuple(drawn))


def run_forward(forward: Forward) -> str | None:
    """What is wrong with it, if anything."""
    text = judge(forward)
    return None if text.startswith(("right", "refused", "is none")) else text


def judge(forward: Forward) -> str:
    torch.manual_seed(0)
    torch.backends.mha.set_fastpath_enabled(False)  # which rounds otherwise, and which no graph takes
    try:
        whole = Net(forward.lines)
        other, wanted = copy.deepcopy(whole), None
        before = contents(other)
        wanted = run(whole, in_one_process(in_turn="gpipe" not in forward.way))
    except Exception as error:
        return f"is none: {error}"
    try:
        chunks, schedule = build(forward.way, other)
    except (ValueError, TypeError) as error:
        return f"refused: {error}" if same(before, contents(other)) else f"refused, but changed: {error}"
    except Exception:
        return traceback.format_exc()
    if "split" in forward.way and not same(before, contents(other)):
        return "split has changed the module"
    try:
        found = run(chunks, megapipe.get_forward_backward_func(schedule))
    except Exception as error:
        is_refusal = isinstance(error, RuntimeError) and re.search(REFUSED_AT_WORK, str(error))
        return f"refused: {error}" if is_refusal else traceback.format_exc()
    lines = " ".join(forward.lines)
    is_exact = re.search(SUMMED_OTHERWISE, lines) is None
    rounds = "captured" in forward.way  # without gradients torch's own linear layers take another kernel
    is_coarse = rounds and re.search(ROUNDED_OTHERWISE, lines) is not None
    wrong = []
    for name in wanted:
        if "split" in forward.way and name.startswith("gradient") and wanted[name] == [None]:
            wanted[name] = [one if one is not None and not one.any() else None for one in found.get(name) or [None]][:1]
        limits = (0.0, 0.0) if is_exact and not (rounds and name == "evaluation") else (1e-4, 1e-6)
        wrong.append(differ(name, found.get(name), wanted[name], *((1e-2, 1e-3) if is_coarse else limits)))
    return "\n".join(filter(None, wrong)) or "right"


def build(way: str, net: Net) -> tuple[Any, str]:
    *means, schedule = way.split()
    if means == ["split"]:
        return megapipe.split(net, batch_of(0), schedule, num_chunks=None if schedule == "zbv" else 3), schedule
    if means[0] == "captured":
        return megapipe.graph.capture(net, batch_of(0), recompute="recomputed" in means), schedule
    if "W" in means:
        megapipe.weight_grad.convert(net)
    options: dict[str, Any] = {"recompute": "all"} if "R" in means else {}
    options |= {"offload_activations": 0.5} if "O" in means else {}
    return megapipe.PipelineStage(net, megapipe.StageInfo(0, 1), megapipe.PipelineConfig(**options)), schedule


def in_one_process(in_turn: bool) -> Any:
    """A schedule without a pipeline. Unless it is `in_turn`, all backwards come behind all forwards."""

    def train(forward_step: Any, data: Any, chunks: Any, number: int, forward_only: bool = False) -> list[Any]:
        whole = Whole(chunks, forward_step)
        if in_turn or forward_only:
            return whole.step([*data], forward_only)
        pairs = [whole.forward(batch) for batch in data]
        for loss, _ in pairs:
            (loss / number).backward()
        return [report for _, report in pairs]

    return train


def run(chunks: Any, train: Any) -> dict[str, list[Any]]:
    """Losses of two steps, then the gradients of the second and all else, then losses of an evaluation."""
    losses: list[Any] = []

    def forward_step(batches: Iterator[Any], chunk: nn.Module) -> Any:
        return chunk(*next(batches)), lambda output: (loss_of(output), loss_of(output).detach())

    chunks = chunks if isinstance(chunks, list) else [chunks]
    for first in (0, 3):
        torch.manual_seed(first)
        for chunk in chunks:
            chunk.zero_grad()
        losses += train(forward_step, map(batch_of, range(first, first + 3)), chunks, 3)
    results = {"losses": losses, **left_in([getattr(chunk, "module", chunk) for chunk in chunks])}
    for chunk in chunks:
        chunk.eval()
    torch.manual_seed(6)
    data = map(batch_of, range(3))
    return results | {"evaluation": train(forward_step, data, chunks, 3, forward_only=True)}


def left_in(modules: Sequence[Any]) -> dict[str, list[Any]]:
    """Gradients, buffers and attributes."""
    left: dict[str, list[Any]] = {}
    for module in modules:
        for name, parameter in module.named_parameters():
            left.setdefault(f"gradient of {name}", []).append(parameter.grad)
        for name, buffer in module.named_buffers():
            left.setdefault(f"buffer {name}", []).append(buffer.clone())
        if hasattr(module, "calls"):
            left["attributes"] = [module.calls, len(module.kept), module.plain.clone()]
    return left


def differ(name: str, found: list[Any] | None, wanted: list[Any], rtol: float, atol: float) -> str:
    if found is None:  # stages of a graph have no attributes
        return "" if name == "attributes" else f"no {name}"
    if name.startswith(("gradient", "buffer")):
        wanted = wanted * len(found)
    for one, want in zip(found, wanted, strict=True):
        if not torch.is_tensor(one) or not torch.is_tensor(want):
            if one is not want and (not rtol or torch.count_nonzero(one)):
                return f"{name}: {one} and not {want}"
        elif not torch.allclose(one, want, rtol=rtol, atol=atol, equal_nan=True):
            return f"{name}: off by {(one - want).abs().max()} of {want.abs().max()}"
    return ""


def contents(net: nn.Module) -> tuple[Any, list[Any]]:
    leaves, structure = pytree.tree_flatten([dict(vars(module)) for module in net.modules()])
    return structure, [(leaf, leaf.detach().clone() if torch.is_tensor(leaf) else leaf) for leaf in leaves]


def same(before: tuple[Any, list[Any]], after: tuple[Any, list[Any]]) -> bool:
    return before[0] == after[0] and all(
        one is other and (not torch.is_tensor(one) or torch.equal(value, now) or bool(value.isnan().any()))
        for (one, value), (other, now) in zip(before[1], after[1])
    )

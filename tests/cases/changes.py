"""What may change in a stage between two steps: small functions by name, called with the pipeline's stage, and with the
one it is compared with. Both draw the same random numbers.

A new kind is a function here: it changes the stage, and may return what takes the change back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from tools.models import HIDDEN, VOCABULARY, Block, seed_cpu
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils._pytree import tree_map

from .model import Odd
from .stages import Stage

Change = Callable[[Stage, Random], Any]


@dataclass(frozen=True)
class Kind:
    """
    Attributes:
        prepare: when the stage is made.
        graphs: what stages that run as graphs do: "follow", as others do; "rebuild", for which they may have to be
            captured anew; or "refuse", by an error with the text `refusal`.
        is_new: there are other parameters than before.
        is_seeded: layers draw random numbers.
        is_whole: slices compute what whole sequences do.
    """

    change: Change
    prepare: Change | None = None
    graphs: str = "rebuild"
    refusal: str = ""
    is_new: bool = False
    is_seeded: bool = False
    is_whole: bool = True


KINDS: dict[str, Kind] = {}


def kind(name: str, **options: Any) -> Callable[[Change], Change]:
    def register(change: Change) -> Change:
        KINDS[name] = Kind(change, **options)
        return change

    return register


# Where


class NoPlaceError(Exception):
    """The stage has no such module, since an earlier change."""


def module_of(stage: Stage, rng: Random, kinds: Any = nn.Linear) -> Any:
    """A layer within the layers of the stage, which has a shape already. Those of a split stage only hold weights."""
    layers = [(name, module) for name, module in stage.layers.named_modules() if name]
    found = [(name, module) for name, module in layers if isinstance(module, kinds) or type(module) is nn.Module]
    names = [name for name, module in found if not isinstance(module, nn.LazyLinear)]
    if not names:
        raise NoPlaceError
    return stage.layers.get_submodule(rng.choice(names))


def layers_of(stage: Stage) -> list[str]:
    return [f"layers.{number}" for number in stage.layers]


def ends_of(stage: Stage) -> list[str]:
    return [name for name in ("embedding", "head") if getattr(stage, name) is not None]


def exchange(stage: Stage, rng: Random, make: Callable[[nn.Module], nn.Module], names: list[str]) -> None:
    """Put another module in the place of one of these."""
    name = rng.choice(names)
    owner, _, last = name.rpartition(".")
    seed_cpu(rng.randrange(10**6))
    setattr(stage.get_submodule(owner), last, make(stage.get_submodule(name)).to(dtype_of(stage)))


def dtype_of(stage: Stage) -> torch.dtype:
    return torch.float64 if stage.case.get("Double") else torch.float32


def like(stage: Stage, name: str) -> nn.Module:
    """A module as the stage was made with."""
    if name == "embedding":
        return nn.Embedding(VOCABULARY, HIDDEN)
    if name == "head":
        return nn.Linear(HIDDEN, VOCABULARY)
    made: nn.Module = stage.case.fold("layer", Block(0.0), int(name.rpartition(".")[2]))
    return made


# Modules


@kind("module of the same type", is_new=True)
def same_type(stage: Stage, rng: Random) -> None:
    name = rng.choice([*layers_of(stage), *2 * ends_of(stage)])
    exchange(stage, rng, lambda old: like(stage, name), [name])


OTHER_TYPES: list[Callable[[nn.Module], nn.Module]] = [
    lambda old: nn.Identity(),
    lambda old: nn.Sequential(nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, HIDDEN), nn.Tanh()),
    lambda old: Odd(Block(0.0), "used twice"),
    lambda old: nn.Sequential(nn.Linear(HIDDEN, HIDDEN, bias=False), nn.Dropout(0.0)),
]


@kind("module of another type", is_new=True)
def other_type(stage: Stage, rng: Random) -> None:
    exchange(stage, rng, rng.choice(OTHER_TYPES), layers_of(stage))


class InDtype(nn.Module):
    """Computes in a dtype of its own."""

    def __init__(self, inner: nn.Module, dtype: torch.dtype, outside: torch.dtype) -> None:
        super().__init__()
        self.inner, self.inside, self.outside = inner.to(dtype), dtype, outside

    def to(self, *_: Any, **__: Any) -> InDtype:  # of what is exchanged
        return self

    def forward(self, x: Tensor) -> Tensor:
        inner: Tensor = self.inner(x.to(self.inside) if x.is_floating_point() else x)
        return inner.to(self.outside)


@kind("module of another dtype", is_new=True, is_whole=False)
def other_dtype(stage: Stage, rng: Random) -> None:
    dtype = rng.choice([torch.bfloat16, torch.float64])
    exchange(stage, rng, lambda old: InDtype(old, dtype, dtype_of(stage)), layers_of(stage) + ends_of(stage))


class Outer(nn.Module):
    """A model with a part called `module`, or as torch.compile calls it, and another one behind."""

    def __init__(self, inner: nn.Module, name: str) -> None:
        super().__init__()
        self.name = name
        self.add_module(name, inner)
        self.behind = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        behind: Tensor = self.behind(getattr(self, self.name)(x))
        return behind


@kind("layer within another", is_new=True)
def within_another(stage: Stage, rng: Random) -> None:
    name = rng.choice(["module", "inner", "base_layer"])
    exchange(stage, rng, lambda old: Outer(old, name), layers_of(stage))


class Adapter(nn.Module):
    """A low-rank one around a linear layer."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.is_enabled = base.requires_grad_(False), True
        options: Any = {"bias": False, "dtype": base.weight.dtype}
        self.down = nn.Linear(base.in_features, 2, **options)
        self.up = nn.Linear(2, base.out_features, **options)

    def forward(self, x: Tensor) -> Tensor:
        base: Tensor = self.base(x)
        return base + self.up(self.down(x)) if self.is_enabled else base


@kind("adapters added", is_new=True)
def add_adapters(stage: Stage, rng: Random) -> None:
    seed_cpu(rng.randrange(10**6))
    for block in [module for module in stage.layers.modules() if isinstance(module, Block)]:
        name = rng.choice(["up", "down"])
        if isinstance(getattr(block, name), nn.Linear):
            setattr(block, name, Adapter(getattr(block, name)))


@kind("adapters disabled", prepare=add_adapters, graphs="refuse", refusal="is_enabled|Adapter")
def disable_adapters(stage: Stage, rng: Random) -> Any:
    adapters = [module for module in stage.layers.modules() if isinstance(module, Adapter)]
    for adapter in adapters:
        adapter.is_enabled = False
    return lambda: [setattr(adapter, "is_enabled", True) for adapter in adapters]


# What modules do


@kind("evaluates", graphs="follow")
def evaluate(stage: Stage, rng: Random) -> None:
    module_of(stage, rng, nn.Module).eval()
    stage.train(rng.random() < 0.5)


def let_drop(stage: Stage, rng: Random) -> None:
    for module in stage.layers.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.3


@kind("dropout off", prepare=let_drop, is_seeded=True, is_whole=False)
def stop_dropping(stage: Stage, rng: Random) -> None:
    module_of(stage, rng, nn.Dropout).eval()


@kind("dropout on", is_seeded=True, is_whole=False)
def begin_dropping(stage: Stage, rng: Random) -> None:
    module_of(stage, rng, nn.Dropout).p = 0.3


@kind("p of a dropout", graphs="refuse", refusal="dropout|Dropout|p ")
def other_p(stage: Stage, rng: Random) -> Any:
    """By a number that leaves results as they are where it is seen."""
    dropout = module_of(stage, rng, nn.Dropout)
    dropout.p = 1e-12
    return lambda: setattr(dropout, "p", 0.0)


class Factor(nn.Module):
    """A layer, and behind it a number."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.factor = inner, 0.5

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * self.inner(x)


def add_factor(stage: Stage, rng: Random) -> None:
    exchange(stage, rng, Factor, layers_of(stage))


@kind("another number", prepare=add_factor, graphs="refuse", refusal="factor|number")
def other_number(stage: Stage, rng: Random) -> Any:
    factor = module_of(stage, rng, Factor)
    factor.factor = 0.75
    return lambda: setattr(factor, "factor", 0.5)


@kind("forward replaced", graphs="refuse", refusal="forward")
def replace_forward(stage: Stage, rng: Random) -> Any:
    module = module_of(stage, rng, Block)
    forward = module.forward
    module.forward = lambda x: 0.5 * forward(x)
    return lambda: delattr(module, "forward")


@kind("forward of a stage replaced")
def replace_forward_of_stage(stage: Stage, rng: Random) -> None:
    forward = stage.forward
    stage.forward = lambda *args, **keywords: halved(forward(*args, **keywords))  # type: ignore[method-assign]


def halved(out: Any) -> Any:
    """What a stage returns."""
    return tree_map(lambda one: 0.5 * one if isinstance(one, Tensor) and one.is_floating_point() else one, out)


@kind("input detached")
def detach_input(stage: Stage, rng: Random) -> None:
    stage.detaches_input = True


@kind("output detached")
def detach_output(stage: Stage, rng: Random) -> None:
    stage.detaches_output = True


# Parameters


@kind("requires_grad", graphs="follow")
def flip(stage: Stage, rng: Random) -> None:
    """Of one parameter, of a layer, of some, or of all but the head."""
    named = [(name, p) for name, p in stage.named_parameters() if not name.startswith("head")]
    if named:
        begin = rng.choice(["", rng.choice(named)[0], f"layers.{rng.choice([*stage.layers])}."])
        odds = rng.choice([1.0, 0.5])
        for name, parameter in named:
            if name.startswith(begin) and rng.random() < odds:
                parameter.requires_grad = not parameter.requires_grad


def set_requires_grad(stage: Stage, value: bool) -> None:
    for parameter in stage.parameters():
        parameter.requires_grad = value  # requires_grad_ is refused by lazy ones


@kind("stage frozen", graphs="follow")
def freeze(stage: Stage, rng: Random) -> None:
    set_requires_grad(stage, False)


@kind("stage unfrozen", graphs="follow", prepare=freeze)
def unfreeze(stage: Stage, rng: Random) -> None:
    set_requires_grad(stage, True)


@kind("parameter replaced", graphs="follow", is_new=True)
def replace_parameter(stage: Stage, rng: Random) -> None:
    module = module_of(stage, rng, (nn.Linear, nn.LayerNorm))
    name, old = rng.choice([(name, p) for name, p in module._parameters.items() if p is not None])
    seed_cpu(rng.randrange(10**6))
    setattr(module, name, nn.Parameter(torch.randn_like(old), old.requires_grad))


@kind("parameter assigned", graphs="follow")
def assign_parameter(stage: Stage, rng: Random) -> None:
    weight = module_of(stage, rng, (nn.Linear, nn.LayerNorm)).weight
    with torch.no_grad():
        if rng.random() < 0.5:
            weight.clamp_(-0.1, 0.1)
        else:
            weight.data = 0.5 * weight.data


def tie(stage: Stage, rng: Random) -> None:
    block = module_of(stage, rng, Block)
    block.down.bias = block.norm.bias


@kind("parameters tied", is_new=True)
def tie_later(stage: Stage, rng: Random) -> None:
    tie(stage, rng)


@kind("parameters untied", prepare=tie, is_new=True)
def untie(stage: Stage, rng: Random) -> None:
    for block in [module for module in stage.layers.modules() if isinstance(module, Block)]:
        if getattr(block.down, "bias", None) is block.norm.bias:  # an adapter has none
            block.down.bias = nn.Parameter(block.norm.bias.detach().clone())


def modules_with_weights(stage: Stage, rng: Random) -> nn.Module:
    return rng.choice([module_of(stage, rng), *map(stage.get_submodule, ends_of(stage))])


@kind("parametrized", is_new=True)
def parametrized(stage: Stage, rng: Random) -> None:
    module = modules_with_weights(stage, rng)
    has_weight = isinstance(getattr(module, "weight", None), Tensor)
    if has_weight and not parametrize.is_parametrized(module):  # torch's weight_norm fails upon another
        parametrizations.weight_norm(module)


def parametrize_one(stage: Stage, rng: Random) -> None:
    if not parametrize.is_parametrized(module := module_of(stage, rng)):
        parametrizations.weight_norm(module)


@kind("parametrization removed", prepare=parametrize_one, is_new=True)
def remove_parametrizations(stage: Stage, rng: Random) -> None:
    for module in stage.layers.modules():
        if parametrize.is_parametrized(module, "weight"):
            parametrize.remove_parametrizations(module, "weight")


# Hooks


HOOKS: dict[str, Callable[[nn.Module], Any]] = {
    "forward pre-hook": lambda module: module.register_forward_pre_hook(lambda _, args: (0.5 * args[0],)),
    "forward hook": lambda module: module.register_forward_hook(lambda _, args, output: 0.5 * output),
    "backward pre-hook": lambda module: module.register_full_backward_pre_hook(lambda _, grads: (0.5 * grads[0],)),
    "backward hook": lambda module: module.register_full_backward_hook(
        lambda _, inputs, outputs: tuple(None if one is None else 0.5 * one for one in inputs)
    ),
}
OF_MODULES = (nn.Linear, nn.LayerNorm, Block)
for name, register in HOOKS.items():

    @kind(name, graphs="refuse", refusal="hook")
    def hook(stage: Stage, rng: Random, register: Any = register) -> Any:
        return register(module_of(stage, rng, OF_MODULES)).remove

    def hook_at_first(stage: Stage, rng: Random, register: Any = register) -> None:
        stage.handle = register(module_of(stage, rng, OF_MODULES))

    @kind(f"{name} removed", prepare=hook_at_first)
    def remove_hook(stage: Stage, rng: Random) -> None:
        stage.handle.remove()


@kind("hook of a parameter", graphs="follow")
def hook_of_parameter(stage: Stage, rng: Random) -> None:
    weight = module_of(stage, rng).weight
    if weight.requires_grad and weight.is_leaf:
        weight.register_hook(lambda grad: 0.5 * grad)


def scale_gradient(parameter: Tensor) -> None:
    if parameter.grad is not None:
        parameter.grad.mul_(0.5)


@kind("hook behind an accumulation", graphs="follow", is_whole=False)
def hook_behind_accumulation(stage: Stage, rng: Random) -> None:
    weight = module_of(stage, rng).weight
    if weight.requires_grad and weight.is_leaf:
        weight.register_post_accumulate_grad_hook(scale_gradient)


def gather(parameter: Any) -> None:
    """Gradients are kept elsewhere, as those who add them up in another dtype do."""
    parameter.gathered = getattr(parameter, "gathered", 0) + parameter.grad
    parameter.grad = None


@kind("gradients gathered by a hook", graphs="follow", is_whole=False)
def gather_by_hook(stage: Stage, rng: Random) -> None:
    for parameter in stage.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(gather)


@kind("noise", is_whole=False)
def add_noise(stage: Stage, rng: Random) -> None:
    """By a generator that nobody sees."""
    generator = torch.Generator().manual_seed(rng.randrange(10**6))

    def noisy(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output + 0.1 * torch.randn(output.shape, generator=generator).to(output.dtype)

    module_of(stage, rng, nn.Linear).register_forward_hook(noisy)

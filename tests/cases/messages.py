"""Containers of messages: a kind is how one is made of its entries, and how they are taken out again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from tools.models import HIDDEN
from torch.utils import _pytree as pytree

SIDE = 4  # features that a second tensor carries
Entries = dict[str, Any]
Way = tuple[Callable[[Entries], Any], Callable[[Any], Entries]]


class Cache:
    """With a context that each stage changes in place."""

    def __init__(self, tensors: Any, context: Entries) -> None:
        self.tensors, self.context = list(tensors), context


@dataclass
class Parts:
    x: Any
    rest: Entries


class Pair(NamedTuple):
    x: Any
    rest: Entries


class Output(OrderedDict[str, Any]):
    """As in transformers."""

    x = property(lambda self: self["x"])


class Named(dict[str, Any]):
    """Which pytrees do not know."""

    x = property(lambda self: self["x"])


pytree.register_pytree_node(Cache, lambda cache: (cache.tensors, cache.context), Cache)
pytree.register_pytree_node(Parts, lambda parts: ([parts.x, parts.rest], None), lambda parts, _: Parts(*parts))
pytree.register_pytree_node(
    Output, lambda o: (list(o.values()), list(o)), lambda values, keys: Output(zip(keys, values))
)


def to_cache(entries: Entries) -> Cache:
    context = entries.pop("context", None) or {"stages": 0}
    context["names"] = list(entries)
    return Cache(entries.values(), context)


def from_cache(cache: Cache) -> Entries:
    cache.context["stages"] += 1
    entries = dict(zip(cache.context["names"], cache.tensors), context=cache.context)
    return entries | {"x": entries["x"] * (1 + 0.01 * cache.context["stages"])}


def rest_of(entries: Entries) -> Entries:
    return {name: value for name, value in entries.items() if name != "x"}


OF_X: dict[str, Way] = {  # which hold nothing else
    "tensor": (lambda e: e["x"], lambda m: {"x": m}),
    "list of one": (lambda e: [e["x"]], lambda m: dict(zip("x", m, strict=True))),
    "tuple": (lambda e: (e["x"], 0.5 * e["x"][..., :SIDE]), lambda m: {"x": m[0] + F.pad(m[1], (0, HIDDEN - SIDE))}),
    "empty": (lambda e: (e["x"], e["x"][..., :0]), lambda m: {"x": m[0] + m[1].sum()}),
    "list": (
        lambda e: [part.contiguous() for part in e["x"].split([SIDE, 1, HIDDEN - SIDE - 1], -1)],
        lambda m: {"x": torch.cat(m, -1)},
    ),
    "complex": (  # torch keeps a conjugate or a negative as a mark on the numbers it was made from
        lambda e: (torch.complex(e["x"], 0.5 * e["x"]).conj(), torch._neg_view(1 * e["x"])),
        lambda m: {"x": m[0].conj().imag + 2 * m[0].real - m[1]},
    ),
    "strided": (lambda e: (e["x"].transpose(0, 1), e["x"][..., ::2]), lambda m: {"x": m[0].transpose(0, 1)}),
}
OF_ENTRIES: dict[str, Way] = {
    "dict": (dict, dict),
    "nested": (lambda e: [(e["x"], None), "text", rest_of(e)], lambda m: {"x": m[0][0], **m[2]}),
    "written dict": (dict, lambda m: m),  # the stage takes out of it what it is given
    "written list": (lambda e: [rest_of(e), e["x"]], lambda m: {"x": m.pop(), **m.pop()}),
    "registered class": (to_cache, from_cache),
    "dataclass": (lambda e: Parts(e["x"], rest_of(e)), lambda m: {"x": m.x, **m.rest}),
    "registered dict": (Output, lambda m: {**m, "x": m.x}),
    "unknown dict": (Named, lambda m: {**m, "x": m.x}),
    "named tuple": (lambda e: Pair(e["x"], rest_of(e)), lambda m: {"x": m.x, **m.rest}),
}
WAYS = OF_X | OF_ENTRIES

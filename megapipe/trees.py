"""Messages that are more than tensors in one flat container: nested containers, as torch's pytrees know them, with
plain values between the tensors.

Such a message is told apart into its tensors and a description of all else, a text in JSON: equal texts mean equal
messages but for what is in the tensors. It names classes, and only those that torch's pytrees know are made from it.
"""

from __future__ import annotations

import copy
import functools
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch.utils import _pytree as pytree

TENSOR = "tensor"
VALUE = "value"
CONTAINERS = {"list": list, "tuple": tuple, "dict": dict}
PLAIN = (bool, int, float, str, type(None))
KEYS = (bool, int, str)
"""Keys of dicts. Others that compare equal, as those of enums, would be these on other ranks."""


def describe(message: object) -> tuple[str, list[torch.Tensor]]:
    """The description of a message, and its tensors.

    Raises:
        TypeError: it is a plain value, or holds what is neither a container, a tensor nor a plain value. The text goes
            on after "the output ...: ".
    """
    if type(message) in PLAIN:
        _refuse(message, None)
    tensors: list[torch.Tensor] = []
    return json.dumps(_describe(message, tensors, None), separators=(",", ":")), tensors


def rebuild(description: str, tensors: Sequence[Any]) -> Any:
    """The message again. Raises ValueError where this process lacks a class that is named."""
    return _rebuild(_parse(description), iter(tensors))


def holds_values(description: str) -> bool:
    """Whether there are plain values between the tensors. (A dict whose keys begin with "value" counts as one.)"""
    return f'["{VALUE}",' in description


def show(description: str, tensors: Sequence[object]) -> str:
    """A tree in words: the containers, with the texts of `tensors` in the places of tensors."""
    return _show(_parse(description), map(str, tensors))


_parse = functools.lru_cache(maxsize=256)(json.loads)


# A node is "tensor", ["value", the value], or [the class of a container, its context, *nodes].


def _describe(node: Any, tensors: list[torch.Tensor], parent: Any) -> Any:
    if isinstance(node, torch.Tensor):
        tensors.append(node)
        return TENSOR
    if type(node) in PLAIN:
        return [VALUE, node]
    name, context, children = _take_apart(node, parent)
    return [name, context, *(_describe(child, tensors, node) for child in children)]


def _take_apart(node: Any, parent: Any) -> tuple[str, Any, Sequence[Any]]:
    """A container's class, what besides its children is needed to make it again, and its children."""
    kind = type(node)
    if _is_namedtuple(kind):
        return _name_of(kind), None, node
    if kind not in CONTAINERS.values() and kind in pytree.SUPPORTED_NODES:
        children, context = pytree.SUPPORTED_NODES[kind].flatten_fn(node)
        if not _is_plain(context):
            raise TypeError(f"it holds a {kind.__name__}, whose {context!r} cannot be written down for another rank")
        return _name_of(kind), context, children
    if kind is dict:
        for key in node:
            if type(key) not in KEYS:
                raise TypeError(f"it is a dict with the key {key!r}, which is no plain string or whole number")
        return "dict", list(node), list(node.values())
    for name, container in CONTAINERS.items():
        if kind is container:
            return name, None, node
        if isinstance(node, container):
            raise TypeError(
                f"it holds a {kind.__name__}, a {name} that torch's pytrees do not know: make a plain {name} of it, or "
                "register its class with them"
            )
    _refuse(node, parent)


def _refuse(node: Any, parent: Any) -> NoReturn:
    if node is None:
        raise TypeError("it is None, which is what a function without a return gives")
    inside = "" if parent is None else f"{type(parent).__name__} that holds a "
    raise TypeError(f"it is a {inside}{type(node).__name__}")


def _is_plain(context: Any) -> bool:
    """Whether it comes back from JSON as it is."""
    if type(context) is dict:
        return all(type(key) is str for key in context) and all(map(_is_plain, context.values()))
    return all(map(_is_plain, context)) if type(context) is list else type(context) in PLAIN


def _name_of(kind: type) -> str:
    name = f"{kind.__module__}:{kind.__qualname__}"
    try:
        is_found = _class_of(name) is kind
    except ValueError:
        is_found = False
    if not is_found:
        raise TypeError(
            f"it holds a {kind.__name__}, which other ranks do not find by its name: define the class at the top of a "
            "module"
        )
    return name


def _is_namedtuple(kind: type) -> bool:
    return issubclass(kind, tuple) and hasattr(kind, "_fields")


def _class_of(name: str) -> Any:
    module, _, qualified_name = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in qualified_name.split("."):
        found = getattr(found, part, None)
    if not isinstance(found, type) or not (_is_namedtuple(found) or found in pytree.SUPPORTED_NODES):
        raise ValueError(
            f"another stage sent a {name}, which is no container that torch's pytrees know on this rank: import its "
            "module on every rank."
        )
    return found


def _rebuild(node: Any, tensors: Iterator[Any]) -> Any:
    if node == TENSOR:
        return next(tensors)
    name, context, *rest = node
    if name == VALUE:
        return context
    children = [_rebuild(child, tensors) for child in rest]
    if name in CONTAINERS:
        return dict(zip(context, children)) if name == "dict" else CONTAINERS[name](children)
    kind = _class_of(name)
    if _is_namedtuple(kind):
        return kind(*children)
    own = copy.deepcopy(context) if isinstance(context, (list, dict)) else context
    return pytree.SUPPORTED_NODES[kind].unflatten_fn(children, own)


def _show(node: Any, texts: Iterator[str]) -> str:
    if node == TENSOR:
        return next(texts)
    name, context, *rest = node
    if name == VALUE:
        return repr(context)
    children = [_show(child, texts) for child in rest]
    if name == "dict":
        return "{" + ", ".join(f"{key!r}: {child}" for key, child in zip(context, children)) + "}"
    inside = ", ".join(children)
    return f"[{inside}]" if name == "list" else f"{name.rpartition(':')[2].replace('tuple', '')}({inside})"

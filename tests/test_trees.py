"""Messages of nested containers, described for the stage that receives them."""

import dataclasses
from collections import OrderedDict
from http import HTTPStatus
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from megapipe.messages import MessageSpec, TensorSpec, decode_header, encode_header, pack, unpack


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass
class Output:
    hidden: Tensor
    rest: Any


pytree.register_pytree_node(
    Output, lambda one: ([one.hidden, one.rest], ["hidden", "rest"]), lambda v, k: Output(**dict(zip(k, v)))
)


@dataclasses.dataclass
class Counted:
    hidden: Tensor
    counts: Any


pytree.register_pytree_node(Counted, lambda one: ([one.hidden], one.counts), lambda v, counts: Counted(*v, counts))

X, Y = torch.ones(2), torch.zeros(3)

NESTED = [
    Pair(X, Y),
    Pair((X, [Y]), {"k": None, 3: Pair(1.5, "text")}),
    {"states": [X, Y], "mask": None, "scale": float("inf"), "flags": (True, -2)},
    OrderedDict(b=X, a=(Y,)),
    Output(X, [Y, ()]),
    (X, [[]]),
]


@pytest.mark.parametrize("message", NESTED, ids=str)
def test_what_is_nested_comes_back_as_it_was(message: Any) -> None:
    structure, tensors = pack(message)
    assert [id(t) for t in tensors] == [id(t) for t in pytree.tree_leaves(message) if isinstance(t, Tensor)]
    spec = MessageSpec(structure, tuple(TensorSpec(tuple(t.shape), t.dtype, True) for t in tensors))
    received = decode_header(encode_header(spec))
    assert received == spec
    back = unpack(received.structure, tensors)
    assert type(back) is type(message)
    assert repr(back) == repr(message)
    assert pack(back)[0] == structure


def test_flat_messages_keep_their_structures() -> None:
    structures = [pack(one)[0] for one in (X, [X], [X, Y], (X,), {"a": X, 2: Y}, [])]
    assert structures == ["tensor", "tensor", "list", "tuple", ("a", 2), "list"]
    tensors = (TensorSpec((2, 3), torch.bfloat16, True), TensorSpec((), torch.int64, False))
    for structure in structures:
        spec = MessageSpec(structure, tensors)
        assert decode_header(encode_header(spec)) == spec
        assert spec.gradient_spec() == MessageSpec("list", tensors[:1])


def test_a_message_is_shown_with_its_containers() -> None:
    structure, tensors = pack({"states": (X, [Y]), "pair": Pair(None, X)})
    spec = MessageSpec(structure, tuple(TensorSpec(tuple(t.shape), t.dtype, True) for t in tensors))
    assert str(spec) == "{'states': (float32[2], [float32[3]]), 'pair': Pair(None, float32[2])}"


def test_each_message_has_containers_of_its_own() -> None:
    """What a class kept besides its tensors was one object for all messages of a kind: a stage that wrote there changed
    the messages to come."""
    structure, tensors = pack(Counted(X, {"layers": [1]}))
    first, second = (unpack(structure, tensors) for _ in range(2))
    first.counts["layers"].append(2)
    assert second.counts == unpack(structure, tensors).counts == {"layers": [1]}


def test_what_cannot_be_described_is_refused() -> None:
    """Containers of other classes arrived as plain ones, without their methods and attributes. So did keys of enums,
    which `is` tells from plain ones."""

    class Local(NamedTuple):
        x: Any

    refused = {
        "it is None, which is what a function without a return gives": None,
        "it is a float": 1.0,
        "it is a set": {1},
        "it is a list that holds a set": [X, {1}],
        "it is a tuple that holds a dtype": ([X], (torch.float32,)),
        r"it is a dict with the key \(0, 1\), which is no plain string or whole number": {"a": {(0, 1): X}},
        "it is a dict with the key <HTTPStatus.OK: 200>, which is no plain": {"a": {HTTPStatus.OK: X}},
        "a dict with the key <HTTPStatus.OK: 200>, which is no plain": {HTTPStatus.OK: X},
        "it holds a Local, which other ranks do not find by its name": Local(X),
        r"it holds a Counted, whose OrderedDict\(.* cannot be written down": Counted(X, OrderedDict(a=1)),
        r"it holds a Counted, whose \(1, 2\) cannot be written down": Counted(X, (1, 2)),
        r"it holds a Counted, whose {1: 2} cannot be written down": Counted(X, {1: 2}),
    }
    for plain in (dict, list, tuple):
        name, kind = f"My{plain.__name__}", plain.__name__
        text = f"it holds a {name}, a {kind} that torch's pytrees do not know: make a plain {kind} of it, or register"
        refused[text] = [type(name, (plain,), {})()]
    for text, message in refused.items():
        with pytest.raises(TypeError, match=text):
            pack(message)


def test_a_class_that_is_no_container_is_not_made() -> None:
    """A description names classes, and comes from another process."""
    for name in ("builtins:eval", "subprocess:Popen", "no_such_module:Pair"):
        with pytest.raises(ValueError, match="no container that torch's pytrees know"):
            unpack(f'["{name}",null,"tensor"]', [X])

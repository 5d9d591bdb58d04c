"""What the modules of a model are called with, and what they return, in the forward of one microbatch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from ..chunks import unwrap
from .compare import difference
from .names import full

NameOf: TypeAlias = Callable[[int, str], str]


class Moment(NamedTuple):
    """The begin of a module's call, or its end.

    Attributes:
        size: how many parameters it has: a container has fewer where its modules are on several stages.
        values: copies of its arguments, or of its output, by their names.
    """

    module: str
    kind: str
    size: int
    is_end: bool
    values: dict[str, Any]


@contextmanager
def recorded(chunks: Sequence[nn.Module], numbers: range, name_of: NameOf) -> Iterator[list[Moment]]:
    """The calls of modules in some forwards, each by its begin and its end.

    Args:
        numbers: the how-manieth forwards of each chunk: those of one microbatch, or of its slices.
        name_of: the name of a chunk's module in the whole model, by the place of the chunk.
    """
    calls: list[Moment] = []
    with ExitStack() as after:
        for index, chunk in enumerate(chunks):
            watch = _Watch(index, numbers, calls, name_of)
            after.callback(chunk.register_forward_pre_hook(watch.begin).remove)
            after.callback(chunk.register_forward_hook(watch.end).remove)
            for name, module in unwrap(chunk).named_modules():
                if name:
                    begin, end = watch.hooks_of(name)
                    after.callback(module.register_forward_pre_hook(begin, with_kwargs=True).remove)
                    after.callback(module.register_forward_hook(end).remove)
        yield calls


class _Watch:
    """Follows one chunk. What is computed again in a backward is not its forward."""

    def __init__(self, index: int, numbers: range, calls: list[Moment], name_of: NameOf) -> None:
        self._index, self._numbers, self._calls, self._name_of = index, numbers, calls, name_of
        self._number = -1
        self._is_within = False

    def begin(self, *_: Any) -> None:
        self._number += 1
        self._is_within = True

    def end(self, *_: Any) -> None:
        self._is_within = False

    def hooks_of(self, name: str) -> tuple[Callable[..., None], Callable[..., None]]:
        def begin(module: nn.Module, arguments: Any, keywords: Any) -> None:
            named = {f"argument {number}": value for number, value in enumerate(arguments)}
            self._note(name, module, False, {**named, **keywords})

        def end(module: nn.Module, arguments: Any, output: Any) -> None:
            self._note(name, module, True, {"output": output})

        return begin, end

    def _note(self, name: str, module: nn.Module, is_end: bool, values: dict[str, Any]) -> None:
        if self._is_within and self._number in self._numbers:
            size = sum(parameter.numel() for parameter in module.parameters())
            kept: dict[str, Any] = tree_map(_copied, values)
            self._calls.append(Moment(self._name_of(self._index, name), type(module).__name__, size, is_end, kept))


def _copied(one: Any) -> Any:
    return full(one) if isinstance(one, Tensor) else one if type(one) in (int, float, bool, str, type(None)) else "..."


class Departure(NamedTuple):
    """The first moment that is another one than in the whole model.

    Attributes:
        argument: the argument that differs; "" where all are the same, and the output is not.
        found, wanted: that argument, or the output, in words.
    """

    module: str
    kind: str
    argument: str
    found: str
    wanted: str


def first_departure(calls: Sequence[Moment], wanted: Sequence[Moment]) -> Departure | None:
    """The first one in the order of the whole model. What of it is on no stage as a whole is passed over."""
    own: defaultdict[tuple[str, bool, int], list[Moment]] = defaultdict(list)
    for moment in calls:
        own[moment.module, moment.is_end, moment.size].append(moment)
    for want in wanted:
        found = own[want.module, want.is_end, want.size]
        if not found:
            continue
        one = found.pop(0)
        for name in dict.fromkeys([*want.values, *one.values]):
            mine, other = one.values.get(name), want.values.get(name)
            if difference(mine, other) is not None:
                words = _in_words(mine, other), _in_words(other, mine)
                return Departure(want.module, want.kind, "" if want.is_end else name, *words)
    return None


def _in_words(one: Any, other: Any) -> str:
    tensors, others = ([leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)] for value in (one, other))
    if not tensors:
        return repr(one)
    first = tensors[0]
    text = f"a tensor {list(first.shape)} of {str(first.dtype).removeprefix('torch.')}"
    is_alike = bool(others) and others[0].shape == first.shape
    return text + (f" with a mean of {first.double().mean():.6g}" if is_alike else "")

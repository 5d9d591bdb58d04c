"""What flows between the layers of a model, found by running it once with random numbers.

The whole model shows what each layer is called with, and where each parameter outside the layers is read. Then each
stage runs by itself, its own layers given what they are given in the whole model: what the stage's code has made
otherwise by then has to come from the stage before, and what it has made alike for layers behind can be handed on.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ...plan import StageInfo
from .boundaries import (
    Border,
    CannotCutError,
    Crossing,
    ModelParts,
    Path,
    Place,
    Reached,
    find_at,
    first_tensor,
    form_of,
    replace_at,
    tensors_in,
)
from .step import tied_names


@dataclass
class WholeRun:
    """One run of the whole model."""

    used: dict[str, set[int]]
    """Which layers were running, or had run last, when a parameter outside them was read: -1 before the first, their
    number behind the last."""
    forms: list[Any]
    """What each layer returned, see `form_of`."""
    calls: list[dict[Path, Tensor]]
    """The tensors that each layer was called with, and those that the last one returned."""
    groups: dict[Place, str]
    """The name of the tensor at each place: the same one may be read at several."""
    unread: frozenset[int] = frozenset([-1])
    """Where parameters outside layers go that were not read."""

    def is_kept(self, name: str, stage: StageInfo, layers: range) -> bool:
        """Whether a stage reads a parameter outside its layers."""
        used = self.used.get(name) or self.unread
        at_ends = (stage.is_first and -1 in used) or (stage.is_last and len(self.forms) in used)
        return at_ends or not used.isdisjoint(layers)


@dataclass(frozen=True)
class Flow:
    """How a model is cut into stages."""

    course: WholeRun
    borders: list[Border]
    """One for each stage."""
    is_plain: bool
    """Whether hidden states are all that travels."""
    reads_tokens: bool
    """Whether stages behind the first need the batch too."""
    cannot_generate: str = ""
    """Why, where stages that keep keys and values do not do what the whole model does."""


class _Watch(TorchFunctionMode):
    """Tells which parameters are read by which functions."""

    def __init__(self, note: Callable[[Any], None]) -> None:
        super().__init__()
        self._note = note

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") != "__get__":
            for one in (*args, *(kwargs or {}).values()):
                for leaf in one if isinstance(one, (list, tuple)) else [one]:
                    if isinstance(leaf, nn.Parameter):
                        self._note(leaf)
        return func(*args, **(kwargs or {}))


@contextmanager
def watched(model: nn.Module, parts: ModelParts) -> Iterator[WholeRun]:
    """What happens while the block runs the whole model once.

    Raises:
        CannotCutError: layers are not run one after the other.
    """
    layers = parts.layers_of(model)
    names = {p: name for name, p in model.named_parameters(remove_duplicate=False) if parts.layer_of(name) is None}
    course = WholeRun({}, [None] * len(layers), [{} for _ in range(len(layers) + 1)], {})
    seen: dict[int, tuple[str, Tensor]] = {}
    now, order = [-1], []
    firsts: list[Tensor | None] = [None] * len(layers)

    def read(parameter: Any) -> None:
        if parameter in names:
            course.used.setdefault(names[parameter], set()).add(now[0])

    def note(number: int, values: Any) -> None:
        for path, tensor in tensors_in(values):
            name = f"{'.'.join(map(str, path))}" if path else "hidden_states"
            course.calls[number][path] = tensor.detach().clone()
            taken = {one for one, _ in seen.values()}
            known = seen.setdefault(id(tensor), (name if name not in taken else f"{name} of layer {number}", tensor))
            course.groups[Place(number, path)] = known[0]

    def before(number: int, layer: nn.Module, arguments: Any, options: Any) -> None:
        order.append(number)
        now[0] = number
        given = inspect.signature(layer.forward).bind(*arguments, **options).arguments
        note(number, given)
        firsts[number] = first_tensor(given)

    def behind(number: int, layer: nn.Module, arguments: Any, output: Any) -> None:
        course.forms[number] = form_of(output, firsts[number])
        if number + 1 == len(layers):
            now[0] = len(layers)
            note(len(layers), output)

    with ExitStack() as stack:
        for number, layer in enumerate(layers):
            stack.callback(layer.register_forward_pre_hook(partial(before, number), with_kwargs=True).remove)
            stack.callback(layer.register_forward_hook(partial(behind, number)).remove)
        stack.enter_context(_Watch(read))
        yield course
    for pair in tied_names(model).items():  # of which one may never be read
        read_by = [course.used.get(name) for name in pair]
        course.used.update(
            {name: set(own or other or ()) for name, own, other in zip(pair, read_by, reversed(read_by))}
        )
    if order != list(range(len(layers))):
        raise CannotCutError(
            f"{type(model).__name__} cannot be cut into stages: it runs its layers in the order {order[:12]}..."
        )


class StageTrial(Crossing):
    """A stage whose own layers are given what they are given in the whole model.

    Attributes:
        needed: the places at which own layers were given something else.
        had: those behind the stage at which there was the right thing.
    """

    is_everywhere = True

    def __init__(self, course: WholeRun, layers: range) -> None:
        super().__init__(Border(), layers, course.forms)
        self.course, self.received = course, {}
        self.needed: list[Place] = []
        self.had: list[Place] = []

    def enter(self, number: int, given: inspect.BoundArguments) -> None:
        for path, wanted in self.course.calls[number].items():
            if not _is_at(given.arguments, path, wanted):
                self.needed.append(Place(number, path))
            given.arguments = replace_at(given.arguments, path, wanted)

    def leave(self, number: int, output: Any) -> None:
        if number + 1 == len(self.forms):
            self._look(number + 1, output)

    def skip(self, number: int, given: inspect.BoundArguments) -> Any:
        if number >= self.layers.stop:
            self._look(number, given.arguments)
        if number + 1 == len(self.forms) and self.layers.start > number:
            self.needed += [Place(number + 1, path) for path in self.course.calls[-1]]
            raise Reached
        return super().skip(number, given)

    def _look(self, number: int, values: Any) -> None:
        self.had += [Place(number, p) for p, wanted in self.course.calls[number].items() if _is_at(values, p, wanted)]
        if number >= len(self.forms) - 1:
            raise Reached


def _is_at(values: Any, path: Path, wanted: Tensor) -> bool:
    try:
        found = find_at(values, path)
    except (LookupError, TypeError):
        return False
    return (
        torch.is_tensor(found)
        and (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
        and bool(((found == wanted) | ((found != found) & (wanted != wanted))).all())
    )


def borders_of(course: WholeRun, trials: Sequence[StageTrial]) -> list[Border] | str:
    """The border of each stage, or what of them lacks."""
    borders = [Border() for _ in trials]
    wanted: dict[str, Place] = {}
    for index in range(len(trials) - 1, -1, -1):
        trial, border = trials[index], borders[index]
        had: dict[str, Place] = {}
        for place in trial.had:
            had.setdefault(course.groups[place], place)
        border.gives.update({name: had[name] for name in wanted if name in had})
        border.passes.extend(name for name in wanted if name not in had)
        places: dict[str, list[Place]] = defaultdict(list)
        for place in trial.needed:
            places[course.groups[place]].append(place)
        border.takes.update(places)
        wanted = {**{name: found[0] for name, found in places.items()}, **{n: wanted[n] for n in border.passes}}
    if wanted:
        name, place = next(iter(wanted.items()))
        return f"layer {place.layer} reads {name}, which its stage cannot be given"
    return borders

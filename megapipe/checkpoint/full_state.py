"""A rank's part of the model and of its optimizer, under fully qualified names: those of the whole model.

A name says which parameter it is, not where it is kept; so any arrangement of stages and replicas finds what another
one has saved. Optimizer state has the names of the parameters. Tensors are saved as tensors, to be read in place and
shard by shard; the rest (learning rates, step counts that are numbers) is small and saved once, by rank 0.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from ..chunks import fully_qualified_name, unwrap
from .reading import Reader, fill, serialise

GlobalName = Callable[[nn.Module, str], str]
"""(chunk, its name for a parameter) to the whole model's name for it."""

Parts = Callable[[str, nn.Parameter, Tensor], Iterable[tuple[str, Tensor]]]
"""(name, parameter, the parameter or a tensor of its shape) to named views of the tensor, under which it is saved."""

PARAMETERS = ("params", "param_names")
"""What of a parameter group is no setting."""


class Held(NamedTuple):
    """One entry of a chunk's state_dict."""

    chunk: int
    local_name: str
    name: str
    value: Any


class FullState:
    """This rank's chunks and optimizers as they are now.

    The state of an optimizer is its own `state_dict()`, since its `load_state_dict` will read it.

    Args:
        has_weights: whether the chunks' own tensors are saved and loaded, or the optimizers' alone.

    Raises:
        ValueError: where an optimizer has a parameter that no chunk has, or that another one has.
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        global_name: GlobalName | None = None,
        parts: Parts | None = None,
        trained_only: bool = False,
        has_weights: bool = True,
    ) -> None:
        self._chunks = [unwrap(chunk) for chunk in chunks]
        self._optimizers = optimizers
        self._parts, self._trained_only = parts, trained_only
        named = global_name or (lambda chunk, name: name)
        self.held = [
            Held(number, local_name, named(chunk, fully_qualified_name(local_name)), value)
            for number, chunk in enumerate(self._chunks)
            for local_name, value in chunk.state_dict(keep_vars=True).items()
        ]
        everything = self.held
        if trained_only:
            kept = {(number, name) for number, chunk in enumerate(self._chunks) for name in _trained_in(chunk)}
            self.held = [one for one in self.held if (one.chunk, fully_qualified_name(one.local_name)) in kept]
        self._names: dict[int, str] = {}  # of parameters by id; of a tied one the first
        self.aliases: dict[str, str] = {}
        """Further names of tied parameters, with the name they are saved under."""
        for held in everything:
            if isinstance(held.value, nn.Parameter):
                first = self._names.setdefault(id(held.value), held.name)
                if first != held.name:
                    self.aliases[held.name] = first
        if not has_weights:
            self.held = []
        trained_by: dict[int, int] = {}
        for number, optimizer in enumerate(optimizers):
            for parameter in (p for group in optimizer.param_groups for p in group["params"]):
                if trained_by.setdefault(id(parameter), number) != number:
                    raise ValueError(
                        f"optimizers {trained_by[id(parameter)]} and {number} train the same parameter, of shape "
                        f"{list(parameter.shape)}, whose state would be saved under one name: give each a Checkpointer."
                    )
            unknown = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in self._names]
            if unknown:
                raise ValueError(
                    f"optimizer {number} has {len(unknown)} parameters that none of the {len(chunks)} chunks has, "
                    f"the first of shape {list(unknown[0].shape)}: pass the chunks whose parameters it trains."
                )

    # Saving

    def tensors(self) -> dict[str, Tensor]:
        """All there is to save in tensors, by key."""
        tensors = {f"model.{name}": tensor for _, name, tensor in self.named_tensors()}
        for held in self.held:
            if is_extra_state(held):
                tensors[f"model.{held.name}"] = serialise(held.value, f"the extra state {held.name}")
        for name, parameter, state in self._optimizer_states():
            for key, value in state.items():
                if isinstance(value, Tensor):
                    self._check_divisible(key, name, parameter, value)
                    key = _without_dots(key)
                    tensors |= {f"optimizer.{key}.{n}": t for n, t in self._divided(name, parameter, value)}
        return tensors

    def named_tensors(self) -> Iterator[tuple[Held, str, Tensor]]:
        """Parameters and buffers, in parts where they are saved in parts, under the names they are saved under."""
        for held in self.held:
            if held.name not in self.aliases and not is_extra_state(held):
                for name, tensor in self._divided(held.name, held.value, held.value.detach()):
                    yield held, name, tensor

    def settings(self) -> dict[str, Any]:
        """What optimizers have besides tensors: `options` of the parameter groups, with the names of their parameters,
        and `numbers`, state by parameter."""
        options: list[dict[str, Any]] = []
        numbers: dict[str, dict[str, Any]] = {}
        for place, (optimizer, packed) in enumerate(zip(self._optimizers, self._packed)):
            for number, (names, group) in enumerate(zip(self._names_of(optimizer), packed["param_groups"])):
                settings = {key: value for key, value in group.items() if key not in PARAMETERS}
                options.append({"optimizer": place, "group": number, "names": names, "options": settings})
        for name, _, state in self._optimizer_states():
            if own := {key: value for key, value in state.items() if not isinstance(value, Tensor)}:
                numbers[name] = own
        return {"options": options, "numbers": numbers}

    def extras(self) -> list[dict[str, Any]]:
        """What each optimizer has besides groups and the state of parameters: state under names of its own, and what
        its `state_dict()` adds."""
        return [
            {
                "state": {key: value for key, value in packed["state"].items() if isinstance(key, str)},
                "entries": {key: value for key, value in packed.items() if key not in ("state", "param_groups")},
            }
            for packed in self._packed
        ]

    # Loading

    def fetch_model(self, reader: Reader, aliases: Mapping[str, str]) -> Callable[[], None]:
        """Read the model into the host's memory. What is returned writes it into the chunks.

        Raises:
            ValueError: before anything is read, where the checkpoint lacks something, or has another shape or numbers
                of another kind.
        """
        to_read = _ToRead(reader)
        extra: dict[str, Any] = {}
        for held in self.held:
            name = self._saved_name(held.name, reader, aliases)
            if is_extra_state(held):
                check_there(f"model.{name}", reader)
                extra[held.name] = reader.read_value(f"model.{name}")
            else:
                for part, target in self._divided(name, held.value, held.value.detach()):
                    to_read.add(f"model.{part}", target)
        fetched = to_read.fetch()

        def load() -> None:
            to_read.fill(fetched)
            for number, chunk in enumerate(self._chunks):  # for hooks and extra state: torch copies no tensor to itself
                if own := [held for held in self.held if held.chunk == number]:
                    chunk.load_state_dict(
                        {h.local_name: extra[h.name] if is_extra_state(h) else h.value for h in own},
                        strict=not self._trained_only,
                    )

        return load

    def fetch_optimizers(self, reader: Reader, run: Mapping[str, Any]) -> Callable[[], None]:
        """Read the state of the optimizers into new tensors. What is returned lets the optimizers have them. Parameters
        that had no state when it was saved have none then.

        Args:
            run: what the checkpoint says of the optimizers: `aliases`, `options`, `numbers` and `extras`.
        """
        to_read = _ToRead(reader)
        saved: dict[str, dict[str, TensorStorageMetadata]] = {}  # by parameter
        for full_key, what in reader.contents.items():
            if full_key.startswith("optimizer."):
                _, key, name = full_key.split(".", 2)
                saved.setdefault(name, {})[_with_dots(key)] = what
        by_name = {name: group["options"] for group in run["options"] for name in group["names"]}
        by_number = {(group.get("optimizer"), group["group"]): group["options"] for group in reversed(run["options"])}
        extras = run.get("extras", [])
        loaded: list[dict[str, Any]] = []
        for number, optimizer in enumerate(self._optimizers):
            groups: list[dict[str, Any]] = []
            state: dict[Any, dict[str, Any]] = {}
            indices = itertools.count()
            for place, (group, names) in enumerate(zip(optimizer.param_groups, self._names_of(optimizer))):
                names = [self._saved_name(name, reader, run["aliases"]) for name in names]
                options = _options_of(names, by_name) if names else by_number.get((number, place), {})
                members = list(zip(names, group["params"], indices))
                groups.append({**group, **options, "params": [index for *_, index in members]})
                for name, parameter, index in members:
                    own = {**run["numbers"].get(name, {}), **self._tensors_to_load(name, parameter, saved, to_read)}
                    if own:
                        state[index] = own
            extra = extras[number] if number < len(extras) else {"state": {}, "entries": {}}
            loaded.append({**extra["entries"], "state": {**state, **extra["state"]}, "param_groups": groups})
        to_read.read()

        def load() -> None:
            for optimizer, packed in zip(self._optimizers, loaded):
                optimizer.load_state_dict(packed)

        return load

    def _tensors_to_load(
        self,
        name: str,
        parameter: nn.Parameter,
        saved: Mapping[str, Mapping[str, TensorStorageMetadata]],
        to_read: _ToRead,
    ) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        part, like = self._divided(name, parameter, parameter.detach())[0]
        for key, what in {**saved.get(name, {}), **saved.get(part, {})}.items():
            # As the parameter is, sharded too; step counts and the like have a shape of their own.
            is_alike = what.size == like.shape and parameter.dim() > 0
            empty = torch.zeros_like(parameter) if is_alike else torch.zeros(what.size)
            tensors[key] = empty.to(what.properties.dtype)
            for part_name, view in self._divided(name, parameter, tensors[key]):
                to_read.add(f"optimizer.{_without_dots(key)}.{part_name}", view)
        return tensors

    def keys(self, reader: Reader, aliases: Mapping[str, str]) -> set[str]:
        """The keys of the model in the checkpoint that this rank loads."""
        return {
            f"model.{part}"
            for held in self.held
            for part, _ in self._divided(self._saved_name(held.name, reader, aliases), held.value, held.value)
        }

    # Names

    def _divided(self, name: str, parameter: Any, tensor: Any) -> list[tuple[str, Tensor]]:
        if self._parts is None or not isinstance(parameter, nn.Parameter) or tensor.shape != parameter.shape:
            return [(name, tensor)]
        divided = list(self._parts(name, parameter, tensor))
        if len(divided) > 1 and isinstance(tensor, DTensor):
            raise ValueError(
                f"{name} is sharded and to be saved in {len(divided)} parts, which is not supported: leave it out of "
                "FSDP, or let `parts` keep it whole."
            )
        return divided

    def _check_divisible(self, key: str, name: str, parameter: nn.Parameter, value: Tensor) -> None:
        if value.shape == parameter.shape or value.numel() <= 1:  # the step's number is the same for all parts
            return
        if [part for part, _ in self._divided(name, parameter, parameter.detach())] != [name]:
            raise ValueError(
                f"the optimizer's {key} of {name} has shape {list(value.shape)}, unlike the parameter's "
                f"{list(parameter.shape)}, so it cannot be saved in parts like that: use an optimizer whose state "
                "has the parameters' shapes."
            )

    def _saved_name(self, name: str, reader: Reader, aliases: Mapping[str, str]) -> str:
        """The name that a tied parameter was saved under."""
        return aliases[name] if f"model.{name}" not in reader.contents and name in aliases else name

    def _names_of(self, optimizer: torch.optim.Optimizer) -> list[list[str]]:
        """The names of its parameters, group by group."""
        return [[self._names[id(p)] for p in group["params"]] for group in optimizer.param_groups]

    @cached_property
    def _packed(self) -> list[dict[str, Any]]:
        """The `state_dict()` of each optimizer. Raises ValueError where what is in it could not be found again."""
        for number, optimizer in enumerate(self._optimizers):
            parameters = {id(p) for group in optimizer.param_groups for p in group["params"]}
            for key, state in optimizer.state.items():
                names = state if isinstance(key, Tensor) else [key]
                if isinstance(key, Tensor) and id(key) not in parameters:
                    raise ValueError(
                        f"optimizer {number} has state of a tensor of shape {list(key.shape)}, which is none of its "
                        "parameters: take it out of its `state`, or keep it under a name."
                    )
                if strange := [name for name in names if not isinstance(name, str)]:
                    raise ValueError(
                        f"optimizer {number} has state under {strange[0]!r}, which cannot be saved: use a string."
                    )
        return [_state_dict_of(optimizer, number) for number, optimizer in enumerate(self._optimizers)]

    def _optimizer_states(self) -> Iterator[tuple[str, nn.Parameter, dict[str, Any]]]:
        for optimizer, packed in zip(self._optimizers, self._packed):
            for group, packed_group in zip(optimizer.param_groups, packed["param_groups"]):
                for parameter, index in zip(group["params"], packed_group["params"]):
                    yield self._names[id(parameter)], parameter, packed["state"].get(index, {})


def _trained_in(chunk: nn.Module) -> Iterator[str]:
    """The names of parameters that are trained, and of the buffers beside them in their modules."""
    for prefix, module in chunk.named_modules():
        own = [name for name, parameter in module.named_parameters(recurse=False) if parameter.requires_grad]
        buffers = [name for name, _ in module.named_buffers(recurse=False)] if own else []
        yield from (fully_qualified_name(f"{prefix}.{name}".lstrip(".")) for name in (*own, *buffers))


class _ToRead:
    """Tensors to be filled from a checkpoint. Of several with one key one is read, and copied to the others."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._targets: dict[str, Tensor] = {}
        self._copies: list[tuple[Tensor, Tensor]] = []

    def add(self, key: str, target: Tensor) -> None:
        """Raises ValueError where the checkpoint lacks it, or has another shape or numbers of another kind."""
        check_there(key, self._reader, target)
        first = self._targets.setdefault(key, target)
        if first is not target:
            self._copies.append((target, first))

    def read(self) -> None:
        self._reader.read(self._targets)
        self.fill([])

    def fetch(self) -> list[tuple[Tensor, Tensor]]:
        return self._reader.fetch(self._targets)

    def fill(self, fetched: list[tuple[Tensor, Tensor]]) -> None:
        fill([*fetched, *self._copies])


def _options_of(names: list[str], by_name: dict[str, dict[str, Any]]) -> dict[str, Any]:
    for name in names:
        if name not in by_name:
            raise ValueError(f"no optimizer trained {name} when the checkpoint was saved: load without the optimizer.")
        if by_name[name] != by_name[names[0]]:
            raise ValueError(
                f"{names[0]} and {name} are in one parameter group of the optimizer, but were saved with different "
                f"settings ({by_name[names[0]]} and {by_name[name]}): make the groups as they were."
            )
    return by_name[names[0]]


def _state_dict_of(optimizer: torch.optim.Optimizer, number: int) -> dict[str, Any]:
    try:
        return optimizer.state_dict()
    except RuntimeError as error:
        if not hasattr(optimizer, "consolidate_state_dict"):
            raise
        raise ValueError(
            f"optimizer {number} is a ZeroRedundancyOptimizer, whose state_dict() lacks what other replicas hold: use "
            "fully_shard instead, or save the chunks without their optimizer."
        ) from error


def _without_dots(key: str) -> str:
    """A name as part of a longer key, whose parts dots divide."""
    return key.replace("%", "%25").replace(".", "%2E")


def _with_dots(key: str) -> str:
    return key.replace("%2E", ".").replace("%25", "%")


def is_extra_state(held: Held) -> bool:
    """Whether it is what a module's get_extra_state() returns: not a tensor, or one of a size of its own."""
    return held.local_name.endswith("_extra_state") or not isinstance(held.value, Tensor)


def optimizers_of(optimizer: Any) -> list[torch.optim.Optimizer]:
    if optimizer is None:
        return []
    is_one = isinstance(optimizer, torch.optim.Optimizer)
    several = optimizer if is_one else getattr(optimizer, "optimizers", optimizer)
    optimizers = list(several) if isinstance(several, (list, tuple)) else [several]
    for found in optimizers:
        if not isinstance(found, torch.optim.Optimizer):
            raise TypeError(f"optimizer must be a torch optimizer, or several, got a {type(found).__name__}.")
    return optimizers


def check_there(key: str, reader: Reader, target: Tensor | None = None) -> None:
    what = reader.contents.get(key)
    if what is None:
        raise ValueError(
            f"the checkpoint {reader.path} has no {key}: it is of another model, or the chunks name their parameters "
            "otherwise."
        )
    if target is not None and what.size != target.shape:
        raise ValueError(
            f"{key} has shape {list(what.size)} in the checkpoint {reader.path} and {list(target.shape)} here: build "
            "the model with the sizes it was saved with."
        )
    if target is not None and _kind_of(what.properties.dtype) != _kind_of(target.dtype):
        raise ValueError(
            f"{key} is of {what.properties.dtype} in the checkpoint {reader.path} and of {target.dtype} here, which "
            "are no numbers of one kind: build the model as it was saved, quantised or not."
        )


def _kind_of(dtype: torch.dtype) -> tuple[bool, bool]:
    """Whether numbers are real, and whether complex. Those of one kind are converted where they are loaded."""
    return dtype.is_floating_point, dtype.is_complex


def check_all_used(reader: Reader, ranks: Sequence[Iterable[str]]) -> None:
    """Raises ValueError where no rank loads an entry of the model."""
    there = {key for key in reader.contents if key.startswith("model.")}
    if left := there.difference(*ranks):
        raise ValueError(
            f"the checkpoint {reader.path} has {len(left)} entries that no rank's chunks have, such as {min(left)}: it "
            "is of another model, or the chunks count their layers from 0 and need global_name."
        )

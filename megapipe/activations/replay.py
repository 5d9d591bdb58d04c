"""Calls of modules that keep nothing for the backward: they are run once more before it, and then keep all.

Autograd's graph is made in the forward, with empty places where it would have saved tensors. The replay saves tensors
in the same order, which go into the places; what else it computes is dropped. So backward, its hooks and split weight
gradients know nothing of it, and may begin with what a replay has made long before.

A replay is right where a call is a function of what is kept of it: its arguments and `StateBefore`. So the first one of
each chunk is compared with its forward, to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from weakref import ref as weakref

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..chunks import unwrap, wrapped_in
from .saver import Fingerprint, Saver, as_it_is, check_version, first_difference
from .state import StateBefore

WORKSPACE = torch.uint8
"""The dtype of what kernels of recurrent layers save for themselves: parts of it they leave as memory was."""


class _Place:
    """One saved tensor. Only autograd holds it, until its backward is done."""

    __slots__ = ("__weakref__", "shape", "tensor", "version")

    def __init__(self, shape: torch.Size) -> None:
        self.shape = shape
        self.tensor: Tensor | None = None
        self.version = 0


class _Complete(BaseException):
    """A replay has saved all that the forward did: the rest need not be computed."""


class Replay:
    """One call of a module, to be run again.

    Args:
        call: what runs the module.
        is_compared: the replay is run to its end, and all that it saves and returns is compared with the forward's.
    """

    def __init__(
        self,
        module: nn.Module,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        device: torch.device,
        is_compared: bool,
    ) -> None:
        self._module, self._name = module, type(module).__name__
        self._call: Callable[..., Any] | None = call
        self._given = args, kwargs
        self._state: StateBefore | None = StateBefore(module, device)
        self._is_compared = is_compared
        self._places: list[weakref[_Place]] = []
        self._made: list[Fingerprint] = []
        """What the forward would have saved, its results, and the buffers as it left them."""
        self._has_run = False

    def first(self) -> Any:
        """The forward. It saves nothing."""
        assert self._call is not None
        assert self._state is not None
        args, kwargs = self._given
        self._given = pytree.tree_map(as_it_is, self._given)  # a call may write into the containers that it is given
        self._versions = [(t, t._version) for t in _tensors_of(self._given) if not t.is_inference()]
        with Saver(self._leave_out, self._fetch):
            result = self._call(*args, **kwargs)
        if self._state.has_lost():
            raise self._refusal("it changes a buffer, or another tensor that it keeps, of 1 MiB or more in place")
        if self._is_compared:
            self._made += self._left_behind(result)
        self._has_run = True
        return result

    def run(self) -> None:
        """Save what the forward would have saved. Only the first time."""
        if self._call is None:
            return
        if not self._has_run:
            raise RuntimeError(
                f"{self._name} cannot be computed again: its forward runs a backward of its own (torch.autograd.grad), "
                "for which nothing is kept. Leave it out of config.recompute."
            )
        call, self._call = self._call, None
        for tensor, version in self._versions:
            if tensor._version != version:
                raise RuntimeError(
                    f"{self._name} cannot be computed again: its input of shape "
                    f"{list(tensor.shape)} was changed in place since its forward. Give it a clone()."
                )
        if self._places or self._is_compared:
            self._run_again(call)
        self._given, self._state, self._versions, self._places = ((), {}), None, [], []

    def _run_again(self, call: Callable[..., Any]) -> None:
        assert self._state is not None
        self._num_made = 0
        self._made_again: list[Fingerprint] = []
        args, kwargs = self._given
        with self._state.again():
            try:
                with Saver(self._make, as_it_is):
                    result = call(*args, **kwargs)
            except (_Complete, Exception):
                if self._is_compared or self._num_made < len(self._places):
                    raise
            if self._is_compared:
                self._made_again += self._left_behind(result)
        if self._num_made < len(self._places) or (self._is_compared and self._num_made > len(self._places)):
            raise self._refusal(
                f"it saves {self._num_made} tensors for its backward, and in its forward saved {len(self._places)}"
            )
        if self._is_compared:
            kind = first_difference(zip(self._made, self._made_again))
            if kind is not None:
                raise self._refusal(f"a tensor ({kind}) is not what it was in its forward")
            self._made, self._made_again = [], []

    def _left_behind(self, result: Any) -> list[Fingerprint]:
        return list(map(Fingerprint.of, (*_tensors_of(result), *nn.Module.buffers(self._module))))

    def _refusal(self, why: str) -> RuntimeError:
        return RuntimeError(
            f"{self._name} cannot be computed again: {why}. So it goes by more than its arguments, its buffers and "
            "attributes and the states of random numbers, or by kernels that round anew each time "
            "(torch.use_deterministic_algorithms). Leave it out of config.recompute."
        )

    def _leave_out(self, tensor: Tensor) -> _Place:
        place = _Place(tensor.shape)
        self._places.append(weakref(place))
        if self._is_compared and tensor.dtype != WORKSPACE:
            self._made.append(Fingerprint.of(tensor))
        return place

    def _make(self, tensor: Tensor) -> Tensor:
        kept = tensor.detach()
        self._num_made += 1
        if self._num_made > len(self._places):
            return kept
        if self._is_compared and kept.dtype != WORKSPACE:
            self._made_again.append(Fingerprint.of(kept))
        place = self._places[self._num_made - 1]()
        if place is not None:
            if place.shape != tensor.shape:
                raise self._refusal(
                    f"it has a tensor of shape {list(tensor.shape)} where its forward had {list(place.shape)}"
                )
            place.tensor, place.version = kept, kept._version
        if self._num_made == len(self._places) and not self._is_compared:
            raise _Complete
        return kept

    def _fetch(self, place: _Place) -> Tensor:
        if place.tensor is None:
            self.run()
            assert place.tensor is not None, "a saved tensor was not computed again"
        check_version(self._name, list(place.shape), place.tensor._version, place.version)
        return place.tensor


def _tensors_of(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


@contextmanager
def recomputing(modules: Sequence[nn.Module], device: torch.device, are_compared: bool) -> Iterator[list[Replay]]:
    """The context of a forward whose calls of these modules keep nothing for the backward, where there will be one.
    Their replays are in the list, in the order of the calls.

    Raises:
        ValueError: none of the modules has been called. Later, where nothing is compared, layers may be left out.
    """
    calls = _Calls(device, are_compared)
    with ExitStack() as around:
        for module in modules:
            around.enter_context(calls.intercepted(module))
        yield calls.replays
    if modules and are_compared and not calls.were_made:
        names = ", ".join(dict.fromkeys(type(module).__name__ for module in modules))
        raise ValueError(
            f"config.recompute is set, but forward_step_func has not called {names}, whose activations it means: call "
            "the chunk, not parts of it, and not in segments (megapipe.overlap), or leave config.recompute None."
        )


class _Calls:
    """The calls of modules in one forward, as replays."""

    def __init__(self, device: torch.device, are_compared: bool) -> None:
        self._device, self._are_compared = device, are_compared
        self.replays: list[Replay] = []
        self.were_made = self._is_one_running = False

    @contextmanager
    def intercepted(self, module: nn.Module) -> Iterator[None]:
        # module.compile() compiles the call and not the forward, which must stay as it was compiled.
        is_compiled = getattr(module, "_compiled_call_impl", None) is not None
        name = "_compiled_call_impl" if is_compiled else "forward"
        own = {name: vars(module)[name]} if name in vars(module) else {}
        vars(module)[name] = partial(self._run, module, getattr(module, name))
        try:
            yield
        finally:
            del vars(module)[name]
            vars(module).update(own)

    def _run(self, module: nn.Module, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.were_made = True
        if self._is_one_running or not torch.is_grad_enabled():  # a call within a call is part of it
            return call(*args, **kwargs)
        self.replays.append(replay := Replay(module, call, args, kwargs, self._device, self._are_compared))
        self._is_one_running = True
        try:
            return replay.first()
        finally:
            self._is_one_running = False


def regions_of(chunk: nn.Module, which: str | int, what: str) -> list[nn.Module]:
    """The parts of a chunk that are computed again.

    Args:
        which: "all" for the chunk as a whole, or the number of its last layers: those of its outermost nn.ModuleList or
            nn.Sequential.
        what: names the chunk in errors.

    Raises:
        ValueError: there are no layers to be found.
    """
    inner = _inside_wrappers(chunk)
    if which == "all":
        return [inner]
    assert isinstance(which, int)
    layers = next((m for m in inner.modules() if isinstance(m, (nn.ModuleList, nn.Sequential)) and len(m)), None)
    if layers is None or _runs_as_graphs(inner):
        why = "without a ModuleList or Sequential" if layers is None else "which runs as compiled or captured graphs"
        raise ValueError(
            f"config.recompute asks for the last {which} layers of {what}, but they are not to be found in its "
            f'{type(inner).__name__}, {why}: set it to "all", or compile layers one by one.'
        )
    last = list(layers)[max(0, len(layers) - which) :]
    return list(dict.fromkeys(last))


def _inside_wrappers(chunk: nn.Module) -> nn.Module:
    """The model in its wrappers, or what runs as graphs of it."""
    inside = unwrap(chunk)
    for module in wrapped_in(chunk):
        if module is inside or _runs_as_graphs(module):
            break
    return module  # type: ignore[no-any-return]


def _runs_as_graphs(module: nn.Module) -> bool:
    """Whether torch.compile or `graph.capture` has made graphs of it: modules within are not called then."""
    return "_orig_mod" in module._modules or "_megapipe_graphs" in vars(module)

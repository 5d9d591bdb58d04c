"""Side effects of a forward that its graph would not have: refused while it is traced."""

from __future__ import annotations

import itertools
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..activations import noting_draws, tensors_kept
from .errors import CaptureError, line_in, this_line

TORCH = str(Path(torch.__file__).parent)
CHANGES = ("manual_seed", "seed", "set_state", "graphsafe_set_state", "set_offset")
"""Methods of a generator."""


@contextmanager
def refusing_side_effects(
    modules: Sequence[nn.Module], what: str, changed: Callable[[], Sequence[str]]
) -> Iterator[None]:
    """Around a forward that is being traced.

    Args:
        changed: see `undoing_changes`.

    Raises:
        CaptureError: it draws random numbers of Python or NumPy, sets the state of torch's, replaces the `.data` of a
            tensor or what is registered with a module, keeps a tensor as an attribute of one, or changes a number.
    """
    before = [(tensors_kept(module), _registered(module)) for module in modules]
    with noting_draws() as drawn, setting_no_random_state(what), _exchanging_in_order(what), _SettingNoData(what):
        yield
    if drawn:
        raise CaptureError(
            f"{what} cannot be captured: its forward draws random numbers of {' and '.join(drawn)}, which would be the "
            "same in every call of a graph. Draw them with torch, pass them in, or leave this stage eager."
        )
    for module, (kept, registered) in zip(modules, before):
        known = {id(one) for one in registered.values()}  # in lists too, as layers of torch.nn.RNNBase have them
        for name, tensors in tensors_kept(module).items():
            if not {id(one) for one in tensors} <= known | {id(one) for one in kept.get(name, [])}:
                raise CaptureError(
                    f"{what} cannot be captured: its forward keeps a tensor as {type(module).__name__}.{name}, which a "
                    "graph would not set. Return it, change a buffer in place, or leave this stage eager."
                )
        now = _registered(module)
        for name in registered | now:
            if now.get(name) is not registered.get(name):
                raise CaptureError(
                    f"{what} cannot be captured: its forward registers, replaces or removes {name} of "
                    f"{type(module).__name__}, which a graph would not do. Register it in the constructor, and change "
                    "a buffer in place (copy_)."
                )
    if numbers := changed():
        raise CaptureError(
            f"{what} cannot be captured: its forward changes {numbers[0]}, a number or the length of a list, which a "
            "graph would have once and for all. Keep it in a buffer, run the module once before, if it changes only "
            "then, or leave this stage eager."
        )


@contextmanager
def _exchanging_in_order(what: str) -> Iterator[None]:
    """Raises CaptureError where a function of torch.distributed was called that writes to its arguments, which a graph
    would not order."""
    places = ("_meta_registrations", "_tools.fake_collectives")  # the second one in torch 2.9
    modules = (sys.modules.get(f"torch.distributed.{place}") for place in places)
    of_torch: Any = next((module for module in modules if module is not None), None)
    if of_torch is None:
        yield
        return
    lines: list[str] = []
    make = of_torch.create_fakework  # which all of them call where tensors have no values

    def note(*args: Any, **kwargs: Any) -> Any:
        lines.append(this_line())
        return make(*args, **kwargs)

    with mock.patch.object(of_torch, "create_fakework", note):
        yield
    if lines:
        raise CaptureError(
            f"{what} cannot be captured: at {lines[0]} it calls a function of torch.distributed that writes to a "
            "tensor. Take its like in megapipe.overlap (start_all_to_all and others) or in "
            "torch.distributed._functional_collectives, which return a new one, or leave this stage eager."
        )


@contextmanager
def setting_no_random_state(what: str) -> Iterator[None]:
    """Raises CaptureError where this thread gives one of torch's own generators another seed or state."""
    own, of_devices = torch.default_generator, torch.cuda.default_generators
    seed, state = own.initial_seed(), own.get_state()
    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(torch.random, "default_generator", _Kept(own, what)))
        if of_devices:  # else CUDA is not in use, and may come to be meanwhile
            kept = tuple(_Kept(one, what) for one in of_devices)
            patches.enter_context(mock.patch.object(torch.cuda, "default_generators", kept))
        yield
    if own.initial_seed() != seed:  # by its own method
        own.set_state(state)
        raise _sets_state(what, "")


class _Kept:
    """A generator that keeps its seed and its state. All functions of torch's that change these call its methods."""

    def __init__(self, generator: torch.Generator, what: str) -> None:
        self._generator, self._what, self._thread = generator, what, threading.get_ident()

    def __getattr__(self, name: str) -> Any:
        frame = sys._getframe(1)
        if name in CHANGES and threading.get_ident() == self._thread and not _is_called_by_dynamo(frame):
            raise _sets_state(self._what, f"at {line_in(traceback.extract_stack(frame))} ")
        return getattr(self._generator, name)


def _sets_state(what: str, where: str) -> CaptureError:
    return CaptureError(
        f"{what} cannot be captured: {where}it sets the seed or the state of the random numbers, which a graph would "
        "not do. Set them before the stage is called, or leave this stage eager."
    )


def _is_called_by_dynamo(frame: FrameType) -> bool:
    """Which puts the random numbers back after it has traced what compiles itself, such as flex_attention."""
    files = (one.f_code.co_filename for one, _ in traceback.walk_stack(frame))
    of_torch = itertools.takewhile(lambda file: file.startswith(TORCH), files)
    around = f"{TORCH}/_dynamo/eval_frame.py"  # which is around torch.manual_seed, too
    return any(file.startswith(f"{TORCH}/_dynamo/") and file != around for file in of_torch)


class _SettingNoData(TorchFunctionMode):
    """Raises CaptureError where `.data` of a tensor is replaced, which the tracer does not see."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self._what = what

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function == _SET_DATA:
            raise CaptureError(
                f"{self._what} cannot be captured: at {this_line()} it replaces the .data of a "
                "tensor, which a graph would not do. Change a buffer in place (copy_), or leave this stage eager."
            )
        return function(*args, **(kwargs or {}))


_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]


def _registered(module: nn.Module) -> dict[str, Any]:
    return {**module._parameters, **module._buffers, **module._modules}

"""Interrupting a model inside of the caller's forward_step_func, which calls it like a function: the function is given
a stand-in, and the model is run afterwards."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, TypeVar

from torch import Tensor, nn

from .parts import find_forward_parts, in_parts

__all__ = ["call_in_parts", "note_call"]

Result = TypeVar("Result")


def call_in_parts(forward_step_func: Callable[..., Any], data_iterator: Any, module: nn.Module, *extra: Any) -> Any:
    """What `forward_step_func(data_iterator, module, *extra)` returns, with a generator for the model's output: the
    forward, yet to be run, in parts. None if the module cannot be run in parts; then nothing has been called.

    The function is given a stand-in for the module. Called, it notes the arguments and returns a placeholder; anything
    else that is asked of it the module answers. So an output that the function came by in another way is as it would
    be otherwise, and the generator only returns it.

    Raises TypeError if the function does anything with the model's output but return it.
    """
    if find_forward_parts(module) is None:
        return None
    arguments, returned = note_call(forward_step_func, data_iterator, module, *extra)
    if not isinstance(returned, (tuple, list)) or len(returned) != 2:
        return returned  # for the caller to refuse
    output, loss_func = returned
    if arguments is None:
        return _nothing_left(output), loss_func
    args, kwargs = arguments
    return in_parts(module, *args, **kwargs), loss_func


def note_call(
    forward_step_func: Callable[..., Any], data_iterator: Any, module: nn.Module, *extra: Any
) -> tuple[tuple[tuple[Any, ...], dict[str, Any]] | None, Any]:
    """What `forward_step_func` calls the module with, without a call of the module; and what it returns, where a
    placeholder is for the module's output. None where it does not call the module.

    Raises TypeError if the function does anything with the model's output but return it.
    """
    stand_in = _StandIn(module)
    returned = forward_step_func(data_iterator, stand_in, *extra)
    arguments = stand_in.__dict__["_megapipe_arguments"]
    stand_in.__dict__["_megapipe_notes"] = False
    is_pair = isinstance(returned, (tuple, list)) and len(returned) == 2
    if arguments is not None and is_pair and not isinstance(returned[0], _Placeholder):
        raise _wrong_use("returned something else than it")
    return arguments, returned


def _nothing_left(output: Result) -> Generator[None, None, Result]:
    yield from ()
    return output


def _wrong_use(what: str) -> TypeError:
    return TypeError(
        f"forward_step_func called its model and {what}, but the forward of a model with forward_parts is run "
        "later, in parts: return model(...) as it is, and do what else there is to do in the model or in loss_func."
    )


class _StandIn:
    def __init__(self, module: nn.Module) -> None:
        self.__dict__.update(_megapipe_module=module, _megapipe_arguments=None, _megapipe_notes=True)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._megapipe_notes:  # a loss function has kept it
            return self._megapipe_module(*args, **kwargs)
        if self._megapipe_arguments is not None:
            raise _wrong_use("called it again")
        self.__dict__["_megapipe_arguments"] = (args, kwargs)
        return _Placeholder()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._megapipe_module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._megapipe_module, name, value)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # isinstance(model, ...) is how trainers look through wrappers
        return type(self._megapipe_module)


class _Placeholder:
    """An output that does not exist yet. Whatever could be done with a tensor raises."""

    def __getattr__(self, name: str) -> Any:
        raise _wrong_use(f"asked its output for {name}")

    @classmethod
    def __torch_function__(cls, function: Any, *_: Any) -> Any:
        raise _wrong_use(f"passed its output to {getattr(function, '__name__', function)}")


def _refuse(name: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise _wrong_use(f"used its output ({name})")

    return refuse


for _name in set(dir(Tensor)) - set(dir(_Placeholder)):  # operators are not looked up by __getattr__
    if _name.startswith("__") and callable(getattr(Tensor, _name)):
        setattr(_Placeholder, _name, _refuse(_name))

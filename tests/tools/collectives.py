"""Torch's functional collectives, watched."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

NAMES = ("all_gather_into_tensor", "all_reduce", "all_to_all_single", "reduce_scatter_tensor")


@contextmanager
def watching(start: Callable[..., object], wait: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Meanwhile, `start` is called with the name and the arguments of each that starts, and `wait` before each wait."""
    functional: Any = torch.ops._c10d_functional
    originals = {name: getattr(functional, name) for name in (*NAMES, "wait_tensor")}

    def watched(name: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            wait() if name == "wait_tensor" else start(name, *args)
            return originals[name](*args)

        return call

    for name in originals:
        setattr(functional, name, watched(name))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(functional, name, original)

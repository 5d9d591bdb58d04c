"""Communication within stages over a slow link, which takes no core while it is under way."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

COLLECTIVES = ("all_gather_into_tensor", "all_reduce", "all_to_all_single", "reduce_scatter_tensor")


@contextmanager
def delayed_collectives(seconds: float) -> Iterator[None]:
    """Meanwhile, each of torch's functional collectives of this process, which is what `megapipe.overlap` and DTensors
    call, ends no sooner than so long after its start."""
    functional: Any = torch.ops._c10d_functional
    originals = {name: getattr(functional, name) for name in (*COLLECTIVES, "wait_tensor")}
    ends: dict[int, float] = {}

    def delayed(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(*args: Any) -> Tensor:
            end = time.perf_counter() + seconds
            output = original(*args)
            ends[output.data_ptr()] = end
            return output

        return call

    def wait(output: Tensor) -> Tensor:
        waited: Tensor = originals["wait_tensor"](output)
        with suppress(ValueError):  # it is later than that
            time.sleep(ends.pop(output.data_ptr(), 0.0) - time.perf_counter())
        return waited

    for name in COLLECTIVES:
        setattr(functional, name, delayed(originals[name]))
    functional.wait_tensor = wait
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(functional, name, original)

"""What it takes to run megatron-core without CUDA: its arithmetic is the same, it only asks for the device."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import queue
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch


def prepare() -> None:
    """Call once per process, before anything of Megatron runs."""
    if not torch.cuda.is_available() and not hasattr(torch, "_megatron_on_cpu"):
        torch._megatron_on_cpu = True

        # Receive buffers, masks and position ids are created on the current CUDA device.
        torch.cuda.current_device = lambda: torch.device("cpu")

        # Batched messages are followed by a wait for the device, against a bug of old versions of torch.
        torch.cuda.synchronize = lambda device=None: None

        # From 0.19 on reductions of gradients ask for it, and do nothing with it without a stream of their own.
        torch.cuda.current_stream = lambda device=None: None

        # The schedules count tokens in torch.zeros(..., device="cuda").
        torch.zeros = functools.partial(_on_cpu, torch.zeros)

        # Tied embeddings are moved to the device before they are made equal.
        torch.Tensor.cuda = lambda self, *args, **options: self

        # Attention dropout draws from CUDA generators of its own; dropout is off in the tests.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # apex and transformer-engine are not there
            from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

        CudaRNGStatesTracker.fork = lambda self, name="": contextlib.nullcontext()


def _on_cpu(make: Callable[..., torch.Tensor], *args: Any, device: Any = None, **options: Any) -> torch.Tensor:
    return make(*args, device="cpu" if str(device).startswith("cuda") else device, **options)


@contextlib.contextmanager
def with_optimizers() -> Iterator[None]:
    """Megatron's optimizers make more tensors there, and know weights by the names of CUDA's types. Checkpoints are
    written by processes of their own, which measure themselves by psutil."""
    prepare()
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    type_of = torch.Tensor.type

    def cuda_type(tensor: torch.Tensor, *args: Any) -> Any:
        return type_of(tensor, *args) if args else type_of(tensor).replace("torch.", "torch.cuda.")

    with contextlib.ExitStack() as stack:
        for name in ("empty", "empty_like", "tensor"):
            stack.enter_context(mock.patch.object(torch, name, functools.partial(_on_cpu, getattr(torch, name))))
        stack.enter_context(mock.patch.object(torch.Tensor, "type", cuda_type))
        stack.enter_context(mock.patch.object(filesystem_async, "_process_memory", return_value=0))
        stack.enter_context(mock.patch.object(filesystem_async, "_results_queue", queue.Queue()))
        stack.enter_context(mock.patch.dict(multiprocessing.current_process()._config, daemon=False))
        yield


class _Stream:
    """One that is always done."""

    def wait_stream(self, stream: Any) -> None:
        pass

    def record_event(self) -> _Event:
        return _Event()


class _Event:
    def record(self, stream: Any) -> None:
        pass

    def wait(self, stream: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass


@contextlib.contextmanager
def with_streams() -> Iterator[None]:
    """Megatron exchanges the tokens of experts on a stream of their own, and names its work for profilers. Its router
    has a name missing where transformer-engine is."""
    prepare()
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    def on_cpu(tensor: Any, as_numpy: bool = False, **options: Any) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    def nothing(*args: Any, **options: Any) -> Any:
        return contextlib.nullcontext()

    with contextlib.ExitStack() as stack:
        fakes = {"Stream": lambda device=None: _Stream(), "Event": _Event, "stream": nothing}
        fakes["current_stream"] = lambda device=None: _CURRENT
        for name, fake in fakes.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, fake))
        for name in ("range_push", "range_pop", "range"):
            stack.enter_context(mock.patch.object(torch.cuda.nvtx, name, nothing))
        stack.enter_context(mock.patch.object(torch.Tensor, "record_stream", nothing))
        stack.enter_context(mock.patch.object(moe_utils, "te_general_gemm", None, create=True))
        stack.enter_context(mock.patch.object(token_dispatcher, "maybe_move_tensor_to_cpu", on_cpu))
        yield


_CURRENT = _Stream()

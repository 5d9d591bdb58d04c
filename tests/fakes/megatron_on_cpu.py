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

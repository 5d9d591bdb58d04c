"""What it takes to run megatron-core without CUDA: its arithmetic is the same, it only asks for the device."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

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
        zeros = torch.zeros

        def zeros_on_cpu(*args: Any, device: Any = None, **options: Any) -> torch.Tensor:
            return zeros(*args, device="cpu" if str(device).startswith("cuda") else device, **options)

        torch.zeros = zeros_on_cpu

        # Tied embeddings are moved to the device before they are made equal.
        torch.Tensor.cuda = lambda self, *args, **options: self

        # Attention dropout draws from CUDA generators of its own; dropout is off in the tests.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # apex and transformer-engine are not there
            from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

        CudaRNGStatesTracker.fork = lambda self, name="": contextlib.nullcontext()

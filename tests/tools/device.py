"""The asynchronous device of `fakes/` in tests: processes that have it, and chunks that are moved to it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from torch import nn

from .ranks import RankPool

__all__ = ["needs_devices", "on_lazy_device", "ranks"]

_registration = pytest.importorskip("torch.utils.backend_registration")
needs_devices = pytest.mark.skipif(
    not hasattr(_registration, "_setup_privateuseone_for_python_backend"), reason="this torch has no devices in Python"
)


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    """Processes of their own: a device that is registered stays so."""
    pool = RankPool()
    yield pool
    pool.stop()


@contextlib.contextmanager
def on_lazy_device(chunks: list[Any]) -> Iterator[Any]:
    """Moves the parameters and buffers of the chunks to the device, which counts as CUDA meanwhile, with NCCL."""
    from fakes import cuda_like, lazy_device, nccl_like

    for module in (module for chunk in chunks for module in chunk.modules()):
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                setattr(module, name, nn.Parameter(lazy_device.to_device(parameter.data)))
        for name, buffer in list(module._buffers.items()):
            if buffer is not None:
                setattr(module, name, lazy_device.to_device(buffer))
    nccl_like.COMMUNICATORS.clear()
    with mock.patch.object(dist, "ProcessGroupNCCL", nccl_like.LikeNccl, create=True), cuda_like.as_cuda():
        lazy_device.RACES.restart()
        yield SimpleNamespace(device=lazy_device, nccl=nccl_like, cuda=cuda_like)
        assert not lazy_device.RACES.found, lazy_device.RACES.found[0]

"""The tests for GPUs on the asynchronous device, which counts as CUDA: so that the first GPU finds tests that work.

Tests of replicas, clipping and checkpoints are left out, whose collectives are not emulated, and autocast, which knows
no such device. What tests/transports/test_devices.py asks for, too, is a soak.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from gpu import test_gpu
from tools.device import needs_devices, on_lazy_device
from tools.device import ranks as ranks
from tools.ranks import on_ranks

pytestmark = [needs_devices, pytest.mark.skipif(test_gpu.IS_GPU, reason="there is a real one")]


@contextlib.contextmanager
def emulated(num_devices: int = 2) -> Iterator[None]:
    """Ranks share the one device, if there is one."""
    with on_lazy_device([]) as lazy:
        on_device = {
            "IS_GPU": True,
            "device_of": lambda rank: lazy.device.DEVICE,
            "TRANSPORT": {"p2p_transport": "host" if num_devices == 1 else "nccl"},
            "KINDS": ["dualpipev"],
            "NUM_LAYERS": 8,
            "MOST": 3,
        }
        with (
            mock.patch.multiple(test_gpu, **on_device),
            mock.patch.object(torch.cuda, "device_count", return_value=num_devices),
            mock.patch.multiple(lazy.nccl, connecting_time=0.5, link="network"),
            mock.patch("megapipe.activations.offload.SMALLEST", 0),  # these models are small
        ):
            yield


NAMES = [
    "test_a_step_leaves_nothing_in_memory",
    "test_a_wait_for_the_whole_device_within_a_step",
    "test_a_failure_reaches_both_ranks",
    "test_a_wait_runs_out",
    "test_timeline",
    "test_what_is_in_host_memory_is_not_on_the_device",
]


@pytest.mark.soak
@pytest.mark.parametrize("name", NAMES)
@on_ranks(2)
def test_as_on_a_gpu(rank: int, name: str) -> None:
    with emulated():
        inspect.unwrap(getattr(test_gpu, name))(rank)


@on_ranks(2)
def test_activations_in_host_memory(rank: int) -> None:
    """Each O frees memory of the device, and each L takes as much of it again, and what a data loader holds too. Small
    tensors stay, which all are here: each cost a copy, and several of them took the host longer than their forward."""
    from fakes import lazy_device

    from megapipe.runtime.pipeline import Pipeline

    changes: dict[str, list[int]] = {"O": [], "L": []}
    run_action = Pipeline.run

    def run_and_look(pipe: Pipeline, kind: str, *args: Any) -> None:
        before = lazy_device.ALLOCATOR.allocated
        run_action(pipe, kind, *args)
        if kind in changes:
            changes[kind].append(lazy_device.ALLOCATOR.allocated - before)

    with (
        emulated(),
        mock.patch.object(test_gpu, "MOVED", test_gpu.MOVED[1:]),
        mock.patch.object(Pipeline, "run", run_and_look),
    ):
        inspect.unwrap(test_gpu.test_activations_in_host_memory)(rank)
    half = len(changes["O"]) // 2
    assert len(changes["O"]) == len(changes["L"]) == 2 * half > 8
    assert min(changes["L"][:half]) > 0 == max(changes["L"][half:])
    for freed, taken in zip(changes["O"], changes["L"]):
        assert 0.9 * taken <= -freed <= taken


@pytest.mark.soak
@pytest.mark.parametrize(("schedule", "num_devices"), [("1f1b", 2), ("zbv", 1)])
@on_ranks(2)
def test_gradients_as_on_a_gpu(rank: int, schedule: str, num_devices: int) -> None:
    """On one GPU messages go by way of the host, which waits for each: that it must not wait was asked there, too."""
    with emulated(num_devices):
        inspect.unwrap(test_gpu.test_gradients_of_the_whole_model)(rank, 2, schedule)


@pytest.mark.parametrize(
    "schedule", [name if name == "zb2p" else pytest.param(name, marks=pytest.mark.soak) for name in test_gpu.SCHEDULES]
)
@on_ranks(2)
def test_large_messages_as_on_a_gpu(rank: int, schedule: str) -> None:
    with emulated():
        inspect.unwrap(test_gpu.test_large_messages)(rank, schedule)

"""NCCL between ranks that share the only GPU. It refuses two ranks of one machine on a GPU, so each is told that it is
on a machine of its own, and messages go through sockets."""

from __future__ import annotations

import inspect
import os
from typing import Any
from unittest import mock

import pytest
import torch
from gpu import test_gpu
from tools.ranks import on_ranks

pytestmark = pytest.mark.skipif(torch.cuda.device_count() != 1, reason="needs one GPU: with more each rank has its own")

NAMES = [
    "test_activations_in_host_memory",
    "test_bfloat16_by_autocast",
    "test_optimizers_and_clipping",
    "test_a_wait_for_the_whole_device_within_a_step",
    "test_a_failure_reaches_both_ranks",
    "test_a_wait_runs_out",
    "test_a_step_leaves_nothing_in_memory",
    "test_what_is_in_host_memory_is_not_on_the_device",
    "test_timeline",
]


def asked_again(name: str, rank: int, *arguments: Any) -> None:
    os.environ |= {"NCCL_HOSTID": f"machine {rank}", "NCCL_SOCKET_IFNAME": "lo"}  # NCCL reads them once
    with mock.patch.dict(test_gpu.TRANSPORT, p2p_transport="nccl"):
        inspect.unwrap(getattr(test_gpu, name))(rank, *arguments)


@pytest.mark.parametrize("name", NAMES)
@on_ranks(2)
def test_over_nccl(rank: int, name: str) -> None:
    asked_again(name, rank)


@pytest.mark.parametrize(("num_ranks", "schedule"), test_gpu.CASES)
@on_ranks()
def test_gradients_of_the_whole_model(rank: int, num_ranks: int, schedule: str) -> None:
    asked_again("test_gradients_of_the_whole_model", rank, num_ranks, schedule)


@pytest.mark.parametrize("schedule", test_gpu.SCHEDULES)
@on_ranks(2)
def test_large_messages(rank: int, schedule: str) -> None:
    asked_again("test_large_messages", rank, schedule)


@on_ranks(4)
def test_large_messages_of_sharded_replicas(rank: int) -> None:
    asked_again("test_large_messages_of_sharded_replicas", rank)

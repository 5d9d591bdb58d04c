"""torch.distributed's groups, whose messages between the asynchronous device's tensors go as they do over NCCL.

A message by itself has a communicator of its two ranks. Those of a batch (`batch_isend_irecv`) have one of the whole
group, and are one kernel that ends when all of them have passed. Each communicator has a stream of its own, which
waits for the caller's. The numbers travel over the group's own backend, kept apart from others by a tag. Messages take
no time, and all fit into NCCL's buffers. `benchmarks.device_calls` counts on it what other libraries ask of the device.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from fakes.lazy_device import DEVICE, RACES, LazyTensor, Moment, Stream, blocks_of, current_stream
from fakes.nccl_like import Work
from torch.distributed import ProcessGroup

_SEND, _RECEIVE, _BACKEND_OF = ProcessGroup.send, ProcessGroup.recv, ProcessGroup._get_backend
_batches: dict[ProcessGroup, list[Any]] = {}
"""The messages of a batch that has begun."""


class Communicator:
    error = "SUCCESS"

    def __init__(self, group: ProcessGroup, tag: int) -> None:
        self._group, self._tag, self._stream = group, tag, Stream()

    def start(self, messages: list[tuple[bool, LazyTensor, int]]) -> Work:
        """`messages`: whether it is sent, the tensor, and the other rank."""
        self._stream.wait_for(current_stream().record())
        for _, tensor, _ in messages:
            tensor.record_stream(self._stream)
        work = Work(self, [tensor for is_sent, tensor, _ in messages if not is_sent])  # type: ignore[arg-type]
        cells = [(is_sent, tensor.cell, peer) for is_sent, tensor, peer in messages]
        sent = [tensor for is_sent, tensor, _ in messages if is_sent]
        RACES.launch(self._stream, blocks_of(sent), blocks_of(work._held), "messages")
        RACES.record(work.is_done, self._stream)
        self._stream.put(functools.partial(self._run, cells, work.is_done))
        return work

    def _run(self, cells: list[Any], is_done: Moment) -> None:
        arriving = []
        for is_sent, cell, peer in cells:
            numbers = cell.cpu.contiguous().clone() if is_sent else torch.empty_like(cell.cpu)
            passing = (_SEND if is_sent else _RECEIVE)(self._group, [numbers], peer, self._tag)
            if is_sent:
                threading.Thread(target=passing.wait, daemon=True).start()
            else:
                arriving.append((cell, numbers, passing))
        for cell, numbers, passing in arriving:
            passing.wait()
            cell.cpu.copy_(numbers)
        self._stream.reach(is_done)


_SINGLE, _BATCHED = 701, 702
"""Tags."""


@functools.cache
def between(group: ProcessGroup, peer: int) -> Communicator:
    return Communicator(group, _SINGLE)


@functools.cache
def of_all(group: ProcessGroup) -> Communicator:
    return Communicator(group, _BATCHED)


def carry(is_sent: bool, group: ProcessGroup, tensors: list[Any], peer: int, tag: int) -> Any:
    (tensor,) = tensors
    if not isinstance(tensor, LazyTensor):
        return (_SEND if is_sent else _RECEIVE)(group, tensors, peer, tag)
    if group not in _batches:
        return between(group, peer).start([(is_sent, tensor, peer)])
    _batches[group].append((is_sent, tensor, peer))
    return None


def _send(group: ProcessGroup, tensors: list[Any], peer: int, tag: int = 0) -> Any:
    return carry(True, group, tensors, peer, tag)


def _receive(group: ProcessGroup, tensors: list[Any], peer: int, tag: int = 0) -> Any:
    return carry(False, group, tensors, peer, tag)


def _backend_of(group: ProcessGroup, device: torch.device) -> Any:
    if torch.device(device).type == DEVICE.type:
        return SimpleNamespace(supports_coalescing=True)
    return _BACKEND_OF(group, device)


@contextmanager
def over_nccl() -> Iterator[None]:
    """Around what sends the device's tensors by torch.distributed's functions."""
    with mock.patch.multiple(
        ProcessGroup,
        send=_send,
        recv=_receive,
        _get_backend=_backend_of,
        _start_coalescing=lambda group, device: _batches.update({group: []}),
        _end_coalescing=lambda group, device: of_all(group).start(_batches.pop(group)),
    ):
        yield

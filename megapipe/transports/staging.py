"""Messages between devices by way of host memory: copied out, carried by gloo and copied in, in the order of streams.

It asks for neither NCCL nor peer access, several ranks may share one device, and a device spends nothing on waiting.
The host does not wait either: a message is sent by a thread once its copy is complete, and a stream that needs one
waits for a number in host memory, which another thread raises when the message has arrived.
"""

from __future__ import annotations

import ctypes
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..messages import MessageSpec
from ..p2p_communication import Channel, ConnectionLostError, Transfer, Transport
from ..plan import ChannelName
from .channel import BackendChannel, resolved
from .cuda_events import CudaEvents
from .gloo import GlooTransport
from .outbox import TaskThread

__all__ = ["CudaStaging", "StagedTransport", "Staging"]


class Staging(ABC):
    """Copies between one device and host memory. Nothing but what `copy_out` returns waits for the device."""

    @abstractmethod
    def copy_out(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], Callable[[], None]]:
        """The tensors as the current stream will have made them, in host memory, and a function that waits until they
        are there. The tensors may be dropped at once."""

    @abstractmethod
    def buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Host memory to receive into, and for `copy_in`."""

    @abstractmethod
    def copy_in(self, buffers: Sequence[Tensor]) -> list[Tensor]:
        """The buffers as they will be when `arrive` has been called for them, on the device, for use on the current
        stream."""

    @abstractmethod
    def arrive(self) -> None:
        """The buffers of the oldest `copy_in` not answered yet are complete. Called by another thread."""


class CudaStaging(Staging):
    """Copies run on streams of their own, beside the computation."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        with torch.cuda.device(device):
            self._out, self._in = (torch.cuda.Stream(priority=-1) for _ in range(2))  # type: ignore[no-untyped-call]
        self._order = CudaEvents(device)
        self._copied = CudaEvents(device, blocking=True)
        self._num_arrived = torch.zeros(1, dtype=torch.int32, device="cpu", pin_memory=True)
        self._num_awaited = 0

    def copy_out(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], Callable[[], None]]:
        are_made = self._order.record()
        self._out.wait_event(are_made.event)
        with torch.cuda.stream(self._out):
            copies = [self.buffer(tensor.shape, tensor.dtype).copy_(tensor, non_blocking=True) for tensor in tensors]
            is_copied = self._copied.record()
        for tensor in tensors:
            tensor.record_stream(self._out)
        return copies, is_copied.synchronize

    def buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True)  # from torch's pool of such memory

    def copy_in(self, buffers: Sequence[Tensor]) -> list[Tensor]:
        self._num_awaited += 1
        _wait_for_value(self._in, self._num_arrived, self._num_awaited)
        with torch.cuda.stream(self._in):
            tensors = [buffer.to(self._device, non_blocking=True) for buffer in buffers]
            are_there = self._order.record()
        current = torch.cuda.current_stream(self._device)
        current.wait_event(are_there.event)
        for tensor in tensors:
            tensor.record_stream(current)
        return tensors

    def arrive(self) -> None:
        self._num_arrived += 1


@functools.cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def _wait_for_value(stream: torch.cuda.Stream, number: Tensor, value: int) -> None:
    """The stream goes on once `number`, in pinned host memory, is at least `value`."""
    at_least = 0  # CU_STREAM_WAIT_VALUE_GEQ: cyclic, so that numbers may wrap around
    arguments = (ctypes.c_void_p(stream.cuda_stream), ctypes.c_uint64(number.data_ptr()), ctypes.c_uint32(value))
    error = _driver().cuStreamWaitValue32_v2(*arguments, ctypes.c_uint(at_least))
    if error:
        raise RuntimeError(
            f"cuStreamWaitValue32 failed with CUDA error {error}: it must be able to wait for host memory."
        )


class StagedTransport(Transport):
    """Between devices, by way of their hosts and gloo.

    Where a message is lost, the device goes on with zeros in its place, and `drain` raises.
    """

    lookahead = GlooTransport.lookahead

    def __init__(self, host: GlooTransport, staging: Staging, mark: Callable[[], Callable[[], bool]]) -> None:
        self.mark = mark  # type: ignore[method-assign]
        self.num_awaited, self.num_arrived = 0, 0
        self._host = host
        self._staging = staging
        # In the order in which the stream needs them: what comes earlier out of turn is not needed earlier either.
        self._arrivals = TaskThread("megapipe-arrivals")

    def connect(self, edges: Sequence[tuple[int, int]]) -> None:
        self._host.connect(edges)

    def channel(self, name: ChannelName, peer: int, sends: bool) -> Channel:
        channel = self._host.channel(name, peer, sends)
        return channel if name.kind == "header" else StagedChannel(self, channel, self._host, self._staging)

    def drain(self) -> None:
        self._arrivals.drain()
        self._host.drain()

    def abort(self) -> None:
        self._host.abort()

    def close(self) -> None:
        self._arrivals.close()
        self._host.close()

    def await_on_device(self, transfer: Transfer) -> list[Tensor]:
        """What has been received, as the current stream will have it."""
        tensors = self._staging.copy_in(transfer.tensors)
        self.num_awaited += 1
        self._arrivals.put(partial(self._arrive, transfer))
        return tensors

    def _arrive(self, transfer: Transfer) -> None:
        try:
            transfer.wait()
        except ConnectionLostError:
            for buffer in transfer.tensors:
                buffer.zero_()
            raise
        finally:
            self._staging.arrive()
            self.num_arrived += 1


class StagedChannel(Channel):
    def __init__(
        self, transport: StagedTransport, channel: BackendChannel, host: GlooTransport, staging: Staging
    ) -> None:
        self._transport = transport
        self._channel = channel
        self._host = host
        self._staging = staging

    def send(self, tensors: list[Tensor]) -> None:
        copies, wait_until_copied = self._staging.copy_out(resolved(tensors))
        self._host.outbox.hand_over(partial(self._send_when_copied, wait_until_copied, copies))

    def _send_when_copied(self, wait_until_copied: Callable[[], None], copies: list[Tensor]) -> Transfer:
        wait_until_copied()
        return self._channel.start_sending(copies)

    def receive(self, spec: MessageSpec) -> Transfer:
        buffers = [self._staging.buffer(t.shape, t.dtype) for t in spec.tensors]
        return StagedTransfer(self._channel.receive_into(buffers, spec), self._transport)


class StagedTransfer(Transfer):
    __slots__ = ("_number", "_transfer", "_transport")

    def __init__(self, transfer: Transfer, transport: StagedTransport) -> None:
        super().__init__(transfer.spec, [])
        self._transfer = transfer
        self._transport = transport

    def wait(self) -> list[Tensor]:
        self.tensors = self._transport.await_on_device(self._transfer)
        self._number = self._transport.num_awaited
        return self.tensors

    def has_arrived(self) -> bool:
        return self._transport.num_arrived >= self._number

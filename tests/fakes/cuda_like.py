"""torch.cuda's streams, events and graphs on the tests' asynchronous device, so that the code for CUDA itself runs
where there is none."""

from __future__ import annotations

import contextlib
import inspect
import math
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from fakes import lazy_device

from megapipe.transports.choice import DEVICES

NUM_EVENTS = 0
"""That have been made."""
NUM_RECORDS = 0
"""How often one was recorded."""
NUM_WAITS = 0
"""How often a stream was told to wait for one."""


class Event:
    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        global NUM_EVENTS
        NUM_EVENTS += 1
        self._has_timing = enable_timing
        self._passed = lazy_device.Moment()
        self._passed.set()  # until it is recorded

    def record(self, stream: Any = None) -> None:
        global NUM_RECORDS
        NUM_RECORDS += 1
        stream = stream or lazy_device.current_stream()
        stream.put(self._take_time)
        self._passed = stream.record()

    def _take_time(self) -> None:
        self._time = time.perf_counter()

    def query(self) -> bool:
        with lazy_device.CONTEXT:  # which another thread may hold
            return self._passed.is_set()

    def wait(self, stream: Any = None) -> None:
        global NUM_WAITS
        NUM_WAITS += 1
        (stream or lazy_device.current_stream()).wait_for(self._passed)

    def synchronize(self) -> None:
        if threading.current_thread() is threading.main_thread():
            lazy_device.count_sync()
        self._passed.wait()
        lazy_device.RACES.wait_on_host(self._passed)

    def elapsed_time(self, end_event: Any) -> float:
        if not (self._has_timing and end_event._has_timing and self.query() and end_event.query()):
            raise RuntimeError("both events must have timing, and be over")
        return 1000 * (end_event._time - self._time)


class Stream(lazy_device.Stream):
    def __init__(self, device: Any = None, priority: int = 0) -> None:
        super().__init__()


class CUDAGraph:
    def __init__(self) -> None:
        self.works: list[Any] = []

    def replay(self) -> None:
        for work in self.works:
            lazy_device.current_stream().put(work)


@contextlib.contextmanager
def graph(cuda_graph: CUDAGraph) -> Iterator[None]:
    """What is put on the current stream meanwhile is not run but kept. Waiting for it is an error."""
    stream = lazy_device.current_stream()
    stream.synchronize()
    stream.capture = cuda_graph.works
    try:
        yield
    finally:
        stream.capture = None


STAND_INS: dict[str, Any] = {
    "CUDAGraph": CUDAGraph,
    "Event": Event,
    "Stream": Stream,
    "current_stream": lambda device=None: lazy_device.current_stream(),
    "device": lambda device: contextlib.nullcontext(),
    "empty_cache": lambda: None,
    "get_device_properties": lambda device=None: SimpleNamespace(total_memory=2**34),
    "graph": graph,
    "is_current_stream_capturing": lambda: lazy_device.current_stream().capture is not None,
    "memory_allocated": lambda device=None: lazy_device.ALLOCATOR.allocated,
    "max_memory_allocated": lambda device=None: lazy_device.ALLOCATOR.peak,
    "reset_peak_memory_stats": lambda device=None: setattr(
        lazy_device.ALLOCATOR, "peak", lazy_device.ALLOCATOR.allocated
    ),
    # As short as can be: each allocation waits.
    "set_per_process_memory_fraction": lambda fraction, device=None: setattr(
        lazy_device.ALLOCATOR, "limit", 0 if fraction < 1 else math.inf
    ),
    "set_sync_debug_mode": lambda debug_mode: setattr(lazy_device, "syncs_are_errors", debug_mode == "error"),
    "stream": lazy_device.Module().stream,
    "synchronize": lambda device=None: lazy_device.synchronize(),
}


ORIGINALS = {name: getattr(torch.cuda, name) for name in STAND_INS}


def check_signatures() -> None:
    """The parameters of stand-ins are the first ones of what they stand in for."""
    for name, mine in STAND_INS.items():
        pairs = [(mine, ORIGINALS[name])]
        if isinstance(mine, type):
            pairs += [(getattr(mine, key), getattr(ORIGINALS[name], key)) for key in vars(mine) if key[0].islower()]
        for one, other in pairs:
            names, others = (list(inspect.signature(function).parameters) for function in (one, other))
            assert names == others[: len(names)], (name, one)


@contextlib.contextmanager
def as_cuda() -> Iterator[None]:
    """Around what uses the device, which counts as CUDA meanwhile."""
    with (
        mock.patch.multiple(torch.cuda, **STAND_INS),
        mock.patch.dict(DEVICES, {lazy_device.DEVICE.type: DEVICES["cuda"]}),
        lazy_device.lazily(),
    ):
        yield

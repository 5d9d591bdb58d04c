"""CUDA graphs: what a stage runs for a unit is recorded once for each slot of units in flight, and replayed.

A replay writes to the memory that it was recorded with. What a unit keeps from its F to its B, and from its B to its W,
lies there: no other unit in flight has its slot. What leaves the stage is copied. The graphs of a slot run in the same
order for each unit (F, B, W), and so they share a pool of memory. They also share a stream to be recorded on, since
autograd runs a backward on the stream of its forward. Messages are not part of a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

__all__ = ["Recording", "Runner", "Slot", "SlotOfUnit", "Slots"]

Runner = Callable[[list[Tensor]], tuple[Any, ...]]


class Slots:
    """The recordings of one stage.

    Args:
        state: returns its parameters and buffers.
        what: names the stage in errors.
    """

    def __init__(self, state: Callable[[], Iterable[Tensor]], what: str) -> None:
        self.state, self.what = state, what
        self.has_run: set[GraphModule] = set()
        """Graphs that have run as they are, which loads and tunes their kernels."""
        self._slots: dict[int, Slot] = {}

    def slot(self, number: int) -> Slot:
        if number not in self._slots:
            self._slots[number] = Slot(self)
        return self._slots[number]


class Slot:
    def __init__(self, slots: Slots) -> None:
        self.slots = slots
        self._recordings: dict[GraphModule, Recording] = {}
        self._pool: Any = torch.cuda.graph_pool_handle()
        self._stream: Any = None

    def recording(self, graph: GraphModule, runner: Runner, arguments: Sequence[Tensor], name: str) -> Recording:
        """The recording of `graph`; a new one if what it reads where it lies does not lie there any more."""
        found = self._recordings.get(graph)
        if found is None or not found.reads(arguments):
            self._recordings[graph] = found = self.record(runner, arguments, name)
        return found

    def record(self, runner: Runner, arguments: Sequence[Tensor], name: str) -> Recording:
        """
        Args:
            arguments: parameters, buffers and results of other recordings are read where they lie.
        """
        if self._stream is None:
            self._stream = torch.cuda.Stream(arguments[0].device)  # type: ignore[no-untyped-call]
        kept = [t for one in self._recordings.values() for t in one.results]
        fixed = {t.data_ptr() for t in (*self.slots.state(), *kept) if isinstance(t, Tensor) and t.numel()}
        what = f"{name} of {self.slots.what}"
        return Recording(runner, arguments, fixed, self._pool, self._stream, what)


class SlotOfUnit:
    """A slot while one unit is in flight. From the first of its graphs that has not run before, the unit runs without
    recordings, whose inputs would have to lie in the slot."""

    def __init__(self, slot: Slot) -> None:
        self._slot = slot
        self.is_replayed = True
        """Whether the last results lie in the memory of the slot."""

    def run(
        self, graph: GraphModule, runner: Runner, arguments: list[Tensor], name: str, num_outputs: int | None
    ) -> tuple[Any, ...]:
        """`num_outputs` as for `Recording.replay`."""
        has_run = self._slot.slots.has_run
        self.is_replayed = self.is_replayed and graph in has_run
        if not self.is_replayed:
            has_run.add(graph)
            return runner(arguments)
        results = self._slot.recording(graph, runner, arguments, name).replay(arguments, num_outputs)
        arguments.clear()
        return results


class Recording:
    """What a stage runs as a CUDA graph.

    Args:
        fixed: addresses of arguments that stay where they are. The others are copied before each replay.
        pool, stream: those of the slot.
        what: names it in errors.
    """

    def __init__(
        self, runner: Runner, arguments: Sequence[Tensor], fixed: Collection[int], pool: Any, stream: Any, what: str
    ) -> None:
        addresses = [argument.data_ptr() for argument in arguments]
        self._addresses = [address if address in fixed else None for address in addresses]
        self._inputs = [
            torch.empty_strided(a.shape, a.stride(), dtype=a.dtype, device=a.device) if address is None else a.detach()
            for a, address in zip(arguments, self._addresses)
        ]
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            # Not torch.cuda.graph: it waits for the device, which may wait for a message that needs this rank.
            self._graph.capture_begin(pool, capture_error_mode="thread_local")
            try:
                # Their memory, but not their counts of changes: a replay changes them.
                self.results = runner([tensor.data for tensor in self._inputs])
            except Exception as error:
                with suppress(RuntimeError):
                    self._graph.capture_end()
                raise RuntimeError(
                    f"{what} cannot be recorded as a CUDA graph ({error}): unset config.cuda_graphs."
                ) from error
            self._graph.capture_end()

    def reads(self, arguments: Sequence[Tensor]) -> bool:
        """Whether those that stay where they are lie where they lay."""
        return all(
            address is None or address == argument.data_ptr() for address, argument in zip(self._addresses, arguments)
        )

    def replay(self, arguments: Sequence[Tensor], num_outputs: int | None = None) -> tuple[Any, ...]:
        """
        Args:
            num_outputs: so many results leave the stage, and are copied; None for all.
        """
        for address, mine, argument in zip(self._addresses, self._inputs, arguments):
            if address is None:
                mine.copy_(argument)
        self._graph.replay()
        num_outputs = len(self.results) if num_outputs is None else num_outputs
        copies = [value.clone() if isinstance(value, Tensor) else value for value in self.results[:num_outputs]]
        return *copies, *self.results[num_outputs:]

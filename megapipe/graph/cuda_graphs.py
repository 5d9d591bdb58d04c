"""CUDA graphs: what a captured stage runs for a unit is recorded once for each slot of units in flight, and replayed.

A replay writes to the memory that it was recorded with. What a unit keeps from its F to its B, and from its B to its W,
lies there: no other unit in flight has its slot. What leaves the stage is copied. The graphs of a slot run in the same
order for each unit (F, B, W), and so they share a pool of memory. Messages are not part of a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

__all__ = ["SlotOfUnit", "Slots"]

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
        self._slots: dict[int, _Slot] = {}

    def of_unit(self, number: int) -> SlotOfUnit:
        if number not in self._slots:
            self._slots[number] = _Slot(self)
        return SlotOfUnit(self._slots[number])


class _Slot:
    def __init__(self, slots: Slots) -> None:
        self.slots = slots
        self.recordings: dict[GraphModule, _Recording] = {}
        self.pool: Any = torch.cuda.graph_pool_handle()

    def recording(self, graph: GraphModule, runner: Runner, arguments: Sequence[Tensor], name: str) -> _Recording:
        """One that reads these arguments where they are, as far as they stay there."""
        found = self.recordings.get(graph)
        if found is None or not found.reads(arguments):
            kept = [t for one in self.recordings.values() for t in one.results]
            fixed = {t.data_ptr() for t in (*self.slots.state(), *kept) if isinstance(t, Tensor) and t.numel()}
            what = f"{name} of {self.slots.what}"
            self.recordings[graph] = found = _Recording(runner, arguments, fixed, self.pool, what)
        return found


class SlotOfUnit:
    """A slot while one unit is in flight. From the first of its graphs that has not run before, the unit runs without
    recordings, whose inputs would have to lie in the slot."""

    def __init__(self, slot: _Slot) -> None:
        self._slot = slot
        self.is_replayed = True
        """Whether the last results lie in the memory of the slot."""

    def run(
        self, graph: GraphModule, runner: Runner, arguments: list[Tensor], name: str, num_outputs: int | None
    ) -> tuple[Any, ...]:
        """
        Args:
            num_outputs: so many results leave the stage, and are copied; None for all.
        """
        has_run = self._slot.slots.has_run
        self.is_replayed = self.is_replayed and graph in has_run
        if not self.is_replayed:
            has_run.add(graph)
            return runner(arguments)
        results = self._slot.recording(graph, runner, arguments, name).replay(arguments)
        arguments.clear()
        num_outputs = len(results) if num_outputs is None else num_outputs
        copies = [value.clone() if isinstance(value, Tensor) else value for value in results[:num_outputs]]
        return *copies, *results[num_outputs:]


class _Recording:
    """One graph of a stage as a CUDA graph.

    Args:
        fixed: addresses of arguments that stay where they are. The others are copied before each replay.
        pool: the memory of the slot.
        what: names it in errors.
    """

    def __init__(
        self, runner: Runner, arguments: Sequence[Tensor], fixed: Collection[int], pool: Any, what: str
    ) -> None:
        addresses = [argument.data_ptr() for argument in arguments]
        self._addresses = [address if address in fixed else None for address in addresses]
        self._inputs = [
            torch.empty_strided(a.shape, a.stride(), dtype=a.dtype, device=a.device) if address is None else a.detach()
            for a, address in zip(arguments, self._addresses)
        ]
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(torch.cuda.Stream(arguments[0].device)):  # type: ignore[no-untyped-call]
            # Not torch.cuda.graph: it waits for the device, which may wait for a message that needs this rank.
            self._graph.capture_begin(pool, capture_error_mode="thread_local")
            try:
                self.results = runner(list(self._inputs))
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

    def replay(self, arguments: Sequence[Tensor]) -> tuple[Any, ...]:
        for address, mine, argument in zip(self._addresses, self._inputs, arguments):
            if address is None:
                mine.copy_(argument)
        self._graph.replay()
        return self.results

"""Emulated steps of several runners in turns: what disturbs the machine hits all of them alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from .emulation import Deferring, Emulation, Floor, Stage, Step, Storing, Whole, gather_steps, measure_floor, splitting
from .launching import call, gather, in_turns
from .runners import Runner, make_runner

WORK = {"whole": Whole.apply, "deferring": Deferring.apply, "splitting": splitting, "storing": Storing.apply}


class Emulated:
    """A runner with emulated stages, and its steps on this rank.

    Args:
        seconds: of each of F, B and W of a rank's microbatch, shared out over its chunks and slices; or what is asked
            anew for each piece of work, by its kind and stage.
    """

    def __init__(
        self,
        name: str,
        num_microbatches: int,
        seconds: float | Callable[[str, int], float],
        message_bytes: int = 64 * 1024,
        **config: Any,
    ) -> None:
        num_slices = int(name.partition(" x")[2] or 1)
        num_rows = message_bytes // 4096 // num_slices
        self.emulation = Emulation(self._share if isinstance(seconds, float) else seconds, num_rows)
        self._seconds, self._num_slices = seconds, num_slices
        self.runner: Runner = make_runner(name, num_microbatches, self._make_stage, num_rows, **config)
        self.floor: Floor | None = None

    def measure_floor(self) -> None:
        """The mean over all ranks, which measure side by side. Every rank calls it."""
        dist.barrier()
        module: Any = self.runner.modules[0]
        floors = gather(measure_floor(module, self.emulation))
        self.floor = Floor(*(sum(times) / len(floors) for times in zip(*floors)))

    def _share(self, kind: str, stage: int) -> float:
        return float(self._seconds) / self.runner.num_chunks / self._num_slices  # type: ignore[arg-type]

    def _make_stage(self, index: int, num_stages: int, how: str, config: Any) -> Stage:
        return Stage(index, WORK[how], self.emulation, config)

    def step(self) -> tuple[float, float, list[Any]]:
        """Its begin, its end, and what was done."""
        self.emulation.calls.clear()
        dist.barrier()
        begin = time.perf_counter()
        self.runner.step()
        return begin, time.perf_counter(), list(self.emulation.calls)


def take_turns(emulated: Sequence[Emulated], num_rounds: int, num_warmup: int, block: int = 2) -> list[list[Step]]:
    """The steps of each: `num_rounds` blocks in turns, after some warmup."""
    steps = in_turns([one.step for one in emulated], num_rounds, num_warmup, call, block)
    return [gather_steps(mine, one.runner) for one, mine in zip(emulated, steps)]

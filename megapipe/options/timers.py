"""`config.timers`: Megatron's timers around the loops of a step, each forward and each backward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from ..plan import Kind
from ..stages import Extension, Run, Stage, Unit

__all__ = ["Timers"]


class Timers(Extension):
    """A timer is stopped where what it times fails, too."""

    def step(self) -> AbstractContextManager[Any]:
        return self._timed("forward-backward", 1, barrier=self.config.barrier_with_L1_time)

    def action(self, kind: Kind, stage: Stage, run: Run) -> Run:
        name = "forward-compute" if kind.is_forward else "backward-compute"

        def timed(unit: Unit, *extra: bool) -> None:
            with self._timed(name, 2):
                run(unit, *extra)

        return timed

    @contextmanager
    def _timed(self, name: str, level: int, **options: bool) -> Iterator[None]:
        timer = self.config.timers(name, log_level=level)
        timer.start(**options)
        try:
            yield
        finally:
            timer.stop()

"""A running job in the terminal of its first rank. Needs rich, of the extra `viz`."""

from __future__ import annotations

import resource
from itertools import pairwise
from statistics import fmean, median
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from .. import parallel_state
from .bubble import split_bubble
from .extras import import_extra
from .palette import ACCENT
from .recorder import TimelineRecorder
from .timeline import Timeline, step_time

__all__ = ["LiveView", "panel_of"]

BAR = 30
"""Columns of a bar that stands for the whole step."""


class LiveView:
    """A panel that shows the last steps: their time, the bubble by cause, tokens per second, and what each rank did.

        with LiveView(recorder, tokens_per_step=32 * 1024) as live:
            for step in range(1, num_steps + 1):
                ...  # train, with config.record_timeline = recorder
                if live.is_due(step):  # about once a second
                    live.update(step, {"loss": f"{loss:.3f}"})

    Args:
        recorder: the one in `config.record_timeline`. The fewer steps it keeps, the less an update gathers.
        tokens_per_step: in the batches of all replicas.
        console: rich's, to print to above the panel; None makes one.
        device: whose memory is shown; None for the process's own.

    Raises:
        ValueError: rich is not installed.
    """

    def __init__(
        self,
        recorder: TimelineRecorder,
        tokens_per_step: int,
        console: Any = None,
        device: torch.device | None = None,
    ) -> None:
        import_extra("rich")
        from rich.live import Live

        self._recorder = recorder
        self._tokens_per_step = tokens_per_step
        self._device = device
        self._next = 0
        self._draws = not dist.is_initialized() or dist.get_rank() == 0
        self._live = Live(console=console, auto_refresh=False)

    def __enter__(self) -> LiveView:
        if self._draws:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._live.stop()

    def is_due(self, step: int) -> bool:
        """Whether a second has passed since the last update, counted in steps: the same on all ranks."""
        return step >= self._next

    def update(self, step: int, figures: dict[str, str] | None = None) -> None:
        """Show the steps that the recorder holds. All ranks call it, at the same step: it gathers their records.

        Args:
            step: the number of the step that was the last.
            figures: what else to show, by name.

        Raises:
            ValueError: no step was recorded.
        """
        timeline = self._recorder.gather()
        memory = [_peak_memory(self._device)]
        self._next = step + max(1, round(1000 / _period(timeline)))
        if dist.is_initialized():
            everywhere = parallel_state.all_gather_json((memory[0], self._next))
            pipeline = dist.get_process_group_ranks(parallel_state.get_pipeline_model_parallel_group())
            memory = [everywhere[rank][0] for rank in pipeline]
            self._next = everywhere[0][1]
        if self._draws:
            self._live.update(panel_of(timeline, memory, self._tokens_per_step, step, figures or {}), refresh=True)


def panel_of(timeline: Timeline, memory: list[float], tokens_per_step: int, step: int, figures: dict[str, str]) -> Any:
    """What is shown, as something that rich prints.

    Args:
        memory: the peak of each rank in GiB.
        tokens_per_step, step, figures: as in `LiveView`.
    """
    from rich.console import Group
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    plan, split = timeline.plan, split_bubble(timeline)
    speed = {"step": f"{split.step_time:.4g} ms", "tokens/s": f"{1000 * tokens_per_step / _period(timeline):,.0f}"}
    head = Text("   ".join(f"{name} {value}" for name, value in {**speed, **figures}.items()), style="bold")
    causes = Table("bubble", "of the step", "", box=None, padding=(0, 2, 0, 0))
    causes.columns[1].justify = "right"
    for cause, share in {"all": sum(split.shares.values()), **split.shares}.items():
        causes.add_row(cause, f"{share:.1%}", _bar(share))
    ranks = Table("rank", "work", "waiting", "host", "peak memory", "work as a share of the step", box=None)
    for column in ranks.columns[:5]:
        column.justify = "right"
    for rank in range(plan.pp_size):
        work, waited, host = (
            fmean(getattr(one[rank], name) for one in timeline.steps) for name in ("busy", "waited", "host")
        )
        times = (f"{time:.4g} ms" for time in (work, waited, host))
        ranks.add_row(str(rank), *times, f"{memory[rank]:.2f} GiB", _bar(work / split.step_time))
    title = f"{plan.name}: {plan.pp_size} ranks, {plan.num_microbatches} microbatches, step {step}"
    note = f"means of the last {len(timeline.steps)} steps"
    return Panel(Group(head, "", causes, "", ranks), title=title, subtitle=note, expand=False)


def _bar(share: float) -> Any:
    from rich.text import Text

    return Text("█" * round(BAR * min(1.0, max(0.0, share))), style=ACCENT)


def _period(timeline: Timeline) -> float:
    """Time from one step's beginning to the next one's, in ms, with all that lies between, such as the optimizer's
    step."""
    begins = [step[0].begin for step in timeline.steps]
    if len(begins) == 1:
        return step_time(timeline.steps[0])
    return median(later - earlier for earlier, later in pairwise(begins))


def _peak_memory(device: torch.device | None) -> float:
    """Memory in GiB: of the GPU, or of the process."""
    if device is not None and device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20

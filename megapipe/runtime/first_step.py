"""What is looked at in a chunk's first step only: the messages that it exchanges, where nobody has described them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..p2p_communication import Transfer
from ..plan import StageInfo
from .arguments import Specs, StepArguments
from .found_shapes import Seen, Unsaid
from .stage import SavedForward, Stage

__all__ = ["end_first_steps", "make_stages"]


def make_stages(step: StepArguments, infos: Sequence[StageInfo], specs: Specs, unsaid: Unsaid) -> list[Stage]:
    """One per chunk; where this is its first step, one that looks at what it does."""
    stages = []
    for chunk, (info, (_, sent)) in enumerate(zip(infos, specs)):
        kind = FirstStep if unsaid.is_first(chunk) else Stage
        stages.append(kind(info, chunk, step, sent, is_found=chunk in unsaid))
    return stages


def end_first_steps(stages: Sequence[Stage], unsaid: Unsaid) -> None:
    """After the loops: keep what was found."""
    for chunk, stage in enumerate(stages):
        if isinstance(stage, FirstStep):
            unsaid.keep(chunk, stage.seen)


class FirstStep(Stage):
    """A stage in a step that is looked at."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.seen = Seen(set(), set())

    def take_input(self, received: Transfer | None) -> list[Tensor]:
        if received is not None and received.spec is not None:
            self.seen.received.add(received.spec)
        return super().take_input(received)

    def save(self, *args: Any, **options: Any) -> tuple[Transfer | None, SavedForward | None]:
        made = super().save(*args, **options)
        if made[0] is not None and made[0].spec is not None:
            self.seen.sent.add(made[0].spec)
        return made

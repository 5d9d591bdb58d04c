"""What is looked at in a chunk's first steps only: the messages that it exchanges, where nobody has described them, and
whether it is trained."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakSet

from torch import Tensor, nn

from ..chunks import named_parameters
from ..p2p_communication import Transfer
from ..plan import StageInfo
from ..weight_grad import DeferredGrads
from .arguments import StepArguments
from .found_shapes import Different, Seen, Specs, UndescribedMessages
from .notices import NoGradientWarning, UnsplitBackwardWarning, warn
from .plans import PlanKey
from .sliced import SlicedStage
from .stage import SavedForward, Stage

__all__ = ["end_first_steps", "make_stages"]

_trained: WeakSet[nn.Module] = WeakSet()
"""Chunks that have been looked at in a training step."""


def make_stages(
    step: StepArguments, infos: Sequence[StageInfo], specs: Specs, undescribed: UndescribedMessages
) -> list[Stage]:
    """One per chunk; where this is its first step, one that looks at what it does."""
    stages = []
    for chunk, (info, (_, sent)) in enumerate(zip(infos, specs)):
        is_untrained = not step.forward_only and step.models[chunk] not in _trained
        is_first = is_untrained or undescribed.is_first(chunk)
        kind = KINDS[is_first, bool(step.slices)]
        stages.append(kind(info, chunk, step, sent, chunk in undescribed, undescribed.have_headers(chunk, sent)))
    return stages


def end_first_steps(
    stages: Sequence[Stage], step: StepArguments, key: PlanKey, undescribed: UndescribedMessages, is_sharded: bool
) -> None:
    """After the loops: keep what was found, and warn of what is odd.

    Args:
        is_sharded: gradients are not where they are otherwise.
    """
    for chunk, stage in enumerate(stages):
        if isinstance(stage, FirstStep):
            undescribed.keep(chunk, stage.seen)
            if not step.forward_only and stage.module not in _trained:
                _trained.add(stage.module)
                stage.warn_of_what_is_odd(key.schedule.name if key.plan.splits_backward else None, is_sharded)


class FirstStep(Stage):
    """A stage in a step that is looked at."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.seen = Seen(Different(self._step.num_slices), Different(self._step.num_slices))
        self._has_run_backward = False
        self._has_deferred = bool(self._delayed)

    def take_input(self, received: Transfer | None) -> list[Tensor]:
        if received is not None and received.spec is not None:
            self.seen.received.add(received.spec)
        return super().take_input(received)

    def save(self, *args: Any, **options: Any) -> tuple[Transfer | None, SavedForward | None]:
        made = super().save(*args, **options)
        if made[0] is not None and made[0].spec is not None:
            self.seen.sent.add(made[0].spec)
        return made

    def input_grads(self, in_flight: SavedForward, has_run: bool) -> list[Tensor]:
        self._has_run_backward |= has_run
        return super().input_grads(in_flight, has_run)

    def backward_weights(self, deferred: DeferredGrads) -> None:
        self._has_deferred |= not deferred.is_empty()
        super().backward_weights(deferred)

    def warn_of_what_is_odd(self, splits: str | None, is_sharded: bool) -> None:
        """What is not trained, and Ws that have nothing to do.

        Args:
            splits: the name of the schedule, if it splits backwards.
        """
        if not self._has_run_backward:  # which has been said, here or by the stage that hands back no gradient
            return
        trainable = [(name, p) for name, p in named_parameters(self.module) if p.requires_grad]
        without = [] if is_sharded else [name for name, parameter in trainable if not _has_gradient(parameter)]
        if without:
            warn(
                f"{_listed(without)} of stage {self.info.index} got no gradient in a whole step, since no loss of it "
                "depends on them: freeze what is not to be trained by requires_grad_(False)",
                NoGradientWarning,
            )
        if splits is not None and not self._has_deferred and any(parameter.dim() > 1 for _, parameter in trainable):
            warn(
                f"{splits} splits backwards, but no layer of stage {self.info.index} leaves its weight gradients to "
                "W, which has nothing to do: call megapipe.weight_grad.convert(chunk), capture the stage, or take "
                "1f1b or interleaved_1f1b",
                UnsplitBackwardWarning,
            )


class FirstSlicedStep(FirstStep, SlicedStage):
    """The same where sequences are cut."""


KINDS: dict[tuple[bool, bool], type[Stage]] = {
    (False, False): Stage,
    (False, True): SlicedStage,
    (True, False): FirstStep,
    (True, True): FirstSlicedStep,
}
"""By whether a stage is looked at, and whether sequences are cut."""


def _has_gradient(parameter: nn.Parameter) -> bool:
    """Or somebody takes it away at once: a hook, or who adds it up elsewhere."""
    hooks = getattr(parameter, "_post_accumulate_grad_hooks", None)
    return parameter.grad is not None or getattr(parameter, "main_grad", None) is not None or bool(hooks)


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more parameters"

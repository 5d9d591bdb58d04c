"""What is found out about a chunk in its first step: the shapes of its messages, if neither the arguments nor the model
tell them, and whether it is trained. When the structure of a chunk has changed, its next step is a first step again."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torch import nn

from ..chunks import named_parameters
from ..stages import Call, NoGradientWarning, Stage, UnitState, UnsplitBackwardWarning, warn
from .found_shapes import FoundShapes, SeenMessages, SeenSpecs
from .plans import PlanKey
from .session import Alone, Session


def make_first_steps(stages: Sequence[Stage], call: Call, found_shapes: FoundShapes) -> list[FirstStep | None]:
    """An observer for each chunk that runs its first step; None for the others."""
    return [
        FirstStep(stage, call.num_slices)
        if (not call.forward_only and FirstStep not in call.structures[chunk].kept) or found_shapes.is_first(chunk)
        else None
        for chunk, stage in enumerate(stages)
    ]


def end_first_steps(
    first_steps: Sequence[FirstStep | None],
    call: Call,
    key: PlanKey,
    found_shapes: FoundShapes,
    gradients_in_params: bool,
    session: Session | Alone,
) -> None:
    """Called after the loops of a step. Keeps the shapes that were found, and warns of parameters without a gradient
    and of Ws without work. Collective over the pipeline in its first training step under a schedule.

    Args:
        gradients_in_params: gradients are in the `.grad` of the parameters now, and not kept elsewhere by an option.
    """
    unsplit = []
    for chunk, first_step in enumerate(first_steps):
        if first_step is not None:
            found_shapes.keep(chunk, first_step.seen)
            kept = call.structures[chunk].kept
            if not call.forward_only and FirstStep not in kept:
                kept[FirstStep] = True
                first_step.warn_of_what_is_not_trained(gradients_in_params)
                if first_step.leaves_nothing_to_w:
                    unsplit.append(first_step.stage.info.index)
    if not call.forward_only:
        _warn_of_empty_ws(unsplit, key, session)


def _warn_of_empty_ws(unsplit: list[int], key: PlanKey, session: Session | Alone) -> None:
    """One warning, of all stages of the pipeline, from its first rank. Later chunks (another model) are known to their
    rank alone, which warns by itself.

    Args:
        unsplit: the stages of this rank that leave nothing to W.
    """
    name = key.schedule.name
    if isinstance(session, Session) and session.is_first(f"step of {name}") and key.plan.splits_backward:
        found = session.exchange(f"end of the first step of {name}", unsplit)
        unsplit = sorted(itertools.chain(*found)) if session.pp_rank == 0 else []
    if unsplit and key.plan.splits_backward:
        is_all = len(unsplit) == key.pp_size * key.num_chunks
        stages = "any stage" if is_all else f"stage {' or '.join(map(str, unsplit))}"
        warn(
            f"{name} splits backwards, but no layer of {stages} leaves its weight gradients to W, which has nothing to "
            "do: call megapipe.weight_grad.convert(chunk) (for Megatron's layers its integration's "
            "defer_weight_gradients(chunk)), capture the stage, or take 1f1b or interleaved_1f1b",
            UnsplitBackwardWarning,
        )


class FirstStep:
    """Observes one stage during its first step: the messages that it exchanges, and whether gradients reach it."""

    def __init__(self, stage: Stage, num_slices: int) -> None:
        self.stage = stage
        self.seen = SeenMessages(SeenSpecs(num_slices), SeenSpecs(num_slices))
        self._has_run_backward = False
        self._has_deferred = False

    def observe(self, unit: UnitState) -> None:
        """Called after each action of the stage, before its result is taken from the unit."""
        if unit.received is not None and unit.received.spec is not None:
            self.seen.received.add(unit.received.spec, unit.slice)
        if unit.output is not None and unit.output.spec is not None:
            self.seen.sent.add(unit.output.spec, unit.slice)
        self._has_run_backward |= unit.has_run_backward
        self._has_deferred |= unit.delayed is not None or (unit.deferred is not None and not unit.deferred.is_empty())

    @property
    def leaves_nothing_to_w(self) -> bool:
        """Whether its layers could have left weight gradients to W, and none has."""
        could = any(p.dim() > 1 and p.requires_grad for _, p in named_parameters(self.stage.module))
        return self._has_run_backward and could and not self._has_deferred

    def warn_of_what_is_not_trained(self, gradients_in_params: bool) -> None:
        if not self._has_run_backward:  # which has been said, here or by the stage that hands back no gradient
            return
        index = self.stage.info.index
        trainable = [(name, p) for name, p in named_parameters(self.stage.module) if p.requires_grad]
        without = [name for name, parameter in trainable if gradients_in_params and not _has_gradient(parameter)]
        if without:
            warn(
                f"{_listed(without)} of stage {index} got no gradient in a whole step, since no loss of it depends on "
                "them: freeze what is not to be trained by requires_grad_(False)",
                NoGradientWarning,
            )


def _has_gradient(parameter: nn.Parameter) -> bool:
    """Or somebody takes it away at once: a hook, or who adds it up elsewhere."""
    hooks = getattr(parameter, "_post_accumulate_grad_hooks", None)
    return parameter.grad is not None or getattr(parameter, "main_grad", None) is not None or bool(hooks)


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more parameters"

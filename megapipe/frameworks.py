"""Frameworks that megapipe is used with, such as Megatron-LM. If one is imported, steps follow its rules. The core
knows none by name: integrations are listed in `ties`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

ForwardStep = Callable[..., Any]


class AroundForward(NamedTuple):
    """Functions to be called around the forwards of a chunk."""

    before: Callable[[int], None]
    """Called before each with the microbatch."""
    after: Callable[[], None]
    """Called after each."""


class AgreedStep(NamedTuple):
    """A step on which all ranks have agreed."""

    call: Any
    """Its arguments, and when its loops are done its results."""
    pp_rank: int
    pp_size: int
    last_stage: int
    """The rank that has the last stage, and with it the reports and the number of tokens."""
    finalize_keywords: dict[str, Any]
    """Further arguments of `finalize_model_grads_func`."""
    share: Callable[[Any], Any]
    """Called on every rank; returns what the rank of the last stage called it with."""


class Framework:
    """The hooks of an integration. Without an override none changes a step."""

    def groups(self) -> Any:
        """Its process groups, as `parallel_state.Groups`; None where it has none."""
        return None

    def check_groups(self, groups: Any) -> None:
        """Called with each thing that the caller passed to describe process groups; may raise ValueError."""

    def read_config(self, config: Any, schedule: Any) -> dict[str, Any]:
        """Fields of `PipelineConfig` that `model.config` has under other names. May raise ValueError."""
        return {}

    def around_forwards(self, model: Any, num_forwards: int, device: Any) -> AroundForward | None:
        """Functions to be called around the forwards of a chunk in this step."""
        return None

    def find_cut(self, model: Any) -> Callable[[ForwardStep], ForwardStep] | None:
        """The function that makes of the caller's forward_step_func one whose outputs are `Segments`, where the
        framework cuts this chunk."""
        return None

    def random_streams(self) -> Iterable[tuple[Callable[[], Any], Callable[[Any], Any]]]:
        """Functions that return and set the states of random numbers that it keeps besides torch's own."""
        return ()

    def check_chunks(self, models: Sequence[Any]) -> None:
        """Called before anything is done, in a training step of chunks in which anything is not as in an earlier step.
        May raise ValueError."""

    def around_loops(self, step: AgreedStep) -> AbstractContextManager[None]:
        """Entered before the loops of a step, and left when they are done, or have failed."""
        return nullcontext()

    def around_finalizing(self, step: AgreedStep) -> AbstractContextManager[None]:
        """Entered on every rank when the loops of a step are done, and left when gradients are finalized."""
        return nullcontext()


ties: dict[str, str] = {}
"""The module that has the ties to a framework, as `framework`, by the name of the framework's package."""


def frameworks() -> list[Framework]:
    """The frameworks in use: those whose package has been imported."""
    return [importlib.import_module(tie).framework for package, tie in ties.items() if package in sys.modules]


def find_cut(model: Any, in_use: Sequence[Framework]) -> Callable[[ForwardStep], ForwardStep] | None:
    """Returns what the first of these frameworks that can do so cuts the forwards of a chunk into segments by; None if
    none can."""
    for framework in in_use:
        if (cut := framework.find_cut(model)) is not None:
            return cut
    return None

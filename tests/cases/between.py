"""A change between two steps, or between two calls: in a stage (`changes.py`), or in how the schedule is called
(`calls.py`). Right is what the unpartitioned model computes with the same change.
"""

from __future__ import annotations

import contextlib
import warnings
from dataclasses import dataclass
from random import Random
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map

from megapipe import NoGradientWarning

from . import changes
from .calls import CALLS, GOES, is_plain
from .case import Case, Feature
from .changes import KINDS
from .stages import Stage

__all__ = ["Between"]

FOR_SPLIT = {"requires_grad", "stage frozen", "parameter assigned", "hook of a parameter", "forward only"}
FOR_SPLIT |= {name for name, kind in KINDS.items() if kind.refusal == "hook"}
WITH_GRADIENTS = {"requires_grad", "stage frozen", "parameter assigned"}
ALONE = {"captured later", "sharded later", "compiled later"}
NOT_MIDWAY = {"another number of microbatches", "another placement", "a setting for one step", "a second model"}
NOT_MIDWAY |= {"output detached", "gradients gathered by a hook", "a call failed", "a wrong setting"}
FREEZE = {"requires_grad", "stage frozen", "stage unfrozen"}
DETACH = {"input detached", "output detached"}


@dataclass(frozen=True)
class Between(Feature):
    """Behind a step something has changed, in one stage or in how the schedule is called.

    Attributes:
        when: "before" the next step, "midway" between the calls of the next one, or when the step is "trained" and its
            gradients are there to be used.
    """

    kind: str
    at: int = 0
    step: int = 0
    when: str = "before"
    seed: int = 0

    chance = 0.5
    most = 3
    needs_seed = property(lambda self: self.kind in KINDS and KINDS[self.kind].is_seeded)
    is_whole = property(lambda self: self.kind not in KINDS or KINDS[self.kind].is_whole)

    @staticmethod
    def goes(case: Case) -> Any:
        return case.steps > 1 and not ALONE & case.changes

    @classmethod
    def draw(cls, rng: Random, case: Case) -> Feature:
        kind = rng.choice(sorted(name for name in [*KINDS, *CALLS] if goes(name, case)))
        when = ["before", "before", *["midway"] * 2 * (case.get("Accumulated") is not None and kind not in NOT_MIDWAY)]
        if kind in WITH_GRADIENTS:
            when.append("trained")
        when = ["midway"] if kind == "gradients forgotten" else when
        return cls(
            kind, rng.randrange(case.num_stages), rng.randrange(case.steps - 1), rng.choice(when), rng.randrange(9)
        )

    def rng(self) -> Random:
        return Random(self.seed)

    def is_at(self, stage: Stage) -> bool:
        return bool(stage.info.index == self.at % stage.case.num_stages)

    def refuses(self, case: Case) -> str:
        """Beside what each rank is to refuse for sure, after which it goes on."""
        texts = []
        if case.get("Tied") and self.kind in KINDS:
            texts.append("tied")
        if "captured" in case.forms and self.kind in KINDS and KINDS[self.kind].graphs == "rebuild":
            texts.append("its graphs do not know")
        if self.kind in KINDS and KINDS[self.kind].graphs == "refuse" and runs_as_graphs(case, self.at):
            texts.append(KINDS[self.kind].refusal)
        if self.kind == "noise" and case.get("Recompute"):
            texts.append("cannot be computed again")
        return "|".join(texts)

    def stage(self, stage: Stage) -> None:
        prepare = KINDS[self.kind].prepare if self.kind in KINDS else None
        if prepare is not None and self.is_at(stage):
            prepare(stage, self.rng())

    def take(self, x: Tensor, stage: Any, entries: dict[str, Any], tokens: Tensor | None) -> Tensor:
        if not hasattr(stage, "detaches_input") or tokens is not None:
            return x
        entries |= {name: tree_map(detached, value) for name, value in entries.items()}
        return x.detach()

    def give(self, stage: Any, entries: dict[str, Any]) -> None:
        if hasattr(stage, "detaches_output") and not stage.info.is_last:
            entries |= {name: tree_map(detached, value) for name, value in entries.items()}

    def made(self, trial: Any) -> None:
        if self.kind == "gradients gathered by a hook":
            trial.finalizers.insert(0, lambda *_: self.put_gathered(trial.stages))
            trial.reference_finalizers.insert(0, lambda: self.put_gathered(trial.reference.stages))

    def put_gathered(self, stages: list[Stage]) -> None:
        for parameter in [p for stage in filter(self.is_at, stages) for p in stage.parameters()]:
            parameter.grad = parameter.__dict__.pop("gathered", parameter.grad)

    def before(self, trial: Any, step: int) -> None:
        for afterwards in trial.kept.pop("afterwards", []):
            afterwards()
        if self.when == "before" and step == self.step + 1:
            self.change(trial)

    def midway(self, trial: Any, step: int) -> None:
        if self.when == "midway" and step == self.step + 1:
            self.change(trial)

    def trained(self, trial: Any, step: int) -> None:
        if self.when == "trained" and step == self.step:
            self.change(trial)

    def after(self, trial: Any, step: int) -> None:
        trial.agree(trial.kept.pop("wrong", ""))

    def change(self, trial: Any) -> None:
        if self.kind in CALLS:
            CALLS[self.kind](trial, self)
            return
        kind, own = KINDS[self.kind], [stage for stage in trial.stages if self.is_at(stage)]
        if kind.graphs == "refuse" and runs_as_graphs(trial.case, self.at):
            self.is_refused(trial, own, kind)
            return
        if (kind.is_new or self.kind == "parameter assigned") and trial.optimizer is not None:
            trial.optimizer.finalize()  # behind which weights may be written to
        for stage in (*own, *filter(self.is_at, trial.reference.stages)):
            with contextlib.suppress(changes.NoPlaceError):
                kind.change(stage, self.rng())
        if kind.is_new:
            if self.seed % 2 and self.when == "before":  # what is summed midway would be counted again
                trial.kept.pop("tied", None)
            trial.make_again()
        if self.kind == "output detached" and own and not own[0].info.is_last:
            self.warns(trial, own[0])

    def is_refused(self, trial: Any, own: list[Stage], kind: changes.Kind) -> None:
        """The case ends with the step that is refused: other ranks, of which no argument has changed, have begun it."""
        try:  # where it would be, every rank knows
            kind.change(trial.reference.stages[self.at % trial.case.num_stages], self.rng())()
        except changes.NoPlaceError:
            return
        if trial.case.get("Split"):
            own = [chunk.module for chunk, stage in zip(trial.chunks, trial.stages) if stage in own]
        for stage in own:
            kind.change(stage, self.rng())
        trial.run(900)
        raise AssertionError(f"a graph's stage with {self.kind} is not refused")

    def warns(self, trial: Any, stage: Stage) -> None:
        """Of the stage's own parameters, which are not trained any more."""
        run, is_trained = trial.function, any(p.requires_grad for p in stage.parameters())

        def checked(**arguments: Any) -> Any:
            if arguments["forward_only"]:
                return run(**arguments)
            trial.function = run
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                reports = run(**arguments)
            texts = [str(one.message) for one in caught if issubclass(one.category, NoGradientWarning)]
            if is_trained and not any(f"stage {stage.info.index} has no gradient" in text for text in texts):
                trial.kept["wrong"] = f"there is no NoGradientWarning of stage {stage.info.index}, but {texts}"
            return reports

        trial.function = checked


def detached(one: Any) -> Any:
    return one.detach() if isinstance(one, Tensor) else one


def runs_as_graphs(case: Case, stage: int) -> bool:
    forms = case.of("Forms", "of_stages", [""])
    return case.get("Split") is not None or "captured" in forms[stage % case.num_stages % len(forms)]


def goes(name: str, case: Case) -> bool:
    """Whether this kind of change goes with what the case has."""
    if case.get("Split"):
        return name in FOR_SPLIT
    if name in ALONE and case.get("Between"):
        return False
    if name in FREEZE | DETACH and (case.get("Failure") or case.get("Replicas") or DETACH & case.changes):
        return False
    if name in FREEZE and (case.get("Frozen") or FREEZE & case.changes):
        return False
    if name in CALLS:
        return bool(GOES[name](case))
    kind, is_captured = KINDS[name], "captured" in case.forms
    if kind.is_new and case.get("Autocast"):
        return False  # a stage that ends in another layer may return another dtype
    if is_captured and (kind.is_seeded or (name.endswith((" removed", " detached")) and not kind.is_new)):
        return False
    if "stage" in name and "frozen" in name and case.num_stages == 1:
        return False
    if name == "module of another dtype" and (case.get("Optimizer") or case.tolerance):
        return False  # it rounds by more
    if name == "module of another dtype" and case.of("Shapes", "kind", "") == "config":
        return False  # messages would have that dtype
    if name == "noise":
        is_random = (
            case.get("WarmUp") or "recomputed" in case.forms or case.of("Optimizer", "kind", "") == "post-validated"
        )
        return not is_random and not case.get("Replicas") and is_plain(case)
    if name == "gradients gathered by a hook":
        return not (case.get("WarmUp") or case.get("Replicas") or case.get("Tied") or case.is_cut)
    return is_plain(case) or is_captured

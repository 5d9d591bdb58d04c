"""The proof itself, on every rank: the caller's pipeline against the whole model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..config import PipelineConfig, StepConfig
from ..plan import StageInfo
from .calls import Moment, first_departure, recorded
from .compare import compare
from .local_ranks import first_failure
from .mistakes import gradient_mistakes
from .names import Place, tensors_of
from .places import error_in_words
from .proof import Proof
from .question import Question, takes_nothing
from .reference import Reference
from .trial import Evidence, Trial
from .words import call_mistakes, loss_mistakes, rounding, slice_mistakes, weight_mistakes

Stages = Mapping[Place, Tensor]
"""The values of all stages' tensors."""

T = TypeVar("T")


def answer(question: Question, watches_memory: bool = False) -> Proof:
    """Collective over all ranks: each gets the proof.

    Raises:
        ValueError: names of stages are not those of the whole model.
    """
    trial, judges = Trial(question), list[Judge]()
    own = {place: tensor.detach().cpu() for place, tensor in trial.places().items()}
    stages = {place: value for of_rank in _gather(own) for place, value in of_rank.items()}

    def begin() -> tuple[dict[Place, Tensor], bool]:
        judges.append(Judge(question, stages, trial.num_stages, trial.config))
        return judges[0].values(), judges[0].whole.is_chain

    values, is_chain = _from_first(begin)
    trial.load(values)
    everybody, failed = _trained(trial, watches_memory)
    if failed:
        return Proof(subject_of(question), mistakes=[failed])
    microbatch = _from_first(lambda: judges[0].look(everybody))
    if microbatch >= 0:
        trial.load(values)
        calls = _record_again(trial, microbatch, is_chain)
        for judge in judges:
            judge.look_at_calls(calls, microbatch)
    return _from_first(lambda: judges[0].proof)


def _trained(trial: Trial, watches_memory: bool) -> tuple[list[Evidence], str]:
    """What every rank has to say, or which one has failed: so that none waits for it here."""
    found: Evidence | str
    try:
        found = trial.train(trial.question.num_steps, watches_memory)
    except Exception as error:
        if trial.question.is_local:  # whoever has forked it ends the others, which may wait in the next step
            raise
        found = error_in_words(error)
    everybody = _gather(found)
    errors = {rank: one for rank, one in enumerate(everybody) if isinstance(one, str)}
    evidence = [one for one in everybody if isinstance(one, Evidence)]
    return evidence, first_failure(errors) if errors else ""


def _record_again(trial: Trial, microbatch: int, is_chain: bool) -> list[Moment]:
    """The first step once more, and what modules are called with in it."""
    question, infos = trial.question, trial.infos

    def name_of(index: int, name: str) -> str:
        if is_chain:
            return f"{infos[index].index}: {name}"
        return name if question.name_of is None else question.name_of(f"{name}.x", infos[index]).removesuffix(".x")

    of_each = StepConfig.of(trial.config).num_sequence_slices
    with recorded(trial.chunks, range(microbatch * of_each, (microbatch + 1) * of_each), name_of) as calls:
        trial.train(1)
    return [call for of_rank in _gather(calls) for call in of_rank]


def _gather(own: T) -> list[T]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return found


def _from_first(make: Callable[[], T]) -> T:
    """What the first rank makes. An error there is one everywhere."""
    box: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            box[0] = make()
        except Exception as error:
            box[1] = error
    dist.broadcast_object_list(box)
    if box[1] is not None:
        raise box[1]
    made: T = box[0]
    return made


class Judge:
    """The whole model, on the first rank, and what it says of all ranks."""

    def __init__(self, question: Question, stages: Stages, num_stages: int, config: Any) -> None:
        self.question = question
        self.places = sorted(stages, key=lambda place: place[0])
        self.proof = Proof(f"{subject_of(question)} on {num_stages} stages")
        modules, self.key_of = self._whole_of(stages, num_stages)
        self.whole = Reference(question, modules, config)
        if self.whole.is_chain:
            self.whole.load({self.key_of[place]: value for place, value in stages.items()})
        self._initial = self.whole.values()
        unused = [key for key in self.whole.tensors if key not in self.key_of.values()]
        if unused:
            self.proof.mistakes.append(f"no stage has {unused[0]} of the whole model ({len(unused)} such tensors).")

    def values(self) -> dict[Place, Tensor]:
        """What every stage begins with."""
        return {place: self._initial[self.key_of[place]].cpu() for place in self.places}

    def _whole_of(self, stages: Stages, num_stages: int) -> tuple[Sequence[nn.Module], dict[Place, str]]:
        question, infos = self.question, [StageInfo(index, num_stages) for index in range(num_stages)]
        named = {place: self._name(place, infos) for place in self.places}
        if question.whole is not None:
            whole: Any = question.whole() if takes_nothing(question.whole) else copy.deepcopy(question.whole)
            known = tensors_of(whole)
            for place, name in named.items():
                if name not in known:
                    raise ValueError(
                        f"stage {place[0]} has {name}, which the whole model has not: give name_of(name, info), which "
                        "returns what the whole model calls it."
                    )
            self.proof.notes.append("compared with the whole model")
            return [whole], named
        assert question.make_stage is not None
        if (alone := self._only_stage(stages, named)) is not None:
            self.proof.notes.append("compared with the model as the only stage of one")
            return [alone], named
        modules = [question.stage(info, PipelineConfig()) for info in infos]
        self.proof.notes.append(
            "compared with all stages, one after the other in one process: give whole= to find what all of them have "
            "wrong alike"
        )
        return modules, {(stage, name): f"{stage}: {name}" for stage, name in self.places}

    def _name(self, place: Place, infos: Sequence[StageInfo]) -> str:
        stage, name = place
        return name if self.question.name_of is None else self.question.name_of(name, infos[stage])

    def _only_stage(self, stages: Stages, named: Mapping[Place, str]) -> nn.Module | None:
        """The model as one stage, where its names are those of all stages together."""
        assert self.question.make_stage is not None
        try:
            alone = self.question.make_stage(StageInfo(0, 1))
        except Exception:
            return None
        known = tensors_of(alone)
        is_alike = set(named.values()) == set(known) and all(
            stages[place].shape == known[named[place]].shape for place in self.places
        )
        is_repeated = len(set(named.values())) < len(named)
        return alone if is_alike and not is_repeated else None

    def look(self, everybody: Sequence[Evidence]) -> int:
        """Compare everything. Returns the microbatch whose forward is to be looked at, -1 for none."""
        question, proof = self.question, self.proof
        steps = self.whole.train(question.num_steps)
        compare(everybody, steps, self.key_of, question.tolerance, proof)
        proof.held = [max(step.held for step in one.steps) for one in everybody]
        if not any(step.reports for one in everybody for step in one.steps):
            proof.notes.append("losses were not compared: no rank has returned them")
        if not proof.differences:
            if self.whole.slices:
                proof.mistakes += slice_mistakes(self.whole, steps[0])
            return -1
        first = proof.differences[0].step
        kinds = {one.what for one in proof.differences if one.step == first}
        off = [one for one in proof.differences if one.step == first]
        if (text := rounding(off)) is not None:
            proof.mistakes.append(text)
        elif "loss" in kinds:
            proof.mistakes += loss_mistakes(everybody, steps[first], first)
            losses = [one for one in off if one.what == "loss"]
            is_cut_alike = bool(self.whole.slices) == (self.whole.config.num_sequence_slices > 1)
            if first == 0 and not proof.mistakes and is_cut_alike:
                return int(losses[0].name.rpartition(" ")[2])
        elif "gradient" in kinds:
            proof.mistakes += gradient_mistakes(self.whole, steps, first, everybody, self.key_of)
        else:
            proof.mistakes += weight_mistakes(everybody, steps[first], first, self.key_of)
        return -1

    def look_at_calls(self, calls: Sequence[Moment], microbatch: int) -> None:
        """Find the first module that computes something else than in the whole model."""
        batch = self.question.of_replica(0)[microbatch]
        wanted: list[Moment] = []

        def name_of(index: int, name: str) -> str:
            return self.whole.key(index, name)

        def forward(record: bool) -> Any:
            self.whole.load(self._initial)
            with ExitStack() as after, torch.no_grad():
                numbers = range(self.whole.config.num_sequence_slices)
                made = after.enter_context(recorded(self.whole.modules, numbers, name_of)) if record else []
                report = self.whole.run(batch, 1, forward_only=True)
            wanted.extend(made)
            return report

        torch.default_generator.manual_seed(1)
        one = forward(record=True)
        torch.default_generator.manual_seed(2)
        other = forward(record=False)
        stages = {self.key_of[place]: place[0] for place in self.places}
        departure = first_departure(calls, wanted)
        self.proof.mistakes += call_mistakes(departure, one, other, stages, microbatch)


def subject_of(question: Question) -> str:
    """What is proved, with its sizes."""
    name = getattr(question.schedule, "name", getattr(question.schedule, "__name__", question.schedule))
    replicas = f" on each of {question.num_replicas} replicas" if question.num_replicas > 1 else ""
    trainer = "" if question.train_step is None else "a trainer's step, "
    return f"{trainer}{name}, {question.num_microbatches} microbatches{replicas}"

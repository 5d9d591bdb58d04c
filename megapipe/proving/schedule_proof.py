"""A schedule: every size on paper, some of them on ranks, and its plan in torch's runtime."""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..plan import (
    AnySchedule,
    Plan,
    Schedule,
    ScheduleError,
    StageInfo,
    Standstill,
    find_schedule,
    load_plan,
    record_partly,
    stand_still,
    whole_units,
)
from .likeness import unlike
from .proof import Proof
from .sizes import Size, Sizes, check_sizes, plan_of_size

RANKS = (2, 4)
"""The pipelines that a schedule is run on."""

TIMEOUT = 60.0
ROUNDED = 1e-5
"""Torch divides sums of gradients by the number of microbatches, and we each part: the same where that is exact."""


@dataclass
class ScheduleProof:
    """What `prove_schedule` has found. It is true where nothing is wrong.

    Attributes:
        name: of the schedule.
        sizes: what became of each size on paper.
        standstill: the first size that is wrong, as far as it goes.
        ran: the sizes that were run on ranks.
        runs: what came out of it, against the whole model.
        torchs: the same by torch's runtime, from the plan's CSV.
        not_by_torch: why torch cannot run it; "" where it can.
        unlike: in which respect it is not the schedule that it is to be; "" where it is.
        plan: the one that is drawn.
        held: by rank, the most microbatches at once that were measured in its run; none where it was not run.
    """

    name: str
    sizes: Sizes
    standstill: Standstill | None = None
    ran: list[Size] = field(default_factory=list)
    runs: list[Proof] = field(default_factory=list)
    torchs: list[Proof] = field(default_factory=list)
    not_by_torch: str = ""
    unlike: str = ""
    plan: Plan | None = None
    held: list[float] = field(default_factory=list)

    def __bool__(self) -> bool:
        is_right = bool(self.sizes.right) and not self.sizes.wrong and not self.unlike
        return is_right and all(self.runs) and all(self.torchs)

    @property
    def mistakes(self) -> list[str]:
        """What is wrong, in sentences."""
        found = [] if self.sizes.right and not self.sizes.wrong else [f"{self.sizes}".rstrip(".") + "."]
        found += [self.unlike] if self.unlike else []
        found += [f"{proof.subject}: {text}" for proof in self.runs if not proof for text in _reasons(proof)]
        found += [
            f"by torch, {proof.subject}: {text}" for proof in self.torchs if not proof for text in _reasons(proof)
        ]
        return found

    def as_json(self) -> dict[str, Any]:
        tried = {name: len(getattr(self.sizes, name)) for name in ("right", "refused", "wrong")}
        return {
            "schedule": self.name,
            "is_right": bool(self),
            "sizes": tried,
            "mistakes": self.mistakes,
            "runs": [proof.as_json() for proof in self.runs],
            "torchs": [proof.as_json() for proof in self.torchs],
            "not_by_torch": self.not_by_torch,
            "held": self.held,
            "plan": None if self.plan is None else {**self.plan.sizes, "actions": self.plan.cells()},
        }


def _reasons(proof: Proof) -> list[str]:
    return proof.mistakes or [f"{one}." for one in proof.differences[:1]]


def prove_schedule(
    name: AnySchedule,
    num_chunks: int | None = None,
    like: AnySchedule | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> ScheduleProof:
    """Prove a schedule: that no size up to 8 ranks and 4 microbatches a rank hangs or mixes messages up, that its steps
    on 2 and 4 processes of this machine compute what one process does, and that torch's runtime does so too.

    Args:
        name: as `find_schedule` takes it: a schedule or its name, or a plan or a file of one, which has one size.
        num_chunks: per rank, where the schedule leaves that open.
        like: the schedule that it is to be, action by action.
        tell: is told what is done now.
    """
    if (wrong := _wrong_as_written(name)) is not None:
        return wrong
    schedule = find_schedule(name)
    tell(f"recording and checking {schedule.name} on up to 8 ranks")
    sizes = check_sizes(schedule, num_chunks)
    proof = ScheduleProof(schedule.name, sizes)
    if sizes.first is not None:
        proof.standstill = _standstill(schedule, sizes.first, num_chunks)
        return proof
    if like is not None and (text := unlike(schedule, like, sizes)):
        proof.unlike = text
        proof.plan = plan_of_size(schedule, max(sizes.right, key=_is_usual), num_chunks)
        return proof
    to_run = [size for size in sizes.right if size.pp_size in (RANKS if schedule.sizes is None else [size.pp_size])]
    for pp_size in sorted({size.pp_size for size in to_run}):
        of_ranks = [size for size in to_run if size.pp_size == pp_size]
        cut = _chosen([size for size in of_ranks if size.num_slices > 1])[:1]
        chosen = [*cut, *_chosen([size for size in of_ranks if size.num_slices == 1])]
        plans = [plan_of_size(schedule, size, num_chunks) for size in chosen]
        if not plans or plans[0].forward_only:
            continue
        tell(f"running {schedule.name} on {pp_size} processes")
        runs, torchs, proof.not_by_torch, held = _run(schedule, plans)
        proof.runs += runs
        proof.ran += chosen
        proof.torchs += torchs
        proof.plan, proof.held = plans[-1], held
    if proof.plan is None and sizes.right:
        proof.plan = plan_of_size(schedule, max(sizes.right, key=_is_usual), num_chunks)
    return proof


def _wrong_as_written(name: AnySchedule) -> ScheduleProof | None:
    """A plan that does not work with the microbatches that its actions name. Run by our schedules, each stage takes
    them in order, whatever their numbers."""
    if isinstance(name, Plan):
        plan = name
    elif isinstance(name, (str, os.PathLike)) and str(name).endswith((".json", ".csv", ".txt")):
        plan = load_plan(Path(name))
    else:
        return None
    try:
        plan.check()
    except ScheduleError as error:
        size = Size(plan.pp_size, plan.num_microbatches, plan.num_slices)
        return ScheduleProof(plan.name, Sizes(wrong={size: str(error)}), stand_still(plan, (), whole_units(plan)))
    return None


def _is_usual(size: Size) -> tuple[bool, int]:
    return (size.pp_size <= 4 and size.num_microbatches <= 8 and size.num_slices <= 2, sum(size))


def _chosen(sizes: Sequence[Size]) -> list[Size]:
    """Two of a number of ranks: with an odd number of microbatches, and with twice as many as ranks."""
    by_number = {size.num_microbatches: size for size in sizes}
    pp_size = sizes[0].pp_size if sizes else 1
    wanted = [number for number in (pp_size + 1, 2 * pp_size) if number in by_number] or list(by_number)[-1:]
    return [by_number[number] for number in wanted]


def _standstill(schedule: Schedule, size: Size, num_chunks: int | None) -> Standstill:
    try:
        plan, errors = plan_of_size(schedule, size, num_chunks), list[str]()
    except Exception:
        chunks = num_chunks if schedule.num_chunks is None else None
        plan, errors = record_partly(schedule, size.pp_size, size.num_microbatches, chunks, size.num_slices)
    return stand_still(plan, errors, whole_units(plan))


def _run(schedule: Schedule, plans: Sequence[Plan]) -> tuple[list[Proof], list[Proof], str, list[float]]:
    """Run plans of one number of ranks, on processes that have all of them one after the other."""
    from ..config import PipelineConfig  # with torch, as all that runs ranks
    from . import torchs, toy
    from .answer import answer
    from .local_ranks import RanksError, on_local_ranks
    from .question import Question

    pp_size, num_stages = plans[0].pp_size, plans[0].pp_size * plans[0].num_chunks
    num_layers, reason = num_stages + 1, torchs.why_not(plans[-1])

    def question_of(plan: Plan, by_torch: bool) -> Question:
        make_stage = toy.make_stage_of(num_layers, plan.splits_backward and not by_torch)
        return Question(
            make_stage,
            toy.forward_step,
            toy.microbatches(plan.num_microbatches, length := max(toy.LENGTH, plan.num_slices)),
            (lambda: torchs.runtime_of_plan(plan, make_stage, toy.loss_of)) if by_torch else schedule,
            whole=lambda: toy.Layers(StageInfo(0, 1), num_layers),
            loss=toy.loss_of,
            num_chunks=plan.num_chunks,
            pp_size=pp_size,
            config=PipelineConfig(num_sequence_slices=plan.num_slices),
            options={"seq_length": length, "micro_batch_size": toy.BATCH},
            is_local=True,
            tolerance=ROUNDED if by_torch and plan.num_microbatches & (plan.num_microbatches - 1) else 0.0,
        )

    def run_all() -> tuple[list[Proof], list[float]]:
        warnings.simplefilter("ignore")  # some stages have no layer that defers
        last = plans[-1]
        proofs = [answer(question_of(plan, False), watches_memory=plan is last) for plan in plans]
        return proofs, _measured(last, proofs[-1].held, num_layers, lambda plan: answer(question_of(plan, False), True))

    def subject(plan: Plan) -> str:
        cut = f" in {plan.num_slices} slices" if plan.num_slices > 1 else ""
        return f"{schedule.name}, {plan.num_microbatches} microbatches{cut} on {num_stages} stages of {pp_size} ranks"

    def tried(what: Callable[[], Any], plan: Plan) -> tuple[Any, list[Proof]]:
        try:
            return on_local_ranks(pp_size, what, TIMEOUT)[0], []
        except RanksError as error:
            return None, [Proof(subject(plan), mistakes=[str(error)])]

    found, wrong = tried(run_all, plans[-1])
    proofs, held = ([], []) if found is None else found
    by_torch: list[Proof] = []
    if not reason:
        importlib.import_module("torch.distributed.pipelining.schedules")  # once, before processes are forked
        found, wrong_by_torch = tried(lambda: answer(question_of(plans[-1], True)), plans[-1])
        by_torch = [*([] if found is None else [found]), *wrong_by_torch]
    for plan, proof in zip([*plans, plans[-1]], [*proofs, *by_torch]):
        proof.subject = subject(plan)
    return [*proofs, *wrong], by_torch, reason, held


def _measured(plan: Plan, held: Sequence[int], num_layers: int, run: Callable[[Plan], Proof]) -> list[float]:
    """The most microbatches at once on each rank, by the bytes of a step, those of a step of one microbatch, and those
    that one takes between its forward and its backward. None where the schedule runs no single one, or slices."""
    from .toy import bytes_of_microbatch

    if plan.num_slices > 1:
        return []
    try:
        single = plan_of_size(find_schedule(plan.name), Size(plan.pp_size, 1), plan.num_chunks)
    except ValueError:
        return []
    least, sizes = run(single), (plan.pp_size, plan.num_chunks, num_layers)
    one = [bytes_of_microbatch(plan.placement, rank, *sizes) for rank in range(plan.pp_size)]
    begin = single.simulate().peak_activations
    rows = zip(begin, held, least.held, one)  # behind the first microbatch there are gradients to add to
    return [first + (most - of_one - grads) / own for first, most, of_one, (own, grads) in rows]

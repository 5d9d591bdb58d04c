"""Activations kept, recomputed (R, or by checkpointing in the model), moved to host memory (O, L), or R and O, on
emulated compute: steps and peaks beside the plan's.

    python -m benchmarks.activations --pp 4 --microbatches 8 16 --copying 1
    python -m benchmarks.activations --pp 4 --microbatches 4 8 16 --ways R checkpoint

A rank sleeps for 20 ms in the F, R, B and W of each microbatch, shared out over its chunks. A copy to host memory or
back takes `copying` times as long as an F, one at a time each way: whoever needs it sleeps until it would be over.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable
from statistics import median
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from megapipe.activations import Offload, offload, saving
from megapipe.plan import Plan, Settings, make_plan

from .emulation import Deferring, Stage, Whole
from .launching import gather
from .options import run
from .rounds import Emulated, take_turns
from .tables import Table

PLAN = "by the plan"
NOTES = """Medians of interleaved steps. *of*: the step over that of the first way. *peak*: most microbatches
whose activations are on the device of the fullest rank, between its actions. At most one W is pending. *both*: stages
of the second half are recomputed, those of the first half moved."""
SCHEDULES = {"1f1b": 1, "interleaved_1f1b": 2, "zb1p": 1, "zbv": 2, "v_half": 2}
WAYS = ["kept", "R", "O", "both", "checkpoint"]


class Alive:
    """Activations on the device of this rank, and the most of them at a time."""

    def __init__(self) -> None:
        self.refs: list[StorageWeakRef] = []
        self.most = 0

    def add(self, tensor: Tensor) -> None:
        self.refs.append(StorageWeakRef(tensor.untyped_storage()))

    def look(self) -> None:
        self.refs = [ref for ref in self.refs if not ref.expired()]
        self.most = max(self.most, len(self.refs))


class Links:
    """Copies that take time, one after the other each way. Stands for `offload._beside`."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._free = {"out": 0.0, "back": 0.0}

    def beside(self, device: torch.device, way: str, copy: Callable[[], None]) -> Callable[[], None]:
        copy()
        self._free[way] = end = max(time.perf_counter(), self._free[way]) + self.seconds
        return lambda: time.sleep(max(0.0, end - time.perf_counter()))


ALIVE, LINKS = Alive(), Links()


def keeping(work: type[Whole]) -> Callable[..., Tensor]:
    """A stage's work that keeps something for its backward."""

    class Keeping(work):  # type: ignore[misc, valid-type]
        @staticmethod
        def forward(ctx: Any, x: Tensor, *args: Any) -> Tensor:
            activations = x.clone()
            ctx.save_for_backward(activations)
            saver = saving()
            if saver is None or saver.pack.__name__ != "_leave_out":
                ALIVE.add(activations)
            result: Tensor = work.forward(ctx, x, *args)
            ALIVE.look()
            return result

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            (kept,) = ctx.saved_tensors
            ALIVE.look()
            results = work.backward(ctx, grad)
            del kept
            return results

    return Keeping.apply  # type: ignore[no-any-return]


WORK = {"whole": keeping(Whole), "deferring": keeping(Deferring)}


class Case(Emulated):
    """One schedule, and one way with its activations."""

    def __init__(self, name: str, num_microbatches: int, case: str, args: argparse.Namespace) -> None:
        num_chunks, seconds = SCHEDULES[name], args.milliseconds / 1000 / SCHEDULES[name]
        self.copy_seconds, self.case, self.most = args.copying * seconds, case, 0
        settings = settings_of(name, args, case)
        super().__init__(
            f"megapipe {name}",
            num_microbatches,
            lambda *_: seconds,
            max_pending_weights=settings.max_pending_weights,
            recompute=["all" if one else None for one in settings.recompute],
            offload_activations=settings.offload,
            num_chunks=num_chunks if name.startswith("inter") else None,
        )

    def _make_stage(self, index: int, num_stages: int, how: str, config: Any) -> Stage:
        work = WORK[how]
        if self.case == "checkpoint":
            work = functools.partial(checkpoint, work, use_reentrant=False)
        return Stage(index, work, self.emulation, config)

    def step(self) -> Any:
        ALIVE.refs, ALIVE.most = [], 0
        LINKS.seconds = self.copy_seconds
        found = super().step()
        self.most = max(self.most, ALIVE.most)
        return found


def settings_of(name: str, args: argparse.Namespace, case: str) -> Settings:
    num_stages = args.pp * SCHEDULES[name]
    first = {"R": 0, "both": num_stages // 2}.get(case, num_stages)
    recompute = tuple(stage >= first for stage in range(num_stages))
    return Settings(max_pending_weights=1, recompute=recompute, offload=args.copying if case in ("O", "both") else None)


def plan_of_case(name: str, args: argparse.Namespace, num_microbatches: int, case: str) -> Plan:
    return make_plan(name, args.pp, num_microbatches, SCHEDULES[name], settings=settings_of(name, args, case))


# The milliseconds are those of each of F, R, B and W of a rank's microbatch, and of a copy where `copying` is 1.
DEFAULTS: dict[str, Any] = {"pp": 4, "microbatches": [8, 16], "milliseconds": 20.0, "copying": 1.0, "rounds": 5}
DEFAULTS |= {"schedules": ["1f1b", "interleaved_1f1b", "zbv", "v_half"], "ways": WAYS[:4]}


def measure(rank: int, args: argparse.Namespace) -> list[Table]:
    rows = []
    load = Offload.load

    def load_and_look(moved: Offload) -> None:
        memories = list(moved._memories.values())
        load(moved)
        for memory in memories:
            ALIVE.add(memory.device)  # type: ignore[arg-type]
        ALIVE.look()

    with mock.patch.object(offload, "_beside", LINKS.beside), mock.patch.object(Offload, "load", load_and_look):
        for m in args.microbatches:
            cases = [(name, case) for name in args.schedules for case in args.ways]
            emulated = [Case(name, m, case, args) for name, case in cases]
            steps = take_turns(emulated, args.rounds, 1, 1)
            times = {key: median(step.duration for step in each) for key, each in zip(cases, steps)}
            for (name, case), one in zip(cases, emulated):
                peak = max(gather(one.most)) / SCHEDULES[name]
                rows.append(row(name, m, case, times, peak, args))
    title = f"Activations on emulated compute, pp={args.pp}, {args.milliseconds:g} ms, copies {args.copying:g} of an F"
    header = f"schedule | microbatches | activations | step, ms | {PLAN} | of {args.ways[0]} | {PLAN} | peak | {PLAN}"
    return [(f"activations-pp{args.pp}", title, header, rows, NOTES)]


def row(name: str, m: int, case: str, times: dict[Any, float], peak: float, args: argparse.Namespace) -> list[str]:
    first, plan = (
        plan_of_case(name, args, m, one).simulate(backward_input=2.0 if one == "checkpoint" else 1.0)
        for one in (args.ways[0], case)
    )
    return [
        name,
        str(m),
        case,
        f"{1000 * times[name, case]:.0f}",
        f"{args.milliseconds * plan.makespan:.0f}",
        f"{times[name, case] / times[name, args.ways[0]]:.3f}",
        f"{plan.makespan / first.makespan:.3f}",
        f"{peak:g}",
        "-" if case == "checkpoint" else f"{max(plan.peak_activations):g}",
    ]


if __name__ == "__main__":
    run(measure, **DEFAULTS)

"""A case on one rank, and on all of them."""

from __future__ import annotations

import math
import re
import shlex
import sys
import traceback
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tools.models import BATCH
from tools.ranks import RankError, RankPool, start_again
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import megapipe
from megapipe import parallel_state, stages_for_rank
from megapipe.failures import collective
from megapipe.proving import Difference
from megapipe.proving.compare import difference
from megapipe.proving.names import full
from megapipe.runtime import combinations, runner

from .case import Case
from .stages import Stage, Unpartitioned, data_of, forward_step


class Trial:
    """A case on one rank.

    Attributes:
        num_tokens: of all calls whose gradients add up, those that are not finalized yet.
        kept: what features keep when they are made again.
    """

    def __init__(self, case: Case, rank: int) -> None:
        self.case, self.rank, self.step = case, rank, 0
        use_mesh(case.mesh)
        self.replica = parallel_state.get_data_parallel_rank()
        infos = stages_for_rank(case.schedule, num_chunks=case.num_chunks)
        self.stages = [Stage(case, info) for info in infos]
        self.chunks = [case.fold("chunk", stage, stage) for stage in self.stages]
        self.reference = Unpartitioned(case)
        self.finalizers: list[Any] = []
        self.reference_finalizers: list[Any] = []
        self.optimizer: Any = None
        self.num_tokens = 0
        self.kept: dict[str, Any] = {}
        self.become(case)
        case.call("made", self)

    def become(self, case: Case) -> None:
        """Go on as another one, of the same stages."""
        planned = case.get("Planned")
        self.function = megapipe.get_forward_backward_func(planned.plan(case) if planned else case.schedule)
        self.case = self.reference.case = case
        for stage in self.all_stages():
            stage.case = case

    def make_again(self) -> None:
        """What depends on which parameters there are, such as optimizers."""
        if self.optimizer is not None:
            self.optimizer.finalize()
        self.finalizers.clear()
        self.reference_finalizers.clear()
        self.case.call("made", self)

    def all_stages(self) -> list[Stage]:
        """Of the pipeline on this rank, and of what it is compared with."""
        return [*self.stages, *self.reference.stages]

    def configure(self, **settings: Any) -> None:
        for stage in self.stages:
            for name, value in settings.items():
                setattr(stage.config, name, value)

    def finalize(self, *arguments: Any) -> None:
        for finalizer in self.finalizers:
            finalizer(*arguments)
        self.num_tokens = 0

    def run(self, seed: int, forward_only: bool = False, **others: Any) -> list[Any]:
        self.num_tokens += 0 if forward_only else BATCH * sum(self.case.seq_lengths)
        arguments = {
            "forward_step_func": forward_step,
            "data_iterator": data_of(self.case, seed, self.replica),
            "model": self.chunks,
            "num_microbatches": self.case.m,
            "seq_length": self.case.sequence,
            "micro_batch_size": BATCH,
            "forward_only": forward_only,
        }
        return self.function(**self.case.fold("arguments", {**arguments, **others}))

    def train(self, first_seed: int = 0) -> None:
        for step in range(self.case.steps):
            self.step = step
            self.case.call("before", self, step)
            self.forget_gradients()
            is_added_up = self.case.get("Accumulated") is not None
            for is_last in (False, True) if is_added_up else (True,):
                if is_last and is_added_up:
                    self.case.call("midway", self, step)
                self.configure(finalize_model_grads_func=self.finalize if is_last else None)
                self.compare_losses(first_seed + 2 * step + is_last)
            for finalizer in self.reference_finalizers:
                finalizer()
            if any(getattr(feature, "kind", "").endswith("detached") for feature in self.case.features):
                self.expect_zeros()
            self.compare("gradient", [(name, p.grad, want.grad) for name, p, want in self.parameters()])
            self.case.call("trained", self, step)
            self.case.call("after", self, step)
        if self.optimizer is not None:
            self.optimizer.finalize()
            self.compare("weight", [(name, p.detach(), want.detach()) for name, p, want in self.parameters()])

    def expect_zeros(self) -> None:
        """A stage that gives the one before it no gradient sends zeros."""
        own = [
            name for name, p, want in self.parameters() if want.grad is None and p.grad is not None and not p.grad.any()
        ]
        everywhere: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, own)  # the reference is trained as a whole on every rank
        for stage in self.reference.stages:
            for name, want in stage.named_parameters():
                if want.grad is None and any(f"{name} of stage {stage.info.index}" in names for names in everywhere):
                    want.grad = torch.zeros_like(want)

    def forget_gradients(self, set_to_none: bool = True) -> None:
        for chunk in self.chunks:
            chunk.zero_grad(set_to_none)
        for stage in self.reference.stages:
            stage.zero_grad(set_to_none)
        self.num_tokens = 0

    def parameters(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """With those that they are compared with."""
        for stage in self.stages:
            wanted = dict(self.reference.stages[stage.info.index].named_parameters())
            for name, parameter in stage.named_parameters():
                yield f"{name} of stage {stage.info.index}", parameter, wanted[name]

    def compare_losses(self, seed: int, forward_only: bool = False, **others: Any) -> None:
        name = "data" if others else "loss"
        reports = [one if isinstance(one, list) else [one] for one in self.run(seed, forward_only, **others)]
        found: list[Any] = [sum([one[name] for one in slices[1:]], slices[0][name]) for slices in reports]
        with torch.set_grad_enabled(not forward_only):
            wanted: list[Any] = self.reference.losses(seed, self.replica, forward_only)
        as_by_megatron = self.case.get("TiedByMegatron") and self.rank == self.case.pp - 1  # which reads them there
        if not any(stage.info.is_last for stage in self.stages) and not as_by_megatron:
            wanted = []
        self.compare("loss", [(str(k), *pair) for k, pair in enumerate(zip_longest(found, wanted))])

    def compare(self, what: str, triples: Sequence[tuple[str, Any, Any]]) -> None:
        """Names, what was found and what is expected."""
        norms = [norm for *_, want in triples if want is not None and math.isfinite(norm := want.norm().item())]
        wrong = []
        for name, one, want in triples:
            found = None if one is None else full(one)
            differs = difference(found, want, self.case.tolerance, of=max(norms, default=0.0))
            if getattr(found, "dtype", None) != getattr(want, "dtype", None):
                wrong.append(f"{what} {name}: {found} and not {want}")
            elif differs is not None:
                wrong.append(str(Difference(self.step, what, name, self.rank, None, *differs)))
        self.agree("\n".join(wrong))

    def check_traits(self, shown: set[str]) -> None:
        """Some rank's calls have shown each trait of the case. What cannot be known of a plan beforehand is none."""
        of_ranks: list[Any] = [None] * dist.get_world_size()
        with collective("the traits"):
            dist.all_gather_object(of_ranks, shown)
        missing = self.case.traits - set().union(*of_ranks)
        assert not missing, f"no call has shown: {', '.join(sorted(missing))}"

    def agree(self, wrong: str = "") -> None:
        """Every rank raises where one has found something wrong, so that none waits for another."""
        texts = [""] * dist.get_world_size()
        with collective("the comparison"):
            dist.all_gather_object(texts, wrong)
        if any(texts):
            raise AssertionError(wrong or "another rank is wrong")


def show_traits(patch: pytest.MonkeyPatch) -> set[str]:
    """Those of all calls from now on."""
    shown: set[str] = set()

    def check(call: Any, pp_size: int) -> None:
        combinations.check_combinations(call, pp_size)
        facts = combinations.Facts(call, pp_size)
        shown.update(name for name in combinations.TRAITS if facts.say(name))

    patch.setattr(runner, "check_combinations", check)
    return shown


def use_mesh(sizes: Sequence[int]) -> None:
    """Rows of one mesh have their process groups and channels in common."""
    names = ("pp", "dp") if len(sizes) == 2 else ("pp", "dp_replicate", "dp_shard")
    if parallel_state.model_parallel_is_initialized():
        data = parallel_state.get_data_parallel_mesh()
        if (parallel_state.get_pipeline_model_parallel_world_size(), *data.shape) == tuple(sizes):
            return
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_from_mesh(init_device_mesh("cpu", tuple(sizes), mesh_dim_names=names))


def try_case(rank: int, case: Case) -> str:
    """Whether it was right or refused. What is wrong is raised."""
    with pytest.MonkeyPatch.context() as patch:
        # Beside other work, news may take its time. Of a process that was killed there are none.
        patch.setattr(megapipe.failures.TIMING, "for_others", 5.0 if case.kills else 20.0)
        shown = show_traits(patch)
        try:
            trial = Trial(case, rank)
            trial.train()
            if case.refusal:
                trial.run(900)  # so that each rank hears of an error of another
            trial.check_traits(shown)
        except Exception as error:
            is_own = isinstance(error, AssertionError)  # which names the change, as the package's own errors do
            if is_own or not case.refusal or not re.search(case.refusal, str(error)):
                raise
            return "refused"
        case.call("end", trial)
        return "right"


def try_rows(rank: int, rows: Sequence[Case]) -> list[str]:
    """What became of each row up to the first that is wrong. They have their process groups and channels in common."""
    results = []
    for case in rows:
        try:
            results.append(try_case(rank, case))
        except Exception as error:
            return [*results, "".join(traceback.format_exception(error))]
        if results[-1] == "refused" or case.get("Failure"):
            start_again()
    return results


def run_case(pool: RankPool, case: Case) -> str | None:
    """What was wrong with it, if anything."""
    try:
        results = pool.run(case.num_ranks, try_case, case, errors=case.kills)
    except RankError as error:
        return str(error)
    if case.num_replicas > 1 and case.get("Failure"):
        pool.stop()  # processes that have failed within a collective do not go on
    if case.kills and results[case.get("Failure").who(case)] is None:
        del results[case.get("Failure").who(case)]
    return None if set(map(str, results)) in ({"right"}, {"refused"}) else f"the ranks say {results}"


def run_rows(pool: RankPool, rows: Sequence[Case]) -> None:
    """One job after the other, each up to a row that is wrong.

    Raises:
        AssertionError: which rows were wrong, and the commands that run them alone.
    """
    wrong, left = [], [*rows]
    while left:
        by_rank = pool.run(left[0].num_ranks, try_rows, left)
        results = [set(of_row) for of_row in zip(*by_rank)]
        num_right = next((k for k, found in enumerate(results) if found not in ({"right"}, {"refused"})), len(left))
        if num_right < len(left):
            text = "".join(f"--- rank {rank}: {found[num_right]}\n" for rank, found in enumerate(by_rank))
            again = f"{sys.executable} tests/fuzz {shlex.quote(repr(left[num_right]))}"
            wrong.append(f"{left[num_right]} is wrong:\n{text}Again: {again}")
            pool.stop()
        left = left[num_right + 1 :]
    assert not wrong, "\n\n".join(wrong)

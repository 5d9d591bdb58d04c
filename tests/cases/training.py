"""Features of training: what is done around steps, between them and after them."""

from __future__ import annotations

import math
import os
import random
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from tools.models import BATCH, HIDDEN
from tools.optimizers import adamw
from tools.ranks import MAX_RANKS
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import megapipe
from megapipe import PipelinedGradScaler, PipelineError, TimelineRecorder, parallel_state
from megapipe.checkpoint import Checkpointer
from megapipe.runtime.monitor import Monitor
from megapipe.training import GradientReducer

from .case import Case, Feature
from .model import CANNOT_BE_SHARDED, LEAVE_TRACES
from .stages import data_of, example_message, forward_step

PATIENCE = 60  # seconds until each rank has heard of a failure


@dataclass(frozen=True)
class Replicas(Feature):
    """By a "reducer", "fully_shard" or "replicate". With two sizes, as many replicas of so many shards."""

    kind: str = "reducer"
    sizes: Sequence[int] = (2,)

    traits = property(lambda self: {"grad_sync_func" if self.kind == "reducer" else "fully_shard"})
    chance = 0.4
    num_replicas = property(lambda self: math.prod(self.sizes))
    tolerance = property(lambda self: 1e-6 if self.num_replicas > 2 else 0.0)  # the sum of more depends on their order

    @staticmethod
    def goes(case: Case) -> Any:
        is_small = 2 * case.pp <= MAX_RANKS and not case.of("NumTokens", "per_token", False)
        return is_small and not CANNOT_BE_SHARDED & case.odd and not case.of("Frozen", "changes", False)

    @classmethod
    def draw(cls, rng: Random, case: Case) -> Feature:
        is_sharded = "captured" not in case.forms and rng.random() < 0.5
        return cls("fully_shard" if is_sharded else "reducer")

    def chunk(self, chunk: nn.Module, stage: Any) -> nn.Module:
        layers = () if "captured" in stage.case.forms else stage.layers.values()
        for module in (*layers, chunk) if self.kind == "fully_shard" else ():
            fully_shard(module, mesh=parallel_state.get_data_parallel_mesh())
        if self.kind == "replicate":
            from torch.distributed._composable.replicate_with_fsdp import replicate  # from torch 2.13 on

            replicate(chunk, mesh=parallel_state.get_data_parallel_mesh())
        return chunk

    def made(self, trial: Any) -> None:
        if self.kind == "reducer":
            reducer = GradientReducer(trial.chunks)
            trial.configure(grad_sync_func=reducer.start)
            trial.finalizers.append(reducer.finish)


@dataclass(frozen=True)
class Tied(Feature):
    """The embedding is also the head, or the first stage and the last have a "scale", which they may leave out.

    Attributes:
        in_steps: gradients are summed by themselves.
    """

    what: str = "embedding"
    in_steps: bool = False

    goes = staticmethod(lambda case: "embedding" not in str(case.get("Frozen")))

    @classmethod
    def draw(cls, rng: Random, case: Case) -> Feature:
        return cls(rng.choice(["embedding", "embedding", "scale"]), rng.random() < 0.4)

    def stage(self, stage: Any) -> None:
        if self.what == "scale" and (stage.info.is_first or stage.info.is_last):
            stage.scale = nn.Parameter(torch.ones(HIDDEN, dtype=next(stage.parameters()).dtype))

    def take(self, x: Tensor, stage: Any, entries: dict[str, Any], tokens: Tensor | None) -> Tensor:
        return x * stage.scale if hasattr(stage, "scale") and not hasattr(stage, "leaves_out_scale") else x

    def copies(self, trial: Any) -> list[nn.Parameter]:
        """Those of the unpartitioned model, which may have other modules since."""
        if self.what == "scale":
            return [stage.scale for stage in trial.reference.stages if hasattr(stage, "scale")]
        modules = trial.reference.stages[0].embedding, trial.reference.stages[-1].head
        return [module.weight for module in modules if hasattr(module, "weight")]

    def made(self, trial: Any) -> None:
        first, *others = self.copies(trial)
        if "tied" not in trial.kept:
            names = ["scale"] * (1 + len(others)) if self.what == "scale" else ["embedding.weight", "head.weight"]
            trial.kept["tied"] = megapipe.TiedWeights(trial.chunks, names)
            for other in others:
                other.data.copy_(first)
        tied = trial.kept["tied"]

        if self.in_steps:
            tied.sum_in_steps(trial.chunks)
        else:
            trial.finalizers.append(tied.sum_gradients)
        trial.reference_finalizers.append(lambda: self.sum_gradients(trial))

    def sum_gradients(self, trial: Any) -> None:
        """None where there is none."""
        copies = self.copies(trial)
        grads = [copy.grad for copy in copies if copy.grad is not None]
        total = sum(grads[1:], grads[0].clone()) if grads else None
        for copy in copies:
            copy.grad = None if total is None else total.clone()

    def midway(self, trial: Any, step: int) -> None:
        """Sums of each step add up in this order."""
        if self.in_steps:
            self.sum_gradients(trial)
            for copy in self.copies(trial)[1:]:
                copy.grad = None if copy.grad is None else torch.zeros_like(copy)


@dataclass(frozen=True)
class TiedByMegatron(Feature):
    """The same, under V placement, where Megatron marks the copies. The config is its own."""

    chance = 0.0  # of rows only: it changes torch
    tolerance = 1e-6

    def stage(self, stage: Any) -> None:
        from megatron.core.model_parallel_config import ModelParallelConfig

        config = ModelParallelConfig(pipeline_dtype=torch.float32)
        for name, value in vars(stage.config).items():
            setattr(config, name, value)
        stage.config = config

    def made(self, trial: Any) -> None:
        one, other = trial.reference.stages[0].embedding.weight, trial.reference.stages[-1].head.weight
        for stage in trial.all_stages():
            for module in filter(None, [stage.embedding, stage.head]):
                module.weight.data.copy_(one)
                module.weight.shared_embedding = True

        def sum_gradients() -> None:
            one.grad, other.grad = one.grad + other.grad, one.grad + other.grad

        trial.reference_finalizers.append(sum_gradients)


def muon(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Of matrices: others stay as they are."""
    return torch.optim.Muon([p for group in groups for p in group["params"] if p.dim() == 2], lr=1e-2)


@dataclass(frozen=True)
class Optimizer(Feature):
    """
    Attributes:
        accidents: step by step, what the gradients of the first stage's layers are multiplied by.
    """

    kind: str = "adamw"
    max_norm: float | None = None
    accidents: Sequence[float | str] = (1.0,)

    traits = property(lambda self: {"post_validated_optimizer"} if self.kind == "post-validated" else ())
    chance = 0.5

    @staticmethod
    def goes(case: Case) -> Any:
        """A step of Adam makes large differences of small ones."""
        return not case.tolerance and "lazy" not in case.odd

    @classmethod
    def draw(cls, rng: Random, case: Case) -> Feature:
        kinds = ["adamw", "post-validated"]
        if case.num_replicas == 1:
            kinds.append("muon")
        max_norm = None if case.get("Double") else rng.choice([0.5, 5.0, None])  # float64 shows the order
        return cls(rng.choice(kinds), max_norm, [rng.choice([1.0, 1.0, 1.0, 256.0, "nan"]) for _ in range(case.steps)])

    def made(self, trial: Any) -> None:
        make = muon if self.kind == "muon" else adamw
        trial.reference_optimizer = make([{"params": trial.reference.parameters}])
        if self.kind == "post-validated":
            trial.optimizer = megapipe.PostValidatedOptimizer(trial.chunks, make, self.max_norm or math.inf)
            trial.configure(post_validated_optimizer=trial.optimizer)
        else:
            trial.optimizer = megapipe.PipelinedOptimizer(trial.chunks, make)
        trial.finalizers.append(lambda *_: self.spoil(trial.stages, trial.step))
        trial.reference_finalizers.append(lambda: self.spoil(trial.reference.stages, trial.step))

    def spoil(self, stages: list[Any], step: int) -> None:
        for parameter in (p for stage in stages if stage.info.is_first for p in stage.layers.parameters()):
            if parameter.grad is not None and parameter.grad.any():  # zeros, which the reference may not have, stay
                parameter.grad *= float(self.accidents[step % len(self.accidents)])

    def after(self, trial: Any, step: int) -> None:
        reference = trial.reference
        copies = {*trial.case.get("Tied").copies(trial)[1:]} if trial.case.get("Tied") else set()
        trained = [p for p in reference.parameters if p.requires_grad and p.grad is not None]
        squares = [p.grad.double().square().sum() for p in trained if p not in copies]
        norm = torch.stack([*squares, torch.zeros((), dtype=torch.float64)]).sum().sqrt()
        scaler = trial.kept.get("scaler")
        if (
            self.kind == "post-validated"
            or megapipe.clip_grad_norm_(trial.chunks, self.max_norm or math.inf).isfinite()
        ):
            trial.optimizer.step() if scaler is None else scaler.step(trial.optimizer)
        if scaler is not None:
            scaler.update()
        if norm.isfinite():
            for parameter in trained:
                if self.max_norm and norm > self.max_norm:
                    parameter.grad *= (self.max_norm / norm).float()
            trial.reference_optimizer.step()


@dataclass(frozen=True)
class Scaled(Feature):
    """The loss, by a power of 2 that is halved where gradients are no numbers."""

    traits = frozenset({"grad_scale_func"})
    tolerance = 1e-30  # of numbers that are next to none
    goes = staticmethod(lambda case: case.of("Optimizer", "kind", "") == "adamw")

    def made(self, trial: Any) -> None:
        scaler = trial.kept.setdefault("scaler", PipelinedGradScaler("cpu", init_scale=2.0**10))
        trial.configure(grad_scale_func=scaler.scale)
        trial.finalizers.append(lambda *_: scaler.unscale_(trial.optimizer))


@dataclass(frozen=True)
class Recorded(Feature):
    """A timeline of the last steps has what their plan has."""

    memory: bool = False

    traits = frozenset({"record_timeline"})

    @classmethod
    def draw(cls, rng: Random, case: Case) -> Feature:
        return cls(rng.random() < 0.3)

    def made(self, trial: Any) -> None:
        recorder = trial.kept.setdefault("recorder", TimelineRecorder(memory=self.memory))
        trial.configure(record_timeline=recorder)

    def end(self, trial: Any) -> None:
        timeline = trial.kept["recorder"].gather()
        timeline.plan.check()
        for step in timeline.steps:
            for rank, record in enumerate(step):
                assert {span.action for span in record.spans} >= {*timeline.plan.actions[rank]}


@dataclass(frozen=True)
class Saved(Feature):
    """After one of the steps all weights, buffers and what the optimizer keeps are saved, spoiled, and loaded again."""

    step: int = 0
    asynchronous: bool = False

    @classmethod
    def draw(cls, rng: Random, case: Case) -> Feature:
        return cls(rng.randrange(case.steps), rng.random() < 0.5)

    def after(self, trial: Any, step: int) -> None:
        if step != self.step:
            return
        folder = [tempfile.mkdtemp() if trial.rank == 0 else ""]
        dist.broadcast_object_list(folder)
        checkpointer = Checkpointer(folder[0], trial.chunks, trial.optimizer, asynchronous=self.asynchronous)
        checkpointer.save(1)
        checkpointer.wait()
        with torch.no_grad():
            for tensor in (one for chunk in trial.chunks for one in chunk.state_dict(keep_vars=True).values()):
                tensor.zero_()
        if trial.optimizer is not None:
            trial.optimizer.optimizer.state.clear()
        checkpointer.load()
        if trial.rank == 0:
            shutil.rmtree(folder[0])


@dataclass(frozen=True)
class Accumulated(Feature):
    """Gradients of two calls add up before they are used."""

    goes = staticmethod(lambda case: case.num_replicas == 1)


@dataclass(frozen=True)
class Validated(Feature):
    """Forwards alone before each step."""

    traits = frozenset({"forward_only"})

    def before(self, trial: Any, step: int) -> None:
        trial.compare_losses(500 + step, forward_only=True)


@dataclass(frozen=True)
class WarmUp(Feature):
    """Before one of the steps, of which nothing may remain."""

    step: int = 0

    chance = 0.4
    refusal = "warm_up"
    goes = staticmethod(lambda case: len({*case.slice_lengths}) == case.num_replicas == 1)  # slices of one length

    @classmethod
    def draw(cls, rng: Random, case: Case) -> Feature:
        return cls(rng.randrange(case.steps))

    def before(self, trial: Any, step: int) -> None:
        if step != self.step:
            return
        case, received = trial.case, None
        if case.of("Shapes", "kind", "") != "config":  # which describes messages by itself
            received = example_message(case, case.slice_lengths[0] if case.is_cut else case.seq_lengths[0])
        before = everything(trial)
        megapipe.warm_up(
            megapipe.get_forward_backward_func(case.schedule),
            forward_step,
            next(data_of(case, 700)),
            trial.chunks,
            case.m,
            received=received,
            seq_length=case.sequence,
            micro_batch_size=BATCH,
        )
        after = everything(trial)
        changed = [name for name in {**before, **after} if before.get(name) != after.get(name)]
        trial.agree(f"the warm-up has changed {', '.join(changed)}" if changed else "")


def everything(trial: Any) -> dict[str, str]:
    """What a warm-up must leave as it was."""
    found = {
        "torch's random numbers": str(torch.get_rng_state().tolist()),
        "Python's random numbers": str(random.getstate()),
        "NumPy's random numbers": str(numpy.random.get_state()),
    }
    for stage in trial.stages:
        for name, tensor in [*stage.named_parameters(), *stage.named_buffers()]:
            found[name] = values_of(tensor)
            found[f"gradient of {name}"] = values_of(tensor.grad)
    return found


def values_of(tensor: Any) -> str:
    """Of a shard this rank's part."""
    if tensor is None or nn.parameter.is_lazy(tensor):
        return str(type(tensor))
    return str((tensor.to_local() if isinstance(tensor, DTensor) else tensor).tolist())


@dataclass(frozen=True)
class Wrapped(Feature):
    """By a module like DistributedDataParallel, or like torch.compile's."""

    attribute: str = "module"

    goes = staticmethod(lambda case: case.of("Replicas", "kind", "") != "fully_shard")

    @classmethod
    def draw(cls, rng: Random, case: Case) -> Feature:
        return cls(rng.choice(["module", "_orig_mod"]))

    def chunk(self, chunk: nn.Module, stage: Any) -> nn.Module:
        return Wrapper({self.attribute: chunk})


class Wrapper(nn.Module):
    def __init__(self, modules: dict[str, nn.Module]) -> None:
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, *args: Any, **keywords: Any) -> Any:
        (chunk,) = self.children()
        return chunk(*args, **keywords)


class MistakeError(Exception):
    """Not the pipeline's."""


@dataclass(frozen=True)
class Failure(Feature):
    """A rank fails, or is killed, at one of its actions. Every rank hears of it: in this step, or in the next where it
    has left this one already (docs/limits.md). Then the pipeline has ended."""

    rank: int
    action: int
    kills: bool = False

    chance = 0.35
    goes = staticmethod(lambda case: not LEAVE_TRACES & case.odd and not case.get("Scaled"))

    @classmethod
    def draw(cls, rng: Random, case: Case) -> Feature:
        kills = case.num_ranks > 1 and rng.random() < 0.12
        return cls(rng.randrange(case.num_ranks), rng.randrange(2 * case.m * case.num_chunks), kills)

    def who(self, case: Case) -> int:
        return self.rank % case.num_ranks  # which may be fewer than when it was drawn

    def end(self, trial: Any) -> None:
        case, rank, is_alone = trial.case, self.who(trial.case), trial.case.num_replicas == 1
        trial.agree()  # a rank that is still in the step before would fail there
        if is_alone:  # what is the caller's own is promised nothing
            trial.configure(finalize_model_grads_func=None)
        if trial.rank == rank:
            with pytest.raises(MistakeError):
                self.run(trial)
        else:
            named = f"rank {rank if case.pp == 1 else rank // case.num_replicas}"
            silent = f"{named} is silent: its process ended without a word|lost its connection"
            ahead = max(2, case.pp) if case.get("Frozen") else 2  # without a gradient to wait for, a step per rank
            self.hear(trial, silent if self.kills else f"{named} failed .*MistakeError", ahead if is_alone else 10**6)
        if case.num_ranks > 1:
            with pytest.raises(PipelineError, match="has ended with a failure"):
                trial.run(900)

    def hear(self, trial: Any, text: str, num_steps: int) -> None:
        begin, error = time.monotonic(), ""
        for number in range(num_steps):
            try:
                trial.run(801 + number)
            except PipelineError as found:
                error = str(found)
                break
            assert time.monotonic() - begin < PATIENCE, "this rank has heard of nothing"
        assert re.search(text, error), f"this rank has heard {error!r}"
        assert time.monotonic() - begin < PATIENCE, "this rank has heard of it late"

    def run(self, trial: Any) -> None:
        """One step, in which the action is not begun."""
        original, count = Monitor.at, iter(range(1_000_000))

        def at(monitor: Monitor, *action: Any) -> Any:
            if next(count) == self.action:
                if self.kills:
                    os.kill(os.getpid(), signal.SIGKILL)
                raise MistakeError
            return original(monitor, *action)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Monitor, "at", at)
            trial.run(800)

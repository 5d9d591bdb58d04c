"""Random cases against the unpartitioned model: `make fuzz`, or

    python tests/fuzz.py --minutes 10 --seed 1
    python tests/fuzz.py --seed 1 --case 17      # one of them again

A case is a schedule with its sizes and settings, stages of several kinds, messages of one kind, and steps: trained,
validated, accumulated, and failing on one rank at a random action, after which the next must be right again. Losses and
gradients are to be, to the bit, those of all stages run one after the other in one process, and slice by slice where
sequences are cut. What a case is depends on the seed and its number alone.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from by_slices import run_by_slices
from models import BATCH, HIDDEN, SEQUENCE, VOCABULARY, Block, Window, batches, loss_of, seed_cpu
from ranks import MAX_RANKS, RankError, RankPool
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import megapipe
from megapipe import PipelineError, StageInfo, distribute_layers, parallel_state, slices, stages_for_rank, weight_grad
from megapipe.graph import capture
from megapipe.overlap import in_segments, run_segments
from megapipe.plan import find_schedule
from megapipe.runtime.monitor import Monitor

SCHEDULES = [name for name in megapipe.schedule_names() if name != "inference"]
SIDE = 4  # features that a second tensor carries
CAN_CAPTURE = torch.__version__ >= "2.9"


@dataclass(frozen=True)
class Case:
    schedule: str
    pp_size: int
    num_chunks: int
    num_microbatches: int
    num_layers: int
    forms: tuple[str, ...]
    """Of each stage: eager, deferring, in segments, captured."""
    recompute: tuple[bool, ...]
    dropout: float
    message: str
    shapes: str
    seq_lengths: tuple[int, ...] | None
    slice_lengths: tuple[int, ...]
    """One for each sequence, where they are whole."""
    window: int | None
    """Of attention, in schedules that can cut sequences."""
    wrapper: str
    frozen: tuple[str, ...]
    idle: int
    """The stage with a weight that nobody uses."""
    tied: bool
    num_tokens: bool
    settings: tuple[tuple[str, Any], ...]
    num_steps: int
    validates: bool
    failure: tuple[int, int] | None
    """The rank that fails, and at which of its actions."""

    @property
    def is_cut(self) -> bool:
        return len(self.slice_lengths) > 1

    def __str__(self) -> str:
        return ", ".join(f"{field.name}={getattr(self, field.name)!r}" for field in fields(self))


def make_case(seed: int, number: int) -> Case:
    rng = random.Random(f"{seed} {number}")
    schedule = rng.choice(SCHEDULES)
    found = find_schedule(schedule)
    pp_size = rng.randint(1, min(MAX_RANKS, found.max_pp_size or MAX_RANKS))
    num_chunks = found.num_chunks or rng.randint(1, 3)
    num_stages = pp_size * num_chunks
    m = rng.randint(1, 2 * pp_size + 4)
    num_layers = num_stages + rng.randint(0, 3)
    dropout = rng.choice([0.0, 0.0, 0.3])
    slice_lengths = make_slice_lengths(rng, rng.randint(1, SEQUENCE) if found.slices else 1)
    is_cut = len(slice_lengths) > 1
    shapes = rng.choice(["found" if is_cut else "described", "computed", "config"])
    seq_lengths = tuple(rng.randint(1, 7) for _ in range(m)) if shapes == "described" and rng.random() < 0.5 else None
    forms = ["eager", "deferring", "in segments", "deferring in segments"]
    can_capture = CAN_CAPTURE and not dropout and seq_lengths is None and not is_cut
    if can_capture and rng.random() < 0.3:  # capturing takes its time
        forms = ["eager", "captured", "captured", "deferring"]
    tied = rng.random() < 0.3
    frozen = [f"layers.{rng.randrange(num_layers)}."] if rng.random() < 0.3 else []
    if not tied and rng.random() < 0.2:
        frozen.append("embedding.")
    settings: dict[str, Any] = {
        "overlap_p2p_comm": rng.random() < 0.8,
        "p2p_lookahead": rng.choice([None, None, 1, 3]),
        "microbatch_group_size_per_vp_stage": rng.choice([None, pp_size, pp_size + 1]),
    }
    if schedule in ("1f1b", "zb1p", "zb2p") and rng.random() < 0.3:
        settings["max_in_flight"] = 2.0 * pp_size
    elif rng.random() < 0.15:
        settings["weight_grad_placement"] = "tuned"
    message = "tensor" if shapes == "config" else rng.choice(["tensor", "list of one", "tuple", "list", "dict"])
    if shapes == "described" and m % 2:
        shapes = "found"
    if "captured" in forms and message == "dict":
        shapes = "described"  # what is captured wants a gradient for each tensor of floating point
    return Case(
        schedule,
        pp_size,
        num_chunks,
        m,
        num_layers,
        tuple(rng.choice(forms) for _ in range(num_stages)),
        tuple(rng.random() < 0.25 for _ in range(num_stages)),
        dropout,
        message,
        shapes,
        seq_lengths,
        slice_lengths,
        rng.choice([None, 1, 3]),
        rng.choice(["", "module", "_orig_mod"]),
        tuple(frozen),
        rng.randrange(2 * num_stages),
        tied,
        rng.random() < 0.3,
        tuple(settings.items()),
        rng.choice([1, 1, 2]),
        rng.random() < 0.3,
        (rng.randrange(pp_size), rng.randrange(2 * m * num_chunks)) if rng.random() < 0.5 else None,
    )


def make_slice_lengths(rng: random.Random, num_slices: int) -> tuple[int, ...]:
    stops = [0, *sorted(rng.sample(range(1, SEQUENCE), num_slices - 1)), SEQUENCE]
    return rng.choice([equal_lengths(num_slices), tuple(stop - start for start, stop in pairwise(stops))])


def equal_lengths(num_slices: int) -> tuple[int, ...]:
    """As equal as can be, which is the default."""
    base, extra = divmod(SEQUENCE, num_slices)
    return tuple(base + (number < extra) for number in range(num_slices))


class Looking(nn.Module):
    """A block whose positions look back: to the one before them, and by attention."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.window = case.window
        self.block = Block(case.dropout)
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        before = [last for (last,) in slices.earlier((self, "last"))] or [torch.zeros_like(x[:1])]
        slices.keep((self, "last"), x[-1:])
        x = x + 0.5 * torch.cat([before[-1], x[:-1]])
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 1, 3, 0, 4)
        seen = slices.attention(q, k, v, owner=self, window=self.window)
        return self.block(x + seen.permute(2, 0, 1, 3).flatten(2))


class Stage(nn.Module):
    """The layers of one stage, with what the messages of a case want done at its ends."""

    def __init__(self, case: Case, info: StageInfo) -> None:
        super().__init__()
        self.case, self.info = case, info
        num_slices = len(case.slice_lengths)
        self.config = SimpleNamespace(
            hidden_size=HIDDEN if case.shapes == "config" else None,
            variable_seq_lengths=case.shapes == "described",
            timeout=60.0,
            finalize_model_grads_func=None,
            num_sequence_slices=num_slices,
            sequence_slice_lengths=None if case.slice_lengths == equal_lengths(num_slices) else case.slice_lengths,
            **dict(case.settings),
        )
        self.layers = nn.ModuleDict()
        can_cut = find_schedule(case.schedule).slices
        for layer in distribute_layers(case.num_layers, info):
            seed_cpu(100 + layer)
            self.layers[str(layer)] = Looking(case) if can_cut else Block(case.dropout)
        seed_cpu(99)
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN) if info.is_first else None
        self.head = nn.Linear(HIDDEN, VOCABULARY) if info.is_last else None
        self.idle = nn.Linear(3, 3) if case.idle == info.index else None
        self.received: Any = None
        self.recomputes = False
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(not name.startswith(case.frozen))

    def set_input_tensor(self, received: Any) -> None:
        self.received = received

    def forward(self, tokens: Tensor, seed: int = 0) -> Any:
        return run_segments(self.run(tokens, seed))

    def run(self, tokens: Tensor, seed: int = 0) -> Iterator[None]:
        x, rest = self.take(tokens)
        for name, layer in self.layers.items():
            if "in segments" in self.case.forms[self.info.index]:
                x = Window.apply(x)
                yield
            if self.case.dropout:
                seed_cpu(1000 * seed + int(name))  # dropout draws alike wherever the layer runs
            x = checkpoint(layer, x, use_reentrant=False) if self.recomputes else layer(x)
        return self.head(x) if self.head is not None else self.give(x, rest)

    def take(self, tokens: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        if self.embedding is not None:
            tokens = slices.cut(tokens, 0)
            return self.embedding(tokens), {"mask": tokens % 2, "count": 0.1 * tokens.float().unsqueeze(-1)}
        message = self.received
        if self.case.message in ("tensor", "list of one"):
            return message[0] if isinstance(message, list) else message, {}
        if self.case.message == "tuple":
            return message[0] + F.pad(message[1], (0, HIDDEN - SIDE)), {}
        if self.case.message == "list":
            return torch.cat(message, -1), {}
        x = message["x"] + 0.25 * message["half"].float() + message["mask"].unsqueeze(-1) * message["count"]
        return x, {"mask": message["mask"], "count": message["count"]}

    def give(self, x: Tensor, rest: dict[str, Tensor]) -> Any:
        kind = self.case.message
        if kind == "tensor":
            return x
        if kind == "list of one":
            return [x]
        if kind == "tuple":
            return x, 0.5 * x[..., :SIDE]
        if kind == "list":
            return [part.contiguous() for part in x.split([SIDE, 1, HIDDEN - SIDE - 1], -1)]
        return {"mask": rest["mask"], "x": x, "half": (2 * x).bfloat16(), "count": rest["count"]}


class StageInSegments(Stage):
    def forward_segments(self, tokens: Tensor, seed: int = 0) -> Iterator[None]:
        return self.run(tokens, seed)


class Wrapper(nn.Module):
    """Like DistributedDataParallel, or like torch.compile's module."""

    def __init__(self, chunk: nn.Module, name: str) -> None:
        super().__init__()
        self.name = name
        self.add_module(name, chunk)

    def forward(self, *args: Any) -> Any:
        return getattr(self, self.name)(*args)


def example_message(stage: Stage, length: int = SEQUENCE) -> Any:
    x = torch.zeros(length, BATCH, HIDDEN, requires_grad=True)
    mask = torch.zeros(length, BATCH, dtype=torch.long)
    return stage.give(x, {"mask": mask, "count": torch.zeros(length, BATCH, 1)})


def compute_shapes(stage: Stage) -> None:
    def infer(inputs: dict[str, Tensor], num_microbatches: int) -> Any:
        return example_message(stage, inputs["input_ids"].shape[1])

    for name in ("inputs", "outputs"):
        setattr(stage, f"infer_stage_{name}_from_pipeline_inputs", infer)


def build_chunk(case: Case, info: StageInfo) -> nn.Module:
    form = case.forms[info.index]
    stage = (StageInSegments if "in segments" in form else Stage)(case, info)
    if "deferring" in form:
        weight_grad.convert(stage)
    if case.shapes == "computed":
        compute_shapes(stage)
    if form == "captured":
        message = None
        if not info.is_first:
            message = example_message(stage)
            message = message[0].detach() if case.message == "list of one" else detached(message)
        tokens = torch.zeros(SEQUENCE, BATCH, dtype=torch.long)
        capture(stage, (tokens,), input_tensor=message, recompute=case.recompute[info.index])
    else:
        stage.recomputes = case.recompute[info.index]
    return Wrapper(stage, case.wrapper) if case.wrapper else stage


def detached(message: Any) -> Any:
    return torch.utils._pytree.tree_map_only(Tensor, lambda t: t.detach(), message)


def inner(chunk: nn.Module) -> Stage:
    return chunk if isinstance(chunk, Stage) else getattr(chunk, chunk.name)


def loss_and_report(case: Case, output: Tensor, labels: Tensor) -> tuple[Any, ...]:
    if case.is_cut:
        own = slices.cut(labels, 0)
        part = F.cross_entropy(output.flatten(0, 1), own.flatten(), reduction="sum")
        if case.num_tokens:
            return part, torch.tensor(own.numel()), {"loss": part.detach()}
        return part / labels.numel(), {"loss": part.detach()}
    loss = loss_of(output, labels)
    if case.num_tokens:
        return loss * labels.numel(), torch.tensor(labels.numel()), {"loss": loss.detach()}
    return loss, {"loss": loss.detach()}


def forward_step(data_iterator: Iterator[dict[str, Any]], model: nn.Module) -> tuple[Any, Any]:
    batch = next(data_iterator)
    case = batch["case"]
    arguments = (batch["tokens"], batch["seed"]) if case.dropout else (batch["tokens"],)
    is_interruptible = any("in segments" in form for form in case.forms)
    output = in_segments(model, *arguments) if is_interruptible else model(*arguments)
    return output, lambda output: loss_and_report(case, output, batch["labels"])


def data_of(case: Case, seed: int) -> Iterator[dict[str, Any]]:
    lengths = None if case.seq_lengths is None else list(case.seq_lengths)
    for batch in batches(case.num_microbatches, seed, lengths):
        yield batch | {"case": case}


class Unpartitioned:
    """All stages, one after the other, in plain PyTorch."""

    def __init__(self, case: Case) -> None:
        num_stages = case.pp_size * case.num_chunks
        self.case = case
        self.stages = [Stage(case, StageInfo(index, num_stages)) for index in range(num_stages)]
        if case.tied:
            with torch.no_grad():
                self.stages[-1].head.weight.copy_(self.stages[0].embedding.weight)

    def step(self, seed: int, forward_only: bool = False) -> list[Tensor]:
        losses = []
        for batch in data_of(self.case, seed):
            if self.case.is_cut:
                losses.append(self.run_by_slices(batch, forward_only))
                continue
            loss, *num_tokens, report = self.run(batch)
            losses.append(report["loss"])
            if not forward_only:
                for number in num_tokens:
                    loss = loss / number
                (loss / self.case.num_microbatches).backward()
        return losses

    def run(self, batch: dict[str, Any]) -> tuple[Any, ...]:
        message: Any = None
        for stage in self.stages:
            stage.set_input_tensor([message] if isinstance(message, Tensor) else message)
            message = stage(batch["tokens"], batch["seed"])
        return loss_and_report(self.case, message, batch["labels"])

    def run_by_slices(self, batch: dict[str, Any], forward_only: bool) -> Tensor:
        reported = []

        def step() -> Tensor:
            loss, *num_tokens, report = self.run(batch)
            reported.append(report["loss"])
            loss = loss / self.case.num_microbatches
            return loss * (1 / torch.tensor(batch["labels"].numel())) if num_tokens else loss

        run_by_slices(step, self.case.slice_lengths, forward_only=forward_only)
        return sum(reported[1:], reported[0])

    def gradients(self) -> dict[str, Tensor | None]:
        found = {
            (stage.info.index, name): None if parameter.grad is None else parameter.grad.clone()
            for stage in self.stages
            for name, parameter in stage.named_parameters()
        }
        if self.case.tied:
            both = [(0, "embedding.weight"), (len(self.stages) - 1, "head.weight")]
            parts = [found[key] for key in both if found[key] is not None]
            for key in both:
                found[key] = sum(parts[1:], parts[0])
        return found

    def forget_gradients(self) -> None:
        for stage in self.stages:
            stage.zero_grad()


class MistakeError(Exception):
    """Not the pipeline's."""


@contextmanager
def failing_at(number: int) -> Iterator[None]:
    """The action of that number is not begun on this rank."""
    original, count = Monitor.at, iter(range(1_000_000))

    def at(self: Monitor, *action: Any) -> Any:
        if next(count) == number:
            raise MistakeError(str(action))
        return original(self, *action)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Monitor, "at", at)
        yield


class Trial:
    """A case on one rank."""

    def __init__(self, case: Case, rank: int) -> None:
        self.case, self.rank = case, rank
        parallel_state.initialize_model_parallel(pipeline_model_parallel_size=case.pp_size)
        infos = stages_for_rank(case.schedule, num_chunks=case.num_chunks)
        self.chunks = [build_chunk(case, info) for info in infos]
        self.reference = Unpartitioned(case)
        self.is_last = any(info.is_last for info in infos)
        self.tied: Any = None
        if case.tied:
            self.tied = megapipe.TiedWeights(self.chunks, ["embedding.weight", "head.weight"])

    def run(self, seed: int, forward_only: bool = False) -> list[Any]:
        return megapipe.get_forward_backward_func(self.case.schedule)(
            forward_step_func=forward_step,
            data_iterator=data_of(self.case, seed),
            model=self.chunks,
            num_microbatches=self.case.num_microbatches,
            seq_length=SEQUENCE,
            micro_batch_size=BATCH,
            forward_only=forward_only,
        )

    def run_twice(self) -> None:
        self.run(80)
        self.run(81)

    def compare_steps(self, first_seed: int) -> None:
        for chunk in self.chunks:
            chunk.zero_grad()
        self.reference.forget_gradients()
        for step in range(self.case.num_steps):
            if self.case.validates:
                self.compare_losses(first_seed + 50 + step, forward_only=True)
            is_last = step == self.case.num_steps - 1
            for chunk in self.chunks:
                finalize = self.tied.sum_gradients if self.tied is not None and is_last else None
                inner(chunk).config.finalize_model_grads_func = finalize
            self.compare_losses(first_seed + step)
        expected = self.reference.gradients()
        for stage in map(inner, self.chunks):
            for name, parameter in stage.named_parameters():
                want = expected[stage.info.index, name]
                where = f"gradient of {name} of stage {stage.info.index}"
                assert (parameter.grad is None) == (want is None), f"{where}: {parameter.grad} and not {want}"
                if want is not None:
                    difference = (parameter.grad - want).abs().max()
                    assert torch.equal(parameter.grad, want), f"{where} is off by {difference} of {want.abs().max()}"

    def compare_losses(self, seed: int, forward_only: bool = False) -> None:
        reports = self.run(seed, forward_only)
        with torch.set_grad_enabled(not forward_only):
            losses = self.reference.step(seed, forward_only)
        found = [report["loss"] for report in reports]
        assert found == (losses if self.is_last else []), f"losses {found} and not {losses}"

    def fail(self, failing_rank: int, action: int) -> None:
        """Every rank hears of it: in this step, or in the next where it has left this one already. That is not promised
        to a rank that waits in a collective of the caller's, such as the sum of tied weights' gradients."""
        for chunk in self.chunks:
            inner(chunk).config.finalize_model_grads_func = None
        if self.rank == failing_rank:
            with failing_at(action), pytest.raises(MistakeError):
                self.run(80)
            return
        with pytest.raises(PipelineError, match=f"rank {failing_rank} failed at .*MistakeError"):
            self.run_twice()


def try_case(rank: int, case: Case) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            megapipe.failures.watchdog, "PATIENCE", 20.0
        )  # beside other work, news of a failure may take its time
        trial = Trial(case, rank)
        trial.compare_steps(0)
        if case.failure is not None:
            dist.barrier()  # a rank that is still in the step before would fail there
            trial.fail(*case.failure)
            trial.compare_steps(10)


def run_case(pool: RankPool, seed: int, number: int) -> str | None:
    """What was wrong with it, if anything."""
    case = make_case(seed, number)
    try:
        pool.run(case.pp_size, try_case, case)
    except RankError as error:
        again = f"{sys.executable} tests/fuzz.py --seed {seed} --case {number}"
        return f"case {number} of seed {seed} is wrong: {case}\n{error}\nAgain by itself: {again}"
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=None, help="default: another one each time")
    parser.add_argument("--case", type=int, default=None, help="only this one")
    args = parser.parse_args()
    seed = random.randrange(1_000_000) if args.seed is None else args.seed
    print(f"seed {seed}", flush=True)
    pool = RankPool()
    end = time.monotonic() + 60 * args.minutes
    wrong: list[int] = []
    seen: Counter[str] = Counter()
    number = args.case or 0
    while True:
        seen[make_case(seed, number).schedule] += 1
        if (text := run_case(pool, seed, number)) is not None:
            wrong.append(number)
            print(text, flush=True)
        number += 1
        if args.case is not None or time.monotonic() > end:
            break
    pool.stop()
    print(f"{seen.total()} cases of seed {seed} ({dict(seen)}): {len(wrong)} wrong {wrong or ''}")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()

"""The model of a case: as stages of the pipeline, and as a whole that they are compared with."""

from __future__ import annotations

import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from tools.models import BATCH, HIDDEN, VOCABULARY, Block, Window, batches, loss_of, seed_cpu
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megapipe import StageInfo, distribute_layers, slices
from megapipe.overlap import in_segments, run_segments
from megapipe.proving.whole import Whole

from .case import SEQUENCE, Case
from .messages import WAYS


class Stage(nn.Module):
    """The layers of one stage, which is called with what the stage before returns, or is given it as Megatron does."""

    received: Any = None

    def __init__(self, case: Case, info: StageInfo) -> None:
        super().__init__()
        self.case, self.info = case, info
        self.form = ""
        self.layers = nn.ModuleDict()
        for number in distribute_layers(case.num_layers, info):
            seed_cpu(100 + number)
            self.layers[str(number)] = case.fold("layer", Block(0.0), number)
        seed_cpu(99)
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN) if info.is_first else None
        self.head = nn.Linear(HIDDEN, VOCABULARY) if info.is_last else None
        self.config = SimpleNamespace(timeout=60.0)
        case.call("config", vars(self.config))
        case.call("stage", self)

    def set_input_tensor(self, received: Any) -> None:
        is_one = isinstance(received, list) and len(received) == 1
        self.received = received[0] if is_one and (received[0] is None or self.case.kind != "list of one") else received

    def forward(self, first: Any, **keywords: Any) -> Any:
        return run_segments(self.forward_segments(first, **keywords))

    def forward_segments(self, first: Any, seed: int = 0, mask: Tensor | None = None) -> Iterator[None]:
        pack, unpack = WAYS[self.case.kind]
        if self.embedding is not None:
            tokens = slices.cut(first, 0)
            x, entries = self.embedding(tokens), {}
        else:
            tokens, entries = None, unpack(first if self.received is None else self.received)
            x = entries.pop("x")
        x = self.case.fold("take", x, self, entries, tokens)
        if mask is not None:
            x = x * (1 + 0.1 * slices.cut(mask, 0).unsqueeze(-1))
        for name, layer in self.layers.items():
            if "in segments" in self.form:
                x = Window.apply(x)
                yield
            if self.case.any("needs_seed"):
                number = 1000 * seed + int(name)
                seed_cpu(number), random.seed(number), numpy.random.seed(number)
            if "recomputed" in self.form:
                x = checkpoint(layer, x, use_reentrant="reentrant" in self.form and x.requires_grad)
            else:
                x = layer(x)
        entries["x"] = x
        self.case.call("give", self, entries)
        if self.head is None:
            return pack(dict(sorted(entries.items())))
        logits = self.head(x)
        return (logits, entries["loss"]) if "loss" in entries else logits


def example_message(case: Case, length: int = SEQUENCE) -> Any:
    """What the first stage returns, with a gradient whatever is frozen."""
    stage = Stage(case, StageInfo(0, case.num_stages))
    for parameter in stage.parameters():
        parameter.requires_grad = True  # requires_grad_ is refused by lazy ones, from torch 2.15 on
    with case.autocast():
        return stage(torch.zeros(length, BATCH, dtype=torch.long))


def data_of(case: Case, seed: int, replica: int = 0) -> Iterator[dict[str, Any]]:
    for batch in batches(case.m, case.num_replicas * seed + replica, case.seq_lengths):
        yield batch | {"case": case}


class Source:
    """Microbatches, in a class of one's own."""

    def __init__(self, iterator: Iterator[dict[str, Any]]) -> None:
        self.take = iterator.__next__


def keywords_of(case: Case, batch: dict[str, Any]) -> dict[str, Any]:
    keywords = {"seed": batch["seed"]} if case.any("needs_seed") else {}
    return keywords | ({"mask": batch["tokens"] % 3} if case.get("Mask") else {})


def forward_step(data_iterator: Iterator[dict[str, Any]], model: nn.Module, in_part: bool = False) -> tuple[Any, Any]:
    batch = data_iterator.take() if isinstance(data_iterator, Source) else next(data_iterator)
    case = batch["case"]
    call = in_segments if "in segments" in case.forms else type(model).__call__
    output = call(model, batch["tokens"], **keywords_of(case, batch))

    def loss_func(output: Any, non_loss_data: bool = False) -> Any:
        returned = loss_and_report(case, output, batch)
        return {"data": returned[-1]["loss"]} if non_loss_data else returned

    return output, loss_func


def loss_and_report(case: Case, output: Any, batch: dict[str, Any]) -> tuple[Any, ...]:
    logits, extra = output if isinstance(output, tuple) else (output, None)
    labels = slices.cut(batch["labels"], 0)
    size = batch["labels"].numel()
    if slices.current() is None:
        loss = loss_of(logits, labels)
    else:
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / size
    if extra is not None:
        loss = loss - extra * (labels.numel() / size)
    report = {"loss": loss.detach()}
    return (loss * size, torch.tensor(labels.numel()), report) if case.get("NumTokens") else (loss, report)


class Unpartitioned(Whole):
    """All stages, one after the other."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.stages = [Stage(case, StageInfo(index, case.num_stages)) for index in range(case.num_stages)]
        super().__init__(self.stages, self.under_autocast, self.stages[0].config, case.sequence)

    def under_autocast(self, *arguments: Any) -> tuple[Any, Any]:
        """A pipeline's is under autocast by its config."""
        with self.case.autocast():
            return forward_step(*arguments)

    def losses(self, seed: int, replica: int, forward_only: bool) -> list[Tensor]:
        """Those of one replica in one step. Gradients are averages over all of them."""
        data = [[*data_of(self.case, seed, one)] for one in range(self.case.num_replicas)]
        if forward_only or len(data) == 1:  # gradients are added to those that are there
            return [report["loss"] for report in self.step(data[replica], forward_only)]
        return [report["loss"] for report in self.step_of_replicas(data)[replica]]

    def run(self, batch: Any, num_microbatches: int, forward_only: bool = False) -> Any:
        is_compared = self.slices and not forward_only and all(feature.is_whole for feature in self.case.features)
        trained = [p for p in self.parameters if p.requires_grad]
        before = [0 if p.grad is None else p.grad.clone() for p in trained] if is_compared else []
        report = super().run(batch, num_microbatches, forward_only)
        for stage in self.stages:
            stage.received = None
        if is_compared:
            self.compare_with_whole_sequences(batch, num_microbatches, trained, before)
        return report

    def compare_with_whole_sequences(self, batch: Any, num_microbatches: int, trained: Any, before: Any) -> None:
        grads = [p.grad for p in trained]
        self.forget_gradients()
        self.uncut().run(batch, num_microbatches)
        pairs = [(grad - old, p.grad) for p, grad, old in zip(trained, grads, before) if p.grad is not None]
        norm = torch.cat([want.flatten() for _, want in pairs]).norm()
        off = torch.cat([(found - want).flatten() for found, want in pairs]).norm()
        close = 1e-11 if norm.dtype is torch.float64 else 1e-4
        assert off <= close * norm, f"slices: gradients are off by {off} of {norm}, those of whole sequences"
        for parameter, grad in zip(trained, grads):
            parameter.grad = grad

"""Captured stages under the schedules: gradients of a pipeline are those of the whole eager model, bit for bit."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import torch
from tools.graphs import skip_without_tracer
from tools.models import HIDDEN, VOCABULARY, Block, assert_same_gradients, batches, loss_of
from tools.pretraining import EXAMPLES, pretrain
from tools.ranks import RankPool, on_ranks
from torch import Tensor, nn

import megapipe
from megapipe import PipelineConfig, StageInfo, distribute_layers, parallel_state, stages_for_rank
from megapipe.graph import capture

skip_without_tracer()

NUM_LAYERS, SEQUENCE, BATCH = 8, 5, 2


class Stage(nn.Module):
    def __init__(self, info: StageInfo) -> None:
        super().__init__()
        self.config = PipelineConfig(hidden_size=HIDDEN)
        self.info = info
        self.layers = nn.ModuleDict()
        for layer in distribute_layers(NUM_LAYERS, info):
            torch.manual_seed(100 + layer)
            self.layers[str(layer)] = Block(0.0)
        torch.manual_seed(99)
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN) if info.is_first else None
        torch.manual_seed(98)
        self.head = nn.Linear(HIDDEN, VOCABULARY) if info.is_last else None
        self.input_tensor: Tensor | None = None

    def set_input_tensor(self, input_tensor: list[Tensor]) -> None:
        self.input_tensor = input_tensor[0]

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.input_tensor if self.embedding is None else self.embedding(tokens)
        for layer in self.layers.values():
            x = layer(x)
        return x if self.head is None else self.head(x)


class LossStage(Stage):
    """The last stage computes the loss, as part of the graph."""


def forward_step(data_iterator: Any, model: nn.Module) -> tuple[Tensor, Any]:
    batch = next(data_iterator)
    if isinstance(model, LossStage):
        return model(batch["tokens"], batch["labels"]), lambda loss: (loss, {"loss": loss.detach()})
    output = model(batch["tokens"])
    return output, lambda logits: ((loss := loss_of(logits, batch["labels"])), {"loss": loss.detach()})


def captured(info: StageInfo) -> Stage:
    tokens = torch.zeros(SEQUENCE, BATCH, dtype=torch.long)
    received = None if info.is_first else torch.empty(SEQUENCE, BATCH, HIDDEN)
    if info.is_last:
        return capture(LossStage(info), (tokens, tokens), loss_of, input_tensor=received)
    return capture(Stage(info), (tokens,), input_tensor=received)


def run(schedule: str, chunks: list[Stage], num_microbatches: int, forward_only: bool = False) -> list[Any]:
    return megapipe.get_forward_backward_func(schedule)(
        forward_step_func=forward_step,
        data_iterator=[batches(num_microbatches) for _ in chunks],
        model=chunks,
        num_microbatches=num_microbatches,
        seq_length=SEQUENCE,
        micro_batch_size=BATCH,
        forward_only=forward_only,
    )


@on_ranks(4)
def test_gradients_under_every_kind_of_schedule(rank: int) -> None:
    """A rank's stages are captured once for all schedules that cut the model alike."""
    num_microbatches = 8
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=4)
    whole = Stage(StageInfo(0, 1))
    losses = []
    for batch in batches(num_microbatches):
        loss = loss_of(whole(batch["tokens"]), batch["labels"])
        losses.append(loss.detach())
        (loss / num_microbatches).backward()
    for schedules in (["1f1b", "zb1p"], ["interleaved_1f1b"], ["zbv", "dualpipev"]):
        chunks = [captured(info) for info in stages_for_rank(schedules[0])]
        parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
        hooked: list[Tensor] = []
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(hooked.append)
        for schedule, recompute in itertools.product(schedules, (None, "all")):
            chunks[0].config.recompute = recompute
            reports = run(schedule, chunks, num_microbatches)
            assert_same_gradients(chunks, whole)
            assert len(hooked) == num_microbatches * len(parameters), "each once for each microbatch"
            validated = run(schedule, chunks, num_microbatches, True)
            if any(chunk.info.is_last for chunk in chunks):
                assert [report["loss"] for report in reports] == losses
                assert [report["loss"] for report in validated] == losses
            hooked.clear()
            for parameter in parameters:
                parameter.grad = None


def test_the_example_prints_the_same_losses(ranks: RankPool, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text((EXAMPLES / "pretrain_gpt.py").read_text())
    arguments = f"--data-path {tmp_path} --train-iters 3 --dropout 0.0"
    (expected,) = ranks.run(1, pretrain, 1, arguments)
    assert all(
        losses == expected for losses in ranks.run(2, pretrain, 2, f"{arguments} --schedule zbv --stage-backend graph")
    )

"""Captured stages under the schedules: gradients of a pipeline are those of the whole eager model, bit for bit."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from tools.against import mean_square, step, unlabelled
from tools.graphs import skip_without_tracer
from tools.models import (
    BATCH,
    HIDDEN,
    SEQUENCE,
    Stage,
    assert_same_gradients,
    assert_same_losses,
    loss_of,
    reference,
    run,
    unseeded_step,
)
from tools.ranks import on_ranks
from torch import Tensor, nn

from megapipe import PipelineConfig, PipelineStage, StageInfo, parallel_state, stages_for_rank
from megapipe.graph import capture
from megapipe.plan import Costs, Settings, make_plan, offload_activations

skip_without_tracer()

NUM_LAYERS = 4  # one for each stage of a V


class LossStage(Stage):
    """The last stage computes the loss, as part of the graph."""


def forward_step(data_iterator: Any, model: nn.Module) -> tuple[Tensor, Any]:
    if not isinstance(model, LossStage):
        return unseeded_step(data_iterator, model)
    batch = next(data_iterator)
    return model(batch["tokens"], batch["labels"]), lambda loss: (loss, {"loss": loss.detach()})


def captured(info: StageInfo) -> Stage:
    tokens = torch.zeros(SEQUENCE, BATCH, dtype=torch.long)
    received = None if info.is_first else torch.empty(SEQUENCE, BATCH, HIDDEN)
    if info.is_last:
        return capture(LossStage(info, NUM_LAYERS), (tokens, tokens), loss_of, input_tensor=received)
    return capture(Stage(info, NUM_LAYERS), (tokens,), input_tensor=received)


@on_ranks(2)
def test_gradients_under_every_kind_of_schedule(rank: int) -> None:
    """A rank's stages are captured once for all schedules that cut the model alike."""
    num_microbatches = 4
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    whole, losses = reference(NUM_LAYERS, num_microbatches)
    for runs in (
        [("1f1b", "recomputed"), ("zb1p", "kept"), ("zb1p", "moved")],
        [("zbv", "moved"), ("dualpipev", "recomputed"), ("dualpipev", "kept")],
    ):
        chunks = [captured(info) for info in stages_for_rank(runs[0][0])]
        parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
        hooked: list[Tensor] = []
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(hooked.append)
        for schedule, way in runs:
            chunks[0].config.recompute = "all" if way == "recomputed" else None
            plan = make_plan(schedule, 2, num_microbatches, settings=Settings(max_pending_weights=1))
            named = offload_activations(plan, Costs(), 1.0) if way == "moved" else schedule
            reports = run(named, chunks, num_microbatches, forward_step_func=forward_step)
            assert_same_gradients(chunks, whole)
            assert len(hooked) == num_microbatches * len(parameters), "each once for each microbatch"
            validated = run(named, chunks, num_microbatches, forward_step_func=forward_step, forward_only=True)
            for one in (reports, validated):
                assert_same_losses(one, losses, chunks)
            hooked.clear()
            for parameter in parameters:
                parameter.grad = None


def test_a_captured_pipeline_stage_is_recomputed() -> None:
    """It was refused since nobody had called the module within, which a graph does in its place."""
    (info,) = stages_for_rank("gpipe", 0, 1)
    gradients = []
    for recompute in (None, "all", 1):
        torch.manual_seed(0)
        chunk = PipelineStage(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), info, PipelineConfig(recompute=recompute))
        capture(chunk, (torch.zeros(2, 4),))
        refusal = pytest.raises(ValueError, match="PipelineStage, which runs as compiled or captured graphs")
        with refusal if recompute == 1 else nullcontext():
            step("gpipe", chunk, unlabelled(torch.ones(3, 2, 4)), mean_square)
        gradients.append([parameter.grad for parameter in chunk.parameters()])
    assert all(map(torch.equal, gradients[0], gradients[1]))


def test_a_captured_stage_that_is_recomputed_is_captured_again_for_other_modes() -> None:
    """What runs the module again was traced in its place, and the step failed: the stage was said to set the state of
    random numbers, which only the replay does."""
    (info,) = stages_for_rank("gpipe", 0, 1)
    gradients = []
    for recompute in (None, "all"):
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
        chunk = PipelineStage(layers, info, PipelineConfig(recompute=recompute))
        capture(layers, (torch.zeros(2, 4),))
        layers[0].requires_grad_(False)
        layers.eval()
        step("gpipe", chunk, unlabelled(torch.randn(3, 2, 4)), mean_square)
        gradients.append([parameter.grad for parameter in layers[1:].parameters()])
    assert all(map(torch.equal, *gradients))

"""Captured stages in a pipeline: what rows of tests/cases do not tell."""

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
from torch import Tensor, nn

from megapipe import PipelineConfig, PipelineStage, StageInfo, stages_for_rank
from megapipe.graph import capture

skip_without_tracer()

NUM_LAYERS, NUM_MICROBATCHES = 2, 3


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


def test_a_loss_within_the_graph() -> None:
    """In training and in validation. Hooks of parameters are called once for each microbatch."""
    whole, losses = reference(NUM_LAYERS, NUM_MICROBATCHES)
    chunks = [captured(info) for info in stages_for_rank("zbv", 0, 1)]
    parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
    hooked: list[Tensor] = []
    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(hooked.append)
    for forward_only in (False, True):
        reports = run("zbv", chunks, NUM_MICROBATCHES, forward_step_func=forward_step, forward_only=forward_only)
        assert_same_losses(reports, losses, chunks)
    assert_same_gradients(chunks, whole)
    assert len(hooked) == NUM_MICROBATCHES * len(parameters)


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

"""The GPT of the examples, slice by slice."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from tools.by_slices import run_by_slices
from tools.pretraining import EXAMPLES
from torch import Tensor

from megapipe import StageInfo

SEQUENCE, BATCH = 24, 2


def gradients(lengths: list[int] | None) -> list[Tensor]:
    sys.path.insert(0, str(EXAMPLES))
    import pretrain_gpt
    from gpt import GPTConfig, GPTStage

    config = GPTConfig(hidden_size=16, num_layers=2, num_attention_heads=2, max_position_embeddings=SEQUENCE)
    model = GPTStage(config, StageInfo(0, 1)).double()
    window = torch.randint(256, (SEQUENCE + 1, BATCH), generator=torch.Generator().manual_seed(0))
    batch = {"tokens": window[:-1], "labels": window[1:]}

    def step() -> Tensor:
        output, loss_func = pretrain_gpt.forward_step(iter([batch]), model)
        logits: Any = output.finish() if hasattr(output, "finish") else output
        return loss_func(logits.double())[0]

    if lengths is None:
        loss = step()
        loss.backward()
    else:
        loss = run_by_slices(step, lengths)
    return [loss.detach(), *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]


@pytest.mark.parametrize("lengths", [[12, 12], [11, 7, 6], [3] * 8], ids=str)
def test_gradients_are_those_of_whole_sequences(lengths: list[int]) -> None:
    """But for the loss, which the example computes in float32."""
    for ours, whole in zip(gradients(lengths), gradients(None), strict=True):
        assert (ours - whole).norm() <= 1e-6 * whole.norm()

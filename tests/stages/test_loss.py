"""The loss is divided as Megatron divides it, to the bit."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megapipe.config import StepConfig
from megapipe.stages import Call
from megapipe.stages.loss import divide_loss

TOKENS = torch.tensor(7)


def gradient(dtype: torch.dtype, m: int, tokens: Tensor | None, **settings: Any) -> Tensor:
    """Of a weight whose square is the loss, as a step computes it."""
    weight = torch.tensor(1.3, dtype=dtype, requires_grad=True)
    config = StepConfig(**settings)
    step = Call(lambda *args: None, [None], [], m, config, torch.device("cpu"), torch.zeros(()), [])
    loss = divide_loss(step, weight * weight, tokens)
    loss.tensor.backward(torch.full_like(loss.tensor, loss.gradient))
    assert weight.grad is not None
    return weight.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("divided", "tokens", "settings"),
    [
        (lambda loss, m: loss / m, None, {}),
        (lambda loss, m: loss * 2 / m, None, {"context_parallel_size": 2}),
        (lambda loss, m: loss / TOKENS / m, TOKENS, {}),
        (lambda loss, m: loss, TOKENS, {"calculate_per_token_loss": True}),
        (lambda loss, m: loss / m, None, {"grad_scale_func": lambda loss: loss}),
    ],
    ids=["microbatches", "context_parallel", "tokens", "per_token_loss", "scaled"],
)
def test_gradients_are_those_of_the_divided_loss(
    dtype: torch.dtype, divided: Callable[[Tensor, int], Tensor], tokens: Tensor | None, settings: dict[str, Any]
) -> None:
    for m in (1, 7, 24):
        weight = torch.tensor(1.3, dtype=dtype, requires_grad=True)
        divided(weight * weight, m).backward()
        assert weight.grad is not None
        assert torch.equal(gradient(dtype, m, tokens, **settings), weight.grad)

"""Log-probabilities by rows: the numbers of torch's log_softmax, with less memory."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import Tensor

from benchmarks.memory import memory_of
from megapipe.training import log_probs, log_probs_of


def plainly(logits: Tensor, tokens: Tensor, temperature: float = 1.0) -> Tensor:
    scaled = logits.float() / temperature
    return scaled.log_softmax(-1).gather(-1, tokens[..., None])[..., 0]


@pytest.mark.parametrize(("dtype", "temperature"), [(torch.float32, 1.0), (torch.bfloat16, 0.7)])
def test_numbers_and_gradients_are_torchs(dtype: torch.dtype, temperature: float) -> None:
    """Of rows that fill no last part, and of logits that are a part of others, as all but the last token's are."""
    torch.manual_seed(0)
    given = torch.randn(3, 8, 50, dtype=dtype)
    tokens, weights = torch.randint(50, (3, 7)), torch.randn(3, 7)
    found = []
    for function in (log_probs_of, plainly):
        logits = given.clone().requires_grad_()
        with mock.patch.object(log_probs, "NUMBERS", 200):  # 4 rows
            result = function(logits[:, :-1], tokens, temperature)
            (result * weights).sum().backward()
        found.append((result.detach(), logits.grad))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


def test_memory() -> None:
    """Beside the logits only their gradient and a few rows; plainly there are three tensors of their size in
    float32."""
    logits = torch.randn(1000, 1000, dtype=torch.bfloat16).requires_grad_()
    tokens, size = torch.randint(1000, (1000,)), 2 * 10**6

    def run(function: object) -> int:
        logits.grad = None
        return memory_of("cpu", lambda: function(logits, tokens).sum().backward()).peak  # type: ignore[operator]

    with mock.patch.object(log_probs, "NUMBERS", 2**15):
        assert run(log_probs_of) < 1.3 * size
    assert run(plainly) > 4 * size


def test_a_token_too_many() -> None:
    with pytest.raises(ValueError, match=r"logits of shape \[2, 5, 9\] are for \[2, 5\] tokens"):
        log_probs_of(torch.zeros(2, 5, 9), torch.zeros(2, 6, dtype=torch.long))

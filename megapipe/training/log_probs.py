"""Log-probabilities of tokens from a model's logits, without a second tensor as large as these."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

NUMBERS = 2**24
"""Logits that are looked at at once, in float32: 64 MiB."""


def log_probs_of(logits: Tensor, tokens: Tensor, temperature: float = 1.0) -> Tensor:
    """How likely each token was: its log-probability in float32, with its gradient. For loss functions of the last
    stage, and for what `forward_only` reports.

    The numbers are those of `(logits.float() / temperature).log_softmax(-1).gather(-1, tokens)`, to the last bit. But
    only some rows of it are in memory at once, in the backward too, beside the gradient of `logits` in their own dtype.

    Args:
        logits: [..., vocabulary]. For the next tokens `logits[:, :-1]`, with `tokens[:, 1:]`.
        tokens: [...], each below the vocabulary. Give any such number where none counts, and leave it out of the loss.

    Returns:
        [...], float32.
    """
    if logits.shape[:-1] != tokens.shape:
        raise ValueError(
            f"logits of shape {list(logits.shape)} are for {list(logits.shape[:-1])} tokens, but tokens have the shape "
            f"{list(tokens.shape)}: give the token that each row of logits is to predict."
        )
    return _LogProbs.apply(logits, tokens, temperature)  # type: ignore[no-any-return, no-untyped-call]


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
        ctx.save_for_backward(logits, tokens)
        ctx.temperature = temperature
        return torch.cat([_of_rows(own, targets, temperature) for own, targets in _rows(logits, tokens)]).view(
            tokens.shape
        )

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        logits, tokens = ctx.saved_tensors
        found = torch.empty_like(logits, memory_format=torch.contiguous_format)
        for own, targets, grads, of_rows in _rows(logits, tokens, grad, found):
            with torch.enable_grad():  # by torch's own backward, which adds in its own order
                rows = own.detach().requires_grad_()
                of_rows.copy_(torch.autograd.grad(_of_rows(rows, targets, ctx.temperature), rows, grads)[0])
        return found, None, None


def _rows(logits: Tensor, tokens: Tensor, grad: Tensor | None = None, found: Tensor | None = None) -> Iterator[Any]:
    """Some rows of each at a time."""
    size = max(1, NUMBERS // logits.shape[-1])
    by_rows = [one.reshape(-1, logits.shape[-1]) for one in (logits, found) if one is not None]
    by_number = [one.reshape(-1) for one in (tokens, grad) if one is not None]
    yield from zip(*(torch.split(one, size) for one in (by_rows[0], *by_number, *by_rows[1:])))


def _of_rows(logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    scaled = logits.float() if temperature == 1.0 else logits.float() / temperature
    return -F.cross_entropy(scaled, tokens, reduction="none")

"""What a call of a schedule returns, for those who check types: `make lint` checks this file, and nothing runs it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor
from typing_extensions import assert_type

from megapipe import get_forward_backward_func

train = get_forward_backward_func("1f1b")


def loss(labels: Tensor, output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    return output.sum(), {"loss": labels.sum()}


def with_reports(batches: Any, chunk: Any) -> tuple[Tensor, partial[tuple[Tensor, dict[str, Tensor]]]]:
    return chunk(batches), partial(loss, batches)


def with_tokens(
    batches: Any, chunk: Any, is_recomputed: bool = False
) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor, float]] | None]:
    return chunk(batches), None


def without_loss(batches: Any, chunk: Any) -> tuple[Tensor, None]:
    return chunk(batches), None


def untold(batches: Any, chunk: Any) -> Any:
    return chunk(batches), None


assert_type(train(with_reports, None, None, 8, seq_length=128), list[dict[str, Tensor]])
assert_type(train(with_tokens, None, None, 8), list[float])
assert_type(train(without_loss, None, None, 8, forward_only=True), list[Any])
assert_type(train(untold, None, None, 8), list[Any])
assert_type(train(with_reports, None, None, 8, collect_non_loss_data=True), list[Any])
train(with_reports, None, None, 8, seq_lenght=128)  # type: ignore[call-overload]
train(loss, None, None, 8)  # type: ignore[arg-type]

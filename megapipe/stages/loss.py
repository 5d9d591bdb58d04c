"""The loss of a microbatch, by the caller's loss function."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .call import Call


class Loss(NamedTuple):
    """A loss to differentiate, and the gradient to begin with.

    That is 1 / num_microbatches where the loss is still to be divided: the same numbers come back, and the graph of
    each microbatch is shorter by a division.
    """

    tensor: Tensor
    gradient: float


def call_loss_func(call: Call, output: Any, loss_func: Any) -> tuple[Tensor, Tensor | None] | None:
    """Call the loss function and note its report in `call`.

    Returns:
        The loss as it was returned, and the number of tokens if `loss_func` returns one, both without dimensions. None
        if nothing is differentiated.

    Raises:
        TypeError: `loss_func` cannot be called, or returned something else than Megatron's loss functions do.
    """
    if loss_func is None and call.forward_only:
        call.results.append(output)
        return None
    if not callable(loss_func):
        raise TypeError(
            f"forward_step_func must return (output, loss_func); on the last stage its loss_func is "
            f"{describe(loss_func)}, which cannot be called."
        )
    if call.collect_non_loss_data:
        call.results.append(loss_func(output, non_loss_data=True))
        return None
    returned = loss_func(output)
    if not isinstance(returned, (tuple, list)) or len(returned) not in (2, 3):
        raise TypeError(
            f"loss_func must return (loss, report) or (loss, num_tokens, report), but it returned {describe(returned)}."
        )
    call.results.append(returned[-1])
    if call.forward_only:
        return None
    loss = returned[0]
    if not isinstance(loss, Tensor) or loss.numel() != 1 or loss.is_complex():
        raise TypeError(
            f"the loss, which loss_func returns first, must be a real tensor of one element, but it is "
            f"{describe(loss)}: take the mean or the sum of a larger one, and leave out .item()."
        )
    return loss, None if len(returned) == 2 else _add_tokens(call, returned[1], loss)


def divide_loss(call: Call, loss: Tensor, num_tokens: Tensor | None) -> Loss:
    """Divide a loss as Megatron does: by the number of microbatches and, where there is one, by that of tokens. For
    Megatron fewer than one are one; here they may be weights."""
    if num_tokens is None:
        # Out of place: the report may share memory with the loss.
        if call.config.context_parallel_size > 1:
            loss = loss * call.config.context_parallel_size
    elif call.config.calculate_per_token_loss:
        return Loss(loss, 1.0)
    else:
        loss = loss / torch.where(num_tokens > 0, num_tokens, 1)
    if call.config.grad_scale_func is not None:  # which is given the loss as it is
        return Loss(loss / call.num_microbatches, 1.0)
    return Loss(loss, 1 / call.num_microbatches)


def _add_tokens(call: Call, num_tokens: Any, loss: Tensor) -> Tensor:
    """Returns the number as a tensor without dimensions."""
    if isinstance(num_tokens, (int, float)):  # filled in on the device: a copy to it would wait for it
        dtype = torch.promote_types(loss.dtype, torch.float32) if isinstance(num_tokens, float) else torch.int64
        num_tokens = torch.full((), num_tokens, dtype=dtype, device=loss.device)
    tensor = torch.as_tensor(num_tokens, device=loss.device)
    if tensor.numel() != 1:
        raise TypeError(f"loss_func must return one number of tokens, but it is {describe(tensor)}.")
    tensor = tensor.reshape(())
    call.num_tokens += tensor.detach()
    return tensor


def scale_loss(call: Call, loss: Tensor) -> Tensor:
    """The loss scaled by `config.grad_scale_func`, if there is one."""
    scaled = loss if call.config.grad_scale_func is None else call.config.grad_scale_func(loss)
    if not isinstance(scaled, Tensor):
        raise TypeError(f"config.grad_scale_func must return the scaled loss, but it is {describe(scaled)}.")
    return scaled


def describe(value: object) -> str:
    """A value in words, like "a tensor of shape [2, 3]"."""
    if isinstance(value, Tensor):
        kind = "complex tensor" if value.is_complex() else "tensor"
        return f"a {kind} of shape {list(value.shape)}"
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    return f"{value!r}" if value is None else f"a {type(value).__name__}"

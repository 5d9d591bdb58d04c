"""Layers whose backward returns the input's gradient at once and defers the weight's.

Each is one autograd Function with the arithmetic of torch's own layer. It keeps the parameter itself, for `defer`, and
saves what torch saves, except for the weight under autocast, which is cast again. A deferred computation refers to the
layer's input and output gradient and to nothing else. Gradients of biases are sums, cheap beside the rest, so they are
returned in B, except for those of convolutions, which torch computes together with the weight's.

On CPU gradients are torch's to the bit: products are rounded before they are added. On other devices they are added in
one go, which rounds once.

Torch's layer runs where nothing can be deferred: the weight is frozen, or was computed from other tensors (weight norm,
parametrizations, `functional_call`), to which autograd must carry its gradient on; it is complex, so its gradient takes
conjugates; torch.compile or a transform of torch.func is at work; or a stage is being captured as a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from .accumulation import has_main_grad
from .aliasing import SavedTensor, save_for_w
from .deferring import defer, deferring_to, is_capturing
from .products import add_weight_gradient, cast, rows, weight_gradient

__all__ = ["conv1d", "conv2d", "embedding", "grouped_linear", "linear", "transposed_linear"]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear` with a deferred weight gradient.

    Args:
        x: [..., in].
        weight: [out, in].
        bias: [out].

    Returns:
        [..., out].
    """
    if not _can_defer(weight):
        return F.linear(x, weight, bias)
    return _Linear.apply(x, weight, bias)  # type: ignore[no-any-return]


def transposed_linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """`torch.addmm(bias, x, weight)` over the last dimension, [..., out], with a deferred weight gradient.

    Args:
        x: [..., in].
        weight: [in, out].
        bias: [out].
    """
    if not _can_defer(weight):
        return torch.addmm(bias, rows(x), weight).view(*x.shape[:-1], weight.shape[1])
    return _TransposedLinear.apply(x, weight, bias)  # type: ignore[no-any-return]


def embedding(tokens: Tensor, weight: Tensor, padding_idx: int | None = None) -> Tensor:
    """`F.embedding` with a deferred weight gradient.

    Args:
        tokens: integers [...].
        weight: [rows, hidden].
        padding_idx: the row that gets no gradient.

    Returns:
        [..., hidden].
    """
    if not _can_defer(weight):
        return F.embedding(tokens, weight, padding_idx)
    return _Embedding.apply(tokens, weight, padding_idx)  # type: ignore[no-any-return]


def conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: str | int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Tensor:
    """`F.conv1d` with deferred gradients of weight and bias.

    Args:
        x: [batch, in, length] or [in, length].
        weight: [out, in / groups, kernel].
        bias: [out].
        stride, padding, dilation, groups: as torch has them; padding may be "same" or "valid".

    Returns:
        [batch, out, new length] or [out, new length].

    Raises:
        ValueError: `padding` is another string, or "same" with a stride.
    """
    if not _can_defer(weight):
        return F.conv1d(x, weight, bias, stride, padding, dilation, groups)
    return _convolution(x, weight, bias, stride, padding, dilation, groups)


def conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: str | int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Tensor:
    """`F.conv2d` with deferred gradients of weight and bias.

    Args:
        x: [batch, in, height, width] or [in, height, width].
        weight: [out, in / groups, kernel height, kernel width].
        bias: [out].
        stride, padding, dilation, groups: as torch has them; padding may be "same" or "valid".

    Returns:
        [batch, out, new height, new width] or [out, new height, new width].

    Raises:
        ValueError: `padding` is another string, or "same" with a stride.
    """
    if not _can_defer(weight):
        return F.conv2d(x, weight, bias, stride, padding, dilation, groups)
    return _convolution(x, weight, bias, stride, padding, dilation, groups)


def grouped_linear(x: Tensor, weight: Tensor, tokens_per_expert: Sequence[int] | Tensor) -> Tensor:
    """A linear layer per expert, without bias, with a deferred weight gradient.

    Args:
        x: [tokens, in], the tokens of the first expert first, then those of the second.
        weight: [experts, out, in].
        tokens_per_expert: one number per expert, 0 allowed. A tensor on an accelerator is read back, which waits for
            it: better a list, or a tensor on the CPU.

    Returns:
        [tokens, out], in the order of x.

    Raises:
        ValueError: `tokens_per_expert` has another length than `weight`, another sum than x has rows, or a negative
            number.
    """
    counts = tokens_per_expert.tolist() if isinstance(tokens_per_expert, Tensor) else list(tokens_per_expert)
    if len(counts) != len(weight) or sum(counts) != len(x) or min(counts, default=0) < 0:
        raise ValueError(
            f"tokens_per_expert must share out the {len(x)} rows of x among {len(weight)} experts, but it is {counts}, "
            f"{sum(counts)} rows for {len(counts)} experts: give one number per expert of weight."
        )
    if not _can_defer(weight):
        return torch.cat([F.linear(part, matrix) for part, matrix in zip(torch.split(x, counts), weight)])
    return _GroupedLinear.apply(x, weight, counts)  # type: ignore[no-any-return]


def _once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """torch's own, used only where it has something to do: its contexts take longer than the backward of a small layer.
    That is where the backward is to have a graph itself (`create_graph`)."""
    with_graph = once_differentiable(backward)

    def chosen(ctx: Any, grad: Tensor) -> Any:
        return (with_graph if torch.is_grad_enabled() else backward)(ctx, grad)

    return chosen


class _Layer(Function):
    @classmethod
    def apply(cls, *args: Any) -> Any:
        """Without torch's own search for what transforms of torch.func have left behind, which takes longer than the
        backward of a small layer. Where one is at work `_can_defer` refuses."""
        return super(Function, cls).apply(*args)  # type: ignore[misc]


class _Linear(_Layer):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.weight = weight
        x, cast_weight, bias = _as_autocast(x, weight, bias)
        ctx.save_for_backward(x, weight)
        output = F.linear(x, cast_weight, bias)
        # Detached from its base, a matrix: autograd refuses to change a view made in here in place, as ReLU may do.
        return output.detach() if output._is_view() else output

    @staticmethod
    @_once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, _, needs_bias = ctx.needs_input_grad
        grad_rows = rows(grad)
        grad_x = grad_rows.mm(cast(weight, x.dtype)).view(x.shape) if needs_x else None
        grad_bias = grad_rows.sum(0) if needs_bias else None
        both = SavedTensor(x.detach()), save_for_w(grad)  # without the graph behind it
        compute = partial(_linear_gradient, *both, ctx.weight.dtype)
        add_to = partial(_add, compute) if x.is_cpu else partial(_add_linear, *both)
        return grad_x, _deferred(ctx, 1, ctx.weight, compute, add_to), grad_bias


class _TransposedLinear(_Layer):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.weight = weight
        x, cast_weight, cast_bias = _as_autocast(x, weight, bias)
        ctx.save_for_backward(x, weight)
        assert cast_bias is not None
        return torch.addmm(cast_bias, rows(x), cast_weight).view(*x.shape[:-1], weight.shape[1]).detach()

    @staticmethod
    @_once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, _, needs_bias = ctx.needs_input_grad
        grad_x = rows(grad).mm(cast(weight, x.dtype).t()).view(x.shape) if needs_x else None
        both = save_for_w(grad), SavedTensor(x.detach())  # as a linear layer from the output to the input
        compute = partial(_linear_gradient, *both, ctx.weight.dtype)
        add_to = partial(_add, compute) if x.is_cpu else partial(_add_linear, *both)
        return grad_x, _deferred(ctx, 1, ctx.weight, compute, add_to), rows(grad).sum(0) if needs_bias else None


def _linear_gradient(x: SavedTensor, grad: SavedTensor, dtype: torch.dtype) -> Tensor:
    return cast(weight_gradient(rows(x.get()), rows(grad.get())), dtype)


def _add_linear(x: SavedTensor, grad: SavedTensor, target: Tensor) -> None:
    add_weight_gradient(target, rows(x.get()), rows(grad.get()))


def _add(compute: Callable[[], Tensor], target: Tensor) -> None:
    target.add_(compute())


class _Embedding(_Layer):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, padding_idx: int | None) -> Tensor:
        ctx.weight = weight
        ctx.save_for_backward(tokens)
        ctx.padding = -1 if padding_idx is None else padding_idx % len(weight)  # no token is -1
        return F.embedding(tokens, weight, padding_idx)

    @staticmethod
    @_once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (tokens,) = ctx.saved_tensors
        both = SavedTensor(tokens), save_for_w(grad)
        compute = partial(_embedding_gradient, *both, len(ctx.weight), ctx.padding)
        add_to = partial(_add_embedding, *both, ctx.padding)
        return None, _deferred(ctx, 1, ctx.weight, compute, add_to), None


def _embedding_gradient(tokens: SavedTensor, grad: SavedTensor, num_rows: int, padding: int) -> Tensor:
    return _sum_rows(tokens.get(), grad.get(), num_rows, padding)


def _sum_rows(tokens: Tensor, grad: Tensor, num_rows: int, padding: int) -> Tensor:
    return torch.ops.aten.embedding_dense_backward(grad, tokens, num_rows, padding, False)  # type: ignore[no-any-return]


def _add_embedding(kept_tokens: SavedTensor, kept_grad: SavedTensor, padding: int, target: Tensor) -> None:
    """First the sums over equal tokens, as autograd has them, then to their rows: a temporary as large as the output
    instead of the weight. No size here depends on the tokens' values, so an accelerator need not be waited for."""
    tokens, grad = kept_tokens.get(), kept_grad.get()
    if not target.is_cpu:
        grad = grad.to(target.dtype)
    if tokens.numel() >= len(target) or grad.dtype != target.dtype:
        target.add_(_sum_rows(tokens, grad, len(target), padding))
        return
    tokens = tokens.reshape(-1).long()
    in_order, order = tokens.sort()
    num_tokens = len(order)
    is_new = in_order[1:] != in_order[:-1]
    sums_of = torch.zeros_like(order)  # which sum each token belongs to
    sums_of[order[1:]] = is_new.cumsum(0)
    rows_of = torch.zeros_like(order).scatter_(0, sums_of, tokens)  # unused sums are 0: any row will do
    sums_of = sums_of.masked_fill_(tokens == padding, num_tokens)
    sums = _sum_rows(sums_of, rows(grad), num_tokens + 1, num_tokens)
    target.index_add_(0, rows_of, sums[:-1])


class _Convolution(_Layer):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, *options: Any) -> Tensor:
        ctx.weight, ctx.bias, ctx.options = weight, bias, options
        x, cast_weight, bias = _as_autocast(x, weight, bias)
        ctx.save_for_backward(x, weight)
        return torch.convolution(x, cast_weight, bias, *options)

    @staticmethod
    @_once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, _, needs_bias, *_ = ctx.needs_input_grad
        mask = [True, False, False]
        grad_x = _convolution_backward(grad, x, weight.to(x.dtype), ctx.options, mask)[0] if needs_x else None
        gradients = _ConvolutionGradients(
            SavedTensor(x.detach()), save_for_w(grad), ctx.weight, ctx.options, needs_bias
        )
        grads: list[Tensor | None] = [None, None]
        for number, parameter in enumerate((ctx.weight, ctx.bias) if needs_bias else (ctx.weight,), 1):
            compute = partial(gradients.take, number, parameter.dtype)
            grads[number - 1] = _deferred(ctx, number, parameter, compute, partial(_add, compute))
        return grad_x, *grads, *[None] * len(ctx.options)


def _convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: int | Sequence[int],
    padding: str | int | Sequence[int],
    dilation: int | Sequence[int],
    groups: int,
) -> Tensor:
    num_dims = weight.dim() - 2
    stride, dilation = _per_dimension(stride, num_dims), _per_dimension(dilation, num_dims)
    if isinstance(padding, str):
        x, padding = _pad(x, weight, padding, stride, dilation)
    is_batched = x.dim() == weight.dim()
    options = (stride, _per_dimension(padding, num_dims), dilation, False, [0] * num_dims, groups)
    batch = x if is_batched else x.unsqueeze(0)
    output: Tensor = _Convolution.apply(batch, weight, bias, *options)
    return output if is_batched else output.squeeze(0)


def _pad(
    x: Tensor, weight: Tensor, padding: str, stride: Sequence[int], dilation: Sequence[int]
) -> tuple[Tensor, list[int]]:
    """The padding on both sides for "same" and "valid", and x padded by the rest of it, as torch does."""
    if padding not in ("same", "valid"):
        raise ValueError(f'padding must be "same", "valid", or numbers, got "{padding}".')
    if padding == "valid":
        return x, [0] * len(dilation)
    if any(step != 1 for step in stride):
        raise ValueError(f'padding "same" needs stride 1, got {list(stride)}: give the padding in numbers.')
    totals = [step * (size - 1) for step, size in zip(dilation, weight.shape[2:])]
    remaining = [side for total in reversed(totals) for side in (0, total % 2)]
    return F.pad(x, remaining) if any(remaining) else x, [total // 2 for total in totals]


def _per_dimension(value: int | Sequence[int], num_dims: int) -> list[int]:
    if isinstance(value, int):
        return [value] * num_dims
    return list(value) * num_dims if len(value) == 1 else list(value)


def _convolution_backward(
    grad: Tensor, x: Tensor, weight: Tensor, options: tuple[Any, ...], mask: list[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    backward = torch.ops.aten.convolution_backward
    return backward(grad, x, weight, None, *options, mask)  # type: ignore[no-any-return]


class _ConvolutionGradients:
    """Of weight and bias, which torch computes together: the first call of `take` keeps the other one."""

    def __init__(
        self, x: SavedTensor, grad: SavedTensor, weight: Tensor, options: tuple[Any, ...], needs_bias: bool
    ) -> None:
        self._needs = x, grad, weight.detach(), options, [False, True, needs_bias]
        self._computed: dict[int, Tensor] = {}

    def take(self, number: int, dtype: torch.dtype) -> Tensor:
        """1 is that of the weight, 2 of the bias, as among the inputs of a convolution."""
        if number not in self._computed:
            x, kept_grad, weight, options, mask = self._needs
            grad = kept_grad.get()
            same_dtype = weight.to(grad.dtype)  # which gives its shape and layout, not its values
            both = _convolution_backward(grad, x.get(), same_dtype, options, mask)
            self._computed = {n: both[n] for n in (1, 2) if mask[n]}
        return self._computed.pop(number).to(dtype)


class _GroupedLinear(_Layer):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, counts: list[int]) -> Tensor:
        ctx.weight, ctx.counts = weight, counts
        x, cast_weight, _ = _as_autocast(x, weight, None)
        ctx.save_for_backward(x, weight)
        output = x.new_empty(len(x), weight.shape[1])
        for part, matrix, out in zip(torch.split(x, counts), cast_weight, torch.split(output, counts)):
            torch.mm(part, matrix.t(), out=out)
        return output

    @staticmethod
    @_once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = torch.empty_like(x)
            matrices = weight.to(x.dtype)
            for part, matrix, out in zip(torch.split(grad, ctx.counts), matrices, torch.split(grad_x, ctx.counts)):
                torch.mm(part, matrix, out=out)
        both = SavedTensor(x.detach()), save_for_w(grad)
        compute = partial(_grouped_gradient, *both, ctx.counts, ctx.weight.dtype)
        add_to = partial(_add, compute) if x.is_cpu else partial(_add_grouped, *both, ctx.counts)
        return grad_x, _deferred(ctx, 1, ctx.weight, compute, add_to), None


def _grouped_gradient(kept_x: SavedTensor, kept_grad: SavedTensor, counts: list[int], dtype: torch.dtype) -> Tensor:
    x, grad = kept_x.get(), kept_grad.get()
    result = x.new_empty(len(counts), grad.shape[1], x.shape[1])
    for part, part_grad, out in zip(torch.split(x, counts), torch.split(grad, counts), result):
        torch.mm(part_grad.t(), part, out=out)
    return result.to(dtype)


def _add_grouped(x: SavedTensor, grad: SavedTensor, counts: list[int], target: Tensor) -> None:
    for part, part_grad, out in zip(torch.split(x.get(), counts), torch.split(grad.get(), counts), target):
        if len(part):
            add_weight_gradient(out, part, part_grad)


def _can_defer(weight: Tensor) -> bool:
    if not weight.is_leaf or not weight.requires_grad or not torch.is_grad_enabled() or weight.is_complex():
        return False
    return not is_capturing() and not torch.compiler.is_compiling() and not torch._C._are_functorch_transforms_active()


def _deferred(
    ctx: Any, number: int, parameter: Tensor, compute: Callable[[], Tensor], add_to: Callable[[Tensor], None]
) -> Tensor | None:
    """Defer the gradient of a parameter, given with its number among the inputs. Returns it where autograd must have
    it: hooks of the parameter see a gradient before it is added, and `torch.autograd.grad` may have asked for it. And
    on CPU where nothing is deferred, since autograd adds up the contributions of one backward before it adds them to
    the gradient; elsewhere each is added in place, without a temporary of its size."""
    if parameter._backward_hooks or not parameter.is_leaf:
        return compute()
    deferred = deferring_to()
    if deferred is None and parameter.is_cpu and not has_main_grad(parameter):
        return compute()
    try:
        is_wanted = torch._C._will_engine_execute_node(ctx.next_functions[number][0])
    except RuntimeError:  # torch.autograd.grad asked for it
        return compute()
    if not is_wanted:  # neither is it by torch.autograd.grad of other tensors
        return None
    if deferred is None:
        defer(parameter, compute, add_to)
    else:
        deferred.add(parameter, compute, add_to)
    return None


def _as_autocast(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """The operands as torch.autocast casts them. Its own casts must not happen within a Function: it would remember the
    cast weight, which is without a graph there, for other users of the weight."""
    if not torch._C._is_any_autocast_enabled():
        return x, weight, bias
    device_type = x.device.type
    if not torch.amp.is_autocast_available(device_type) or not torch.is_autocast_enabled(device_type):
        return x, weight, bias
    dtype = torch.get_autocast_dtype(device_type)
    x, weight = (tensor if tensor.dtype == torch.float64 else tensor.to(dtype) for tensor in (x, weight))
    return x, weight, bias if bias is None or bias.dtype == torch.float64 else bias.to(dtype)

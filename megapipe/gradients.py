"""Gradients that are added up over several calls, with the tokens that they are to be divided by.

They end by an event: the call whose `finalize_model_grads_func` takes them, a step or a `zero_grad()` of megapipe's
optimizers, or `discard_gradients`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from weakref import ref

from torch import Tensor, nn

from .chunks import Models, as_list, as_sharded, trained_parameters, unwrap
from .structure import kept_for


@dataclass
class _AddedUp:
    """What calls have left behind whose gradients nobody has finalized."""

    tokens: Tensor
    """Their sum, of shape [], in float64."""
    gradients: list[tuple[ref[nn.Parameter], int]] = field(default_factory=list)
    """The parameters that had a gradient after the last of these calls, and the gradients' versions."""
    was_cleared: bool = False
    """Whether such gradients were cleared before another call, and nothing said so."""

    def is_cleared(self) -> bool:
        """Whether all gradients are gone, or zeros. Where somebody has written to them, their values are read."""
        found = [(parameter, version) for one, version in self.gradients if (parameter := one()) is not None]
        return bool(found) and all(_is_zero(parameter.grad, version) for parameter, version in found)


def _is_zero(grad: Tensor | None, version: int) -> bool:
    return grad is None or (grad._version != version and not grad.count_nonzero().item())


def check_added_up(models: Sequence[nn.Module], are_finalized: bool) -> None:
    """Called before a training step that counts tokens.

    Args:
        are_finalized: the step finalizes what has been added up.

    Raises:
        ValueError: gradients of earlier calls are gone, but their tokens would count.
    """
    added: _AddedUp | None = _kept(models).get(_AddedUp)
    if added is None:
        return
    added.was_cleared = added.was_cleared or added.is_cleared()
    if added.was_cleared and are_finalized:
        raise ValueError(
            "gradients of an earlier call with calculate_per_token_loss were cleared without being finalized, and "
            "their tokens would count in this step: call megapipe.discard_gradients(chunks) on all ranks where you "
            "drop gradients, or zero_grad() of a PipelinedOptimizer."
        )


def add_tokens(models: Sequence[nn.Module], tokens: Tensor) -> None:
    """Keep the tokens of a call whose gradients go on to be added up."""
    added = _kept(models).setdefault(_AddedUp, _AddedUp(tokens.new_zeros(())))
    added.tokens += tokens
    trained = [parameter for _, parameter in trained_parameters(models)]
    # A shard that has no gradient may have one that is still to be reduced.
    added.gradients = [(ref(p), p.grad._version) for p in trained if p.grad is not None and as_sharded(p) is None]


def take_tokens(models: Sequence[nn.Module]) -> Tensor | int:
    """The tokens of earlier calls, which end with this."""
    added: _AddedUp | None = _kept(models).pop(_AddedUp, None)
    return 0 if added is None else added.tokens


def forget_tokens(models: Sequence[nn.Module]) -> None:
    """What was added up has been used, or dropped."""
    _kept(models).pop(_AddedUp, None)


def discard_gradients(model: Models) -> None:
    """Drop the gradients of all calls since the last optimizer step, and the tokens that they would be divided by.

    Every rank calls it, where a call's gradients are not to be used: after a spike of the loss, say.

    `.grad` becomes None, `main_grad` zeros.

    Args:
        model: this rank's chunks, or the only one.
    """
    chunks = as_list(model)
    for chunk in chunks:
        for parameter in chunk.parameters():
            parameter.grad = None
            if (main_grad := getattr(parameter, "main_grad", None)) is not None:
                main_grad.zero_()
    forget_tokens(chunks)


def _kept(models: Sequence[nn.Module]) -> dict[object, _AddedUp]:
    return kept_for(unwrap(models[0]))

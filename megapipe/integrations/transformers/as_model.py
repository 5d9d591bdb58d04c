"""What a trainer takes for a model, and for all ranks: one stage, a rank's chunks, and the replicas."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...gradients import discard_gradients


class Sent(BaseException):
    """Leaves a trainer's step on a stage that has something to send. No `except Exception` of a trainer catches it."""

    def __init__(self, message: Any) -> None:
        self.message = message


class StageAsModel:
    """What a trainer's step gets for a model: one stage."""

    def __init__(self, chunk: Any, accelerator: Any) -> None:
        self._chunk, self._accelerator = chunk, accelerator
        self._first: dict[str, Any] | None = None

    def __call__(self, input_ids: Tensor | None = None, **inputs: Any) -> Any:
        chunk, inputs = self._chunk, {"input_ids": input_ids, **inputs}
        self._check_same(inputs)
        with self._accelerator.autocast():
            if not chunk.stage.is_last:
                inputs.pop("fused_lm_head", None)  # which is for a forward that trl puts on the last stage
                raise Sent(chunk(**inputs))
            with chunk.at_the_end():
                output = chunk(**inputs, return_dict=True)
        utils: Any = importlib.import_module("accelerate.utils")
        return utils.convert_to_fp32(output) if self._accelerator.native_amp else output

    def _check_same(self, inputs: dict[str, Any]) -> None:
        """Raises ValueError where the model is called for another batch than the first time."""
        first = self._first = self._first or inputs
        for name in ("input_ids", "inputs_embeds", "attention_mask", "position_ids"):
            a, b = first.get(name), inputs.get(name)
            is_same = a is b or (isinstance(a, Tensor) and isinstance(b, Tensor) and torch.equal(a, b))
            if not is_same and self._chunk.stage.num_stages > 1:
                raise ValueError(
                    f"compute_loss calls the model with other {name} than before, of which earlier stages know "
                    "nothing: call it for one batch only, as many times as you like."
                )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._chunk, name)


class PipelineModel(nn.Module):
    """This rank's chunks where a trainer has a wrapped model.

    Attributes:
        held: the microbatches of the next step.
    """

    def __init__(self, chunks: list[Any]) -> None:
        super().__init__()
        self.chunks = nn.ModuleList(chunks)
        self.held: list[Any] = []

    def forward(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError(
            "the model is spread over a pipeline and runs in training_step and prediction_step: put PipelineMixin in "
            "front of the class that overrides these."
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.held.clear()
        discard_gradients(list(self.chunks))


def gather(group: dist.ProcessGroup, value: Any) -> Any:
    """accelerate's gather, over replicas in the place of all ranks: on the last stages alone they meet."""
    if isinstance(value, (tuple, list)):
        return type(value)(gather(group, one) for one in value)
    if isinstance(value, Mapping):
        return type(value)({name: gather(group, one) for name, one in value.items()})  # type: ignore[call-arg]
    value = value.contiguous()
    value = value[None] if value.ndim == 0 else value
    parts = [torch.empty_like(value) for _ in range(group.size())]
    dist.all_gather(parts, value, group=group)
    return torch.cat(parts)

"""A model of transformers as one stage of a pipeline."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...plan import StageInfo
from .adapters import WithAdapters
from .config import ChunkConfig
from .cut import Absent, Parts, cut, find_parts
from .sliced import of_slice

__all__ = ["HuggingFaceStage", "Routers", "as_stage", "find_routers"]

FOR_FIRST = ("inputs_embeds", "token_type_ids")
FOR_LAST = ("shift_labels", "logits_to_keep")


class Routers(NamedTuple):
    """The routers of a model with experts."""

    num_before: int
    """Layers in the stages before."""
    num_own: int
    num_experts: int
    """How many experts each of them has."""


class HuggingFaceStage(WithAdapters):
    """What a chunk is, besides being a model of transformers. Its batches are that model's: tensors are [batch,
    sequence], and hidden states [batch, sequence, hidden]."""

    config: ChunkConfig
    stage: StageInfo
    """Which stage of how many this is."""
    layers: range
    """The numbers of its layers in the whole model."""
    parts: Parts
    routers: Routers | None
    stands_in: Tensor | None
    """An empty tensor, on a stage without weights, that has their dtype and device."""
    _received: Any = None

    @property
    def dtype(self) -> torch.dtype:
        return self._of_weights("dtype")  # type: ignore[no-any-return]

    @property
    def device(self) -> torch.device:
        return self._of_weights("device")  # type: ignore[no-any-return]

    def _of_weights(self, name: str) -> Any:
        """The answer of the model, which looks at its weights."""
        return getattr(super() if self.stands_in is None else self.stands_in, name)

    @property
    def own_layers(self) -> list[nn.Module]:
        """The layers of this stage: what `fully_shard` is called with, for instance."""
        return [layer for layer in self.parts.layers_of(self) if not isinstance(layer, Absent)]

    def set_input_tensor(self, input_tensor: Any) -> None:
        """Called before forward and backward with what the stage before returned: a list of one tensor, or a dict."""
        self._received = input_tensor

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | None = None,
        **others: Any,
    ) -> Any:
        """Run this stage on a microbatch, given in the words of the whole model: each stage takes what it needs.

        Returns on the last stage the loss, or the logits where there are no `labels`. Elsewhere hidden states, and with
        them the routers' logits where the loss is to balance the load of experts.
        """
        batch = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            "labels": labels,
            "num_items_in_batch": num_items_in_batch,
            **others,
        }
        with of_slice(self, batch) as own:
            return self._run(**own)

    def _run(self, input_ids: Any, labels: Any, num_items_in_batch: Any, **batch: Any) -> Any:
        """Run the stage on whole sequences or on a slice of them."""
        batch["use_cache"] = False
        routed = None
        if self.stage.is_first:
            batch["input_ids"] = input_ids
        else:
            for name in FOR_FIRST:
                batch.pop(name, None)
            batch["inputs_embeds"], routed = self._take_input()
        with _telling_of_tracing(batch.get("input_ids", batch.get("inputs_embeds"))):
            if not self.stage.is_last:
                return self._run_decoder(batch, routed)
            if labels is None:
                return self._run_to_end(batch, routed).logits
            return self._run_to_end(batch | {"labels": labels, "num_items_in_batch": num_items_in_batch}, routed).loss

    def _take_input(self) -> tuple[Tensor, Tensor | None]:
        if isinstance(self._received, dict):
            return self._received["hidden_states"], self._received.get("router_logits")
        (hidden,) = self._received
        return hidden, None

    def _run_decoder(self, batch: dict[str, Any], routed: Tensor | None) -> Any:
        for name in FOR_LAST:
            batch.pop(name, None)
        output = self.parts.decoder_of(self)(**batch)
        hidden: Tensor = output.last_hidden_state
        if not self._balances_load:
            return hidden
        return _message(hidden, _joined(routed, output.router_logits, self._router_dtype(hidden.dtype)))

    def _router_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """What linear layers return, for hidden states of `dtype`."""
        return (self.config.autocast_dtype or torch.bfloat16) if self.config.enable_autocast else dtype

    def _run_to_end(self, batch: dict[str, Any], routed: Tensor | None) -> Any:
        """The whole model's forward, whose decoder adds the routers of earlier stages to its own."""

        def add_earlier(decoder: nn.Module, inputs: Any, output: Any) -> None:
            output["router_logits"] = (*routed.unbind(), *output.router_logits)  # type: ignore[union-attr]

        hook = None if routed is None else self.parts.decoder_of(self).register_forward_hook(add_earlier)
        try:
            return super().forward(**batch)
        finally:
            if hook is not None:
                hook.remove()

    @property
    def _balances_load(self) -> bool:
        return self.routers is not None and bool(getattr(self.config, "output_router_logits", False))

    def infer_stage_inputs_from_pipeline_inputs(self, inputs: Any, num_microbatches: int) -> Any:
        return self._expected(inputs, num_microbatches, is_output=False)

    def infer_stage_outputs_from_pipeline_inputs(self, inputs: Any, num_microbatches: int) -> Any:
        return self._expected(inputs, num_microbatches, is_output=True)

    def _expected(self, inputs: Any, num_microbatches: int, is_output: bool) -> Any:
        """The message over the boundary before this stage, or behind it, on the meta device. None where the schedule is
        called without sizes."""
        if "input_ids" not in inputs:
            return None  # found in the first step
        num_sequences, seq_length = inputs["input_ids"].shape
        batch_size = num_sequences // num_microbatches
        dtype: Any = self.config.pipeline_dtype or self.dtype
        hidden = torch.empty(batch_size, seq_length, self.config.hidden_size or 0, dtype=dtype)
        if not self._balances_load:
            return hidden
        assert self.routers is not None
        num_routers = self.routers.num_before + (self.routers.num_own if is_output else 0)
        if not num_routers:
            return _message(hidden, None)
        shape = num_routers, batch_size * seq_length, self.routers.num_experts
        return _message(hidden, torch.empty(shape, dtype=self._router_dtype(dtype)))


@contextmanager
def _telling_of_tracing(tensor: Any) -> Iterator[None]:
    """While a stage is captured: transformers then makes masks without a look at the values of tensors."""
    functional = importlib.import_module("torch._subclasses.functional_tensor").FunctionalTensor
    if not isinstance(tensor, functional):
        yield
        return
    compiler: Any = torch.compiler  # which transformers asks
    before = compiler._is_compiling_flag
    compiler._is_compiling_flag = True
    try:
        yield
    finally:
        compiler._is_compiling_flag = before


def _message(hidden: Tensor, routed: Tensor | None) -> dict[str, Tensor]:
    message = {"hidden_states": hidden}
    if routed is not None:
        message["router_logits"] = routed
    return message


def _joined(earlier: Tensor | None, own: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor | None:
    """[routers, tokens, experts], or None where there are no routers yet."""
    parts = [] if earlier is None else [earlier]
    parts += [torch.stack(own).to(dtype)] if own else []
    return torch.cat(parts) if parts else None


def find_routers(parts: Parts, decoder: Any, own: range) -> Routers | None:
    """The routers of a decoder that is still whole: those whose logits transformers records. None where there are
    none."""
    recorded = (getattr(decoder, "_can_record_outputs", None) or {}).get("router_logits")
    kind = getattr(recorded, "target_class", recorded)
    if not isinstance(kind, type):
        return None
    routers = [[m for m in layer.modules() if isinstance(m, kind)] for layer in getattr(decoder, parts.layers)]
    found = [router for of_layer in routers for router in of_layer]
    if not found:
        return None
    num_before, num_own = (sum(len(routers[n]) for n in numbers) for numbers in (range(own.start), own))
    router: Any = found[0]
    return Routers(num_before, num_own, len(next(router.parameters())))


_classes: dict[type, type] = {}


def as_stage(model: Any, stage: StageInfo, layers: range) -> None:
    """Leave in a whole model what belongs to `stage`, and make it a `HuggingFaceStage` too: its class is swapped for
    one derived from both, of the same name, by which transformers finds things."""
    parts, dtype, device = find_parts(model), model.dtype, model.device
    routers = find_routers(parts, parts.decoder_of(model), layers)
    cut(model, parts, stage, layers)
    own = type(model)
    if own not in _classes:
        _classes[own] = type(own.__name__, (HuggingFaceStage, own), {"__module__": own.__module__})
    has_weights = any(True for _ in model.parameters())
    model.__class__ = _classes[own]
    model.stage, model.layers, model.parts, model.routers = stage, layers, parts, routers
    stands_in = None if has_weights else torch.empty(0, dtype=dtype, device=device)
    model.register_buffer("stands_in", stands_in, persistent=False)

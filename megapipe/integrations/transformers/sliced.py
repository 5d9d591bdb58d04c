"""Models of transformers whose sequences are cut into slices: attention and masks that go on from slice to slice, by
the interfaces that transformers has for both."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ... import slices

IMPLEMENTATION = "megapipe_slices"
"""The name of this attention in transformers."""

_documents: Tensor | None = None
"""[batch, sequence]: of packed sequences, the document of each position, while a model runs."""


def register() -> None:
    """Let transformers know this attention and its masks by their name."""
    modeling, masking = (importlib.import_module(f"transformers.{name}_utils") for name in ("modeling", "masking"))
    modeling.ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, _attend)
    masking.ALL_MASK_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, _mask)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    for name in ("softcap", "s_aux", "position_bias"):
        if others.get(name) is not None:
            raise ValueError(
                f"{type(module).__name__} has {name}, which attention in slices does not: leave num_sequence_slices 1."
            )
    mixed = slices.attention(
        query,
        key,
        value,
        owner=module,
        attn_mask=attention_mask,
        dropout_p=dropout,
        scale=scaling,
        enable_gqa=key.shape[1] != query.shape[1],
    )
    return mixed.transpose(1, 2).contiguous(), None


def _mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Any,
    q_offset: int = 0,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    **others: Any,
) -> Tensor | None:
    """The mask of a slice's positions by those up to its end. None where it is causal and no more."""
    masking: Any = importlib.import_module("transformers.masking_utils")
    if allow_is_causal_skip and attention_mask is None and mask_function is masking.causal_mask_function:
        return None
    if (this := slices.current()) is not None:
        q_offset, kv_length = this.start, this.stop
    mask: Tensor = masking.sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        allow_is_causal_skip=False,
        **others,
    )
    if _documents is not None:
        mask = mask & (slices.cut(_documents, 1)[:, None, :, None] == _documents[:, None, None, :kv_length])
    return mask


@contextmanager
def of_slice(model: Any, batch: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """What `model` is called with for the current slice, given what it is called with for whole sequences.

    Raises:
        ValueError: if the model's attention is another, or something in the batch cannot be cut.
    """
    global _documents
    this = slices.current()
    if this is None:
        yield batch
        return
    if model.config._attn_implementation != IMPLEMENTATION:
        raise ValueError(
            f"{type(model).__name__} has attention {model.config._attn_implementation!r}, which sees no slice but its "
            "own: pass num_sequence_slices to build_chunks."
        )
    if model.routers is not None and getattr(model.config, "output_router_logits", False):
        raise ValueError("a loss that balances experts is not a sum over slices: set output_router_logits=False.")
    batch = dict(batch)
    mask, positions = batch.get("attention_mask"), batch.get("position_ids")
    if mask is not None and mask.dim() != 2:
        raise ValueError(f"attention_mask must be [batch, sequence] to be cut into slices, got {list(mask.shape)}.")
    documents = None
    if positions is None:
        batch["position_ids"] = slices.positions(this.length, model.device)[None]
    elif mask is None:
        documents = importlib.import_module("transformers.masking_utils").find_packed_sequence_indices(positions)
        if documents is not None and getattr(model.config, "attention_chunk_size", None) is not None:
            raise ValueError(
                "packed sequences whose attention is in chunks cannot be cut into slices: do not pack them."
            )
        mask = None if documents is None else torch.ones_like(positions)  # so that it does not look for them itself
    batch["attention_mask"] = None if mask is None else mask[:, : this.stop]
    if batch.get("labels") is not None:
        whole = batch["shift_labels"] = shifted(batch)
        if batch.get("num_items_in_batch") is None:
            batch["num_items_in_batch"] = (whole != -100).sum()
    for name in ("input_ids", "inputs_embeds", "token_type_ids", "labels", "shift_labels"):
        if batch.get(name) is not None:
            batch[name] = slices.cut(batch[name], 1).contiguous()  # which transformers views as flat
    if positions is not None:
        batch["position_ids"] = slices.cut(positions, 1)
    before, _documents = _documents, documents
    try:
        yield batch
    finally:
        _documents = before


def shifted(batch: Any) -> Tensor:
    """The label of each position: [batch, sequence], -100 where nothing is to be predicted."""
    if batch.get("shift_labels") is not None:
        return batch["shift_labels"]  # type: ignore[no-any-return]
    return nn.functional.pad(batch["labels"][..., 1:], (0, 1), value=-100)

"""Models of transformers with sequences in slices: full attention, sliding windows, chunks, packing and padding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tools.ranks import on_ranks

pytest.importorskip("transformers")

import torch
from tools import hf_kinds, hf_models

from megapipe.integrations.transformers import CannotCutError, build_chunks, count_items

PACKED = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6], [0, 1, 0, 1, 2, 3, 4, 5, 6, 7, 8, 0]])
PADDED = torch.tensor([[0] * 3 + [1] * 9, [1] * 10 + [0] * 2])


def microbatches_of(kind: str) -> list[dict[str, Any]]:
    microbatches: list[dict[str, Any]] = list(hf_models.batches(3))
    for batch in microbatches:
        if kind == "packed":
            batch["position_ids"] = PACKED
        if kind == "padded":
            batch["attention_mask"] = PADDED
            batch["labels"] = batch["labels"].masked_fill(PADDED == 0, -100)
    return microbatches


@pytest.mark.parametrize(
    ("name", "kind", "counted"),
    [
        ("llama", "whole", True),
        ("llama-tied", "padded", False),
        ("mistral", "packed", True),
        ("gemma3", "whole", False),
        ("llama4", "padded", True),
    ],
)
@on_ranks(2)
def test_slices_have_the_gradients_of_the_whole_model(
    rank: int, name: str, kind: str, counted: bool, tmp_path: Path
) -> None:
    model, chunks = hf_models.load_both(
        name, tmp_path, "seq1f1b", num_sequence_slices=3, sequence_slice_lengths=[5, 4, 3]
    )
    microbatches = microbatches_of(kind)
    if counted:
        microbatches = count_items(microbatches)
    losses = hf_models.reference(model, microbatches)
    reports = hf_models.run("seq1f1b", chunks, microbatches)
    if chunks[0].stage.is_last:
        torch.testing.assert_close([report["loss"] for report in reports], losses, rtol=1e-6, atol=1e-6)
    whole = dict(model.named_parameters(remove_duplicate=False))
    for parameter_name, parameter in chunks[0].named_parameters():
        wanted = whole[parameter_name].grad
        assert (parameter.grad is None) == (wanted is None)
        if parameter.grad is not None and wanted is not None:
            assert (parameter.grad - wanted).norm() <= 1e-5 * wanted.norm(), parameter_name


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("mamba", "MambaForCausalLM cannot be cut into slices: .* gradient"),  # states are handed on
        ("bloom", "BloomForCausalLM cannot be cut into slices: .* gradient"),
        ("falcon", "FalconForCausalLM cannot be cut into slices: .*KeyError"),
        ("gemma2", "Gemma2ForCausalLM cannot be cut into slices: .*Gemma2Attention has softcap"),
    ],
)
def test_kinds_that_slices_compute_otherwise_are_refused(kind: str, message: str) -> None:
    """They had losses and gradients of something else, without a word: by 34 kinds of transformers."""
    with pytest.raises(CannotCutError, match=message):  # on every rank alike
        build_chunks(hf_kinds.make_config(kind), "seq1f1b", num_sequence_slices=2)


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [("mixtral", "whole", "set output_router_logits=False"), ("llama4", "packed", "do not pack them")],
)
@on_ranks(1)
def test_what_cannot_be_cut_is_an_error(rank: int, name: str, kind: str, message: str, tmp_path: Path) -> None:
    hf_models.save_on_first(hf_models.make_model(name), tmp_path)
    chunks = hf_models.load_chunks(tmp_path, "seq1f1b", num_sequence_slices=3)
    with pytest.raises(ValueError, match=message):
        hf_models.run("seq1f1b", chunks, microbatches_of(kind))

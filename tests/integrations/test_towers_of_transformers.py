"""Models of transformers that read images: towers on the first stage, layers of text on all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tools.ranks import on_ranks

pytest.importorskip("transformers")

import torch.distributed as dist
import transformers
from tools import hf_models, hf_towers

from megapipe.integrations.transformers import build_chunks, count_items, load_weights, save_pretrained

FOUR_RANKS = ("qwen2_vl", "gemma3")
"""Kinds that run on four ranks too."""


def load(kind: str, folder: Path, schedule: str, **options: Any) -> tuple[Any, list[Any]]:
    """The whole model, and chunks that have read its weights."""
    model = hf_towers.make_model(kind)
    hf_models.save_on_first(model, folder)
    hf_models.initialise(dist.get_world_size())
    chunks = build_chunks(folder, schedule, seed=None, **options)
    load_weights(chunks, folder)
    for chunk in chunks:
        chunk.eval()
    return model, chunks


def check(model: Any, chunks: list[Any], schedule: str, microbatches: list[dict[str, Any]]) -> None:
    microbatches = count_items(microbatches)
    losses = hf_models.reference(model, microbatches)
    hf_models.assert_same_losses(hf_models.run(schedule, chunks, microbatches), losses, chunks)
    hf_models.assert_same_gradients(chunks, model)


def run_all(kind: str, schedule: str, folder: Path) -> None:
    """One step with the towers trained, one with them frozen, and files."""
    batches = hf_towers.batches(kind, 4)
    model, chunks = load(kind, folder / "given", schedule, example=batches[0])
    check(model, chunks, schedule, batches)
    for part in (model, *chunks):
        part.zero_grad()
        for name, parameter in part.named_parameters():
            parameter.requires_grad = ".layers." in name and "vision" not in name and "visual" not in name
    check(model, chunks, schedule, batches)
    save_pretrained(chunks, folder / "saved")
    if dist.get_rank() == 0:
        saved = transformers.AutoModelForImageTextToText.from_pretrained(folder / "saved")
        hf_models.assert_same_weights(saved, model)


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
@pytest.mark.parametrize("kind", hf_towers.KINDS)
@on_ranks(2)
def test_gradients_and_files_are_those_of_the_whole_model(rank: int, kind: str, schedule: str, tmp_path: Path) -> None:
    run_all(kind, schedule, tmp_path)


@pytest.mark.parametrize("kind", FOUR_RANKS)
@on_ranks(4)
def test_on_four_ranks(rank: int, kind: str, tmp_path: Path) -> None:
    run_all(kind, "1f1b", tmp_path)


@on_ranks(2)
def test_some_microbatches_have_no_image(rank: int, tmp_path: Path) -> None:
    batches = hf_towers.batches("qwen2_vl", 4)
    model, chunks = load("qwen2_vl", tmp_path, "1f1b", example=batches[0])
    for batch in batches[1::2]:
        for name in ("pixel_values", "image_grid_thw", "mm_token_type_ids"):
            del batch[name]
        batch["input_ids"] = batch["input_ids"].clamp(min=10)
    check(model, chunks, "1f1b", batches)


@on_ranks(2)
def test_the_text_alone_keeps_its_names(rank: int, tmp_path: Path) -> None:
    model, chunks = load("llava", tmp_path, "1f1b", text_only=True)
    names = {name for chunk in chunks for name, _ in chunk.named_parameters()}
    assert not any("vision" in name or "projector" in name for name in names)
    batches = [{name: batch[name] for name in ("input_ids", "labels")} for batch in hf_towers.batches("llava", 4)]
    for batch in batches:
        batch["input_ids"] = batch["input_ids"].clamp(min=10)
    check(model, chunks, "1f1b", batches)


def test_an_example_is_asked_for() -> None:
    with pytest.raises(ValueError, match="LlavaConfig has towers for other things than text: pass a microbatch with"):
        build_chunks(hf_towers.make_config("llava"), "no_pipelining")

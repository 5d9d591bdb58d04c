"""Models of transformers that read images: towers on the first stage, layers of text on all.
towers_of_transformers.py has all kinds."""

from __future__ import annotations

from pathlib import Path

import pytest
from tools.ranks import on_ranks

pytest.importorskip("transformers")

from tools import hf_towers

from megapipe.integrations.transformers import build_chunks


@pytest.mark.parametrize(("kind", "schedule"), [("qwen2_vl", "1f1b"), ("gemma3", "zbv")])
@on_ranks(2)
def test_gradients_and_files_are_those_of_the_whole_model(rank: int, kind: str, schedule: str, tmp_path: Path) -> None:
    hf_towers.run_all(kind, schedule, tmp_path)


@on_ranks(2)
def test_some_microbatches_have_no_image(rank: int, tmp_path: Path) -> None:
    batches = hf_towers.batches("qwen2_vl", 2)
    model, chunks = hf_towers.load("qwen2_vl", tmp_path, "1f1b", example=batches[0])
    for batch in batches[1::2]:
        for name in ("pixel_values", "image_grid_thw", "mm_token_type_ids"):
            del batch[name]
        batch["input_ids"] = batch["input_ids"].clamp(min=10)
    hf_towers.check(model, chunks, "1f1b", batches)


@on_ranks(2)
def test_the_text_alone_keeps_its_names(rank: int, tmp_path: Path) -> None:
    model, chunks = hf_towers.load("llava", tmp_path, "1f1b", text_only=True)
    names = {name for chunk in chunks for name, _ in chunk.named_parameters()}
    assert not any("vision" in name or "projector" in name for name in names)
    batches = [{name: batch[name] for name in ("input_ids", "labels")} for batch in hf_towers.batches("llava", 2)]
    for batch in batches:
        batch["input_ids"] = batch["input_ids"].clamp(min=10)
    hf_towers.check(model, chunks, "1f1b", batches)


def test_an_example_is_asked_for() -> None:
    with pytest.raises(ValueError, match="LlavaConfig has towers for other things than text: pass a microbatch with"):
        build_chunks(hf_towers.make_config("llava"), "no_pipelining")

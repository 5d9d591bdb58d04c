"""Every architecture under several schedules: `make test-models`. test_transformers.py has three of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks

pytest.importorskip("transformers")

import hf_models
import transformers

from megapipe.integrations.transformers import save_pretrained

SCHEDULES = ["1f1b", "interleaved_1f1b", "zbv", "dualpipev"]


@pytest.mark.parametrize("deferred", [False, True], ids=["plain", "deferred"])
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", hf_models.CONFIGS)
@on_ranks()
def test_losses_and_gradients(
    rank: int, num_ranks: int, name: str, schedule: str, deferred: bool, tmp_path: Path
) -> None:
    hf_models.check(name, schedule, tmp_path, deferred=deferred)


@pytest.mark.parametrize("max_file_size", [10**9, 10**4], ids=["one file", "many"])
@pytest.mark.parametrize("name", hf_models.CONFIGS)
@on_ranks(2)
def test_what_is_saved_is_loaded_by_transformers_bit_for_bit(
    rank: int, name: str, max_file_size: int, tmp_path: Path
) -> None:
    model = hf_models.make_model(name).to(torch.bfloat16 if name == "llama3" else torch.float32)
    hf_models.save_on_first(model, tmp_path / "given")
    chunks = hf_models.load_chunks(tmp_path / "given", "zbv")
    save_pretrained(chunks, tmp_path / "saved", max_file_size)
    loaded, model = (
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / which) for which in ("saved", "given")
    )
    assert_same(loaded, model)
    tokens = hf_models.batches(1)[0]["input_ids"]
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, model(tokens).logits)
    assert files_of(tmp_path / "saved") == files_of(tmp_path / "given") or max_file_size < 10**9
    dist.barrier()


def assert_same(model: Any, expected: Any) -> None:
    assert type(model) is type(expected)
    states = model.state_dict(), expected.state_dict()
    assert states[0].keys() == states[1].keys()
    for name, tensor in states[0].items():
        assert tensor.dtype == states[1][name].dtype
        assert torch.equal(tensor, states[1][name]), name


def files_of(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}

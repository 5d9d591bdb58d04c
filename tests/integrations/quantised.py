"""Adapters on quantised weights, against peft in one process: `make test-rl`."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
from tools.ranks import on_ranks

pytest.importorskip("transformers")
pytest.importorskip("peft")
pytest.importorskip("torchao")
pytest.importorskip("bitsandbytes")

import peft
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from tools import hf_models

import megapipe
from benchmarks.memory import memory_of
from megapipe.checkpoint import Checkpointer
from megapipe.integrations.transformers import build_chunks, count_items, load_weights, named_weights, save_pretrained

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import quantising

SIZES = {"hidden_size": 64, "intermediate_size": 128}  # as groups of 32 numbers and blocks of 64 want
TARGETS = ["q_proj", "down_proj"]


def build(folder: Path, schedule: str, kind: str, dtype: torch.dtype) -> list[Any]:
    """Chunks whose layers were quantised one after the other, with adapters of a saved folder."""
    hf_models.initialise(dist.get_world_size())
    chunks = build_chunks(folder / "base", schedule, seed=None, dtype=dtype, device="meta")
    load_weights(chunks, folder / "base", after_layer=quantising.KINDS[kind])
    for chunk in chunks:
        chunk.load_adapter(str(folder / "adapter"), is_trainable=True)
        megapipe.weight_grad.convert(chunk)
    return chunks


def make_whole(folder: Path, kind: str, dtype: torch.dtype) -> Any:
    """By peft in one process."""
    model = hf_models.transformers.AutoModelForCausalLM.from_pretrained(folder / "base", dtype=dtype)
    for layer in model.model.layers:
        quantising.KINDS[kind](layer)
    return peft.PeftModel.from_pretrained(model, folder / "adapter", is_trainable=True).train()


def train(chunks: list[Any], optimizer: Any, schedule: str, steps: range) -> list[Any]:
    losses = []
    for step in steps:
        reports = hf_models.run(schedule, chunks, count_items(hf_models.batches(4, seed=step)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append([report["loss"] for report in reports])
    return losses


def make_optimizer(chunks: list[Any]) -> Any:
    return megapipe.PipelinedOptimizer(chunks, lambda groups: torch.optim.AdamW(groups, lr=1e-2))


@pytest.mark.parametrize(("schedule", "dtype"), [("1f1b", torch.float32), ("zbv", torch.bfloat16)])
@pytest.mark.parametrize("kind", list(quantising.KINDS))
@on_ranks(2)
def test_trained_saved_and_resumed(rank: int, kind: str, schedule: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Losses and adapters are peft's to the last bit, in a run that was interrupted too."""
    model = hf_models.make_model("llama", **SIZES)
    hf_models.save_on_first(model, tmp_path / "base")
    if rank == 0:
        config = peft.LoraConfig(r=4, target_modules=TARGETS, init_lora_weights=False)
        peft.get_peft_model(model, config).save_pretrained(tmp_path / "adapter")
    dist.barrier()
    chunks = build(tmp_path, schedule, kind, dtype)
    adapters = [p for chunk in chunks for name, p in chunk.named_parameters() if p.requires_grad]
    assert {p.dtype for p in adapters} == {torch.float32}  # they were the base's, and small steps were lost
    optimizer = make_optimizer(chunks)
    with Checkpointer(tmp_path / "run", chunks, optimizer, trained_only=True) as checkpointer:
        losses = train(chunks, optimizer, schedule, range(1))
        checkpointer.save(1)
    del chunks, optimizer
    chunks = build(tmp_path, schedule, kind, dtype)
    optimizer = make_optimizer(chunks)
    with Checkpointer(tmp_path / "run", chunks, optimizer, trained_only=True) as checkpointer:
        assert checkpointer.load().step == 1
    losses += train(chunks, optimizer, schedule, range(1, 3))
    save_pretrained(chunks, tmp_path / "saved")
    with pytest.raises(ValueError, match=r"is quantised \(.*\), and files of a model have its weights in"):
        named_weights(chunks, merge_adapters=True)
    if rank == 0:
        compare(make_whole(tmp_path, kind, dtype), losses, tmp_path / "saved", schedule == "zbv")


def compare(whole: Any, losses: list[Any], saved: Path, has_losses: bool) -> None:
    optimizer = torch.optim.AdamW([p for p in whole.parameters() if p.requires_grad], lr=1e-2)
    for step in range(3):
        expected = hf_models.reference(whole, count_items_alone(hf_models.batches(4, seed=step)))
        optimizer.step()
        optimizer.zero_grad()
        assert not has_losses or losses[step] == expected
    found = load_file(saved / "adapter_model.safetensors")
    expected = peft.get_peft_model_state_dict(whole)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def count_items_alone(microbatches: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """As `count_items`, which asks other replicas."""
    total = sum((batch["labels"][:, 1:] != -100).sum() for batch in microbatches)
    return [{**batch, "num_items_in_batch": total} for batch in microbatches]


@on_ranks(2)
def test_the_page(rank: int, tmp_path: Path) -> None:
    """Its snippet, which tests without bitsandbytes cannot run: peft loads what it saves."""
    hf_models.save_on_first(hf_models.make_model("llama", **SIZES), tmp_path)
    hf_models.initialise(2)
    page = (Path(__file__).parents[2] / "docs/huggingface.md").read_text()
    (block,) = (
        one for one in re.findall(r"^```py\n(.*?)^```$", page, re.MULTILINE | re.DOTALL) if "after_layer" in one
    )
    for name in ("checkpoints", "adapter"):
        block = block.replace(f'"{name}"', f"{str(tmp_path / name)!r}")
    functions = (build_chunks, load_weights, save_pretrained)
    exec(block, {"torch": torch, "megapipe": megapipe, "folder": tmp_path, **{one.__name__: one for one in functions}})
    if rank == 0:
        base = hf_models.transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
        assert peft.PeftModel.from_pretrained(base, tmp_path / "adapter").peft_config["default"].r == 16


def expected_bytes(hidden: int, inner: int, vocabulary: int, num_outside: int) -> tuple[int, int]:
    """Bytes on one of two ranks of a Qwen2.5-32B of these widths: what is left of it, and the peak while it is loaded.

    Args:
        num_outside: how many of the embedding and the head the rank has. They stay in 16 bits.
    """
    layer = 2 * hidden * (hidden + hidden // 5 + 3 * inner // 2)  # numbers in the matrices of one
    held = int(32 * 0.53 * layer) + num_outside * 2 * vocabulary * hidden
    return held, held + 3 * 2 * layer


@on_ranks(2)
def test_two_cards_for_a_large_model(rank: int, tmp_path: Path) -> None:
    """All 64 layers of a 32B, a sixteenth as wide. The peak is what is left in 4 bits, and three layers in 16: on the
    CPU the one in the file counts too, and its copy. With the widths of the 32B a card of 24 GB has more."""
    narrow = {"hidden_size": 320, "intermediate_size": 1728, "vocab_size": 9504}
    heads = {"num_attention_heads": 5, "num_key_value_heads": 1}
    hf_models.save_on_first(hf_models.make_model("qwen2", **narrow, **heads, num_hidden_layers=64).bfloat16(), tmp_path)
    chunks: list[Any] = []

    def load() -> None:
        hf_models.initialise(2)
        chunks[:] = build_chunks(tmp_path, "zbv", seed=None, dtype=torch.bfloat16, device="meta")
        load_weights(chunks, tmp_path, after_layer=quantising.nf4)

    found, num_outside = (
        memory_of("cpu", load),
        2 if rank == 0 else 0,
    )  # in a V one rank has the first and the last stage
    held, peak = expected_bytes(*narrow.values(), num_outside)
    assert 0.99 * held < found.held < held
    assert 0.99 * peak < found.peak < peak
    assert expected_bytes(5120, 27648, 152064, 2)[1] < 15e9

"""Weights that are sent by name: equal to those of the whole model, with little memory, and an end for all where one
rank ends."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tools.ranks import RankPool, on_ranks

pytest.importorskip("transformers")

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from tools import hf_models

from benchmarks.memory import memory_of
from megapipe import parallel_state
from megapipe.integrations.transformers import build_chunks, named_weights, save_pretrained

SMALL = 8_000
"""Bytes of a bucket, which most tensors fit into and the embedding does not."""


# Of files that are split and joined.
@pytest.mark.parametrize("name", ["mixtral", pytest.param("phi3", marks=pytest.mark.soak)])
@on_ranks(4)
def test_two_sharded_replicas_in_a_v(rank: int, name: str, tmp_path: Path) -> None:
    """What each rank gets is what the whole model would save: under the names of files, tied ones once."""
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    hf_models.save_on_first(hf_models.make_model(name, tie_word_embeddings=True, num_hidden_layers=2), tmp_path)
    chunks = hf_models.load_chunks(tmp_path, "zbv", layout=[1, 0, 1, 0])
    hf_models.shard(chunks)
    expected = load_file(tmp_path / "model.safetensors")
    hf_models.assert_equal(
        dict(named_weights(chunks, to=[0, 3], bucket_size=SMALL)), expected if rank in (0, 3) else {}
    )
    halves = dict(named_weights(chunks, to=1, dtype=torch.bfloat16))
    hf_models.assert_equal(halves, {n: t.bfloat16() for n, t in expected.items()} if rank == 1 else {})


@on_ranks(2)
def test_no_more_memory_than_a_bucket_and_a_tensor(rank: int) -> None:
    sizes = {"vocab_size": 8, "hidden_size": 128, "intermediate_size": 256}  # 64 KiB and 128 KiB a tensor, in 6 MiB
    hf_models.initialise(2)
    chunks = build_chunks(hf_models.make_config("llama", **sizes), "zbv")
    largest, bucket = 128 * 256 * 4, 2**18

    def read() -> None:
        for _, tensor in named_weights(chunks, bucket_size=bucket):
            tensor.sum()
            del tensor

    read()
    assert memory_of("cpu", read).peak < bucket + largest + 2**15  # and what ranks tell each other


def fail(chunks: Any) -> None:
    with suppress(KeyError):  # as a trainer that goes on, or an actor that tells its driver
        for number, (name, _) in enumerate(named_weights(chunks, bucket_size=SMALL)):
            if number == 5:
                raise KeyError(name)


def die(chunks: Any) -> None:
    for number, _ in enumerate(named_weights(chunks, bucket_size=SMALL)):
        if number == 5:
            os.kill(os.getpid(), signal.SIGKILL)


def read_until(rank: int, end: Any) -> int:
    hf_models.initialise(2)
    chunks = build_chunks(hf_models.make_config("llama"), "1f1b")
    if rank == 1:
        end(chunks)
        return 0
    return len(dict(named_weights(chunks, bucket_size=SMALL)))


@pytest.mark.parametrize(
    ("end", "sentence"), [(fail, "rank 1 stopped reading weights behind 6 of 39"), (die, "in the sending of weights")]
)
def test_a_reader_that_ends_ends_it_for_all(ranks: RankPool, end: Any, sentence: str) -> None:
    """The others would wait for it in their next exchange."""
    first, second = ranks.run(2, read_until, end, errors=True)
    assert isinstance(first, RuntimeError)
    assert sentence in str(first)
    assert second == (None if end is die else 0)


@on_ranks(2)
def test_wrong_arguments_are_told_to_all(rank: int) -> None:
    hf_models.initialise(2)
    chunks = build_chunks(hf_models.make_config("llama"), "zbv")
    with pytest.raises(ValueError, match="rank 2, but there are 2"):
        named_weights(chunks, to=2)
    with pytest.raises(ValueError, match="with different arguments"):
        named_weights(chunks, to=rank)
    with pytest.raises(ValueError, match="each of 4 stages once, and was given"):
        named_weights(chunks[: 2 - rank])
    with pytest.raises(ValueError, match="bucket_size=0"):
        named_weights(chunks, bucket_size=0)
    assert dist.get_rank() == rank


@pytest.mark.skipif(find_spec("peft") is None, reason="make test-rl installs peft")
@pytest.mark.parametrize(
    ("head", "is_sharded"), [("target_modules", False), ("target_modules", True), ("copied", False)]
)
@on_ranks(4)
def test_merged_adapters(rank: int, head: str, is_sharded: bool, tmp_path: Path) -> None:
    """As peft merges them in one process, to the last bit; and without merging what save_pretrained writes of them. A
    head that is trained as a copy, by modules_to_save, came twice, under names that no model has."""
    import peft

    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    model, chunks = hf_models.load_both("llama", tmp_path / "base", "zbv")
    options: dict[str, Any] = {"target_modules": ["q_proj", "down_proj"], "init_lora_weights": False}
    if head == "copied":
        options["modules_to_save"] = ["lm_head"]
    else:
        options["target_modules"].append("lm_head")
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, **options))
    if rank == 0:
        with torch.no_grad():
            for parameter in adapted.parameters():
                parameter.mul_(2.0 if parameter.requires_grad else 1.0)  # a copy is like what it was made of
        adapted.save_pretrained(tmp_path / "adapter")
    dist.barrier()
    for chunk in chunks:
        chunk.load_adapter(tmp_path / "adapter", is_trainable=True)
    before = {name: p.clone() for chunk in chunks for name, p in chunk.named_parameters()}
    if is_sharded:
        hf_models.shard(chunks)
    save_pretrained(chunks, tmp_path / "saved")
    hf_models.assert_equal(dict(named_weights(chunks)), load_file(tmp_path / "saved/adapter_model.safetensors"))
    merged = dict(named_weights(chunks, merge_adapters=True, bucket_size=SMALL))
    for chunk in chunks:
        for name, p in chunk.named_parameters():
            assert torch.equal(p.full_tensor() if is_sharded else p, before[name]), name
    if rank == 0:  # whose adapters are those that were saved
        whole = peft.PeftModel.from_pretrained(hf_models.make_model("llama"), tmp_path / "adapter")
        hf_models.assert_equal(merged, whole.merge_and_unload().state_dict())

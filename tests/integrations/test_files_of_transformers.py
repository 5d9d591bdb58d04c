"""Files of transformers' models, written and read by several ranks: an error is the same on all, and what is found in a
folder is what was saved last."""

from __future__ import annotations

import errno
import json
import resource
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from tools.ranks import RankPool, on_ranks

pytest.importorskip("transformers")

import safetensors
import torch
import torch.distributed as dist
import transformers
from tools import hf_models

import megapipe
from megapipe.integrations.transformers import build_chunks, count_items, load_weights, save_pretrained
from megapipe.safetensors_files import Entry, SafetensorsFile


def build(name: str = "llama", **options: Any) -> list[Any]:
    hf_models.initialise(dist.get_world_size())
    return build_chunks(hf_models.make_config(name), "zbv", **options)


def save_on_a_full_disk(rank: int, folder: Path) -> None:
    chunks = build()
    save_pretrained(chunks, folder, max_file_size=20_000)
    full = safetensors.SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
    with mock.patch("safetensors.torch.save_file", side_effect=full) if rank == 1 else nullcontext():
        save_pretrained(chunks, folder, max_file_size=20_000)


def save_without_a_chunk(rank: int, folder: Path) -> None:
    save_pretrained(build()[: 1 + rank], folder)


def save_into_two_folders(rank: int, folder: Path) -> None:
    save_pretrained(build(), folder / str(rank), max_file_size=20_000)


def load_without_a_file(rank: int, folder: Path) -> None:
    chunks = build(seed=None)
    hf_models.save_on_first(hf_models.make_model("llama"), folder)
    load_weights(chunks, folder / "nothing here" if rank else folder)


def save_quantised_layers(rank: int, folder: Path) -> None:
    """Of rank 1, by a module of one's own, with a scale for each row."""
    chunks = build()
    for module in [one for chunk in chunks for one in chunk.modules() if isinstance(one, torch.nn.Linear)] * rank:
        scale = module.weight.detach().abs().amax(1, keepdim=True) / 127
        numbers = (module.weight.detach() / scale).round().to(torch.int8)
        del module.weight
        module.register_buffer("weight", numbers)
        module.register_buffer("scale", scale)
    save_pretrained(chunks, folder)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (save_quantised_layers, r"model.layers.\d.self_attn.q_proj.weight is quantised \(torch.int8\), and "),
        (
            save_on_a_full_disk,
            r"saving to .* failed on rank 1 \(.*No space left on device .*\)\. The disk, .*full: make room",
        ),
        (save_without_a_chunk, r"needs each of 4 stages once, and was given \[0, 1, 2\]: pass all chunks of each rank"),
        (save_into_two_folders, r"failed on rank 1 \(.*No such file or directory.*\)\. All ranks need the same folder"),
        (load_without_a_file, r"nothing here has no model.safetensors or pytorch_model.bin, nor an index"),
    ],
)
def test_errors_are_told_to_all_ranks(ranks: RankPool, function: Any, message: str, tmp_path: Path) -> None:
    """The others waited for as long as the failed rank lived, and a file without contents stayed. A save without all
    chunks was called saved."""
    errors = ranks.run(2, function, tmp_path, errors=True)
    assert type(errors[0]) is type(errors[1])
    assert str(errors[0]) == str(errors[1])
    with pytest.raises(type(errors[0]), match=message):
        raise errors[0]
    assert list(tmp_path.rglob("*.incomplete")) == []
    if function is save_on_a_full_disk:
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path)  # what was there


def test_what_the_system_says_of_a_file(tmp_path: Path) -> None:
    """The library tells it in an error of its own, as a text alone: a full disk was not told from a missing folder."""
    file = SafetensorsFile(tmp_path / "model.safetensors", [Entry("weight", torch.float32, (10_000,))])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large") as caught:
            file.write({"weight": torch.ones(10_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.errno == errno.EFBIG


@on_ranks(2)
def test_a_folder_has_nothing_else_than_the_model(rank: int, tmp_path: Path) -> None:
    """from_pretrained put an adapter that lay there on the model."""
    chunks = build()
    earlier = ["adapter_config.json", "adapter_model.safetensors", "model-00001-of-00003.incomplete"]
    for name in [*earlier, "model_of_others.safetensors"] if rank == 0 else []:
        (tmp_path / name).write_text("{}")
    save_pretrained(chunks, tmp_path)
    expected = {"config.json", "generation_config.json", "model.safetensors", "model_of_others.safetensors"}
    assert hf_models.files_of(tmp_path) == expected
    for chunk in chunks:  # as fully_shard and capture derive classes: the config named them, which nothing loads
        chunk.__class__ = type(f"FSDP{type(chunk).__name__}", (type(chunk),), {})
    save_pretrained(chunks, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]


@on_ranks(2)
def test_files_while_a_step_is_not_validated(rank: int, tmp_path: Path) -> None:
    """Weights were saved that the next step took back, and loaded ones were lost to those from before the step."""
    hf_models.save_on_first(hf_models.make_model("llama"), tmp_path / "given")
    chunks = hf_models.load_chunks(tmp_path / "given", "1f1b")
    given = [p.detach().clone() for chunk in chunks for p in chunk.parameters()]
    optimizer = megapipe.PostValidatedOptimizer(chunks, lambda groups: torch.optim.SGD(groups, lr=1.0), max_norm=1e-3)
    chunks[0].config.post_validated_optimizer = optimizer
    for function in (save_pretrained, load_weights):
        optimizer._waits = False
        hf_models.run("1f1b", chunks, hf_models.batches(2))
        optimizer.step()  # is to be clipped
        function(chunks, tmp_path / ("saved" if function is save_pretrained else "given"))
        optimizer.finalize()
        optimizer.zero_grad()
        if function is save_pretrained:
            dist.barrier()
            saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved").state_dict()
            assert all(torch.equal(p, saved[name]) for chunk in chunks for name, p in chunk.named_parameters())
    assert all(map(torch.equal, (p for chunk in chunks for p in chunk.parameters()), given))


@on_ranks(2)
def test_settings_of_generation_are_kept(rank: int, tmp_path: Path) -> None:
    """Those of the model's folder were lost: of two tokens that end a text, one was left."""
    model = hf_models.make_model("qwen2")
    model.generation_config = transformers.GenerationConfig(eos_token_id=[2, 5], do_sample=True, temperature=0.3)
    hf_models.save_on_first(model, tmp_path / "given")
    save_pretrained(hf_models.load_chunks(tmp_path / "given", "1f1b"), tmp_path / "saved")
    saved, given = (transformers.GenerationConfig.from_pretrained(tmp_path / name) for name in ("saved", "given"))
    assert saved.to_diff_dict() == given.to_diff_dict()


@on_ranks(1)
def test_a_head_of_its_own_that_the_config_ties_is_refused(rank: int, tmp_path: Path) -> None:
    """It was overwritten with the embedding. transformers leaves it, and does not tie the two."""
    model = hf_models.make_model("llama")
    model.config.tie_word_embeddings = True
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"other values for lm_head\.weight than for model\.embed_tokens\.weight"):
        hf_models.load_chunks(tmp_path, "1f1b")


@pytest.mark.parametrize("form", ["one file", "an old file", "shards"])
@on_ranks(1)
def test_weights_in_bin_files(rank: int, form: str, tmp_path: Path) -> None:
    model = hf_models.make_model("llama-tied")
    model.config.save_pretrained(tmp_path)
    state, index = model.state_dict(), {"lm_head.weight": "gone.bin"}  # of a save before
    if form == "shards":
        index = {key: ("a.bin", "b.bin")[number % 2] for number, key in enumerate(state)}
        for name in ("a.bin", "b.bin"):
            torch.save({key: state[key] for key in state if index[key] == name}, tmp_path / name)
    else:
        torch.save(state, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=form == "one file")
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    (chunk,) = hf_models.load_chunks(tmp_path, "1f1b")
    hf_models.assert_equal(dict(chunk.named_parameters()), dict(model.named_parameters()))


@on_ranks(2)
def test_a_model_without_a_head(rank: int, tmp_path: Path) -> None:
    """Its names lack the prefix, too. The head is the embedding where they are tied, and otherwise drawn by a seed."""
    hf_models.initialise(2)
    for name in ("llama", "gemma2"):
        model = hf_models.make_model(name)
        hf_models.save_on_first(model.model, tmp_path / name)
        chunks = build_chunks(tmp_path / name, "1f1b", seed=5)
        before = {key: parameter.clone() for key, parameter in chunks[0].named_parameters()}
        is_drawn = name == "llama" and rank == 1
        with pytest.warns(UserWarning, match="lm_head.weight: they stay") if is_drawn else nullcontext():
            load_weights(chunks, tmp_path / name)
        for key, parameter in chunks[0].named_parameters():
            is_kept = is_drawn and key == "lm_head.weight"
            assert torch.equal(parameter, before[key] if is_kept else model.get_parameter(key)), key
    error = "has no weights for lm_head.weight: call build_chunks with a seed"
    with pytest.raises(ValueError, match=error):
        load_weights(build_chunks(tmp_path / "llama", "1f1b", seed=None), tmp_path / "llama")


CODE = """
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM


class OwnConfig(LlamaConfig):
    model_type = "own"


class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.model.norm = nn.LayerNorm(config.hidden_size)
        self.post_init()
"""


@on_ranks(2)
def test_a_model_whose_code_is_in_its_folder(rank: int, tmp_path: Path) -> None:
    hf_models.initialise(2)
    given, saved = tmp_path / "given", tmp_path / "saved"
    if rank == 0:
        fields = hf_models.make_config("llama").to_dict() | {"model_type": "own"}
        fields["auto_map"] = {"AutoConfig": "code.OwnConfig", "AutoModelForCausalLM": "code.OwnForCausalLM"}
        given.mkdir()
        (given / "config.json").write_text(json.dumps(fields))
        (given / "code.py").write_text(CODE)
    dist.barrier()
    with mock.patch("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / f"modules{rank}")):
        chunks = build_chunks(given, "zbv", trust_remote_code=True)
        microbatches = count_items(hf_models.batches(2))
        losses = hf_models.run("zbv", chunks, microbatches)
        save_pretrained(chunks, saved)
        whole = transformers.AutoModelForCausalLM.from_pretrained(saved, trust_remote_code=True)
        assert isinstance(whole.model.norm, torch.nn.LayerNorm)
        hf_models.assert_same_losses(losses, hf_models.reference(whole, microbatches), chunks)
        hf_models.assert_same_gradients(chunks, whole)


@on_ranks(2)
def test_layers_get_their_memory_one_by_one(rank: int, tmp_path: Path) -> None:
    """So that layers can be quantised before the next one is read. Loaded, chunks are what they are otherwise: tied,
    with buffers, and trained alike."""
    model = hf_models.make_model("mixtral", tie_word_embeddings=True)
    hf_models.save_on_first(model, tmp_path)
    hf_models.initialise(2)
    chunks = build_chunks(tmp_path, "zbv", seed=None, device="meta")
    assert all(parameter.is_meta for chunk in chunks for parameter in chunk.parameters())
    seen: list[torch.nn.Module] = []

    def after_layer(layer: torch.nn.Module) -> None:
        here = next(chunk for chunk in chunks if layer in chunk.own_layers)
        behind = here.own_layers[here.own_layers.index(layer) + 1 :]
        assert not any(parameter.is_meta for parameter in layer.parameters())
        assert all(parameter.is_meta for other in behind for parameter in other.parameters())
        seen.append(layer)

    load_weights(chunks, tmp_path, after_layer=after_layer)
    assert seen == [layer for chunk in chunks for layer in chunk.own_layers]
    hf_models.compare("zbv", chunks, model, count_items(hf_models.batches(2)))

"""Every architecture under several schedules: `make test-models`. test_transformers.py has three of them."""

from __future__ import annotations

import errno
import importlib
import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tools.ranks import RankPool, on_ranks
from torch.distributed.device_mesh import init_device_mesh

pytest.importorskip("transformers")

import safetensors.torch
import transformers
from tools import hf_generation, hf_kinds, hf_models

from benchmarks.memory import memory_of
from megapipe import PipelinedOptimizer, parallel_state
from megapipe.graph import capture
from megapipe.integrations.transformers import build_chunks, count_items, load_weights, save_pretrained, tie_weights
from megapipe.safetensors_files import SafetensorsFile

ARRANGED = [("1f1b", 4), ("interleaved_1f1b", 2), ("zbv", 2), ("dualpipev", 2)]


@pytest.mark.parametrize(("schedule", "num_ranks"), ARRANGED)
@pytest.mark.parametrize("name", hf_models.CONFIGS)
@on_ranks()
def test_losses_gradients_and_files(rank: int, num_ranks: int, name: str, schedule: str, tmp_path: Path) -> None:
    given, deferred = tmp_path / "given", "zb" in schedule or "dual" in schedule
    chunks = hf_models.check(name, schedule, given, deferred=deferred)
    for max_file_size in [10**9, 10**4] if schedule == "zbv" else []:
        saved = tmp_path / str(max_file_size)
        hf_models.assert_saved(chunks, hf_models.make_model(name), saved, max_file_size=max_file_size)
        dist.barrier()
        assert hf_models.files_of(saved) == hf_models.files_of(given) or max_file_size < 10**9


@pytest.mark.parametrize("name", hf_models.CONFIGS)
@on_ranks(2)
def test_tokens_are_those_of_transformers(rank: int, name: str, tmp_path: Path) -> None:
    hf_generation.check(hf_models.make_model(name, initializer_range=0.3), "1f1b", tmp_path)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("phi", {}),
        ("bloom", {}),
        ("opt", {}),
        ("jamba", {}),  # some layers keep states
        ("qwen3_next", {}),
        ("deepseek_v4", {}),  # more than hidden states travel
        ("gemma4_text", {"num_kv_shared_layers": 0}),
    ],
    ids=str,
)
@on_ranks(2)
def test_tokens_of_other_kinds(rank: int, kind: str, changes: dict[str, Any], tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(hf_kinds.make_config(kind, **changes))
    hf_generation.check(model, "1f1b", tmp_path)


@pytest.mark.parametrize(("schedule", "num_ranks"), ARRANGED)
@pytest.mark.parametrize("name", hf_models.CONFIGS)
@on_ranks()
def test_captured_stages(rank: int, num_ranks: int, name: str, schedule: str, tmp_path: Path) -> None:
    """With masks that are always there: transformers leaves out those that it sees to be causal, and adds otherwise."""
    model = hf_models.make_model(name, attn_implementation="eager")
    hf_models.save_on_first(model, tmp_path)
    chunks = hf_models.load_chunks(tmp_path, schedule, attn_implementation="eager")
    microbatches = count_items(hf_models.batches(2 * num_ranks))
    first = microbatches[0]
    for chunk in chunks:
        example = (first["input_ids"], None, None, first["labels"], first["num_items_in_batch"])
        capture(chunk, example, input_tensor=chunk.example_input({"input_ids": first["input_ids"]}))
    hf_models.compare(schedule, chunks, model, microbatches)


@pytest.mark.parametrize(
    ("name", "layout", "options"),
    [
        ("llama", None, {"target_modules": "all-linear"}),
        ("gemma2", None, {"target_modules": "all-linear"}),
        ("gpt2", None, {"target_modules": ["c_attn", "c_proj"]}),
        ("llama", None, {"target_modules": ["q_proj", "lm_head"]}),
        ("llama", None, {"target_modules": ["q_proj", "v_proj"], "layers_to_transform": [0]}),
        ("llama", None, {"target_modules": r".*layers\.[23]\.mlp\.up_proj", "modules_to_save": ["lm_head"]}),
        ("llama-tied", None, {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
        ("llama", [4, 0, 0, 0], {"target_modules": ["embed_tokens", "down_proj"]}),
        ("mixtral", None, {"target_parameters": ["mlp.experts.down_proj"], "target_modules": []}),
    ],
    ids=["all", "gemma2", "gpt2", "head", "first layers", "last layers", "tied head", "one stage", "experts"],
)
@on_ranks(2)
def test_adapters_are_trained_and_only_they_are_saved(
    rank: int, name: str, layout: list[int] | None, options: dict[str, Any], tmp_path: Path
) -> None:
    """Also where some stages have none: peft said that it found nothing there, or knows no module that is Absent."""
    peft = pytest.importorskip("peft")
    model, chunks = hf_models.load_both(name, tmp_path / "given", "zbv", layout=layout)
    for chunk in chunks:
        torch.manual_seed(chunk.stage.index)
        chunk.add_adapter(peft.LoraConfig(r=4, init_lora_weights=False, **options))
    save_pretrained(chunks, tmp_path / "saved")
    assert hf_models.files_of(tmp_path / "saved") == {"adapter_model.safetensors", "adapter_config.json"}
    adapted = peft.PeftModel.from_pretrained(model, tmp_path / "saved", is_trainable=True).train()
    microbatches = count_items(hf_models.batches(4))
    expected = hf_models.reference(adapted, microbatches)
    optimizer = PipelinedOptimizer(chunks, lambda groups: torch.optim.AdamW(groups, lr=1e-3))
    hf_models.assert_same_losses(hf_models.run("zbv", chunks, microbatches), expected, chunks)
    parameters = dict(adapted.named_parameters(remove_duplicate=False))
    num_trained = 0
    for chunk in chunks:
        for name_here, parameter in chunk.named_parameters():
            want = parameters[f"base_model.model.{name_here}"].grad
            assert (want is None) == (parameter.grad is None) == (not parameter.requires_grad)
            num_trained += want is not None
            assert want is None or torch.equal(parameter.grad, want), name_here
    total = torch.tensor(num_trained)
    dist.all_reduce(total)
    assert total.item() == sum(parameter.grad is not None for parameter in adapted.parameters()) > 0
    optimizer.step()


@pytest.mark.parametrize("targets", [["lm_head"], ["q_proj", "down_proj"], ["embed_tokens"]])
@on_ranks(2)
def test_saved_adapters_are_loaded(rank: int, targets: list[str], tmp_path: Path) -> None:
    """Where a stage had none of the adapted modules, `load_adapter` raised peft's "Target module AbsentWeights() is not
    supported" on its rank, and only there."""
    peft = pytest.importorskip("peft")
    _, chunks = hf_models.load_both("llama", tmp_path / "given", "1f1b")
    for chunk in chunks:
        chunk.add_adapter(peft.LoraConfig(r=2, init_lora_weights=False, target_modules=targets), "mine")
    save_pretrained(chunks, tmp_path / "saved")
    (expected,) = [{name: p for name, p in chunk.named_parameters() if "lora_" in name} for chunk in chunks]
    _, chunks = hf_models.load_both("llama", tmp_path / "given", "1f1b")
    for chunk in chunks:
        chunk.load_adapter(str(tmp_path / "saved"), "mine", is_trainable=True)
    (found,) = [{name: p for name, p in chunk.named_parameters() if "lora_" in name} for chunk in chunks]
    assert found.keys() == expected.keys()
    for name, parameter in found.items():
        assert torch.equal(parameter, expected[name])
        assert parameter.requires_grad
    save_pretrained(chunks, tmp_path / "again")
    files = [safetensors.torch.load_file(tmp_path / one / "adapter_model.safetensors") for one in ("saved", "again")]
    assert files[0].keys() == files[1].keys()
    configs = [json.loads((tmp_path / one / "adapter_config.json").read_text()) for one in ("saved", "again")]
    assert [sorted(config["target_modules"]) for config in configs] == [sorted(targets)] * 2


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
@on_ranks(2)
def test_an_adapter_is_read_into_chunks_that_have_it(rank: int, schedule: str, tmp_path: Path) -> None:
    """As where a run goes on. `load_weights` looked for a whole model."""
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(hf_models.make_model("llama"), peft.LoraConfig(r=2, init_lora_weights=False))
    hf_models.initialise(2)
    chunks = build_chunks(adapted, schedule)
    save_pretrained(chunks, tmp_path)
    saved = safetensors.torch.load_file(tmp_path / "adapter_model.safetensors")
    wanted = peft.get_peft_model_state_dict(adapted)
    assert saved.keys() == wanted.keys()
    assert all(torch.equal(saved[name], wanted[name]) for name in saved)
    own = {name: parameter for chunk in chunks for name, parameter in chunk.named_parameters() if "lora_" in name}
    before = {name: parameter.detach().clone() for name, parameter in own.items()}
    for parameter in own.values():
        parameter.data.zero_()
    load_weights(chunks, tmp_path)
    assert all(torch.equal(own[name], before[name]) for name in own)
    chunks[0].add_adapter(peft.LoraConfig(r=3), "other")
    chunks[0].set_adapter("other")
    with pytest.raises(ValueError, match=r"adapter_model\.safetensors has "):
        load_weights(chunks[:1], tmp_path)


@on_ranks(2)
def test_single_tokens_are_not_trained(rank: int) -> None:
    """Stages without an embedding raised that AbsentWeights have no in_features, and others went on."""
    peft = pytest.importorskip("peft")
    hf_models.initialise(2)
    (chunk,) = build_chunks(hf_models.make_config("llama"), "1f1b")
    with pytest.raises(ValueError, match="trainable_token_indices are not known to the stages without an embedding"):
        chunk.add_adapter(peft.LoraConfig(target_modules=["q_proj"], trainable_token_indices=[1, 2]))


@on_ranks(2)
def test_a_deleted_adapter_leaves_no_names(rank: int, tmp_path: Path) -> None:
    """Layers stay those of peft, and weights were saved under names that from_pretrained does not know."""
    peft = pytest.importorskip("peft")
    model, chunks = hf_models.load_both("llama", tmp_path / "given", "1f1b")
    for chunk in chunks:
        chunk.add_adapter(peft.LoraConfig(r=2, target_modules=["q_proj", "lm_head"], init_lora_weights=False), "one")
        chunk.delete_adapter("one")
    hf_models.assert_saved(chunks, model, tmp_path / "saved")


def add_wrong_adapter(rank: int, targets: list[list[str]]) -> None:
    peft = importlib.import_module("peft")
    hf_models.initialise(2)
    chunks = build_chunks(hf_models.make_config("llama"), "zbv")
    for number, names in enumerate(targets):
        for chunk in chunks:
            chunk.add_adapter(peft.LoraConfig(r=2, target_modules=names), str(number))
            chunk.set_adapter([str(one) for one in range(number + 1)])
    save_pretrained(chunks, "nowhere")


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        ([["q_porj"]], "Target modules {'q_porj'} not found"),
        ([["q_proj"], ["lm_head"]], r"writes one adapter, .* active are \[\('0', '1'\)\]: call"),
    ],
    ids=["unknown", "two"],
)
def test_wrong_adapters_are_refused_on_all_ranks(ranks: RankPool, targets: list[list[str]], message: str) -> None:
    """Of two active adapters the first was saved, without a word. transformers refuses to."""
    pytest.importorskip("peft")
    errors = ranks.run(2, add_wrong_adapter, targets, errors=True)
    assert str(errors[0]) == str(errors[1])
    with pytest.raises(ValueError, match=message):
        raise errors[0]


@on_ranks(4)
def test_a_rank_never_holds_more_than_its_own_layers(rank: int, tmp_path: Path) -> None:
    """Of 33 MB, cut in four: made, written and read with less than a third of it. Who writes holds a file."""
    config = hf_models.make_config("llama", hidden_size=256, intermediate_size=1024, num_hidden_layers=8)
    hf_models.initialise(4)
    chunks: list[Any] = []

    def make() -> None:
        chunks[:] = build_chunks(config, "1f1b")
        save_pretrained(chunks, tmp_path, max_file_size=10**6)
        load_weights(chunks, tmp_path)

    peak = memory_of("cpu", make).peak
    size = torch.tensor([sum(4 * p.numel() for chunk in chunks for p in chunk.parameters())])
    dist.all_reduce(size)
    assert size.item() > 3e7
    assert peak < size.item() / 3


@pytest.mark.parametrize("name", ["llama", "gemma2"])
@on_ranks(4)
def test_sharded_layers(rank: int, name: str, tmp_path: Path) -> None:
    model = hf_models.make_model(name)
    hf_models.save_on_first(model, tmp_path / "given")
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("pp", "dp_replicate", "dp_shard"))
    parallel_state.initialize_from_mesh(mesh)
    chunks = build_chunks(tmp_path / "given", "zbv", seed=None)
    load_weights(chunks, tmp_path / "given")
    hf_models.shard(chunks)
    tied = tie_weights(chunks)
    chunks[0].config.finalize_model_grads_func = None if tied is None else tied.sum_gradients
    microbatches = hf_models.batches(8)
    total = sum((batch["labels"][:, 1:] != -100).sum() for batch in microbatches)
    hf_models.reference(model, [{**batch, "num_items_in_batch": total} for batch in microbatches])
    hf_models.run("zbv", chunks, count_items(microbatches[parallel_state.get_data_parallel_rank() :: 2]))
    expected = dict(model.named_parameters(remove_duplicate=False))
    for chunk in chunks:
        for name_here, parameter in chunk.named_parameters():
            grad = parameter.grad.full_tensor()
            torch.testing.assert_close(grad, expected[name_here].grad, rtol=1e-4, atol=1e-6)
    hf_models.assert_saved(chunks, model, tmp_path / "saved")
    # Those who write nothing wait for the others' shards: who cannot write goes on with gathering.
    full = OSError(errno.ENOSPC, "No space left on device")
    with mock.patch.object(SafetensorsFile, "write", side_effect=full), pytest.raises(RuntimeError, match="make room"):
        save_pretrained(chunks, tmp_path / "saved")


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", hf_models.CONFIGS)
@on_ranks(2)
def test_in_16_bits_with_masked_padding(rank: int, name: str, autocast: bool, tmp_path: Path) -> None:
    """Weights are in bfloat16, or products by autocast."""
    hf_models.save_on_first(hf_models.make_model(name), tmp_path)
    dtype, schedule = (torch.float32, "1f1b") if autocast else (torch.bfloat16, "zbv")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype).train()
    options = {"enable_autocast": True, "autocast_dtype": torch.bfloat16} if autocast else {}
    chunks = hf_models.load_chunks(tmp_path, schedule, dtype=dtype, **options)
    microbatches = hf_models.batches(4)
    for number, batch in enumerate(microbatches):
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
        batch["attention_mask"][0, hf_models.SEQUENCE - number :] = 0
        batch["labels"] = torch.where(batch["attention_mask"] == 1, batch["labels"], -100)
    microbatches = count_items(microbatches)
    expected = hf_models.reference(model, microbatches, autocast)
    hf_models.assert_same_losses(hf_models.run(schedule, chunks, microbatches), expected, chunks)
    if not model.config.tie_word_embeddings:
        hf_models.assert_same_gradients(chunks, model)

"""Small models of transformers with random weights, and the run that chunks are compared with: the whole model as
transformers makes it, microbatch by microbatch."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from tools import ranks
from tools.against import assert_close, assert_same_losses, gradients
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import megapipe
from megapipe import parallel_state
from megapipe.integrations.transformers import (
    CannotCutError,
    build,
    build_chunks,
    count_items,
    forward_step,
    load_weights,
    save_pretrained,
)
from megapipe.integrations.transformers.cut_check import Checked, check_cut

__all__ = ["assert_same_losses"]

ranks.IMPORTED_ONCE += [name for name in ["transformers.modeling_utils"] if name not in ranks.IMPORTED_ONCE]
transformers.utils.logging.disable_progress_bar()

_CHECKED: dict[bytes, bytes] = {}


def check_once(config: Any, layers: Sequence[range], *others: Any) -> Checked:
    """As `check_cut`, which every rank calls whenever chunks are built: a third of the time of these tests. Here the
    first rank calls it, once for each config and cut, and the others are told. test_cut_of_transformers.py tests it by
    itself."""
    if len(layers) == 1 or not dist.is_initialized():
        return check_cut(config, layers, *others)
    told = [b""]
    with suppress(CannotCutError):  # which each rank is to find out
        told = [_checked_before(config, layers, *others)] if dist.get_rank() == 0 else told
    dist.broadcast_object_list(told)
    return pickle.loads(told[0]) if told[0] else check_cut(config, layers, *others)


def _checked_before(config: Any, layers: Sequence[range], *others: Any) -> bytes:
    nameless = copy.copy(config)
    nameless.name_or_path = ""  # the folder, which each test has for itself
    key = pickle.dumps((nameless, layers, others))
    if key not in _CHECKED:
        _CHECKED[key] = pickle.dumps(check_cut(config, layers, *others))
    return _CHECKED[key]


build.check_cut = check_once

VOCABULARY, SEQUENCE, BATCH, LAYERS = 61, 12, 2, 4

BASE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
_GEMMA = {"head_dim": 8, "sliding_window": 4, "tie_word_embeddings": True, "query_pre_attn_scalar": 8}

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama3": ("LlamaConfig", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0,
        "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}}),
    "llama-tied": ("LlamaConfig", {"tie_word_embeddings": True}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 8}),
    "qwen3-moe": ("Qwen3MoeConfig", {**_EXPERTS, "head_dim": 8, "num_experts": 4, "output_router_logits": True,
        "router_aux_loss_coef": 0.1, "mlp_only_layers": [0, 2]}),
    "mistral": ("MistralConfig", {"sliding_window": 4}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "output_router_logits": True, "router_aux_loss_coef": 0.1}),
    "gemma2": ("Gemma2Config", _GEMMA),
    "gemma3": ("Gemma3TextConfig", {**_GEMMA, "layer_types": ["sliding_attention", "full_attention"] * 2}),
    "phi3": ("Phi3Config", {}),
    "gpt2": ("GPT2Config", {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "tie_word_embeddings": True}),
    "gpt-neox": ("GPTNeoXConfig", {}),
    "olmo2": ("Olmo2Config", {}),
    "deepseek-v3": ("DeepseekV3Config", {**_EXPERTS, "n_routed_experts": 4, "n_group": 2, "topk_group": 1,
        "first_k_dense_replace": 2, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
        "v_head_dim": 8, "num_key_value_heads": 4}),
    "granite": ("GraniteConfig", {"embedding_multiplier": 12.0, "logits_scaling": 8.0, "residual_multiplier": 0.2}),
    "llama4": ("Llama4TextConfig", {"head_dim": 8, "num_local_experts": 4, "intermediate_size_mlp": 48,
        "attention_chunk_size": 4, "interleave_moe_layer_step": 2}),
}  # fmt: skip
"""The class of the config, and what differs from `BASE`."""


def make_config(name: str, **changes: Any) -> Any:
    kind, own = CONFIGS[name]
    return getattr(transformers, kind)(**{**BASE, **own, **changes})


def make_model(name: str, seed: int = 0, **changes: Any) -> Any:
    """The whole model."""
    torch.manual_seed(seed)
    return transformers.AutoModelForCausalLM.from_config(make_config(name, **changes)).train()


def batches(num_microbatches: int, seed: int = 0) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(num_microbatches):
        tokens = torch.randint(3, VOCABULARY, (BATCH, SEQUENCE), generator=generator)
        labels = tokens.clone()
        labels[:, : int(torch.randint(1, 6, (), generator=generator))] = -100
        found.append({"input_ids": tokens, "labels": labels})
    return found


def reference(model: Any, microbatches: list[dict[str, Any]], autocast: bool = False) -> list[Tensor]:
    """Losses; gradients are in the model."""
    losses = []
    for batch in microbatches:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(**batch, use_cache=False).loss
        losses.append(loss.detach())
        (loss if "num_items_in_batch" in batch else loss / len(microbatches)).backward()
    return losses


def run(schedule: str, chunks: list[Any], microbatches: list[dict[str, Any]], **options: Any) -> list[Any]:
    """One step of the schedule."""
    arguments: dict[str, Any] = {
        "forward_step_func": forward_step,
        "data_iterator": iter(microbatches),
        "model": chunks,
        "num_microbatches": len(microbatches),
        "seq_length": SEQUENCE,
        "micro_batch_size": BATCH,
    }
    return megapipe.get_forward_backward_func(schedule)(**{**arguments, **options})


def initialise(pp_size: int) -> None:
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(pipeline_model_parallel_size=pp_size)


def save_on_first(model: Any, folder: Path) -> None:
    if dist.get_rank() == 0:
        model.save_pretrained(folder)
    dist.barrier()


def load_chunks(folder: Any, schedule: str, **options: Any) -> list[Any]:
    initialise(dist.get_world_size())
    chunks = build_chunks(folder, schedule, seed=None, **options)
    load_weights(chunks, folder)
    return chunks


def load_both(name: str, folder: Path, schedule: str, **options: Any) -> tuple[Any, list[Any]]:
    """The whole model, and its chunks, made with `options`."""
    model = make_model(name)
    save_on_first(model, folder)
    return model, load_chunks(folder, schedule, **options)


def assert_same_gradients(chunks: list[nn.Module], model: Any) -> None:
    """Bit for bit, tied ones nearly so."""
    tied, wanted = names_of_tied(model), gradients(model)
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            assert_close(parameter.grad, wanted[name], 2e-6 if name in tied else 0.0, name)


def compare(schedule: str, chunks: list[Any], model: Any, microbatches: list[dict[str, Any]], **options: Any) -> None:
    """Losses and gradients of one step of the schedule are those of the whole model."""
    expected = reference(model, microbatches)
    assert_same_losses(run(schedule, chunks, microbatches, **options), expected, chunks)
    assert_same_gradients(chunks, model)


def assert_same_weights(model: Any, expected: Any) -> None:
    assert type(model) is type(expected)
    assert_equal(model.state_dict(), expected.state_dict())


def assert_equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    for name, tensor in found.items():
        assert tensor.dtype == expected[name].dtype, name
        assert torch.equal(tensor, expected[name]), name


def assert_saved(chunks: list[Any], model: Any, folder: Path, **options: Any) -> None:
    """The whole model's class loads what chunks write, bit for bit."""
    save_pretrained(chunks, folder, **options)
    if dist.get_rank() == 0:
        assert_same_weights(type(model).from_pretrained(folder, dtype=model.dtype), model)


def shard(chunks: list[Any]) -> None:
    """Each layer, and what is left, among replicas."""
    for chunk in chunks:
        for module in (*chunk.own_layers, chunk):
            fully_shard(module, mesh=parallel_state.get_data_parallel_mesh())


def names_of_tied(model: Any) -> tuple[str, ...]:
    return tuple(name for pair in model.all_tied_weights_keys.items() for name in pair)


def check(
    name: str, schedule: str, folder: Path, num_microbatches: int = 8, deferred: bool = False, **options: Any
) -> list[Any]:
    """Losses and all gradients of one step against the whole model's. Returns the chunks, made with `options`."""
    model, chunks = load_both(name, folder, schedule, **options)
    if deferred:
        for chunk in chunks:
            megapipe.weight_grad.convert(chunk)
    compare(schedule, chunks, model, count_items(batches(num_microbatches)))
    return chunks


def files_of(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}

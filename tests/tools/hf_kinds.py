"""Every kind of causal language model that transformers has, small: by its default config with few layers, and by what
some kinds need besides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from tools import hf_models
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from megapipe.integrations.transformers import count_items
from megapipe.integrations.transformers.whole_model import make_small_config

KINDS = list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)

LAYERS = 4
_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_LINEAR = ["linear_attention", "full_attention"] * 2
_SLIDING = ["sliding_attention", "full_attention"] * 2

NEEDED: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"layer_group_size": 2},
    "bamba": {"attn_layer_indices": [1, 3]},
    "codegen": {"n_embd": 64, "n_head": 4, "rotary_dim": 8, "vocab_size": 64},
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}},
    "deepseek_v2": {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "gemma3n_text": {"num_kv_shared_layers": 2, "layer_types": _SLIDING, "intermediate_size": [32] * LAYERS,
        "activation_sparsity_pattern": [0.0] * LAYERS},
    "gemma4_text": {"num_kv_shared_layers": 2, "layer_types": _SLIDING},
    "gpt_neo": {"num_layers": LAYERS, "attention_types": [[["global", "local"], LAYERS // 2]]},
    "granitemoehybrid": {"layers_block_type": ["mamba", "attention"] * 2},
    "hunyuan_v1_dense": {"head_dim": 64},
    "hunyuan_v1_moe": {"head_dim": 64, "sep_token_id": 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {"layer_types": _LINEAR},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "longcat_flash": {"num_layers": LAYERS},
    "ministral": {"head_dim": 64},
    "nemotron": {"num_key_value_heads": 48},
    "reformer": {"is_decoder": True},
    "zamba": {"attn_layer_period": 3, "attn_layer_offset": 1, "num_hidden_layers": 6},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * 2},
}  # fmt: skip
"""What differs from the defaults of a kind, where they make no model or leave out what matters."""

DECODERS = ("bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert",
    "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer",
    "xlm-roberta", "xlm-roberta-xl", "xmod")  # fmt: skip
"""Kinds that look ahead unless they are told that they are decoders."""


def make_config(kind: str, **changes: Any) -> Any:
    """A small config of a kind, with its default kinds of layers."""
    options: dict[str, Any] = {"num_hidden_layers": LAYERS, **NEEDED.get(kind, {}), **changes}
    if "num_layers" in options:
        del options["num_hidden_layers"]
    if kind in DECODERS:
        options["is_decoder"] = True
    config = transformers.AutoConfig.for_model(kind, **options)
    return config if kind == "codegen" or config.is_encoder_decoder else make_small_config(config)


def check(kind: str, schedule: str, folder: Path, layout: list[int] | None = None, **changes: Any) -> None:
    """Losses, gradients and files of one step against the whole model's."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(make_config(kind, **changes)).eval()
    hf_models.save_on_first(model, folder / "given")
    chunks = hf_models.load_chunks(folder / "given", schedule, layout=layout)
    for chunk in chunks:
        chunk.eval()  # the kinds' dropout
    hf_models.compare(schedule, chunks, model, count_items(hf_models.batches(2)))
    hf_models.assert_saved(chunks, model, folder / "saved")

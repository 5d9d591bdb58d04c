"""Models of transformers, built on the meta device and counted by their modules."""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .transformer import INSTEAD, NUMBERS, LayerCosts, Transformer, layer_of


def build(kind: str, path: str | Path) -> Any:
    """The model of a config, on the meta device. Its code is that of transformers, never that of the model's folder."""
    transformers: Any = importlib.import_module("transformers")
    if kind not in transformers.CONFIG_MAPPING:
        raise ValueError(
            f"transformers {transformers.__version__} does not know a {kind}: take another release of it, or {INSTEAD}."
        )
    try:
        config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=False)
        if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
            config = config.get_text_config()
        with torch.device("meta"):
            return transformers.AutoModelForCausalLM.from_config(config)
    except Exception as error:
        raise ValueError(
            f"transformers {transformers.__version__} makes no decoder of this {kind} ({type(error).__name__}: "
            f"{' '.join(str(error).split())[:200]}): take another release of it, or {INSTEAD}."
        ) from error


def count(model: Any) -> Transformer:
    """The layers of a causal model of transformers, counted by its modules.

    Raises:
        ValueError: its layers are in no list, or how many experts a token goes through is not said.
    """
    config = model.config.get_text_config()
    seen: set[nn.Parameter] = set()
    found, own = _layers(model, config), getattr(config, "per_layer_config", None)
    hidden = model.get_input_embeddings().weight.shape[-1]
    configs = [config if own is None else own[index] for index in range(len(found))]
    layers = tuple(_layer(layer, hidden, one, seen) for layer, one in zip(found, configs))
    before = sum(parameter.numel() for parameter in set(model.parameters()) - seen)
    output, table = model.get_output_embeddings(), model.get_input_embeddings()
    head = 0 if output is None else output.weight.numel()
    tied = output is None or output.weight is getattr(table, "weight", None)
    return Transformer(
        layers,
        hidden,
        config.vocab_size if output is None else output.weight.shape[0],
        math.gcd(*(size for one in configs for size in _heads(one)[:2])),
        before if tied else before - head,
        head,
        tied,
        max((_experts(one)[0] for one, layer in zip(configs, layers) if layer.experts), default=0),
    )


def _layers(model: Any, config: Any) -> nn.ModuleList:
    """The list with the most parameters of those with as many modules as there are layers."""
    numbers = [number for name in ("num_hidden_layers", "num_layers") if (number := getattr(config, name, None))]
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) in numbers]
    if not lists:
        raise ValueError(
            f"{type(model).__name__} has no list of its {numbers[0] if numbers else 'hidden'} layers, so they cannot "
            f"be told from the rest: {INSTEAD}."
        )
    return max(lists, key=lambda one: sum(parameter.numel() for parameter in one.parameters()))


def _layer(layer: nn.Module, hidden: int, config: Any, seen: set[nn.Parameter]) -> LayerCosts:
    """One layer, its parameters counted where they are not seen yet. What layers share multiplies a token in each."""
    shapes: dict[bool, list[Sequence[int]]] = {False: [], True: []}
    weights = {False: 0, True: 0}
    own: set[nn.Parameter] = set()
    for name, module in layer.named_modules():
        kind = type(module).__name__
        is_routed = "experts" in name.split(".") or (kind.endswith(("Expert", "Experts")) and "Shared" not in kind)
        for parameter in set(module.parameters(recurse=False)) - own:
            own.add(parameter)
            weights[is_routed] += 0 if parameter in seen else parameter.numel()
            if parameter.ndim > 1 and not isinstance(module, (nn.Embedding, nn.Conv1d)):
                shapes[is_routed].append(parameter.shape)
    seen.update(own)
    experts, choices = _experts(config) if weights[True] else (0, 0)
    attends = any(map(_attends, layer.modules()))
    by_shapes = layer_of(
        hidden, shapes[False], shapes[True], experts, choices, _heads(config)[2:] if attends else (0, 0)
    )
    return by_shapes._replace(weights=weights[False], experts=weights[True])


def _experts(config: Any) -> tuple[int, int]:
    """How many a layer has, and how many of them a token goes through."""
    counts = [
        next((number for name in names.split() if (number := getattr(config, name, None))), 0)
        for names in (
            f"{NUMBERS['experts']} moe_num_experts num_moe_experts",
            "num_experts_per_tok moe_topk moe_k top_k_experts num_experts_per_token",
        )
    ]
    if not all(counts):
        raise ValueError(f"a {config.model_type} has experts, but not num_experts_per_tok: write it into its config.")
    return counts[0], counts[1]


def _attends(module: nn.Module) -> bool:
    """Whether it is attention with scores: no linear one."""
    return re.search(r"(?<!Delta)(?<!Lightning)Attention$|MLA$", type(module).__name__) is not None


def _heads(config: Any) -> tuple[int, int, int, int]:
    """The heads of queries and of keys, and of all heads the sizes of a query with a value, and of a key with one."""
    heads = getattr(config, "num_attention_heads", None) or 0
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    if getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False):
        kv_heads = 1
    if not heads:
        return 0, 0, 0, 0
    size = 2 * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    if getattr(config, "kv_lora_rank", None):
        kv_heads, size = heads, config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim
    return heads, kv_heads, heads * size, kv_heads * size

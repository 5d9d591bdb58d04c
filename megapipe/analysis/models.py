"""Decoders of which `fit` is told: the config.json of a model of Hugging Face, or numbers.

A config's model is built by transformers on the meta device, without weights, and its parameters are counted. Where
transformers is not installed, the kinds in `PLAIN` are counted by their sizes, as numbers are.
"""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

from ..plan import parse_json, read_text
from .transformer import INSTEAD, NUMBERS, Latent, Transformer, decoder

PLAIN = ("llama", "mistral", "mixtral", "qwen2", "qwen3")
"""Kinds of models whose sizes say all: gated MLPs or experts in every layer, and no option that changes a layer."""


LATENT = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
"""Those of `Latent`."""

NAMES = [*" ".join(NUMBERS.values()).split(), *LATENT, "n_shared_experts", "tie_word_embeddings"]
"""All that can be given."""


def read_config(path: str | Path) -> Transformer:
    """The model of a config.json of Hugging Face.

    Raises:
        ValueError: the file is none, or its model cannot be counted.
    """
    config = parse_json(path, read_text(path))
    if not isinstance(config, dict):
        raise ValueError(f"{path} is no config.json of Hugging Face.")
    kind = config.get("model_type")
    if kind is not None and importlib.util.find_spec("transformers"):
        from .counting import build, count  # which import torch: numbers need none

        return count(build(kind, path))
    if kind is not None and kind not in PLAIN:
        raise ValueError(
            f"{path} is of a {kind}, which transformers counts, and that is not installed: pip install transformers, "
            f"or {INSTEAD}."
        )
    return by_numbers(config, str(path))


def by_numbers(config: dict[str, Any], where: str) -> Transformer:
    """The decoder of numbers that are named as in a config of Hugging Face: its MLPs are gated.

    Raises:
        ValueError: some are missing, or are no sizes.
    """
    sizes: dict[str, Any] = {name: _size(config, names.split(), where) for name, names in NUMBERS.items()}
    latent = {name: _size(config, [name], where) for name in LATENT}
    if not all(sizes[name] for name in ("layers", "hidden", "heads", "vocabulary")):
        raise ValueError(
            f"{where} is no config.json with num_hidden_layers, hidden_size, num_attention_heads and vocab_size: give "
            "one, or these, such as hidden_size=4096."
        )
    if sizes["experts"] and not sizes["experts_per_token"]:
        raise ValueError(f"{where} has {sizes['experts']} experts, but not num_experts_per_tok: give both.")
    if latent["kv_lora_rank"] and not all(latent[name] for name in LATENT[2:]):
        raise ValueError(f"{where} has latent attention: give {', '.join(LATENT[2:])} besides kv_lora_rank.")
    if not sizes["shared_ffn"]:
        sizes["shared_ffn"] = _size(config, ["n_shared_experts"], where) * (sizes["expert_ffn"] or sizes["ffn"])
    return decoder(
        **sizes,
        latent=Latent(*latent.values()) if latent["kv_lora_rank"] else None,
        gated=True,
        tied=bool(config.get("tie_word_embeddings")),
    )


def _size(config: dict[str, Any], names: list[str], where: str) -> int:
    """The first of these that is there; 0 where none is."""
    for name in names:
        value = config.get(name) or 0
        if type(value) is not int or value < 0:
            raise ValueError(f"{where}: {name} is a whole number, got {value!r}.")
        if value:
            return value
    return 0

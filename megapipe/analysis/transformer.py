"""A decoder by its sizes: operations, parameters and bytes of its layers.

Bytes of activations are those of Korthikanti et al. (https://arxiv.org/abs/2205.05198, sections 4 and 5): 34 bytes for
each token and hidden unit of a layer of GPT, scores of attention apart, which flash attention or their selective
recomputation do not keep. They are added up here tensor by tensor, in 16 bits, so that grouped heads, gated layers and
experts have them too.
Operations are those of its appendix A: 2 for each weight and token, and 4 s h for the scores of a layer's attention
over s tokens; a backward takes twice as many.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..plan import parse_json, read_text

SIZES = {
    "layers": ["num_hidden_layers", "n_layer"],
    "hidden": ["hidden_size", "n_embd", "n_embed"],
    "heads": ["num_attention_heads", "n_head"],
    "vocabulary": ["vocab_size"],
    "kv_heads": ["num_key_value_heads", "num_kv_heads"],
    "head_size": ["head_dim"],
    "ffn": ["intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"],
    "experts": ["num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"],
    "experts_per_token": ["num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts"],
}
"""Their names in configs of transformers."""

OF_EXPERTS = {
    "ffn": ["moe_intermediate_size"],
    "shared": ["shared_expert_intermediate_size"],
    "num_shared": ["n_shared_experts", "moe_num_shared_experts"],
}
"""The same, where there are experts."""

FACTS = ("model_type", "tie_word_embeddings", "multi_query", "new_decoder_architecture", "kv_lora_rank")
"""What is read besides."""

TIED = (
    "biogpt bloom cohere cohere2 cohere2_moe ctrl ernie4_5 ernie4_5_moe falcon falcon_mamba gemma gemma2 "
    "gemma3 gemma3_text gemma3n gemma3n_text gemma4 gemma4_text gpt2 gpt_bigcode gpt_neo jetmoe lfm2 "
    "lfm2_moe mamba minicpm3 mpt openai-gpt opt recurrent_gemma smollm3 starcoder2 vaultgemma xglm zamba "
    "zamba2"
)
"""Kinds of models of transformers that are tied where their config does not say."""

PLAIN = {"bloom", "falcon", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gptj", "opt", "phi", "starcoder2"}
"""Kinds of models of transformers whose MLP has two matrices; those of the others are gated, and have three."""


@dataclass(frozen=True)
class Transformer:
    """A decoder.

    Attributes:
        layers, hidden, heads, vocabulary: its sizes.
        kv_heads: heads of keys and values; 0 for as many as there are heads.
        head_size: 0 for hidden / heads.
        ffn: units between the matrices of an MLP, or of one expert; 0 for 4 hidden.
        gated: an MLP has three matrices.
        experts, experts_per_token: of each layer; 0 for an MLP instead.
        shared_ffn: units of the experts that every token goes through.
        tied: the head's matrix is the embedding's.
        dropout: with masks of dropout, as GPT has them.
    """

    layers: int
    hidden: int
    heads: int
    vocabulary: int
    kv_heads: int = 0
    head_size: int = 0
    ffn: int = 0
    gated: bool = False
    experts: int = 0
    experts_per_token: int = 0
    shared_ffn: int = 0
    tied: bool = False
    dropout: bool = False

    @property
    def query_size(self) -> int:
        return self.heads * (self.head_size or self.hidden // self.heads)

    @property
    def kv_size(self) -> int:
        """The size of keys, and of values."""
        return self.query_size * (self.kv_heads or self.heads) // self.heads

    @property
    def ffn_size(self) -> int:
        return self.ffn or 4 * self.hidden

    # Parameters

    @property
    def attention_weights(self) -> int:
        return 2 * self.hidden * (self.query_size + self.kv_size)

    def mlp_weights(self, ffn: int) -> int:
        return (3 if self.gated else 2) * self.hidden * ffn

    @property
    def expert_weights(self) -> int:
        """All experts of a layer, those left out that every token goes through."""
        return self.experts * self.mlp_weights(self.ffn_size)

    @property
    def other_weights(self) -> int:
        """All of a layer that is not in `expert_weights`."""
        mlp = self.mlp_weights(self.shared_ffn if self.experts else self.ffn_size)
        return self.attention_weights + mlp + self.hidden * (2 + self.experts)

    @property
    def table_weights(self) -> int:
        """The embedding, or the head."""
        return self.vocabulary * self.hidden

    @property
    def weights(self) -> int:
        tables = 1 if self.tied else 2
        return self.layers * (self.expert_weights + self.other_weights) + tables * self.table_weights

    # Operations, for a token

    def products(self) -> float:
        """Those of a layer's F with its weights: as many again in B, and in W."""
        active = self.mlp_weights(
            self.shared_ffn + self.experts_per_token * self.ffn_size if self.experts else self.ffn_size
        )
        return 2.0 * (self.attention_weights + active + self.hidden * self.experts)

    def scores(self, sequence: int) -> float:
        """Those of attention in a layer's F: twice as many in its B, none in its W."""
        return 4.0 * sequence * self.query_size

    def head(self) -> float:
        return 2.0 * self.table_weights

    def operations(self, sequence: int) -> float:
        """All of a step, with nothing computed twice."""
        return 3 * (self.layers * (self.products() + self.scores(sequence)) + self.head())

    # Bytes, for a token

    def saved(self) -> float:
        """What a layer's F leaves."""
        hidden, query, kv = self.hidden, self.query_size, self.kv_size
        attention = 2 * hidden + 4 * query + 4 * kv + self.dropout * hidden  # input, Q, output; K and V; mask
        tokens = self.experts_per_token if self.experts else 1
        inner = 6 if self.gated else 4  # the inputs of the activation, and what the last matrix multiplies
        mlp = inner * (tokens * self.ffn_size + self.shared_ffn) + 2 * hidden + self.dropout * hidden
        dispatched = 4 * tokens * hidden if self.experts else 0  # the inputs and the outputs of experts
        return attention + mlp + dispatched + 4 * hidden  # the inputs of two norms

    def boundary(self) -> float:
        """The hidden states between two layers: what recomputation keeps of a layer, and what is sent to the next
        stage."""
        return 2.0 * self.hidden

    def logits(self) -> float:
        """Logits in 32 bits, and the inputs of the last norm and of the head."""
        return 4.0 * self.vocabulary + 4.0 * self.hidden


def read_config(path: str | Path) -> Transformer:
    """The sizes in a config.json of Hugging Face.

    Raises:
        ValueError: the file is none, or its layers are not of a kind that is known here.
    """
    config = parse_json(path, read_text(path))
    inner = (config.get("text_config") or {}) if isinstance(config, dict) else None
    if not isinstance(inner, dict):
        raise ValueError(f"{path} is no config.json of Hugging Face.")
    return model_of({**config, **inner}, str(path))


def model_of(config: dict[str, Any], where: str) -> Transformer:
    """The sizes in a config of Hugging Face.

    Raises:
        ValueError: some are missing or no sizes, or its layers are not of a kind that is known here.
    """
    sizes: dict[str, Any] = {name: _size(config, names, where) for name, names in SIZES.items()}
    of_experts = {name: _size(config, names, where) if sizes["experts"] else 0 for name, names in OF_EXPERTS.items()}
    if not all(sizes[name] for name in ("layers", "hidden", "heads", "vocabulary")):
        raise ValueError(
            f"{where} is no config.json with num_hidden_layers, hidden_size, num_attention_heads and vocab_size: give "
            "one, or these, such as hidden_size=4096."
        )
    if sizes["experts"] and not sizes["experts_per_token"]:
        raise ValueError(f"{where} has {sizes['experts']} experts, but not num_experts_per_tok: give both.")
    if config.get("kv_lora_rank"):
        raise ValueError(f"{where} has latent attention (kv_lora_rank), whose sizes are not known here.")
    kind = config.get("model_type")
    sizes["ffn"] = of_experts["ffn"] or sizes["ffn"]
    sizes["shared_ffn"] = of_experts["shared"] or of_experts["num_shared"] * of_experts["ffn"]
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        sizes["kv_heads"] = 1
    is_tied = bool(config.get("tie_word_embeddings", kind in TIED.split()))
    return Transformer(**sizes, gated=kind not in PLAIN, tied=is_tied)


def _size(config: dict[str, Any], names: Sequence[str], where: str) -> int:
    """The first of these that is there; 0 where none is."""
    for name in names:
        value = config.get(name) or 0
        if type(value) is not int or value < 0:
            raise ValueError(f"{where}: {name} is a whole number, got {value!r}.")
        if value:
            return value
    return 0

"""Which decoders of transformers are cut into stages, and which are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from tools.ranks import RankPool, on_ranks

pytest.importorskip("transformers")

import torch
import transformers
from tools import hf_models

from megapipe.integrations.transformers import CannotCutError, build_chunks, count_items
from megapipe.integrations.transformers.check import check_cut
from megapipe.integrations.transformers.whole import make_meta_model, make_small_config

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_topk": 2, "moe_intermediate_size": 16}
ZAMBA = {"num_hidden_layers": 8, "attn_layer_period": 3, "attn_layer_offset": 1}
FALCON_H1 = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8}


def make_config(kind: str, **changes: Any) -> Any:
    """Small, of a kind that hf_models.py does not have."""
    return transformers.AutoConfig.for_model(kind, **{**hf_models.BASE, "num_hidden_layers": 4, **changes})


def build(rank: int, kind: str, options: dict[str, Any]) -> None:
    hf_models.initialise(2)
    build_chunks(make_config(kind, **options), "1f1b")


@pytest.mark.parametrize(
    ("kind", "options", "difference"),
    [
        ("nanochat", {}, "layer 0 is not given the hidden_states that it has in the whole model"),
        ("zamba", ZAMBA, "layer 4 is not given the original_hidden_states that it has in the whole model"),
        ("zamba", {**ZAMBA, "tie_word_embeddings": True}, "stages 0 and 1 share a parameter (model.layers.2."),
        ("falcon_h1", FALCON_H1, "stage 0 hands on {'hidden_states': [32]} and not {'hidden_states': [2, 6, 32]}"),
        ("xlstm", {"num_heads": 4}, "tried at a small size, it fails with AttributeError"),
    ],
    ids=["nanochat", "zamba", "zamba-tied", "falcon-h1", "xlstm"],
)
def test_what_would_be_trained_wrong_is_refused_on_every_rank(
    ranks: RankPool, kind: str, options: dict[str, Any], difference: str
) -> None:
    """Nanochat has a norm before its layers too, and Zamba's layers read the embeddings: both were trained, and their
    gradients were wrong. The others failed with an AttributeError, or on one rank only."""
    errors = ranks.run(2, build, kind, options, errors=True)
    assert [type(error) for error in errors] == [CannotCutError] * 2
    assert str(errors[0]) == str(errors[1])
    assert difference in str(errors[0])


@pytest.mark.parametrize(
    ("kind", "options", "layout"),
    [
        ("afmoe", EXPERTS, None),
        ("hunyuan_v1_moe", {**EXPERTS, "head_dim": 8, "sep_token_id": 2, "eod_token_id": 2}, None),
        ("zamba", {**ZAMBA, "tie_word_embeddings": True}, [8, 0]),
    ],
    ids=["afmoe", "hunyuan-moe", "zamba on one stage"],
)
@on_ranks(2)
def test_what_is_cut_has_the_gradients_of_the_whole_model(
    rank: int, kind: str, options: dict[str, Any], layout: list[int] | None, tmp_path: Path
) -> None:
    """Routers that keep their weight in a layer of theirs were an AttributeError, and weights that layers share were
    missing in files."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(make_config(kind, **options)).train()
    hf_models.save_on_first(model, tmp_path)
    chunks = hf_models.load_chunks(tmp_path, "1f1b", layout=layout)
    hf_models.compare("1f1b", chunks, model, count_items(hf_models.batches(4)))


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("llama", {"num_attention_heads": 64, "num_key_value_heads": 8, "hidden_size": 8192}),
        ("deepseek_v3", {"num_hidden_layers": 5}),
        ("jamba", {"num_hidden_layers": 8}),
        ("granitemoehybrid", {"num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2}),
    ],
)
def test_a_large_model_is_tried_with_all_its_layers_at_a_small_size(kind: str, options: dict[str, Any]) -> None:
    config = transformers.AutoConfig.for_model(kind, **options)
    number = config.num_hidden_layers
    check_cut(config, [range(1), range(1, number), range(number, number)])
    whole, small = (make_meta_model(one, torch.float32) for one in (config, make_small_config(config)))
    assert sum(p.numel() for p in whole.parameters()) > 1e9
    assert sum(p.numel() for p in small.parameters()) < 1e7
    modules = ([(name, type(module)) for name, module in model.named_modules()] for model in (whole, small))
    assert next(modules) == next(modules)


def test_generators_go_on_where_they_were() -> None:
    """torch.manual_seed seeds those of all GPUs, which nothing set back."""
    before = torch.get_rng_state()
    with mock.patch.object(torch.cuda, "manual_seed_all") as seed_all:
        check_cut(hf_models.make_config("llama"), [range(4), range(4, 8)])
        build_chunks(hf_models.make_config("llama"), "no_pipelining")
    assert torch.equal(torch.get_rng_state(), before)
    seed_all.assert_not_called()

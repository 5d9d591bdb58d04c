"""Which decoders of transformers are cut into stages, and which are refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from tools.ranks import RankPool, on_ranks

pytest.importorskip("transformers")

import torch
import transformers
from tools import hf_kinds, hf_models

from megapipe.integrations.transformers import CannotCutError, build_chunks
from megapipe.integrations.transformers.cut_check import check_cut
from megapipe.integrations.transformers.whole_model import make_meta_model, make_model, make_small_config

TWO = {"num_hidden_layers": 2}
SHARED = {"num_hidden_layers": 4, "layers_block_type": ["linear_attention"] * 2 + ["hybrid"] * 2}


def build(rank: int, kind: str, options: dict[str, Any]) -> None:
    hf_models.initialise(2)
    build_chunks(hf_kinds.make_config(kind, **options), "1f1b")


@pytest.mark.skipif("hrm_text" not in hf_kinds.KINDS, reason="this transformers has none")
def test_what_would_be_trained_wrong_is_refused_on_every_rank(ranks: RankPool) -> None:
    errors = ranks.run(2, build, "hrm_text", {}, errors=True)
    assert [type(error) for error in errors] == [CannotCutError] * 2
    assert str(errors[0]) == str(errors[1])
    assert "it runs its layers in the order [0, 1, 2, 3, 0, 1, 2, 3" in str(errors[0])


def check_halves(kind: str, options: dict[str, Any], layout: list[int]) -> None:
    first, second = layout
    check_cut(hf_kinds.make_config(kind, **options), [range(first), range(first, first + second)])


@pytest.mark.parametrize(
    ("kind", "options", "difference"),
    [
        ("zamba", SHARED | {"tie_word_embeddings": True}, "stages 0 and 1 share a parameter (model.layers.2."),
        ("inkling2_text", {}, "its stages have the loss"),  # code between layers keeps tensors
    ],
)
def test_what_would_be_trained_wrong_is_refused(kind: str, options: dict[str, Any], difference: str) -> None:
    if kind not in hf_kinds.KINDS:
        pytest.skip(f"this transformers has no {kind}")
    with pytest.raises(CannotCutError, match=re.escape(difference)):
        check_halves(kind, options, [3, 1])


@pytest.mark.parametrize(
    ("kind", "options", "layout"),
    [
        ("zamba", SHARED | {"tie_word_embeddings": False}, [2, 2]),  # layers read the embeddings
        ("zamba", SHARED | {"tie_word_embeddings": True}, [4, 0]),
        ("opt", TWO, [0, 2]),
        ("bloom", TWO, [2, 0]),
        ("bert", TWO, [1, 1]),
        ("deepseek_v4", TWO, [1, 1]),  # has several streams, and routes by tokens
    ],
)
def test_halves_in_this_process_have_the_gradients_of_the_whole(
    kind: str, options: dict[str, Any], layout: list[int]
) -> None:
    """`check_cut` compares a small copy, and what it finds wrong is refused."""
    check_halves(kind, options, layout)


@pytest.mark.parametrize(
    ("kind", "schedule", "options"),
    [
        ("nanochat", "1f1b", TWO),  # norms the embeddings too
        ("gemma4_text", "zbv", {}),  # whose layers read embeddings of their own, and keys of earlier ones
    ],
)
@on_ranks(2)
def test_what_is_cut_has_the_gradients_of_the_whole_model(
    rank: int, kind: str, schedule: str, options: dict[str, Any], tmp_path: Path
) -> None:
    hf_kinds.check(kind, schedule, tmp_path, **options)


@on_ranks(2)
def test_stages_that_read_tokens_say_so(rank: int) -> None:
    hf_models.initialise(2)
    (chunk,) = build_chunks(hf_kinds.make_config("gemma4_text"), "1f1b")
    if rank:
        border = chunk.crossing.border
        hidden = torch.zeros(2, 6, chunk.config.hidden_size)
        chunk.set_input_tensor(dict.fromkeys([*border.takes, *border.passes], hidden))
        with pytest.raises(ValueError, match="stage 1 of Gemma4ForCausalLM reads input_ids too: let data_iterator"):
            chunk()


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("llama", {"num_attention_heads": 64, "num_key_value_heads": 8, "hidden_size": 8192, "num_hidden_layers": 8}),
        ("deepseek_v3", {"num_hidden_layers": 5}),
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


@pytest.mark.parametrize("kind", ["minicpm3", "glm4_moe_lite", "bailing_hybrid"])
def test_a_small_model_has_a_small_copy(kind: str) -> None:
    """The copy by which a cut is checked had heads of size 0: eight kinds with latent attention were refused."""
    if kind not in hf_kinds.KINDS:
        pytest.skip("this transformers has none")
    known = transformers.AutoConfig.for_model(kind).to_dict()
    sizes = {"hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 32, "vocab_size": 128}
    sizes |= {"num_attention_heads": 8, "num_key_value_heads": 8, "pad_token_id": None}
    options = {"num_hidden_layers": 4, **hf_kinds.NEEDED.get(kind, {})}
    options |= {name: size for name, size in sizes.items() if name in known}
    config = transformers.AutoConfig.for_model(kind, **options)
    model = make_model(config, torch.float32)
    tokens = torch.randint(config.vocab_size, (1, 8))
    assert model(tokens).logits.shape == (1, 8, config.vocab_size)
    small = make_small_config(config)
    assert make_model(small, torch.float32)(tokens % small.vocab_size).logits.shape[-1] == small.vocab_size

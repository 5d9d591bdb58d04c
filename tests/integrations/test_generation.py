"""Models of transformers write through a pipeline what they write by themselves, token by token.
models_of_transformers.py has more of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tools.ranks import on_ranks

pytest.importorskip("transformers")

import torch
from tools import hf_generation, hf_models
from transformers import GenerationConfig

from megapipe import parallel_state
from megapipe.integrations.transformers import build_chunks, generate


@on_ranks(2)
def test_tokens_are_those_of_transformers(rank: int, tmp_path: Path) -> None:
    hf_generation.check(hf_models.make_model("gemma2", initializer_range=0.3), "zbv", tmp_path)


@on_ranks(2)
def test_training_is_left_as_it_was(rank: int) -> None:
    hf_models.initialise(2)
    chunks = build_chunks(hf_models.make_config("llama"), "1f1b")
    chunks[0].own_layers[0].eval()
    before = [module.training for module in chunks[0].modules()]
    state = torch.get_rng_state()
    generate(chunks, "1f1b", hf_generation.PROMPTS, max_new_tokens=2, do_sample=True, seed=3)
    assert [module.training for module in chunks[0].modules()] == before
    assert torch.equal(torch.get_rng_state(), state)


@on_ranks(2)
def test_sharded_chunks_write(rank: int) -> None:
    """FSDP2's classes make a copy from anew, which failed: LlamaForCausalLM.__init__() misses its config."""
    parallel_state.initialize_model_parallel()
    chunks = build_chunks(hf_models.make_config("llama"), "1f1b")
    wanted = generate(chunks, "1f1b", hf_generation.PROMPTS, max_new_tokens=3)
    hf_models.shard(chunks)
    assert torch.equal(generate(chunks, "1f1b", hf_generation.PROMPTS, max_new_tokens=3), wanted)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"temprature": 2.0}, "temprature"),
    ({"num_beams": 2}, "there are no beams"),
    ({"return_dict_in_generate": True}, "takes no return_dict_in_generate=True, .* pass False"),
    ({"guidance_scale": 2.0}, "takes no guidance_scale=2.0, since guidance runs the model a second time"),
    ({"generation_config": GenerationConfig(cache_implementation="static")}, "takes no cache_implementation='static'"),
    ({"num_microbatches": 4}, "6 sequences cannot be split into 4 microbatches of the same size"),
]


@on_ranks(2)
def test_errors_of_the_last_rank_are_told_to_all(rank: int) -> None:
    hf_models.initialise(2)
    chunks = build_chunks(hf_models.make_config("llama"), "1f1b")
    for options, message in WRONG:
        with pytest.raises(ValueError, match=message):
            generate(chunks, "1f1b", hf_generation.PROMPTS, max_new_tokens=3, **options)

"""Chunks as libraries take models: cut from one in memory, called for all that it returns, and asked what they take."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from tools.ranks import on_ranks

pytest.importorskip("transformers")

import torch
import transformers
from tools import hf_models

from megapipe.integrations.transformers import build_chunks, count_items


@pytest.mark.parametrize(("name", "schedule"), [("mixtral", "zbv"), ("gemma2", "1f1b")])
@on_ranks(2)
def test_a_model_in_memory_is_cut(rank: int, name: str, schedule: str) -> None:
    """And a function of the user's own is called besides what sums the gradients of a tied weight. It took the place of
    that, and copies grew apart without a word."""
    hf_models.initialise(2)
    model = hf_models.make_model(name, attn_implementation="eager")
    model.get_input_embeddings().weight.requires_grad_(name == "gemma2")
    model.generation_config.max_new_tokens = 7
    chunks = build_chunks(model, schedule)
    assert all(chunk.config._attn_implementation == "eager" for chunk in chunks)
    assert all(chunk.generation_config.max_new_tokens == 7 for chunk in chunks)
    whole = dict(model.named_parameters(remove_duplicate=False))
    for chunk in chunks:
        for own, parameter in chunk.named_parameters(remove_duplicate=False):
            assert torch.equal(parameter, whole[own])
            assert parameter.requires_grad == whole[own].requires_grad
    called: list[int] = []
    chunks[0].config.finalize_model_grads_func = lambda *_: called.append(rank)  # also where weights are tied
    hf_models.compare(schedule, chunks, model, count_items(hf_models.batches(2)))
    assert called == [rank]


def test_a_class_that_its_config_does_not_make_is_refused() -> None:
    """Its forward would have been left out."""
    own = type("Mine", (transformers.LlamaForCausalLM,), {})
    with pytest.raises(ValueError, match="the model is a Mine, but its config makes a LlamaForCausalLM"):
        build_chunks(own(hf_models.make_config("llama")), "1f1b")
    with pytest.raises(ValueError, match="takes models of transformers, got a Linear: "):
        build_chunks(torch.nn.Linear(2, 2), "1f1b")


@on_ranks(2)
def test_the_last_stage_gives_all_that_the_model_returns(rank: int) -> None:
    """Routers of earlier stages too. Parts of the model are the whole model's `at_the_end`, once."""
    hf_models.initialise(2)
    model = hf_models.make_model("mixtral")
    chunks = build_chunks(model, "1f1b")
    (batch,) = hf_models.batches(1)
    expected = model(**batch, use_cache=False)
    found: list[Any] = []

    def forward_step(batches: Any, chunk: Any) -> Any:
        if not chunk.stage.is_last:
            return chunk(**next(batches)), None
        with chunk.at_the_end():
            output = chunk(**next(batches), return_dict=True)
            hidden = chunk.base_model(input_ids=batch["input_ids"], use_cache=False, output_router_logits=True)
        found.extend([output, hidden])
        return output.loss, lambda loss: (loss, 1, loss.detach())

    hf_models.run("1f1b", chunks, [batch], forward_step_func=forward_step)
    if found:
        assert type(found[0]) is type(expected)
        assert torch.equal(found[0].loss, expected.loss)
        assert torch.equal(found[0].logits, expected.logits)
        for own, wanted in zip(found[0].router_logits, expected.router_logits):
            assert torch.equal(own, wanted)
        assert len(found[0].router_logits) == len(expected.router_logits) == len(found[1].router_logits)
        assert torch.equal(chunks[0].lm_head(found[1].last_hidden_state), expected.logits)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt-neox"])
def test_a_chunk_takes_what_the_model_takes(name: str) -> None:
    """Datasets lost no column, and losses were taken to be divided by a number of items whatever the model does."""
    model = hf_models.make_model(name)
    (chunk,) = build_chunks(model, "no_pipelining")
    own, wanted = (inspect.signature(one.forward).parameters for one in (chunk, model))
    by_place = ["input_ids", "attention_mask", "position_ids", "labels", "num_items_in_batch"]
    assert list(own)[:5] == by_place
    assert own.keys() == wanted.keys() | {*by_place}
    assert [own[name].default for name in wanted] == [wanted[name].default for name in wanted]
    assert all(one.kind in (one.KEYWORD_ONLY, one.VAR_KEYWORD) for one in list(own.values())[5:])

"""Heads that give scores to tokens or sequences, as critics and reward models have them."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
from tools.ranks import on_ranks

pytest.importorskip("transformers")

import torch
import torch.distributed as dist
import transformers
from tools import hf_models
from torch import nn

import megapipe
from megapipe.integrations.transformers import CannotCutError, build_chunks, load_weights


def make(kind: str, **options: Any) -> Any:
    config = hf_models.make_config("qwen2", pad_token_id=0, num_labels=3, **options)
    torch.manual_seed(0)
    return getattr(transformers, f"AutoModelFor{kind}").from_config(config).eval()


def batches_for(kind: str, number: int) -> list[dict[str, Any]]:
    found = []
    for batch in hf_models.batches(number):
        labels = batch["input_ids"] % 3
        found.append({"input_ids": batch["input_ids"], "labels": labels[:, 0] if "Seq" in kind else labels})
    return found


@pytest.mark.parametrize(("kind", "schedule"), [("TokenClassification", "zbv"), ("SequenceClassification", "1f1b")])
@on_ranks(2)
def test_scores_of_tokens_and_sequences(rank: int, kind: str, schedule: str, tmp_path: Path) -> None:
    """Losses and gradients are the whole model's, and its own class loads what is saved."""
    model = make(kind)
    hf_models.save_on_first(model, tmp_path / "given")
    chunks = [chunk.eval() for chunk in hf_models.load_chunks(tmp_path / "given", schedule)]
    assert isinstance(chunks[0], type(model))
    for chunk in chunks:
        megapipe.weight_grad.convert(chunk)
    hf_models.compare(schedule, chunks, model, batches_for(kind, 4))
    hf_models.assert_saved(chunks, model, tmp_path / "saved")


@on_ranks(2)
def test_a_value_head_on_a_model_of_language(rank: int, tmp_path: Path) -> None:
    """A critic begins as the actor, with a new head, which is drawn."""
    hf_models.save_on_first(hf_models.make_model("qwen2"), tmp_path)
    hf_models.initialise(2)
    config = hf_models.make_config("qwen2", num_labels=1)
    config.architectures = ["Qwen2ForTokenClassification"]
    chunks = build_chunks(config, "zbv", seed=5, dtype=torch.float32)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load_weights(chunks, tmp_path)
    told = [str(one.message) for one in caught if "no weights for score." in str(one.message)]
    assert len(told) == (rank == 0)
    if rank == 0:
        (last,) = (chunk for chunk in chunks if chunk.stage.is_last)
        assert isinstance(last.score, nn.Linear)
        assert last.score.out_features == 1


def make_head() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 8), nn.Tanh(), nn.Linear(8, 2, bias=False))


class CriticForTokenClassification(transformers.Qwen2ForTokenClassification):
    """In one process, with a head of its own. By the name of its class transformers finds its loss."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.score = make_head()


def layer_by_layer(model: Any, folder: Path, schedule: str, head: nn.Module) -> list[Any]:
    return hf_models.load_chunks(folder, schedule, head=head, device="meta")


def in_memory(model: Any, folder: Path, schedule: str, head: nn.Module) -> list[Any]:
    hf_models.initialise(2)
    return build_chunks(model, schedule, head=head)


@pytest.mark.parametrize(("way", "schedule"), [(layer_by_layer, "zbv"), (in_memory, "1f1b")])
@pytest.mark.filterwarnings("ignore:.*they stay as they were given")
@on_ranks(2)
def test_a_head_of_ones_own(rank: int, way: Any, schedule: str, tmp_path: Path) -> None:
    """It goes on a model of language, and is saved under its name: a class that has it loads it, and so do chunks."""
    model = hf_models.make_model("qwen2", tie_word_embeddings=True)
    hf_models.save_on_first(model, tmp_path / "given")
    torch.manual_seed(1)
    head = make_head()
    chunks = [chunk.eval() for chunk in way(model, tmp_path / "given", schedule, head)]
    for chunk in chunks:
        megapipe.weight_grad.convert(chunk)
    whole = CriticForTokenClassification(chunks[0].config.model_config).eval()
    whole.model.load_state_dict(model.model.state_dict())
    whole.score.load_state_dict(head.state_dict())
    assert whole.num_labels == 2
    microbatches = [{**batch, "labels": batch["labels"].clamp(-100, 1)} for batch in hf_models.batches(4)]
    hf_models.compare(schedule, chunks, whole, microbatches)
    hf_models.assert_saved(chunks, whole, tmp_path / "saved")
    again = way(whole, tmp_path / "saved", schedule, make_head() if way is not in_memory else whole.score)
    for chunk in again:
        for name, parameter in chunk.named_parameters():
            assert torch.equal(parameter, whole.get_parameter(name)), name
    with pytest.raises(
        ValueError, match=r"weights for score\.\d\..*the model's score has none of this name: pass build"
    ):
        hf_models.load_chunks(tmp_path / "saved", schedule)


@on_ranks(1)
def test_heads_that_give_no_scores(rank: int) -> None:
    hf_models.initialise(1)
    config, taken = (
        hf_models.make_config("llama"),
        r"hidden states \[sequences, tokens, 32\], and for \[1, 2, 32\] there ",
    )
    with pytest.raises(ValueError, match=f"{taken}came RuntimeError: .*mat1"):
        build_chunks(config, "1f1b", head=nn.Linear(16, 1))
    with pytest.raises(ValueError, match=rf"{taken}came \[1, 2\]"):
        build_chunks(config, "1f1b", head=nn.Sequential(nn.Linear(32, 1), nn.Flatten(1)))
    with pytest.raises(CannotCutError, match="transformers has none for Olmo2Config"):
        build_chunks(hf_models.make_config("olmo2"), "1f1b", head=nn.Linear(32, 1))


@on_ranks(2)
def test_scores_are_no_model_of_language(rank: int, tmp_path: Path) -> None:
    """Of a folder whose config has lost its architectures the head was left out without a word, where the model of
    language ties its own."""
    model = make("TokenClassification", tie_word_embeddings=True)
    if rank == 0:
        model.save_pretrained(tmp_path)
        config = json.loads((tmp_path / "config.json").read_text())
        del config["architectures"]
        (tmp_path / "config.json").write_text(json.dumps(config))
    dist.barrier()
    with pytest.raises(
        ValueError, match=r"weights for score\..*, and a Qwen2ForCausalLM, which is built as the config"
    ):
        hf_models.load_chunks(tmp_path, "1f1b")
    config = transformers.AutoConfig.from_pretrained(tmp_path, architectures=["Qwen2ForCausalLM"])
    (chunk,) = build_chunks(config, "1f1b", seed=None)
    load_weights([chunk], tmp_path)
    for name, parameter in chunk.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name.replace("lm_head", "model.embed_tokens"))), name

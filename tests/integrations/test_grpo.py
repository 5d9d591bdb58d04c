"""GRPO by the parts that docs/huggingface.md names, against the whole model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tools.ranks import on_ranks

pytest.importorskip("transformers")

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from tools import hf_models
from torch import Tensor, nn

import megapipe
from megapipe.integrations.transformers import generate, save_pretrained

PAD, ENDS = 0, [*range(3, 20)]  # which are a third of all tokens, so that answers have different lengths
GROUP, PROMPT = 4, 5
BETA, CLIP = 0.1, 0.2
NAMES = ("policy", "reference")


def log_probabilities(logits: Tensor, labels: Tensor) -> Tensor:
    """Of each token of an answer; 0 elsewhere."""
    return -F.cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:], reduction="none")


def loss_func(batch: dict[str, Tensor], logits: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Before the policy is trained, only the log-probabilities."""
    found = log_probabilities(logits, batch["labels"])
    if "policy" not in batch:
        return found.sum(), {"found": found.detach()}
    ratio, behind = (found - batch["policy"]).exp(), batch["reference"] - found
    gain = batch["advantage"][:, None] * torch.stack([ratio, ratio.clamp(1 - CLIP, 1 + CLIP)])
    loss = -(gain.amin(0) - BETA * (behind.exp() - behind - 1)).sum() / (batch["labels"] != -100).sum()
    return loss, {"loss": loss.detach()}


def forward_step(batches: Iterator[dict[str, Tensor]], chunk: nn.Module) -> tuple[Any, Any]:
    batch = next(batches)
    return chunk(input_ids=batch["input_ids"]), lambda logits: loss_func(batch, logits)


def batches_of(sequences: Tensor) -> list[dict[str, Tensor]]:
    """A group of answers each, as long as the longest of them. Small tokens are rewarded."""
    found = []
    for group in sequences.split(GROUP):
        labels = torch.where((torch.arange(group.shape[1]) < PROMPT) | (group == PAD), -100, group)
        length = int((labels != -100).sum(1).max()) + PROMPT
        rewards = (30 - group[:, PROMPT:]).where(labels[:, PROMPT:] != -100, torch.tensor(0)).float().mean(1)
        advantage = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        found.append({"input_ids": group[:, :length], "labels": labels[:, :length], "advantage": advantage})
    return found


@on_ranks(2)
def test_losses_and_gradients_are_those_of_the_whole_model(rank: int, tmp_path: Path) -> None:
    whole = {name: hf_models.make_model("qwen2", seed, initializer_range=0.3).eval() for seed, name in enumerate(NAMES)}
    chunks = {}
    for name, model in whole.items():
        hf_models.save_on_first(model, tmp_path / name)
        options = {"variable_seq_lengths": True, "broadcast_reports": True}
        chunks[name] = [
            megapipe.weight_grad.convert(one.eval()) for one in hf_models.load_chunks(tmp_path / name, "zbv", **options)
        ]
    policy, model = chunks["policy"], whole["policy"]
    prompts = torch.randint(20, hf_models.VOCABULARY, (3, PROMPT), generator=torch.Generator().manual_seed(0))
    options = {"num_return_sequences": GROUP, "do_sample": True, "max_new_tokens": 8}
    options |= {"eos_token_id": ENDS, "pad_token_id": PAD}
    microbatches = batches_of(generate(policy, "zbv", prompts, seed=3, **options))
    torch.manual_seed(3)
    expected = batches_of(model.generate(prompts, **options))
    assert len({batch["labels"].shape[1] for batch in microbatches}) > 1
    sizes = {"seq_length": None, "micro_batch_size": None, "forward_step_func": forward_step}
    known = {name: hf_models.run("zbv", chunks[name], microbatches, forward_only=True, **sizes) for name in NAMES}
    for number, (batch, want) in enumerate(zip(microbatches, expected, strict=True)):
        for name in NAMES:
            batch[name] = known[name][number]["found"]  # on every rank
            with torch.no_grad():
                want[name] = log_probabilities(whole[name](want["input_ids"]).logits, want["labels"])
    optimizers = [
        megapipe.PipelinedOptimizer(policy, lambda groups: torch.optim.AdamW(groups, lr=1e-2)),
        torch.optim.AdamW(model.parameters(), lr=1e-2),
    ]
    for _ in range(2):  # in the second, answers have become more likely, or less
        losses = []
        for batch in expected:
            loss, report = loss_func(batch, model(batch["input_ids"], use_cache=False).logits)
            (loss / len(expected)).backward()
            losses.append(report["loss"])
        reports = hf_models.run("zbv", policy, microbatches, **sizes)
        assert [report["loss"] for report in reports] == losses
        hf_models.assert_same_gradients(policy, model)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    save_pretrained(policy, tmp_path / "trained")
    if rank == 0:
        saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "trained")
        hf_models.assert_same_weights(saved, model)
    dist.barrier()

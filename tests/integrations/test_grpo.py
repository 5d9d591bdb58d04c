"""examples/grpo.py against the whole model, with packed microbatches whose number changes from step to step."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path

import pytest
from tools.ranks import on_ranks

pytest.importorskip("transformers")

import torch
import transformers
from tools import hf_models

from megapipe.integrations.transformers import save_pretrained
from megapipe.training import log_probs_of

EXAMPLES = Path(__file__).parents[2] / "examples"
GROUP = 4


def drawn_answers(lengths: tuple[int, ...], seed: int) -> tuple[list[tuple[torch.Tensor, int]], torch.Tensor]:
    """Answers of these lengths behind prompts of 3 tokens, and their rewards."""
    generator = torch.Generator().manual_seed(seed)
    answers = [
        (torch.randint(3, hf_models.VOCABULARY, (3 + length,), generator=generator), 3)
        for length in lengths
        for _ in range(GROUP)
    ]
    return answers, torch.randn(len(answers), generator=generator)


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
@on_ranks(2)
def test_updates_are_those_of_the_whole_model(rank: int, schedule: str, tmp_path: Path) -> None:
    sys.path.insert(0, str(EXAMPLES))
    import grpo

    model, reference = hf_models.make_model("qwen2").eval(), hf_models.make_model("qwen2").eval()
    hf_models.save_on_first(model, tmp_path / "model")
    hf_models.initialise(2)
    settings = {"group_size": GROUP, "updates": 2, "max_tokens": 40, "clip": 0.2, "beta": 0.1, "lora_rank": None}
    settings |= {"lr": 1e-2, "clip_grad": 1e9, "schedule": schedule, "model": tmp_path / "model"}
    trainer = grpo.Trainer(Namespace(**settings))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step, lengths in enumerate([(2, 5, 9), (20,)]):  # in the second step the policy is not the reference any more
        answers, rewards = drawn_answers(lengths, step)
        groups = rewards.view(-1, GROUP)
        advantages = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
        microbatches = grpo.pack_answers(answers, advantages.flatten(), 40)
        assert trainer.learn(answers, rewards) == len(microbatches) == (3, 4)[step]
        number = len(microbatches)
        share = number / sum(int(batch["counts"][:, 1:].sum()) for batch in microbatches)
        for batch in microbatches:
            for name, one in (("policy", model), ("reference", reference)):
                with torch.no_grad():
                    logits = one(**trainer.inputs(batch), use_cache=False).logits
                    batch[name] = log_probs_of(logits[:, :-1], batch["input_ids"][:, 1:])
        for _ in range(2):
            for batch in microbatches:
                logits = model(**trainer.inputs(batch), use_cache=False).logits
                loss, _ = grpo.loss_func(batch, logits, 0.2, 0.1, share)
                (loss / number).backward()
            optimizer.step()
            optimizer.zero_grad()
    save_pretrained(trainer.policy, tmp_path / "trained")
    if rank == 0:
        saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "trained")
        hf_models.assert_same_weights(saved, model)

"""examples/grpo.py against the whole model, with packed microbatches whose number changes from step to step."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from tools.ranks import on_ranks

pytest.importorskip("transformers")

import torch
import transformers
from tools import hf_models, megatron_models

from megapipe.integrations.megatron import build_model_chunks, global_name
from megapipe.integrations.transformers import save_pretrained
from megapipe.training import log_probs_of

EXAMPLES = Path(__file__).parents[2] / "examples"
GROUP = 4


def drawn_answers(lengths: tuple[int, ...], seed: int) -> tuple[list[tuple[torch.Tensor, int]], torch.Tensor]:
    """Answers of these lengths behind prompts of 3 tokens, and their rewards."""
    generator = torch.Generator().manual_seed(seed)
    answers = [
        (torch.randint(3, megatron_models.VOCABULARY, (3 + length,), generator=generator), 3)
        for length in lengths
        for _ in range(GROUP)
    ]
    return answers, torch.randn(len(answers), generator=generator)


def settings(**changes: Any) -> Namespace:
    own = {"group_size": GROUP, "updates": 2, "max_tokens": 40, "clip": 0.2, "beta": 0.1, "lora_rank": None}
    return Namespace(**own, lr=1e-2, clip_grad=1e9, **changes)


def compare_updates(trainer: Any, model: Any, reference: Any, **options: Any) -> None:
    """Let both learn from some answers in two steps, the model in one process."""
    import grpo

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def log_probs(of: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        with torch.no_grad():
            return log_probs_of(logits_of(of, batch)[:, :-1], batch["input_ids"][:, 1:])

    def logits_of(of: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        output = of(**trainer.inputs(batch), **options)
        return getattr(output, "logits", output)

    for step, lengths in enumerate([(2, 5, 9), (20,)]):  # in the second step the policy is not the reference any more
        answers, rewards = drawn_answers(lengths, step)
        groups = rewards.view(-1, GROUP)
        advantages = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
        microbatches = grpo.pack_answers(answers, advantages.flatten(), 40)
        assert trainer.learn(answers, rewards) == len(microbatches) == (3, 4)[step]
        number = len(microbatches)
        share = number / sum(int(batch["counts"][:, 1:].sum()) for batch in microbatches)
        for batch in microbatches:
            batch.update(policy=log_probs(model, batch), reference=log_probs(reference, batch))
        for _ in range(2):
            for batch in microbatches:
                loss, _ = grpo.loss_func(batch, logits_of(model, batch), 0.2, 0.1, share)
                (loss / number).backward()
            optimizer.step()
            optimizer.zero_grad()


@on_ranks(2)
def test_updates_are_those_of_the_whole_model(rank: int, tmp_path: Path) -> None:
    sys.path.insert(0, str(EXAMPLES))
    import grpo

    model, reference = hf_models.make_model("qwen2").eval(), hf_models.make_model("qwen2").eval()
    hf_models.save_on_first(model, tmp_path / "model")
    hf_models.initialise(2)
    trainer = grpo.Trainer(settings(schedule="zbv", model=tmp_path / "model"))
    compare_updates(trainer, model, reference, use_cache=False)
    save_pretrained(trainer.policy, tmp_path / "trained")
    if rank == 0:
        saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "trained")
        hf_models.assert_same_weights(saved, model)


@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "zbv"])
@on_ranks(2)
def test_updates_of_megatrons_chunks(rank: int, schedule: str) -> None:
    """The example's trainer with two methods of its own: what it builds, and masks that tell packed answers apart."""
    pytest.importorskip("megatron")
    sys.path.insert(0, str(EXAMPLES))
    import grpo

    class Trainer(grpo.Trainer):
        def build(self) -> list[Any]:
            return [chunk.eval() for chunk in build_model_chunks(provide, self.args.schedule)]

        def inputs(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            answer, order = (batch["position_ids"] == 0).cumsum(1), torch.arange(batch["position_ids"].shape[1])
            is_seen = (answer[:, :, None] == answer[:, None]) & (order[:, None] >= order)
            return {**super().inputs(batch), "attention_mask": ~is_seen[:, None]}

    of_one = megatron_models.provider(megatron_models.megatron(1))
    model, reference = of_one().eval(), of_one().eval()
    options = {"variable_seq_lengths": True, "moe_token_dispatcher_type": "alltoall"}
    provide = megatron_models.provider(megatron_models.megatron(2, 2, **options))
    trainer = Trainer(settings(schedule=schedule))
    compare_updates(trainer, model, reference)
    for chunk in trainer.policy:
        for name, parameter in chunk.named_parameters():
            assert torch.equal(parameter, model.get_parameter(global_name(chunk, name))), name

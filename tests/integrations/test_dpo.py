"""examples/dpo_hf.py against the whole model, with microbatches of different lengths."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path

import pytest
from tools.ranks import on_ranks

pytest.importorskip("transformers")

import torch
from tools import hf_models
from tools.against import assert_same_losses

from megapipe.training import log_probs_of

EXAMPLES = Path(__file__).parents[2] / "examples"
BETA = 0.5


@on_ranks(2)
def test_losses_and_gradients_are_those_of_the_whole_model(rank: int, tmp_path: Path) -> None:
    sys.path.insert(0, str(EXAMPLES))
    import dpo_hf

    model, reference = hf_models.make_model("qwen2").eval(), hf_models.make_model("qwen2").eval()
    hf_models.save_on_first(model, tmp_path)
    hf_models.initialise(2)
    settings = {"model": tmp_path, "schedule": "zbv", "beta": BETA, "lr": 1e-3, "clip_grad": 1e9, "lora_rank": None}
    trainer = dpo_hf.Trainer(Namespace(**settings))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(0)

    def answer(length: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.randint(3, hf_models.VOCABULARY, (length,), generator=generator)
        return tokens, torch.where(torch.arange(length) < 3, -100, tokens)

    for step in range(2):  # in the second the trained model is not the reference any more
        microbatches = [
            dpo_hf.collate([[answer(length + extra) for extra in (0, step + 1)] for length in lengths])
            for lengths in ((5, 9), (7, 4), (12, 6))
        ]
        losses = []
        for batch in microbatches:
            with torch.no_grad():
                logits = reference(batch["input_ids"]).logits
            known = log_probs_of(logits[:, :-1], batch["input_ids"][:, 1:])
            logits = model(batch["input_ids"], use_cache=False).logits
            loss, _ = dpo_hf.loss_func({**batch, "reference": known}, logits, BETA)
            (loss / len(microbatches)).backward()
            losses.append(loss.detach())
        assert_same_losses(trainer.compare(microbatches), losses, trainer.policy)
        hf_models.assert_same_gradients(trainer.policy, model)
        trainer.update()
        optimizer.step()
        optimizer.zero_grad()

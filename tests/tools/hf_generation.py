"""Small models of transformers that write, through a pipeline and by themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tools import hf_models

from megapipe.integrations.transformers import generate

PAD = 0
PROMPTS = torch.randint(3, hf_models.VOCABULARY, (6, 7), generator=torch.Generator().manual_seed(0))
MASK = (torch.arange(7) >= torch.tensor([[0], [3], [0], [1], [5], [2]])).long()
SAMPLED = {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.2}


def check(model: Any, schedule: str, folder: Path) -> None:
    """Prompts of several lengths, of which some end before others: likeliest tokens, and samples."""
    hf_models.save_on_first(model.eval(), folder)
    chunks = hf_models.load_chunks(folder, schedule)
    model.config.output_router_logits = False  # with which transformers fails
    prompts = PROMPTS.where(MASK == 1, PAD)

    def both(num_microbatches: int | None = None, **options: Any) -> torch.Tensor:
        options = {"attention_mask": MASK, "max_new_tokens": 5, "pad_token_id": PAD, **options}
        torch.manual_seed(3)
        wanted: torch.Tensor = model.generate(prompts, **options)
        found = generate(chunks, schedule, prompts, num_microbatches=num_microbatches, seed=3, **options)
        assert found.tolist() == wanted.tolist()
        return wanted

    greedy = both(do_sample=False, eos_token_id=None)
    ended = both(do_sample=False, eos_token_id=[int(greedy[0, 9]), int(greedy[1, 10])])
    assert (ended == PAD).sum() > (greedy == PAD).sum()
    both(**SAMPLED, num_microbatches=2, eos_token_id=None)
    both(num_return_sequences=2, do_sample=True, eos_token_id=None)

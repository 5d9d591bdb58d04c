"""What the trainers of Hugging Face's models have in common. For dpo_hf.py and grpo.py it is a model that is trained
beside the model that it was, the reference, which runs forward only. All ranks are one pipeline, and each has its
stages of both."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from running import count
from torch import Tensor, nn

import megapipe
from megapipe.integrations.transformers import build_chunks, generate, load_weights, save_pretrained, token_log_probs

Batch = dict[str, Tensor]

OPTIONS = {
    "model": (..., "a folder with config, tokenizer and weights"),
    "output": (..., "folder for the trained model or adapter"),
    "schedule": ("zbv", f"one of {', '.join(megapipe.schedule_names())}"),
    "train_iters": (100, "", count),
    "beta": (0.01, "how much it costs to leave the reference"),
    "lora_rank": (count, "train adapters of this rank only (needs peft); the reference is the model without them"),
    "lr": (1e-6, ""),
    "clip_grad": (1.0, ""),
    "seed": (1234, ""),
}


def add_adapter(chunk: Any, rank: int, seed: int) -> None:
    from peft import LoraConfig

    torch.manual_seed(seed + chunk.stage.index)  # the same on all replicas
    chunk.add_adapter(LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear"))


def write(chunks: list[Any], schedule: Any, tokenizer: Any, texts: list[str], **options: Any) -> tuple[Tensor, Tensor]:
    """What the model says to texts, on every rank.

    Returns:
        The tokens, prompts included, and for those of prompts whether they are no padding.
    """
    tokenizer.padding_side, tokenizer.pad_token = "left", tokenizer.pad_token or tokenizer.eos_token
    if has_chats := tokenizer.chat_template is not None:
        chats = [[{"role": "user", "content": text}] for text in texts]
        texts = tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=False)
    given = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=not has_chats)
    options |= {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    tokens, mask = (given[name].to(chunks[0].device) for name in ("input_ids", "attention_mask"))
    return generate(chunks, schedule, tokens, attention_mask=mask, **options), mask.bool()


class Trainer:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.forward_backward = megapipe.get_forward_backward_func(args.schedule)
        self.policy = self.build()
        self.reference = self.policy if args.lora_rank else self.build()
        for chunk in self.policy:
            if args.lora_rank:
                add_adapter(chunk, args.lora_rank, args.seed)
            megapipe.weight_grad.convert(chunk)
        self.optimizer = megapipe.PipelinedOptimizer(self.policy, lambda groups: torch.optim.AdamW(groups, lr=args.lr))

    def build(self) -> list[Any]:
        model = self.args.model
        chunks = build_chunks(model, self.args.schedule, seed=None, dtype=torch.float32, variable_seq_lengths=True)
        load_weights(chunks, model)
        return [chunk.eval() for chunk in chunks]  # without dropout: the same tokens are equally likely each time

    def inputs(self, batch: Batch) -> Batch:
        """What the model is called with."""
        return {name: batch[name] for name in ("input_ids", "position_ids") if name in batch}

    def log_probs(self, chunks: list[Any], microbatches: list[Batch]) -> list[Tensor]:
        return token_log_probs(chunks, self.forward_backward, [self.inputs(batch) for batch in microbatches])

    def reference_log_probs(self, microbatches: list[Batch]) -> list[Tensor]:
        if not self.args.lora_rank:
            return self.log_probs(self.reference, microbatches)
        for chunk in self.policy:
            chunk.disable_adapters()
        found = self.log_probs(self.policy, microbatches)
        for chunk in self.policy:
            chunk.enable_adapters()
        return found

    def compute_gradients(self, microbatches: list[Batch], loss_func: Callable[..., Any]) -> list[dict[str, Tensor]]:
        """
        Args:
            loss_func: of a microbatch and its logits.

        Returns:
            Its reports, on the rank of the last stage.
        """

        def forward_step(batches: Iterator[Batch], chunk: nn.Module) -> tuple[Any, Any]:
            batch = next(batches)
            return chunk(**self.inputs(batch)), partial(loss_func, batch)

        return self.forward_backward(
            forward_step_func=forward_step,
            data_iterator=[iter(microbatches) for _ in self.policy],
            model=self.policy,
            num_microbatches=len(microbatches),
        )

    def update(self) -> None:
        megapipe.clip_grad_norm_(self.policy, self.args.clip_grad)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self, tokenizer: Any) -> None:
        save_pretrained(self.policy, self.args.output)
        if dist.get_rank() == 0:
            tokenizer.save_pretrained(self.args.output)

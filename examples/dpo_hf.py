"""Train a model of Hugging Face's transformers on preferences, through a pipeline (DPO, https://arxiv.org/abs/2305.18290).

    torchrun --nproc-per-node 4 examples/dpo_hf.py --model path/to/model --data pairs.jsonl --output tuned

Each line of the data is {"prompt": "...", "chosen": "...", "rejected": "..."}. A microbatch is a few pairs, padded to
its own longest sequence, so microbatches differ in length. In each step the reference, which is the model as it was at
first, runs forward only and gives the log-probabilities of the answers. Then the model takes its step with them. All
ranks are one pipeline, and each has its stages of both models.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from typing import Any

import hf_common
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hf_common import Batch
from hf_data import read_rows
from running import count, make_parser
from torch import Tensor, nn
from transformers import AutoTokenizer

from megapipe import parallel_state
from megapipe.training import log_probs_of

OPTIONS = {
    "data": (..., "a .jsonl file of preferences"),
    "pairs_per_microbatch": (1, "", count),
    "pairs_per_step": (16, "", count),
    "max_length": (1024, "tokens that are looked at of prompt and answer", count),
}


def read_pairs(path: str, tokenizer: Any, max_length: int) -> list[list[tuple[Tensor, Tensor]]]:
    """Of each pair the tokens and labels of what was chosen, and of what was rejected."""
    names = ("chosen", "rejected")
    return [[encode(row["prompt"], row[name], tokenizer, max_length) for name in names] for row in read_rows(path)]


def encode(prompt: str, answer: str, tokenizer: Any, max_length: int) -> tuple[Tensor, Tensor]:
    """Labels are the answer's tokens, and -100 in the prompt."""
    if tokenizer.chat_template is not None:
        chat = [{"role": "user", "content": prompt}]
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    before = tokenizer(prompt, add_special_tokens=tokenizer.chat_template is None)["input_ids"]
    after = tokenizer(answer, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
    return torch.tensor(before + after)[:max_length], torch.tensor([-100] * len(before) + after)[:max_length]


def collate(pairs: Sequence[Sequence[tuple[Tensor, Tensor]]]) -> Batch:
    """[2 x pairs, longest]: what was chosen, then what was rejected. Padding comes last, where attention, which looks
    back only, does not see it."""
    ordered = [pair[which] for which in (0, 1) for pair in pairs]
    tokens, labels = (
        nn.utils.rnn.pad_sequence(list(parts), batch_first=True, padding_value=value)
        for parts, value in zip(zip(*ordered), (0, -100))
    )
    return {"input_ids": tokens, "labels": labels}


def loss_func(batch: Batch, logits: Tensor, beta: float) -> tuple[Tensor, dict[str, Tensor]]:
    """The mean over the pairs of a microbatch."""
    found = log_probs_of(logits[:, :-1], batch["input_ids"][:, 1:])
    of_answers = ((found - batch["reference"]) * (batch["labels"][:, 1:] != -100)).sum(1)
    chosen, rejected = of_answers.chunk(2)
    margin = beta * (chosen - rejected)
    loss = -F.logsigmoid(margin).mean()
    return loss, {"loss": loss.detach(), "right": (margin > 0).float().mean()}


class Trainer(hf_common.Trainer):
    def compare(self, microbatches: list[Batch]) -> list[dict[str, Tensor]]:
        """Compute the gradients of the mean over all microbatches."""
        for batch, known in zip(microbatches, self.reference_log_probs(microbatches)):
            batch["reference"] = known
        return self.compute_gradients(microbatches, partial(loss_func, beta=self.args.beta))


def train(args: argparse.Namespace) -> None:
    parallel_state.initialize_model_parallel(dist.get_world_size())
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    pairs = read_pairs(args.data, tokenizer, args.max_length)
    trainer = Trainer(args)
    size, generator = args.pairs_per_microbatch, torch.Generator().manual_seed(args.seed)
    for step in range(args.train_iters):
        drawn = torch.randint(len(pairs), (args.pairs_per_step,), generator=generator).tolist()  # on all ranks the same
        parts = [drawn[start : start + size] for start in range(0, len(drawn), size)]
        reports = trainer.compare([collate([pairs[number] for number in part]) for part in parts])
        trainer.update()
        if reports:
            loss, right = (sum(report[name].item() for report in reports) / len(reports) for name in ("loss", "right"))
            print(f"step {step + 1}/{args.train_iters}: loss {loss:.4f}, {right:.0%} of the pairs in the right order")
    trainer.save(tokenizer)


if __name__ == "__main__":
    options = {**hf_common.OPTIONS, **OPTIONS}
    args = make_parser(__doc__, {"options": options}, schedule="1f1b", beta=0.1).parse_args()
    dist.init_process_group("gloo")  # on GPUs "nccl", with microbatches on the device
    train(args)
    dist.destroy_process_group()

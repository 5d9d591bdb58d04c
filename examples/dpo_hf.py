"""Train a model of Hugging Face's transformers on preferences, through a pipeline (DPO, https://arxiv.org/abs/2305.18290).

    torchrun --nproc-per-node 4 examples/dpo_hf.py --model path/to/model --data pairs.jsonl --output tuned

Each line of the data is {"prompt": "...", "chosen": "...", "rejected": "..."}. A microbatch is a few pairs, padded to
its own longest sequence, so microbatches differ in length. In each step the reference, which is the model as it was at
first, runs forward only and gives the log-probabilities of the answers. Then the model takes its step with them. All
ranks are one pipeline, and each has its stages of both models.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from hf_data import read_rows
from running import make_parser
from torch import Tensor, nn
from transformers import AutoTokenizer

import megapipe
from megapipe import parallel_state
from megapipe.integrations.transformers import build_chunks, load_weights, save_pretrained

Batch = dict[str, Tensor]

OPTIONS = {
    "model": (..., "a folder with config, tokenizer and weights"),
    "data": (..., "a .jsonl file of preferences"),
    "output": (..., "folder for the trained model"),
    "schedule": ("1f1b", f"one of {', '.join(megapipe.schedule_names())}"),
    "pairs_per_microbatch": (1, ""),
    "pairs_per_step": (16, ""),
    "train_iters": (100, ""),
    "max_length": (1024, "tokens that are looked at of prompt and answer"),
    "beta": (0.1, "how much it costs to leave the reference"),
    "lr": (1e-6, ""),
    "clip_grad": (1.0, ""),
    "seed": (1234, ""),
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


def log_probabilities(logits: Tensor, labels: Tensor) -> Tensor:
    """Of the answer in each sequence: [sequences]."""
    of_tokens = F.cross_entropy(logits[:, :-1].float().transpose(1, 2), labels[:, 1:], reduction="none")
    return -of_tokens.sum(1)


def loss_func(batch: Batch, beta: float, logits: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of the pairs, or for the reference only the log-probabilities."""
    found = log_probabilities(logits, batch["labels"])
    if "reference" not in batch:
        return found.sum(), {"reference": found.detach()}
    chosen, rejected = (found - batch["reference"]).chunk(2)
    margin = beta * (chosen - rejected)
    loss = -F.logsigmoid(margin).mean()
    return loss, {"loss": loss.detach(), "right": (margin > 0).float().mean()}


def forward_step(batches: Iterator[Batch], chunk: nn.Module, beta: float) -> tuple[Any, Any]:
    batch = next(batches)
    return chunk(input_ids=batch["input_ids"]), partial(loss_func, batch, beta)


class Trainer:
    def __init__(self, model: str, schedule: str, beta: float, lr: float) -> None:
        self.step = partial(forward_step, beta=beta)
        self.forward_backward = megapipe.get_forward_backward_func(schedule)
        self.policy, self.reference = (
            build_chunks(model, schedule, seed=None, dtype=torch.float32, variable_seq_lengths=True) for _ in range(2)
        )
        for chunks in (self.policy, self.reference):
            load_weights(chunks, model)
            for chunk in chunks:
                chunk.eval()  # without dropout: both have to say the same at first
        for chunk in self.policy:
            megapipe.weight_grad.convert(chunk)
        self.optimizer = megapipe.PipelinedOptimizer(self.policy, lambda groups: torch.optim.AdamW(groups, lr=lr))

    def run(self, chunks: list[Any], microbatches: list[Batch], forward_only: bool = False) -> list[dict[str, Tensor]]:
        """Reports on the rank of the last stage, none on others."""
        return self.forward_backward(
            forward_step_func=self.step,
            data_iterator=iter(microbatches),
            model=chunks,
            num_microbatches=len(microbatches),
            forward_only=forward_only,
        )

    def compute_gradients(self, microbatches: list[Batch]) -> list[dict[str, Tensor]]:
        """Losses are means over the pairs of a microbatch, and gradients those of their mean."""
        known = self.run(self.reference, microbatches, forward_only=True)
        known = known or [{"reference": torch.empty(0)}] * len(microbatches)  # only the last stage has a loss
        return self.run(self.policy, [{**batch, **report} for batch, report in zip(microbatches, known)])


def train(args: argparse.Namespace) -> None:
    parallel_state.initialize_model_parallel(dist.get_world_size())
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    pairs = read_pairs(args.data, tokenizer, args.max_length)
    trainer = Trainer(args.model, args.schedule, args.beta, args.lr)
    size, generator = args.pairs_per_microbatch, torch.Generator().manual_seed(args.seed)
    for step in range(args.train_iters):
        drawn = torch.randint(len(pairs), (args.pairs_per_step,), generator=generator).tolist()  # on all ranks the same
        parts = [drawn[start : start + size] for start in range(0, len(drawn), size)]
        reports = trainer.compute_gradients([collate([pairs[number] for number in part]) for part in parts])
        megapipe.clip_grad_norm_(trainer.policy, args.clip_grad)
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
        if reports:
            loss, right = (sum(report[name].item() for report in reports) / len(reports) for name in ("loss", "right"))
            print(f"step {step + 1}/{args.train_iters}: loss {loss:.4f}, {right:.0%} of the pairs in the right order")
    save_pretrained(trainer.policy, args.output)
    if dist.get_rank() == 0:
        tokenizer.save_pretrained(args.output)


if __name__ == "__main__":
    args = make_parser(__doc__, {"options": OPTIONS}).parse_args()
    dist.init_process_group("gloo")  # on GPUs "nccl", with microbatches on the device
    train(args)
    dist.destroy_process_group()

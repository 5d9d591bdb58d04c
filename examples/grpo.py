"""Train a model of Hugging Face's transformers by rewards for what it writes, through a pipeline (GRPO,
https://arxiv.org/abs/2402.03300).

    torchrun --nproc-per-node 2 examples/grpo.py --model path/to/model --prompts prompts.txt --output tuned --schedule
    zbv

Each line of --prompts is a prompt. In each step the model writes a group of answers to some of them, a rule rewards
each (here: the share of digits; write your own `reward`), and those that are better than the rest of their group become
likelier. A reference, the model as it was, holds it back: with --lora-rank that is the model without its adapters.
Answers have many lengths: they are packed into as few microbatches as have room, whose number changes from step to
step. All ranks are one pipeline.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from running import count, make_parser
from torch import Tensor, nn
from transformers import AutoTokenizer

import megapipe
from megapipe import parallel_state
from megapipe.integrations.transformers import build_chunks, generate, load_weights, save_pretrained, token_log_probs
from megapipe.training import log_probs_of, pack

Batch = dict[str, Tensor]

OPTIONS = {
    "model": (..., "a folder with config, tokenizer and weights"),
    "prompts": (..., "a file with a prompt on each line"),
    "output": (..., "folder for the trained model or adapter"),
    "schedule": ("zbv", f"one of {', '.join(megapipe.schedule_names())}"),
    "train_iters": (100, "", count),
    "prompts_per_step": (8, "", count),
    "group_size": (8, "answers to each prompt", count),
    "updates": (2, "steps of the optimizer for the same answers", count),
    "max_new_tokens": (64, "", count),
    "max_tokens": (4096, "of a microbatch", count),
    "clip": (0.2, "how much likelier a token may become by one set of answers"),
    "beta": (0.01, "how much it costs to leave the reference"),
    "lora_rank": (count, "train adapters of this rank only (needs peft)"),
    "lr": (1e-6, ""),
    "clip_grad": (1.0, ""),
    "seed": (1234, ""),
}


def reward(answer: str) -> float:
    """The rule."""
    return sum(character.isdigit() for character in answer) / max(1, len(answer))


def pack_answers(answers: list[tuple[Tensor, int]], advantages: Tensor, max_tokens: int) -> list[Batch]:
    """Microbatches of prompts with their answers, one behind the other. Positions begin anew with each, by which the
    model tells them apart; `counts` marks the tokens of answers, each of which has the advantage of its own.

    Args:
        answers: the tokens, and how many of them are the prompt's.
    """
    microbatches = []
    for numbers in pack([len(tokens) for tokens, _ in answers], max_tokens):
        parts = [answers[number] for number in numbers]
        positions = [torch.arange(len(tokens)) for tokens, _ in parts]
        counts = [position >= begin for position, (_, begin) in zip(positions, parts)]
        weights = [advantages[number].expand(len(tokens)) for number, (tokens, _) in zip(numbers, parts)]
        named = {"input_ids": [tokens for tokens, _ in parts], "position_ids": positions, "counts": counts}
        microbatches.append({name: torch.cat(own)[None] for name, own in {**named, "advantages": weights}.items()})
    return microbatches


def model_inputs(batch: Batch) -> Batch:
    return {name: batch[name] for name in ("input_ids", "position_ids")}


def loss_func(batch: Batch, clip: float, beta: float, share: float, logits: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """
    Args:
        share: what a token counts: each as much as any other of this step, in whichever microbatch.
    """
    found = log_probs_of(logits[:, :-1], batch["input_ids"][:, 1:])
    counts, advantages = (batch[name][:, 1:] for name in ("counts", "advantages"))
    ratio, behind = (found - batch["policy"]).exp(), batch["reference"] - found
    gain = torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)
    loss = ((beta * (behind.exp() - behind - 1) - gain) * counts).sum() * share
    return loss, {"loss": loss.detach()}


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
        chunks = build_chunks(
            self.args.model, self.forward_backward, seed=None, dtype=torch.float32, variable_seq_lengths=True
        )
        load_weights(chunks, self.args.model)
        return [chunk.eval() for chunk in chunks]  # without dropout: the same tokens are equally likely each time

    def log_probs(self, chunks: list[Any], microbatches: list[Batch]) -> list[Tensor]:
        return token_log_probs(chunks, self.forward_backward, [model_inputs(batch) for batch in microbatches])

    def reference_log_probs(self, microbatches: list[Batch]) -> list[Tensor]:
        if not self.args.lora_rank:
            return self.log_probs(self.reference, microbatches)
        for chunk in self.policy:
            chunk.disable_adapters()
        found = self.log_probs(self.policy, microbatches)
        for chunk in self.policy:
            chunk.enable_adapters()
        return found

    def compute_gradients(self, microbatches: list[Batch]) -> list[dict[str, Tensor]]:
        num_tokens = sum(int(batch["counts"][:, 1:].sum()) for batch in microbatches)
        share = len(microbatches) / num_tokens  # since losses are divided by the number of microbatches
        loss = partial(loss_func, clip=self.args.clip, beta=self.args.beta, share=share)

        def forward_step(batches: Iterator[Batch], chunk: nn.Module) -> tuple[Any, Any]:
            batch = next(batches)
            return chunk(**model_inputs(batch)), lambda logits: loss(batch, logits=logits)

        return self.forward_backward(
            forward_step_func=forward_step,
            data_iterator=[iter(microbatches) for _ in self.policy],
            model=self.policy,
            num_microbatches=len(microbatches),
        )

    def learn(self, answers: list[tuple[Tensor, int]], rewards: Tensor) -> int:
        """Some updates by the answers, in the order of their groups. Returns the number of microbatches."""
        groups = rewards.view(-1, self.args.group_size)
        advantages = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
        microbatches = pack_answers(answers, advantages.flatten(), self.args.max_tokens)
        known = {"policy": self.log_probs(self.policy, microbatches)}
        known["reference"] = self.reference_log_probs(microbatches)
        for number, batch in enumerate(microbatches):
            batch.update({name: own[number] for name, own in known.items()})
        for _ in range(self.args.updates):
            self.compute_gradients(microbatches)
            megapipe.clip_grad_norm_(self.policy, self.args.clip_grad)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return len(microbatches)


def add_adapter(chunk: Any, rank: int, seed: int) -> None:
    from peft import LoraConfig

    torch.manual_seed(seed + chunk.stage.index)
    chunk.add_adapter(LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear"))


def write(trainer: Trainer, tokenizer: Any, prompts: list[str], seed: int) -> list[tuple[Tensor, int]]:
    """A group of answers to each prompt, on every rank, without padding."""
    args, end = trainer.args, tokenizer.eos_token_id
    given = tokenizer(prompts, return_tensors="pt", padding=True)
    options = {"max_new_tokens": args.max_new_tokens, "do_sample": True, "num_return_sequences": args.group_size}
    options |= {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": end, "attention_mask": given["attention_mask"]}
    sequences = generate(trainer.policy, trainer.forward_backward, given["input_ids"], seed=seed, **options)
    found, width = [], given["input_ids"].shape[1]
    for sequence, mask in zip(sequences, given["attention_mask"].repeat_interleave(args.group_size, 0)):
        ends = (sequence[width:] == end).nonzero()
        length = int(ends[0]) + 1 if len(ends) else args.max_new_tokens
        found.append((torch.cat([sequence[:width][mask.bool()], sequence[width : width + length]]), int(mask.sum())))
    return found


def train(args: argparse.Namespace) -> list[float]:
    """Returns the mean reward of each step."""
    parallel_state.initialize_model_parallel(dist.get_world_size())
    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    prompts = [line for line in Path(args.prompts).read_text().splitlines() if line.strip()]
    trainer, rewards = Trainer(args), []
    generator = torch.Generator().manual_seed(args.seed)
    for step in range(args.train_iters):
        drawn = torch.randint(len(prompts), (args.prompts_per_step,), generator=generator).tolist()
        answers = write(trainer, tokenizer, [prompts[number] for number in drawn], seed=args.seed + step)
        texts = [tokenizer.decode(tokens[begin:], skip_special_tokens=True) for tokens, begin in answers]
        found = torch.tensor([reward(text) for text in texts])
        num_microbatches = trainer.learn(answers, found)
        rewards.append(found.mean().item())
        if dist.get_rank() == 0:
            print(f"step {step + 1}/{args.train_iters}: reward {rewards[-1]:.3f}, {num_microbatches} microbatches")
    save_pretrained(trainer.policy, args.output)
    if dist.get_rank() == 0:
        tokenizer.save_pretrained(args.output)
    return rewards


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    return make_parser(__doc__, {"options": OPTIONS}).parse_args(argv)


if __name__ == "__main__":
    args = parse_args()
    dist.init_process_group("gloo")  # on GPUs "nccl", with microbatches on the device
    train(args)
    dist.destroy_process_group()

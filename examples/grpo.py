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
from functools import partial
from pathlib import Path
from typing import Any

import hf_common
import torch
import torch.distributed as dist
from hf_common import Batch, write
from running import count, make_parser
from torch import Tensor
from transformers import AutoTokenizer

from megapipe import parallel_state
from megapipe.training import log_probs_of, pack

OPTIONS = {
    "prompts": (..., "a file with a prompt on each line"),
    "prompts_per_step": (8, "", count),
    "group_size": (8, "answers to each prompt", count),
    "updates": (2, "steps of the optimizer for the same answers", count),
    "max_new_tokens": (64, "", count),
    "max_tokens": (4096, "of a microbatch", count),
    "clip": (0.2, "how much likelier a token may become by one set of answers"),
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


def loss_func(batch: Batch, logits: Tensor, clip: float, beta: float, share: float) -> tuple[Tensor, dict[str, Tensor]]:
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


class Trainer(hf_common.Trainer):
    def learn(self, answers: list[tuple[Tensor, int]], rewards: Tensor) -> int:
        """Some updates by the answers, in the order of their groups. Returns the number of microbatches."""
        groups = rewards.view(-1, self.args.group_size)
        advantages = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
        microbatches = pack_answers(answers, advantages.flatten(), self.args.max_tokens)
        known = {"policy": self.log_probs(self.policy, microbatches)}
        known["reference"] = self.reference_log_probs(microbatches)
        for number, batch in enumerate(microbatches):
            batch.update({name: own[number] for name, own in known.items()})
        num_tokens = sum(int(batch["counts"][:, 1:].sum()) for batch in microbatches)
        share = len(microbatches) / num_tokens  # since losses are divided by the number of microbatches
        for _ in range(self.args.updates):
            self.compute_gradients(
                microbatches, partial(loss_func, clip=self.args.clip, beta=self.args.beta, share=share)
            )
            self.update()
        return len(microbatches)


def write_groups(trainer: Trainer, tokenizer: Any, prompts: list[str], seed: int) -> list[tuple[Tensor, int]]:
    """A group of answers to each prompt, on every rank, without padding."""
    args, found = trainer.args, []
    options = {"max_new_tokens": args.max_new_tokens, "do_sample": True, "num_return_sequences": args.group_size}
    sequences, is_prompt = write(trainer.policy, trainer.forward_backward, tokenizer, prompts, seed=seed, **options)
    width = is_prompt.shape[1]
    for sequence, own in zip(sequences, is_prompt.repeat_interleave(args.group_size, 0)):
        ends = (sequence[width:] == tokenizer.eos_token_id).nonzero()
        length = int(ends[0]) + 1 if len(ends) else args.max_new_tokens
        found.append((torch.cat([sequence[:width][own], sequence[width : width + length]]), int(own.sum())))
    return found


def train(args: argparse.Namespace) -> list[float]:
    """Returns the mean reward of each step."""
    parallel_state.initialize_model_parallel(dist.get_world_size())
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    prompts = [line for line in Path(args.prompts).read_text().splitlines() if line.strip()]
    trainer, rewards = Trainer(args), []
    generator = torch.Generator().manual_seed(args.seed)
    for step in range(args.train_iters):
        drawn = torch.randint(len(prompts), (args.prompts_per_step,), generator=generator).tolist()
        answers = write_groups(trainer, tokenizer, [prompts[number] for number in drawn], seed=args.seed + step)
        texts = [tokenizer.decode(tokens[begin:], skip_special_tokens=True) for tokens, begin in answers]
        found = torch.tensor([reward(text) for text in texts])
        num_microbatches = trainer.learn(answers, found)
        rewards.append(found.mean().item())
        if dist.get_rank() == 0:
            print(f"step {step + 1}/{args.train_iters}: reward {rewards[-1]:.3f}, {num_microbatches} microbatches")
    trainer.save(tokenizer)
    return rewards


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    return make_parser(__doc__, {"options": {**hf_common.OPTIONS, **OPTIONS}}).parse_args(argv)


if __name__ == "__main__":
    args = parse_args()
    dist.init_process_group("gloo")  # on GPUs "nccl", with microbatches on the device
    train(args)
    dist.destroy_process_group()

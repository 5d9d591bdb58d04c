"""Train a model of Hugging Face's transformers through a pipeline, on text or chats.

    torchrun --nproc-per-node 4 examples/finetune_hf.py --model path/to/model --data chats.jsonl --output tuned
    torchrun --nproc-per-node 4 examples/finetune_hf.py --model path/to/model --data chats.jsonl --output tuned \\
        --pipeline-model-parallel-size 2 --schedule zbv --bf16 --gradient-checkpointing
    torchrun --nproc-per-node 2 examples/finetune_hf.py --model path/to/model --data text.jsonl --output adapter \\
        --lora-rank 16 --lr 1e-4 --quantize nf4

Each line of the data is {"text": "..."} or {"messages": [{"role": "user", "content": "..."}, ...]}; the latter takes a
tokenizer with a chat template, and where that marks what the assistant says, only this is learnt. Documents are packed
into sequences of equal length, and do not see each other there; with --padding each is a sequence of its own. At each
validation the model goes on with --prompts. What --output has in the end is a model that
AutoModelForCausalLM.from_pretrained loads.

Runs on CPU with gloo and on GPUs with NCCL. Ranks beyond one pipeline are replicas of it. A run that was interrupted
goes on when it is started again with one folder for --save and --load, also with other sizes or another schedule.
"""

from __future__ import annotations

import argparse
import math
from typing import Any

import quantising
import torch
import torch.distributed as dist
from hf_common import add_adapter, write
from hf_data import Sequences, read_data
from running import count, make_parser, run
from trainer import CHECKPOINTS, TRAINING, uses_bf16
from trainer import Trainer as BaseTrainer
from transformers import AutoTokenizer

from megapipe import parallel_state
from megapipe.integrations.transformers import build_chunks, count_items, forward_step, load_weights, save_pretrained
from megapipe.training import GradientReducer
from megapipe.weight_grad import convert

MODEL = {
    "model": (..., "a folder with config, tokenizer and weights as safetensors"),
    "from_scratch": (False, "draw new weights; --model needs none"),
    "data": (..., "a .jsonl file of texts or chats"),
    "output": (str, "folder for the trained model"),
    "pipeline_model_parallel_size": (count, "default: all ranks"),
    "gradient_checkpointing": (False, "compute activations again in backward"),
    "lora_rank": (count, "train adapters of this rank only (needs peft)"),
    "quantize": ((None, *quantising.KINDS), "keep the weights of layers so, and train --lora-rank adapters on them"),
}
DATA = {
    "seq_length": (512, "", count),
    "padding": (False, "one document in each sequence, instead of packing"),
    "epochs": (1.0, "where there are no --train-iters"),
    "stop_after": (count, "iterations, to go on another time"),
    "eval_fraction": (0.02, "of the data, which is not trained on"),
    "max_new_tokens": (64, "for each of --prompts", count),
    "temperature": (0.8, "for --prompts; 0 takes the likeliest tokens"),
}
DEFAULTS = {"schedule": "1f1b", "micro_batch_size": 1, "global_batch_size": 16, "train_iters": None, "lr": 2e-5}
DEFAULTS |= {"lr_warmup_iters": 10, "min_lr": 0.0, "weight_decay": 0.0, "eval_interval": 50, "log_interval": 10}
DEFAULTS |= {"save_interval": 100, "keep_last": 2}
"""Other than for pretrain_gpt.py."""


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    groups = {"model": MODEL, "training": TRAINING, "data": DATA, "checkpoints": CHECKPOINTS}
    parser = make_parser(__doc__, groups, **DEFAULTS)
    parser.add_argument("--prompts", nargs="*", default=[], metavar="TEXT", help="to go on with at each validation")
    return parser.parse_args(argv)


class Trainer(BaseTrainer):
    forward_step = staticmethod(forward_step)
    warms_up_from = 0

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        super().__init__(args, device)
        self.num_losses = 1  # since each is divided by the tokens of all
        self.tokenizer = AutoTokenizer.from_pretrained(args.model)
        sequences = read_data(args.data, self.tokenizer, args.seq_length, is_packed=not args.padding)
        self.sequences, self.evaluated = sequences.split(
            args.eval_fraction if args.eval_interval else 0.0, args.micro_batch_size * self.num_replicas
        )
        if len(self.sequences.tokens) < args.global_batch_size:
            raise ValueError(
                f"--data {args.data} has {len(self.sequences.tokens)} sequences to train on, less than "
                f"--global-batch-size {args.global_batch_size}."
            )
        self.find_end(0)
        self.trained_only = args.lora_rank is not None
        self.chunks = self.build()
        if self.num_replicas > 1:
            reducer = GradientReducer(self.chunks)
            config = self.chunks[0].config
            config.grad_sync_func = reducer.start
            # Without the tokens: the losses are divided by those of all replicas already.
            config.finalize_model_grads_func = lambda models, num_tokens: reducer.finish(models)
        self.prepare()

    def build(self) -> list[Any]:
        args = self.args
        if args.quantize and (args.lora_rank is None or args.from_scratch):
            raise ValueError(f"--quantize {args.quantize} freezes weights that were trained: give --lora-rank too.")
        chunks = build_chunks(
            args.model,
            self.forward_backward,
            dtype=torch.bfloat16 if args.quantize and uses_bf16(args, self.device) else torch.float32,
            device="meta" if args.quantize else self.device,
            seed=args.seed if args.from_scratch else None,
            enable_autocast=uses_bf16(args, self.device),
            autocast_dtype=torch.bfloat16,
        )
        if not args.from_scratch:
            load_weights(chunks, args.model, after_layer=quantising.KINDS.get(args.quantize), device=self.device)
        for chunk in chunks:
            if args.lora_rank is not None:
                add_adapter(chunk, args.lora_rank, args.seed)
            if args.gradient_checkpointing:
                chunk.gradient_checkpointing_enable()
            convert(chunk)  # leave weight gradients to W, where the schedule has one
        return chunks

    def find_end(self, done: int) -> None:
        """After so many iterations: with the samples left, which may be in other batches."""
        left = self.args.epochs * len(self.sequences.tokens) - self.consumed_samples
        self.num_iterations = self.args.train_iters or done + max(0, math.ceil(left / self.args.global_batch_size))
        self.end = min(self.num_iterations, self.args.stop_after or self.num_iterations)

    def position(self) -> dict[str, Any]:
        return {**super().position(), "num_sequences": len(self.sequences.tokens)}

    def go_on(self, done: int, position: dict[str, Any]) -> None:
        if (count := len(self.sequences.tokens)) != position["num_sequences"]:
            raise ValueError(
                f"--data has {count} sequences to train on, and had {position['num_sequences']} when {self.args.load} "
                "was saved: go on with the same data, --seq-length and --eval-fraction."
            )
        super().go_on(done, position)
        self.find_end(done)

    def training_batches(self) -> list[dict[str, Any]]:
        """All ranks draw the same numbers, whenever they ask."""
        count = len(self.sequences.tokens)
        samples = range(self.consumed_samples, self.consumed_samples + self.args.global_batch_size)
        orders = {epoch: shuffled(count, self.args.seed + epoch) for epoch in {sample // count for sample in samples}}
        return self.share([orders[sample // count][sample % count] for sample in samples], self.sequences)

    def share(self, numbers: list[int], sequences: Sequences) -> list[dict[str, Any]]:
        """This replica's microbatches of those sequences."""
        own, size = numbers[parallel_state.get_data_parallel_rank() :: self.num_replicas], self.args.micro_batch_size
        pieces = [own[first : first + size] for first in range(0, len(own), size)]
        return count_items([sequences.batch(piece, self.device) for piece in pieces])

    def validation_loss(self) -> float:
        """Of all tokens that are not trained on, but for those that fill no batch."""
        size = self.args.micro_batch_size * self.num_replicas
        numbers = list(range(len(self.evaluated.tokens) // size * size))
        return self.mean_loss(self.run_pipeline(self.share(numbers, self.evaluated), forward_only=True))

    def validate(self) -> float:
        loss = super().validate()
        for prompt, text in zip(self.args.prompts, self.write() if self.args.prompts else []):
            self.console.print(f"{prompt!r}: {text!r}", markup=False)
        return loss

    def write(self) -> list[str]:
        """What the model says to --prompts, on every rank."""
        options = {"do_sample": self.args.temperature > 0, "temperature": self.args.temperature or None}
        options |= {"max_new_tokens": self.args.max_new_tokens, "seed": self.args.seed}
        tokens, mask = write(self.chunks, self.forward_backward, self.tokenizer, self.args.prompts, **options)
        return self.tokenizer.batch_decode(tokens[:, mask.shape[1] :], skip_special_tokens=True)

    def finish(self, has_trained: bool) -> None:
        if self.args.output is not None:
            save_pretrained(self.chunks, self.args.output)
            if dist.get_rank() == 0:
                self.tokenizer.save_pretrained(self.args.output)
            self.console.print(f"saved to {self.args.output}")


def shuffled(count: int, seed: int) -> list[int]:
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()


def train(args: argparse.Namespace, device: torch.device) -> list[float]:
    """Returns the losses that were logged."""
    parallel_state.initialize_model_parallel(args.pipeline_model_parallel_size or dist.get_world_size())
    torch.manual_seed(args.seed + dist.get_rank())  # dropout
    trainer = Trainer(args, device)
    trainer.console.print(
        f"{type(trainer.chunks[0]).__name__} on {dist.get_world_size()} ranks, schedule "
        f"{trainer.forward_backward.name}, {trainer.num_replicas} replicas, {len(trainer.sequences.tokens)} sequences "
        f"of {args.seq_length} tokens"
    )
    return trainer.run()


if __name__ == "__main__":
    run(train, parse_args())

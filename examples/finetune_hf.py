"""Train a model of Hugging Face's transformers through a pipeline, on text or chats.

    torchrun --nproc-per-node 4 examples/finetune_hf.py --model path/to/model --data chats.jsonl --output tuned
    torchrun --nproc-per-node 4 examples/finetune_hf.py --model path/to/model --data chats.jsonl --output tuned \\
        --pipeline-model-parallel-size 2 --schedule zbv --bf16 --gradient-checkpointing
    torchrun --nproc-per-node 2 examples/finetune_hf.py --model path/to/model --data text.jsonl --output adapter \\
        --lora-rank 16 --lr 1e-4

Each line of the data is {"text": "..."} or {"messages": [{"role": "user", "content": "..."}, ...]}; the latter takes a
tokenizer with a chat template, and where that marks what the assistant says, only this is learnt. Documents are packed
into sequences of equal length, and do not see each other there; with --padding each is a sequence of its own. At each
evaluation the model goes on with --prompts. What --output has in the end is a model that
AutoModelForCausalLM.from_pretrained loads.

Runs on CPU with gloo and on GPUs with NCCL. Ranks beyond one pipeline are replicas of it. A run that was interrupted
goes on from --checkpoints when it is started again, also with other sizes or another schedule.
"""

from __future__ import annotations

import argparse
import importlib
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from hf_data import Sequences, read_data
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from running import DEVICE, count_microbatches, make_parser, peak_memory, run
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoTokenizer

import megapipe
from megapipe import parallel_state
from megapipe.checkpoint import Checkpointer
from megapipe.integrations.transformers import (
    build_chunks,
    count_items,
    forward_step,
    generate,
    load_weights,
    save_pretrained,
)
from megapipe.training import GradientReducer
from megapipe.weight_grad import convert

OPTIONS = {
    "model": (..., "a folder with config, tokenizer and weights as safetensors"),
    "from_scratch": (False, "draw new weights; --model needs none"),
    "data": (..., "a .jsonl file of texts or chats"),
    "output": (str, "folder for the trained model"),
    "pipeline_model_parallel_size": (int, "default: all ranks"),
    "schedule": ("1f1b", f"one of {', '.join(megapipe.schedule_names())}"),
}
TRAINING = {
    "seq_length": (512, ""),
    "padding": (False, "one document in each sequence, instead of packing"),
    "micro_batch_size": (1, "sequences per microbatch"),
    "global_batch_size": (16, "sequences per step, over all replicas"),
    "epochs": (1.0, ""),
    "train_steps": (int, "instead of --epochs"),
    "lr": (2e-5, ""),
    "warmup_steps": (10, ""),
    "weight_decay": (0.0, ""),
    "clip_grad": (1.0, ""),
    "bf16": (False, "compute in bfloat16 by autocast; weights stay float32"),
    "gradient_checkpointing": (False, "compute activations again in backward"),
    "lora_rank": (int, "train adapters of this rank only (needs peft)"),
    **DEVICE,
}
OTHER_TITLE = "evaluation, checkpoints and logs"
OTHER = {
    "eval_fraction": (0.02, "of the data, which is not trained on"),
    "eval_interval": (50, "steps between evaluations; 0 for none"),
    "max_new_tokens": (64, "for each of --prompts"),
    "temperature": (0.8, "for --prompts; 0 takes the likeliest tokens"),
    "log_interval": (10, ""),
    "checkpoints": (str, "folder to go on from, and to save to"),
    "save_interval": (100, "steps between checkpoints"),
    "stop_after": (int, "steps, to go on another time"),
    "report_to": (("none", "tensorboard", "wandb"), ""),
}


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser(__doc__, options=OPTIONS, training=TRAINING, **{OTHER_TITLE: OTHER})
    parser.add_argument("--prompts", nargs="*", default=[], metavar="TEXT", help="to go on with at each evaluation")
    return parser.parse_args(argv)


class Trainer:
    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        self.args = args
        self.device = device
        self.num_replicas = parallel_state.get_data_parallel_world_size()
        self.num_microbatches = count_microbatches(args, self.num_replicas)
        self.forward_backward = megapipe.get_forward_backward_func(args.schedule)
        self.tokenizer = AutoTokenizer.from_pretrained(args.model)
        with first_rank_first():  # the others find what it has cached
            sequences = read_data(args.data, self.tokenizer, args.seq_length, is_packed=not args.padding)
        self.sequences, self.evaluated = sequences.split(
            args.eval_fraction if args.eval_interval else 0.0, args.micro_batch_size * self.num_replicas
        )
        if len(self.sequences.tokens) < args.global_batch_size:
            raise ValueError(
                f"--data {args.data} has {len(self.sequences.tokens)} sequences to train on, less than "
                f"--global-batch-size {args.global_batch_size}."
            )
        self.consumed_samples = 0
        self.num_steps = self.find_num_steps()
        self.chunks = self.build()
        if self.num_replicas > 1:
            reducer = GradientReducer(self.chunks)
            config = self.chunks[0].config
            config.grad_sync_func = reducer.start
            # Without the tokens: the losses are divided by those of all replicas already.
            config.finalize_model_grads_func = lambda models, num_tokens: reducer.finish(models)
        self.optimizer = megapipe.PipelinedOptimizer(self.chunks, self.make_optimizer, self.hyperparameters)
        self.scheduler = megapipe.PipelinedLRScheduler(
            self.optimizer, lambda optimizer: LambdaLR(optimizer, self.learning_rate)
        )
        self.checkpointer = None
        if args.checkpoints is not None:
            others = {"lr_scheduler": self.scheduler}
            self.checkpointer = Checkpointer(args.checkpoints, self.chunks, self.optimizer, others=others, keep_last=2)

    def find_num_steps(self, done: int = 0) -> int:
        """All there are to be, where so many have been done: with the samples left, which may be in other batches."""
        left = self.args.epochs * len(self.sequences.tokens) - self.consumed_samples
        return self.args.train_steps or done + max(0, math.ceil(left / self.args.global_batch_size))

    def load(self) -> int:
        """Go on from --checkpoints. Returns the steps that have been done."""
        loaded = None if self.checkpointer is None else self.checkpointer.load(may_be_empty=True)
        if loaded is None:
            return 0
        count = len(self.sequences.tokens)
        before = loaded.data or {"consumed_samples": loaded.step * self.args.global_batch_size, "num_sequences": count}
        if count != before["num_sequences"]:
            raise ValueError(
                f"--data has {count} sequences to train on, and had {before['num_sequences']} when "
                f"{self.args.checkpoints} was saved: go on with the same data, --seq-length and --eval-fraction."
            )
        self.consumed_samples = before["consumed_samples"]
        self.num_steps = self.find_num_steps(loaded.step)
        return loaded.step

    def save(self, step: int) -> None:
        position = {"consumed_samples": self.consumed_samples, "num_sequences": len(self.sequences.tokens)}
        self.checkpointer.save(step, position)

    def build(self) -> list[Any]:
        args = self.args
        chunks = build_chunks(
            args.model,
            self.forward_backward,
            dtype=torch.float32,
            device=self.device,
            seed=args.seed if args.from_scratch else None,
            enable_autocast=args.bf16,
            autocast_dtype=torch.bfloat16,
        )
        if not args.from_scratch:
            load_weights(chunks, args.model)
        for chunk in chunks:
            if args.lora_rank is not None:
                add_adapter(chunk, args.lora_rank, args.seed)
            if args.gradient_checkpointing:
                chunk.gradient_checkpointing_enable()
            convert(chunk)  # leave weight gradients to W, where the schedule has one
        return chunks

    def make_optimizer(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(groups, lr=self.args.lr)

    def hyperparameters(self, name: str, parameter: nn.Parameter) -> dict[str, Any]:
        return {"weight_decay": self.args.weight_decay if parameter.dim() > 1 else 0.0}

    def learning_rate(self, step: int) -> float:
        """Linear warm-up, then half a cosine down to nothing: what --lr is multiplied with."""
        if step < self.args.warmup_steps:
            return step / self.args.warmup_steps
        done = (step - self.args.warmup_steps) / max(1, self.num_steps - self.args.warmup_steps)
        return max(0.0, 0.5 * (1 + math.cos(math.pi * done)))

    def microbatches(self) -> list[dict[str, Any]]:
        """This replica's, of the next step. All ranks draw the same numbers, whenever they ask."""
        count = len(self.sequences.tokens)
        samples = range(self.consumed_samples, self.consumed_samples + self.args.global_batch_size)
        orders = {epoch: shuffled(count, self.args.seed + epoch) for epoch in {sample // count for sample in samples}}
        return self.share([orders[sample // count][sample % count] for sample in samples], self.sequences)

    def share(self, numbers: list[int], sequences: Sequences) -> list[dict[str, Any]]:
        replica, size = parallel_state.get_data_parallel_rank(), self.args.micro_batch_size
        own = numbers[replica :: self.num_replicas]
        pieces = [own[first : first + size] for first in range(0, len(own), size)]
        return count_items([sequences.batch(piece, self.device) for piece in pieces])

    def run_pipeline(self, microbatches: list[dict[str, Any]], forward_only: bool = False) -> Tensor:
        """The mean loss of all tokens, on every rank."""
        reports = self.forward_backward(
            forward_step_func=forward_step,
            data_iterator=iter(microbatches),
            model=self.chunks,
            num_microbatches=len(microbatches),
            seq_length=self.args.seq_length,
            micro_batch_size=self.args.micro_batch_size,
            forward_only=forward_only,
        )
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        for report in reports:  # on the rank of the last stage
            loss += report["loss"]
        dist.all_reduce(loss)
        return loss

    def train_step(self) -> tuple[Tensor, float]:
        """Returns the loss and the gradients' norm before clipping."""
        loss = self.run_pipeline(self.microbatches())
        self.consumed_samples += self.args.global_batch_size
        norm = megapipe.clip_grad_norm_(self.chunks, self.args.clip_grad).item()
        if math.isfinite(norm):
            self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        return loss, norm

    def evaluate(self) -> float:
        """The mean loss of all tokens that are not trained on, but for those that fill no batch."""
        size = self.args.micro_batch_size * self.num_replicas
        numbers = list(range(len(self.evaluated.tokens) // size * size))
        for chunk in self.chunks:
            chunk.eval()
        loss = self.run_pipeline(self.share(numbers, self.evaluated), forward_only=True).item()
        for chunk in self.chunks:
            chunk.train()
        return loss

    def write(self) -> list[str]:
        """What the model says to --prompts, on every rank."""
        self.tokenizer.padding_side = "left"
        self.tokenizer.pad_token = self.tokenizer.pad_token or self.tokenizer.eos_token
        texts = self.args.prompts
        if has_chats := self.tokenizer.chat_template is not None:
            chats = [[{"role": "user", "content": text}] for text in texts]
            texts = self.tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=False)
        prompts = self.tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=not has_chats)
        tokens = generate(
            self.chunks,
            self.forward_backward,
            prompts["input_ids"].to(self.device),
            attention_mask=prompts["attention_mask"].to(self.device),
            max_new_tokens=self.args.max_new_tokens,
            do_sample=self.args.temperature > 0,
            temperature=self.args.temperature or None,
            pad_token_id=self.tokenizer.pad_token_id,
            eos_token_id=self.tokenizer.eos_token_id,
            seed=self.args.seed,
        )
        new = tokens[:, prompts["input_ids"].shape[1] :]
        return self.tokenizer.batch_decode(new, skip_special_tokens=True)

    def save_model(self) -> None:
        save_pretrained(self.chunks, self.args.output)
        if dist.get_rank() == 0:
            self.tokenizer.save_pretrained(self.args.output)


def add_adapter(chunk: Any, rank: int, seed: int) -> None:
    peft = importlib.import_module("peft")
    torch.manual_seed(seed + chunk.stage.index)  # the same on all replicas
    chunk.add_adapter(peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear"))


def shuffled(count: int, seed: int) -> list[int]:
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()


@contextmanager
def first_rank_first() -> Iterator[None]:
    if dist.get_rank() != 0:
        dist.barrier()
    try:
        yield
    finally:  # also where it fails, as it then does on all
        if dist.get_rank() == 0:
            dist.barrier()


class Log:
    """Lines, one bar, and what --report-to names. Only the first rank has them."""

    def __init__(self, args: argparse.Namespace, num_steps: int, first_step: int) -> None:
        is_first = dist.get_rank() == 0
        self.num_steps = num_steps
        self.console = Console(quiet=not is_first, highlight=False, soft_wrap=True)
        columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()]
        show = self.console.is_terminal and is_first
        self.progress = Progress(*columns, console=self.console, disable=not show, transient=True)
        self.bar = self.progress.add_task("training", total=num_steps, completed=first_step)
        self.writer: Any = None
        if is_first and args.report_to == "tensorboard":
            self.writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter(args.output)
        elif is_first and args.report_to == "wandb":
            self.writer = importlib.import_module("wandb").init(config=vars(args))

    def write(self, step: int, **values: float) -> None:
        """Values by their names."""
        text = " | ".join(
            f"{name.replace('_', ' ')} {value:,.{0 if value >= 100 else 4}f}" for name, value in values.items()
        )
        self.console.print(f"step {step:5d}/{self.num_steps} | {text}")
        if "loss" in values:
            self.progress.update(self.bar, description=text)
        if hasattr(self.writer, "add_scalar"):
            for name, value in values.items():
                self.writer.add_scalar(name, value, step)
        elif self.writer is not None:
            self.writer.log(values, step=step)


def train(args: argparse.Namespace, device: torch.device) -> list[float]:
    """Returns the losses that were logged."""
    parallel_state.initialize_model_parallel(args.pipeline_model_parallel_size or dist.get_world_size())
    torch.manual_seed(args.seed + dist.get_rank())  # dropout
    trainer = Trainer(args, device)
    first_step = trainer.load()
    log = Log(args, trainer.num_steps, first_step)
    log.console.print(
        f"{type(trainer.chunks[0]).__name__} on {dist.get_world_size()} ranks, schedule "
        f"{trainer.forward_backward.name}, {trainer.num_replicas} replicas, {len(trainer.sequences.tokens)} sequences "
        f"of {args.seq_length} tokens" + (f", going on from step {first_step}" if first_step else "")
    )
    losses: list[float] = []
    started, tokens_per_step = time.perf_counter(), args.global_batch_size * args.seq_length
    with log.progress:
        end = min(trainer.num_steps, args.stop_after or trainer.num_steps)
        for step in range(first_step, end):
            loss, norm = trainer.train_step()
            done, is_last = step + 1, step + 1 == end
            if done % args.log_interval == 0 or is_last or step == first_step:
                losses.append(loss.item())
                speed = (done - first_step) * tokens_per_step / (time.perf_counter() - started)
                log.write(done, loss=losses[-1], grad_norm=norm, tokens_per_second=speed, GiB=peak_memory(device))
            if args.eval_interval and (done % args.eval_interval == 0 or is_last):
                log.write(done, evaluation_loss=trainer.evaluate())
                for prompt, text in zip(args.prompts, trainer.write() if args.prompts else []):
                    log.console.print(f"{prompt!r}: {text!r}", markup=False)
            if trainer.checkpointer is not None and (done % args.save_interval == 0 or is_last):
                trainer.save(done)
            log.progress.update(log.bar, completed=done)
    if trainer.checkpointer is not None:
        trainer.checkpointer.wait()
    if args.output is not None:
        trainer.save_model()
        log.console.print(f"saved to {args.output}")
    return losses


if __name__ == "__main__":
    run(train, parse_args())

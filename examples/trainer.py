"""What pretrain_gpt.py and finetune_hf.py have in common: steps with an optimizer and its learning rate, evaluations,
checkpoints, and what is printed."""

from __future__ import annotations

import argparse
import gc
import math
import time
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import Progress
from running import DEVICE, count, count_microbatches, peak_memory, without_collector
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

import megapipe
from megapipe import parallel_state
from megapipe.checkpoint import Checkpointer

TRAINING = {
    "schedule": (str, f"one of {', '.join(megapipe.schedule_names())}"),
    "micro_batch_size": (4, "sequences per microbatch", count),
    "global_batch_size": (32, "sequences per step, over all replicas", count),
    "train_iters": (200, "", count),
    "lr": (4e-3, ""),
    "lr_warmup_iters": (20, ""),
    "min_lr": (4e-4, "after a cosine"),
    "weight_decay": (0.1, ""),
    "clip_grad": (1.0, ""),
    "bf16": (bool, "compute in bfloat16 by autocast, with weights in float32; default: on GPUs"),
    **DEVICE,
}
CHECKPOINTS = {
    "eval_interval": (100, "steps between validations, and one at the end; 0 for none"),
    "log_interval": (25, "", count),
    "save": (str, "folder for checkpoints: at the end, and every --save-interval"),
    "save_interval": (count, "steps between checkpoints"),
    "keep_last": (count, "checkpoints to keep; default: all"),
    "async_save": (False, "write checkpoints while training goes on"),
    "load": (str, "folder to go on from, saved under any arrangement; that of --save may be empty, at the first start"),
}

GC_INTERVAL = 50
"""Steps between two collections of Python's garbage."""


def uses_bf16(args: argparse.Namespace, device: torch.device) -> bool:
    return device.type == "cuda" if args.bf16 is None else bool(args.bf16)


class Trainer:
    """A subclass makes `chunks`, then calls `prepare`. It says what a step trains on, and how the loss is validated.

    Attributes:
        num_losses: what the sum of all reported losses is divided by.
        num_iterations: from the first step of the training to its last.
        end: the last one of this run.
        consumed_samples: of the data, by all steps so far. By it a run goes on where it was.
    """

    betas = (0.9, 0.999)
    warms_up_from = 1
    """In steps of the warm-up: 0 is the rule of transformers."""
    parts: Any = None
    trained_only = False
    """See `Checkpointer`."""
    forward_step: Any
    chunks: list[Any]

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        self.args, self.device = args, device
        self.console = Console(quiet=dist.get_rank() != 0, highlight=False, soft_wrap=True)
        self.forward_backward = megapipe.get_forward_backward_func(args.schedule)
        if self.forward_backward.forward_only:
            raise ValueError(f"--schedule {self.forward_backward.name} runs forwards only: choose another to train.")
        self.num_replicas = parallel_state.get_data_parallel_world_size()
        self.num_microbatches = count_microbatches(args, self.num_replicas)
        self.num_losses = self.num_microbatches * self.num_replicas
        self.num_iterations = self.end = args.train_iters
        self.consumed_samples = 0

    def prepare(self) -> None:
        args = self.args
        self.optimizer = self.make_optimizer()
        self.scheduler = megapipe.PipelinedLRScheduler(self.optimizer, lambda one: LambdaLR(one, self.learning_rate))
        self.checkpointer = Checkpointer(
            args.save or args.load or "checkpoints",
            self.chunks,
            self.optimizer,
            others={"lr_scheduler": self.scheduler},
            keep_last=args.keep_last,
            asynchronous=args.async_save,
            parts=self.parts,
            trained_only=self.trained_only,
        )

    # What subclasses say

    def training_batches(self) -> list[Any] | None:
        """This replica's microbatches of the next step. None on ranks that read no data."""
        raise NotImplementedError

    def validation_loss(self) -> float:
        raise NotImplementedError

    def position(self) -> dict[str, Any]:
        """What a checkpoint has besides weights and optimizer state."""
        return {"consumed_samples": self.consumed_samples}

    def go_on(self, done: int, position: dict[str, Any]) -> None:
        """From a checkpoint after so many iterations."""
        self.consumed_samples = position["consumed_samples"]

    def finish(self, has_trained: bool) -> None:
        """After the last step, of which this run may have made none."""

    # What they share

    def make_optimizer(self) -> megapipe.PipelinedOptimizer:
        return megapipe.PipelinedOptimizer(self.chunks, self.adamw, self.hyperparameters)

    def adamw(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(groups, lr=1.0, betas=self.betas)  # the scheduler multiplies this by the rate

    def hyperparameters(self, name: str, parameter: nn.Parameter) -> dict[str, Any]:
        return {"weight_decay": self.args.weight_decay if parameter.dim() > 1 else 0.0}

    def learning_rate(self, iteration: int) -> float:
        """Linear warm-up, then half a cosine down to --min-lr."""
        args = self.args
        if iteration < args.lr_warmup_iters:
            return args.lr * (iteration + self.warms_up_from) / args.lr_warmup_iters
        done = (iteration - args.lr_warmup_iters) / max(1, self.num_iterations - args.lr_warmup_iters)
        return args.min_lr + (args.lr - args.min_lr) * 0.5 * (1 + math.cos(math.pi * done))

    def run_pipeline(self, batches: list[Any] | None, forward_only: bool = False) -> list[dict[str, Tensor]]:
        """Forward, and backward unless `forward_only`. Only the last stage's rank has reports."""
        return self.forward_backward(
            forward_step_func=self.forward_step,
            data_iterator=None if batches is None else iter(batches),
            model=self.chunks,
            num_microbatches=self.num_microbatches if batches is None else len(batches),
            seq_length=self.args.seq_length,
            micro_batch_size=self.args.micro_batch_size,
            forward_only=forward_only,
        )

    def mean_loss(self, reports: list[dict[str, Tensor]]) -> float:
        """Over microbatches and replicas, on every rank."""
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        for report in reports:
            loss += report["loss"] / self.num_losses
        dist.all_reduce(loss)
        return loss.item()

    def train_step(self) -> list[dict[str, Tensor]]:
        self.optimizer.zero_grad()
        reports = self.run_pipeline(self.training_batches())
        self.consumed_samples += self.args.global_batch_size
        self.step_optimizer()
        self.scheduler.step()
        return reports

    def step_optimizer(self) -> None:
        self.norm = megapipe.clip_grad_norm_(self.chunks, self.args.clip_grad).item()
        if math.isfinite(self.norm):
            self.optimizer.step()

    def grad_norm(self) -> float:
        """Of the last step, before clipping."""
        return self.norm

    def validate(self) -> float:
        for chunk in self.chunks:
            chunk.eval()
        loss = self.validation_loss()
        for chunk in self.chunks:
            chunk.train()
        return loss

    def load(self) -> int:
        """Returns how many iterations have been done."""
        args, done = self.args, 0
        if args.load is not None:
            loaded = self.checkpointer.load(args.load, may_be_empty=args.load == args.save)
            if loaded is None:
                self.console.print(f"nothing saved in {args.load} yet: starting from the beginning")
            else:
                self.console.print(f"going on from iteration {loaded.step}, loaded from {args.load}")
                done = loaded.step
                self.go_on(done, loaded.data)
        if args.save is not None:
            self.checkpointer.check_can_save(done + 1)
        return done

    def run(self) -> list[float]:
        """Train to the end. Returns the losses of the iterations that were logged."""
        args, console = self.args, self.console
        first = self.load()
        logged: list[float] = []
        started, tokens_per_step = time.perf_counter(), args.global_batch_size * args.seq_length
        shown = Progress(console=console, disable=not console.is_terminal, transient=True)
        with shown as progress, without_collector():
            bar = progress.add_task("training", total=self.num_iterations, completed=first)
            for done in range(first + 1, self.end + 1):
                reports = self.train_step()
                where = f"iteration {done:5d}/{self.num_iterations}"
                if done in (first + 1, self.end) or done % args.log_interval == 0:
                    logged.append(self.mean_loss(reports))
                    speed = (done - first) * tokens_per_step / (time.perf_counter() - started)
                    numbers = f"loss {logged[-1]:.6f} | grad norm {self.grad_norm():.3f} | {speed:,.0f} tokens/s"
                    console.print(f"{where} | {numbers}")
                if args.eval_interval and (done % args.eval_interval == 0 or done == self.end):
                    console.print(f"{where} | validation loss {self.validate():.6f}")
                if args.save is not None and (done == self.end or done % (args.save_interval or self.end) == 0):
                    self.checkpointer.save(done, self.position())
                if done % GC_INTERVAL == 0:  # all ranks at once, and only what is young
                    gc.collect(1)
                progress.update(bar, completed=done)
        if logged:
            seconds, tokens = time.perf_counter() - started, (self.end - first) * tokens_per_step
            console.print(
                f"loss {logged[0]:.3f} -> {logged[-1]:.3f} in {seconds:.0f} s, {tokens / seconds:,.0f} tokens/s, "
                f"at most {peak_memory(self.device):.2f} GiB a rank"
            )
        self.checkpointer.close()
        if logged and args.save is not None:
            console.print(f"saved to {args.save}")
        self.finish(bool(logged))
        return logged

"""Train a GPT through a pipeline, in the manner of Megatron's script of this name.

    torchrun --nproc-per-node 4 examples/pretrain_gpt.py --pipeline-model-parallel-size 4
    torchrun --nproc-per-node 4 examples/pretrain_gpt.py --pipeline-model-parallel-size 2 --schedule gpipe
    torchrun --nproc-per-node 4 examples/pretrain_gpt.py --pipeline-model-parallel-size 2 --schedule zbv \\
        --num-experts 8 --expert-model-parallel-size 2
    torchrun --nproc-per-node 4 examples/pretrain_gpt.py --pipeline-model-parallel-size 4 --schedule zbv \\
        --stage-backend graph
    torchrun --nproc-per-node 4 examples/pretrain_gpt.py --pipeline-model-parallel-size 4 --seq-length 4096 \\
        --sequence-slices 4
    torchrun --nproc-per-node 8 examples/pretrain_gpt.py --pipeline-model-parallel-size 8 \\
        --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 2048 --data-path my_text/

Runs on CPU with gloo and on GPUs with NCCL, there in bfloat16, on one node or several: only torchrun's variables are
read. Ranks share GPUs where there are fewer of these. Ranks beyond one pipeline are replicas of it, whose gradients are
averaged; each --data-parallel-shard-size of them share out the parameters (FSDP2), and each
--expert-model-parallel-size the experts.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from gpt import GPTConfig, GPTStage
from moe import balance_loads, whole_names
from rich.console import Console
from rich.progress import Progress
from running import DEVICE, count_microbatches, make_parser, peak_memory, run
from text_data import TextSamples, read_text
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import LambdaLR

import megapipe
from megapipe import parallel_state, slices
from megapipe.analysis import split_bubble
from megapipe.checkpoint import Checkpointer
from megapipe.graph import capture
from megapipe.overlap import in_segments
from megapipe.training import GradientReducer

MODEL = {
    "num_layers": (8, ""),
    "hidden_size": (96, ""),
    "num_attention_heads": (4, ""),
    "seq_length": (128, ""),
    "dropout": (0.0, ""),
    "tie_embeddings": (False, "the head's weight is the embedding's"),
    "num_experts": (int, "per layer, in place of its MLP"),
    "moe_topk": (2, "experts of each token, besides the shared one"),
    "moe_aux_loss_coeff": (1e-2, "weight of the loss that evens out loads"),
    "moe_bias_update_rate": (0.0, "by how much a step changes biases that even out loads, such as 1e-3, in its place"),
    "transformer_impl": (("local", "transformer_engine"), ""),
}
PARALLEL = {
    "pipeline_model_parallel_size": (1, ""),
    "num_virtual_stages_per_pipeline_rank": (int, ""),
    "stage_backend": (("eager", "graph", "inductor"), "captured graphs, compiled or not (torch 2.9; no experts)"),
    "warm_up": (False, "compile all stages side by side before the first step"),
    "expert_model_parallel_size": (1, "replicas that share out experts"),
    "data_parallel_shard_size": (1, "replicas that share out parameters"),
    "schedule": (str, f"one of {', '.join(megapipe.schedule_names())}"),
    "offload": (float, "activations to the host: a copy's time over F's"),
    "sequence_slices": (1, "parts of each sequence; see --schedule"),
}
TRAINING = {
    "micro_batch_size": (4, "sequences per microbatch"),
    "global_batch_size": (32, "sequences per step, over all replicas"),
    "train_iters": (200, ""),
    "lr": (4e-3, ""),
    "lr_warmup_iters": (20, ""),
    "min_lr": (4e-4, ""),
    "weight_decay": (0.1, ""),
    "clip_grad": (1.0, ""),
    "post_validation": (False, "step without waiting for the norm; roll it back if the norm is too large"),
    "bf16": (bool, "compute in bfloat16 by autocast, with weights in float32; default: on GPUs"),
    **DEVICE,
}
DATA_TITLE = "data, validation and checkpoints"
DATA = {
    "data_path": (str, "a text file or a folder of them; default: Python's own source"),
    "eval_interval": (100, "steps between validations; 0 for none"),
    "eval_iters": (4, "validation batches"),
    "log_interval": (25, ""),
    "record_timeline": (str, "a file for `megapipe show` and `megapipe tune`"),
    "save": (str, "folder for checkpoints: at the end, and every --save-interval"),
    "save_interval": (int, "steps between checkpoints"),
    "keep_last": (int, "checkpoints to keep; default: all"),
    "async_save": (False, "write checkpoints while training goes on"),
    "load": (str, "folder to go on from, saved under any arrangement; that of --save may be empty, at the first start"),
}


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser(__doc__, model=MODEL, parallelism=PARALLEL, training=TRAINING, **{DATA_TITLE: DATA})
    args = parser.parse_args(argv)
    for option in (
        "micro_batch_size",
        "global_batch_size",
        "sequence_slices",
        "eval_iters",
        "log_interval",
        "save_interval",
    ):
        if (value := getattr(args, option)) is not None and value < 1:
            parser.error(f"--{option.replace('_', '-')} must be at least 1, got {value}")
    if args.sequence_slices > 1:
        if args.num_experts is not None or args.stage_backend != "eager":
            parser.error("--sequence-slices takes a model without --num-experts, and --stage-backend eager")
        args.schedule = args.schedule or "seq1f1b"
    return args


def forward_step(data_iterator: Iterator[dict[str, Tensor]] | None, model: nn.Module) -> tuple[Any, Any]:
    """The model runs in segments, so that its exchanges of tokens are overlapped where a schedule pairs F and B."""
    if data_iterator is None:  # a stage in the middle
        return in_segments(model, None), None
    batch = next(data_iterator)
    tokens = slices.cut(batch["tokens"], 0)
    return in_segments(model, tokens), partial(loss_func, batch["labels"])


def loss_func(labels: Tensor, logits: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The mean over the microbatch, or a slice's part of it. Parts are added up, in gradients and in reports."""
    own = slices.cut(labels, 0)
    loss = F.cross_entropy(logits.float().flatten(0, 1), own.flatten(), reduction="sum") / labels.numel()
    return loss, {"loss": loss.detach()}


class Trainer:
    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        self.args = args
        self.device = device
        self.forward_backward = megapipe.get_forward_backward_func(args.schedule)
        if self.forward_backward.forward_only:
            raise ValueError(f"--schedule {self.forward_backward.name} runs forwards only: choose another to train.")
        self.num_replicas = parallel_state.get_data_parallel_world_size()
        self.num_microbatches = count_microbatches(args, self.num_replicas)
        self.recorder = megapipe.TimelineRecorder(num_steps=20)
        self.model = {
            "hidden_size": args.hidden_size,
            "num_layers": args.num_layers,
            "num_attention_heads": args.num_attention_heads,
            "max_position_embeddings": args.seq_length,
            "transformer_impl": args.transformer_impl,
            "num_experts": args.num_experts,
            "moe_topk": args.moe_topk,
        }
        config = self.make_config()
        # The schedule decides which stages this rank holds. Only their layers are ever built here.
        self.chunks = [GPTStage(config, stage).to(device) for stage in megapipe.stages_for_rank(self.forward_backward)]
        # Only the stages at the ends read data: tokens and labels.
        self.reads_data = any(chunk.stage.is_first or chunk.stage.is_last for chunk in self.chunks)
        if args.stage_backend != "eager":
            for chunk in self.chunks:
                self.capture(chunk)
        self.reducer = None
        if args.data_parallel_shard_size > 1:
            self.shard()
        elif self.num_replicas > 1:
            self.reducer = GradientReducer(self.chunks)
            config.grad_sync_func = self.reducer.start
        self.tied = None
        if args.tie_embeddings:
            self.tied = megapipe.TiedWeights(self.chunks, ["embedding.tokens.weight", "head.output.weight"])
        if args.post_validation:
            self.optimizer: megapipe.PipelinedOptimizer = megapipe.PostValidatedOptimizer(
                self.chunks, self.make_optimizer, args.clip_grad, self.hyperparameters
            )
            config.post_validated_optimizer = self.optimizer
        else:
            self.optimizer = megapipe.PipelinedOptimizer(self.chunks, self.make_optimizer, self.hyperparameters)
        self.scheduler = megapipe.PipelinedLRScheduler(
            self.optimizer, lambda optimizer: LambdaLR(optimizer, partial(learning_rate, args=args))
        )
        self.consumed_samples = 0
        self.checkpointer = Checkpointer(
            args.save or args.load or "checkpoints",
            self.chunks,
            self.optimizer,
            others={"lr_scheduler": self.scheduler},
            keep_last=args.keep_last,
            asynchronous=args.async_save,
            parts=whole_names,  # expert by expert, so that they can be shared out otherwise
        )
        self.samples = None
        if self.reads_data:
            text = read_text(args.data_path)
            self.samples = TextSamples(text, args.seq_length, args.micro_batch_size, args.seed, device)

    def make_config(self) -> GPTConfig:
        args = self.args
        return GPTConfig(
            **self.model,
            dropout=args.dropout,
            seed=args.seed,
            moe_aux_loss_coeff=args.moe_aux_loss_coeff,
            moe_aux_loss_scale=1 / self.num_microbatches,
            expert_model_parallel_group=parallel_state.get_expert_model_parallel_group(),
            enable_autocast=uses_bf16(args, self.device),
            autocast_dtype=torch.bfloat16,
            num_sequence_slices=args.sequence_slices,
            offload_activations=args.offload,
            finalize_model_grads_func=self.finalize_gradients,
            record_timeline=self.recorder,
        )

    def shard(self) -> None:
        """Share the parameters out among replicas (FSDP2)."""
        mesh = parallel_state.get_data_parallel_mesh()
        for chunk in self.chunks:
            for layer in chunk.layers.values() if self.args.stage_backend == "eager" else ():  # a graph is one module
                fully_shard(layer, mesh=mesh)
            fully_shard(chunk, mesh=mesh)

    def capture(self, chunk: GPTStage) -> None:
        """Let a stage run as graphs, for microbatches of the size that all have here."""
        args, stage = self.args, chunk.stage
        shape = (args.seq_length, args.micro_batch_size)
        tokens = torch.zeros(shape, dtype=torch.long, device=self.device)
        hidden = torch.empty(*shape, args.hidden_size, device=self.device)
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=uses_bf16(args, self.device)):
            capture(
                chunk,
                (tokens if self.reads_data else None,),
                input_tensor=None if stage.is_first else hidden,
                compile="inductor" if args.stage_backend == "inductor" else None,
            )

    def make_optimizer(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.95))  # the scheduler multiplies this by the rate

    def hyperparameters(self, name: str, parameter: nn.Parameter) -> dict[str, Any]:
        return {"weight_decay": self.args.weight_decay if parameter.dim() > 1 else 0.0}

    def finalize_gradients(self, models: list[nn.Module], num_tokens: Tensor | None) -> None:
        if self.reducer is not None:
            self.reducer.finish(models)
        if self.tied is not None:
            self.tied.sum_gradients()

    def run_pipeline(self, split: str, first_sample: int, forward_only: bool = False) -> list[dict[str, Tensor]]:
        """Forward, and backward unless `forward_only`, of the global batch that begins there."""
        batches = None
        if self.samples is not None:
            replica = parallel_state.get_data_parallel_rank()
            first_sample += replica * self.args.micro_batch_size
            batches = self.samples.batches(split, first_sample, self.num_microbatches, self.num_replicas)
        return self.forward_backward(data_iterator=batches, forward_only=forward_only, **self.step_arguments())

    def warm_up(self) -> None:
        microbatch = None if self.samples is None else next(self.samples.batches("train", 0, 1, 1))
        megapipe.warm_up(self.forward_backward, microbatch=microbatch, **self.step_arguments())

    def step_arguments(self) -> dict[str, Any]:
        return {
            "forward_step_func": forward_step,
            "model": self.chunks,
            "num_microbatches": self.num_microbatches,
            "seq_length": self.args.seq_length,
            "micro_batch_size": self.args.micro_batch_size,
        }

    def mean_loss(self, reports: list[dict[str, Tensor]]) -> float:
        """Over microbatches and replicas, on every rank. Only the last stage's rank has reports."""
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        for report in reports:
            loss += report["loss"] / (self.num_microbatches * self.num_replicas)
        dist.all_reduce(loss)
        return loss.item()

    def train_step(self) -> list[dict[str, Tensor]]:
        self.optimizer.zero_grad()
        reports = self.run_pipeline("train", self.consumed_samples)
        self.consumed_samples += self.args.global_batch_size
        if not self.args.post_validation:
            self.norm = megapipe.clip_grad_norm_(self.chunks, self.args.clip_grad).item()
        if self.args.post_validation or math.isfinite(self.norm):
            self.optimizer.step()
        self.scheduler.step()
        if self.args.moe_bias_update_rate:
            balance_loads(self.chunks, self.args.moe_bias_update_rate, parallel_state.get_data_parallel_group())
        return reports

    def grad_norm(self) -> float:
        """Of the last step, before clipping."""
        if isinstance(self.optimizer, megapipe.PostValidatedOptimizer):
            self.optimizer.finalize_everywhere()  # it may still be on its way
            return self.optimizer.grad_norm
        return self.norm

    def validate(self) -> float:
        for chunk in self.chunks:
            chunk.eval()
        losses = [
            self.mean_loss(self.run_pipeline("valid", batch * self.args.global_batch_size, forward_only=True))
            for batch in range(self.args.eval_iters)
        ]
        for chunk in self.chunks:
            chunk.train()
        return sum(losses) / len(losses)

    def save(self, iteration: int) -> None:
        """At the end and every --save-interval."""
        args = self.args
        if iteration == args.train_iters or (args.save_interval and iteration % args.save_interval == 0):
            self.checkpointer.save(iteration, {"consumed_samples": self.consumed_samples, "model": self.model})

    def load(self, console: Console) -> int:
        """Returns how many iterations have been done."""
        args = self.args
        iteration = 0
        if args.load is not None:
            loaded = self.checkpointer.load(args.load, may_be_empty=args.load == args.save)
            if loaded is None:
                console.print(f"nothing saved in {args.load} yet: starting from the beginning")
            else:
                console.print(f"going on from iteration {loaded.step}, loaded from {args.load}")
                iteration, self.consumed_samples = loaded.step, loaded.data["consumed_samples"]
        if args.save is not None:
            self.checkpointer.check_can_save(iteration + 1)
        return iteration


def uses_bf16(args: argparse.Namespace, device: torch.device) -> bool:
    return device.type == "cuda" if args.bf16 is None else bool(args.bf16)


def learning_rate(iteration: int, args: argparse.Namespace) -> float:
    """Linear warmup, then half a cosine down to --min-lr."""
    if iteration < args.lr_warmup_iters:
        return args.lr * (iteration + 1) / args.lr_warmup_iters
    done = (iteration - args.lr_warmup_iters) / max(1, args.train_iters - args.lr_warmup_iters)
    return args.min_lr + (args.lr - args.min_lr) * 0.5 * (1 + math.cos(math.pi * done))


def initialize_model_parallel(args: argparse.Namespace, device: torch.device) -> None:
    pp_size, shard_size = args.pipeline_model_parallel_size, args.data_parallel_shard_size
    vp_size, ep_size = args.num_virtual_stages_per_pipeline_rank, args.expert_model_parallel_size
    if shard_size == 1:
        parallel_state.initialize_model_parallel(pp_size, vp_size, ep_size)
        return
    num_groups, rest = divmod(dist.get_world_size(), pp_size * shard_size)
    if rest or not num_groups or args.num_experts is not None:
        raise ValueError(
            f"--data-parallel-shard-size {shard_size} takes a multiple of {pp_size} x {shard_size} ranks, of which "
            f"there are {dist.get_world_size()}, and a model without --num-experts."
        )
    names = ("pp", "dp_replicate", "dp_shard")
    mesh = init_device_mesh(device.type, (pp_size, num_groups, shard_size), mesh_dim_names=names)
    parallel_state.initialize_from_mesh(mesh, vp_size)


def train(args: argparse.Namespace, device: torch.device) -> list[float]:
    """Returns the losses of the iterations that were logged."""
    initialize_model_parallel(args, device)
    torch.manual_seed(args.seed + dist.get_rank())  # dropout
    console = Console(quiet=dist.get_rank() != 0, highlight=False, soft_wrap=True)
    trainer = Trainer(args, device)
    console.print(
        f"{args.num_layers} layers of {args.hidden_size} on {dist.get_world_size()} ranks: "
        f"{args.pipeline_model_parallel_size} stages x {trainer.num_replicas} replicas, schedule "
        f"{trainer.forward_backward.name}, {trainer.num_microbatches} microbatches of {args.micro_batch_size} x "
        f"{args.seq_length} bytes"
    )
    first_iteration = trainer.load(console)
    if args.warm_up:
        trainer.warm_up()
    logged: list[float] = []
    started = time.perf_counter()
    tokens_per_step = args.global_batch_size * args.seq_length
    with Progress(console=console, disable=not console.is_terminal, transient=True) as progress:
        bar = progress.add_task("training", total=args.train_iters, completed=first_iteration)
        for iteration in range(first_iteration, args.train_iters):
            reports = trainer.train_step()
            is_logged = iteration in (first_iteration, args.train_iters - 1) or (iteration + 1) % args.log_interval == 0
            if is_logged:
                loss = trainer.mean_loss(reports)
                logged.append(loss)
                tokens = (iteration + 1 - first_iteration) * tokens_per_step
                line = (
                    f"iteration {iteration + 1:5d}/{args.train_iters} | loss {loss:.6f} | grad norm "
                    f"{trainer.grad_norm():.3f} | {tokens / (time.perf_counter() - started):,.0f} tokens/s"
                )
                console.print(line)
                progress.update(bar, description=f"loss {loss:.3f}")
            if args.eval_interval and (iteration + 1) % args.eval_interval == 0:
                console.print(
                    f"iteration {iteration + 1:5d}/{args.train_iters} | validation loss {trainer.validate():.6f}"
                )
            if args.save is not None:
                trainer.save(iteration + 1)
            progress.update(bar, completed=iteration + 1)
    seconds = time.perf_counter() - started
    tokens = (args.train_iters - first_iteration) * tokens_per_step
    if logged:
        timeline = trainer.recorder.gather()  # of this replica's pipeline, its last steps
        console.print(
            f"loss {logged[0]:.3f} -> {logged[-1]:.3f} in {seconds:.0f} s, {tokens / seconds:,.0f} tokens/s, "
            f"at most {peak_memory(device):.2f} GiB a rank\nbubble {split_bubble(timeline)}"
        )
        if args.record_timeline is not None and dist.get_rank() == 0:
            timeline.save(args.record_timeline)
    if args.save is not None and first_iteration < args.train_iters:
        trainer.checkpointer.wait()
        console.print(f"saved to {args.save}")
    return logged


if __name__ == "__main__":
    run(train, parse_args())

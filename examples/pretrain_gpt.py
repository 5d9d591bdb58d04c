"""Train a GPT through a pipeline, in the manner of Megatron's script of this name.

    torchrun --nproc-per-node 4 examples/pretrain_gpt.py --pipeline-model-parallel-size 4
    torchrun --nproc-per-node 4 examples/pretrain_gpt.py --pipeline-model-parallel-size 2 --schedule gpipe
    torchrun --nproc-per-node 4 examples/pretrain_gpt.py --pipeline-model-parallel-size 2 --schedule zbv \\
        --num-experts 8 --expert-model-parallel-size 2
    torchrun --nproc-per-node 4 examples/pretrain_gpt.py --pipeline-model-parallel-size 4 --schedule zbv \\
        --stage-backend graph
    torchrun --nproc-per-node 8 examples/pretrain_gpt.py --pipeline-model-parallel-size 8 --bf16 \\
        --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 2048 --data-path my_text/

Runs on CPU with gloo and on GPUs with NCCL, one rank per device, on one node or several: only torchrun's variables are
read. Ranks beyond one pipeline are replicas of it, whose gradients are averaged; each --expert-model-parallel-size of
them share out the experts.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from gpt import GPTConfig, GPTStage
from moe import whole_names
from rich.console import Console
from rich.progress import Progress
from text_data import TextSamples, read_text
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

import megapipe
from megapipe import parallel_state
from megapipe.bubble import split_bubble
from megapipe.graph import capture


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    model = parser.add_argument_group("model")
    model.add_argument("--num-layers", type=int, default=8)
    model.add_argument("--hidden-size", type=int, default=96)
    model.add_argument("--num-attention-heads", type=int, default=4)
    model.add_argument("--seq-length", type=int, default=128)
    model.add_argument("--dropout", type=float, default=0.0)
    model.add_argument("--num-experts", type=int, default=None, help="per layer, in place of its MLP")
    model.add_argument("--moe-topk", type=int, default=2, help="experts of each token, besides the shared one")
    model.add_argument("--moe-aux-loss-coeff", type=float, default=1e-2, help="weight of the loss that evens out loads")
    model.add_argument("--transformer-impl", choices=("local", "transformer_engine"), default="local")
    parallel = parser.add_argument_group("parallelism")
    parallel.add_argument("--pipeline-model-parallel-size", type=int, default=1)
    parallel.add_argument("--num-virtual-stages-per-pipeline-rank", type=int, default=None)
    parallel.add_argument(
        "--stage-backend",
        choices=("eager", "graph", "inductor"),
        default="eager",
        help="run stages as captured graphs, compiled or not (torch 2.9 or newer; not with experts)",
    )
    parallel.add_argument("--expert-model-parallel-size", type=int, default=1, help="replicas that share out experts")
    parallel.add_argument("--schedule", default=None, help=f"one of {', '.join(megapipe.schedule_names())}")
    training = parser.add_argument_group("training")
    training.add_argument("--micro-batch-size", type=int, default=4, help="sequences per microbatch")
    training.add_argument("--global-batch-size", type=int, default=32, help="sequences per step, over all replicas")
    training.add_argument("--train-iters", type=int, default=200)
    training.add_argument("--lr", type=float, default=4e-3)
    training.add_argument("--lr-warmup-iters", type=int, default=20)
    training.add_argument("--min-lr", type=float, default=4e-4)
    training.add_argument("--weight-decay", type=float, default=0.1)
    training.add_argument("--clip-grad", type=float, default=1.0)
    training.add_argument("--bf16", action="store_true", help="compute in bfloat16 by autocast; weights stay float32")
    training.add_argument("--seed", type=int, default=1234)
    data = parser.add_argument_group("data, validation and checkpoints")
    data.add_argument("--data-path", default=None, help="a text file or a folder of them; default: Python's own source")
    data.add_argument("--eval-interval", type=int, default=100, help="steps between validations; 0 for none")
    data.add_argument("--eval-iters", type=int, default=4, help="validation batches")
    data.add_argument("--log-interval", type=int, default=25)
    data.add_argument("--record-timeline", metavar="FILE", default=None, help="for `megapipe show` and `megapipe tune`")
    data.add_argument("--save", default=None, help="folder for a checkpoint at the end")
    data.add_argument("--load", default=None, help="folder to go on from, saved with any pipeline size")
    return parser.parse_args(argv)


def forward_step(data_iterator: Iterator[dict[str, Tensor]] | None, model: nn.Module) -> tuple[Tensor, Any]:
    if data_iterator is None:  # a stage in the middle
        return model(None), None
    batch = next(data_iterator)
    return model(batch["tokens"]), partial(loss_func, batch["labels"])


def loss_func(labels: Tensor, logits: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    loss = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())
    return loss, {"loss": loss.detach()}


class Trainer:
    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        self.args = args
        self.device = device
        self.forward_backward = megapipe.get_forward_backward_func(args.schedule)
        self.num_replicas = parallel_state.get_data_parallel_world_size()
        self.num_microbatches, rest = divmod(args.global_batch_size, args.micro_batch_size * self.num_replicas)
        if rest or not self.num_microbatches:
            raise ValueError(
                f"--global-batch-size {args.global_batch_size} is no multiple of --micro-batch-size "
                f"{args.micro_batch_size} times {self.num_replicas} replicas."
            )
        self.recorder = megapipe.TimelineRecorder(num_steps=20)
        config = GPTConfig(
            hidden_size=args.hidden_size,
            num_layers=args.num_layers,
            num_attention_heads=args.num_attention_heads,
            max_position_embeddings=args.seq_length,
            dropout=args.dropout,
            seed=args.seed,
            transformer_impl=args.transformer_impl,
            num_experts=args.num_experts,
            moe_topk=args.moe_topk,
            moe_aux_loss_coeff=args.moe_aux_loss_coeff,
            moe_aux_loss_scale=1 / self.num_microbatches,
            expert_model_parallel_group=parallel_state.get_expert_model_parallel_group(),
            enable_autocast=args.bf16,
            autocast_dtype=torch.bfloat16,
            finalize_model_grads_func=average_over_replicas if self.num_replicas > 1 else None,
            record_timeline=self.recorder,
        )
        # The schedule decides which stages this rank holds. Only their layers are ever built here.
        self.chunks = [GPTStage(config, stage).to(device) for stage in megapipe.stages_for_rank(self.forward_backward)]
        # Only the stages at the ends read data: tokens and labels.
        self.reads_data = any(chunk.stage.is_first or chunk.stage.is_last for chunk in self.chunks)
        if args.stage_backend != "eager":
            for chunk in self.chunks:
                self.capture(chunk)
        parameters = [parameter for chunk in self.chunks for parameter in chunk.parameters()]
        matrices, vectors = ([p for p in parameters if (p.dim() > 1) == wanted] for wanted in (True, False))
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": args.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
            lr=args.lr,
            betas=(0.9, 0.95),
        )
        self.samples = None
        if self.reads_data:
            text = read_text(args.data_path)
            self.samples = TextSamples(text, args.seq_length, args.micro_batch_size, args.seed, device)

    def capture(self, chunk: GPTStage) -> None:
        """Let a stage run as graphs, for microbatches of the size that all have here."""
        args, stage = self.args, chunk.stage
        shape = (args.seq_length, args.micro_batch_size)
        tokens = torch.zeros(shape, dtype=torch.long, device=self.device)
        hidden = torch.empty(*shape, args.hidden_size, device=self.device)
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=args.bf16):
            capture(
                chunk,
                (tokens if self.reads_data else None,),
                input_tensor=None if stage.is_first else hidden,
                compile="inductor" if args.stage_backend == "inductor" else None,
            )

    def run_pipeline(self, split: str, iteration: int, forward_only: bool = False) -> list[dict[str, Tensor]]:
        """Forward, and backward unless `forward_only`, of one global batch."""
        batches = None
        if self.samples is not None:
            replica = parallel_state.get_data_parallel_rank()
            first_sample = iteration * self.args.global_batch_size + replica * self.args.micro_batch_size
            batches = self.samples.batches(split, first_sample, self.num_microbatches, self.num_replicas)
        return self.forward_backward(
            forward_step_func=forward_step,
            data_iterator=batches,
            model=self.chunks,
            num_microbatches=self.num_microbatches,
            seq_length=self.args.seq_length,
            micro_batch_size=self.args.micro_batch_size,
            forward_only=forward_only,
        )

    def mean_loss(self, reports: list[dict[str, Tensor]]) -> float:
        """Over microbatches and replicas, on every rank. Only the last stage's rank has reports."""
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        for report in reports:
            loss += report["loss"] / (self.num_microbatches * self.num_replicas)
        dist.all_reduce(loss)
        return loss.item()

    def train_step(self, iteration: int) -> tuple[list[dict[str, Tensor]], float]:
        args = self.args
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(iteration, args)
        self.optimizer.zero_grad(set_to_none=True)
        reports = self.run_pipeline("train", iteration)
        grad_norm = clip_gradients(self.chunks, args.clip_grad, self.device)
        self.optimizer.step()
        return reports, grad_norm

    def validate(self) -> float:
        for chunk in self.chunks:
            chunk.eval()
        losses = [
            self.mean_loss(self.run_pipeline("valid", batch, forward_only=True))
            for batch in range(self.args.eval_iters)
        ]
        for chunk in self.chunks:
            chunk.train()
        return sum(losses) / len(losses)

    # Checkpoints hold every parameter and its optimizer state under its name in the whole model.

    def save(self, folder: str, iteration: int) -> None:
        dcp.save(self._by_expert(self._state(iteration)), checkpoint_id=folder)

    def load(self, folder: str) -> int:
        state = self._state(0)
        by_expert = self._by_expert(state)
        dcp.load(by_expert, checkpoint_id=folder)  # the experts into those of `state`, of which these are views
        for part in ("model", "optimizer"):
            state[part].update({key: value for key, value in by_expert[part].items() if key in state[part]})
        set_state_dict(
            self._whole(),
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=StateDictOptions(flatten_optimizer_state_dict=True),
        )
        return int(by_expert["iteration"])

    def _state(self, iteration: int) -> dict[str, Any]:
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        model, optimizer = get_state_dict(self._whole(), self.optimizer, options=options)
        return {"model": model, "optimizer": optimizer, "iteration": torch.tensor(iteration)}

    def _by_expert(self, state: dict[str, Any]) -> dict[str, Any]:
        """With the experts' tensors under the number of each expert, so that they can be shared out otherwise."""
        experts = {name: p for name, p in self._whole().named_parameters() if not getattr(p, "allreduce", True)}
        divided: dict[str, Any] = {"model": {}, "optimizer": {}, "iteration": state["iteration"]}
        for part in ("model", "optimizer"):
            for key, value in state[part].items():
                of = next((parameter for name, parameter in experts.items() if name in key), None)
                if of is not None and isinstance(value, Tensor) and value.shape == of.shape:
                    divided[part].update(whole_names(key, of, value))
                else:
                    divided[part][key] = value
        return divided

    def _whole(self) -> nn.Module:
        """This rank's chunks as one module, with the parameter names of the whole model."""
        whole = nn.Module()
        for chunk in self.chunks:
            for name, child in chunk.named_children():
                if isinstance(child, nn.ModuleDict) and hasattr(whole, name):
                    getattr(whole, name).update(child)
                else:
                    whole.add_module(name, nn.ModuleDict(child.items()) if isinstance(child, nn.ModuleDict) else child)
        return whole


def learning_rate(iteration: int, args: argparse.Namespace) -> float:
    """Linear warmup, then half a cosine down to --min-lr."""
    if iteration < args.lr_warmup_iters:
        return args.lr * (iteration + 1) / args.lr_warmup_iters
    done = (iteration - args.lr_warmup_iters) / max(1, args.train_iters - args.lr_warmup_iters)
    return args.min_lr + (args.lr - args.min_lr) * 0.5 * (1 + math.cos(math.pi * done))


def average_over_replicas(models: list[nn.Module], num_tokens: Tensor | None) -> None:
    """finalize_model_grads_func: one all-reduce over everything, and one over the experts.

    An expert's gradient is a sum over the tokens of all replicas that share it out already.
    """
    groups = (parallel_state.get_data_parallel_group(), parallel_state.get_expert_data_parallel_group())
    for group, grads in zip(groups, gradients(models)):
        if not grads:
            continue
        flat = torch.cat([grad.flatten() for grad in grads])
        dist.all_reduce(flat, group=group)
        flat /= parallel_state.get_data_parallel_world_size()
        for grad, part in zip(grads, flat.split([grad.numel() for grad in grads])):
            grad.copy_(part.view_as(grad))


def gradients(models: list[nn.Module]) -> tuple[list[Tensor], list[Tensor]]:
    """Of what every replica has, and of experts."""
    dense, expert = [], []
    for model in models:
        for parameter in model.parameters():
            if parameter.grad is not None:
                (dense if getattr(parameter, "allreduce", True) else expert).append(parameter.grad)
    return dense, expert


def clip_gradients(models: list[nn.Module], max_norm: float, device: torch.device) -> float:
    """Scale all gradients so that their norm over the whole model is at most `max_norm`. Returns the norm.

    Summed in float64, so that it does not depend on how the model is cut.
    """
    dense, expert = gradients(models)
    squares = sum_of_squares(dense, device)
    expert_squares = sum_of_squares(expert, device)
    if parallel_state.get_expert_model_parallel_world_size() > 1:
        dist.all_reduce(expert_squares, group=parallel_state.get_expert_model_parallel_group())
    squares += expert_squares
    dist.all_reduce(squares, group=parallel_state.get_pipeline_model_parallel_group())
    norm = squares.sqrt().item()
    if norm > max_norm:
        torch._foreach_mul_(dense + expert, max_norm / norm)
    return norm


def sum_of_squares(tensors: list[Tensor], device: torch.device) -> Tensor:
    squares = torch.zeros((), dtype=torch.float64, device=device)
    for tensor in tensors:
        squares += tensor.double().square().sum()
    return squares


def setup() -> torch.device:
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        device = torch.device("cpu")
        torch.set_num_threads(1)  # the same arithmetic, to the bit, for every pipeline size
        dist.init_process_group("gloo")
    return device


def train(args: argparse.Namespace, device: torch.device) -> list[float]:
    """Returns the losses of the iterations that were logged."""
    parallel_state.initialize_model_parallel(
        args.pipeline_model_parallel_size, args.num_virtual_stages_per_pipeline_rank, args.expert_model_parallel_size
    )
    torch.manual_seed(args.seed + dist.get_rank())  # dropout
    console = Console(quiet=dist.get_rank() != 0, highlight=False, soft_wrap=True)
    trainer = Trainer(args, device)
    first_iteration = trainer.load(args.load) if args.load is not None else 0
    console.print(
        f"{args.num_layers} layers of {args.hidden_size} on {dist.get_world_size()} ranks: "
        f"{args.pipeline_model_parallel_size} stages x {trainer.num_replicas} replicas, schedule "
        f"{trainer.forward_backward.name}, {trainer.num_microbatches} microbatches of {args.micro_batch_size} x "
        f"{args.seq_length} bytes"
    )
    logged: list[float] = []
    started = time.perf_counter()
    with Progress(console=console, disable=not console.is_terminal, transient=True) as progress:
        bar = progress.add_task("training", total=args.train_iters, completed=first_iteration)
        for iteration in range(first_iteration, args.train_iters):
            reports, grad_norm = trainer.train_step(iteration)
            if iteration == first_iteration or (iteration + 1) % args.log_interval == 0:
                logged.append(trainer.mean_loss(reports))
                tokens = (iteration + 1 - first_iteration) * args.global_batch_size * args.seq_length
                line = (
                    f"iteration {iteration + 1:5d}/{args.train_iters} | loss {logged[-1]:.6f} | grad norm "
                    f"{grad_norm:.3f} | {tokens / (time.perf_counter() - started):,.0f} tokens/s"
                )
                console.print(line)
                progress.update(bar, description=f"loss {logged[-1]:.3f}")
            if args.eval_interval and (iteration + 1) % args.eval_interval == 0:
                console.print(
                    f"iteration {iteration + 1:5d}/{args.train_iters} | validation loss {trainer.validate():.6f}"
                )
            progress.update(bar, completed=iteration + 1)
    seconds = time.perf_counter() - started
    tokens = (args.train_iters - first_iteration) * args.global_batch_size * args.seq_length
    if logged:
        timeline = trainer.recorder.gather()  # of this replica's pipeline, its last steps
        console.print(
            f"loss {logged[0]:.3f} -> {logged[-1]:.3f} in {seconds:.0f} s, {tokens / seconds:,.0f} tokens/s\n"
            f"bubble {split_bubble(timeline)}"
        )
        if args.record_timeline is not None and dist.get_rank() == 0:
            timeline.save(args.record_timeline)
    if args.save is not None:
        trainer.save(args.save, args.train_iters)
        console.print(f"saved to {args.save}")
    return logged


if __name__ == "__main__":
    device = setup()
    train(parse_args(), device)
    dist.destroy_process_group()

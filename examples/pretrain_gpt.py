"""Train a GPT through a pipeline, in the manner of Megatron's script of this name.

    torchrun --nproc-per-node 4 examples/pretrain_gpt.py --pipeline-model-parallel-size 4
    torchrun --nproc-per-node 4 examples/pretrain_gpt.py --pipeline-model-parallel-size 2 --schedule gpipe
    torchrun --nproc-per-node 4 examples/pretrain_gpt.py --pipeline-model-parallel-size 2 --schedule zbv \\
        --num-experts 8 --expert-model-parallel-size 2
    torchrun --nproc-per-node 4 examples/pretrain_gpt.py --pipeline-model-parallel-size 2 --schedule dualpipev \\
        --num-experts 8 --expert-model-parallel-size 2 --stage-backend inductor
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
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from gpt import GPTConfig, GPTStage
from moe import balance_loads, whole_names
from running import count, make_parser, run
from text_data import TextSamples, read_text
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from trainer import CHECKPOINTS, TRAINING, uses_bf16
from trainer import Trainer as BaseTrainer

import megapipe
from megapipe import parallel_state, slices
from megapipe.analysis import split_bubble
from megapipe.graph import capture
from megapipe.overlap import in_segments
from megapipe.training import GradientReducer

MODEL = {
    "num_layers": (8, "", count),
    "hidden_size": (96, "", count),
    "num_attention_heads": (4, "", count),
    "seq_length": (128, "", count),
    "dropout": (0.0, ""),
    "tie_embeddings": (False, "the head's weight is the embedding's"),
    "num_experts": (count, "per layer, in place of its MLP"),
    "moe_topk": (2, "experts of each token, besides the shared one", count),
    "moe_aux_loss_coeff": (1e-2, "weight of the loss that evens out loads"),
    "moe_bias_update_rate": (0.0, "by how much a step changes biases that even out loads, such as 1e-3, in its place"),
}
PARALLEL = {
    "pipeline_model_parallel_size": (1, "", count),
    "num_virtual_stages_per_pipeline_rank": (count, ""),
    "stage_backend": (("eager", "graph", "inductor"), "captured graphs, compiled or not (torch 2.9)"),
    "warm_up": (False, "compile all stages side by side before the first step"),
    "expert_model_parallel_size": (1, "replicas that share out experts", count),
    "data_parallel_shard_size": (1, "replicas that share out parameters", count),
    "offload": (float, "activations to the host: a copy's time over F's"),
    "sequence_slices": (1, "parts of each sequence; see --schedule", count),
    "post_validation": (False, "step without waiting for the norm; roll it back if the norm is too large"),
}
DATA = {
    "data_path": (str, "a text file or a folder of them; default: Python's own source"),
    "eval_iters": (4, "validation batches", count),
    **CHECKPOINTS,
    "record_timeline": (str, "a file for `megapipe show` and `megapipe tune`"),
}


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    groups = {"model": MODEL, "parallelism": PARALLEL, "training": TRAINING, "data and checkpoints": DATA}
    parser = make_parser(__doc__, groups)
    args = parser.parse_args(argv)
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


class Trainer(BaseTrainer):
    forward_step = staticmethod(forward_step)
    betas = (0.9, 0.95)
    parts = staticmethod(whole_names)  # of checkpoints: expert by expert, so that they can be shared out otherwise

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        super().__init__(args, device)
        self.recorder = megapipe.TimelineRecorder(num_steps=20)
        sizes = ("hidden_size", "num_layers", "num_attention_heads", "num_experts", "moe_topk")
        self.model = {name: getattr(args, name) for name in sizes} | {"max_position_embeddings": args.seq_length}
        self.config = self.make_config()
        # The schedule decides which stages this rank holds. Only their layers are ever built here.
        stages = megapipe.stages_for_rank(self.forward_backward)
        self.chunks = [GPTStage(self.config, stage).to(device) for stage in stages]
        self.samples = None
        if any(stage.is_first or stage.is_last for stage in stages):  # others read no data: tokens and labels
            text = read_text(args.data_path)
            self.samples = TextSamples(text, args.seq_length, args.micro_batch_size, args.seed, device)
        if args.stage_backend != "eager":
            for chunk in self.chunks:
                self.capture(chunk)
        self.reducer = None
        if args.data_parallel_shard_size > 1:
            self.shard()
        elif self.num_replicas > 1:
            self.reducer = GradientReducer(self.chunks)
            self.config.grad_sync_func = self.reducer.start
        self.tied = None
        if args.tie_embeddings:
            self.tied = megapipe.TiedWeights(self.chunks, ["embedding.tokens.weight", "head.output.weight"])
        self.prepare()

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
                (None if self.samples is None else tokens,),
                input_tensor=None if stage.is_first else hidden,
                compile="inductor" if args.stage_backend == "inductor" else None,
            )

    def make_optimizer(self) -> megapipe.PipelinedOptimizer:
        if not self.args.post_validation:
            return super().make_optimizer()
        self.config.post_validated_optimizer = megapipe.PostValidatedOptimizer(
            self.chunks, self.adamw, self.args.clip_grad, self.hyperparameters
        )
        return self.config.post_validated_optimizer

    def step_optimizer(self) -> None:
        if self.args.post_validation:
            self.optimizer.step()
        else:
            super().step_optimizer()
        if self.args.moe_bias_update_rate:
            balance_loads(self.chunks, self.args.moe_bias_update_rate, parallel_state.get_data_parallel_group())

    def grad_norm(self) -> float:
        if isinstance(self.optimizer, megapipe.PostValidatedOptimizer):
            self.optimizer.finalize_everywhere()  # it may still be on its way
            return self.optimizer.grad_norm
        return super().grad_norm()

    def finalize_gradients(self, models: list[nn.Module], num_tokens: Tensor | None) -> None:
        if self.reducer is not None:
            self.reducer.finish(models)
        if self.tied is not None:
            self.tied.sum_gradients()

    def batches(self, split: str, first_sample: int) -> list[dict[str, Tensor]] | None:
        """This replica's part of the global batch that begins there."""
        if self.samples is None:
            return None
        first_sample += parallel_state.get_data_parallel_rank() * self.args.micro_batch_size
        return list(self.samples.batches(split, first_sample, self.num_microbatches, self.num_replicas))

    def training_batches(self) -> list[dict[str, Tensor]] | None:
        return self.batches("train", self.consumed_samples)

    def validation_loss(self) -> float:
        firsts = [number * self.args.global_batch_size for number in range(self.args.eval_iters)]
        all_reports = [self.run_pipeline(self.batches("valid", first), forward_only=True) for first in firsts]
        return sum(map(self.mean_loss, all_reports)) / len(firsts)

    def warm_up(self) -> None:
        first = (self.batches("train", 0) or [None])[0]
        sizes = {"seq_length": self.args.seq_length, "micro_batch_size": self.args.micro_batch_size}
        megapipe.warm_up(self.forward_backward, forward_step, first, self.chunks, self.num_microbatches, **sizes)

    def position(self) -> dict[str, Any]:
        return {**super().position(), "model": self.model}

    def finish(self, has_trained: bool) -> None:
        if has_trained:
            timeline = self.recorder.gather()  # of this replica's pipeline, its last steps
            self.console.print(f"bubble {split_bubble(timeline)}")
            if self.args.record_timeline is not None and dist.get_rank() == 0:
                timeline.save(self.args.record_timeline)


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
    trainer = Trainer(args, device)
    trainer.console.print(
        f"{args.num_layers} layers of {args.hidden_size} on {dist.get_world_size()} ranks: "
        f"{args.pipeline_model_parallel_size} stages x {trainer.num_replicas} replicas, schedule "
        f"{trainer.forward_backward.name}, {trainer.num_microbatches} microbatches of {args.micro_batch_size} x "
        f"{args.seq_length} bytes"
    )
    if args.warm_up:
        trainer.warm_up()
    return trainer.run()


if __name__ == "__main__":
    run(train, parse_args())

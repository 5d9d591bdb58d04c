"""Bytes that plans predict, beside those of runs: the peak of each rank, for every schedule.

    python -m benchmarks.bytes --models small deep wide --ways plain R O both
    python -m benchmarks.bytes --ways sharded window

Predicted: what one microbatch holds on each stage, found on torch's fake tensors (captured stages are run once, by
themselves), added up over the plan. Measured: storages alive in the second step of a run, on CPU, and whole weights of
sharded chunks, the most of either. No time is measured,
so other work on the machine changes nothing.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import megapipe
from megapipe import StageInfo, parallel_state
from megapipe.analysis import TimelineRecorder, bytes_of_stages
from megapipe.plan import find_schedule, make_plan

from .gpt_layers import GPTConfig, GPTStage
from .memory import gathered_bytes
from .options import run
from .runners import MEGAPIPE
from .tables import Table

RANKS, MICROBATCHES = 4, 8
HEADER = "model | way | schedule | predicted / measured, ranks 0 to 3 | measured, MiB"


class Sizes(NamedTuple):
    sequence: int
    rows: int
    hidden: int
    vocabulary: int
    layers: int


MODELS = {"small": Sizes(64, 2, 128, 512, 8), "deep": Sizes(256, 1, 192, 4096, 16), "wide": Sizes(128, 4, 512, 2048, 8)}

RECOMPUTED = {"R": 0.0, "both": 0.5}
"""The ways that recompute, and where they begin to: at this share of the stages."""
OFFLOADED = ("O", "both")
SHARDED = ("sharded", "window")
"""The ways of two replicas that share out weights and gradients by `fully_shard`; with a window one chunk is gathered
at a time."""


class Checkpointed(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.layer, x, use_reentrant=False)


def make_stage(sizes: Sizes, way: str, info: StageInfo) -> nn.Module:
    config = GPTConfig(
        hidden_size=sizes.hidden,
        num_layers=sizes.layers,
        num_attention_heads=4,
        vocab_size=sizes.vocabulary,
        max_position_embeddings=sizes.sequence,
        offload_activations=1.0 if way in OFFLOADED else None,
        max_gathered_chunks=1 if way == "window" else None,
    )
    if way in RECOMPUTED:
        num_stages = info.num_stages
        config.recompute = ["all" if at >= RECOMPUTED[way] * num_stages else None for at in range(num_stages)]
    stage = GPTStage(config, info)
    if way == "checkpointed":
        for name, layer in stage.layers.items():
            stage.layers[name] = Checkpointed(layer)
    if way == "captured":
        from megapipe.graph import capture

        tokens = torch.zeros(sizes.sequence, sizes.rows, dtype=torch.long)
        hidden = torch.zeros(sizes.sequence, sizes.rows, sizes.hidden, requires_grad=True)
        capture(stage, (tokens,), input_tensor=None if info.is_first else hidden)
    return stage


def forward_step(batches: Iterator[Tensor], stage: Any) -> tuple[Any, Callable[[Tensor], Any]]:
    data = next(batches)

    def loss_func(logits: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        loss = F.cross_entropy(logits.flatten(0, 1), data[..., 1].flatten())
        return loss, {"loss": loss.detach()}

    return stage(data[..., 0]), loss_func


def compare(name: str, sizes: Sizes, way: str) -> tuple[list[float], list[int]]:
    """The predicted and the measured peak of each rank, without weights and what is as large."""
    num_chunks = 2 if find_schedule(name).num_chunks is None else None
    replicas = dist.get_world_size() // RANKS
    mesh = init_device_mesh("cpu", (RANKS, replicas), mesh_dim_names=("pp", "dp"))
    parallel_state.initialize_from_mesh(mesh, num_chunks)
    data = torch.randint(0, sizes.vocabulary, (MICROBATCHES, sizes.sequence, sizes.rows, 2))

    def make(info: StageInfo) -> nn.Module:
        return make_stage(sizes, way, info)

    chunks = [make(info) for info in megapipe.stages_for_rank(name)]
    for chunk in chunks if way in SHARDED else ():
        for layer in (*chunk.layers.values(), chunk):
            fully_shard(layer, mesh=parallel_state.get_data_parallel_mesh())
    if way == "tied":
        tied = megapipe.TiedWeights(chunks, ["embedding.tokens.weight", "head.output.weight"])
        chunks[0].config.finalize_model_grads_func = lambda chunks, num_tokens, **_: tied.sum_gradients()
    plan = make_plan(name, RANKS, MICROBATCHES, num_chunks, settings=chunks[0].config.settings)
    options = {"fake": way != "captured", "replicas": replicas}
    stages = bytes_of_stages(make, RANKS * plan.num_chunks, forward_step, data[0], **options)
    predicted = [rank.peak - rank.model for rank in plan.simulate(memory=stages).memory or ()]
    recorder = TimelineRecorder(num_steps=1, memory=True)
    for chunk in chunks:
        chunk.config.record_timeline = recorder
    train = megapipe.get_forward_backward_func(name)
    for _ in range(2):  # the first one makes the gradients
        with gathered_bytes() as whole:
            train(
                forward_step_func=forward_step,
                data_iterator=[iter(data) for _ in chunks],
                model=chunks,
                num_microbatches=MICROBATCHES,
                seq_length=sizes.sequence,
                micro_batch_size=sizes.rows,
            )
    own = recorder.gather().peak_bytes[mesh.get_local_rank("pp")] + max(whole, default=0)
    measured = [0] * RANKS
    dist.all_gather_object(measured, own, parallel_state.get_pipeline_model_parallel_group())
    dist.barrier()
    parallel_state.destroy_model_parallel()
    return predicted, measured


def measure(rank: int, args: argparse.Namespace) -> list[Table]:
    rows = []
    for model in args.models:
        for way in args.ways:
            for name in args.schedules:
                predicted, measured = compare(name, MODELS[model], way)
                ratios = " ".join(f"{a / b:.3f}" for a, b in zip(predicted, measured))
                rows.append([model, way, f"`{name}`", ratios, " ".join(f"{b / 2**20:.1f}" for b in measured)])
    return [("bytes", "Bytes of stages", HEADER, rows, "")]


if __name__ == "__main__":
    schedules = [*MEGAPIPE, "combined_1f1b", "combined_zb1p"]
    # Two replicas for the ways that share out weights.
    replicas = lambda args: RANKS * (2 if {*args.ways} & {*SHARDED} else 1)  # noqa: E731
    run(measure, replicas, models=list(MODELS), ways=["plain"], schedules=schedules)

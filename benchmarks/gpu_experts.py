"""On a GPU: a stage of DeepSeek-V3 16B's layers, a mixture of experts that drops no token: eager, captured, compiled.

    python -m benchmarks.gpu_experts
    python -m benchmarks.gpu_experts --device cpu --dtype float32 --hidden-size 32 --heads 2 --expert-size 16 \\
        --experts 8 --topk 2 --tokens 64 --layers 1 --repeats 2 --folder /tmp/gpu

The second command measures nothing worth knowing: it runs the same functions where there is no GPU. The experts are
those of a group of one rank, so that sizes are read from the device and tokens are exchanged as among many. Then two
ranks share the GPU, and train by dualpipev: losses and gradients are compared. Each table is printed as soon as it is
there, and a profile of the compiled stage is written beside the tables.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import megapipe
from megapipe import parallel_state
from megapipe.graph import capture
from megapipe.overlap import in_segments, run_segments
from megapipe.timing import Clock, clock_of
from megapipe.weight_grad import DeferredGrads, convert

from .gpt_layers import WARMUP
from .gpu_stages import full_pass, milliseconds, split_pass
from .launching import call, gather, in_turns, launch
from .memory import memory_of
from .options import options
from .tables import Table, median_and_spread, save_table

sys.path.append(str(Path(__file__).parent.parent / "examples"))
from gpt import GPTConfig
from moe import MoE

TIMES_HEADER = "stage | F | full backward | B | W | F + B + W | eager / this | host, F + B + W | ready after, s"
TIMES_NOTES = """Milliseconds of the device, medians of interleaved passes, in brackets the middle half; the ratio is
taken pass by pass. *host*: from the call of F until that of W returns, with the waits for sizes in it. *ready after*:
making, capturing, compiling, and the first passes."""
SAME_HEADER = "stage | tensors equal to eager's | largest relative difference"
SAME_NOTES = "Output, gradient of the input, and of all weights, of one microbatch, B and W against eager's B and W."
MEMORY_HEADER = "stage | after F | after B | peak of F, B, W"
MEMORY_NOTES = "Megabytes above what was there before, parameters and gradients among that."
KINDS = {
    "grouped products": ("groupproblem", "grouped", "group_gemm"),
    "attention": ("flash", "fmha", "attention", "sdpa"),
    "products": ("gemm", "nvjet", "cutlass", "::mm", "addmm"),
    "fused": ("triton", "cpp_fused"),
    "exchanges": ("nccl", "memcpy", "alltoall", "all_to_all"),
}
"""Words in the names of kernels, and of operators of the CPU."""
KERNELS_HEADER = " | ".join(["stage", "kernels", "device, ms", *KINDS, "others"])
KERNELS_NOTES = "Milliseconds of kernels in one F, B and W, by the profiler. *others*: what is neither, so not fused."
PAIRS_HEADER = "stages | losses off by | gradients off by, relatively | pairs in one graph | step, ms"
PAIRS_NOTES = """Two ranks that share the GPU share the experts out; dualpipev, two chunks on each, four microbatches.
*step*: of ranks that take turns, so no time worth knowing but against one another. Last of three steps."""


@dataclass
class Config(GPTConfig):
    expert_size: int = 1408
    num_shared: int = 2


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)). Grouped layers are told how many tokens each expert has."""

    def __init__(self, gate: nn.Module, up: nn.Module, down: nn.Module) -> None:
        super().__init__()
        self.gate, self.up, self.down = gate, up, down

    def forward(self, x: Tensor, *counts: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x, *counts)) * self.up(x, *counts), *counts)


class GatedMoE(MoE):
    """Experts, and the shared ones as one that is as wide as all of them."""

    def make_mlp(self, config: Any, linear: Callable[[int, int], nn.Module]) -> nn.Module:
        width = config.expert_size if isinstance(linear, partial) else config.num_shared * config.expert_size
        there, back = (config.hidden_size, width), (width, config.hidden_size)
        return GatedMLP(linear(*there), linear(*there), linear(*back))


class Layer(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        width, self.num_heads = config.hidden_size, config.num_attention_heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.moe = GatedMoE(config)

    def forward_segments(self, x: Tensor) -> Any:
        heads = self.qkv(self.norm1(x)).unflatten(-1, (3, self.num_heads, -1)).permute(1, 2, 0, 3).unsqueeze(1)
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.proj(mixed.squeeze(0).transpose(0, 1).reshape(x.shape))
        return x + (yield from in_segments(self.moe, self.norm2(x)))

    def forward(self, x: Tensor) -> Tensor:
        return run_segments(self.forward_segments(x))


class Layers(nn.Sequential):
    """A stage: [tokens, hidden] to the same."""

    def forward_segments(self, x: Tensor) -> Any:
        for layer in self:
            x = yield from in_segments(layer, x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return run_segments(self.forward_segments(x))


def make_layers(args: argparse.Namespace, group: Any, num_layers: int, seed: int = 0) -> Layers:
    torch.manual_seed(seed)
    config = Config(
        hidden_size=args.hidden_size,
        num_attention_heads=args.heads,
        num_experts=args.experts,
        moe_topk=args.topk,
        expert_model_parallel_group=group,
        expert_size=args.expert_size,
        num_shared=args.shared,
    )
    with torch.device(args.device):
        layers = Layers(*(Layer(config) for _ in range(num_layers)))
    return convert(layers).to(getattr(torch, args.dtype))


def example(args: argparse.Namespace) -> Tensor:
    return torch.randn(args.tokens, args.hidden_size, device=args.device, dtype=getattr(torch, args.dtype))


# One stage


def measure(rank: int, args: argparse.Namespace) -> list[Table]:
    clock, group = clock_of(torch.device(args.device)), group_of(args)
    x, grad = example(args).requires_grad_(), example(args)
    ways: dict[str, tuple[nn.Module, float]] = {}
    for way in args.ways.split(","):
        start = time.perf_counter()
        layers: nn.Module = make_layers(args, group, args.layers)
        if way != "eager":
            layers = capture(layers, (x,), compile="inductor" if way == "compiled" else None)
        for _ in range(WARMUP):
            split_pass(clock, layers, x, grad)
        if args.full:
            full_pass(clock, layers, x, grad)
        synchronize(args)
        ways[way] = layers, time.perf_counter() - start
        print(f"{way}: ready after {ways[way][1]:.1f} s", flush=True)
    tables = []
    for part in (same_rows, time_rows, memory_rows, kernel_rows):
        name, title, header, rows, notes = part(args, clock, ways, x, grad)
        tables.append((name, f"{title}, {described(args)}", header, rows, notes))
        save_table(*tables[-1], folder=args.folder)
    return tables


def group_of(args: argparse.Namespace) -> Any:
    """All ranks, by NCCL where there are GPUs. Ranks that share one are to NCCL on machines of their own."""
    if args.device != "cuda":
        return dist.group.WORLD
    torch.cuda.set_device(0)
    if dist.get_world_size() > 1:
        os.environ |= {"NCCL_HOSTID": f"machine {dist.get_rank()}", "NCCL_SOCKET_IFNAME": "lo"}
    return dist.new_group(backend="nccl")


def described(args: argparse.Namespace) -> str:
    device = torch.cuda.get_device_name() if args.device == "cuda" else args.device
    return (
        f"{device}: {args.layers} layers of hidden {args.hidden_size}, {args.heads} heads, {args.experts} routed and "
        f"{args.shared} shared experts of {args.expert_size}, {args.topk} per token, {args.tokens} tokens, {args.dtype}"
    )


def synchronize(args: argparse.Namespace) -> None:
    if args.device == "cuda":
        torch.cuda.synchronize()


def same_rows(args: argparse.Namespace, clock: Clock, ways: Any, x: Tensor, grad: Tensor) -> Table:
    found = {way: results(layers, x, grad) for way, (layers, _) in ways.items()}
    rows = []
    for way, mine in found.items():
        equal = sum(torch.equal(one, other) for one, other in zip(mine, found["eager"], strict=True))
        rows.append([way, f"{equal} of {len(mine)}", f"{worst_difference(mine, found['eager']):.0e}"])
    return "experts-same", "Experts, captured: equality", SAME_HEADER, rows, SAME_NOTES


def results(layers: nn.Module, x: Tensor, grad: Tensor) -> list[Tensor]:
    layers.zero_grad()
    x, deferred = x.detach().requires_grad_(), DeferredGrads()
    y = layers(x)
    with deferred:
        y.backward(grad)
    deferred.run()
    return [y.detach(), x.grad, *(p.grad.clone() for p in layers.parameters())]  # type: ignore[list-item, union-attr]


def worst_difference(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """In norms, of the tensor that differs most."""
    pairs = [(one.float(), other.float()) for one, other in zip(ours, theirs)]
    return max(float((one - other).norm() / other.norm().clamp(min=1e-20)) for one, other in pairs)


def time_rows(args: argparse.Namespace, clock: Clock, ways: Any, x: Tensor, grad: Tensor) -> Table:
    def timed(layers: nn.Module) -> tuple[list[Any], float]:
        synchronize(args)
        start = time.perf_counter()
        marks = split_pass(clock, layers, x, grad)
        return marks, 1e3 * (time.perf_counter() - start)

    functions = [partial(timed, layers) for layers, _ in ways.values()]
    found = dict(zip(ways, in_turns(functions, args.repeats, WARMUP, call)))
    whole = dict.fromkeys(ways, "-")
    if args.full:
        passes = [partial(full_pass, clock, layers, x, grad) for layers, _ in ways.values()]
        for way, mine in zip(ways, in_turns(passes, args.repeats, 1, call)):
            whole[way] = median_and_spread(milliseconds(clock, mine)[0], "{:.2f}")
    synchronize(args)
    parts = {way: milliseconds(clock, [marks for marks, _ in passes]) for way, passes in found.items()}
    sums = {way: [sum(times) for times in zip(*mine)] for way, mine in parts.items()}
    rows = []
    for way, mine in parts.items():
        forward, inputs, weights = (median_and_spread(one, "{:.2f}") for one in mine)
        ratio = median_and_spread([eager / own for eager, own in zip(sums["eager"], sums[way])], "{:.2f}")
        host = median_and_spread([host for _, host in found[way]], "{:.2f}")
        both = median_and_spread(sums[way], "{:.2f}")
        rows.append([way, forward, whole[way], inputs, weights, both, ratio, host, f"{ways[way][1]:.1f}"])
    return "experts", "Experts, captured and compiled", TIMES_HEADER, rows, TIMES_NOTES


def memory_rows(args: argparse.Namespace, clock: Clock, ways: Any, x: Tensor, grad: Tensor) -> Table:
    kept: list[Any] = []

    def run(actions: str, layers: nn.Module) -> None:
        output, deferred = layers(x.detach().requires_grad_()), DeferredGrads()
        kept.append(deferred)
        if "B" not in actions:
            kept.append(output)
            return
        with deferred:
            output.backward(grad)
        del output
        if "W" in actions:
            deferred.run()

    rows = []
    for way, (layers, _) in ways.items():
        found = []
        for actions in ("F", "FB", "FBW"):
            found.append(memory_of(args.device, partial(run, actions, layers)))
            kept.clear()
        numbers = (found[0].held, found[1].held, found[2].peak)
        rows.append([way, *(f"{number / 2**20:,.1f}" for number in numbers)])
    return "experts-memory", "Experts, captured: memory", MEMORY_HEADER, rows, MEMORY_NOTES


def kernel_rows(args: argparse.Namespace, clock: Clock, ways: Any, x: Tensor, grad: Tensor) -> Table:
    is_gpu, rows, text = args.device == "cuda", [], []
    for way, (layers, _) in ways.items():
        with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_gpu else [])]) as profiler:
            split_pass(clock, layers, x, grad)
            synchronize(args)
        averages = profiler.key_averages()
        own: dict[str, float] = {}
        for event in averages:
            spent = event.self_device_time_total if is_gpu else event.self_cpu_time_total
            is_kernel = "CUDA" in str(event.device_type) or not is_gpu
            if is_kernel and spent > 0:
                own[event.key] = own.get(event.key, 0.0) + spent / 1e3
        times: dict[str, float] = defaultdict(float)
        for name, spent in own.items():
            times[kind_of(name)] += spent
        calls = sum(event.count for event in averages if event.key in own)
        cells = [f"{times[kind]:.2f}" for kind in (*KINDS, "others")]
        rows.append([way, str(calls), f"{sum(own.values()):.2f}", *cells])
        longest = sorted(own.items(), key=lambda item: -item[1])[:30]
        text += [
            f"{way}: ms, kind, name",
            *(f"{ms:9.3f}  {kind_of(name):20}  {name[:160]}" for name, ms in longest),
            "",
        ]
    path = Path(args.folder) / "experts-profile.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(text))
    print("\n".join(text), flush=True)
    return "experts-kernels", "Experts, captured: kernels", KERNELS_HEADER, rows, KERNELS_NOTES


def kind_of(name: str) -> str:
    return next((kind for kind, words in KINDS.items() if any(word in name.lower() for word in words)), "others")


# Two ranks that share the device


def measure_pairs(rank: int, args: argparse.Namespace) -> list[Table]:
    group = group_of(args)
    parallel_state.initialize_model_parallel(1, expert_model_parallel_size=2)
    small = argparse.Namespace(**{**vars(args), "experts": min(args.experts, 8), "topk": 2, "tokens": args.tokens // 8})
    found: dict[str, Any] = {}
    for way in args.ways.split(","):
        found[way] = steps_of(small, group, way)
        if rank == 0:
            print(f"dualpipev, {way}: losses {found[way][0]}", flush=True)
    rows = []
    for way, (losses, grads, num_pairs, seconds) in found.items():
        wanted_losses, wanted, *_ = found["eager"]
        off_by = max(gather(worst_difference(grads, wanted)))
        loss_off = max(gather(max(abs(one - other) for one, other in zip(losses, wanted_losses, strict=True))))
        rows.append([way, f"{loss_off:.0e}", f"{off_by:.0e}", str(num_pairs), f"{1e3 * max(gather(seconds)):.0f}"])
    title = f"Compiled dualpipev of two ranks on one device, {described(small)}"
    return [("experts-pairs", title, PAIRS_HEADER, rows, PAIRS_NOTES)]


def steps_of(args: argparse.Namespace, group: Any, way: str) -> tuple[list[float], list[Tensor], int, float]:
    """The losses of three steps, the gradients of the last, how many pairs had a graph, and its seconds."""
    chunks: list[Any] = []
    for stage in megapipe.stages_for_rank("dualpipev"):
        layers: nn.Module = make_layers(args, group, 1, seed=2 * stage.index + dist.get_rank())
        if way != "eager":
            capture(layers, (example(args).requires_grad_(),), compile="inductor" if way == "compiled" else None)
        chunks.append(megapipe.PipelineStage(layers, stage))
    losses: list[float] = []
    torch.manual_seed(7 + dist.get_rank())
    data = [example(args) for _ in range(4)]
    seconds = 0.0
    for _ in range(3):
        for chunk in chunks:
            chunk.zero_grad()
        synchronize(args)
        start = time.perf_counter()
        reports = megapipe.get_forward_backward_func("dualpipev")(
            forward_step_func=forward_step,
            data_iterator=[iter(data) for _ in chunks],
            model=chunks,
            num_microbatches=len(data),
            seq_length=args.tokens,
            micro_batch_size=1,
        )
        synchronize(args)
        seconds = time.perf_counter() - start
        losses.append(sum(float(report["loss"]) for report in reports))
    pairs = sum(len(graphs._multiplexed) for chunk in chunks for graphs in graphs_of(chunk))
    grads = [p.grad.clone() for chunk in chunks for p in chunk.parameters() if p.grad is not None]
    return losses, grads, pairs, seconds


def forward_step(data_iterator: Any, chunk: nn.Module) -> tuple[Any, Any]:
    return in_segments(chunk, next(data_iterator)), lambda output: mean_square(output)


def mean_square(output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    loss = output.float().square().mean()
    return loss, {"loss": loss.detach()}


def graphs_of(chunk: nn.Module) -> list[Any]:
    captured = [inner.__dict__.get("_megapipe_graphs") for inner in chunk.modules()]
    return [graphs for one in captured if one is not None for graphs in one._graphs.values()]


def main(arguments: list[str] | None = None) -> None:
    args = parse(arguments)
    if args.device == "cuda" and not torch.cuda.is_available():
        print("benchmarks.gpu_experts: skipped, since torch finds no CUDA device here (--device cpu, small sizes).")
        return
    start = time.monotonic()
    launch(1, measure, args, undisturbed=False)
    print(f"one stage took {time.monotonic() - start:.0f} s", flush=True)
    if time.monotonic() - start < 60 * args.minutes / 2:
        for table in launch(2, measure_pairs, args, undisturbed=False):
            save_table(*table, folder=args.folder)
    print(f"all took {time.monotonic() - start:.0f} s", flush=True)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """`full`: full backwards, too. Two ranks are tried where less than half of the minutes has been spent."""
    return options(
        arguments,
        device="cuda",
        dtype="bfloat16",
        hidden_size=2048,
        heads=16,
        experts=64,
        shared=2,
        expert_size=1408,
        topk=6,
        tokens=4096,
        layers=2,
        repeats=25,
        ways="eager,captured,compiled",
        full=False,
        minutes=3.5,
    )


if __name__ == "__main__":
    main()

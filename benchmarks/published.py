"""What `megapipe fit` predicts of published runs, beside what was published.

    python -m benchmarks.published

Each table has one number that is fitted: the share of the device's FLOP/s that stages reach, so that the errors' mean
is least; in that of models with experts, the share that the products of experts reach.
Bandwidths are those of the machines: NVLink and InfiniBand one way, per device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from statistics import fmean
from typing import NamedTuple

from megapipe.analysis.fit import Estimate, estimate
from megapipe.analysis.fit_job import Job, Layout
from megapipe.analysis.transformer import Latent, Transformer, decoder


class Run(NamedTuple):
    """A published run.

    Attributes:
        value: what was published, in `unit`.
        predicted: the same of an estimate.
    """

    name: str
    unit: str
    value: float
    job: Callable[[float], Job]
    layout: Layout
    predicted: Callable[[Estimate], float]


def a100(model: Transformer, batch: int, devices: int) -> Callable[[float], Job]:
    return lambda efficiency: Job(
        model, 2048, batch, devices, 80e9, 312e12, efficiency, node_bandwidth=300e9, bandwidth=25e9
    )


def schedule_of(pp: int, chunks: int) -> tuple[str, int]:
    return ("no_pipelining" if pp == 1 else "1f1b" if chunks == 1 else "interleaved_1f1b"), chunks


# Table 1 of https://arxiv.org/abs/2104.04473; microbatches and chunks are those of examples/sc21/run_table_1.sh in
# Megatron-LM. Layers are recomputed, and its FLOP/s count that.
MEGATRON = (
    # billions of weights, heads, hidden, layers, tp, pp, GPUs, batch, microbatch, chunks, TFLOP/s a GPU
    (1.7, 24, 2304, 24, 1, 1, 32, 512, 16, 1, 137),
    (3.6, 32, 3072, 30, 2, 1, 64, 512, 16, 1, 138),
    (7.5, 32, 4096, 36, 4, 1, 128, 512, 16, 1, 142),
    (18.4, 48, 6144, 40, 8, 1, 256, 1024, 8, 1, 135),
    (39.1, 64, 8192, 48, 8, 2, 512, 1536, 4, 1, 138),
    (76.1, 80, 10240, 60, 8, 4, 1024, 1792, 2, 3, 140),
    (145.6, 96, 12288, 80, 8, 8, 1536, 2304, 2, 2, 148),
    (310.1, 128, 16384, 96, 8, 16, 1920, 2160, 1, 2, 155),
    (529.6, 128, 20480, 105, 8, 35, 2520, 2520, 1, 3, 163),
    (1008.0, 160, 25600, 128, 8, 64, 3072, 3072, 1, 1, 163),
)

# Tables 3 and 5 of https://arxiv.org/abs/2205.05198: seconds with all layers recomputed, and with scores only.
RECOMPUTATION = (
    # name, heads, hidden, layers, pp, GPUs, batch, microbatch, chunks, seconds, seconds
    ("22B", 64, 6144, 48, 1, 8, 4, 4, 1, 1.42, 1.10),
    ("175B", 96, 12288, 96, 8, 64, 64, 1, 3, 18.13, 13.75),
    ("530B", 128, 20480, 105, 35, 280, 280, 1, 3, 49.05, 37.83),
    ("1T", 160, 25600, 128, 64, 512, 512, 1, 1, 94.42, 71.49),
)

# Table 4 of https://arxiv.org/abs/2407.21783. How many chunks a rank has is not published: 4 are assumed.
LLAMA = (
    # GPUs, cp, dp, sequence, sequences a replica, TFLOP/s a GPU
    (8192, 1, 64, 8192, 32, 430),
    (16384, 1, 128, 8192, 16, 400),
    (16384, 16, 8, 131072, 16, 380),
)

# docs/performance-summary.md of Megatron-Bridge, container 25.11: all runs in a pipeline whose sizes are given, without
# FSDP. Which of them recompute what is not published: everything is kept here.
DEVICES = {
    # bytes, FLOP/s in 16 and in 8 bits, devices of a node, bytes a second in it and outside
    "H100": (80e9, 989e12, 1979e12, 8, 450e9, 50e9),
    "B200": (180e9, 2250e12, 4500e12, 8, 900e9, 50e9),
    "GB200": (186e9, 2500e12, 5000e12, 72, 900e9, 50e9),
    "GB300": (288e9, 2500e12, 5000e12, 72, 900e9, 100e9),
}
LLAMA70 = decoder(80, 8192, 64, 128256, kv_heads=8, ffn=28672, gated=True)
LLAMA405 = decoder(126, 16384, 128, 128256, kv_heads=8, ffn=53248, gated=True)
QWEN = {"head_size": 128, "kv_heads": 4, "gated": True, "experts": 128, "experts_per_token": 8}
QWEN30 = decoder(48, 2048, 32, 151936, expert_ffn=768, **QWEN)
QWEN235 = decoder(94, 4096, 64, 151936, expert_ffn=1536, **QWEN)
OSS120 = decoder(36, 2880, 64, 201088, kv_heads=8, head_size=64, ffn=2880, gated=True, experts=128, experts_per_token=4)
DEEPSEEK = decoder(
    61,
    7168,
    128,
    129280,
    latent=Latent(1536, 512, 128, 64, 128),
    ffn=18432,
    gated=True,
    experts=256,
    experts_per_token=8,
    expert_ffn=2048,
    shared_ffn=2048,
    dense_layers=3,
)
DENSE_BRIDGE = (
    # name, model, GPUs, kind, bits, batch, microbatch, sequence, tp, pp, cp, chunks, ep, tokens a second and GPU
    ("Llama 3 70B", LLAMA70, 64, "H100", 8, 128, 1, 8192, 4, 8, 1, 5, 1, 1602),
    ("Llama 3.1 405B", LLAMA405, 1024, "H100", 8, 512, 1, 8192, 8, 8, 2, 8, 1, 292),
    ("Llama 3.1 405B", LLAMA405, 128, "B200", 8, 64, 1, 8192, 4, 8, 2, 8, 1, 661),
    ("Llama 3.1 405B", LLAMA405, 256, "GB200", 8, 1536, 1, 8192, 4, 16, 1, 4, 1, 813),
)
EXPERTS_BRIDGE = (
    ("GPT OSS 120B", OSS120, 64, "H100", 16, 512, 4, 4096, 1, 4, 1, 1, 8, 5630),
    ("Qwen3 30B", QWEN30, 16, "H100", 8, 512, 2, 4096, 1, 2, 1, 24, 8, 5275),
    ("Qwen3 235B", QWEN235, 64, "B200", 8, 1024, 1, 4096, 1, 8, 1, 2, 8, 3269),
    ("Qwen3 235B", QWEN235, 256, "GB200", 16, 8192, 1, 4096, 1, 8, 1, 3, 32, 4916),
    ("Qwen3 235B", QWEN235, 256, "GB300", 16, 8192, 2, 4096, 1, 4, 1, 12, 16, 6131),
    ("DeepSeek-V3", DEEPSEEK, 256, "B200", 8, 2048, 1, 4096, 1, 16, 1, 1, 8, 2139),
    ("DeepSeek-V3", DEEPSEEK, 256, "GB200", 16, 4096, 1, 4096, 1, 4, 1, 4, 64, 3139),
    ("DeepSeek-V3", DEEPSEEK, 256, "GB200", 8, 4096, 1, 4096, 1, 8, 1, 4, 32, 4018),
    ("DeepSeek-V3", DEEPSEEK, 256, "GB300", 16, 4096, 1, 4096, 1, 2, 1, 4, 32, 3848),
    ("DeepSeek-V3", DEEPSEEK, 256, "GB300", 8, 4096, 1, 4096, 1, 2, 1, 4, 32, 4357),
)
DENSE_SHARE = 0.55
"""What the table of dense models is fitted with: in that of experts, the share of all but experts."""


def megatron() -> Iterable[Run]:
    for billions, heads, hidden, layers, tp, pp, devices, batch, microbatch, chunks, value in MEGATRON:
        model = decoder(layers, hidden, heads, 51200, tied=True, dropout=True)
        again = model.whole.operations(2048)
        counted = 1 + again / model.operations(2048)
        layout = Layout(pp, devices // tp // pp, tp, 1, 1, *schedule_of(pp, chunks), microbatch, "checkpointed")
        yield Run(
            f"{billions:g}B, {devices} A100",
            "TFLOP/s",
            value,
            a100(model, batch, devices),
            layout,
            lambda found, counted=counted: counted * found.tflops,  # type: ignore[misc]
        )


def recomputation() -> Iterable[Run]:
    for name, heads, hidden, layers, pp, devices, batch, microbatch, chunks, *seconds in RECOMPUTATION:
        model = decoder(layers, hidden, heads, 51200, tied=True, dropout=True)
        for activations, value in zip(("checkpointed", "kept"), seconds):
            layout = Layout(pp, 1, 8, 1, 1, *schedule_of(pp, chunks), microbatch, activations)
            what = f"{name}, {devices} A100, {'scores' if activations == 'kept' else 'all'} recomputed"
            yield Run(what, "s", value, a100(model, batch, devices), layout, lambda found: found.step)


def llama() -> Iterable[Run]:
    model = decoder(126, 16384, 128, 128256, kv_heads=8, ffn=53248, gated=True)
    for devices, cp, dp, sequence, batch, value in LLAMA:
        layout = Layout(16, dp, 8, cp, 1, "interleaved_1f1b", 4, 1, "kept")

        def job(efficiency: float, sequence: int = sequence, batch: int = dp * batch, devices: int = devices) -> Job:
            return Job(model, sequence, batch, devices, 80e9, 989e12, efficiency, node_bandwidth=450e9, bandwidth=50e9)

        yield Run(f"405B, {devices} H100, {sequence} tokens", "TFLOP/s", value, job, layout, lambda found: found.tflops)


def bridge(rows: Iterable[tuple], shares: Callable[[float], dict[str, float]]) -> Iterable[Run]:  # type: ignore[type-arg]
    """Runs of Megatron-Bridge.

    Args:
        shares: those of the FLOP/s in a job, by the number that is fitted.
    """
    for name, model, number, kind, bits, batch, microbatch, sequence, tp, pp, cp, chunks, ep, value in rows:
        memory, flops, fp8_flops, node, node_bandwidth, bandwidth = DEVICES[kind]
        job = Job(model, sequence, batch, number, memory, flops, 1.0, node, node_bandwidth, bandwidth)
        job = replace(job, fp8_flops=fp8_flops * (bits == 8))
        layout = Layout(pp, number // tp // pp // cp, tp, cp, ep, *schedule_of(pp, chunks), microbatch, "kept")
        yield Run(
            f"{name}, {number} {kind}, {bits} bits",
            "tokens/s",
            value,
            lambda share, job=job: replace(job, **shares(share)),  # type: ignore[misc]
            layout,
            lambda found, job=job: job.batch * job.sequence / found.step / job.devices,  # type: ignore[misc]
        )


def dense_bridge() -> Iterable[Run]:
    return bridge(DENSE_BRIDGE, lambda share: {"efficiency": share})


def experts_bridge() -> Iterable[Run]:
    return bridge(EXPERTS_BRIDGE, lambda share: {"efficiency": DENSE_SHARE, "expert_efficiency": share})


TABLES = {
    "Megatron-LM": megatron,
    "Recomputation": recomputation,
    "Llama 3": llama,
    "Megatron-Bridge, dense": dense_bridge,
    "Megatron-Bridge, experts": experts_bridge,
}


def predict(runs: Iterable[Run]) -> tuple[float, list[tuple[Run, float, Estimate]]]:
    """The share of the FLOP/s that is fitted, and each run with its prediction."""
    runs = list(runs)

    def at(efficiency: float) -> list[tuple[Run, float, Estimate]]:
        found = [estimate(run.job(efficiency), run.layout) for run in runs]
        return [(run, run.predicted(one), one) for run, one in zip(runs, found)]

    def error(efficiency: float) -> float:
        return fmean(abs(number / run.value - 1) for run, number, _ in at(efficiency))

    best = min((percent / 100 for percent in range(10, 80)), key=error)
    return best, at(best)


def main() -> None:
    print("| run | published | predicted | error | bytes |\n|---|---|---|---|---|")
    for name, runs in TABLES.items():
        efficiency, rows = predict(runs())
        print(f"| **{name}**, {efficiency:.0%} of the FLOP/s | | | | |")
        for run, number, found in rows:
            rounded = float(f"{number:.3g}")
            figures = f"{run.value:g} {run.unit} | {rounded:g} {run.unit} | {number / run.value - 1:+.1%}"
            memory = run.job(efficiency).least(run.job(efficiency).memory, 0, 1)
            print(f"| {run.name} | {figures} | {found.peak / 1e9:.0f} of {memory / 1e9:.0f} GB |")


if __name__ == "__main__":
    main()

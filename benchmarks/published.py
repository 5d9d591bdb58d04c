"""What `megapipe fit` predicts of published runs, beside what was published.

    python -m benchmarks.published

Each table has one number that is fitted: the share of the device's FLOP/s that stages reach, so that the errors' mean
is least.
Bandwidths are those of the machines: NVLink and InfiniBand one way, per device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from statistics import fmean
from typing import NamedTuple

from megapipe.analysis.fit import Estimate, estimate
from megapipe.analysis.job import Job, Layout
from megapipe.analysis.transformer import Transformer, decoder


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


TABLES = {"Megatron-LM": megatron, "Recomputation": recomputation, "Llama 3": llama}


def predict(runs: Iterable[Run]) -> tuple[float, list[tuple[Run, float, Estimate]]]:
    """The share of the FLOP/s that is fitted, and each run with its prediction."""
    runs = list(runs)

    def at(efficiency: float) -> list[tuple[Run, float, Estimate]]:
        found = [estimate(run.job(efficiency), run.layout) for run in runs]
        return [(run, run.predicted(one), one) for run, one in zip(runs, found)]

    def error(efficiency: float) -> float:
        return fmean(abs(number / run.value - 1) for run, number, _ in at(efficiency))

    best = min((percent / 100 for percent in range(40, 80)), key=error)
    return best, at(best)


def main() -> None:
    print("| run | published | predicted | error | bytes, of 80 GB |\n|---|---|---|---|---|")
    for name, runs in TABLES.items():
        efficiency, rows = predict(runs())
        print(f"| **{name}**, {efficiency:.0%} of the FLOP/s | | | | |")
        for run, number, found in rows:
            figures = f"{run.value:g} {run.unit} | {number:.3g} {run.unit} | {number / run.value - 1:+.1%}"
            print(f"| {run.name} | {figures} | {found.peak / 1e9:.0f} GB |")


if __name__ == "__main__":
    main()

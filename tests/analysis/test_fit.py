"""What fits, and how long it takes: formulas against papers, published runs, and the command."""

import itertools
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.published import TABLES
from megapipe.analysis.cli import main
from megapipe.analysis.fit import _sizes, _times, estimate, fit, stage_bytes
from megapipe.analysis.fit_job import Job, Layout
from megapipe.analysis.transformer import Transformer, decoder
from megapipe.plan import Costs, Settings, make_plan, simulate

PAGE = (Path(__file__).parents[2] / "docs" / "fit.md").read_text()

GPT3 = decoder(96, 12288, 96, 51200, tied=True, dropout=True)
LLAMA = {"num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8}
LLAMA |= {"intermediate_size": 14336, "vocab_size": 128256, "tie_word_embeddings": False}
SMALL = decoder(16, 1024, 16, 32000, gated=True)


def _of(layers: int, hidden: int, heads: int, vocabulary: int, **more: Any) -> dict[str, Any]:
    sizes = {"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads}
    return {**sizes, "vocab_size": vocabulary, **more}


def job_of(model: Transformer, devices: int, memory: float = 80e9, **more: Any) -> Job:
    return Job(model, 2048, 64, devices, memory, 312e12, 0.5, node_bandwidth=300e9, bandwidth=25e9, **more)


# Formulas


def test_formulas_of_the_paper() -> None:
    """2205.05198, equations 2 and 7: 34 bytes for each token and hidden unit of a layer without scores of attention,
    and the operations of a model."""
    s, h, layers, v = 2048, 12288, 96, 51200
    assert GPT3.layers[0].saved == 34 * h
    assert GPT3.operations(s) == pytest.approx(
        72 * layers * h * h * (1 + s / (6 * h) + v / (12 * h * layers)), rel=1e-4
    )


@pytest.mark.parametrize("chunks", [1, 3])
def test_the_first_rank_holds_what_the_paper_says(chunks: int) -> None:
    """Section 4.2.3: the layers of the whole model under 1F1B, and 1 + (p - 1) / (p v) of that with v chunks."""
    job = job_of(GPT3, 64)
    layout = Layout(8, 1, 8, 1, 1, "1f1b" if chunks == 1 else "interleaved_1f1b", chunks, 1, "kept")
    sizes = [96 // (8 * chunks)] * 8 * chunks
    plan = make_plan(layout.schedule, 8, 64, chunks)
    held = simulate(plan, Costs(memory=stage_bytes(job, layout, sizes))).memory
    assert held is not None
    assert held[0].after.max() - 2 * 2 * 12288 * 2048 / 8 <= 34 * 2048 * 12288 * 96 / 8 * (1 + (chunks > 1) * 7 / 24)
    assert held[0].after.max() >= 34 * 2048 * 12288 * 96 / 8 * (1 + (chunks > 1) * 7 / 24)


def test_a_long_step_is_played_in_part() -> None:
    """What is added for microbatches behind the first 4 of each rank is what a whole plan has. Of uneven Fs, Bs and Ws,
    or with messages that take time, that is more than the slowest rank works: v_min took a fifth more than that."""
    names = (("1f1b", 1), ("interleaved_zb1p", 4), ("zbv", 2), ("v_min", 2))
    for (name, chunks), bandwidth in itertools.product(names, (300e9, 10e9)):
        job = replace(job_of(SMALL, 4), node_bandwidth=bandwidth)
        layout = Layout(4, 1, 1, 1, 1, name, chunks, 1, "kept")
        short = estimate(job, layout)
        sizes = _sizes(job, layout)
        times = _times(job, layout, sizes)
        message = SMALL.boundary() * 2048 / job.node_bandwidth
        whole = simulate(make_plan(name, 4, 64, chunks), Costs(*map(list, list(zip(*times))[:3]), p2p=message))
        assert short.step == pytest.approx(whole.makespan, rel=0.01)


# What fits


def test_what_is_found_fits_and_is_sorted() -> None:
    found, smallest = fit(job_of(SMALL, 8, memory=8e9), top=5)
    assert smallest is None
    assert len(found) == 5
    assert [one.step for one in found] == sorted(one.step for one in found)
    for one in found:
        layout = one.layout
        assert layout.pp * layout.dp * layout.tp == 8
        assert one.peak <= 7.2e9
        assert sum(one.shares.values()) == pytest.approx(1, abs=1e-6)
    unsplit, _ = fit(job_of(SMALL, 8, memory=8e9), top=5, may_split=False)
    assert {one.layout.schedule for one in unsplit} <= {"1f1b", "interleaved_1f1b", "no_pipelining"}
    assert unsplit[0].step >= found[0].step


def test_experts_are_shared_out() -> None:
    model = decoder(8, 1024, 16, 32000, gated=True, ffn=4096, experts=8, experts_per_token=2)
    found, _ = fit(job_of(model, 8, memory=12e9), top=20)
    assert {one.layout.ep for one in found} - {1}
    dense, shared = (estimate(job_of(model, 8), Layout(1, 8, 1, 1, ep, "no_pipelining", 1, 1, "kept")) for ep in (1, 8))
    assert dense.peak - shared.peak == pytest.approx(7 / 8 * model.whole.experts * 6, rel=0.01)


def test_what_holds_less_and_what_takes_longer() -> None:
    job = job_of(GPT3, 64)
    job = replace(job, host_bandwidth=100e9)
    ways = ("kept", "checkpointed", "recomputed", "offloaded")
    for batch in (8, 64):  # the latter is played in part
        kept, again, r, moved = (
            estimate(replace(job, batch=batch), Layout(8, 1, 8, 1, 1, "1f1b", 1, 1, way)) for way in ways
        )
        assert max(again.peak, r.peak, moved.peak) < kept.peak
        assert 1.2 < again.step / kept.step < 1.4
        assert kept.step < r.step < again.step
        assert moved.step == pytest.approx(kept.step)
        for one in (kept, again, r, moved):
            assert sum(one.shares.values()) == pytest.approx(1)
    plan = make_plan("1f1b", 8, 64, settings=Settings(recompute=True))
    sizes = _sizes(job, r.layout)
    times = _times(job, r.layout, sizes)
    whole = simulate(plan, Costs(*map(list, list(zip(*times))[:3]), p2p=GPT3.boundary() * 2048 / 8 / job.bandwidth))
    assert r.step == pytest.approx(whole.makespan, rel=0.01)


def test_unequal_devices_get_unequal_layers() -> None:
    """`--memory 24GB,24GB,12GB,8GB` was "no size in bytes"."""
    model, layout = decoder(12, 1024, 16, 32000, gated=True), Layout(4, 1, 1, 1, 1, "1f1b", 1, 1, "kept")
    job = Job(model, 2048, 8, 4, [24e9, 24e9, 12e9, 8e9], 100e12, 0.5, speeds=[1, 1, 0.5, 0.5])
    little = [3.5e9, 24e9, 24e9, 24e9]
    for change, sizes in (
        ({}, [5, 5, 2, 0]),
        ({"speeds": [0.5], "memory": 24e9}, [4, 4, 3, 1]),
        ({"speeds": [0.5, 0.5, 1, 1]}, [2, 2, 5, 3]),
        ({"memory": little}, [3, 6, 2, 1]),
        ({"memory": little, "speeds": [1]}, [3, 4, 3, 2]),
    ):
        changed = replace(job, **change)
        one = estimate(changed, layout)
        assert [*one.sizes] == sizes
        assert all(peak <= room for (peak, _), room in zip(one.ranks, changed.rooms(4)))
    assert estimate(job, layout).step < estimate(replace(job, speeds=[0.5]), layout).step
    found, _ = fit(replace(job, model=decoder(4, 1024, 16, 32000, gated=True), batch=4), top=20, may_split=False)
    assert {one.layout.pp for one in found} == {1, 2, 4}
    # Stages without layers, whose copies take no time.
    job = replace(job, model=decoder(8, 1024, 16, 32000, gated=True), batch=16, memory=24e9, speeds=[1, 0.6, 1, 0.8])
    layout = Layout(4, 1, 1, 1, 1, "interleaved_1f1b", 2, 1, "offloaded")
    assert estimate(replace(job, host_bandwidth=1e9), layout).step > 0


def test_a_layout_of_ones_own() -> None:
    """No size of a layout could be given, so a published run could not be asked for."""
    own = {"pp": 4, "tp": 2, "chunks": 3, "microbatch": 32}
    found, _ = fit(job_of(SMALL, 8), top=20, own=own)
    assert found
    for one in found:
        assert {name: getattr(one.layout, name) for name in own} == own
        assert one.layout.schedule in ("interleaved_1f1b", "interleaved_zb1p")
    assert {one.layout.chunks for one in fit(job_of(SMALL, 8), own={"pp": 4, "chunks": 1})[0]} == {1}
    for wrong in ({"tp": 3}, {"pp": 3}, {"microbatch": 128}, {"pp": 8, "chunks": 3}):
        with pytest.raises(ValueError, match=f"8 devices and 64 .* shared out .*{next(iter(wrong))}"):
            fit(job_of(SMALL, 8), own=wrong)


def test_products_of_experts_and_in_8_bits_have_speeds_of_their_own() -> None:
    model = decoder(4, 1024, 16, 32000, gated=True, experts=8, experts_per_token=2)
    layout = Layout(1, 1, 1, 1, 1, "no_pipelining", 1, 1, "kept")
    job = job_of(model, 1)

    def work(**change: float) -> float:
        return estimate(replace(job, **change), layout).step * job.flops / job.batch / job.sequence  # type: ignore[arg-type]

    dense, routed = 6 * model.whole.products, 6 * model.whole.routed
    assert work(expert_efficiency=0.25) - work() == pytest.approx(routed / 0.5)
    assert work() - work(fp8_flops=2 * job.flops) == pytest.approx(dense / 2 / 0.5)
    one = estimate(replace(job, expert_efficiency=0.25), layout)
    assert one.shares["work"] == pytest.approx(1)


def test_uneven_layers_are_on_their_stages() -> None:
    """All layers were taken to be alike. Of DeepSeek-V3 the first three have no experts, and few weights."""
    model = decoder(8, 1024, 16, 1000, gated=True, experts=8, experts_per_token=2, dense_layers=4)
    layout = Layout(2, 1, 1, 1, 1, "1f1b", 1, 1, "kept")
    first, last = (parts["model"] for _, parts in estimate(job_of(model, 2), layout).ranks)
    dense, sparse = (4 * (layer.weights + layer.experts) for layer in (model.layers[0], model.layers[-1]))
    assert last - first == pytest.approx(18 * (sparse - dense))


# Published runs


def rows_of_page() -> dict[str, tuple[float, float]]:
    """By run, the share of the FLOP/s that its table was fitted with, and the error."""
    rows, efficiency = {}, 0.0
    for line in PAGE.splitlines():
        if found := re.match(r"\| \*\*.*\*\*, (\d+)% of the FLOP/s", line):
            efficiency = int(found[1]) / 100
        elif found := re.match(r"\| (.*?) \| .* \| .* \| ([+-][\d.]+)% \|", line):
            rows[found[1]] = (efficiency, float(found[2]) / 100)
    return rows


@pytest.mark.parametrize("number", [1, pytest.param(None, marks=pytest.mark.soak)])
def test_the_page_has_the_errors_of_published_runs(number: int | None) -> None:
    """The first run of each table, or all."""
    rows, of_tables = rows_of_page(), {table: [*runs()] for table, runs in TABLES.items()}
    assert [*rows] == [run.name for runs in of_tables.values() for run in runs]
    for table, run in ((table, run) for table, runs in of_tables.items() for run in runs[:number]):
        efficiency, error = rows[run.name]
        predicted = run.predicted(estimate(run.job(efficiency), run.layout))
        assert predicted / run.value - 1 == pytest.approx(error, abs=0.0006), run.name
        assert abs(error) < (1.25 if table == "Megatron-Bridge, experts" else 0.26)


# The command


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (path := tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "list.json").write_text("[]")
    job = {"devices": 8, "memory": "80GB", "sequence": 4096, "batch": 64, "flops": 312e12, "efficiency": 0.5, "top": 3}
    arguments = [f"--{name}={value}" for name, value in job.items()]
    assert main(["fit", str(path), *arguments]) == 0
    out = capsys.readouterr().out
    assert out.startswith("model: 8.03 billion weights; 262,144 tokens a step on 8 devices, 90% of")
    given = [f"{name}={json.dumps(value)}" for name, value in LLAMA.items()]
    assert main(["fit", *given, *arguments]) == 0
    assert capsys.readouterr().out == out
    own = {"pp": 2, "tp": 2, "vp": 4, "ep": 1, "microbatch": 2, "fp8-flops": 624e12, "expert-efficiency": 0.3}
    assert main(["fit", *given, *arguments, *(f"--{name}={value}" for name, value in own.items())]) == 0
    rows = re.findall(r"^ +(\d+) +(\d+) +(\d+) +(\d+) +interleaved_\w+ x(\d) ", capsys.readouterr().out, re.MULTILINE)
    assert rows == [("2", "2", "2", "1", "4")] * 2
    experts = ["num_local_experts=8", "num_experts_per_tok=2"]
    assert main(["fit", *given, *experts, *arguments, "--memory=640GB", "--pp=8"]) == 0
    assert capsys.readouterr().out.startswith("model: 47.5 billion weights, 13.7 of them for a token; 262,144 tokens")
    for wrong, message in (
        ([], "nothing is no config.json with num_hidden_layers"),
        (["hidden_size=x"], "numbers of a model are written as NAME=NUMBER"),
        ([__file__], "is no JSON that can be read"),
        ([str(tmp_path / "list.json")], "is no config.json of Hugging Face"),
        ([str(path), "--memory", "8GB", "--pp", "4"], "nothing fits: the smallest way found holds "),
        ([str(path), "--memory", "8GB,80GB"], "memory is one number, or one for each of 8 devices"),
        ([str(path), "--efficiency", "2"], "efficiency is a share, more than 0 and at most 1, got 2"),
        ([str(path), "--cp", "3"], "8 devices and 64 sequences a step cannot be shared out"),
        ([str(path), "--flops", "inf"], "flops must be finite, got inf"),
        ([str(path), "--fp8-flops", "nan"], "fp8_flops must be finite, got nan"),
        ([str(path), "--expert-efficiency", "-1"], "expert_efficiency is a share, more than 0 and at most 1, got -1"),
        ([str(path), "--tp", "3"], "8 devices and 64 sequences a step cannot be shared out (cp 1, tp 3)"),
        ([str(path), "--speeds", ",".join(["1"] * 7 + ["nan"])], "speeds is one number, or one for each of 8 devices"),
        ([*given, "hiden_size=8"], "'hiden_size' is no number of a model: do you mean hidden_size?"),
        ([*given, "num_key_value_heads=-1"], "num_key_value_heads is a whole number, got -1"),
        ([*given, "num_local_experts=8"], "has 8 experts, but not num_experts_per_tok: give both"),
        ([*given, 'hidden_size="x"'], "hidden_size is a whole number, got 'x'"),
    ):
        assert main(["fit", *arguments, *wrong]) == 2
        assert message in capsys.readouterr().err

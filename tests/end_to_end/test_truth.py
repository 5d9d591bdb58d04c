"""Statements of the pages that have been false: each is compared with what it is about."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from cases.rows import ROWS

import megapipe
from megapipe.analysis.bubble import BubbleSplit
from megapipe.plan import find_schedule

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "examples/README.md", *sorted(DOCS.rglob("*.md"))]


def test_what_pip_installs_is_there() -> None:
    """`pip install megapipe[bench]` named a distribution that no index has."""
    extras = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    for page in PAGES:
        assert not re.search(r"pip install (?!-)\S*megapipe", page.read_text()), page
        for named in re.findall(r"pip install -e '\.\[([\w,]+)\]'", page.read_text()):
            assert all(re.search(rf"^{extra} = ", extras, re.MULTILINE) for extra in named.split(",")), page


def test_captured_stages_name_the_versions_of_the_readme() -> None:
    """The page of captured stages had two versions less than the README."""
    run_on = re.search(
        r"torch ([\d., and]+\d)", (ROOT / "README.md").read_text().partition("**What it was run on:**")[2]
    )
    assert run_on is not None
    assert f"It was tested on {run_on[1]}." in " ".join((DOCS / "backward.md").read_text().split())


def test_the_example_prints_all_causes_of_the_bubble() -> None:
    """The line on the page had four causes, and the example prints five."""
    (line,) = re.findall(r"^bubble ([\d.]+%) = (.+)$", (ROOT / "examples/README.md").read_text(), re.MULTILINE)
    causes = BubbleSplit(1.0, *([[0.1]] * (len(dataclasses.fields(BubbleSplit)) - 1)))
    assert re.findall(r"% ([^+]+?)(?: \+|$)", line[1]) == list(causes.shares)
    assert sum(map(float, re.findall(r"([\d.]+)%", line[1]))) == pytest.approx(float(line[0][:-1]), abs=0.3)


SHOWN = {
    "GPipe, 1F1B": "gpipe 1f1b",
    "interleaved 1F1B, breadth-first": "interleaved_1f1b looped_bfs",
    "zero bubble on one chunk or several (ZB-H1, ZB-H2)": "zb1p zb2p interleaved_zb1p",
    "ZB-V": "zbv",
    "V-Half, V-Min": "v_half v_min",
    "DualPipeV": "dualpipev",
    "overlap of forward and backward of two microbatches in one chunk": "dualpipev combined_1f1b combined_zb1p",
    "Seq1F1B (slices of sequences)": "seq1f1b seq_interleaved_1f1b seq_zb1p",
    "number of microbatches": "tests/plan/test_schedules.py "
    "tests/runtime/test_between_steps.py::test_any_number_of_microbatches",
    "split backward with `torch.compile`": "tests/graph/test_graph_capture.py::test_inductor_of_a_split_backward",
    "split backward with activation checkpointing": "Forms Recompute",
    "a schedule from a file": "Planned tests/runtime/test_planned.py::test_plans_that_torch_wrote",
    "a schedule of your own": "docs/tutorials/own_schedule.md",
    "check of a schedule for hangs, before a run": "docs/tutorials/own_schedule.md",
    "simulate and draw without a run": "tests/analysis/test_cli.py::test_pictures",
    "measured timeline, bubble by cause, prediction of other schedules": "docs/bubble.md",
    "one rank fails: what the others say": "Failure docs/errors.md",
    "messages between stages": "Message Companions Number",
    "checkpoint loads under another schedule and pipeline size": "tests/checkpoint/test_checkpoint.py",
    "optimizer step without a barrier (post-validation)": "Optimizer docs/optimizers.md",
    "tests against the unpartitioned model": "tests/cases/test_rows.py::test_equal_to_the_unpartitioned_model",
    "cut an unchanged model by tracing": "docs/split.md tests/integrations/test_split.py",
    "ZeRO-2, ZeRO-3, FSDP with pipelines": "Replicas docs/data_parallelism.md",
    "tensor parallelism": "tests/integrations/test_tensor_parallel.py::test_the_script_trains",
    "activation offloading by schedule": "Offload docs/howto/memory.md",
    "Hugging Face models, unchanged": "docs/huggingface.md tests/integrations/test_transformers.py",
    "LoRA, on quantised weights too; towers of images": "tests/integrations/test_towers_of_transformers.py "
    "tests/integrations/models_of_transformers.py::test_adapters_are_trained_and_only_they_are_saved",
    "behind transformers' Trainer, trl, Lightning": "tests/integrations/test_trainer_page.py "
    "tests/integrations/test_lightning.py",
    "prove that a schedule or a trainer is right": "tests/proving/test_prove_schedules.py "
    "tests/proving/test_mistakes.py",
    "post-training": "tests/integrations/test_post_training.py tests/integrations/test_heads_of_transformers.py",
    "**measured on GPUs**": "tests/gpu/test_gpu.py",
}
"""What runs each feature of the comparison: a schedule or a feature of the rows in tests/cases, a page, or a test."""


def test_the_comparison_has_what_megapipe_can() -> None:
    """It said that plans from files are not run, that no model is cut, and that one schedule alone overlaps pairs."""
    table = re.findall(r"^\|([^|]+)\|([^|]+)\|", (DOCS / "comparison.md").read_text(), re.MULTILINE)
    ours = {name.strip(): cell.strip() for name, cell in table[2:]}
    absent = ("no", "**no**", "the model's business")
    assert SHOWN.keys() == {name for name, cell in ours.items() if not cell.startswith(absent)}
    run = {row.schedule for row in ROWS} | {type(feature).__name__ for row in ROWS for feature in row.features}
    for what in " ".join(SHOWN.values()).split():
        path, _, test = what.partition("::")
        text = "" if what in run else (ROOT / path).read_text()
        assert what in run or ("```python" if path.endswith(".md") else f"def {test or 'test_'}") in text, what
    pairs = {
        name
        for name in megapipe.schedule_names()
        if megapipe.plan.make_plan(name, 1 if find_schedule(name).max_pp_size else 4, 8).program.pairs[0]
    }
    overlapped = ours["overlap of forward and backward of two microbatches in one chunk"]
    assert set(re.findall(r"`(\w+)`", overlapped)) == pairs


def test_the_benchmarks_in_short_are_those_of_the_tables() -> None:
    """The prose beside a table gave the memory of an earlier run."""
    names = {
        "1F1B": "1f1b, 1F1B, 1f1b",
        "interleaved 1F1B": "interleaved_1f1b, Interleaved1F1B, interleaved",
        "interleaved zero bubble": "interleaved_zb1p, InterleavedZeroBubble",
        "ZB-V": "zbv, ZBVZeroBubble",
        "DualPipeV": "dualpipev, DualPipeV",
    }
    tables = re.findall(
        r"^\| (\d) ranks, m = (\d+) .*\n\|.*\n((?:\|.+\n)+)", (DOCS / "benchmarks.md").read_text(), re.MULTILINE
    )
    assert len(tables) == 2
    for pp, m, rows in tables:
        lines = (ROOT / f"benchmarks/results/schedules-pp{pp}-m{m}-64k.md").read_text().splitlines()
        measured = {cells[1].strip(): cells for cells in (line.split("|") for line in lines) if len(cells) == 9}
        for name, plan, *steps in ([cell.strip() for cell in row.split("|")[1:-1]] for row in rows.splitlines()):
            for library, schedule, step in zip(("megapipe", "torch", "megatron-core"), names[name].split(", "), steps):
                _, _, ideal, *_, of_plan, _, _ = measured[f"{library} {schedule}"]
                assert ideal.split()[0] == step
                assert of_plan.strip() == plan or library != "megapipe"

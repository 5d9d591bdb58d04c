"""Writes docs/schedules.md, its pictures, docs/index.md (from the README), the settings in docs/reference/config.md and
the table in docs/limits.md.

python docs/generate.py [FOLDER]
"""

from __future__ import annotations

import inspect
import re
import sys
from dataclasses import fields
from pathlib import Path
from typing import NamedTuple

import megapipe
from megapipe.analysis import save_picture
from megapipe.config import StepConfig
from megapipe.plan import Plan, find_schedule, make_plan, v_shape
from megapipe.runtime.combinations import REFUSED, TRAITS

PP_SIZE, NUM_MICROBATCHES, NUM_SLICES = 4, 8, 2
EXCHANGE = 0.19

SOURCES = {
    "https://arxiv.org/abs/1811.06965": "GPipe",
    "https://arxiv.org/abs/2104.04473": "Megatron-LM",
    "https://arxiv.org/abs/2211.05953": "Breadth-first",
    "https://arxiv.org/abs/2406.03488": "Seq1F1B",
    "https://arxiv.org/abs/2401.10241": "Zero bubble",
    "https://arxiv.org/abs/2405.15362": "Controllable memory",
    "https://github.com/NVIDIA/Megatron-LM": "Megatron-LM",
    "https://github.com/deepseek-ai/DualPipe": "DualPipe",
}


class Note(NamedTuple):
    """When to use a schedule, and what it costs.

    p ranks, m microbatches, v chunks per rank, n slices per sequence, r the rank, N the size of the first group. A test
    compares the formulas with the plans."""

    when: str
    bubble: str
    in_flight: str
    least: str = "p"
    """The number of microbatches from which on both formulas hold."""


NOTES = {
    "no_pipelining": Note("The model fits on one device.", "no bubble", "1", "1"),
    "inference": Note(
        "Forward only, of a model laid out for loop placement.",
        "(p - 1) / (v m + p - 1) for multiples of p, more for others",
        "none",
    ),
    "gpipe": Note("To compare with. Memory grows with the number of microbatches.", "(p - 1) / (m + p - 1)", "m", "1"),
    "1f1b": Note(
        "The plain choice: GPipe's time at a memory that does not grow with the number of microbatches.",
        "(p - 1) / (m + p - 1)",
        "min(m, p - r)",
        "1",
    ),
    "seq1f1b": Note(
        "Long sequences of a model whose layers hand their state from slice to slice: both the bubble and the memory "
        "of 1F1B fall with the number of slices. Messages are n times as many, and n times smaller.",
        "(p - 1) / (n m + p - 1)",
        "(p - r + n - 1) / n, at most m",
    ),
    "seq_interleaved_1f1b": Note(
        "The same on several chunks, for a bubble v times smaller still and some more memory. N is counted in slices.",
        "(p - 1) / (v n m + p - 1)",
        "(2 (p - r - 1) + (v - 1) N + n) / (v n), at most m",
    ),
    "looped_bfs": Note(
        "Many chunks and few microbatches, and memory to spare: each message has the longest time to arrive.",
        "(p - 1) / (v m + p - 1)",
        "m",
    ),
    "interleaved_1f1b": Note(
        "1F1B with a bubble v times smaller, for v times as many messages and some more memory.",
        "(p - 1) / (v m + p - 1)",
        "(2 (p - r - 1) + (v - 1) N + 1) / v, at most m",
    ),
    "zb1p": Note(
        "1F1B's memory and a third of its bubble: the first choice where a split backward is to be had.",
        "(p - 1) / (3 m + p - 1)",
        "min(m, p)",
    ),
    "seq_zb1p": Note(
        "Long sequences where a split backward is to be had: seq1f1b's memory and a third of its bubble.",
        "(p - 1) / (3 n m + p - 1)",
        "(p + n - 1) / n, at most m",
    ),
    "zb2p": Note(
        "Steps that follow each other without a barrier, and memory to spare: a rank waits for nothing between its "
        "first and its last action once m >= 2 p - 1. With `max_in_flight` between p and 2 p - 1 it fills what that "
        "allows.",
        "(p - 1) / (3 m + p - 1), 0 within a rank's span",
        "min(2 p - 1, m)",
    ),
    "interleaved_zb1p": Note(
        "Interleaved 1F1B with a bubble three times smaller, at its memory. `max_in_flight` makes its groups larger, "
        "which hides slow messages. From p on it takes them down: with p in flight and four chunks it is faster than "
        "zbv.",
        "(p - 1) / (3 v m + p - 1)",
        "(2 (p - 1) + (v - 1) N + 1) / v on the first, at most m",
    ),
    "zbv": Note(
        "1F1B's memory, and no bubble within a rank's span once m >= 2 p - 1. Input and loss share a rank: with "
        "`distribute_layers` give the stages at the ends fewer layers.",
        "(p - 1) / (6 m + p - 1), 0 within a rank's span",
        "p",
        "2 p - 1",
    ),
    "v_half": Note(
        "About half of 1F1B's memory on many ranks (3 microbatches of 4, 5 of 8, 9 of 16), for little more than half "
        "of its bubble.",
        "about (p - 1) / (1.75 m + p - 1)",
        "at most (p + 2) // 2",
    ),
    "v_min": Note(
        "About a third of 1F1B's memory on many ranks (2 microbatches of 4, 4 of 8, 6 of 16), for two thirds of its "
        "bubble.",
        "about (p - 1) / (1.5 m + p - 1)",
        "at most (p + 4) // 3",
    ),
    "combined_1f1b": Note(
        "The same layers, in stages that lie one behind the other, and on one rank: the pairs of `dualpipev` in an "
        "interleaved order. With four chunks its step is the shortest, for a microbatch in four more than `dualpipev` "
        "holds.",
        "(p - 1) / (v m + p - 1), less where F and B overlap",
        "(2 (p - r - 1) + (v - 1) N + 2) / v, at most m",
    ),
    "combined_zb1p": Note(
        "The same where a split backward is to be had.",
        "(p - 1) / (3 v m + p - 1), less where F and B overlap",
        "(2 (p - 1) + (v - 1) N + 2) / v on the first, at most m",
        "p + 1",
    ),
    "dualpipev": Note(
        "Layers that communicate for long, as mixtures of experts do: forward and backward run in pairs (`F1B0`), each "
        "while the other's messages are under way, where `forward_step_func` returns `in_segments(model, x)`. Where "
        "they run one after the other, zbv is as fast and holds less.",
        "(p - 1) / (6 m + p - 1), less where F and B overlap",
        "p + 1/2",
        "2 p",
    ),
}

HEAD = f"""# Schedules

<!-- Made by `make docs` from the schedules themselves; a test keeps this page up to date. -->

All schedules with their pictures. [Which schedule](choosing.md) helps to choose one; `megapipe show zbv --pp 8
--microbatches 16` draws one for other sizes.

{{table}}

p are the ranks, m the microbatches, v the chunks per rank (2, or the `virtual_pipeline_model_parallel_size` that
`initialize_model_parallel` got), n the slices of a sequence (`num_sequence_slices`), r is the rank. N
is the size of a group (`microbatch_group_size_per_vp_stage`): by default p, and counted in slices for
seq_interleaved_1f1b. Bubbles are shares of a step with F = B = W, all stages alike, and
messages that take no time. A microbatch is in flight from its F to its W, one of v chunks counts as 1 / v of it, and a
slice as 1 / n. **Both formulas hold from the number of microbatches on that the column "hold from m =" has.** With
fewer the bubble is larger: zb1p on 4 ranks has 20.0 % with 4 microbatches, and 45.5 % with 2.

Any number of microbatches works, from 1 on, and it may change from step to step. Megatron's interleaved schedule
refuses an m whose remainder by N is between 1 and p - 1. Here the remainder is divided among all groups, and N in the
table is the size of the first. An example: interleaved_1f1b on 4 ranks with 2 chunks holds (2 * 3 + 1 * 4 + 1) / 2 =
5.5 microbatches on the first rank (r = 0) and (0 + 4 + 1) / 2 = 2.5 on the last one (r = 3).

In the pictures a row is one of {PP_SIZE} ranks, there are {NUM_MICROBATCHES} microbatches, and F, B and W take as long
as each other. Schedules that cut sequences have {NUM_SLICES} slices there: 3 is the first one of microbatch 3, and 3.1
the second. Of an overlapped pair the forward is above the backward. Below a rank's actions is the number of
microbatches that it holds, and at the right the most of them.

**Where the bubble comes from.** Without interleaving the last microbatch leaves the first rank after m forwards, goes
down and up through the p - 1 other ranks, and meets m backwards on its way: a step takes (m + p - 1) (F + B + W), of
which m (F + B + W) are work. With v chunks each stage takes 1 / v of that time, and so does each step of the way
through the pipeline: (m + (p - 1) / v) (F + B + W).

**What a split backward does to it.** No other rank waits for a W. So the way through the p - 1 other ranks takes F + B
on each and not F + B + W, and meanwhile a rank runs deferred Ws: (p - 1) (F + B - W) remain (zb1p), 1 / v of
that when interleaved. With F = B = W no step is shorter, since rank r starts r F later than the first. But it may end
that much later too, and begin its next step then: between its first and last action it waits for nothing (zb2p, zbv: a
parallelogram). That needs enough microbatches in flight to last until the first one is back, 2 (p - 1) + 1 of them on
one chunk (zb2p). In a V the last stage is on the first rank, each way is half as long in time, and p are enough (zbv).
"""


def table() -> str:
    """All schedules, each in a row."""
    rows = [
        "| name | chunks per rank | microbatches in flight on rank r | bubble, F = B = W | hold from m = | source |",
        "|---|---|---|---|---|---|",
    ]
    for name in megapipe.schedule_names():
        note = NOTES[name]
        address = re.search(r"https://[\w./-]*[\w/]", docstring_of(name))
        source = f"[{SOURCES[address[0]]}]({address[0]})" if address else ""
        numbers = f"{chunks_of(name)} | {note.in_flight} | {note.bubble} | {note.least}"
        rows.append(f"| [`{name}`](#{name}) | {numbers} | {source} |")
    return "\n".join(rows)


def chunks_of(name: str) -> str:
    schedule = find_schedule(name)
    if schedule.num_chunks is None:
        return "any number"
    return f"{schedule.num_chunks}, in a V" if schedule.placement is v_shape else str(schedule.num_chunks)


def docstring_of(name: str) -> str:
    return inspect.cleandoc(find_schedule(name).loops.__doc__ or "")


def section(name: str) -> str:
    plan = plan_of(name)
    simulation = plan.simulate()
    note = NOTES[name]
    lines = [
        f"## {name}",
        docstring_of(name),
        note.when,
        f"![Timeline of {name}]({name}.svg)",
        "| | in general | in the picture |\n|---|---|---|\n"
        f"| chunks per rank | {chunks_of(name)} | {plan.num_chunks} |\n"
        f"| bubble | {note.bubble} | {max(simulation.bubble):.1%} |\n"
        f"| microbatches in flight on rank r | {note.in_flight} | {peaks(plan)} |\n"
        f"| messages per step | | {plan.num_messages} |",
    ]
    return "\n\n".join(lines) + "\n"


def gains() -> str:
    """What others report of their runs, by the plan."""
    plans = {name: make_plan(name, 4, 16) for name in ("interleaved_1f1b", "zbv", "dualpipev")}
    step = {name: plan.simulate(exchange=EXCHANGE * (name == "dualpipev")).makespan for name, plan in plans.items()}
    rows = [
        f"| {fast} over {slow} | {step[slow] / step[fast] - 1:.1%} | about {reported} |"
        for fast, slow, reported in (
            ("zbv", "interleaved_1f1b", "7 %"),
            ("dualpipev", "zbv", "10 %"),
            ("dualpipev", "interleaved_1f1b", "17 %"),
        )
    ]
    return "\n".join(
        [
            "## What one gains over another",
            "",
            "On 4 ranks with 16 microbatches, as a talk on graph-based pipelining reports for a mixture of experts "
            "(its 1F1B is the interleaved one). The plans assume F = B = W, stages all alike, two chunks per rank, "
            "messages between ranks that take no time, and that all-to-alls take "
            f"{EXCHANGE:.0%} of an F and of a B, which is what dualpipev would have to hide: "
            f"`megapipe compare --pp 4 --microbatches 16` has the others, and with `--exchange {EXCHANGE}` dualpipev.",
            "",
            "| | by the plan | reported |",
            "|---|---|---|",
            *rows,
            "",
        ]
    )


def pp_size_of(name: str) -> int:
    return find_schedule(name).max_pp_size or PP_SIZE


def plan_of(name: str, pp_size: int | None = None, num_microbatches: int = NUM_MICROBATCHES) -> Plan:
    num_slices = NUM_SLICES if find_schedule(name).slices else 1
    return make_plan(name, pp_size or pp_size_of(name), num_microbatches, num_slices=num_slices)


def peaks(plan: Plan) -> str:
    return "none" if plan.forward_only else ", ".join(f"{peak:g}" for peak in plan.simulate().peak_activations)


def page() -> str:
    sections = [section(name) for name in megapipe.schedule_names()]
    return "\n".join([HEAD.format(table=table()), *sections, gains()])


def index_page() -> str:
    """The README, with links as from docs/."""
    text = (Path(__file__).parents[1] / "README.md").read_text()
    return re.sub(r"\]\((docs/)?(?!\w+:)", lambda found: "](" if found[1] else "](../", text)


CONFIG_HEAD = """# Settings

<!-- Made by `make docs` from `megapipe.PipelineConfig`; a test keeps this page up to date. -->

The config of a model is `model.config`: a `PipelineConfig`, or any object with some of its fields, such as Megatron's
own config, a dataclass of yours, a namespace. Fields that it lacks take the defaults below. All ranks need the same
values, and so do the chunks of a rank.
"""

CONFIG_TABLE = """
## {}

| field | type | default | meaning |
|---|---|---|---|"""


def config_page() -> str:
    """The fields of `PipelineConfig`, in a table for each group, and behind them those of other configs."""
    source = inspect.getsource(megapipe.PipelineConfig) + inspect.getsource(StepConfig)
    titles = {first: title for title, first in re.findall(r"^    # (.+)\n    (\w+):", source, flags=re.MULTILINE)}
    lines = [CONFIG_HEAD.rstrip()]
    for one in fields(StepConfig):
        if one.name in titles:
            lines.append(CONFIG_TABLE.format(titles[one.name]))
        kind = str(one.type).replace(" | ", "` or `")
        lines.append(f"| `{one.name}` | `{kind}` | `{one.default!r}` | {one.metadata['text']} |")
    return "\n".join(lines) + "\n"


def limits_page() -> str:
    """The page with its table of what does not go together."""
    text = (Path(__file__).parent / "limits.md").read_text()
    names = {
        name: f"`{name}`" if name.isidentifier() else name.replace("__next__()", "`__next__()`") for name in TRAITS
    }
    rows = [f"| {names[one]} | {names[other]} | {remedy} |\n" for (one, other), remedy in REFUSED.items()]
    return re.sub(r"(\| remedy \|\n\|---\|---\|---\|\n)(?:\|.*\n)*", lambda head: head[1] + "".join(rows), text)


def generate(folder: Path) -> None:
    (folder / "reference").mkdir(parents=True, exist_ok=True)
    (folder / "reference/config.md").write_text(config_page())
    for name in megapipe.schedule_names():
        plan = plan_of(name)
        save_picture(plan, plan.simulate(), folder / f"{name}.svg")
    (folder / "schedules.md").write_text(page())
    (folder / "index.md").write_text(index_page())
    (folder / "limits.md").write_text(limits_page())


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)

"""The command, as its users see it."""

import csv
import io
import json
import os
import re
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from tools.measured import as_measured

import megapipe
from megapipe.analysis import Timeline
from megapipe.analysis.cli import main
from megapipe.plan import KINDS, Settings, StageBytes, find_schedule, load_plan, make_plan, registry


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")


def output_of(capsys: pytest.CaptureFixture[str], command: str = "", *more: str) -> str:
    assert main([*command.split(), *more]) == 0
    return capsys.readouterr().out


def error_of(capsys: pytest.CaptureFixture[str], command: str, *more: str) -> str:
    assert main([*command.split(), *more]) == 2
    return capsys.readouterr().err


def test_show(capsys: pytest.CaptureFixture[str]) -> None:
    out = output_of(capsys, "show 1f1b --pp 3 --microbatches 3 --width 67")
    assert out.splitlines() == [
        "rank 0 0F0 0F1 0F2 ................0B0     ....0B1     ....0B2     ",
        "rank 1 ....1F0 1F1 ........1B0     1F2 1B1     ....1B2     ........",
        "rank 2 ........2F0 2B0     2F1 2B1     2F2 2B2     ................",
        "legend     F forward, B backward, . idle; 2F0: of microbatch 0 through stage 2",
        "step       15, at least 11 in any order (F on a whole rank takes 1)",
        "bubble     40.0% on every rank (share of the step without work)",
        "in a span  40.0% 25.0% 0.0% (from a rank's first action to its last)",
        "held       3 2 1 (microbatches at once)",
        "messages   12 per step",
    ]


def test_overlapped_pairs_are_shown_as_one(capsys: pytest.CaptureFixture[str]) -> None:
    out = output_of(capsys, "show dualpipev --pp 2 --microbatches 4 --width 100")
    assert out.splitlines()[0].count("0F3+3B1") == 1
    assert "F+B: an overlapped pair" in out
    assert "+" not in output_of(capsys, "show zbv --pp 2 --microbatches 4 --width 150")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_terminal_is_coloured_and_its_width_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    """No line is longer than the terminal, and a pair has the colours of both of its actions."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in (("COLUMNS", "50"), ("TERM", "xterm-256color"), ("COLORTERM", "truecolor")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    assert main(["show", "dualpipev", "--pp", "2", "--microbatches", "2"]) == 0
    lines = terminal.getvalue().splitlines()
    assert max(len(re.sub(r"\x1b\[[0-9;]*m", "", line)) for line in lines) <= 50
    for colour in (KINDS["F"].colours[0], KINDS["BW"].colours[1]):
        assert "48;2;{};{};{}m".format(*bytes.fromhex(colour[1:])) in lines[0]


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_a_terminal_without_colours_shows_letters(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    for variable, usual in (("COLUMNS", "120"), ("TERM", "xterm-256color"), (name, value)):
        monkeypatch.setenv(variable, usual)
    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    assert main(["show", "zbv", "--pp", "4", "--microbatches", "8"]) == 0
    assert re.fullmatch(r"rank 0 ([FfBbWw]\d|[ .])+", terminal.getvalue().splitlines()[0])


@pytest.mark.parametrize("width", ["80", "120", "240"])
def test_without_colours_each_name_has_a_letter(capsys: pytest.CaptureFixture[str], width: str) -> None:
    """F, B and W of zbv were the same bare digits from 80 to 120 columns, and its two chunks looked alike."""
    out = output_of(capsys, "show zbv --pp 4 --microbatches 8 --width", width).splitlines()
    names = [re.findall(r"\d*[A-Za-z]\d*|\d+", line.partition(" ")[2][2:]) for line in out[:4]]
    assert all(name[0].isalpha() or name[1:2].isalpha() for row in names for name in row)
    legend = out[4]
    if width == "240":
        assert sum(name == "7W7" for row in names for name in row) == 1
        assert "2F0: of microbatch 0 through stage 2" in legend
        assert "small letters" not in legend
        return
    assert "small letters: odd chunks" in legend
    for letter in "FfBbWw":
        assert [sum(name[0] == letter for name in row) for row in names] == [8] * 4
    assert ("w7" in names[0]) == ("F0: of microbatch 0" in legend) == (width == "120")


def test_files(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    table, plan, trace = (str(tmp_path / name) for name in ("plan.csv", "plan.json", "plan.trace.json"))
    sizes = ("--pp", "2", "--microbatches", "3", "--width", "60")
    out = output_of(capsys, "show 1f1b", *sizes, "--save", table, plan, trace)
    assert Path(table).read_text() == "0F0,0F1,0B0,0F2,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n"
    assert output_of(capsys, "show", table, "--width", "60") == out
    assert output_of(capsys, "show", plan, "--width", "60") == out
    # A text was taken for a schedule without sizes, and what a file says itself was passed over without a word.
    (text := tmp_path / "plan.txt").write_text(Path(table).read_text().replace(",", " "))
    assert output_of(capsys, "show", str(text), "--width", "60") == out
    for option in (["--pp", "3"], ["--recompute"], ["--offload", "1"]):
        assert f"{option[0]} is for schedules by their names" in error_of(capsys, "show", plan, *option)
    events = json.loads(Path(trace).read_text())["traceEvents"]
    assert [event["args"]["name"] for event in events if event["name"] == "thread_name"] == ["rank 0", "rank 1"]
    first = next(event for event in events if event["ph"] == "X")
    assert (first["name"], first["ts"], first["dur"], first["tid"]) == ("0F0", 0, 1000, 0)


def test_compare(capsys: pytest.CaptureFixture[str]) -> None:
    out = output_of(capsys, "compare --pp 4 --microbatches 8 --memory-limit 4")
    assert [line.split()[0] for line in out.splitlines()[1:5]] == ["zbv", "v_half", "v_min", "1f1b"]
    assert "9 more are beaten, in time or memory and in neither better: --all shows them" in out
    assert "step: F on a whole rank takes 1; held: microbatches" in out
    shown = rows_of(output_of(capsys, "compare --pp 4 --microbatches 8 --memory-limit 4 --all"))
    steps = [step for step, *_ in shown.values()]
    assert steps == sorted(steps)
    assert {name: (row[0], row[5]) for name, row in shown.items() if name in ("zbv", "zb2p", "1f1b")} == {
        "zbv": (25.5, "yes"),
        "zb2p": (27, "no"),
        "1f1b": (33, "yes"),
    }
    for limits, fits in (("4,3,2,1", "yes"), ("4,3,2,0.5", "no")):
        sizes = ("--pp", "4", "--microbatches", "8", "--memory-limit", limits, "--all")
        assert rows_of(output_of(capsys, "compare", *sizes))["1f1b"][5] == fits


def rows_of(table: str) -> dict[str, list[Any]]:
    """By schedule, the numbers of a table: step first, then bubble or others."""
    found = re.findall(
        r"^(\w+(?:, \d+ slices)?)(?: x\d)?(?:, (\d+) slices)?(?: \*)? +([\d.]+)  (.*)$", table, flags=re.MULTILINE
    )
    return {
        name + f", {slices} slices" * bool(slices): [float(step), *rest.split()] for name, slices, step, rest in found
    }


def test_a_comparison_fits_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lines had 72 columns in a terminal of 60."""
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    assert main(["compare", "--pp", "4", "--microbatches", "8"]) == 0
    lines = terminal.getvalue().splitlines()
    assert max(map(len, lines)) <= 60
    assert lines[0].split() == ["schedule", "step", "bubble", "held", "messages", "beaten", "by"]
    assert lines[1].split() == ["zbv", "x2", "*", "25.5", "5.9%", "4", "96", "-"]
    assert any(line.startswith("left out, since 60 columns are too few: of best") for line in lines)


def test_a_comparison_is_saved(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    table, rows = tmp_path / "all.csv", tmp_path / "all.json"
    StageBytes(saved=12e9).save(tmp_path / "bytes.json")
    sizes = ("--pp", "4", "--microbatches", "8", "--bytes", str(tmp_path / "bytes.json"), "--memory-limit", "50GB")
    output_of(capsys, "compare", *sizes, "--save", str(table), str(rows))
    by_name = {row["schedule"]: row for row in json.loads(rows.read_text())}
    zb1p = {"schedule": "zb1p", "chunks": 1, "slices": 1, "step": 27.0, "of_best": 27 / 25.5, "held": 4.0}
    zb1p |= {"bubble": pytest.approx(1 / 9), "bytes": 48e9, "messages": 48, "fits": True}
    assert by_name["zb1p"] == {**zb1p, "beaten_by": "zbv x2", "needs_split": True}
    with open(table, newline="") as file:
        read = {row["schedule"]: row for row in csv.DictReader(file)}
    assert read.keys() == by_name.keys()
    assert (read["zbv"]["beaten_by"], read["gpipe"]["bytes"], read["gpipe"]["fits"]) == ("", "96000000000.0", "False")


def test_pending_weights_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    """What fills the windows of exchanges was a setting that the command could not show."""
    times = ("--exchange", "0.25", "--times", "1.25", "1.25", "1")
    sizes, more = ("--pp", "4", "--microbatches", "8"), ("--min-pending-weights", "1")
    less, usual = (
        rows_of(output_of(capsys, "compare", *sizes, *times, *settings, "--all"))["zbv"][0] for settings in (more, ())
    )
    assert less < usual
    assert f"step       {less:g}" in output_of(capsys, "show zbv", *sizes, *times, *more)


def test_schedules_that_need_layers_that_defer_are_marked(capsys: pytest.CaptureFixture[str], recorded: str) -> None:
    """The fastest schedules of the table were none for layers that compute W in B, and nothing said so."""
    split = {"zb1p", "zb2p", "interleaved_zb1p", "zbv", "v_half", "v_min", "combined_zb1p", "dualpipev"}
    for command in (["compare", "--pp", "2", "--microbatches", "4"], ["tune", recorded, "--chunks", "2"]):
        out = output_of(capsys, *command, "--all")
        assert set(re.findall(r"^(\w+)(?: x\d)? \* ", out, flags=re.MULTILINE)) == split
        assert "* its time takes layers that defer their weight gradients" in out
        out = output_of(capsys, *command, "--unsplit")
        assert " * " not in out
        assert "* its time" not in out
    assert re.search(r"recommended: looped_bfs with 2 chunks per rank \(4 stages\), 139 ms per step$", out, re.M)
    sizes = ("--pp", "4", "--microbatches", "8")
    assert "step       27," in output_of(capsys, "show zb1p", *sizes)
    assert "step       33," in output_of(capsys, "show zb1p", *sizes, "--unsplit")
    for option in (["--unsplit"], ["--p2p", "1"], ["--chunks", "2"]):
        assert f"{option[0]} is for plans" in error_of(capsys, "show", recorded, *option)


@pytest.fixture
def recorded(tmp_path: Path) -> str:
    """Two steps of 1F1B with forwards of 10 ms and backwards of 20 on both ranks, and messages of 2 ms."""
    simulation = make_plan("1f1b", 2, 4).simulate(10.0, 10.0, 10.0, p2p=2.0)
    path = tmp_path / "timeline.json"
    Timeline("1f1b", [as_measured(simulation), as_measured(simulation, start=200.0)]).save(path)
    return str(path)


def test_show_a_measured_timeline(capsys: pytest.CaptureFixture[str], tmp_path: Path, recorded: str) -> None:
    out = output_of(capsys, "show", recorded, "--width", "86")
    assert out.splitlines() == [
        "measured, the median of 2 steps:",
        "rank 0 0F0  0F1  ............0B0       0F2  0B1       0F3  ..0B2       .....0B3       ",
        "rank 1 ......1F0  1B0       1F1  1B1       ..1F2  1B2       1F3  1B3       ...........",
        "by the plan, with the mean times that were measured:",
        "rank 0 0F0  0F1  ............0B0       0F2  0B1       0F3  ..0B2       .....0B3       ",
        "rank 1 ......1F0  1B0       1F1  1B1       ..1F2  1B2       1F3  1B3       ...........",
        "legend     F forward, B backward, . idle; 2F0: of microbatch 0 through stage 2",
        "step       158 ms measured, 158 ms by the plan",
        "bubble     24.1% = 19.0% the schedule's own + 0.0% uneven stages + 0.0% jitter + "
        "5.1% waiting for communication + 0.0% host",
        "waited     38 ms per step on every rank",
        "host       0 ms per step on every rank",
        "F takes    10 ms on every stage",
        "BW takes   20 ms on every stage",
        "messages   8 per step, latency 2 ms",
    ]


def test_layers_that_defer_nothing_are_noticed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    for weight, is_noticed in ((0.1, True), (5.0, False)):
        Timeline("zb1p", [as_measured(make_plan("zb1p", 2, 4).simulate(10.0, 10.0, weight))]).save(path)
        for command in ("show", "tune"):
            assert ("passes (W) are all but empty" in output_of(capsys, command, str(path))) == is_noticed


def test_files_of_a_measured_timeline(capsys: pytest.CaptureFixture[str], tmp_path: Path, recorded: str) -> None:
    svg, trace, table = (str(tmp_path / name) for name in ("step.svg", "step.trace.json", "plan.csv"))
    output_of(capsys, "show", recorded, "--save", svg, trace, table)
    assert "measured" in Path(svg).read_text()
    assert "by the plan" in Path(svg).read_text()
    assert Path(table).read_text() == "0F0,0F1,0B0,0F2,0B1,0F3,0B2,0B3\n1F0,1B0,1F1,1B1,1F2,1B2,1F3,1B3\n"
    events = json.loads(Path(trace).read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {0: "measured", 1: "plan"}
    assert sum(event["name"] == "1F0" and event["pid"] == 0 for event in events) == 2  # both steps
    wait = next(event for event in events if event["name"] == "wait of 1F0")
    assert (wait["ts"], wait["dur"], wait["tid"]) == (0, 12000, 1)


def test_tune(capsys: pytest.CaptureFixture[str], tmp_path: Path, recorded: str) -> None:
    out = output_of(capsys, "tune", recorded, "--chunks", "2", "--memory-limit", "3", "--all")
    assert "measured: 1f1b, 2 ranks, 4 microbatches: 158 ms per step, 158 ms by its plan\n" in out
    assert "times: forward 10, input gradients 10, weight gradients 10 ms" in out
    assert "a message 2 ms" in out
    assert "half of each counts as input gradients" in out
    rows = rows_of(out)
    assert (rows["1f1b"][0], rows["interleaved_1f1b"][0], rows["gpipe"][5]) == (158, 147, "no")
    assert "recommended: zbv with 2 chunks per rank (4 stages), 131 ms" in out
    out = output_of(capsys, "tune", recorded, "--microbatches", "8", "--memory-limit", "2")
    assert "recommended: zbv with 2 chunks per rank (4 stages), " in out
    for ending in ("json", "csv"):
        plan = str(tmp_path / f"plan.{ending}")
        out = output_of(capsys, "tune", recorded, "--chunks", "2", "--save", plan)
        assert "\nrecommended: zbv" in out
        assert f"\nsaved: {plan}, " in out
        assert find_schedule(plan).num_chunks == 2
    out = output_of(capsys, "tune", recorded, "--slices", "1", "2", "4", "--memory-limit", "1.5", "--all")
    rows = {name: row for name, row in rows_of(out).items() if " slices" in name}
    assert rows.keys() == {
        f"{name}, {n} slices" for name in ("seq1f1b", "seq_interleaved_1f1b", "seq_zb1p") for n in (2, 4)
    }
    assert rows["seq1f1b, 2 slices"][0] < rows["seq1f1b, 4 slices"][0] < 158  # more messages, each of 2 ms
    assert "recommended: seq_interleaved_1f1b with 2 chunks per rank (4 stages) and 4 slices" in out
    forwards = str(tmp_path / "forwards.json")
    Timeline("inference", [as_measured(make_plan("inference", 2, 4).simulate())]).save(forwards)
    for arguments, message in (
        ([recorded, "--save", "plan.txt"], "--save plan.txt: a plan is saved to a file that ends with .json or .csv"),
        ([recorded, "--memory-limit", "1"], "no schedule fits 1 microbatches of a whole rank: the smallest needs 2"),
        ([forwards], "has forwards only"),
    ):
        assert message in error_of(capsys, "tune", *arguments)


def test_slow_ranks_are_slow_in_each_row(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Where two of four ranks were half as fast, the table had the mean of all: a step of 1272 ms for the very schedule
    that had taken 1854."""
    slow = make_plan("1f1b", 4, 8).simulate(10.0, 10.0, 10.0, speeds=[1, 1, 0.5, 0.5])
    path = str(tmp_path / "timeline.json")
    Timeline("1f1b", [as_measured(slow)]).save(path)
    out = output_of(capsys, "tune", path, "--all")
    assert "speeds: 1.00 1.00 0.50 0.50 by the work of each rank" in out
    rows = rows_of(out)
    assert rows["1f1b"][0] == pytest.approx(slow.makespan, rel=1e-3)
    expected = make_plan("zb1p", 4, 8).simulate(10.0, 10.0, 10.0, speeds=[1, 1, 0.5, 0.5]).makespan
    assert rows["zb1p"][0] == pytest.approx(expected, rel=1e-3)


OWN = """
from megapipe import schedule
from megapipe.plan import loop
from megapipe.schedules import BW, F

@schedule("one_by_one_of_mine", placement=loop)
def one_by_one(pipe):
    for _ in range(pipe.num_microbatches):
        F(pipe)
        BW(pipe)
    return pipe.finish()
"""


def test_schedules_of_the_users_own(capsys: pytest.CaptureFixture[str], tmp_path: Path, recorded: str) -> None:
    """They could be looked at only by way of a file of a plan."""
    (mine := tmp_path / "mine.py").write_text(OWN)
    sizes = ("--pp", "2", "--microbatches", "4")
    with mock.patch.dict(registry._schedules):  # each time that the file is read it makes its schedule known
        assert "step       24," in output_of(capsys, "show", f"{mine}:one_by_one", *sizes)
        compared = rows_of(output_of(capsys, "compare", f"{mine}:one_by_one_of_mine", *sizes))
        assert compared["one_by_one_of_mine"][0] == 24
        assert "one_by_one_of_mine" in rows_of(output_of(capsys, "tune", recorded, f"{mine}:one_by_one"))
        for name, message in (
            ("mine.py:it", "there is no file mine.py"),
            (f"{mine}:it", "has no schedule 'it': it has one_"),
        ):
            assert message in error_of(capsys, "show", name, *sizes)


@pytest.mark.parametrize("command", ["show", "compare", "tune", "fit"])
def test_no_line_is_longer_than_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, recorded: str, command: str
) -> None:
    """Tables had up to 134 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    sizes = "--pp 4 --microbatches 8"
    job = "--devices 2 --memory 80GB --sequence 4096 --batch 8 --flops 312e12 --efficiency .5"
    model = "hidden_size=4096 num_hidden_layers=8 num_attention_heads=32 vocab_size=128256"
    options = {"show": f"zbv {sizes}", "compare": f"{sizes} --all", "tune": recorded, "fit": f"{model} {job}"}
    for arguments in (options[command], "--help"):
        assert max(map(len, output_of(capsys, f"{command} {arguments}").splitlines())) <= 80


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("show 1f2b", "there is no schedule '1f2b'"),
        ("show 1f1b", "--pp and --microbatches: needed, unless the schedule is a file"),
        ("show 1f1b --pp 0", "argument --pp: a whole number from 1 on, got 0"),
        ("show 1f1b --microbatchs 8", "there is no option --microbatchs: do you mean --microbatches?"),
        ("compare --pp 2", "the following arguments are required: --microbatches"),
        ("compare --pp 2 --microbatches 4 --save chart.svg", "that ends with .csv or .json"),
        ("show 1f1b --pp 2 --microbatches 4 --save x", "the ending is one of .csv, .json, .svg"),
        ("compare --pp 2 --microbatches 4 --exchange 2", "exchange is a part of forward, got"),
        (
            "show zbv --pp 4 --microbatches 8 --chunks 3",
            "zbv runs 2 chunk(s) of the model on each rank, got 3: give it 2, one for each stage that stages_for_rank "
            "lists, or choose a schedule that runs 3, such as interleaved_1f1b.",
        ),
        ("show nothing.csv", "there is no file or folder nothing."),
        ("tune nothing.json", "there is no file or folder nothing."),
        ("show 1f1b --pp 2 --microbatches 1000000000", "2 x 1000000000 x 1 x 1 forwards (ranks, microbatches"),
        ("compare --pp 1000000000 --microbatches 1", "no schedule runs 1 microbatches on 1000000000 ranks"),
        ("show 1f1b --pp 2 --microbatches 4 --width 1000000000", "a --width of 10,000 at most"),
        ("show 1f1b --pp 2 --microbatches 4 --times 1e308 1 1", "a step takes inf, which cannot be"),
        ("show inference --pp 2 --microbatches 4 --times 0 1 1", "a step takes 0, which cannot be"),
        ("compare --pp 2 --microbatches 4 --memory-limit nan", "a number of microbatches, got nan"),
        ("compare --pp 2 --microbatches 4 --min-pending-weights -1", "of Ws from 0 on, got -1"),
        (f"tune {__file__}", "is no measured timeline: record one with config.record_timeline"),
    ],
)
def test_what_is_wrong_is_said(capsys: pytest.CaptureFixture[str], arguments: str, message: str) -> None:
    assert message in error_of(capsys, arguments)


def test_a_saved_plan_keeps_the_limit_in_bytes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Ws were placed by microbatches, which take more bytes from B to W than from F to B: the plan held 8.3 GB."""
    times = ([10, 8, 8, 10, 10, 8, 8, 10], [12, 10, 8, 12, 15, 12, 12, 15], [12, 12, 10, 10, 12, 12, 10, 12])
    (memory := StageBytes(saved=1e9, kept=2e9, message=1e7)).save(tmp_path / "bytes.json")
    Timeline("zbv", [as_measured(make_plan("zbv", 4, 8).simulate(*times))]).save(tmp_path / "timeline.json")
    files = [str(tmp_path / name) for name in ("timeline.json", "bytes.json", "plan.json")]
    output_of(capsys, "tune", files[0], "--bytes", files[1], "--memory-limit", "6GB", "--save", files[2])
    assert max(load_plan(files[2]).simulate(memory=memory).peak_bytes) <= 6e9


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("import sys; sys.exit(3)", "mine.py ends with SystemExit: 3"),
        ("x = (", "mine.py ends with SyntaxError: "),
        ("pipe.run('F', None)", "mine: rank 0 calls forward_step(None): it has 1 chunks"),
        ("pipe.run('R', 7)", "mine: rank 0 calls recompute_step(7): it has 1 chunks"),
        ("pipe.run('Q')", "mine: rank 0 runs a 'Q', which is none of F, "),
    ],
)
def test_a_file_of_schedules_that_is_wrong(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, body: str, message: str
) -> None:
    """A file that ended itself gave success and printed nothing; the others tracebacks."""
    (tmp_path / "beside.py").write_text("")
    text = "import beside, megapipe\n\n@megapipe.schedule('mine', placement=megapipe.plan.loop)\ndef mine(pipe): {}\n"
    path = tmp_path / "mine.py"
    path.write_text(text.format(body) if "pipe" in body else body)
    assert main(["compare", f"{path}:mine", "--pp", "2", "--microbatches", "2"]) == 2
    registry._schedules.pop("mine", None)
    assert message in capsys.readouterr().err


def test_the_version_and_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert output_of(capsys, "--version") == f"megapipe {megapipe.__version__}\n"
    shown = output_of(capsys)
    assert shown == output_of(capsys, "--help")
    for command in ("show", "compare", "prove", "tune", "fit", "status"):
        assert f"\n    {command}" in shown
    assert "invalid choice: 'sing'" in error_of(capsys, "sing")


@pytest.mark.parametrize("arguments", [["compare", "--pp", "2", "--microbatches", "4"], ["--help"]])
def test_nobody_reads_to_the_end(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    """`megapipe compare ... | head` ended with "Broken pipe" for an error."""
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        assert main(arguments) == 1
        monkeypatch.undo()
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("command", ["show", "compare"])
def test_an_output_that_is_closed(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str
) -> None:
    """`megapipe show ... >&-`, as some supervisors start it, ended with "'NoneType' has no attribute 'isatty'". What is
    to be saved is saved."""
    monkeypatch.setattr(sys, "stdout", None)
    schedule = ["zbv"] if command == "show" else []
    saved = tmp_path / "saved.csv"
    assert main([command, *schedule, "--pp", "2", "--microbatches", "4", "--save", str(saved)]) == 1
    monkeypatch.undo()
    assert saved.stat().st_size > 0
    assert capfd.readouterr() == ("", "")


def test_a_timeline_of_a_plan_that_cannot_be(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    step = {"begin": 0, "end": 2, "actions": [[0, "F", 10**9, 0, 1], [0, "BW", 10**9, 1, 2]], "waits": []}
    path.write_text(json.dumps({"timeline": "1f1b", "unit": "ms", "steps": [[step]]}))
    for command in ("show", "tune"):
        assert "has 0RECV_F1000000000 on rank 0 where 0RECV_F0 is next" in error_of(capsys, command, str(path))


def test_pictures(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The width is counted in short actions: Ws of no time made it infinite."""
    svg, png = (tmp_path / f"plan.{ending}" for ending in ("svg", "png"))
    sizes = ("--pp", "2", "--microbatches", "3", "--p2p", "0.5")
    output_of(capsys, "show 1f1b", *sizes, "--save", str(svg), str(png))
    texts = re.findall(r">([^<>]+)</text>", svg.read_text())
    assert texts.count("0") >= 4  # forward and backward on two ranks
    assert "rank 0" in texts
    assert png.read_bytes().startswith(b"\x89PNG")
    output_of(capsys, "show zb1p", *sizes, "--times", "1", "1", "0", "--save", str(svg))
    assert ">weight gradient</text>" in svg.read_text()


def test_slices_are_shown(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    sizes, page = "--pp 4 --microbatches 8", str(tmp_path / "plan.json")
    shown = output_of(capsys, f"show seq1f1b {sizes} --slices 4 --width 500 --save", page)
    assert "3B0.3" in shown
    assert "bubble     8.6% on every rank" in shown
    assert "held       1.75 1.5 1.25 1 (microbatches at once, a slice as 1/4)" in shown
    assert output_of(capsys, "show", page, "--width", "500") == shown
    compared = output_of(capsys, f"compare {sizes} --slices 4 --all")
    assert "seq1f1b, 4 slices " in compared
    assert "\n1f1b " in compared
    assert "seq1f1b" not in output_of(capsys, f"compare {sizes}")  # with one slice it is 1f1b
    assert "zbv cannot cut sequences, got 4 slices" in error_of(capsys, f"show zbv {sizes} --slices 4")


def test_offload(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    sizes = ("--pp", "4", "--microbatches", "16")
    path = str(tmp_path / "plan.csv")
    out = output_of(capsys, "show 1f1b", *sizes, "--offload", "1", "--save", path)
    assert "step       57," in out  # as without
    assert "held       2 2 2 1 (" in out
    for forward, held in (("1", "3 4 3 2"), ("0.2", "3 3 3 2")):  # by the times that are given
        out = output_of(capsys, "show zb1p", *sizes, "--offload", "1.5", "--times", forward, "1", "1")
        assert f"held       {held} (" in out
    compared = output_of(capsys, "compare --pp 2 --microbatches 2 --offload 1 --slices 2")
    assert "seq1f1b: activations of seq1f1b are not moved" in compared
    Timeline("zb1p", [as_measured(make_plan("zb1p", 2, 8).simulate())]).save(tmp_path / "recorded.json")
    tuned = output_of(capsys, "tune", str(tmp_path / "recorded.json"), "--offload", "1", "--save", path)
    assert "as the schedule has it" in tuned
    assert "0O0" in Path(path).read_text()


def test_recomputation(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    sizes = ("--pp", "4", "--microbatches", "8")
    out = output_of(capsys, "show 1f1b", *sizes, "--recompute", "--save", str(tmp_path / "plan.csv"))
    assert "R recomputation" in out
    assert "held       1 on every rank" in out
    assert "3R0" not in (tmp_path / "plan.csv").read_text()  # whose B follows its F at once
    assert "2R0" in (tmp_path / "plan.csv").read_text()
    for time, step in (("1", 39), ("0.5", 35.5)):
        assert f"step       {step:g}," in output_of(capsys, "show 1f1b", *sizes, "--recompute", time)
    rows = rows_of(output_of(capsys, "compare", *sizes, "--recompute", "--all"))
    assert rows["zb1p"][:5] == [35, "1.045x", "31.4%", "2", "48"]
    plan = make_plan("1f1b", 4, 8, settings=Settings(recompute=True))
    Timeline("1f1b", [as_measured(plan.simulate(recompute=0.5))]).save(tmp_path / "recorded.json")
    tuned = output_of(capsys, "tune", str(tmp_path / "recorded.json"), "--recompute")
    assert rows_of(tuned)["1f1b"][0] == 35.5

"""The command, as its users see it."""

import csv
import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tools.measured import as_measured

import megapipe
from megapipe.analysis import Timeline
from megapipe.analysis.cells import cells_of
from megapipe.analysis.cli import main
from megapipe.analysis.text import text_rows
from megapipe.plan import KINDS, Settings, find_schedule, make_plan


def output_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 0
    return capsys.readouterr().out


def test_show(capsys: pytest.CaptureFixture[str]) -> None:
    out = output_of(capsys, "show", "1f1b", "--pp", "3", "--microbatches", "3", "--width", "67")
    assert out.splitlines() == [
        "rank 0 0F0 0F1 0F2 ................0B0     ....0B1     ....0B2     ",
        "rank 1 ....1F0 1F1 ........1B0     1F2 1B1     ....1B2     ........",
        "rank 2 ........2F0 2B0     2F1 2B1     2F2 2B2     ................",
        "legend     F forward, B backward, . idle; 2F0: of microbatch 0 through stage 2",
        "step       15, at least 11 in any order (F of a microbatch on a whole rank takes 1)",
        "bubble     40.0% on every rank (share of the step without work)",
        "in a span  40.0% 25.0% 0.0% (from a rank's first action to its last)",
        "held       3 2 1 (microbatches at once)",
        "messages   12 per step",
    ]


def test_overlapped_pairs_are_shown_as_one(capsys: pytest.CaptureFixture[str]) -> None:
    out = output_of(capsys, "show", "dualpipev", "--pp", "2", "--microbatches", "4", "--width", "150", "--steps", "2")
    assert out.splitlines()[0].count("0F3+3B1") == 2  # in both steps
    assert "F+B: an overlapped pair" in out
    assert "+" not in output_of(capsys, "show", "zbv", "--pp", "2", "--microbatches", "4", "--width", "150")


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


def test_show_messages(capsys: pytest.CaptureFixture[str]) -> None:
    out = output_of(capsys, "show", "interleaved_1f1b", "--pp", "1", "--chunks", "2", "--microbatches", "1", "--comms")
    assert "rank 0: 0F0 1F0 1B0 0B0\n" in out  # nothing travels
    out = output_of(capsys, "show", "gpipe", "--pp", "2", "--microbatches", "1", "--comms")
    assert "rank 0: 0F0 0SEND_F0 0RECV_B0 0B0\nrank 1: 1RECV_F0 1F0 1B0 1SEND_B0\n" in out


@pytest.mark.parametrize("width", ["30", "200"])
def test_the_timeline_fits_its_width(capsys: pytest.CaptureFixture[str], width: str) -> None:
    out = output_of(capsys, "show", "interleaved_1f1b", "--pp", "4", "--microbatches", "16", "--width", width)
    assert {len(line) for line in out.splitlines()[:4]} == {int(width)}


def test_actions_are_named_as_fully_as_most_of_them_have_room_for() -> None:
    plan = make_plan("inference", 4, 2)
    simulation = plan.simulate([1.0, 1.0, 1.0, 8.0])
    rows, _ = text_rows(cells_of(plan, simulation.spans), 57, simulation.makespan)  # three columns for the short ones
    named = [[segment.text.strip() for segment in row if segment.cell] for row in rows]
    assert named == [["F0", "F1"]] * 4


@pytest.mark.parametrize("width", ["60", "80", "100", "120", "240"])
def test_without_colours_each_name_has_a_letter(capsys: pytest.CaptureFixture[str], width: str) -> None:
    """F, B and W of zbv were the same bare digits from 80 to 120 columns, and its two chunks looked alike."""
    out = output_of(capsys, "show", "zbv", "--pp", "4", "--microbatches", "8", "--width", width).splitlines()
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
    table, plan, trace = (str(tmp_path / name) for name in ("plan.csv", "plan.json", "trace.json"))
    sizes = ("--pp", "2", "--microbatches", "3", "--width", "60")
    out = output_of(capsys, "show", "1f1b", *sizes, "--csv", table, "--json", plan, "--trace", trace)
    assert Path(table).read_text() == "0F0,0F1,0B0,0F2,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n"
    assert output_of(capsys, "show", table, "--width", "60") == out
    assert output_of(capsys, "show", plan, "--width", "60") == out
    events = json.loads(Path(trace).read_text())["traceEvents"]
    assert [event["args"]["name"] for event in events if event["name"] == "thread_name"] == ["rank 0", "rank 1"]
    first = next(event for event in events if event["ph"] == "X")
    assert (first["name"], first["ts"], first["dur"], first["tid"]) == ("0F0", 0, 1000, 0)


def test_compare(capsys: pytest.CaptureFixture[str]) -> None:
    out = output_of(capsys, "compare", "--pp", "4", "--microbatches", "8", "--memory-limit", "4")
    header, *rows = [line.split() for line in out.replace(" * ", "   ").splitlines()[:-2]]
    assert header[-4:] == ["fits", "4", "beaten", "by"]
    shown = {row[0]: (float(row[2]), row[7]) for row in rows}
    assert list(shown) == sorted(shown, key=lambda name: shown[name][0])
    assert shown["zbv"] == (25.5, "yes")
    assert shown["zb2p"] == (27, "no")
    assert shown["interleaved_1f1b"] == (28.5, "no")
    assert shown["1f1b"] == (33, "yes")
    assert out.splitlines()[-1].startswith("step: F of a microbatch on a whole rank takes 1; held: microbatches")


def test_a_comparison_fits_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lines had 72 columns in a terminal of 60."""
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    assert main(["compare", "--pp", "4", "--microbatches", "8"]) == 0
    lines = terminal.getvalue().splitlines()
    assert max(map(len, lines)) <= 60
    assert lines[0].split() == ["schedule", "step", "bubble", "held", "beaten", "by"]
    assert lines[1].split() == ["zbv", "*", "25.5", "5.9%", "4", "-"]
    assert "left out, since this terminal is narrow: of best, messages," in lines


def test_a_comparison_is_saved(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    table, rows = tmp_path / "all.csv", tmp_path / "all.json"
    sizes = ("--pp", "4", "--microbatches", "8", "--saved", "12GB", "--memory-limit", "50GB")
    output_of(capsys, "compare", *sizes, "--csv", str(table), "--json", str(rows))
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
    times = ("--exchange", "0.25", "--forward", "1.25", "--backward-input", "1.25")
    show = ("show", "zbv", "--pp", "8", "--microbatches", "32", *times)
    assert "step       103.188," in output_of(capsys, *show, "--min-pending-weights", "1")
    steps = []
    for settings in ([], ["--min-pending-weights", "1"], ["--max-pending-weights", "0"]):
        out = output_of(capsys, "compare", "--pp", "8", "--microbatches", "32", *times, *settings)
        steps.append(next(float(line.split()[3]) for line in out.splitlines() if line.startswith("zbv ")))
    assert steps[1] < steps[0] < steps[2]


def test_schedules_that_need_layers_that_defer_are_marked(capsys: pytest.CaptureFixture[str], recorded: str) -> None:
    """The fastest schedules of the table were none for layers that compute W in B, and nothing said so."""
    split = {"zb1p", "zb2p", "interleaved_zb1p", "zbv", "v_half", "v_min", "combined_zb1p", "dualpipev"}
    for command in (["compare", "--pp", "2", "--microbatches", "4"], ["tune", recorded, "--chunks", "2"]):
        out = output_of(capsys, *command)
        assert set(re.findall(r"^(\w+) \* ", out, flags=re.MULTILINE)) == split
        assert "* its time takes layers that defer their weight gradients" in out
        out = output_of(capsys, *command, "--unsplit")
        assert " * " not in out
        assert "* its time" not in out
    assert re.search(r"recommended: looped_bfs with 2 chunks per rank \(4 stages\), 139 ms per step$", out, re.M)
    sizes = ("--pp", "4", "--microbatches", "8")
    assert "step       27," in output_of(capsys, "show", "zb1p", *sizes)
    assert "step       33," in output_of(capsys, "show", "zb1p", *sizes, "--unsplit")
    assert main(["show", recorded, "--unsplit"]) == 2
    assert "--unsplit is for plans" in capsys.readouterr().err


def test_a_chart_of_the_comparison(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    svg, png, html = (tmp_path / f"chart.{ending}" for ending in ("svg", "png", "html"))
    sizes = ("--pp", "4", "--microbatches", "8", "--memory-limit", "4")
    output_of(capsys, "compare", *sizes, "--svg", str(svg), "--png", str(png), "--html", str(html))
    for name in ("looped_bfs x2", "interleaved_1f1b x2", "gpipe", "1f1b", "limit 4"):
        assert f">{name}</text>" in svg.read_text()
        assert f">{name}</text>" in html.read_text()
    assert png.read_bytes().startswith(b"\x89PNG")


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
    svg, html, trace, table = (str(tmp_path / name) for name in ("step.svg", "step.html", "trace.json", "plan.csv"))
    output_of(capsys, "show", recorded, "--svg", svg, "--html", html, "--trace", trace, "--csv", table)
    for path in (svg, html):
        assert "measured" in Path(path).read_text()
        assert "by the plan" in Path(path).read_text()
    assert Path(table).read_text() == "0F0,0F1,0B0,0F2,0B1,0F3,0B2,0B3\n1F0,1B0,1F1,1B1,1F2,1B2,1F3,1B3\n"
    events = json.loads(Path(trace).read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {0: "measured", 1: "plan"}
    assert sum(event["name"] == "1F0" and event["pid"] == 0 for event in events) == 2  # both steps
    wait = next(event for event in events if event["name"] == "wait of 1F0")
    assert (wait["ts"], wait["dur"], wait["tid"]) == (0, 12000, 1)


def test_tune(capsys: pytest.CaptureFixture[str], tmp_path: Path, recorded: str) -> None:
    chart = tmp_path / "chart.svg"
    out = output_of(capsys, "tune", recorded, "--chunks", "2", "--memory-limit", "3", "--svg", str(chart)).splitlines()
    assert ">time of a step, ms</text>" in chart.read_text()
    assert out[0] == "measured: 1f1b, 2 ranks, 4 microbatches: 158 ms per step, 158 ms by its plan"
    assert out[1].startswith("times: forward 10, input gradients 10, weight gradients 10 ms")
    assert out[1].endswith("a message 2 ms")
    assert "half of each counts as input gradients" in out[2]
    rows = {line.split()[0]: line.split() for line in (row.replace(" *", "") for row in out[4:-3])}
    assert float(rows["1f1b"][2]) == 158
    assert rows["gpipe"][7] == "no"
    assert float(rows["interleaved_1f1b"][2]) == 147
    assert out[-1].startswith("recommended: zbv with 2 chunks per rank (4 stages), 131 ms")
    out = output_of(capsys, "tune", recorded, "--microbatches", "8", "--memory-limit", "2").splitlines()
    assert out[-1].startswith("recommended: zbv with 2 chunks per rank (4 stages), ")
    for ending in ("json", "csv"):
        plan = str(tmp_path / f"plan.{ending}")
        out = output_of(capsys, "tune", recorded, "--chunks", "2", "--save", plan).splitlines()
        assert out[-2].startswith("recommended: zbv")
        assert out[-1].startswith(f"saved: {plan}, ")
        assert find_schedule(plan).num_chunks == 2
    assert main(["tune", recorded, "--save", "plan.txt"]) == 2
    assert "--save plan.txt: a plan is saved to a file that ends with .json or .csv" in capsys.readouterr().err
    assert main(["tune", recorded, "--memory-limit", "1"]) == 2
    assert "no schedule fits 1 microbatches of a whole rank: the smallest needs 2" in capsys.readouterr().err
    out = output_of(capsys, "tune", recorded, "--slices", "1", "2", "4", "--memory-limit", "1.5").splitlines()
    rows = {line.rpartition(" slices")[0]: line.split() for line in out[4:-3] if " slices" in line}
    assert rows.keys() == {f"{name}, {n}" for name in ("seq1f1b", "seq_interleaved_1f1b", "seq_zb1p") for n in (2, 4)}
    assert float(rows["seq1f1b, 2"][4]) < float(rows["seq1f1b, 4"][4]) < 158  # more messages, each of 2 ms
    assert out[-1].startswith(
        "recommended: seq_interleaved_1f1b with 2 chunks per rank (4 stages) and 4 slices per sequence, "
    )
    forwards = tmp_path / "forwards.json"
    Timeline("inference", [as_measured(make_plan("inference", 2, 4).simulate())]).save(forwards)
    assert main(["tune", str(forwards)]) == 2
    assert "has forwards only" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["show", "1f2b"], "there is no schedule '1f2b'"),
        (["show", "1f1b"], "--pp and --microbatches are needed"),
        (["compare", "--pp", "2", "--microbatches", "4", "--exchange", "2"], "exchange is a part of forward, got"),
        (
            ["show", "zbv", "--pp", "4", "--microbatches", "8", "--chunks", "3"],
            "zbv runs 2 chunk(s) of the model on each rank, got 3: give it 2, one for each stage that stages_for_rank "
            "lists, or choose a schedule that runs 3, such as interleaved_1f1b.",
        ),
        (["show", "1f1b", "--pp", "0", "--microbatches", "4"], "at least 1 rank and 1 microbatch, got 0 and 4"),
        (["show", "1f1b", "--pp", "2", "--microbatches", "4", "--steps", "0"], "num_steps must be at least 1, got 0"),
        (["show", "nothing.csv"], "No such file"),
        (["show", "nothing.json"], "No such file"),
        (["tune", "nothing.json"], "No such file"),
        (["compare", "--pp", "2", "--microbatches", "0"], "no schedule runs 0 microbatches on 2 ranks"),
        (
            ["show", "1f1b", "--pp", "2", "--microbatches", "1000000000"],
            "2 x 1000000000 x 1 x 1 forwards (ranks, microbatches",
        ),
        (
            ["show", "1f1b", "--pp", "2", "--microbatches", "4", "--steps", "1000000000"],
            "the product is at most 1,000,000",
        ),
        (
            ["compare", "--pp", "1000000000", "--microbatches", "1"],
            "no schedule runs 1 microbatches on 1000000000 ranks",
        ),
        (["show", "1f1b", "--pp", "2", "--microbatches", "4", "--width", "1000000000"], "a --width of 10,000 at most"),
        (["show", "1f1b", "--pp", "2", "--microbatches", "4", "--forward", "inf"], "must be a finite number from 0 on"),
        (
            ["show", "1f1b", "--pp", "2", "--microbatches", "4", "--forward", "1e308"],
            "a step takes inf, which cannot be",
        ),
        (
            ["show", "inference", "--pp", "2", "--microbatches", "4", "--forward", "0"],
            "a step takes 0, which cannot be",
        ),
        (["compare", "--pp", "2", "--microbatches", "4", "--memory-limit", "nan"], "a number of microbatches, got nan"),
        (["compare", "--pp", "2", "--microbatches", "4", "--max-pending-weights", "-1"], "of Ws from 0 on, got -1"),
        (["tune", __file__], "is no measured timeline: record one with config.record_timeline"),
    ],
)
def test_what_is_wrong_is_said(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


def test_the_version_and_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert output_of(capsys, "--version") == f"megapipe {megapipe.__version__}\n"
    shown = output_of(capsys)
    assert shown == output_of(capsys, "--help")
    for command in ("show", "compare", "tune", "completion"):
        assert f"\n    {command}" in shown
    assert main(["sing"]) == 2
    assert "invalid choice: 'sing'" in capsys.readouterr().err


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_a_shell_completes_the_command(capsys: pytest.CaptureFixture[str], shell: str) -> None:
    pytest.importorskip("shtab")
    script = output_of(capsys, "completion", shell)
    for word in ("compare", "--memory-limit", "--unsplit"):
        assert word in script
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=script, text=True, check=True)


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_a_shell_completes_schedules_and_files(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("shtab")
    (tmp_path / "zb_measured.json").touch()
    script = output_of(capsys, "completion", "bash")
    script += 'COMP_WORDS=(megapipe show zb) COMP_CWORD=2\n_shtab_megapipe\nprintf "%s\\n" "${COMPREPLY[@]}"\n'
    shown = subprocess.run(["bash"], input=script, text=True, check=True, cwd=tmp_path, capture_output=True).stdout
    assert set(shown.split()) == {"zb1p", "zb2p", "zbv", "zb_measured.json"}


def test_without_shtab_the_extra_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "bash"]) == 2
    assert "this needs shtab: pip install 'megapipe[completion]'" in capsys.readouterr().err


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


def test_a_timeline_of_a_plan_that_cannot_be(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    step = {"begin": 0, "end": 2, "actions": [[0, "F", 10**9, 0, 1], [0, "BW", 10**9, 1, 2]], "waits": []}
    path.write_text(json.dumps({"timeline": "1f1b", "unit": "ms", "steps": [[step]]}))
    for command in ("show", "tune"):
        assert main([command, str(path)]) == 2
        assert "has 0RECV_F1000000000 on rank 0 where 0RECV_F0 is next" in capsys.readouterr().err


def test_pictures(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    svg, png, html = (tmp_path / f"plan.{ending}" for ending in ("svg", "png", "html"))
    sizes = ("--pp", "2", "--microbatches", "3", "--p2p", "0.5")
    output_of(capsys, "show", "1f1b", *sizes, "--svg", str(svg), "--png", str(png), "--html", str(html))
    texts = re.findall(r">([^<>]+)</text>", svg.read_text())
    assert texts.count("0") >= 4  # forward and backward on two ranks
    assert "rank 0" in texts
    assert png.read_bytes().startswith(b"\x89PNG")
    assert "1f1b: 2 ranks, 3 microbatches" in html.read_text()
    assert '[0,"BW",2,0,' in html.read_text()


def test_actions_that_take_no_time_are_drawn(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The width of a picture is counted in short actions: Ws of no time made it infinite."""
    svg = tmp_path / "plan.svg"
    output_of(capsys, "show", "zb1p", "--pp", "2", "--microbatches", "3", "--backward-weight", "0", "--svg", str(svg))
    assert ">weight gradient</text>" in svg.read_text()


def test_slices_are_shown(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    sizes = ["--pp", "4", "--microbatches", "8", "--slices", "4"]
    page = tmp_path / "plan.json"
    assert main(["show", "seq1f1b", *sizes, "--width", "500", "--json", str(page)]) == 0
    shown = capsys.readouterr().out
    assert "3B0.3" in shown
    assert "bubble     8.6% on every rank" in shown
    assert "held       1.75 1.5 1.25 1 (microbatches at once, a slice as 1/4)" in shown
    assert main(["show", str(page), "--width", "500"]) == 0
    assert capsys.readouterr().out == shown
    assert main(["compare", *sizes]) == 0
    compared = capsys.readouterr().out
    assert "seq1f1b, 4 slices " in compared
    assert "\n1f1b " in compared
    assert main(["compare", *sizes[:-2]]) == 0
    assert "seq1f1b" not in capsys.readouterr().out  # with one slice it is 1f1b
    assert main(["show", "zbv", *sizes]) == 2
    assert "zbv cannot cut sequences, got 4 slices" in capsys.readouterr().err


def test_offload(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    sizes = ("--pp", "4", "--microbatches", "16")
    path = str(tmp_path / "plan.csv")
    out = output_of(capsys, "show", "1f1b", *sizes, "--offload", "1", "--csv", path)
    assert "step       57," in out  # as without
    assert "held       2 2 2 1 (" in out
    for forward, held in (("1", "3 4 3 2"), ("0.2", "3 3 3 2")):  # by the times that are given
        out = output_of(capsys, "show", "zb1p", *sizes, "--offload", "1.5", "--forward", forward)
        assert f"held       {held} (" in out
    compared = output_of(capsys, "compare", *sizes, "--offload", "1", "--slices", "4")
    assert "seq1f1b: activations of seq1f1b are not moved" in compared
    plan = make_plan("zb1p", 4, 16)
    Timeline("zb1p", [as_measured(plan.simulate())]).save(tmp_path / "recorded.json")
    tuned = output_of(capsys, "tune", str(tmp_path / "recorded.json"), "--offload", "1", "--save", path)
    assert "as the schedule has it" in tuned
    assert "0O0" in Path(path).read_text()


def test_recomputation(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    sizes = ("--pp", "4", "--microbatches", "8")
    out = output_of(capsys, "show", "1f1b", *sizes, "--recompute", "--csv", str(tmp_path / "plan.csv"))
    assert "R recomputation" in out
    assert "held       1 on every rank" in out
    assert "3R0" not in (tmp_path / "plan.csv").read_text()  # whose B follows its F at once
    assert "2R0" in (tmp_path / "plan.csv").read_text()
    for time, step in (("1", 39), ("0.5", 35.5)):
        assert f"step       {step:g}," in output_of(capsys, "show", "1f1b", *sizes, "--recompute", time)
    (line,) = [line for line in output_of(capsys, "compare", *sizes, "--recompute").splitlines() if line[:5] == "zb1p "]
    assert line.split()[2:8] == ["1", "35", "1.045x", "31.4%", "2", "48"]
    plan = make_plan("1f1b", 4, 8, settings=Settings(recompute=True))
    Timeline("1f1b", [as_measured(plan.simulate(recompute=0.5))]).save(tmp_path / "recorded.json")
    tuned = output_of(capsys, "tune", str(tmp_path / "recorded.json"), "--recompute")
    (line,) = [line for line in tuned.splitlines() if line.startswith("1f1b ")]
    assert line.split()[1:3] == ["1", "35.5"]

"""What commands tell where they take long."""

import io
import pkgutil
import sys
import threading

import pytest

from megapipe.analysis import cli, progress


class Heard(io.StringIO):
    """Stderr that says when something was written."""

    def __init__(self) -> None:
        super().__init__()
        self.event = threading.Event()

    def write(self, text: str) -> int:
        number = super().write(text)
        if text.endswith("\n"):
            self.event.set()
        return number


MODEL = "num_hidden_layers=2 hidden_size=64 num_attention_heads=2 vocab_size=64"
JOB = "--devices=1 --sequence=64 --batch=1 --memory=1GB --flops=1e12 --efficiency=0.5 --top=1"


@pytest.mark.parametrize(
    ("command", "works", "line"),
    [
        (
            "compare --pp=2 --microbatches=2",
            "compare_command.record_plan",
            "megapipe compare: playing gpipe on 2 ranks with 2 microbatches; 0 plans are done ...",
        ),
        (f"fit {MODEL} {JOB}", "fit.estimate", "megapipe fit: 0 of 2 layouts tried, 0 kinds fit ..."),
    ],
)
def test_a_command_that_takes_long_says_what_it_does(
    command: str, works: str, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`compare --pp 64 --microbatches 512` took minutes without a word."""
    heard, original = Heard(), pkgutil.resolve_name(f"megapipe.analysis.{works}")

    def slow(*arguments: object) -> object:
        assert heard.event.wait(60)
        return original(*arguments)

    monkeypatch.setattr(f"megapipe.analysis.{works}", slow)
    monkeypatch.setattr(progress, "PATIENCE", 0.01)
    monkeypatch.setattr(sys, "stderr", heard)
    assert cli.main(command.split()) == 0
    assert line in heard.getvalue().splitlines()


def test_nothing_is_said_of_what_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    heard = Heard()
    monkeypatch.setattr(sys, "stderr", heard)
    command = cli.COMMANDS["status"]._replace(run=lambda args: progress.doing("waiting"))
    monkeypatch.setitem(cli.COMMANDS, "status", command)
    assert cli.main(["status"]) == 0
    assert not any(thread.name == progress.NAME for thread in threading.enumerate())
    assert not progress._now
    assert not heard.getvalue()

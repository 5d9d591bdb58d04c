"""A few of the forwards that `make fuzz` draws, so that what draws them stays at work."""

import runpy
import sys
from pathlib import Path

import pytest
from fuzz import forwards
from fuzz.forwards import WAYS, Forward, draw_forward, run_forward


@pytest.mark.parametrize("number", range(4))
def test_right_or_refused(number: int) -> None:
    assert run_forward(draw_forward(1, number)) is None


def test_what_is_wrong_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    run = forwards.run
    monkeypatch.setattr(forwards, "run", lambda net, train: run(net, train) if isinstance(net, forwards.Net) else {})
    assert "no losses" in str(
        run_forward(Forward(WAYS[0], ("made[0] * 1.0", "torch.tanh(own(nn.Linear, D, D)(made[-1]))")))
    )


def test_the_fuzzer_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows take nothing of `cases.parts`, so that only `make fuzz` saw what had been renamed under it."""
    monkeypatch.setattr(sys, "path", ["", *sys.path])  # of which it exchanges the first, as of a script
    assert runpy.run_path(str(Path(__file__).with_name("__main__.py")), run_name="fuzzer")["main"]

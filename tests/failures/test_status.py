"""Where every rank is, as the command tells it."""

import contextlib
import io
import os
import socket
import threading
import time
from typing import Any
from unittest import mock

import pytest
from tools.models import build, forward_step, run
from tools.ranks import RankPool
from torch.distributed.distributed_c10d import _get_default_store

from megapipe.analysis.cli import main
from megapipe.analysis.status_command import _within
from megapipe.failures import TIMING, board, read_positions


def table_of_a_job_that_hangs(rank: int) -> list[str]:
    """Of two pipelines of two ranks. Rank 1 stands still in a forward, and asks where everybody is."""
    with mock.patch.object(TIMING, "beat", 0.1):
        chunks = build("1f1b", 2, 4)
        run("1f1b", chunks, 2)
        store = _get_default_store()
        root = board._root(store)
        address = f"{root.host}:{root.port}"
        output = io.StringIO()

        def step(data_iterator: Any, model: Any) -> Any:
            if rank == 1 and not output.getvalue():
                end = time.monotonic() + 60
                while not is_waited_for(read_positions(address)) and time.monotonic() < end:
                    time.sleep(0.05)
                with contextlib.redirect_stdout(output), mock.patch.dict(os.environ, COLUMNS="200"):
                    assert main(["status", address]) == 0
                store.set("asked", "")
            return forward_step(data_iterator, model)

        run("1f1b", chunks, 2, forward_step_func=step)
        while not store.check(["asked"]):
            time.sleep(0.05)
    return output.getvalue().splitlines()


def is_waited_for(positions: list[Any]) -> bool:
    """By rank 3, while rank 1 is in its forward and the others are through. Signs of life may be older than that."""
    places = [(position.get("step"), position["at"]) for position in positions]
    return places == [(2, None), (2, "0F0"), (2, None), (2, "1F0")] and positions[3]["awaited"] is not None


def test_a_job_that_hangs_says_where_it_is(ranks: RankPool) -> None:
    lines = ranks.run(4, table_of_a_job_that_hangs)[1]
    rows = [" ".join(line.split()) for line in lines]
    assert rows[0] == "rank replica pipeline rank step at for waits for last sign process"
    assert rows[1].startswith("0 0 0 2 outside any step ")
    assert rows[2].startswith("1 1 0 2 0F0 ")
    assert rows[3].startswith("2 0 1 2 outside any step ")
    assert rows[4].startswith("3 1 1 2 1F0 ")
    assert " the forward input of microbatch 0 from rank 1 0 s ago " in rows[4]
    assert rows[5].startswith("held up by rank 1, at 0F0 for ")
    assert rows[6].startswith("megapipe status localhost:")


def test_an_address_without_a_job(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["status", "nowhere"]) == 2
    assert "is HOST:PORT, like MASTER_ADDR:MASTER_PORT, got 'nowhere'" in capsys.readouterr().err
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(free.getsockname()[1]))
        assert main(["status"]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"megapipe status: nothing answers at 127.0.0.1:{free.getsockname()[1]} ([Errno 111]")
        assert "check that the job runs, and that this is its MASTER_ADDR and MASTER_PORT" in line
    silence = threading.Event()
    with pytest.raises(ValueError, match=r"what listens at host:1 does not answer as a job's store within 0\.05 s"):
        _within(0.05, "host:1", lambda address: silence.wait())
    silence.set()

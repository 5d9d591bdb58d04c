"""Failures that one pipeline does not hear of by itself: those of replicas, in collectives, and of silent ranks."""

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tools.failing import heard, killed, raising
from tools.models import build, forward_step, run
from tools.ranks import RankPool, on_ranks
from torch.distributed import HashStore

from megapipe import PipelineError, TiedWeights, clip_grad_norm_
from megapipe.all_ranks import AllRanks
from megapipe.failures import TIMING, Board, board, check_failures
from megapipe.failures.board import Failure
from megapipe.training import GradientReducer


def of_replica(other: int) -> str:
    """The beginning of a sentence about another replica, of two pipelines of two ranks."""
    return f"in the pipeline of ranks {other}, {other + 2}: "


@pytest.mark.parametrize("where", ["own collective in a step", "clipping"])
@on_ranks(4)
def test_a_replica_that_fails_is_heard_of_everywhere(rank: int, where: str) -> None:
    """Replicas did not hear of each other's failures: a rank in a collective with the failed one waited until the
    process group's own time limit, half an hour. Rank 2 is the last of the replica that has rank 0 too."""
    chunks = build("1f1b", 2, 4)
    config = chunks[0].config

    def train() -> None:
        run("1f1b", chunks, 4, forward_step_func=raising(KeyError("no such thing")) if rank == 2 else forward_step)
        while where == "clipping":  # which needs nothing from the other replica
            clip_grad_norm_(chunks, 1.0)

    with mock.patch.object(TIMING, "until_abort", 0.5):
        if where == "own collective in a step":
            config.finalize_model_grads_func = lambda *args: dist.all_reduce(torch.ones(1))
        text = heard(train, KeyError)
    told = "rank 1 failed at 1F0: KeyError: 'no such thing'"
    assert text == [told, of_replica(0) + told, "'no such thing'", of_replica(0) + told][rank]


@on_ranks(4)
def test_a_failure_ends_the_pipelines_of_all(rank: int) -> None:
    """Also where several ranks fail in one step. Each raises its own error, or that of another, and later calls say how
    to start again."""
    chunks = build("1f1b", 2, 4)

    def train() -> None:
        run("1f1b", chunks, 4, forward_step_func=raising(KeyError("no such thing")) if rank in (0, 3) else forward_step)
        while True:  # until it has heard of the failure; in a collective it would be aborted
            check_failures()
            time.sleep(0.01)

    with pytest.raises((PipelineError, KeyError)):
        train()
    for call in (lambda: run("1f1b", chunks, 4), check_failures, lambda: clip_grad_norm_(chunks, 1.0)):
        with pytest.raises(PipelineError, match=r"has ended with a failure \(.*no such thing.*\): start all processes"):
            call()


@on_ranks(2)
def test_a_rank_that_fails_while_another_sums_tied_weights(rank: int) -> None:
    """A rank that was in a collective of torch's, within its step, waited for the failed one until torch's own time
    limit."""
    chunks = build("1f1b", 2, 4)
    tied = TiedWeights(chunks, ["layers.0.norm.weight", "layers.2.norm.weight"])

    def finalize(*args: object) -> None:
        if rank == 1:
            time.sleep(0.2)  # the other is in the collective
            raise KeyError("no such thing")
        tied.sum_gradients()

    chunks[0].config.finalize_model_grads_func = finalize
    with mock.patch.object(TIMING, "until_abort", 0.5):
        text = heard(lambda: run("1f1b", chunks, 4), KeyError)
    assert text == ["rank 1 failed at the end of its step: KeyError: 'no such thing'", "'no such thing'"][rank]
    with pytest.raises(PipelineError, match=r"has ended with a failure .*no such thing.*: start all processes again"):
        run("1f1b", chunks, 4)


@on_ranks(2)
def test_an_exception_that_ends_a_process_between_steps_is_told(rank: int) -> None:
    """The others learned of it by a connection that broke, without the reason, or not at all."""
    with mock.patch.object(TIMING, "until_abort", 0.5):
        chunks = build("1f1b", 2, 4)
        run("1f1b", chunks, 4)
    if rank == 1:
        with mock.patch.object(sys, "last_value", ValueError("no more data"), create=True):
            with mock.patch.object(sys, "ps1", ">>> ", create=True):
                board._tell_end()  # of an interpreter in which somebody has made a mistake
            check_failures()
            board._tell_end()  # as Python does at its end, after it has printed the exception
    else:
        assert heard(lambda: clip_grad_norm_(chunks, 1.0)) == "global rank 1 ended with ValueError: no more data"


def a_replica_is_killed(rank: int) -> str:
    with mock.patch.object(TIMING, "until_abort", 0.5):
        chunks = build("1f1b", 2, 4)
        reducer = GradientReducer(chunks)
        run("1f1b", chunks, 4)
        chunks[0].config.finalize_model_grads_func = reducer.finish
        return heard(lambda: run("1f1b", chunks, 4, forward_step_func=killed if rank == 2 else forward_step))


def test_a_killed_rank_reaches_its_replicas(ranks: RankPool) -> None:
    messages = ranks.run(4, a_replica_is_killed, errors=True)
    assert messages[2] is None
    assert "rank 0 lost its connection" in messages[0]
    for rank in (0, 1, 3):
        assert "rank 1 is silent: its process ended without a word (killed, or out of memory?)" in messages[rank]
        assert messages[rank].startswith("" if rank == 0 else of_replica(0))


@on_ranks(2)
def test_a_rank_that_stands_still_is_given_up(rank: int) -> None:
    """Long before `config.timeout`, since a rank that is only slow gives signs of life. One that stood still after its
    first sign of life was never given up: that sign may have been left behind by an earlier start, it was thought."""
    with mock.patch.multiple(TIMING, beat=0.1, until_abort=0.5):
        chunks = build("1f1b", 2, 4)
        own = torch.tensor([os.getpid()])
        pids = [torch.zeros(1, dtype=torch.long) for _ in range(2)]
        dist.all_gather(pids, own)
        run("1f1b", chunks, 4)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
            return
        text = heard(lambda: run("1f1b", chunks, 4))
        os.kill(int(pids[1]), signal.SIGCONT)
    assert re.match(r"global rank 1 on \S+ has given no sign of life for [\d.]+ s, and others wait: its process", text)


@on_ranks(2)
def test_threads_that_begin_at_once_have_one_board(rank: int) -> None:
    """Each made one, and a rank took those of another for its own: failures were told on a board that nobody read."""
    found: list[Board | None] = []
    make = Board.__init__

    def slowly(*arguments: Any) -> None:
        time.sleep(0.1)
        make(*arguments)

    with mock.patch.object(Board, "__init__", slowly):
        threads = [threading.Thread(target=lambda: found.append(Board.current())) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found[0] is found[1]


@pytest.mark.parametrize(
    ("text", "is_lost"),
    [
        ("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [::1]:4587", True),
        ("Application timeout caused pair closure", True),
        ("cannot open /data/gloo/part1", False),
    ],
)
def test_errors_of_connections(text: str, is_lost: bool) -> None:
    """A user's error that spoke of a folder called gloo was never shown."""
    assert board.is_connection_error(RuntimeError(text)) == is_lost


@on_ranks(2)
def test_odd_exceptions_reach_all_ranks(rank: int) -> None:
    """A rank whose exception had no text took part in nothing, and StopIteration became an error of Python's."""

    class OddError(Exception):
        def __str__(self) -> str:
            raise KeyError

    ranks = AllRanks("a test", dist.group.WORLD)

    def together(error: Exception) -> None:
        with ranks.together():
            if rank == 1:
                raise error

    for error, text in ((OddError(), "OddError: .no text: its __str__ raises"), (StopIteration("no more"), "no more$")):
        with pytest.raises((RuntimeError, StopIteration), match=text):
            together(error)


@pytest.fixture
def told() -> Iterator[Board]:
    """The board of a rank that has just heard of a failure. The test calls what the helper thread calls."""
    with mock.patch.object(board, "abort_process_groups"):
        one = Board(0, 2, HashStore(), has_ended=lambda: False, begin=lambda task: None)
        one.publish(Failure("rank 1 failed"))
        assert one.failure is not None
        yield one


def test_a_process_that_was_stopped_has_time_to_raise(told: Board) -> None:
    """The three seconds of a rank that heard of a failure ran on while its whole process stood still: then its helper
    thread aborted the process groups before the main thread came to raise."""
    with mock.patch.object(time, "monotonic", return_value=time.monotonic() + 10):
        told.watch()
        assert not told.has_aborted
    for _ in range(int(TIMING.until_abort / TIMING.tick) + 1):
        told.watch()
    assert told.has_aborted


def test_a_rank_that_has_raised_aborts_nothing(told: Board) -> None:
    """What it does after that, as saving its logs, may need its process groups."""
    with pytest.raises(PipelineError, match="rank 1 failed"):
        told.check()
    for _ in range(int(TIMING.until_abort / TIMING.tick) + 1):
        told.watch()
    assert not told.has_aborted

"""One failure anywhere becomes one clear error everywhere, within seconds, and ends the pipeline."""

import re
import threading
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tools.failing import calling, heard, raising, wait_for_failure
from tools.models import SEQUENCE, Stage, batches, build, forward_step, run
from tools.ranks import on_ranks, start_again
from torch.distributed import HashStore
from torch.distributed.distributed_c10d import _get_default_store

from megapipe import PipelinedGradScaler, PipelinedOptimizer, PipelineError, StageInfo, clip_grad_norm_
from megapipe.failures import TIMING, Board, InterruptibleStore, Watchdog, helper_thread
from megapipe.runtime.session import Session
from megapipe.training import GradientReducer, TiedWeights

PP = 4


@on_ranks(3)
def test_an_exception_on_one_rank_reaches_all(rank: int) -> None:
    chunks = build("1f1b", 3, 3)
    run("1f1b", chunks, 4)
    step = raising(KeyError("no such thing"), 3) if rank == 1 else forward_step
    with pytest.raises(KeyError if rank == 1 else PipelineError) as caught:
        run("1f1b", chunks, 6, forward_step_func=step)
    message = "rank 1 failed at 1F3: KeyError: 'no such thing'"
    assert rank == 1 or str(caught.value) == message
    for _ in range(2):
        assert heard(lambda: run("1f1b", chunks, 4)) == (
            f"the pipeline has ended with a failure ({message}): start all processes again, as torchrun does, and go "
            "on from the last checkpoint."
        )


@on_ranks(PP)
def test_a_wait_that_runs_out_says_where_every_rank_is(rank: int) -> None:
    chunks = build("1f1b", PP, 4, timeout=4.0)  # time enough for the first step on a busy machine
    run("1f1b", chunks, 4)
    step = calling(wait_for_failure, 1) if rank == 1 else forward_step
    message = heard(lambda: run("1f1b", chunks, 4, forward_step_func=step))
    assert "waited longer than 4 s for a message" in message
    assert "rank 1 is at 1F1" in message
    assert "rank 2 waits for the forward input of microbatch 1 from rank 1, which is at 1F1" in message
    assert "rank 0 waits for the output gradient of microbatch 0 from rank 1, which is at 1F1" in message
    assert "rank 3 waits for the forward input of microbatch 1 from rank 2, which is at 2F1" in message


@on_ranks(3)
def test_a_rank_that_does_not_call_the_schedule(rank: int) -> None:
    chunks = build("1f1b", 3, 6, timeout=1.0)
    if rank != 2:
        message = heard(lambda: run("1f1b", chunks, 4))
        assert "waited 1 s for rank 2 to do so too" in message
        assert "rank 2 is still to begin any step. Does every rank call the schedule equally often?" in message
    dist.barrier()


def returning(make: Any) -> dict[str, Any]:
    """A forward_step_func that returns what is made of the output."""
    return {"forward_step_func": lambda it, model: make(forward_step(it, model)[0])}


BAD_INPUT: list[tuple[int, Any, str]] = [
    (1, {"data_iterator": [*batches(2)]}, "data_iterator ended at microbatch 2 of 4 (stage 1)"),
    (1, returning(lambda out: (out, lambda out: next(iter([])))), "data_iterator ended at microbatch 0 of 4 (stage 1)"),
    (1, {"model": torch.nn.Linear(2, 2)}, "the model of stage 1 (Linear) has no set_input_tensor(input)"),
    (1, {"model": [Stage(StageInfo(1, 2), 4) for _ in range(2)]}, "runs 1 chunk(s) of the model on each rank, got 2"),
    (1, returning(lambda out: out), "must return (output, loss_func), but on stage 1 it returned a tensor"),
    (1, returning(lambda out: (out, None)), "on the last stage its loss_func is None, which cannot be called"),
    (1, returning(lambda out: (out, lambda out: out)), "or (loss, num_tokens, report), but it returned a tensor"),
    (1, returning(lambda out: (out, lambda out: (out, {}))), "but it is a tensor of shape [5, 2, 11]"),
    (
        1,
        returning(lambda out: (out, lambda out: (out.sum(), torch.ones(3), {}))),
        "loss_func must return one number of tokens, but it is a tensor of shape [3]",
    ),
    (1, {"scale": float}, "config.grad_scale_func must return the scaled loss, but it is a float"),
    (
        0,
        {"data_iterator": [*batches(4, seq_lengths=[SEQUENCE, SEQUENCE, SEQUENCE + 2, SEQUENCE])]},
        "stage 0 returned float32[7, 2, 16] for microbatch 2, but stage 1 expects float32[5, 2, 16]",
    ),
    (
        0,
        returning(lambda out: ([out, set()], None)),
        "the output of stage 0 for microbatch 0 cannot be sent on: it is a list that holds a set",
    ),
]
"""The rank that does something wrong, in a way that it alone can see; what; and what is said of it."""


@on_ranks(2)
def test_bad_input(rank: int) -> None:
    for by, arguments, text in BAD_INPUT:
        chunks = build("1f1b", 2, 4)
        given = {"model": chunks, "data_iterator": batches(4), **(arguments if rank == by else {})}
        given["data_iterator"] = iter(given["data_iterator"])
        chunks[0].config.grad_scale_func = given.pop("scale", None)
        with pytest.raises((ValueError, TypeError, PipelineError), match=re.escape(text)) as caught:
            run("1f1b", num_microbatches=4, **given)
        assert (caught.type is PipelineError) == (rank != by)
        assert rank == by or str(caught.value).startswith(f"rank {by} failed at")
        start_again()


@on_ranks(2)
def test_a_rank_that_dies_while_connecting(rank: int) -> None:
    """The others waited for it inside the transport, which gave up a minute after `config.timeout`, in words of its
    own: nothing could end that wait, and meanwhile nobody else got at the store."""
    chunks = build("1f1b", 2, 4)
    run("1f1b", chunks, 2)  # which takes its time on a busy machine
    chunks[0].config.timeout = 2.0  # with which ranks connect anew
    store = _get_default_store()

    def dead(session: Session, *args: object) -> None:
        session.watchdog.close()  # no thread of its process looks at the store any more
        store.wait(["told"])
        raise KeyboardInterrupt

    with mock.patch.object(Session, "channels", dead if rank == 1 else Session.channels):
        message = heard(lambda: run("1f1b", chunks, 2), KeyboardInterrupt)
    store.set("told", "1")
    assert rank == 1 or message.startswith("rank 0 waited longer than 2 s for the others to connect: ")
    assert rank == 1 or "rank 1 is silent: its process ended without a word" in message


@on_ranks(2)
def test_a_rank_that_fails_within_its_connecting(rank: int) -> None:
    """Gloo waits for each rank that has given its address, and nothing ended that wait: a rank that heard of another's
    failure after it had given its own left the others there, until the transport gave up."""
    chunks = build("1f1b", 2, 4)
    patient_wait = InterruptibleStore.wait

    def wait(self: InterruptibleStore, keys: list[str], *args: Any) -> None:
        if any("host" in key for key in keys):
            time.sleep(0.2)  # the other is past the store
            raise KeyError("no such thing")
        patient_wait(self, keys, *args)

    with (
        mock.patch.object(InterruptibleStore, "wait", wait if rank == 1 else patient_wait),
        pytest.raises((PipelineError, KeyError)),
    ):
        run("1f1b", chunks, 2)


class SilentError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@on_ranks(2)
def test_the_text_of_an_error_is_told(rank: int) -> None:
    """Where asking for the text raised, nobody was told. And the watchdog wrote its own time-out into the store under
    the name of Python's TimeoutError: when the caller's code raised one, the other ranks reported a message that had
    not come."""
    for error, text in (
        (SilentError(), "SilentError: (no text: its __str__ raises RuntimeError)"),
        (TimeoutError("storage does not answer"), "TimeoutError: storage does not answer"),
    ):
        with pytest.raises(PipelineError if rank else type(error)) as caught:
            run("1f1b", build("1f1b", 2, 4), 2, forward_step_func=forward_step if rank else raising(error))
        assert rank == 0 or str(caught.value) == f"rank 0 failed at 0F0: {text}"
        start_again()


@on_ranks(2)
def test_a_rank_that_skips_a_step(rank: int) -> None:
    """It was reported as being at the end of its step, as if that were still under way."""
    chunks = build("1f1b", 2, 4, timeout=3.0)  # time enough for the first step on a busy machine
    run("1f1b", chunks, 2)
    if rank == 0:
        message = heard(lambda: run("1f1b", chunks, 2))
        assert message.startswith("rank 0 waited longer than 3 s for a message: rank 0 waits for ")
        assert "rank 1 is outside any step, after 1 of them. Does every rank call the schedule equally" in message
    dist.barrier()


@on_ranks(2)
def test_a_rank_that_has_heard_of_a_failure_computes_no_further(rank: int) -> None:
    """Failures were looked at in waits only. A rank that had nothing to wait for went on with what was in vain."""
    forwards: list[int] = []

    def step(data_iterator: Any, model: Any) -> Any:
        forwards.append(rank)
        if rank == 1:
            raise KeyError("no such thing")
        if len(forwards) == 2:
            wait_for_failure()
        return forward_step(data_iterator, model)

    heard(lambda: run("gpipe", build("gpipe", 2, 4), 8, forward_step_func=step), KeyError)
    assert len(forwards) == (1 if rank else 2)


def behind_the_step(chunks: list[Stage]) -> list[Callable[[], Any]]:
    """What changes weights or waits for other ranks once a step is through."""
    optimizer = PipelinedOptimizer(chunks, torch.optim.SGD)
    reducer = GradientReducer(chunks)
    scaler = PipelinedGradScaler("cpu")
    return [
        lambda: clip_grad_norm_(chunks, 1.0),
        TiedWeights(chunks, ["layers.0.norm.weight"]).sum_gradients,
        lambda: reducer.finish(chunks),
        optimizer.step,
        lambda: scaler.unscale_(optimizer),
    ]


@pytest.mark.parametrize("number", range(5))
@on_ranks(2)
def test_no_optimizer_step_after_a_failure_elsewhere(rank: int, number: int) -> None:
    """A rank that had left the step before another failed in it heard of that in its next one only. Until then it
    stepped its optimizer, alone, or waited in a collective for the one that had failed."""

    def finalize(*args: object) -> None:
        if rank == 0:
            dist.barrier()  # rank 1 has left its step
            raise KeyError("no such thing")

    chunks = build("1f1b", 2, 4, finalize_model_grads_func=finalize)
    call = behind_the_step(chunks)[number]
    weights = [p.detach().clone() for chunk in chunks for p in chunk.parameters()]
    if rank == 0:
        with pytest.raises(KeyError):
            run("1f1b", chunks, 4)
    else:
        run("1f1b", chunks, 4)
        dist.barrier()
        wait_for_failure()
        with pytest.raises(PipelineError, match="rank 0 failed at the end of its step: KeyError: 'no such thing'"):
            call()
    assert all(torch.equal(p, q) for p, q in zip(weights, [p for chunk in chunks for p in chunk.parameters()]))


@on_ranks(2)
def test_the_watchdog_ends_with_torch_distributed(rank: int) -> None:
    """The watchdog went on asking the store after torch.distributed had been shut down. When the process that held the
    store ended first, the others printed a page of warnings at the end of every run."""
    chunks = build("1f1b", 2, 4)
    run("1f1b", chunks, 2)
    assert helper_thread._tasks
    dist.destroy_process_group()
    while helper_thread._tasks:
        time.sleep(0.01)


@on_ranks(2)
def test_a_time_limit_may_be_raised(rank: int) -> None:
    """The transport kept the time limit of the first step. A wait that a later step allowed was then reported as a
    process that had ended without a word."""

    def slow_step(data_iterator: Any, model: Any) -> Any:
        time.sleep(1.3 if rank == 0 else 0)
        return forward_step(data_iterator, model)

    with mock.patch.object(TIMING, "beyond_limit", 0):  # the transport waits as long as the watchdog
        chunks = build("1f1b", 2, 4, timeout=1.0)
        run("1f1b", chunks, 1)
        chunks[0].config.timeout = 20.0
        run("1f1b", chunks, 1, forward_step_func=slow_step)


def watchdog_of(rank: int, store: HashStore, abort: Callable[[], None] = lambda: None, now: Any = None) -> Watchdog:
    """Of a pipeline of two ranks without torch.distributed. The test calls what the helper thread calls."""
    board = Board(rank, 2, store, has_ended=lambda: False, begin=lambda task: None)
    own = InterruptibleStore(store, rank, 2, check_failure=lambda: None)
    ends = {"find_error": lambda: None, "has_ended": lambda: False}
    return Watchdog(board, "ranks 0, 1", [0, 1], own, abort, **ends, now=now or time.monotonic)


@pytest.mark.parametrize(("awaited", "order"), [(None, ["raise", "abort"]), ("a message", ["abort", "raise"])])
def test_a_rank_that_computes_raises_before_its_transport_is_aborted(awaited: str | None, order: list[str]) -> None:
    """The helper thread aborted communicators at once. A main thread that was just sending then used one that had been
    freed. One that waits for a message is freed by the abort only."""
    store = HashStore()
    found: list[str] = []
    other, own = watchdog_of(1, store), watchdog_of(0, store, lambda: found.append("abort"))
    with pytest.raises(KeyError), mock.patch.object(TIMING, "for_others", 0.0), other.step():
        raise KeyError("no such thing")
    own.progress.step, own.progress.action = 1, "the start of its step"
    own.progress.awaited = awaited
    helper = threading.Thread(target=own.board.watch)
    helper.start()
    while own.board.failure is None or (awaited and not found):
        time.sleep(0.001)
    found.append("raise")
    with pytest.raises(PipelineError, match="rank 1 failed at the start of its step: KeyError"):
        own.check()
    helper.join()
    assert found == order


def test_waits_of_different_steps_are_not_one_long_wait() -> None:
    """The watchdog took a wait for the same message, seen at the same place, for one and the same wait. A healthy rank
    that waits for its first input in every step was given up once the steps added up to the time limit."""
    now = [0.0]
    own = watchdog_of(0, HashStore(), now=lambda: now[0])
    progress, own.timeout = own.progress, 1.0

    def wait(seconds: float) -> None:
        own.poll()
        now[0] += seconds
        own.poll()  # publishes that it has waited too long

    for _ in range(4):
        progress.step += 1
        progress.awaited = "the forward input of microbatch 0"
        wait(0.4)
    assert own.board.failure is None
    wait(0.7)
    assert own.board.failure is not None
    assert own.board.failure.text.startswith("rank 0 waited longer than 1 s for the forward input of microbatch 0: ")

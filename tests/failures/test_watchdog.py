"""One failure anywhere becomes one clear error everywhere, within seconds, and ends the pipeline."""

import threading
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tools.failing import killed, raising
from tools.models import SEQUENCE, Stage, batches, build, forward_step, run
from tools.ranks import RankPool, on_ranks
from torch import Tensor
from torch.distributed import HashStore
from torch.distributed.distributed_c10d import _get_default_store

from megapipe import PipelinedGradScaler, PipelinedOptimizer, PipelineError, clip_grad_norm_
from megapipe.failures import TIMING, Board, InterruptibleStore, Watchdog, helper_thread
from megapipe.runtime.session import Session, _sessions
from megapipe.training import GradientReducer, TiedWeights

PP = 4


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("failing_rank", "at"), [(0, 0), (2, 3), (3, 5)])
@on_ranks(PP)
def test_an_exception_on_one_rank_reaches_all(rank: int, schedule: str, failing_rank: int, at: int) -> None:
    chunks = build(schedule, PP, 4)
    run(schedule, chunks, 4)
    step = raising(KeyError("no such thing"), at) if rank == failing_rank else forward_step
    with pytest.raises((PipelineError, KeyError)) as caught:
        run(schedule, chunks, 6, forward_step_func=step)
    message = f"rank {failing_rank} failed at {failing_rank}F{at}: KeyError: 'no such thing'"
    if rank == failing_rank:
        assert caught.type is KeyError
    else:
        assert caught.type is PipelineError
        assert str(caught.value) == message
    for _ in range(2):
        with pytest.raises(PipelineError) as again:
            run(schedule, chunks, 4)
        assert str(again.value) == (
            f"the pipeline has ended with a failure ({message}): start all processes again, as torchrun does, and go "
            "on from the last checkpoint."
        )


def one_rank_sleeps(rank: int, stuck: int) -> str:
    chunks = build("1f1b", PP, 4, timeout=4.0)  # time enough for the first step on a busy machine
    run("1f1b", chunks, 4)
    num_calls = 0

    def step(data_iterator: Any, model: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if rank == stuck and num_calls == 2:
            wait_for_failure()
        return forward_step(data_iterator, model)

    with pytest.raises(PipelineError) as caught:
        run("1f1b", chunks, 4, forward_step_func=step)
    return str(caught.value)


def test_a_wait_that_runs_out_says_where_every_rank_is(ranks: RankPool) -> None:
    messages = ranks.run(PP, one_rank_sleeps, 1)
    assert len(set(messages)) == 1, messages
    message = messages[0]
    assert "waited longer than 4 s for a message" in message
    assert "rank 1 is at 1F1" in message
    assert "rank 2 waits for the forward input of microbatch 1 from rank 1, which is at 1F1" in message
    assert "rank 0 waits for the output gradient of microbatch 0 from rank 1, which is at 1F1" in message
    assert "rank 3 waits for the forward input of microbatch 1 from rank 2, which is at 2F1" in message


def one_rank_does_not_come(rank: int) -> str:
    chunks = build("1f1b", PP, 4, timeout=1.0)
    message = ""
    if rank != 3:
        with pytest.raises(PipelineError) as caught:
            run("1f1b", chunks, 4)
        message = str(caught.value)
    dist.barrier()
    return message


def test_a_rank_that_does_not_call_the_schedule(ranks: RankPool) -> None:
    messages = ranks.run(PP, one_rank_does_not_come)
    for message in messages[:3]:
        assert "waited 1 s for rank 3 to do so too" in message
        assert "rank 3 is still to begin any step. Does every rank call the schedule equally often?" in message


def bad_input(rank: int, what: str) -> str:
    """Rank 1 does something wrong, in a way that it alone can see."""
    chunks = build("1f1b", 2, 4)
    model: Any = chunks
    arguments: dict[str, Any] = {}
    if rank == 1:
        if what == "iterator":
            arguments["data_iterator"] = batches(2)
        elif what == "hook":
            model = torch.nn.Linear(2, 2)
        elif what == "chunks":
            model = chunks * 2
        elif what == "not a pair":
            arguments["forward_step_func"] = lambda it, model: forward_step(it, model)[0]
        elif what == "loss func":
            arguments["forward_step_func"] = lambda it, model: (forward_step(it, model)[0], None)
        elif what == "loss":
            arguments["forward_step_func"] = lambda it, model: (forward_step(it, model)[0], lambda output: output)
        elif what == "loss shape":
            arguments["forward_step_func"] = lambda it, model: (forward_step(it, model)[0], lambda out: (out, {}))
        elif what == "tokens":
            counts = torch.ones(3)
            arguments["forward_step_func"] = lambda it, model: (
                forward_step(it, model)[0],
                lambda out: (out.sum(), counts, {}),
            )
        elif what == "scaled loss":
            chunks[0].config.grad_scale_func = float
        elif what == "num_microbatches":
            return error_of(lambda: run("1f1b", model, 4, num_microbatches=0), model)
    elif what == "shape":
        arguments["data_iterator"] = batches(4, seq_lengths=[SEQUENCE, SEQUENCE, SEQUENCE + 2, SEQUENCE])
    elif what == "type":
        arguments["forward_step_func"] = lambda it, model: ([forward_step(it, model)[0], set()], None)
    return error_of(lambda: run("1f1b", model, 4, **arguments), model)


def error_of(function: Any, model: Any) -> str:
    with pytest.raises((ValueError, TypeError, PipelineError)) as caught:
        function()
    return f"{caught.type.__name__}: {caught.value}"


@pytest.mark.parametrize(
    ("what", "by", "text"),
    [
        ("iterator", 1, "data_iterator ended at microbatch 2 of 4 (stage 1)"),
        ("hook", 1, "the model of stage 1 (Linear) has no set_input_tensor(input)"),
        ("chunks", 1, "1f1b runs 1 chunk(s) of the model on each rank, got 2"),
        ("not a pair", 1, "forward_step_func must return (output, loss_func), but on stage 1 it returned a tensor"),
        ("loss func", 1, "on the last stage its loss_func is None, which cannot be called"),
        ("loss", 1, "loss_func must return (loss, report) or (loss, num_tokens, report), but it returned a tensor"),
        ("loss shape", 1, "must be a real tensor of one element, but it is a tensor of shape [5, 2, 11]"),
        ("tokens", 1, "loss_func must return one number of tokens, but it is a tensor of shape [3]"),
        ("scaled loss", 1, "config.grad_scale_func must return the scaled loss, but it is a float"),
        ("shape", 0, "stage 0 returned float32[7, 2, 16] for microbatch 2, but stage 1 expects float32[5, 2, 16]"),
        ("type", 0, "the output of stage 0 for microbatch 0 cannot be sent on: it is a list that holds a set"),
    ],
)
def test_bad_input(ranks: RankPool, what: str, by: int, text: str) -> None:
    messages = ranks.run(2, bad_input, what)
    assert text in messages[by]
    assert messages[by].startswith(("ValueError", "TypeError"))
    assert messages[1 - by].startswith(f"PipelineError: rank {by} failed at")
    assert text in messages[1 - by]


@on_ranks(2)
def test_nothing_is_lost(rank: int) -> None:
    """Gradients accumulated before a failed step are still there after it."""
    chunks = build("1f1b", 2, 4)
    run("1f1b", chunks, 4)
    before = [p.grad.clone() for chunk in chunks for p in chunk.parameters()]
    with pytest.raises((ValueError, PipelineError)):
        run("1f1b", chunks, 4, data_iterator=batches(0))
    after: list[Tensor] = [p.grad for chunk in chunks for p in chunk.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(before, after))
    dist.barrier()


def one_rank_is_killed(rank: int) -> str:
    chunks = build("1f1b", PP, 4)
    run("1f1b", chunks, 4)
    with pytest.raises(PipelineError) as caught:
        run("1f1b", chunks, 4, forward_step_func=killed if rank == 1 else forward_step)
    return str(caught.value)


def test_a_killed_rank_reaches_all(ranks: RankPool) -> None:
    messages = ranks.run(PP, one_rank_is_killed, errors=True)
    assert messages[1] is None
    for rank in (0, 2, 3):
        assert "lost its connection" in messages[rank]
        assert "rank 1 is silent: its process ended without a word (killed, or out of memory?)" in messages[rank]
        assert "rank 2 is at" in messages[rank] or "rank 2 waits for" in messages[rank]


def wait_for_failure() -> None:
    """Until this rank's helper thread has heard of one."""
    (session,) = _sessions.values()
    while session.watchdog.board.failure is None:
        time.sleep(0.01)


def one_rank_dies_while_connecting(rank: int) -> str:
    chunks = build("1f1b", 2, 4)
    run("1f1b", chunks, 2)  # which takes its time on a busy machine
    chunks[0].config.timeout = 2.0  # with which ranks connect anew
    store = _get_default_store()

    def dead(session: Session, *args: object) -> None:
        session.watchdog.close()  # no thread of its process looks at the store any more
        store.wait(["told"])
        raise KeyboardInterrupt

    with (
        mock.patch.object(Session, "communicator", dead if rank == 1 else Session.communicator),
        pytest.raises((PipelineError, KeyboardInterrupt)) as caught,
    ):
        run("1f1b", chunks, 2)
    store.set("told", "1")
    return str(caught.value)


def test_a_rank_that_dies_while_connecting(ranks: RankPool) -> None:
    """The others waited for it inside the transport, which gave up a minute after `config.timeout`, in words of its
    own: nothing could end that wait, and meanwhile nobody else got at the store."""
    message = ranks.run(2, one_rank_dies_while_connecting)[0]
    assert message.startswith("rank 0 waited longer than 2 s for the others to connect: ")
    assert "rank 1 is silent: its process ended without a word" in message


@pytest.mark.parametrize("failing_rank", range(2))
@on_ranks(2)
def test_a_rank_that_fails_within_its_connecting(rank: int, failing_rank: int) -> None:
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
        mock.patch.object(InterruptibleStore, "wait", wait if rank == failing_rank else patient_wait),
        pytest.raises((PipelineError, KeyError)),
    ):
        run("1f1b", chunks, 2)


class SilentError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def an_error_has_no_text(rank: int) -> str:
    step = raising(SilentError())
    with pytest.raises((SilentError, PipelineError)) as caught:
        run("1f1b", build("1f1b", 2, 4), 2, forward_step_func=step if rank == 0 else forward_step)
    return "" if rank == 0 else str(caught.value)


def test_an_error_without_a_text_is_told(ranks: RankPool) -> None:
    """What a rank tells of its exception has the exception's text. Where asking for that raised, nobody was told."""
    assert ranks.run(2, an_error_has_no_text)[1] == (
        "rank 0 failed at 0F0: SilentError: (no text: its __str__ raises RuntimeError)"
    )


def one_rank_skips_a_step(rank: int) -> str:
    chunks = build("1f1b", 2, 4, timeout=3.0)  # time enough for the first step on a busy machine
    run("1f1b", chunks, 2)
    if rank == 1:
        dist.barrier()
        return ""
    with pytest.raises(PipelineError) as caught:
        run("1f1b", chunks, 2)
    dist.barrier()
    return str(caught.value)


def test_a_rank_that_skips_a_step(ranks: RankPool) -> None:
    """It was reported as being at the end of its step, as if that were still under way."""
    message = ranks.run(2, one_rank_skips_a_step)[0]
    assert message.startswith("rank 0 waited longer than 3 s for a message: rank 0 waits for ")
    assert "rank 1 is outside any step, after 1 of them. Does every rank call the schedule equally often?" in message


def no_more_forwards(rank: int) -> int:
    num_forwards = 0

    def step(data_iterator: Any, model: Any) -> Any:
        nonlocal num_forwards
        num_forwards += 1
        if rank == 1:
            raise KeyError("no such thing")
        if num_forwards == 2:
            wait_for_failure()
        return forward_step(data_iterator, model)

    with pytest.raises((KeyError, PipelineError)):
        run("gpipe", build("gpipe", 2, 4), 8, forward_step_func=step)
    return num_forwards


def test_a_rank_that_has_heard_of_a_failure_computes_no_further(ranks: RankPool) -> None:
    """Failures were looked at in waits only. A rank that had nothing to wait for went on with what was in vain."""
    assert ranks.run(2, no_more_forwards) == [2, 1]


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


def user_times_out(rank: int) -> str:
    step = raising(TimeoutError("storage does not answer")) if rank == 0 else forward_step
    with pytest.raises((PipelineError, TimeoutError)) as caught:
        run("1f1b", build("1f1b", 2, 4), 2, forward_step_func=step)
    return str(caught.value)


def test_a_time_out_of_the_caller_is_the_callers(ranks: RankPool) -> None:
    """The watchdog wrote its own time-out into the store under the name of Python's TimeoutError. When the caller's
    code raised one, the other ranks reported a message that had not come, and not what had really happened."""
    messages = ranks.run(2, user_times_out)
    assert messages == ["storage does not answer", "rank 0 failed at 0F0: TimeoutError: storage does not answer"]


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

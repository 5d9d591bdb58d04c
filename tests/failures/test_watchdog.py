"""One failure anywhere becomes one clear error everywhere, within seconds, and the next step works."""

import os
import signal
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from models import SEQUENCE, Stage, assert_same_gradients, batches, build, forward_step, reference, run
from ranks import RankPool
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_store

from megapipe import PipelinedGradScaler, PipelinedOptimizer, PipelineError, clip_grad_norm_
from megapipe.runtime.session import Session, _sessions
from megapipe.training import GradientReducer, TiedWeights

PP = 4


def failing(message: str, at: int) -> Any:
    """A forward_step_func that raises at a microbatch."""
    count = 0

    def step(data_iterator: Any, model: Any) -> Any:
        nonlocal count
        count += 1
        if count == at + 1:
            raise KeyError(message)
        return forward_step(data_iterator, model)

    return step


def one_rank_fails(rank: int, schedule: str, failing_rank: int, at: int) -> None:
    chunks = build(schedule, PP, 4)
    run(schedule, chunks, 4)
    step = failing("no such thing", at) if rank == failing_rank else forward_step
    with pytest.raises((PipelineError, KeyError)) as caught:
        run(schedule, chunks, 6, forward_step_func=step)
    if rank == failing_rank:
        assert caught.type is KeyError
    else:
        assert caught.type is PipelineError
        message = f"rank {failing_rank} failed at {failing_rank}F{at}: KeyError: 'no such thing'"
        assert str(caught.value) == message
    # The pipeline goes on as if nothing had been.
    for chunk in chunks:
        chunk.zero_grad()
    run(schedule, chunks, 4, seed=3)
    assert_same_gradients(chunks, reference(4, 4, seeds=(3,))[0])


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("failing_rank", "at"), [(0, 0), (2, 3), (3, 5)])
def test_an_exception_on_one_rank_reaches_all(ranks: RankPool, schedule: str, failing_rank: int, at: int) -> None:
    ranks.run(PP, one_rank_fails, schedule, failing_rank, at)


def one_rank_sleeps(rank: int, stuck: int) -> str:
    chunks = build("1f1b", PP, 4, timeout=1.0)
    run("1f1b", chunks, 4)

    def step(data_iterator: Any, model: Any) -> Any:
        batch_number = step.calls = step.calls + 1  # type: ignore[attr-defined]
        if rank == stuck and batch_number == 2:
            time.sleep(4)
        return forward_step(data_iterator, model)

    step.calls = 0  # type: ignore[attr-defined]
    with pytest.raises(PipelineError) as caught:
        run("1f1b", chunks, 4, forward_step_func=step)
    return str(caught.value)


def test_a_wait_that_runs_out_says_where_every_rank_is(ranks: RankPool) -> None:
    messages = ranks.run(PP, one_rank_sleeps, 1)
    assert len(set(messages)) == 1, messages
    message = messages[0]
    assert "waited longer than 1 s for a message" in message
    assert "rank 1 is at 1F1" in message
    assert "rank 2 waits for the forward input of microbatch 1 from rank 1, which is at 1F1" in message
    assert "rank 0 waits for the output gradient of microbatch 0 from rank 1, which is at 1F1" in message
    assert "rank 3 waits for the forward input of microbatch 1 from rank 2, which is at 2F1" in message


def one_rank_does_not_come(rank: int) -> str:
    chunks = build("1f1b", PP, 4, timeout=1.0)
    if rank == 3:
        time.sleep(3)
        return ""
    with pytest.raises(PipelineError) as caught:
        run("1f1b", chunks, 4)
    return str(caught.value)


def test_a_rank_that_does_not_call_the_schedule(ranks: RankPool) -> None:
    messages = ranks.run(PP, one_rank_does_not_come)
    for message in messages[:3]:
        assert "waited 1 s for rank 3 to do so too" in message
        assert "rank 3 is still to begin any step. Does every rank call the schedule equally often?" in message


def ranks_disagree(rank: int, what: str) -> str:
    odd = rank == 2
    schedule, arguments, options = "1f1b", {}, {}
    num_microbatches = 4
    if what == "num_microbatches":
        num_microbatches = 8 if odd else 4
    elif what == "the schedule":
        schedule = "gpipe" if odd else "1f1b"
    elif what == "the message from stage 1 to stage 2":
        arguments = {"seq_length": SEQUENCE + odd}
    elif what == "dtype":
        options = {"pipeline_dtype": torch.bfloat16 if odd else torch.float32}
    elif what == "forward_only":
        arguments = {"forward_only": odd}
    chunks = build(schedule, PP, 4, **options)
    with pytest.raises(ValueError, match="disagree") as caught:
        run(schedule, chunks, num_microbatches, **arguments)
    return str(caught.value)


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("num_microbatches", "disagree on num_microbatches: 4 on ranks 0, 1, 3; 8 on rank 2. Make them the same."),
        ("the schedule", "disagree on the schedule: 1f1b on ranks 0, 1, 3; gpipe on rank 2."),
        ("forward_only", "disagree on forward_only: False on ranks 0, 1, 3; True on rank 2."),
        (
            "the message from stage 1 to stage 2",
            "from stage 1 to stage 2: float32[5, 2, 16] on rank 1; float32[6, 2, 16] on rank 2.",
        ),
        ("dtype", "from stage 1 to stage 2: float32[5, 2, 16] on rank 1; bfloat16[5, 2, 16] on rank 2."),
    ],
)
def test_ranks_that_disagree_at_the_first_step(ranks: RankPool, what: str, text: str) -> None:
    for message in ranks.run(PP, ranks_disagree, what):
        assert text in message


def one_rank_changes_its_mind(rank: int) -> str:
    chunks = build("1f1b", PP, 4)
    for _ in range(2):
        run("1f1b", chunks, 4)
    with pytest.raises(ValueError, match="disagree") as caught:
        run("1f1b", chunks, 5 if rank == 1 else 4)
    return str(caught.value)


def test_ranks_that_disagree_later(ranks: RankPool) -> None:
    """Only the rank whose arguments changed knows that something changed."""
    for message in ranks.run(PP, one_rank_changes_its_mind):
        assert "disagree on num_microbatches: 4 on ranks 0, 2, 3; 5 on rank 1" in message


def sizes_disagree(rank: int) -> str:
    with pytest.raises(ValueError, match="disagree") as caught:
        build("1f1b", 2 if rank == 0 else 4, 4)
    return str(caught.value)


def test_pipeline_sizes_that_disagree(ranks: RankPool) -> None:
    for message in ranks.run(PP, sizes_disagree):
        assert "rank 0: 2, None and 1, rank 1: 4, None and 1" in message


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
        arguments["forward_step_func"] = lambda it, model: ([forward_step(it, model)[0], "text"], None)
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
        ("loss shape", 1, "must return a loss of one element first, but it is a tensor of shape [5, 2, 11]"),
        ("tokens", 1, "loss_func must return one number of tokens, but it is a tensor of shape [3]"),
        ("scaled loss", 1, "config.grad_scale_func must return the scaled loss, but it is a float"),
        ("shape", 0, "stage 0 returned float32[7, 2, 16] for microbatch 2, but stage 1 expects float32[5, 2, 16]"),
        ("type", 0, "the output of stage 0 for microbatch 0 cannot be sent on: it is a list that holds a str"),
    ],
)
def test_bad_input(ranks: RankPool, what: str, by: int, text: str) -> None:
    messages = ranks.run(2, bad_input, what)
    assert text in messages[by]
    assert messages[by].startswith(("ValueError", "TypeError"))
    assert messages[1 - by].startswith(f"PipelineError: rank {by} failed at")
    assert text in messages[1 - by]


def nothing_is_lost(rank: int) -> None:
    """Gradients accumulated before a failed step are still there after it."""
    chunks = build("1f1b", 2, 4)
    run("1f1b", chunks, 4)
    before = [p.grad.clone() for chunk in chunks for p in chunk.parameters()]
    with pytest.raises((ValueError, PipelineError)):
        run("1f1b", chunks, 4, data_iterator=batches(0))
    after: list[Tensor] = [p.grad for chunk in chunks for p in chunk.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(before, after))
    dist.barrier()


def test_nothing_is_lost(ranks: RankPool) -> None:
    ranks.run(2, nothing_is_lost)


def one_rank_is_killed(rank: int) -> str:
    chunks = build("1f1b", PP, 4)
    run("1f1b", chunks, 4)

    def step(data_iterator: Any, model: Any) -> Any:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return forward_step(data_iterator, model)

    with pytest.raises(PipelineError) as caught:
        run("1f1b", chunks, 4, forward_step_func=step)
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
    while session.watchdog.failure is None:
        time.sleep(0.01)


def one_rank_dies_while_connecting(rank: int) -> str:
    chunks = build("1f1b", 2, 4, timeout=0.5)
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
    assert message.startswith("rank 0 waited longer than 0.5 s for the others to connect: ")
    assert "rank 1 is silent: its process ended without a word" in message


def one_rank_is_slow(rank: int) -> None:
    chunks = build("1f1b", 2, 4, timeout=1.0)
    steps = iter([2.5 * rank])

    def slow_step(data_iterator: Any, model: Any) -> Any:
        time.sleep(next(steps, 0.0))
        return forward_step(data_iterator, model)

    num_failures = 0
    while True:
        for chunk in chunks:
            chunk.zero_grad()
        try:
            run("1f1b", chunks, 4, forward_step_func=slow_step)
        except PipelineError:
            num_failures += 1
        else:
            break
    assert num_failures > 0
    assert_same_gradients(chunks, reference(4, 4)[0])


def test_a_slow_rank_meets_the_others_again(ranks: RankPool) -> None:
    """A rank that was slower than the time limit came to sessions that the others had given up, found their arguments
    there and looked no further. In each it waited for a minute to connect to nobody, and was ever further behind."""
    ranks.run(2, one_rank_is_slow)


class SilentError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def an_error_has_no_text(rank: int) -> str:
    def step(data_iterator: Any, model: Any) -> Any:
        raise SilentError

    with pytest.raises((SilentError, PipelineError)) as caught:
        run("1f1b", build("1f1b", 2, 4), 2, forward_step_func=step if rank == 0 else forward_step)
    return "" if rank == 0 else str(caught.value)


def test_an_error_without_a_text_is_told(ranks: RankPool) -> None:
    """What a rank tells of its exception has the exception's text. Where asking for that raised, nobody was told."""
    assert ranks.run(2, an_error_has_no_text)[1] == (
        "rank 0 failed at 0F0: SilentError: (no text: its __str__ raises RuntimeError)"
    )


def two_groups_in_two_threads(rank: int) -> None:
    models = [build("1f1b", 2, 4) for _ in range(2)]
    groups = [dist.new_group([0, 1]) for _ in models]

    def train(number: int) -> None:
        for _ in range(2):
            run("1f1b", models[number], 4, pg_collection=SimpleNamespace(pp=groups[number]))

    threads = [threading.Thread(target=train, args=(number,), daemon=True) for number in range(2)]
    for thread in threads[:: 1 if rank else -1]:
        thread.start()
    for thread in threads:
        thread.join()
    for chunks in models:
        assert_same_gradients(chunks, reference(4, 4, seeds=(0, 0))[0])


def test_two_groups_of_the_same_ranks(ranks: RankPool) -> None:
    """Sessions were found by the ranks of a process group. Pipelines with a group each, of the same ranks, then shared
    one: they took each other's messages, and the end of either was a KeyError in the other."""
    ranks.run(2, two_groups_in_two_threads)


def a_step_within_a_step(rank: int) -> str:
    chunks = build("1f1b", 2, 4)

    def step(data_iterator: Any, model: Any) -> Any:
        run("1f1b", chunks, 1, forward_only=True)
        return forward_step(data_iterator, model)

    with pytest.raises((ValueError, PipelineError), match="a schedule was called while another call") as caught:
        run("1f1b", chunks, 2, forward_step_func=step)
    return caught.type.__name__


def test_a_schedule_called_within_a_step_is_refused(ranks: RankPool) -> None:
    """The next rank's forward needs what this one's returns, so it cannot come to the call within that: a hang."""
    assert ranks.run(2, a_step_within_a_step) == ["ValueError", "PipelineError"]


def keys_after_failures(rank: int) -> list[int]:
    chunks = build("1f1b", 2, 4)
    num_keys = []
    for _ in range(4):
        with pytest.raises((KeyError, PipelineError)):
            run("1f1b", chunks, 3, forward_step_func=failing("no such thing", 1) if rank == 1 else forward_step)
        dist.barrier()
        num_keys.append(_get_default_store().num_keys())
        dist.barrier()
    return num_keys


def test_failed_steps_leave_nothing_in_the_store(ranks: RankPool) -> None:
    """Each failed session left what its ranks had told each other, and the addresses of its connections."""
    for first, *others in ranks.run(2, keys_after_failures):
        assert others == [first] * 3


def one_rank_skips_a_step(rank: int) -> str:
    chunks = build("1f1b", 2, 4, timeout=1.0)
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
    assert message.startswith("rank 0 waited longer than 1 s for a message: rank 0 waits for ")
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


def fails_behind_the_others(rank: int, number: int) -> None:
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
    for chunk in chunks:
        chunk.config.finalize_model_grads_func = None
        chunk.zero_grad()
    run("1f1b", chunks, 4)  # on both ranks: no other call has to fail first
    assert_same_gradients(chunks, reference(4, 4)[0])


@pytest.mark.parametrize("number", range(5))
def test_no_optimizer_step_after_a_failure_elsewhere(ranks: RankPool, number: int) -> None:
    """A rank that had left the step before another failed in it heard of that in its next one only. Until then it
    stepped its optimizer, alone, or waited in a collective for the one that had failed."""
    ranks.run(2, fails_behind_the_others, number)

"""One failure anywhere becomes one clear error everywhere, within seconds, and the next step works."""

import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import SEQUENCE, assert_same_gradients, batches, build, forward_step, reference, run
from ranks import RankPool
from torch import Tensor

from megapipe import PipelineError

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
        assert "ended without a word" in messages[rank]

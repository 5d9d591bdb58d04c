"""What one rank has at the end of a step, given to all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from tools.models import build, reference, run
from tools.ranks import on_ranks
from torch import nn

import megapipe
from megapipe import parallel_state
from megapipe.runtime.session import Session

CPU = torch.device("cpu")


def session_of_all(size: int) -> Session:
    parallel_state.initialize_model_parallel(size)
    return Session.of(parallel_state.get_pipeline_model_parallel_group())


@on_ranks(3)
def test_nested_values(rank: int) -> None:
    session, source = session_of_all(3), 2
    for number in range(3):
        value: Any = [
            {
                "loss": torch.tensor([number, 2.5]),
                "tokens": torch.tensor(2**40 + number),
                "name": "x",
                "number": number,
            },
            (torch.ones(2, 3, dtype=torch.bfloat16).t(), torch.empty(0), None),
            torch.arange(3).to(torch.int16),  # of which gloo knows nothing
        ]
        with session.step():
            dist.barrier()  # a step's loops end nowhere before it has begun everywhere
            found = session.share(value if rank == source else rank, source, CPU)
        assert torch.equal(found[0]["loss"], torch.tensor([number, 2.5]))
        assert found[0]["tokens"] == 2**40 + number
        assert (found[0]["name"], found[0]["number"]) == ("x", number)
        assert torch.equal(found[1][0], torch.ones(3, 2, dtype=torch.bfloat16))
        assert found[1][1].shape == (0,)
        assert found[1][2] is None
        assert found[2].tolist() == [0, 1, 2]
    if rank == source:
        assert not session._store.check([f"results of step 2 {source}"])  # nothing piles up in the store


@pytest.mark.parametrize("device", ["cpu", "meta"])  # broadcast, or with the texts
@on_ranks(2)
def test_nested_tensors(rank: int, device: str) -> None:
    """verl reports log-probabilities of sequences of several lengths so: a step in a V ended by "SymInt is not JSON
    serializable"."""
    session = session_of_all(2)
    nested = torch.nested.as_nested_tensor([torch.arange(3.0), torch.arange(5.0)], layout=torch.jagged)
    with session.step():
        dist.barrier()
        found = session.share([{"log_probs": nested}] if rank == 0 else None, 0, torch.device(device))
    parts = found[0]["log_probs"].unbind()
    assert [part.tolist() for part in parts] == [[0, 1, 2], [0, 1, 2, 3, 4]]


@on_ranks(2)
def test_what_is_shared_in_some_steps_does_not_pile_up(rank: int) -> None:
    """Only what the step just before had left was deleted, so reports of every second step stayed in the store for
    good, some kilobytes each."""
    session = session_of_all(2)
    for number in range(1, 7):
        with session.step():
            dist.barrier()
            if number % 2 == 0:
                assert session.share(number, 1, CPU, "reports") == number
            if number % 3 == 0:
                assert session.share(number, 1, CPU) == number
    dist.barrier()
    posted = [f"{what} of step {step} 1" for what in ("reports", "results") for step in range(1, 7)]
    kept = [name for name in posted if session._store.check([name])]
    assert kept == ["reports of step 6 1", "results of step 6 1"]  # the last ones, which a rank may not have read yet
    dist.barrier()


def lose_or_share(rank: int, session: Session, value: Any = None) -> None:
    session.agreement.agree({})
    if rank == 0:
        raise OSError("no loss")
    session.share([value], 0, CPU)


@on_ranks(2)
def test_what_cannot_travel_is_refused_on_every_rank(rank: int) -> None:
    session = session_of_all(2)
    with pytest.raises((TypeError, megapipe.PipelineError), match="cannot be sent"), session.step():
        lose_or_share(1, session, lambda: 0)


@on_ranks(2)
def test_a_failure_ends_the_wait(rank: int) -> None:
    session = session_of_all(2)
    with pytest.raises((OSError, megapipe.PipelineError), match="no loss"), session.step():
        lose_or_share(rank, session)


@on_ranks(2)
def test_tokens_that_all_ranks_know_count_once(rank: int) -> None:
    parallel_state.initialize_model_parallel(2)
    model = nn.Linear(2, 2, bias=False)
    for num_tokens in (6, 6 if rank == 1 else 0):
        model.weight.grad = torch.full((2, 2), 12.0)
        megapipe.divide_by_num_tokens([model], torch.tensor(num_tokens))
        assert torch.equal(model.weight.grad, torch.full((2, 2), 2.0))


@on_ranks(3)
def test_reports_on_every_rank(rank: int) -> None:
    """They are on the rank of the last stage: the last one, or the first. Who logs on rank 0 wants them there."""
    _, losses = reference(6, 4)
    for schedule in ("1f1b", "zbv"):
        chunks = build(schedule, 3, 6, broadcast_reports=True)
        for forward_only in (False, True):
            reports = run(schedule, chunks, 4, forward_only=forward_only)
            assert [report["loss"] for report in reports] == losses
    (chunk,) = build("1f1b", 3, 6, broadcast_reports=rank == 1)
    with pytest.raises(ValueError, match="disagree on broadcast_reports: False on ranks 0, 2; True on rank 1"):
        run("1f1b", chunk, 4)

"""Pipelines of the same ranks keep apart, one after the other and side by side."""

import logging
import threading
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tools.models import assert_same_gradients, build, reference, run
from tools.ranks import on_ranks, start_again

from megapipe import PipelineError, parallel_state
from megapipe.runtime.session import Session


@on_ranks(2)
def test_ranks_meet_again_after_one_missed_a_session(rank: int) -> None:
    """Each process counted its own sessions, and the count named their meeting place in the store. A rank that had
    missed one waited at another place than the others ever after, even in a process group made anew."""
    chunks = build("1f1b", 2, 4, timeout=0.5)
    if rank == 0:
        with pytest.raises(PipelineError):
            run("1f1b", chunks, 2)
    dist.barrier()
    start_again()
    chunks = build("1f1b", 2, 4)
    run("1f1b", chunks, 2)
    assert_same_gradients(chunks, reference(4, 2)[0])


@on_ranks(3)
def test_ranks_may_be_in_different_numbers_of_groups(rank: int) -> None:
    """The channels were made by `dist.new_group(use_local_synchronization=True)`, which names the new group by the
    number of groups that the process is in. Where ranks differ in that, as Megatron's first and last do with their
    embedding groups, each waited for the others under a name of its own, for ever."""
    dist.new_group([1])  # counts on rank 1 only
    chunks = build("1f1b", 3, 6)
    run("1f1b", chunks, 2)
    assert_same_gradients(chunks, reference(6, 2)[0])


@on_ranks(2)
def test_the_log_says_how_ranks_are_connected(rank: int) -> None:
    """Once, and not for each time limit that is somewhat less than that before: connections took five threads each."""
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("megapipe")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        chunks = build("1f1b", 2, 4)
        for chunks[0].config.timeout in (60.0, 59.0):
            run("1f1b", chunks, 2)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
    assert told == [f"pipeline rank {rank} of 2: connected for loop with 1 chunk(s), on cpu by GlooTransport"]


@on_ranks(2)
def test_two_groups_of_the_same_ranks(rank: int) -> None:
    """Sessions were found by the ranks of a process group. Pipelines with a group each, of the same ranks, then shared
    one: they took each other's messages, and the end of either was a KeyError in the other."""
    models = [build("1f1b", 2, 4) for _ in range(2)]
    groups = [dist.new_group([0, 1]) for _ in models]
    for group in groups[:: 1 if rank else -1]:
        Session.of(group)

    def train(number: int) -> None:
        for _ in range(2):
            run("1f1b", models[number], 2 + number, pg_collection=SimpleNamespace(pp=groups[number]))

    threads = [threading.Thread(target=train, args=(number,), daemon=True) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, chunks in enumerate(models):
        assert_same_gradients(chunks, reference(4, 2 + number, seeds=(0, 0))[0])


@pytest.mark.parametrize("uuids", [["a", "a"], ["a", "b"]], ids=["one", "two"])
@on_ranks(2)
def test_ranks_know_whether_they_share_a_gpu(rank: int, uuids: list[str]) -> None:
    """By its UUID: two processes that see one GPU each call both of them number 0."""
    parallel_state.initialize_model_parallel(2)
    session = Session.of(parallel_state.get_pipeline_model_parallel_group())
    found = SimpleNamespace(uuid=uuids[rank])
    properties = mock.create_autospec(torch.cuda.get_device_properties, return_value=found)
    with mock.patch.object(torch.cuda, "get_device_properties", properties), session.step():
        for _ in range(2):  # asked again for another placement
            assert session._is_shared(torch.device("cuda", 0)) == (uuids[0] == uuids[1])

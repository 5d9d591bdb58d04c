"""Bugs that were there once. Each test tells the story of its bug."""

import time

import pytest
import torch
import torch.distributed as dist
from models import assert_same_gradients, build, communicator, reference, run
from ranks import RankPool
from torch.distributed.distributed_c10d import _get_default_store

from megapipe import PipelineError, parallel_state
from megapipe.p2p_communication import ConnectionLostError, MessageSpec, TensorSpec
from megapipe.watchdog import TICK

TOKEN = MessageSpec("tensor", (TensorSpec((1,), torch.float32, False),))


def abort_after_a_peer_is_gone(rank: int) -> None:
    channels = communicator(rank, 3)
    if rank == 0:
        channels.abort()
    elif rank == 1:
        time.sleep(0.5)
        channels.abort()
    else:
        with pytest.raises(ConnectionLostError):
            channels.forward[1].receive(TOKEN, torch.device("cpu")).wait()
    channels.close()


def test_abort_reaches_past_a_closed_connection(ranks: RankPool) -> None:
    """Aborting posted a receive that timed out, always from the first rank of the pipeline. Where that rank had gone
    already, its closed connection refused the receive, nothing was aborted, and ranks further on waited for ever."""
    ranks.run(3, abort_after_a_peer_is_gone, timeout=20)


def send_after_the_peer_is_gone(rank: int) -> None:
    channels = communicator(rank, 2)
    if rank == 1:
        channels.abort()
    else:
        time.sleep(0.5)
        with pytest.raises(ConnectionLostError):
            channels.send(channels.forward[0], [torch.ones(1)])
    channels.close()


def test_sending_to_a_lost_peer_is_a_lost_connection(ranks: RankPool) -> None:
    """A broken connection was recognised where a message was waited for, but not where one was posted. The rank then
    showed the transport's own words instead of saying which rank had failed and why."""
    ranks.run(2, send_after_the_peer_is_gone, timeout=20)


def one_rank_missed_a_session(rank: int) -> None:
    chunks = build("1f1b", 2, 4, timeout=0.5)
    if rank == 0:
        with pytest.raises(PipelineError):
            run("1f1b", chunks, 2)
    dist.barrier()
    store = _get_default_store()
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.PrefixStore("again", store), rank=rank, world_size=2)
    chunks = build("1f1b", 2, 4)
    run("1f1b", chunks, 2)
    assert_same_gradients(chunks, reference(4, 2)[0])


def test_ranks_meet_again_after_one_missed_a_session(ranks: RankPool) -> None:
    """Each process counted its own sessions, and the count named their meeting place in the store. A rank that had
    missed one waited at another place than the others ever after, even in a process group made anew."""
    ranks.run(2, one_rank_missed_a_session, timeout=20)


def one_rank_is_slow_to_change(rank: int) -> None:
    chunks = build("1f1b", 2, 4)
    run("1f1b", chunks, 2)
    if rank == 1:
        chunks[0].config = SlowConfig(chunks[0].config)
    run("1f1b", chunks, 3)


class SlowConfig:
    """Takes longer to read than the watchdog takes to look."""

    def __init__(self, config: object) -> None:
        self._config = config

    def __getattr__(self, name: str) -> object:
        if name == "hidden_size":
            time.sleep(4 * TICK)
        return getattr(self._config, name)


def test_the_watchdog_does_not_answer_before_the_arguments_are_known(ranks: RankPool) -> None:
    """Asked for its arguments by another rank, a watchdog published those of the step before, though the main thread
    was only about to look at the new ones. The other rank then saw a disagreement where there was none."""
    ranks.run(2, one_rank_is_slow_to_change, timeout=20)


def ranks_are_in_different_numbers_of_groups(rank: int) -> None:
    dist.new_group([1])  # counts on rank 1 only
    chunks = build("1f1b", 3, 6)
    run("1f1b", chunks, 2)
    assert_same_gradients(chunks, reference(6, 2)[0])


def test_ranks_may_be_in_different_numbers_of_groups(ranks: RankPool) -> None:
    """The channels were made by `dist.new_group(use_local_synchronization=True)`, which names the new group by the
    number of groups that the process is in. Where ranks differ in that, as Megatron's first and last do with their
    embedding groups, each waited for the others under a name of its own, for ever."""
    ranks.run(3, ranks_are_in_different_numbers_of_groups, timeout=20)


class WrapperWithBuffers(torch.nn.Module):
    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module
        self.buffers = []

    def forward(self, *args: object) -> object:
        return self.module(*args)


def a_wrapper_has_buffers_of_its_own(rank: int) -> None:
    (chunk,) = build("1f1b", 2, 4)
    run("1f1b", WrapperWithBuffers(chunk), 2)
    assert_same_gradients([chunk], reference(4, 2)[0])


def test_a_wrapper_may_call_something_else_buffers(ranks: RankPool) -> None:
    """The device was found by asking the model for its buffers. Megatron's DistributedDataParallel keeps a list of
    gradient buffers under that name, and every step of a wrapped model failed."""
    ranks.run(2, a_wrapper_has_buffers_of_its_own, timeout=20)

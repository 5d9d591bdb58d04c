import contextlib
import itertools
import threading
import time
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tools.models import open_channels
from tools.ranks import on_ranks
from torch import Tensor
from torch.distributed import HashStore
from torch.distributed.distributed_c10d import _get_default_store

from megapipe import process_groups
from megapipe.messages import MessageSpec, TensorSpec, encode_header
from megapipe.p2p_communication import (
    Channel,
    Channels,
    ConnectionLostError,
    Line,
    Lookahead,
    Receiver,
    Transfer,
    edges_in_rounds,
)
from megapipe.plan import ChannelName, Placement, Plan, loop, make_plan, v_shape
from megapipe.transports import GlooTransport, Members, make_transport
from megapipe.transports.channel import BackendChannel, ReceiveBufferPool
from megapipe.transports.choice import DEVICES
from megapipe.transports.nccl import NcclTransport
from megapipe.transports.outbox import Outbox, TaskThread

TWO = Lookahead(2)
SINGLE = MessageSpec("tensor", (TensorSpec((1,), torch.float32, False),))


def connected(rank: int, pp_size: int) -> Channels:
    """The channels, once all ranks have theirs: an abort on one rank fails those that still connect."""
    channels = open_channels(rank, pp_size)
    dist.barrier()
    return channels


def receiving(channel: Channel, specs: list[MessageSpec], count: int = 1, lookahead: Lookahead = TWO) -> Receiver:
    """The end of a channel at which so many of these messages are expected."""
    receiver = Receiver(channel, 0, specs, count, lookahead)
    receiver.reset()
    return receiver


def taken(receiver: Receiver) -> list[Tensor]:
    receiver.request()
    return receiver.pop().wait()


def after_the_abort() -> None:
    """Until this rank's own thread of gloo has seen it, too."""
    _get_default_store().wait(["aborted"])
    time.sleep(0.1)


def test_a_header_that_is_too_long() -> None:
    with pytest.raises(ValueError, match=r"take 6, and the shapes of its 100 tensor\(s\) 2304: send fewer tensors"):
        encode_header(MessageSpec("list", (TensorSpec((2, 3), torch.float32, True),) * 100))


FOUR = MessageSpec("tensor", (TensorSpec((4,), torch.float32, True),))


def receives_ahead(rank: int, channels: Channels) -> None:
    """No more than `lookahead` buffers wait, whatever the number of messages."""
    channel = channels.channel("forward", 0)
    for lookahead in (0, 1, 2):
        if rank == 0:
            for i in range(5):
                channel.send([torch.full((4,), float(i))])
            continue
        inbox = receiving(channel, [FOUR], 5, Lookahead(lookahead))
        inbox.post_lookahead()
        for i in range(5):
            assert len(inbox._posted) == min(lookahead, 5 - i)
            (tensor,) = taken(inbox)
            assert torch.equal(tensor, torch.full((4,), float(i)))
            assert len(inbox._posted) == max(min(lookahead, 5 - i) - 1, 0)  # whoever takes one is about to use it
            inbox.post_lookahead()


def more_receives_where_a_rank_is_idle(rank: int, channels: Channels) -> None:
    if rank == 0:
        for i in range(8):
            channels.channel("forward", 0).send([torch.full((4,), float(i))])
        return
    inbox = receiving(channels.channel("forward", 0), [FOUR], 8, Lookahead(2, idle_bytes=5 * FOUR.nbytes))
    inbox.post_lookahead()
    assert len(inbox._posted) == 2
    inbox.post_while_idle()
    assert len(inbox._posted) == 5
    assert [taken(inbox)[0][0].item() for _ in range(8)] == list(range(8))
    assert inbox.is_empty()


LARGE = Outbox.MIN_THREAD_BYTES
SIZES = [4, 4 * LARGE, 4, 8, LARGE, 4, LARGE, LARGE, 4, 8]


def sizes_in_order(rank: int, channels: Channels) -> None:
    """A thread starts the large ones: small ones must not overtake them."""
    for _ in range(5):
        if rank == 0:
            for number, size in enumerate(SIZES):
                channels.channel("forward", 0).send([torch.full((size,), number, dtype=torch.uint8)])
            continue
        specs = [MessageSpec("tensor", (TensorSpec((size,), torch.uint8, False),)) for size in SIZES]
        inbox = receiving(channels.channel("forward", 0), specs)
        for number, size in enumerate(SIZES):
            (tensor,) = taken(inbox)
            assert torch.equal(tensor, torch.full((size,), number, dtype=torch.uint8))


def large_blocks_again(rank: int, channels: Channels) -> None:
    """A large block is used again once nobody holds it: neither a tensor, nor a view of it, nor a graph."""
    channel = channels.channel("forward", 0)
    num_messages, size = 12, ReceiveBufferPool.MIN_REUSED_BYTES // 4
    if rank == 0:
        for i in range(num_messages):
            channel.send([torch.full((size,), float(i))])
        return
    inbox = receiving(channel, [MessageSpec("tensor", (TensorSpec((size,), torch.float32, True),))], num_messages)
    blocks, in_flight = set(), []
    for i in range(num_messages):
        (tensor,) = taken(inbox)
        blocks.add(tensor.data_ptr())
        assert not tensor.requires_grad  # it does not remember what it was
        in_flight.append((tensor[:1], (tensor.requires_grad_() * tensor).sum()))
        del tensor
        if len(in_flight) == 3:
            view, squares = in_flight.pop(0)
            assert view.item() == i - 2
            squares.backward()  # of what the graph has kept
    assert len(blocks) <= 3 + 2 + 1  # in flight, posted ahead, and one to come back
    del in_flight, view, squares
    channels.transport.drain()
    (pool,) = (pool for pool in channels.transport._pools if pool.buffers)
    assert len(pool.buffers) == pool.NUM_KEPT


@on_ranks(2)
def test_messages(rank: int) -> None:
    channels = open_channels(rank, 2)
    for story in (large_blocks_again, receives_ahead, more_receives_where_a_rank_is_idle, sizes_in_order):
        story(rank, channels)
        channels.transport.drain()
        dist.barrier()
    channels.transport.close()


class Sent:
    """A send that has completed. Notes which thread waits for it."""

    def __init__(self, threads: list[threading.Thread]) -> None:
        self._threads = threads

    def wait(self) -> None:
        self._threads.append(threading.current_thread())


def test_small_sends_are_waited_for_many_at_a_time() -> None:
    """A helper thread woke up for each message, and again when that had gone: four of five times that helpers took a
    core away from a rank."""
    outbox, threads = Outbox(), []
    backend = SimpleNamespace(send=lambda tensors, peer, tag: Sent(threads))
    main = threading.current_thread()
    for number in range(11):
        outbox.send(backend, 0, 0, [torch.empty(LARGE // 16)])
        outbox._waits.drain()
        assert len(threads) == (number + 1) // 4 * 4
    assert main not in threads
    outbox.drain()
    assert threads[8:] == [main] * 3
    outbox.close()


def test_the_threads_of_an_outbox_end_with_it() -> None:
    before = set(threading.enumerate())
    outbox = Outbox()
    outbox.hand_over(lambda: Transfer(None, [], []))
    outbox.drain()
    ours = set(threading.enumerate()) - before
    assert len(ours) == 2
    outbox.close()
    for thread in ours:
        thread.join(20)
        assert not thread.is_alive()


def test_host_memory_is_on_the_host() -> None:
    """Under torch.set_default_device large messages were received into memory of that device, and the step failed."""
    with torch.device("meta"):
        assert ReceiveBufferPool().allocate((ReceiveBufferPool.MIN_REUSED_BYTES,), torch.uint8).is_cpu


@on_ranks(3)
def test_abort_reaches_past_a_closed_connection(rank: int) -> None:
    """Aborting posted a receive that timed out, always from the first rank of the pipeline. Where that rank had gone
    already, its closed connection refused the receive, nothing was aborted, and ranks further on waited for ever."""
    channels = connected(rank, 3)
    if rank == 0:
        channels.transport.abort()
        _get_default_store().set("aborted", "1")
    elif rank == 1:
        after_the_abort()
        channels.transport.abort()
    else:
        with pytest.raises(ConnectionLostError):
            channels.channel("forward", 1).receive(
                MessageSpec("tensor", (TensorSpec((1,), torch.float32, False),))
            ).wait()
    channels.transport.close()


@on_ranks(3)
def test_abort_reaches_past_a_connection_that_closes_meanwhile(rank: int) -> None:
    """The receive that was to time out sometimes failed at once: its rank aborted too, between posting and wait. Then
    the connections to all others stayed open, and a rank behind one of them waited for ever."""
    channels = connected(rank, 3)
    if rank == 0:
        _get_default_store().wait(["posted"])
        channels.transport.abort()
        _get_default_store().set("aborted", "1")
    elif rank == 1:
        backend = channels.transport._backend.result()  # type: ignore[attr-defined]

        def receive(tensors: list[Tensor], peer: int, tag: int) -> Any:
            work = backend.recv(tensors, peer, tag)
            _get_default_store().set("posted", "1")
            after_the_abort()
            return work

        process_groups.abort_gloo(SimpleNamespace(size=backend.size, rank=backend.rank, recv=receive))
    else:
        with pytest.raises(ConnectionLostError):
            channels.channel("forward", 1).receive(SINGLE).wait()
    dist.barrier()  # nobody ends while others wait: that would close the connections
    channels.transport.close()


@pytest.mark.parametrize("size", [1, LARGE])
@on_ranks(2)
def test_sending_to_a_lost_peer_is_a_lost_connection(rank: int, size: int) -> None:
    """A broken connection was recognised where a message was waited for, but not where one was posted. The rank then
    showed the transport's own words instead of saying which rank had failed and why.

    Of a large message, which a thread sends, it is told at the end of the step."""
    channels = connected(rank, 2)
    if rank == 1:
        channels.transport.abort()
        _get_default_store().set("aborted", "1")
    else:
        after_the_abort()
        channel = channels.channel("forward", 0)
        if size == LARGE:
            channel.send([torch.ones(size)])
        with pytest.raises(ConnectionLostError):
            channels.transport.drain() if size == LARGE else channel.send([torch.ones(size)])
    channels.transport.close()


def test_what_is_sent_has_no_graph() -> None:
    """It would live until the send has completed."""
    leaf = torch.ones(2, 3, requires_grad=True)
    for tensor in (leaf, leaf.t(), leaf * 2):
        backend = mock.Mock()
        BackendChannel(backend, 1, 0, torch.empty, None).send([tensor])
        ((sent,), *_), _ = backend.send.call_args
        assert not sent.requires_grad
        assert sent.is_contiguous()


class NoChannel(Channel):
    def send(self, tensors: list[Tensor]) -> None: ...

    def receive(self, spec: MessageSpec) -> Transfer:
        return Transfer(spec, [])


def most_received_early(plan: Plan) -> int:
    """Over NCCL, how many messages a rank has received at any time before the steps that need them."""
    most = 0
    for rank in range(plan.pp_size):
        inboxes = {}
        for (_, receiver), names in plan.traffic.items():
            line = Line(names, ())
            for name in set(names) if receiver == rank else ():
                inboxes[name] = Receiver(NoChannel(), 0, [SINGLE], names.count(name), Lookahead(0), line=line)
                line.add(inboxes[name], name)
                inboxes[name].reset()
            line.reset()
        for event in plan.messages(rank):
            if not event.sends:
                forward, backward = ChannelName("forward", event.stage - 1), ChannelName("backward", event.stage)
                taken(inboxes[forward if event.is_forward else backward])
                most = max(most, sum(len(inbox._posted) for inbox in inboxes.values()))
        assert all(inbox.is_empty() for inbox in inboxes.values())
    return most


@pytest.mark.parametrize("schedule", ["gpipe", "interleaved_1f1b", "seq_interleaved_1f1b", "zb1p", "zbv", "dualpipev"])
def test_at_most_one_message_is_received_early(schedule: str) -> None:
    """On NCCL a receive occupies multiprocessors until its message has come. Neighbours share one communicator for each
    direction, which receives one message at a time, in the order in which they are sent. So what comes before it is
    needed takes memory, but nothing else."""
    for pp_size, num_chunks, num_slices in itertools.product((2, 4), (1, 2, 3), (1, 3)):
        for num_microbatches in (1, 2 * pp_size + 1):
            with contextlib.suppress(ValueError):  # the schedule does not exist for these sizes
                plan = make_plan(schedule, pp_size, num_microbatches, num_chunks, num_slices=num_slices)
                assert most_received_early(plan) <= 1


@pytest.mark.parametrize(
    ("name", "device", "is_shared", "expected"),
    [
        (None, "cpu", False, "GlooTransport"),
        ("nccl", "cpu", False, "GlooTransport"),
        (None, "cuda", False, "NcclTransport"),
        (None, "cuda", True, "HostTransport"),
        ("host", "cuda", False, "HostTransport"),
        ("nccl", "cuda", True, "NcclTransport"),
        (None, "other", False, "HostTransport"),
    ],
)
def test_which_transport_a_device_takes(name: str | None, device: str, is_shared: bool, expected: str) -> None:
    """NCCL refuses two ranks on one GPU, and knows no other devices."""
    members = Members(HashStore(), HashStore(), 0, range(2), 60)
    events = mock.Mock()
    made: Any = SimpleNamespace(type=device)
    with mock.patch.dict(DEVICES, {"cuda": events, "other": events}):
        transport = make_transport(name, members, made, lambda _: is_shared, max_ctas=4)
    assert type(transport).__name__ == expected
    transport.close()


def test_what_the_buffers_of_nccl_hold() -> None:
    """Over PCIe NCCL takes two channels however many it may: with 8, 4 MiB counted as buffered, and were not."""
    members = Members(HashStore(), HashStore(), 0, range(2), 60)
    made = [NcclTransport(members, torch.device("cuda"), lambda: lambda: True, number) for number in (1, 4, 8)]
    assert [one.buffered_bytes for one in made] == [2**19, 2**21, 2**21]


def test_aborted_communicators_are_not_given_back() -> None:
    members = Members(HashStore(), HashStore(), 0, range(2), 60)
    transport = NcclTransport(members, torch.device("cuda"), lambda: lambda: True, 4)
    backend = transport._backends[0, 1] = mock.Mock(spec=["abort", "shutdown"])
    transport._threads[0, 1] = TaskThread("ends it")
    transport.abort()
    transport.close()
    backend.abort.assert_called_once_with()
    backend.shutdown.assert_not_called()


@pytest.mark.parametrize(
    ("placement", "num_chunks", "is_ring"), [(loop, 1, False), (loop, 2, True), (loop, 4, True), (v_shape, 2, False)]
)
@pytest.mark.parametrize("pp_size", [2, 3, 8])
def test_ranks_connect_in_two_or_three_rounds(
    pp_size: int, placement: Placement, num_chunks: int, is_ring: bool
) -> None:
    """Communicators were connected boundary by boundary, a chain over the whole pipeline: with 8 ranks and 4 chunks 62
    of them in a row."""
    edges = edges_in_rounds(placement, pp_size, pp_size * num_chunks)
    num_pairs = pp_size if is_ring and pp_size > 2 else pp_size - 1
    assert len(set(edges)) == len(edges) == 2 * num_pairs
    busy_until = [0] * pp_size
    for sender, receiver in edges:
        busy_until[sender] = busy_until[receiver] = 1 + max(busy_until[sender], busy_until[receiver])
    assert max(busy_until) <= 2 * 3  # both directions between two ranks, one after the other


def test_devices_that_cannot_hold_stages() -> None:
    members = Members(HashStore(), HashStore(), 0, range(2), 60)
    with pytest.raises(ValueError, match="run on cpu and cuda devices, but the model is on meta"):
        make_transport(None, members, torch.device("meta"), lambda _: False, max_ctas=4)


def test_a_warning_where_communication_cannot_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron sets the variable for tensor parallelism. Then stages wait for each other, and nothing said so."""
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    members = Members(HashStore(), HashStore(), 0, range(2), 60)
    with pytest.warns(UserWarning, match="one hardware queue"):
        NcclTransport(members, torch.device("cuda"), lambda: lambda: True, 4)


def test_an_error_of_a_helper_thread_is_raised_at_the_end_of_the_step() -> None:
    """Helper threads expected lost connections only. Any other error ended them, and the step waited for ever."""
    outbox = Outbox()

    def start() -> Transfer:
        raise OSError("no memory")

    outbox.hand_over(start)
    with pytest.raises(OSError, match="no memory"):
        outbox.drain()
    outbox.close()


def test_a_buffer_in_shared_memory_is_not_used_again() -> None:
    """Another process that was sent a received tensor may still read it, and read later messages there."""
    pool, shape = ReceiveBufferPool(), (ReceiveBufferPool.MIN_REUSED_BYTES,)
    pool.allocate(shape, torch.uint8).share_memory_()
    assert not pool.release()


def test_a_rank_that_is_not_there_when_connecting_is_a_lost_connection() -> None:
    """Gloo's own error passed for one of this rank's, and hid that of the rank that had failed before it could be
    connected; the others then waited for this one."""
    store = HashStore()
    transport = GlooTransport(Members(store, store, 0, [0, 1], 0.2))
    with pytest.raises(ConnectionLostError):
        transport.connect([(0, 1)])

"""Messages between stages: one channel per stage boundary and direction, and a link at each of its ends.

A channel carries one kind of message one way, and every chunk handles its microbatches in order, so the order of
sends and receives on a channel always matches, whatever the schedule does in between; a late receiver delays that
channel only. A step can therefore wait only for data, and data dependencies have no cycle.

Where a transport knows messages by their order alone (NCCL), the channels from one rank to another share a
communicator, and their receives are posted in the order in which the sender sends, which the plan tells: a `Line` for
each peer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from .messages import HEADER, MessageSpec, decode_header, encode_header
from .plan import ChannelName, Placement


class ConnectionLostError(RuntimeError):
    """The transport gave up on a message: its other end is gone, or the connection was aborted."""

    @classmethod
    def of(cls, error: RuntimeError) -> ConnectionLostError:
        """The error for a transport's own one, which is shortened to one line."""
        return cls(str(error).partition("\n")[0])


class Transfer:
    """Tensors on their way to or from another rank, with the handles to wait for. Owns the tensors until then."""

    __slots__ = ("_works", "spec", "tensors")

    def __init__(self, spec: MessageSpec | None, tensors: list[torch.Tensor], works: Sequence[Any] = ()) -> None:
        self.spec = spec
        """The spec of the expected message; None where it is not needed (sends, gradients)."""
        self.tensors = tensors
        self._works = works

    def wait(self) -> list[torch.Tensor]:
        """Wait until the tensors may be used: the host on CPU, only the current stream on a device.

        Raises:
            ConnectionLostError: the message will not come.
        """
        works, self._works = self._works, ()  # a second wait on a gloo work would hang
        try:
            for work in works:
                work.wait()
        except RuntimeError as error:
            raise ConnectionLostError.of(error) from error
        return self.tensors


class Channel(ABC):
    """One way from this rank to a peer, or from the peer to this rank."""

    @abstractmethod
    def send(self, tensors: list[torch.Tensor]) -> None:
        """Send a message, without waiting. The caller may drop the tensors at once, but must not write to them.

        Raises:
            ConnectionLostError: the peer is gone. Where the send fails later, `Transport.drain` raises.
        """

    @abstractmethod
    def receive(self, spec: MessageSpec) -> Transfer:
        """Post the receive of one message.

        Raises:
            ConnectionLostError: the peer is gone.
        """

    def reserve(self, spec: MessageSpec) -> None:  # noqa: B027
        """Take memory for the next message that is received. Called where the device may be waited for."""


class Lookahead(NamedTuple):
    """How many receives of a link are posted before they are asked for."""

    num_receives: int
    """How many are posted at any time."""
    idle_bytes: int = 0
    """While the rank waits: receives of messages up to this size together, in bytes."""


HEADERS_AHEAD = Lookahead(2)
"""The lookahead of headers, whose messages may not be posted ahead: as many as gloo's channels have by default."""


class Link:
    """A stage's end of one channel.

    Messages wait here, in the order of their units: those received until a computation takes them, those made until
    they are sent. None of the calls waits.
    """

    peer: int | None = None
    """Pipeline rank of the other end, where it is not this one."""

    def reset(self) -> None:
        """A step begins."""

    def put(self, message: Transfer) -> None:
        """The next message, to be sent."""

    def send(self, number: int) -> None:
        """Send the message of this number, unless that has been done, or others are to be sent before it."""

    def request(self) -> None:
        """Ask for the next message: its receive is posted by now, where the transport needs no order. No other is
        posted in its place: the rank is about to compute, and others wait for the result."""

    def pop(self) -> Transfer:
        """The oldest message asked for. It may not have arrived."""
        raise AssertionError("no message arrives at this end")

    def post_lookahead(self) -> None:
        """Post receives of the next messages. Called after a send: that is, when no rank waits for this one."""

    def post_while_idle(self) -> None:
        """Post as many as may be. Called when this rank waits for others."""

    def post_early(self) -> None:
        """Post the receive of the next message, if that has to be posted for it to travel. Called before the action in
        front of that which takes it."""

    def is_empty(self) -> bool:
        """Whether every message that was expected or made has been taken or sent."""
        return True


class LocalLink(Link):
    """Both ends of a channel between two stages of this rank: tensors are handed over without a copy."""

    def __init__(self) -> None:
        self._messages: deque[Transfer] = deque()

    def put(self, message: Transfer) -> None:
        self._messages.append(message)

    def pop(self) -> Transfer:
        assert self._messages, "a message is taken before it was made, on the same rank"
        return self._messages.popleft()

    def is_empty(self) -> bool:
        return not self._messages


class Receiver(Link):
    """The end of a channel at which messages arrive.

    Args:
        specs: the messages that a step expects, one for each slice of a sequence; HEADER where they are not known.
        count: how many of each.
        headers: a header precedes each message, and says the rest of it where its sizes are known, else all.
        line: with the other channels from this peer, where a transport knows messages by their order.
    """

    def __init__(
        self,
        channel: Channel,
        peer: int,
        specs: Sequence[MessageSpec],
        count: int,
        lookahead: Lookahead,
        headers: Receiver | None = None,
        line: Line | None = None,
    ) -> None:
        self.peer = peer
        self._channel = channel
        self._specs, self._count = specs, count
        self._lookahead = lookahead
        self._headers, self._line = headers, line
        self._sizes_are_known = headers is None or HEADER not in specs
        self._is_eager = self._sizes_are_known and line is None
        self._expected: deque[MessageSpec] = deque()
        self._posted: deque[Transfer] = deque()
        self._num_requested = 0  # and not popped yet

    def reset(self) -> None:
        self._expected.extend([*self._specs] * self._count)
        if self._line is not None:
            self.reserve()
        if self._headers is not None:
            self._headers.reset()

    def expect(self, spec: MessageSpec) -> None:
        """One more such message will come, after those expected already."""
        self._expected.append(spec)

    def request(self) -> None:
        self._num_requested += 1
        if self._headers is not None and not self._headers._posted and self._line is None:
            self._headers._post()
        if self._is_eager and len(self._posted) < self._num_requested:
            self._post()

    def pop(self) -> Transfer:
        self._num_requested -= 1
        return self._posted.popleft() if self._is_eager and self._headers is None else _Arriving(self)

    def post_lookahead(self) -> None:
        if self._headers is not None:
            self._headers.post_lookahead()
        if self._is_eager:
            while self._expected and len(self._posted) - self._num_requested < self._lookahead.num_receives:
                self._posted.append(self._channel.receive(self._expected.popleft()))

    def post_while_idle(self) -> None:
        if self._headers is not None:
            self._headers.post_while_idle()
        if not self._is_eager:
            return
        room = self._lookahead.idle_bytes
        for number, posted in enumerate(self._posted):
            room -= posted.spec.nbytes if posted.spec and number >= self._num_requested else 0
        while self._expected:
            size = self._expected[0].nbytes
            if room < size and len(self._posted) - self._num_requested >= self._lookahead.num_receives:
                break
            self._posted.append(self._channel.receive(self._expected.popleft()))
            room -= size

    def post_early(self) -> None:
        if self._is_large() and not self._posted:
            assert self._line is not None
            self._line.post_until(self)

    def is_empty(self) -> bool:
        has_headers = self._headers is not None and not self._headers.is_empty()
        return not (self._posted or self._expected or self._num_requested or has_headers)

    def next_message(self) -> tuple[MessageSpec | None, Transfer]:
        """The oldest message, which is posted by now, and what it is."""
        if not self._posted:
            self._post() if self._line is None else self._line.post_until(self)
        posted = self._posted.popleft()
        if self._headers is None or not self._sizes_are_known:
            return posted.spec, posted
        return self._headers.next_header(), posted

    def next_header(self) -> MessageSpec:
        return decode_header(*self.next_message()[1].wait())

    def _post(self) -> None:
        spec = self._expected.popleft()
        if not self._sizes_are_known:
            assert self._headers is not None
            spec = self._headers.next_header()
        self._posted.append(self._channel.receive(spec))

    def reserve(self) -> None:
        """Take memory for the next message, if that has to be posted for it to travel. Short of memory, an allocator
        waits for the device: in front of a receive that would be for what others send only after they have taken what
        this rank has sent."""
        if self._is_large():
            self._channel.reserve(self._expected[0])

    def _is_large(self) -> bool:
        """Whether the next message travels only once it is posted."""
        if not (self._line and self._sizes_are_known and self._expected):
            return False
        return self._expected[0].nbytes > self._line.buffered_bytes


class _Arriving(Transfer):
    """A message whose receive may be posted, or whose header read, only when it is waited for."""

    __slots__ = ("_receiver",)

    def __init__(self, receiver: Receiver) -> None:
        super().__init__(None, [])
        self._receiver = receiver

    def wait(self) -> list[torch.Tensor]:
        self.spec, posted = self._receiver.next_message()
        self.tensors = posted.wait()
        return self.tensors


class Sender(Link):
    """The end of a channel at which messages are sent.

    Args:
        headers: carries a header ahead of each message.
        replies: the gradients that come back. Those of messages with headers are known when these are sent.
        num_slices: of a sequence, whose gradients come back in the reverse order.
        line: with the other channels to this peer, where a transport knows messages by their order.
    """

    def __init__(
        self,
        channel: Channel,
        peer: int,
        headers: Channel | None = None,
        replies: Receiver | None = None,
        num_slices: int = 1,
        line: Line | None = None,
    ) -> None:
        self.peer = peer
        self._channel = channel
        self._headers = headers
        self._replies = replies
        self._num_slices = num_slices
        self._line = line
        self._to_send: deque[Transfer] = deque()
        self._num_sent = 0
        self._described: list[MessageSpec] = []  # of a microbatch whose last slice has still to be sent

    def reset(self) -> None:
        self._num_sent = 0

    def put(self, message: Transfer) -> None:
        self._to_send.append(message)

    def send(self, number: int) -> None:
        if number != self._num_sent:
            return
        self._num_sent += 1
        message = self._to_send.popleft()
        if self._headers is not None:
            assert message.spec is not None
            self._headers.send([encode_header(message.spec)])
        if self._line is not None:
            self._line.check_turn(self)
        self._channel.send(message.tensors)
        if self._headers is not None and self._replies is not None:
            self._expect_reply(message)

    def _expect_reply(self, message: Transfer) -> None:
        assert message.spec is not None
        assert self._replies is not None
        self._described.append(message.spec.gradient())
        if len(self._described) == self._num_slices:
            for spec in reversed(self._described):
                self._replies.expect(spec)
            self._described.clear()

    def is_empty(self) -> bool:
        return not self._to_send


class Line:
    """The messages of a step between this rank and a peer, where all of them share a communicator for each direction
    that matches by order alone.

    A receive is posted when a step waits for it, behind those of all messages that the peer sends before it. So only
    computations that need a message wait for it, and no receive occupies a device for longer. But that of a large
    message may be posted one action early, where the plan says so.

    Args:
        incoming, outgoing: the channels of the messages, in the order in which they are sent.
        buffered_bytes: see `Transport`.
    """

    def __init__(
        self, incoming: Sequence[ChannelName], outgoing: Sequence[ChannelName], buffered_bytes: int = 0
    ) -> None:
        self._orders = incoming, outgoing
        self.buffered_bytes = buffered_bytes
        self._names: dict[Link, ChannelName] = {}
        self._receivers: dict[ChannelName, Receiver] = {}

    def add(self, link: Link, name: ChannelName) -> None:
        self._names[link] = name
        if isinstance(link, Receiver):
            self._receivers[name] = link

    def reset(self) -> None:
        """A step begins: all that was sent before has been taken."""
        self._to_come, self._turns = map(deque, self._orders)

    def post_until(self, receiver: Receiver) -> None:
        """Post the next receive of `receiver`, and before it those that come before it."""
        posted: list[Receiver] = []
        while receiver not in posted:
            posted.append(self._receivers[self._to_come.popleft()])
            posted[-1]._post()
        for one in posted:
            one.reserve()

    def check_turn(self, sender: Sender) -> None:
        """A message out of turn would be taken for another one."""
        turn = self._turns.popleft()
        assert turn == self._names[sender], f"{self._names[sender]} is sent where the plan has {turn}"


class Transport(ABC):
    """Carries the messages of one rank of a pipeline. Its attributes are what depends on the kind of device."""

    lookahead = Lookahead(0)
    """The receives posted ahead where the config does not say."""
    matches_by_order = False
    """Whether messages from one rank to another are told apart by their order alone."""
    buffered_bytes = 0
    """Messages up to this size travel before their receives are posted."""
    mark: Callable[[], Callable[[], bool]] | None = None
    """Gives what tells whether the device has come to this point of its current stream. None where the host waits."""

    def find_error(self) -> str | None:
        """What has become of a connection, where that is known though no call has failed. Called from any thread."""
        return None

    @abstractmethod
    def connect(self, edges: Sequence[tuple[int, int]]) -> None:
        """Called once, on all ranks of the pipeline at the same time.

        Args:
            edges: (sender, receiver), in an order in which all ranks can connect them one after the other.
        """

    def connect_headers(self) -> None:  # noqa: B027
        """Called once, on all ranks of the pipeline at the same time, where headers are to precede messages."""

    @abstractmethod
    def channel(self, name: ChannelName, peer: int, sends: bool) -> Channel:
        """Headers travel between hosts, everything else between devices."""

    @abstractmethod
    def drain(self) -> None:
        """Called at the end of a step: wait until all sends that a host waits for have completed.

        Raises:
            ConnectionLostError: a message was lost.
        """

    @abstractmethod
    def abort(self) -> None:
        """Make every operation under way fail, here and on the peers. Called from any thread, also while others connect
        or send. The transport cannot be used afterwards."""

    @abstractmethod
    def close(self) -> None:
        """Stop helper threads, and give connections back."""


class Channels:
    """The channels of one rank over a transport, made once per pipeline and kept between steps."""

    def __init__(self, transport: Transport, placement: Placement, pp_rank: int, pp_size: int, num_chunks: int) -> None:
        self.transport = transport
        self._placement = placement
        self._pp_rank = pp_rank
        self._pp_size = pp_size
        self._num_stages = pp_size * num_chunks
        self._has_headers = False
        self._channels: dict[ChannelName, Channel] = {}

    def connect(self) -> None:
        """Every rank of the pipeline must call it at the same time."""
        self.transport.connect(edges_in_rounds(self._placement, self._pp_size, self._num_stages))
        self._make_channels("forward", "backward")

    def connect_headers(self) -> None:
        """Make the channels of the headers that precede messages, unless they are there. Every rank of the pipeline
        must call it at the same time."""
        if not self._has_headers:
            self._has_headers = True
            self.transport.connect_headers()
            self._make_channels("header")

    def channel(self, kind: str, boundary: int) -> Channel:
        return self._channels[ChannelName(kind, boundary)]

    def _make_channels(self, *kinds: str) -> None:
        for boundary in range(self._num_stages - 1):
            lower, upper = (self._placement.rank(stage, self._pp_size) for stage in (boundary, boundary + 1))
            if self._pp_rank not in (lower, upper) or lower == upper:
                continue
            peer = upper if self._pp_rank == lower else lower
            for name in (ChannelName(kind, boundary) for kind in kinds):
                sends = (name.kind == "backward") == (self._pp_rank == upper)
                self._channels[name] = self.transport.channel(name, peer, sends)


def edges_in_rounds(placement: Placement, pp_size: int, num_stages: int) -> list[tuple[int, int]]:
    """The (sender, receiver) pairs of ranks that exchange messages, in an order in which all ranks can connect them one
    after the other. Pairs without a rank in common take the same round, so that there are two or three and no chain."""
    ranks = [placement.rank(stage, pp_size) for stage in range(num_stages)]
    pairs = sorted({(min(a, b), max(a, b)) for a, b in pairwise(ranks) if a != b})
    busy: list[set[int]] = []
    rounds: dict[tuple[int, int], int] = {}
    for pair in pairs:
        number = next((k for k, taken in enumerate(busy) if not taken & set(pair)), len(busy))
        if number == len(busy):
            busy.append(set())
        busy[number] |= set(pair)
        rounds[pair] = number
    in_order = sorted(pairs, key=lambda pair: (rounds[pair], pair))
    return [edge for low, high in in_order for edge in ((low, high), (high, low))]

"""Messages between stages: one channel per stage boundary and direction.

A channel carries one kind of message one way, and every chunk handles its microbatches in order, so the order of
sends and receives on a channel always matches, whatever the schedule does in between; a late receiver delays that
channel only. A step can therefore wait only for data, and data dependencies have no cycle.

Where a transport knows messages by their order alone (NCCL), the channels from one rank to another share a
communicator, and their receives are posted in the order in which the sender sends, which the plan tells.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from .messages import HEADER, MessageSpec, decode_header
from .plan import ChannelName, Placement, Plan

__all__ = [
    "HEADERS_AHEAD",
    "Channel",
    "Communicator",
    "ConnectionLostError",
    "DescribedInbox",
    "Inbox",
    "Lookahead",
    "Transfer",
    "Transport",
    "edges_in_rounds",
]


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


class LateTransfer(Transfer):
    """A message whose receive is posted only when it is waited for.

    Args:
        post: posts the receive.
    """

    __slots__ = ("_post",)

    def __init__(self, post: Callable[[], Transfer]) -> None:
        super().__init__(None, [])
        self._post = post

    def wait(self) -> list[torch.Tensor]:
        posted = self._post()
        self.spec, self.tensors = posted.spec, posted.wait()
        return self.tensors


class DescribedTransfer(Transfer):
    """A message whose receive was posted by its sizes, and whose header says what else it is."""

    __slots__ = ("_header", "_message")

    def __init__(self, header: Transfer, message: Transfer) -> None:
        super().__init__(None, [])
        self._header, self._message = header, message

    def wait(self) -> list[torch.Tensor]:
        self.spec = decode_header(*self._header.wait())
        self.tensors = self._message.wait()
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


class Lookahead(NamedTuple):
    """How many receives of a channel are posted before they are asked for."""

    messages: int
    """How many are posted at any time."""
    idle_bytes: int = 0
    """While the rank waits: receives of messages up to this size together, in bytes."""


HEADERS_AHEAD = Lookahead(2)
"""The lookahead of headers, whose messages may not be posted ahead: as many as gloo's channels have by default."""


class Inbox(ABC):
    """The receives of one channel during one step."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._expected: deque[MessageSpec] = deque()
        self._posted: deque[Transfer] = deque()

    def expect(self, spec: MessageSpec, count: int = 1) -> None:
        """`count` such messages will come, after those expected already."""
        self._expected.extend([spec] * count)

    def is_empty(self) -> bool:
        """Whether everything expected has been taken, and waited for."""
        return not self._posted and not self._expected

    @abstractmethod
    def take(self) -> Transfer:
        """The oldest message not taken yet. It may not have arrived."""

    def post_ahead(self) -> None:  # noqa: B027
        """Post the receives of the next messages, as many as are always posted."""

    def post_all(self) -> None:
        """Post as many as may be. Each takes the host as long as sending a small message does."""
        self.post_ahead()


class PostedInbox(Inbox):
    """Where channels do not get in each other's way: receives are posted ahead of their use."""

    def __init__(self, channel: Channel, lookahead: Lookahead) -> None:
        super().__init__(channel)
        self._lookahead = lookahead

    def take(self) -> Transfer:
        """Posted by now, if not before. No other receive is posted in its place: the rank is about to compute, and
        others wait for the result."""
        if not self._posted:
            self._post()
        return self._posted.popleft()

    def post_ahead(self) -> None:
        while self._expected and len(self._posted) < self._lookahead.messages:
            self._post()

    def post_all(self) -> None:
        self.post_ahead()
        room = self._lookahead.idle_bytes - sum(one.spec.nbytes for one in self._posted if one.spec)
        while self._expected and room >= (size := self._expected[0].nbytes):
            self._post()
            room -= size

    def _post(self) -> None:
        self._posted.append(self._channel.receive(self._expected.popleft()))


class DynamicShapesInbox(PostedInbox):
    """Each message is preceded by a header with its shapes. The headers are expected, and posted ahead."""

    def __init__(self, headers: Channel, messages: Channel, lookahead: Lookahead) -> None:
        super().__init__(headers, lookahead)
        self._messages = messages

    def take(self) -> Transfer:
        header = super().take()
        return LateTransfer(lambda: self._messages.receive(decode_header(*header.wait())))


class DescribedInbox(Inbox):
    """The sizes of messages are known, and headers precede them with what may change besides: both are posted ahead."""

    def __init__(self, headers: Inbox, messages: Inbox) -> None:
        self._headers, self._messages = headers, messages

    def expect(self, spec: MessageSpec, count: int = 1) -> None:
        self._headers.expect(HEADER, count)
        self._messages.expect(spec, count)

    def is_empty(self) -> bool:
        return self._headers.is_empty() and self._messages.is_empty()

    def take(self) -> Transfer:
        return DescribedTransfer(self._headers.take(), self._messages.take())

    def post_ahead(self) -> None:
        self._headers.post_ahead()
        self._messages.post_ahead()

    def post_all(self) -> None:
        self._headers.post_ahead()
        self._messages.post_all()


class Arrivals:
    """The messages of one step from one peer, where all of them share a communicator that matches by order alone.

    A receive is posted when a step waits for it, behind those of all messages that the peer sends before it. So only
    computations that need a message wait for it, and no receive occupies a device for longer.
    """

    def __init__(self, order: Sequence[ChannelName]) -> None:
        self._order = order
        self._to_come = deque(order)
        self._inboxes: dict[ChannelName, OrderedInbox] = {}

    def inbox(self, name: ChannelName, channel: Channel, headers: PostedInbox | None) -> OrderedInbox:
        inbox = self._inboxes[name] = OrderedInbox(self, channel, headers)
        return inbox

    def post_until(self, inbox: OrderedInbox) -> None:
        """Post the next receive of `inbox`, and before it those that come before it."""
        while True:
            first = self._inboxes[self._to_come.popleft()]
            first.post()
            if first is inbox:
                return

    def begin_again(self) -> None:
        """The peer begins the step again. All that it sent before has been taken."""
        self._to_come = deque(self._order)


class OrderedInbox(Inbox):
    """One channel of those that share a communicator."""

    def __init__(self, arrivals: Arrivals, channel: Channel, headers: PostedInbox | None) -> None:
        super().__init__(channel)
        self._arrivals = arrivals
        self._headers = headers

    def expect(self, spec: MessageSpec, count: int = 1) -> None:
        if self._headers is not None:
            self._headers.expect(spec, count)
        super().expect(spec, count)

    def take(self) -> Transfer:
        return LateTransfer(self._next_posted)

    def post_ahead(self) -> None:
        if self._headers is not None:
            self._headers.post_ahead()

    def post(self) -> None:
        spec = self._expected.popleft()
        if self._headers is not None:
            spec = decode_header(*self._headers.take().wait())
        self._posted.append(self._channel.receive(spec))

    def _next_posted(self) -> Transfer:
        if not self._posted:
            self._arrivals.post_until(self)
        return self._posted.popleft()


class OrderedChannel(Channel):
    """A channel to a peer that receives in the order of the plan: a message out of turn would be taken for another
    one."""

    def __init__(self, name: ChannelName, channel: Channel, turns: deque[ChannelName]) -> None:
        self._name = name
        self._channel = channel
        self._turns = turns

    def send(self, tensors: list[torch.Tensor]) -> None:
        turn = self._turns.popleft()
        assert turn == self._name, f"{self._name} is sent where the plan has {turn}"
        self._channel.send(tensors)

    def receive(self, spec: MessageSpec) -> Transfer:
        return self._channel.receive(spec)


class Transport(ABC):
    """Carries the messages of one rank of a pipeline. Its attributes are what depends on the kind of device."""

    lookahead = Lookahead(0)
    """The receives posted ahead where the config does not say."""
    matches_by_order = False
    """Whether messages from one rank to another are told apart by their order alone."""

    def mark(self) -> Callable[[], bool] | None:
        """Tells whether the device has come to this point of its current stream. None where the host itself waits."""
        return None

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


class Communicator:
    """The channels of one rank, built once per pipeline and kept between steps."""

    def __init__(
        self,
        transport: Transport,
        placement: Placement,
        pp_rank: int,
        pp_size: int,
        num_chunks: int,
    ) -> None:
        self._transport = transport
        self._placement = placement
        self._pp_rank = pp_rank
        self._pp_size = pp_size
        self._num_stages = pp_size * num_chunks
        self._has_headers = False
        self._channels: dict[ChannelName, Channel] = {}
        self._peers: set[int] = set()
        self._traffic: dict[tuple[int, int], list[ChannelName]] = {}
        self._arrivals: dict[int, Arrivals] = {}
        self._turns: dict[int, deque[ChannelName]] = {}
        self.mark = transport.mark
        self.find_error = transport.find_error
        self.drain = transport.drain
        self.abort = transport.abort
        self.close = transport.close

    @property
    def lookahead(self) -> Lookahead:
        return self._transport.lookahead

    def connect(self) -> None:
        """Every rank of the pipeline must call it at the same time."""
        self._transport.connect(edges_in_rounds(self._placement, self._pp_size, self._num_stages))
        self._make_channels("forward", "backward")

    def connect_headers(self) -> None:
        """Make the channels of the headers that precede messages, unless they are there. Every rank of the pipeline
        must call it at the same time."""
        if not self._has_headers:
            self._has_headers = True
            self._transport.connect_headers()
            self._make_channels("header")

    def _make_channels(self, *kinds: str) -> None:
        for boundary in range(self._num_stages - 1):
            lower, upper = (self._placement.rank(stage, self._pp_size) for stage in (boundary, boundary + 1))
            if self._pp_rank not in (lower, upper) or lower == upper:
                continue
            peer = upper if self._pp_rank == lower else lower
            self._peers.add(peer)
            for name in (ChannelName(kind, boundary) for kind in kinds):
                sends = (name.kind == "backward") == (self._pp_rank == upper)
                self._channels[name] = self._transport.channel(name, peer, sends)

    def begin_step(self, plan: Callable[[], Plan], forward_only: bool) -> None:
        """`plan` says in which order messages travel, for transports that need to know."""
        if self._transport.matches_by_order:
            traffic = plan().traffic
            if forward_only:
                traffic = {edge: [name for name in names if name.kind == "forward"] for edge, names in traffic.items()}
            self._traffic = traffic
            self._arrivals = {peer: Arrivals(traffic.get((peer, self._pp_rank), [])) for peer in self._peers}
            self._turns = {peer: deque(traffic.get((self._pp_rank, peer), [])) for peer in self._peers}

    def outgoing(self, name: ChannelName, peer: int) -> Channel:
        """A channel to send over in this step."""
        channel = self._channels[name]
        return OrderedChannel(name, channel, self._turns[peer]) if self._matches_by_order(name) else channel

    def incoming(self, name: ChannelName, peer: int, lookahead: Lookahead, has_headers: bool) -> Inbox:
        """The receives of a channel in this step."""
        channel = self._channels[name]
        headers = self._channels[ChannelName("header", name.boundary)] if has_headers else None
        if self._matches_by_order(name):
            posted = None if headers is None else PostedInbox(headers, HEADERS_AHEAD)
            return self._arrivals[peer].inbox(name, channel, posted)
        if headers is not None:
            return DynamicShapesInbox(headers, channel, lookahead)
        return PostedInbox(channel, lookahead)

    def begin_again(self) -> None:
        """The step begins again, on all ranks. Everything sent before has been taken."""
        for arrivals in self._arrivals.values():
            arrivals.begin_again()
        for peer, turns in self._turns.items():
            turns.clear()
            turns.extend(self._traffic.get((self._pp_rank, peer), []))

    def _matches_by_order(self, name: ChannelName) -> bool:
        return self._transport.matches_by_order and name.kind != "header"


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

"""Messages between stages: one channel per stage boundary and direction, one for headers, and a link at each of its
ends.

A channel carries messages of one kind in one direction, and both of its ends handle the microbatches of a chunk in the
same order (the gradients of a microbatch's slices in the reverse order of the slices). So sends and receives on a
channel always match, whatever the schedule does in between. A rank only ever waits for a tensor that is not computed
yet, and such waits form no cycle.

Over gloo channels are independent: a late receive delays its own channel only. Over NCCL all channels from one rank to
another share one NCCL communicator, which matches messages by their order. So their receives are posted in the order in
which the sender sends. The plan tells that order; a `Line` for each peer keeps it.
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
    """A message cannot be delivered: the other rank is gone, or the connection was aborted."""

    @classmethod
    def of(cls, error: RuntimeError) -> ConnectionLostError:
        """Make the error from one that a transport raised. Of its text the first line is kept."""
        return cls(str(error).partition("\n")[0])


class Transfer:
    """One message: its tensors, and the handles of the receives to wait for."""

    __slots__ = ("_works", "spec", "tensors")

    def __init__(self, spec: MessageSpec | None, tensors: list[torch.Tensor], works: Sequence[Any] = ()) -> None:
        self.spec = spec
        """The spec of the message. None for gradients that are sent, whose receiver knows it, and for a message that is
        received in `wait`, until then."""
        self.tensors = tensors
        self._works = works

    def wait(self) -> list[torch.Tensor]:
        """Wait until the tensors may be used, and return them. On CPU the host waits, on a GPU only the current stream;
        for headers the host.

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
    """Messages in one direction: from this rank to a peer, or from the peer to this rank."""

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
        """Allocate the buffers of the next receive now. If memory is short, torch's allocator waits for the device, so
        this is called when such a wait does no harm."""


class Lookahead(NamedTuple):
    """How many receives of a link are posted before they are requested."""

    num_receives: int
    """Up to this many are posted over gloo, at the start of a step and after sends. Over NCCL 0 means that no large
    receive is posted early, either."""
    idle_bytes: int = 0
    """Once in a step, before the rank's first wait for another one, more are posted, until the messages posted ahead
    have this size together, in bytes (gloo)."""


HEADERS_AHEAD = Lookahead(2)
"""How many receives of headers are posted ahead (links.py), where those of the messages cannot be: a header tells the
size of its message. 2, as the default for messages over gloo."""


class Link:
    """A stage's end of one channel: a queue of messages, in the order of their units.

    Received messages stay here until an action pops them, results of actions until they are sent. No method of
    `Link` waits for a message, except that `post_early` may read headers on the host. The caller waits for what `pop`
    returns. At a sending end the methods for receives do nothing, but `pop` is not called; at a receiving end those for
    sends do nothing.
    """

    peer: int | None = None
    """The pipeline rank of the other end; None if it is on this rank."""

    def reset(self) -> None:
        """Called when a step begins."""

    def put(self, message: Transfer) -> None:
        """Append a message to be sent."""

    def send(self, number: int) -> None:
        """Send message `number` of the step if it is the next one; do nothing if it is sent already, or if earlier ones
        are not."""

    def request(self) -> None:
        """Count one more receive as requested. Over gloo it is posted now, if it is not posted yet; if the size of its
        message is not known, a receive of a header is posted now, if none is. Over NCCL it is posted when the message
        is waited for, in the order of the `Line`. No receive of a later message is posted here, since the rank is about
        to compute and others wait for the result."""

    def pop(self) -> Transfer:
        """Remove and return the oldest message requested. Wait for it: it may not have arrived, and over NCCL, or after
        a header, its receive may not even be posted before."""
        raise AssertionError("no message arrives at this end")

    def post_lookahead(self) -> None:
        """Post receives up to the lookahead's `num_receives` (gloo). Called when no rank waits for this one: at the
        start of a step for inputs, after a forward is sent for both kinds, after gradients are sent for output
        gradients."""

    def post_while_idle(self) -> None:
        """Post receives up to the lookahead's `idle_bytes` (gloo). Called once in a step, before the rank's first wait
        for another one."""

    def post_early(self) -> None:
        """Post the receive of the next message if it is large (NCCL): a message larger than NCCL's buffers travels only
        once its receive is posted. Called one action before the action that takes it."""

    def is_empty(self) -> bool:
        """Whether no message is left: every expected one has been taken, and every result has been sent."""
        return True


class LocalLink(Link):
    """Takes the place of a channel between two stages of one rank, and is the link of both. Tensors are not copied."""

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
    """The receiving end of a channel.

    Args:
        specs: the messages of one microbatch, one for each slice; the constant `HEADER` in their place if their sizes
            are not known. Empty for the gradients of messages with headers: `expect` is called for each one.
        count: the number of microbatches in a step.
        headers: receives a header before each message; the header has the message's full spec. If the sizes are known
            without it, the receive of the message is posted without waiting for the header.
        line: orders the receives from this peer (NCCL only).
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
        self._may_post_ahead = self._sizes_are_known and line is None
        self._expected: deque[MessageSpec] = deque()
        self._posted: deque[Transfer] = deque()
        self._num_requested = 0  # calls of `request`, less those of `pop`; of headers neither is called

    def reset(self) -> None:
        self._expected.extend([*self._specs] * self._count)
        if self._line is not None:
            self.reserve()
        if self._headers is not None:
            self._headers.reset()

    def expect(self, spec: MessageSpec) -> None:
        """Expect one more message with this spec, after those that are expected already. Called when the message is
        sent whose gradients these are."""
        self._expected.append(spec)

    def request(self) -> None:
        self._num_requested += 1
        if self._headers is not None and not self._headers._posted and self._line is None:
            self._headers._post()
        if self._may_post_ahead and len(self._posted) < self._num_requested:
            self._post()

    def pop(self) -> Transfer:
        self._num_requested -= 1
        return self._posted.popleft() if self._may_post_ahead and self._headers is None else _Arriving(self)

    def post_lookahead(self) -> None:
        if self._headers is not None:
            self._headers.post_lookahead()
        if self._may_post_ahead:
            while self._expected and len(self._posted) - self._num_requested < self._lookahead.num_receives:
                self._posted.append(self._channel.receive(self._expected.popleft()))

    def post_while_idle(self) -> None:
        if self._headers is not None:
            self._headers.post_while_idle()
        if not self._may_post_ahead:
            return
        room = self._lookahead.idle_bytes  # bytes left for messages whose receives are posted and not requested
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
        """Returns the spec and the transfer of the oldest message. Posts its receive if it is not posted, and waits for
        its header if it has one."""
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
        """Allocate the buffers of the next message early, if it is large (NCCL).

        If memory is short, an allocation waits for all that the device has been given. That may be a receive whose
        sender first waits for a message that this rank has not sent yet: both would wait for ever.
        """
        if self._is_large():
            self._channel.reserve(self._expected[0])

    def _is_large(self) -> bool:
        """Whether the next message is larger than NCCL's buffers, so that it travels only once its receive is
        posted."""
        if not (self._line and self._sizes_are_known and self._expected):
            return False
        return self._expected[0].nbytes > self._line.buffered_bytes


class _Arriving(Transfer):
    """A message of which only `wait` posts the receive (over NCCL, or if its size is not known), or reads the
    header."""

    __slots__ = ("_receiver",)

    def __init__(self, receiver: Receiver) -> None:
        super().__init__(None, [])
        self._receiver = receiver

    def wait(self) -> list[torch.Tensor]:
        self.spec, posted = self._receiver.next_message()
        self.tensors = posted.wait()
        return self.tensors


class Sender(Link):
    """The sending end of a channel.

    Args:
        headers: sends a header before each message.
        gradients: receives the gradients of these messages. Each message that has a header tells it their shapes.
        num_slices: the number of slices of a microbatch. Their gradients come back in the reverse order.
        line: checks the order of sends to this peer (NCCL only).
    """

    def __init__(
        self,
        channel: Channel,
        peer: int,
        headers: Channel | None = None,
        gradients: Receiver | None = None,
        num_slices: int = 1,
        line: Line | None = None,
    ) -> None:
        self.peer = peer
        self._channel = channel
        self._headers = headers
        self._gradients = gradients
        self._num_slices = num_slices
        self._line = line
        self._to_send: deque[Transfer] = deque()
        self._num_sent = 0
        self._gradient_specs: list[MessageSpec] = []  # of the slices of a microbatch, until its last slice is sent

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
        if self._headers is not None and self._gradients is not None:
            self._expect_gradients(message)

    def _expect_gradients(self, message: Transfer) -> None:
        assert message.spec is not None
        assert self._gradients is not None
        self._gradient_specs.append(message.spec.gradient_spec())
        if len(self._gradient_specs) == self._num_slices:
            for spec in reversed(self._gradient_specs):
                self._gradients.expect(spec)
            self._gradient_specs.clear()

    def is_empty(self) -> bool:
        return not self._to_send


class Line:
    """The order of all messages of a step between this rank and one peer (NCCL only). NCCL matches the messages between
    two ranks by their order, so receives must be posted in the order of the peer's sends.

    A receive is posted when its message is waited for, after the receives of all messages that the peer sends before
    it. It is not posted earlier, since a posted receive occupies multiprocessors of the GPU until its message has come.
    But the receive of a large message may be posted one action early, if the plan says so.

    Args:
        incoming, outgoing: the channel of each message of a step, in the order in which they are sent. `add` tells
            which link is the end of each channel.
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
        """Called when a step begins. All messages of the step before have been received."""
        self._to_come, self._turns = map(deque, self._orders)

    def post_until(self, receiver: Receiver) -> None:
        """Post the next receive of `receiver`, and first the receives of all messages that the peer sends before it."""
        posted: list[Receiver] = []
        while receiver not in posted:
            posted.append(self._receivers[self._to_come.popleft()])
            posted[-1]._post()
        for one in posted:
            one.reserve()

    def check_turn(self, sender: Sender) -> None:
        """Check that a send is the next one in the order: the peer would take it for another message if it were not."""
        turn = self._turns.popleft()
        assert turn == self._names[sender], f"{self._names[sender]} is sent where the plan has {turn}"


class Transport(ABC):
    """Connects one rank of a pipeline with others, and makes its channels. Its attributes depend on the kind of
    device."""

    lookahead = Lookahead(0)
    """The lookahead if the config does not set one."""
    matches_by_order = False
    """Whether all messages from one rank to another are matched by their order alone (NCCL)."""
    buffered_bytes = 0
    """A message up to this size leaves its sender before its receive is posted."""
    mark: Callable[[], Callable[[], bool]] | None = None
    """Marks the current point of the device's stream, for `Monitor`. Returns a function that tells whether the device
    has reached it. None if the host waits for messages."""

    def find_error(self) -> str | None:
        """Returns an error of a connection that no call has raised yet. Called from the watchdog's thread."""
        return None

    @abstractmethod
    def connect(self, edges: Sequence[tuple[int, int]]) -> None:
        """Called once, on all ranks of the pipeline at the same time.

        Args:
            edges: (sender, receiver), in an order in which all ranks can connect them one after the other.
        """

    def connect_headers(self) -> None:  # noqa: B027
        """Called once, on all ranks of the pipeline at the same time, if messages have headers."""

    @abstractmethod
    def channel(self, name: ChannelName, peer: int, sends: bool) -> Channel:
        """Make the channel of this name. Headers travel between hosts, all other messages between devices."""

    @abstractmethod
    def drain(self) -> None:
        """Called at the end of a step: wait for the sends that the host must complete (gloo, and headers).

        Raises:
            ConnectionLostError: a message was lost.
        """

    @abstractmethod
    def abort(self) -> None:
        """Make every operation fail that has not completed, here and on the peers. Called from any thread, also while
        another one connects or sends. The transport cannot be used afterwards."""

    @abstractmethod
    def close(self) -> None:
        """Stop helper threads, and close the connections."""


class Channels:
    """All channels of one rank over one transport. Made once for a pipeline and kept between steps."""

    def __init__(self, transport: Transport, placement: Placement, pp_rank: int, pp_size: int, num_chunks: int) -> None:
        self.transport = transport
        self._placement = placement
        self._pp_rank = pp_rank
        self._pp_size = pp_size
        self._num_stages = pp_size * num_chunks
        self._has_headers = False
        self._channels: dict[ChannelName, Channel] = {}

    def connect(self) -> None:
        """Open the channels of messages. Collective over the pipeline."""
        self.transport.connect(edges_in_rounds(self._placement, self._pp_size, self._num_stages))
        self._make_channels("forward", "backward")

    def connect_headers(self) -> None:
        """Open the channels of headers, unless they are open. Collective over the pipeline."""
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
                is_upper = self._pp_rank == upper
                sends = is_upper if name.kind == "backward" else not is_upper
                self._channels[name] = self.transport.channel(name, peer, sends)


def edges_in_rounds(placement: Placement, pp_size: int, num_stages: int) -> list[tuple[int, int]]:
    """The (sender, receiver) pairs of ranks that exchange messages, in an order in which all ranks can connect them one
    after the other. Pairs without a rank in common may connect in the same round, so that two or three rounds are
    enough."""
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

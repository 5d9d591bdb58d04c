"""A rank's channels in one pipeline, over a transport."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise

from ..plan import ChannelName, Placement, Plan
from .inboxes import HEADERS_AHEAD, Channel, DynamicShapesInbox, Inbox, Lookahead, PostedInbox
from .ordered import Arrivals, OrderedChannel

__all__ = ["Communicator", "Transport", "edges_in_rounds"]


class Transport(ABC):
    """Carries the messages of one rank of a pipeline. Its attributes are what depends on the kind of device."""

    lookahead = Lookahead(0)
    """The receives posted ahead where the config does not say."""
    matches_by_order = False
    """Whether messages from one rank to another are told apart by their order alone."""
    buffered_bytes = 0
    """Messages up to this size travel before their receives are posted."""

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

        self.matches_by_order = transport.matches_by_order
        self.buffered_bytes = transport.buffered_bytes

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
        if self.matches_by_order:
            traffic = plan().traffic
            if forward_only:
                traffic = {edge: [name for name in names if name.kind == "forward"] for edge, names in traffic.items()}
            self._traffic = traffic
            self._arrivals = {
                peer: Arrivals(traffic.get((peer, self._pp_rank), []), self.buffered_bytes) for peer in self._peers
            }
            self._turns = {peer: deque(traffic.get((self._pp_rank, peer), [])) for peer in self._peers}

    def outgoing(self, name: ChannelName, peer: int) -> Channel:
        """A channel to send over in this step."""
        channel = self._channels[name]
        return OrderedChannel(name, channel, self._turns[peer]) if self._is_ordered(name) else channel

    def incoming(self, name: ChannelName, peer: int, lookahead: Lookahead, has_headers: bool) -> Inbox:
        """The receives of a channel in this step."""
        channel = self._channels[name]
        headers = self._channels[ChannelName("header", name.boundary)] if has_headers else None
        if self._is_ordered(name):
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

    def _is_ordered(self, name: ChannelName) -> bool:
        return self.matches_by_order and name.kind != "header"


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

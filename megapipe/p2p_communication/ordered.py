"""Channels that share a communicator, whose messages are known by their order alone."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from ..messages import MessageSpec, decode_header
from ..plan import ChannelName
from .inboxes import Channel, Inbox, PostedInbox
from .transfers import LateTransfer, Transfer

__all__ = ["Arrivals", "OrderedChannel", "OrderedInbox"]


class Arrivals:
    """The messages of one step from one peer, where all of them share a communicator that matches by order alone.

    A receive is posted when a step waits for it, behind those of all messages that the peer sends before it. So only
    computations that need a message wait for it, and no receive occupies a device for longer. But that of a large
    message may be posted one action early, where the plan says so.

    Args:
        order: their channels, in the order in which they are sent.
        buffered_bytes: see `Transport`.
    """

    def __init__(self, order: Sequence[ChannelName], buffered_bytes: int) -> None:
        self._order = order
        self.buffered_bytes = buffered_bytes
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

    def post_next(self) -> None:
        is_known = self._headers is None and not self._posted
        if is_known and self._expected and self._expected[0].nbytes > self._arrivals.buffered_bytes:
            self._arrivals.post_until(self)

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

"""What a rank receives over one channel, and how far ahead the receives are posted."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from typing import NamedTuple

import torch

from ..messages import HEADER, MessageSpec, decode_header
from .transfers import DescribedTransfer, LateTransfer, Transfer

__all__ = ["HEADERS_AHEAD", "Channel", "DescribedInbox", "DynamicShapesInbox", "Inbox", "Lookahead", "PostedInbox"]


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

    def post_next(self) -> None:  # noqa: B027
        """Post the receive of the message that is taken next, if that has to be posted for the message to travel."""

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

    def post_next(self) -> None:
        self._messages.post_next()

    def post_all(self) -> None:
        self._headers.post_ahead()
        self._messages.post_all()

"""The two sides of a stage: how it exchanges messages with the stage below it and with the one above it.

A neighbour is missing (`NoBoundary`), on the same rank (`LocalBoundary`) or on another one (`RemoteBelow`,
`RemoteAbove`). All answer the same calls, so the verbs need not ask where the neighbour is. Messages wait here, in the
order of their units: those received until a computation takes them, those made until they are sent. None of the calls
waits.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..messages import HEADER, MessageSpec, encode_header
from ..p2p_communication import HEADERS_AHEAD, Communicator, DescribedInbox, Inbox, Lookahead, Transfer
from ..plan import ChannelName, StageInfo
from .found_shapes import Specs, UndescribedMessages
from .plans import PlanKey

__all__ = [
    "Above",
    "Below",
    "Boundary",
    "LocalBoundary",
    "NoBoundary",
    "RemoteAbove",
    "RemoteBelow",
    "boundaries_around",
]


class Boundary:
    """One side of a stage. By itself the side without a neighbour."""

    peer: int | None = None
    """Pipeline rank of the other side, where it is not this one."""

    def post_ahead(self) -> None:
        """Post receives of the next messages. Called after a send: that is, when no rank waits for this one."""

    def post_next(self) -> None:
        """Post the receive of the next message. Called before the action in front of that which takes it."""

    def post_all(self) -> None:
        """Post receives of all messages that may be posted. Called when this rank waits for others."""

    def is_empty(self) -> bool:
        """Whether every expected message has been taken."""
        return True


class Below(Boundary):
    """The boundary between a stage and the one below it."""

    def recv_input(self) -> None:
        """Receive the next forward input."""

    def take_input(self) -> Transfer | None:
        """The oldest input received. It may not have arrived. None on the first stage."""
        return None

    def put_gradient(self, grads: list[Tensor]) -> None:
        """The gradients of the oldest input that has none yet, to be sent."""

    def send_gradient(self, number: int) -> None:
        """Send those of this number, unless that has been done, or others are to be sent before them."""

    def discard_inputs(self, num_sent: int) -> list[Transfer]:
        """Start again after a rollback, before any backward.

        Args:
            num_sent: how many outputs the stage below sends before it rolls back.

        Returns:
            The inputs of these that have not been taken yet. The caller waits for them.
        """
        return []


class Above(Boundary):
    """The boundary between a stage and the one above it."""

    def put_output(self, output: Transfer) -> None:
        """The next output, to be sent."""

    def send_output(self, number: int) -> None:
        """Send that of this number, unless that has been done, or others are to be sent before it."""

    def recv_gradient(self) -> None:
        """Receive the gradients of the oldest output that has none yet: one for each of its tensors that wants one."""

    def take_gradient(self) -> Transfer | None:
        """The oldest gradients received. They may not have arrived. None on the last stage."""
        return None

    def discard_outputs(self) -> None:
        """Start again after a rollback, before any backward."""


class NoBoundary(Below, Above):
    """Before the first stage and behind the last: data and loss do not travel."""


class LocalBoundary(Below, Above):
    """The boundary between two stages of this rank: tensors are handed over without a copy."""

    def __init__(self) -> None:
        self._outputs: deque[Transfer] = deque()
        self._gradients: deque[Transfer] = deque()

    def take_input(self) -> Transfer:
        assert self._outputs, "forward_step before that of the stage below, which is on the same rank"
        return self._outputs.popleft()

    def put_output(self, output: Transfer) -> None:
        self._outputs.append(output)

    def take_gradient(self) -> Transfer:
        assert self._gradients, "backward_step before that of the stage above, which is on the same rank"
        return self._gradients.popleft()

    def put_gradient(self, grads: list[Tensor]) -> None:
        self._gradients.append(Transfer(None, grads))

    def is_empty(self) -> bool:
        return not self._outputs and not self._gradients

    def discard_inputs(self, num_sent: int) -> list[Transfer]:
        self._outputs.clear()
        return []

    def discard_outputs(self) -> None:
        self._outputs.clear()


class _Remote(Boundary):
    """A boundary to another rank, from which messages are received."""

    _inbox: Inbox
    _received: deque[Transfer]
    _to_send: deque[Any]
    _num_sent: int

    def post_ahead(self) -> None:
        self._inbox.post_ahead()

    def post_next(self) -> None:
        self._inbox.post_next()

    def post_all(self) -> None:
        self._inbox.post_all()

    def is_empty(self) -> bool:
        return self._inbox.is_empty() and not self._received and not self._to_send


class RemoteBelow(_Remote, Below):
    """The boundary to the stage below, on another rank.

    Args:
        index: the boundary's number, that of the stage below it.
        specs: the message that comes, or that of each slice; None with dynamic shapes.
        num_inputs: how many will come of each slice.
        num_slices: of a sequence.
        has_headers: a header precedes each message, as always with dynamic shapes.
    """

    def __init__(
        self,
        communicator: Communicator,
        index: int,
        peer: int,
        specs: Sequence[MessageSpec] | None,
        num_inputs: int,
        num_slices: int,
        lookahead: Lookahead,
        has_headers: bool,
    ) -> None:
        self.peer = peer
        self._backward = communicator.outgoing(ChannelName("backward", index), peer)
        self._inbox = communicator.incoming(ChannelName("forward", index), peer, lookahead, has_headers=specs is None)
        if has_headers and specs is not None:
            headers = communicator.incoming(ChannelName("header", index), peer, HEADERS_AHEAD, has_headers=False)
            self._inbox = DescribedInbox(headers, self._inbox)
        self._specs = specs or [HEADER] * num_slices
        _expect(self._inbox, self._specs, num_inputs)
        self._inbox.post_ahead()
        self._received, self._to_send = deque(), deque()
        self._num_received = self._num_sent = 0

    def recv_input(self) -> None:
        self._num_received += 1
        self._received.append(self._inbox.take())

    def take_input(self) -> Transfer:
        return self._received.popleft()

    def put_gradient(self, grads: list[Tensor]) -> None:
        self._to_send.append(grads)

    def send_gradient(self, number: int) -> None:
        if number == self._num_sent:
            self._num_sent += 1
            self._backward.send(self._to_send.popleft())

    def discard_inputs(self, num_sent: int) -> list[Transfer]:
        # Receives that have been posted stay so: they take the inputs that are sent again.
        while self._num_received < num_sent:
            self.recv_input()
        to_come = list(self._received)
        self._received.clear()
        _expect(self._inbox, self._specs, num_sent)
        self._num_received = 0
        return to_come


class RemoteAbove(_Remote, Above):
    """The boundary to the stage above, on another rank.

    Args:
        index: the boundary's number, that of the stage below it.
        specs: the message that is sent, or that of each slice; None with dynamic shapes.
        num_outputs: how many of each slice are sent in a step.
        num_slices: of a sequence. Its gradients come back in the reverse order.
        forward_only: no gradients come back.
        has_headers: a header precedes each message, as always with dynamic shapes.
    """

    def __init__(
        self,
        communicator: Communicator,
        index: int,
        peer: int,
        specs: Sequence[MessageSpec] | None,
        num_outputs: int,
        num_slices: int,
        lookahead: Lookahead,
        forward_only: bool,
        has_headers: bool,
    ) -> None:
        self.peer = peer
        self._forward = communicator.outgoing(ChannelName("forward", index), peer)
        self._inbox = communicator.incoming(ChannelName("backward", index), peer, lookahead, has_headers=False)
        self._headers = None
        self._received, self._to_send = deque(), deque()
        self._num_sent = 0
        # A gradient is expected once for each output, also where that is sent again after a rollback.
        self._num_expected = num_outputs * num_slices
        self._num_slices = num_slices
        self._described: list[MessageSpec] = []  # of a microbatch whose last slice has still to be sent
        if has_headers:
            self._headers = communicator.outgoing(ChannelName("header", index), peer)
            if not forward_only:
                self._num_expected = 0  # until it is known which there are
        elif specs is not None and not forward_only:
            _expect(self._inbox, [spec.gradient() for spec in reversed(specs)], num_outputs)

    def put_output(self, output: Transfer) -> None:
        self._to_send.append(output)

    def send_output(self, number: int) -> None:
        if number != self._num_sent:
            return
        self._num_sent += 1
        output = self._to_send.popleft()
        assert output.spec is not None
        if self._headers is not None:
            self._headers.send([encode_header(output.spec)])
        self._forward.send(output.tensors)
        if self._num_sent > self._num_expected:
            self._described.append(output.spec.gradient())
            self._num_expected += 1
            if len(self._described) == self._num_slices:
                _expect(self._inbox, self._described[::-1], 1)
                self._described.clear()
        self._inbox.post_ahead()

    def recv_gradient(self) -> None:
        self._received.append(self._inbox.take())

    def take_gradient(self) -> Transfer:
        return self._received.popleft()

    def discard_outputs(self) -> None:
        self._num_sent = 0
        self._to_send.clear()


def _expect(inbox: Inbox, specs: Sequence[MessageSpec], count: int) -> None:
    """One message of each spec in turn, `count` times."""
    if len(specs) == 1:
        inbox.expect(specs[0], count)
        return
    for _ in range(count):
        for spec in specs:
            inbox.expect(spec)


def boundaries_around(
    key: PlanKey,
    pp_rank: int,
    specs: Specs,
    communicator: Communicator | None,
    lookahead: Lookahead,
    forward_only: bool,
    undescribed: UndescribedMessages,
) -> list[tuple[Below, Above]]:
    """The boundary below each of a rank's stages, and the one above.

    Args:
        specs: of each stage.
        communicator: None where the pipeline has one rank only.
    """
    placement, num_messages = key.schedule.placement, (key.num_microbatches, key.num_slices)
    local: defaultdict[int, LocalBoundary] = defaultdict(LocalBoundary)  # by the number of the stage below

    def below(chunk: int, stage: StageInfo, received: Sequence[MessageSpec] | None) -> Below:
        if stage.is_first:
            return NoBoundary()
        index = stage.index - 1
        peer = placement.rank(index, key.pp_size)
        if peer == pp_rank:
            return local[index]
        assert communicator is not None
        has_headers = undescribed.have_headers(chunk, received)
        return RemoteBelow(communicator, index, peer, received, *num_messages, lookahead, has_headers)

    def above(chunk: int, stage: StageInfo, sent: Sequence[MessageSpec] | None) -> Above:
        if stage.is_last:
            return NoBoundary()
        peer = placement.rank(stage.index + 1, key.pp_size)
        if peer == pp_rank:
            return local[stage.index]
        assert communicator is not None
        has_headers = undescribed.have_headers(chunk, sent)
        return RemoteAbove(communicator, stage.index, peer, sent, *num_messages, lookahead, forward_only, has_headers)

    stages = placement.stages(pp_rank, key.pp_size, key.num_chunks)
    return [
        (below(chunk, stage, received), above(chunk, stage, sent))
        for chunk, (stage, (received, sent)) in enumerate(zip(stages, specs))
    ]

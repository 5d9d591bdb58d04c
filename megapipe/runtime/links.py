"""Makes the links of the stages of a rank: to a stage on another rank, or to one on the same rank."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..messages import HEADER, MessageSpec
from ..p2p_communication import HEADERS_AHEAD, Channels, Line, Link, LocalLink, Lookahead, Receiver, Sender
from ..plan import ChannelName, StageInfo
from .found_shapes import FoundShapes, Specs
from .pipeline import Links
from .plans import PlanKey


def lines_of(
    traffic: Mapping[tuple[int, int], Sequence[ChannelName]], pp_rank: int, forward_only: bool, buffered_bytes: int
) -> dict[int, Line]:
    """The `Line` of each peer: the order of messages from and to it.

    Args:
        traffic: `PlanKey.traffic_around` this rank.
    """
    orders: defaultdict[int, list[Sequence[ChannelName]]] = defaultdict(lambda: [(), ()])
    for (sender, receiver), names in traffic.items():
        kept = [name for name in names if name.kind == "forward"] if forward_only else names
        if receiver == pp_rank:
            orders[sender][0] = kept
        elif sender == pp_rank:
            orders[receiver][1] = kept
    return {peer: Line(incoming, outgoing, buffered_bytes) for peer, (incoming, outgoing) in orders.items()}


def links_around(
    key: PlanKey,
    pp_rank: int,
    specs: Specs,
    found_shapes: FoundShapes,
    channels: Channels | None,
    lookahead: Lookahead,
    lines: Mapping[int, Line],
    forward_only: bool,
) -> list[Links]:
    """The links of each stage of a rank.

    Args:
        specs: for each stage the specs of the messages that it receives and sends, one for each slice; None if only a
            header tells them.
        channels: None if the pipeline has one rank.
        lines: by peer; empty if the transport does not match messages by their order.
    """
    placement = key.schedule.placement
    stages = placement.stages(pp_rank, key.pp_size, key.num_chunks)
    make = _Making(key, pp_rank, found_shapes, channels, lookahead, lines, forward_only)
    around = []
    for chunk, (stage, (received, sent)) in enumerate(zip(stages, specs)):
        inputs, input_grads = make.below(chunk, stage, received)
        outputs, output_grads = make.above(chunk, stage, sent)
        around.append(Links(inputs, outputs, output_grads, input_grads))
    return around


@dataclass
class _Making:
    """Makes the links of one rank. Its fields are the arguments of `links_around`."""

    key: PlanKey
    pp_rank: int
    found_shapes: FoundShapes
    channels: Channels | None
    lookahead: Lookahead
    lines: Mapping[int, Line]
    forward_only: bool
    local: defaultdict[int, tuple[Link, Link]] = field(
        default_factory=lambda: defaultdict(lambda: (LocalLink(), LocalLink()))
    )

    def below(
        self, chunk: int, stage: StageInfo, received: Sequence[MessageSpec] | None
    ) -> tuple[Link | None, Link | None]:
        """The links of inputs and of input gradients."""
        index = stage.index - 1
        if stage.is_first:
            return None, None
        peer = self.key.schedule.placement.rank(index, self.key.pp_size)
        if peer == self.pp_rank:
            return self.local[index]
        has_headers = self.found_shapes.have_headers(chunk, received)
        inputs = self._receiver("forward", index, peer, received or [HEADER] * self.key.num_slices, has_headers)
        return inputs, self._sender("backward", index, peer)

    def above(
        self, chunk: int, stage: StageInfo, sent: Sequence[MessageSpec] | None
    ) -> tuple[Link | None, Link | None]:
        """The links of outputs and of output gradients."""
        if stage.is_last:
            return None, None
        peer = self.key.schedule.placement.rank(stage.index + 1, self.key.pp_size)
        if peer == self.pp_rank:
            return self.local[stage.index]
        has_headers = self.found_shapes.have_headers(chunk, sent)
        is_known = sent is not None and not has_headers and not self.forward_only
        known = [spec.gradient_spec() for spec in reversed(sent or ())] if is_known else []
        grads = self._receiver("backward", stage.index, peer, known)
        return self._sender("forward", stage.index, peer, has_headers, None if self.forward_only else grads), grads

    def _receiver(
        self, kind: str, index: int, peer: int, specs: Sequence[MessageSpec], has_headers: bool = False
    ) -> Receiver:
        assert self.channels is not None
        headers, count = None, self.key.num_microbatches
        if has_headers:
            ahead = self.lookahead if HEADER in specs and not self.lines else HEADERS_AHEAD
            channel = self.channels.channel("header", index)
            headers = Receiver(channel, peer, [HEADER] * self.key.num_slices, count, ahead)
        line = self.lines.get(peer)
        made = Receiver(self.channels.channel(kind, index), peer, specs, count, self.lookahead, headers, line)
        if line is not None:
            line.add(made, ChannelName(kind, index))
        return made

    def _sender(
        self, kind: str, index: int, peer: int, has_headers: bool = False, gradients: Receiver | None = None
    ) -> Sender:
        assert self.channels is not None
        headers = self.channels.channel("header", index) if has_headers else None
        line = self.lines.get(peer)
        made = Sender(self.channels.channel(kind, index), peer, headers, gradients, self.key.num_slices, line)
        if line is not None:
            line.add(made, ChannelName(kind, index))
        return made

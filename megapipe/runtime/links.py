"""Makes the links of the stages of a rank: to a stage on another rank, or to one on the same rank."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

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
    count, num_slices = key.num_microbatches, key.num_slices
    local: defaultdict[int, tuple[Link, Link]] = defaultdict(lambda: (LocalLink(), LocalLink()))

    def receiver(kind: str, index: int, peer: int, specs: Sequence[MessageSpec], has_headers: bool = False) -> Receiver:
        assert channels is not None
        headers = None
        if has_headers:
            ahead = lookahead if HEADER in specs and not lines else HEADERS_AHEAD
            headers = Receiver(channels.channel("header", index), peer, [HEADER] * num_slices, count, ahead)
        line = lines.get(peer)
        made = Receiver(channels.channel(kind, index), peer, specs, count, lookahead, headers, line)
        if line is not None:
            line.add(made, ChannelName(kind, index))
        return made

    def sender(kind: str, index: int, peer: int, has_headers: bool = False, replies: Receiver | None = None) -> Sender:
        assert channels is not None
        headers = channels.channel("header", index) if has_headers else None
        line = lines.get(peer)
        made = Sender(channels.channel(kind, index), peer, headers, replies, num_slices, line)
        if line is not None:
            line.add(made, ChannelName(kind, index))
        return made

    def below(chunk: int, stage: StageInfo, received: Sequence[MessageSpec] | None) -> tuple[Link | None, Link | None]:
        """The links of inputs and of input gradients."""
        index = stage.index - 1
        if stage.is_first:
            return None, None
        peer = placement.rank(index, key.pp_size)
        if peer == pp_rank:
            return local[index]
        has_headers = found_shapes.have_headers(chunk, received)
        inputs = receiver("forward", index, peer, received or [HEADER] * num_slices, has_headers)
        return inputs, sender("backward", index, peer)

    def above(chunk: int, stage: StageInfo, sent: Sequence[MessageSpec] | None) -> tuple[Link | None, Link | None]:
        """The links of outputs and of output gradients."""
        if stage.is_last:
            return None, None
        peer = placement.rank(stage.index + 1, key.pp_size)
        if peer == pp_rank:
            return local[stage.index]
        has_headers = found_shapes.have_headers(chunk, sent)
        known = [] if sent is None or has_headers or forward_only else [spec.gradient_spec() for spec in reversed(sent)]
        grads = receiver("backward", stage.index, peer, known)
        return sender("forward", stage.index, peer, has_headers, None if forward_only else grads), grads

    around = []
    for chunk, (stage, (received, sent)) in enumerate(
        zip(placement.stages(pp_rank, key.pp_size, key.num_chunks), specs)
    ):
        (inputs, input_grads), (outputs, output_grads) = below(chunk, stage, received), above(chunk, stage, sent)
        around.append(Links(inputs, outputs, output_grads, input_grads))
    return around

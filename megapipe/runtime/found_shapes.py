"""Shapes of messages that neither the arguments nor the models tell. In the first step a header before each message
tells them; in later steps messages are expected to have the same shapes.

Both ends of a boundary see the same messages in the same step, so they come to the same conclusion: all messages of the
first step had the same spec, which is then kept; or they differed, and each message has a header in every step.

Only sizes are sure to stay the same: a stage may be unfrozen, of which no other rank knows, or a plain value may
change. So a message that holds plain values, or floating-point tensors without a gradient, keeps its header."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple
from weakref import ref

from torch import nn

from ..chunks import wrapped_in
from ..messages import MessageSpec
from ..plan import StageInfo
from ..stages import Call
from ..structure import kept_for

Specs = list[tuple[Sequence[MessageSpec] | None, Sequence[MessageSpec] | None]]
"""The specs of the messages that each stage receives, and of those that it sends: one for each slice, or None if they
are not known."""


class SeenSpecs:
    """The specs of all messages over one boundary in a step, without repetition. Each slice has a set of its own."""

    def __init__(self, num_slices: int = 1) -> None:
        self._specs: list[set[MessageSpec]] = [set() for _ in range(num_slices)]

    def add(self, spec: MessageSpec, slice: int) -> None:
        self._specs[slice].add(spec)

    def only(self) -> list[MessageSpec] | None:
        """Returns the spec of each slice; None if the messages of some slice differed."""
        return [next(iter(specs)) for specs in self._specs] if all(len(specs) == 1 for specs in self._specs) else None


class SeenMessages(NamedTuple):
    """The specs of the messages that a chunk received and sent in its first step."""

    received: SeenSpecs
    sent: SeenSpecs


class FoundShapes:
    """The messages between this rank and others whose shapes are found in the first step.

    They are kept for the chunk, whatever becomes of its parts, of which the peer does not know. The key has all that
    may change their shapes and is known to all ranks before the step: whether there will be gradients, the sizes that
    the schedule is called with, the slices of a sequence, and the peer, since another one has not seen them. Under
    another key they are found anew.

    Args:
        session: the session in which they are found.
        peers: by chunk, the ranks with which it exchanges such messages: of the previous stage and of the next one.
    """

    def __init__(
        self, session: object, call: Call, stages: Sequence[StageInfo], peers: dict[int, tuple[int | None, int | None]]
    ) -> None:
        self._stages = stages
        self._peers = peers
        self._sizes = call.seq_length, call.micro_batch_size, call.decoder_seq_length
        self._forward_only = call.forward_only
        step_key = (ref(session), call.forward_only, *self._sizes, *(part.length for part in call.slices))
        self._found: dict[int, dict[object, SeenSpecs]] = {
            chunk: kept_for(_stage_in(call.models[chunk])).setdefault(FoundShapes, {}) for chunk in peers
        }
        self._keys = {
            chunk: [(stages[chunk], side, peer, step_key) for side, peer in zip(SeenMessages._fields, around)]
            for chunk, around in peers.items()
        }

    def __bool__(self) -> bool:
        return bool(self._peers)

    def __contains__(self, chunk: int) -> bool:
        return chunk in self._peers

    def is_first(self, chunk: int) -> bool:
        """Whether this step is the first one of the chunk, so that shapes are found in it."""
        peers = self._peers.get(chunk, ())
        return None in [specs for specs, peer in zip(self._known(chunk), peers) if peer is not None]

    def _known(self, chunk: int) -> list[SeenSpecs | None]:
        """The specs received and sent in an earlier first step; None for those that are not found yet."""
        return [self._found[chunk].get(key) for key in self._keys.get(chunk, ())]

    def fill_in(self, specs: Specs) -> None:
        """Put the found specs into `specs`. If messages differed in the first step, None is put in: each has a
        header."""
        for chunk in self._peers:
            received, sent = (None if seen is None else seen.only() for seen in self._known(chunk))
            specs[chunk] = received, sent

    def have_headers(self, chunk: int, specs: Sequence[MessageSpec] | None) -> bool:
        """Whether a header precedes each message over a boundary of the chunk.

        Args:
            specs: of the messages over that boundary; None if they are not known.
        """
        return specs is None or (chunk in self and any(spec.may_change(self._forward_only) for spec in specs))

    def keep(self, chunk: int, seen: SeenMessages) -> None:
        """Called after a whole step: keep the specs that were seen, unless some are kept already."""
        for key, peer, different in zip(self._keys.get(chunk, ()), self._peers.get(chunk, ()), seen):
            if peer is not None:
                self._found[chunk].setdefault(key, different)

    def to_agree_on(self, specs: Specs) -> dict[str, str]:
        """What ranks must agree on: either both ends of a boundary find its shapes in this step, or neither does."""
        arguments = {"whether shapes are found in the first step": str(bool(self))}
        if self:
            arguments["seq_length, micro_batch_size and decoder_seq_length"] = ", ".join(map(str, self._sizes))
        for chunk, peers in self._peers.items():
            index = self._stages[chunk].index
            for peer, spec, boundary in zip(peers, specs[chunk], (index - 1, index)):
                if peer is not None and spec is None:
                    arguments[boundary_name(boundary)] = "described by a header, as in the first step of a new chunk"
        return arguments


def _stage_in(chunk: nn.Module) -> nn.Module:
    """The module that takes the messages: a chunk may be wrapped on one rank only, of which the peer does not know."""
    inner = [one for one in wrapped_in(chunk) if hasattr(type(one), "set_input_tensor")]
    return inner[-1] if inner else chunk


def boundary_name(index: int) -> str:
    return f"the message from stage {index} to stage {index + 1}"

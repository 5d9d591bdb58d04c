"""Messages that are not described beforehand: each is described in the first step, by a header that precedes it, and
expected to be the same from then on.

Both ends of a boundary see the same messages in the same step, so they come to the same conclusion: one description for
all of them, or, where they differ within the first step, a header in each step.

Only its sizes are sure to hold in later steps: a stage may be unfrozen, of which no other rank knows, or a plain value
may be another one. So a message keeps its header where it holds plain values, or floating point without a gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

from torch import nn

from ..messages import MessageSpec
from ..plan import StageInfo
from ..stages import Call

Specs = list[tuple[Sequence[MessageSpec] | None, Sequence[MessageSpec] | None]]
"""Per stage the message that it receives and the one that it sends, where known: one, or one for each slice."""


class Different:
    """The different messages over a boundary, of each slice of a sequence by itself."""

    def __init__(self, num_slices: int = 1) -> None:
        self._specs: list[set[MessageSpec]] = [set() for _ in range(num_slices)]

    def add(self, spec: MessageSpec, slice: int) -> None:
        self._specs[slice].add(spec)

    def only(self) -> list[MessageSpec] | None:
        """That of each slice, if it was always the same."""
        return [next(iter(specs)) for specs in self._specs] if all(len(specs) == 1 for specs in self._specs) else None


class Seen(NamedTuple):
    """The messages of a chunk in its first step."""

    received: Different
    sent: Different


FoundShapes = WeakKeyDictionary[nn.Module, dict[object, Seen]]
"""What has been seen in a session, by chunk and by the situation."""


class UndescribedMessages:
    """The messages of a step between this rank and others that neither the model nor the arguments describe.

    What may change their shapes, and is known to all ranks before the step, is its situation: whether there will be
    gradients, the sizes that the schedule is called with, and the slices of a sequence. In another one they are found
    anew.

    Args:
        ends: by chunk, whether it exchanges such messages with the stage before it, and with the one behind it.
    """

    def __init__(
        self, found: FoundShapes, call: Call, stages: Sequence[StageInfo], ends: dict[int, tuple[bool, bool]]
    ) -> None:
        self._stages = stages
        self._ends = ends
        self._sizes = call.seq_length, call.micro_batch_size, call.decoder_seq_length
        self._forward_only = call.forward_only
        situation = (call.forward_only, *self._sizes, *(part.length for part in call.slices))
        self._found = {n: (found.setdefault(call.models[n], {}), (stages[n], situation)) for n in ends}

    def __bool__(self) -> bool:
        return bool(self._ends)

    def __contains__(self, chunk: int) -> bool:
        return chunk in self._ends

    def is_first(self, chunk: int) -> bool:
        """Whether the chunk's messages are to be found in this step."""
        if chunk not in self._ends:
            return False
        seen, situation = self._found[chunk]
        return situation not in seen

    def fill_in(self, specs: Specs) -> None:
        """Put in what was found in an earlier step. Where messages varied there, each is described again."""
        for chunk, (seen, situation) in self._found.items():
            if situation in seen:
                specs[chunk] = seen[situation].received.only(), seen[situation].sent.only()

    def have_headers(self, chunk: int, specs: Sequence[MessageSpec] | None) -> bool:
        """Whether a header precedes each message over a boundary of the chunk.

        Args:
            specs: of what is received, or of what is sent.
        """
        return specs is None or (chunk in self and any(spec.may_change(self._forward_only) for spec in specs))

    def keep(self, chunk: int, seen: Seen) -> None:
        """After a whole step."""
        if self.is_first(chunk):
            receives, sends = self._ends[chunk]
            known, situation = self._found[chunk]
            known[situation] = Seen(seen.received if receives else Different(), seen.sent if sends else Different())

    def to_agree_on(self, specs: Specs) -> dict[str, str]:
        """Both ends of a boundary find a message, or neither does."""
        arguments = {"whether shapes are found in the first step": str(bool(self))}
        if self:
            arguments["seq_length, micro_batch_size and decoder_seq_length"] = ", ".join(map(str, self._sizes))
        for chunk, (receives, sends) in self._ends.items():
            index, (received, sent) = self._stages[chunk].index, specs[chunk]
            for is_undescribed, boundary in (
                (receives and received is None, index - 1),
                (sends and sent is None, index),
            ):
                if is_undescribed:
                    arguments[boundary_name(boundary)] = "described by a header, as in the first step of a new chunk"
        return arguments


def boundary_name(index: int) -> str:
    return f"the message from stage {index} to stage {index + 1}"

"""Messages that nobody has described beforehand: each is described in the first step, by a header that precedes it, and
expected to be the same from then on.

Both ends of a boundary see the same messages in the same step, so they come to the same conclusion: one description for
all of them, or, where they differ within the first step, a header in each step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

from torch import nn

from ..messages import MessageSpec
from ..plan import StageInfo
from .shapes import ShapeArguments

__all__ = ["FoundShapes", "Seen", "Unsaid"]

Specs = list[tuple[MessageSpec | None, MessageSpec | None]]


class Seen(NamedTuple):
    """The messages of a chunk in its first step."""

    received: set[MessageSpec]
    sent: set[MessageSpec]


class FoundShapes:
    """What has been seen in a session, by chunk. It ends with the session, on all ranks."""

    def __init__(self) -> None:
        self._seen: WeakKeyDictionary[nn.Module, dict[object, Seen]] = WeakKeyDictionary()

    def of(self, model: nn.Module) -> dict[object, Seen]:
        """By the situation."""
        return self._seen.setdefault(model, {})


class Unsaid:
    """The messages of a step between this rank and others that neither the model nor the arguments describe.

    What may change their shapes, and is known to all ranks before the step, is its situation: whether there will be
    gradients, and the sizes that the schedule is called with. In another one they are found anew.

    Args:
        ends: by chunk, whether it exchanges such messages with the stage before it, and with the one behind it.
    """

    def __init__(
        self,
        found: FoundShapes,
        models: Sequence[nn.Module],
        stages: Sequence[StageInfo],
        ends: dict[int, tuple[bool, bool]],
        arguments: ShapeArguments,
        forward_only: bool,
    ) -> None:
        self._stages = stages
        self._ends = ends
        self._sizes = arguments.seq_length, arguments.micro_batch_size, arguments.decoder_seq_length
        self._found = {n: (found.of(models[n]), (stages[n], forward_only, *self._sizes)) for n in ends}

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
                received, sent = map(_only, seen[situation])
                specs[chunk] = received, sent

    def keep(self, chunk: int, seen: Seen) -> None:
        """After a whole step."""
        if self.is_first(chunk):
            receives, sends = self._ends[chunk]
            known, situation = self._found[chunk]
            known[situation] = Seen(seen.received if receives else set(), seen.sent if sends else set())

    def to_agree_on(self, specs: Specs) -> dict[str, str]:
        """Both ends of a boundary find a message, or neither does."""
        arguments = {"whether shapes are found in the first step": str(bool(self))}
        if self:
            arguments["seq_length, micro_batch_size and decoder_seq_length"] = ", ".join(map(str, self._sizes))
        for chunk, (receives, sends) in self._ends.items():
            index, (received, sent) = self._stages[chunk].index, specs[chunk]
            for is_unsaid, boundary in ((receives and received is None, index - 1), (sends and sent is None, index)):
                if is_unsaid:
                    arguments[boundary_name(boundary)] = "described by a header"
        return arguments


def boundary_name(index: int) -> str:
    return f"the message from stage {index} to stage {index + 1}"


def _only(specs: set[MessageSpec]) -> MessageSpec | None:
    return next(iter(specs)) if len(specs) == 1 else None

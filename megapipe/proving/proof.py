"""What was proved, or what is wrong."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

KINDS = ("loss", "gradient", "weight", "buffer")


class Difference(NamedTuple):
    """A tensor that is another one than in the whole model.

    Attributes:
        what: a loss, a gradient, a weight or a buffer.
        name: of the tensor on its stage; of a loss that of its microbatch.
        by, of: the largest difference, and the largest value that is expected; infinite where one of them is missing.
    """

    step: int
    what: str
    name: str
    rank: int
    stage: int | None
    by: float
    of: float
    note: str = ""

    def __str__(self) -> str:
        place = "" if self.stage is None else f" of stage {self.stage}"
        size = self.note or f"off by {self.by:.3g} of {self.of:.3g}"
        return f"step {self.step}, rank {self.rank}: the {self.what} {self.name}{place} is {size}"


@dataclass
class Proof:
    """What `prove` has found. It is true where all is right.

    Attributes:
        subject: what was looked at, with its sizes.
        same: by kind of tensor, how many are those of the whole model, and how many there are.
        differences: all tensors that are not, in the order of steps.
        mistakes: what the differences look like, in sentences.
        notes: what the proof rests on.
        held: by rank, the most bytes at once of what was made in a step, where that was measured.
    """

    subject: str
    same: dict[str, tuple[int, int]] = field(default_factory=dict)
    differences: list[Difference] = field(default_factory=list)
    mistakes: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    held: list[int] = field(default_factory=list)

    def __bool__(self) -> bool:
        return not self.differences and not self.mistakes

    @property
    def counts(self) -> str:
        """How many of each kind are the same."""
        parts = [f"{same} of {number} {kind}s" for kind, (same, number) in self.same.items() if number]
        return ", ".join(parts).replace("losss", "losses")

    def __str__(self) -> str:
        lines = [f"{self.subject}: {'right' if self else 'WRONG'}"]
        if self.same:
            lines.append(f"  the same as in the whole model: {self.counts}")
        lines += [f"  it looks like this: {mistake}" for mistake in self.mistakes]
        if self.differences:
            first = {one.what: one for one in reversed(self.differences)}
            lines += [f"  first: {first[kind]}" for kind in KINDS if kind in first]
        lines += [f"  {note}" for note in self.notes]
        return "\n".join(lines)

    __repr__ = __str__

    def as_json(self) -> dict[str, Any]:
        return {"is_right": bool(self), **asdict(self), "differences": [one._asdict() for one in self.differences]}

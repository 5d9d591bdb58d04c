"""The kinds of action, a row for each. What is recorded, checked, simulated, counted, written to files and drawn of an
action follows from its row."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["KINDS", "PAIR", "Kind", "kind_of"]


class Kind(NamedTuple):
    """One kind of computation.

    Attributes:
        name: in plans. An action is printed with its first letter.
        verb: of schedules, by which it is run.
        label: its name in words.
        colours: of even and odd chunks.
        costs: the fields of `Costs` whose times it takes.
        message: the direction, "forward" or "backward", of the message that it waits for and of the one that it makes;
            None for an action that needs no message.
        after: without a message, the kind whose units it takes, in their order.
        in_flight, held: by how many units more a rank has after it of those between their F and their B, and between
            their F and the last action of their backward.
    """

    name: str
    verb: str
    label: str
    colours: tuple[str, str]
    costs: tuple[str, ...]
    message: str | None = None
    after: str | None = None
    in_flight: int = 0
    held: int = 0

    @property
    def is_forward(self) -> bool:
        return self.message == "forward"


# Blue, vermilion and yellow, each as bright as no other.
_BLUE, _VERMILION, _YELLOW = ("#acd0f5", "#2d66b0"), ("#e46e46", "#943012"), ("#f8e690", "#d0ae2a")
_INPUTS, _WEIGHTS = "backward_input", "backward_weight"

_ROWS = (
    Kind("F", "forward_step", "forward", _BLUE, ("forward",), "forward", None, 1, 1),
    Kind("BW", "backward_step", "backward", _VERMILION, (_INPUTS, _WEIGHTS), "backward", None, -1, -1),
    Kind("B", "backward_input_step", "input gradient", _VERMILION, (_INPUTS,), "backward", None, -1, 0),
    Kind("W", "backward_weight_step", "weight gradient", _YELLOW, (_WEIGHTS,), None, "B", 0, -1),
)

KINDS = {kind.name: kind for kind in _ROWS}

PAIR = {"overlapped_forward_step": "F", "overlapped_backward_step": "BW"}
"""The two halves of a forward_backward_step in a plan, and their kinds. Only their sends may come between them."""

_BY_VERB = {kind.verb: kind for kind in _ROWS} | {verb: KINDS[name] for verb, name in PAIR.items()}


def kind_of(verb: str) -> Kind | None:
    """The kind of what a verb computes; None for one that sends or receives."""
    return _BY_VERB.get(verb)

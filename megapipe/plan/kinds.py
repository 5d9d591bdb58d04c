"""The kinds of action, a row for each. What is recorded, checked, simulated, counted, written to files and drawn of an
action follows from its row."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Kind:
    """One kind of computation.

    Attributes:
        name: its name in plans. An action is printed with the first letter.
        verb: the method of `Verbs` that runs it.
        label: its name in words.
        colours: its colours in pictures, for even and odd chunks.
        costs: the fields of `Costs` that add up to its time.
        direction: of the message that it waits for and of the one that it makes: "forward" or "backward"; None for an
            action without messages.
        after: without messages, the kind whose units it takes, in the order in which they go backward.
        is_optional: a unit may go backward without it; after its backward it is too late.
        takes_over: the kind whose activations this action makes, for units that have both: the `held` of that kind then
            counts from this action on.
        in_flight: by how many the action changes the number of units on the rank between F and B.
        held: by how many it changes the number of units whose activations are in memory: those between F and the last
            action of their backward.
        keeps: the fields of `StageBytes` that a unit holds after the action, in place of what it held before; "input"
            is the received message.
        needs: the field of `StageBytes` that it needs in addition while it runs.
        is_forward: whether its direction is "forward".
        completes_weights: whether a chunk's last one completes the gradients of its weights.
    """

    name: str
    verb: str
    label: str
    colours: tuple[str, str]
    costs: tuple[str, ...]
    direction: str | None = None
    after: str | None = None
    in_flight: int = 0
    held: int = 0
    is_optional: bool = False
    keeps: tuple[str, ...] = ()
    takes_over: str | None = None
    needs: str | None = None

    is_forward: bool = field(init=False)
    completes_weights: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "is_forward", self.direction == "forward")
        object.__setattr__(self, "completes_weights", _WEIGHTS in self.costs)


# Blue, vermilion, yellow and purple, each as bright as no other. Only one purple: there is no room for two.
_BLUE, _VERMILION, _YELLOW = ("#acd0f5", "#2d66b0"), ("#e46e46", "#943012"), ("#f8e690", "#d0ae2a")
_PURPLE, _UNSEEN = ("#4d3559", "#4d3559"), ("#4d3559", "#4d3559")
_INPUTS, _WEIGHTS = "backward_input", "backward_weight"

_ROWS = (
    Kind("F", "forward_step", "forward", _BLUE, ("forward",), "forward", None, 1, 1, keeps=("saved",), needs="forward"),
    Kind(
        "BW", "backward_step", "backward", _VERMILION, (_INPUTS, _WEIGHTS), "backward", None, -1, -1, needs="backward"
    ),
    Kind(
        "B", "backward_input_step", "input gradient", _VERMILION, (_INPUTS,), "backward", None, -1, 0,
        keeps=("kept",), needs=_INPUTS,
    ),
    Kind("W", "backward_weight_step", "weight gradient", _YELLOW, (_WEIGHTS,), None, "B", 0, -1, needs=_WEIGHTS),
    # An F with an R holds no more than its input; the R makes what any other F holds.
    Kind(
        "R", "recompute_step", "recomputation", _PURPLE, ("recompute",), None, "F", 0, 1, True, ("replayed",), "F",
        needs="recompute",
    ),
    # They take no time of the rank's: copies run beside it, from F to O and from L to B. What was received stays.
    Kind("O", "offload_step", "to host memory", _UNSEEN, (), None, "F", 0, -1, True, ("input",)),
    Kind("L", "load_step", "from host memory", _UNSEEN, (), None, "F", 0, 1, True, ("saved",)),
)  # fmt: skip

KINDS = {kind.name: kind for kind in _ROWS}

FORWARD, WEIGHTS, RECOMPUTE, OFFLOAD, LOAD = (KINDS[name] for name in "FWROL")

TORCHS_LETTERS = {"BW": "B", "B": "I"}
"""Kinds that are printed with another letter in torch.distributed.pipelining's plans."""

_OVERLAPPED = "overlapped_"


def overlapped(kind: Kind) -> str:
    """The verb of half a pair in a plan. Only sends may come between a pair's two halves."""
    return _OVERLAPPED + kind.verb


@functools.cache
def kind_of(verb: str) -> Kind | None:
    """The kind of what a verb, or half a pair, computes; None for one that sends or receives."""
    verb = verb.removeprefix(_OVERLAPPED)
    for kind in KINDS.values():
        if kind.verb == verb:
            return kind
    return None


def is_overlapped(verb: str) -> bool:
    """Whether it is half a pair."""
    return verb.startswith(_OVERLAPPED)

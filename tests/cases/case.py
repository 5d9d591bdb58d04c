"""What a case is, and the hooks by which a feature takes part in it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from random import Random
from typing import Any

import torch
from tools.ranks import MAX_RANKS

import megapipe
from megapipe.plan import find_schedule, make_plan
from megapipe.runtime.combinations import REFUSED

from .messages import OF_X

SCHEDULES = [name for name in megapipe.schedule_names() if name != "inference"]
SEQUENCE = 6
FEATURES: list[type[Feature]] = []
"""In the order in which they are drawn, and in which their hooks are called."""


class Feature:
    """One thing that a case may have: a dataclass, whose fields say all of it.

    It takes part by methods of these names, of which it has those that it needs. In the pipeline, and in what that is
    compared with:

        layer(layer, number)             returns what takes the place of a layer
        stage(stage)                     when one has been made
        take(x, stage, entries, tokens)  as it begins, with what its message holds beside x, or with tokens; returns x
        give(stage, entries)             as it ends, with what its message is to hold

    In the pipeline alone, where a trial is the case on one rank:

        config(config), chunk(chunk, stage)      returns what a chunk is wrapped in
        arguments(arguments)                     returns those of a call
        made(trial)                              also when its parameters are others
        before(trial, step)
        midway(trial, step)                      between two calls whose gradients add up
        trained(trial, step), after(trial, step) when the gradients of the step were right
        end(trial)                               when all steps were
    """

    chance = 0.3  # of being drawn, where it goes with the case
    refusal = ""  # a pattern: in place of right results, every rank may raise an error with such a text
    most = 1  # in one case
    tolerance = 0.0  # by how much gradients may be off, in norms of the largest
    is_whole = True  # slices compute what whole sequences do
    has_entries = False  # messages hold something of it beside x
    needs_seed = False  # layers draw random numbers, the same ones wherever they run
    traits: Any = frozenset()  # those of megapipe.runtime.combinations that its calls show

    def __init_subclass__(cls) -> None:
        FEATURES.append(cls)

    @staticmethod
    def goes(case: Case) -> Any:
        """With what the case has already."""
        return True

    def refuses(self, case: Case) -> str:
        """The pattern, where it depends on the case."""
        return self.refusal

    @classmethod
    def draw(cls, rng: Random, case: Case) -> Feature:
        return cls()


@dataclass(frozen=True)
class Case:
    """
    Attributes:
        chunks: per rank; None for the schedule's own.
        layers: of the model; None for one more than there are stages.
        sequence: the length of sequences, where they are of one.
    """

    schedule: str
    pp: int
    m: int
    features: Sequence[Feature] = ()
    steps: int = 1
    chunks: int | None = None
    layers: int | None = None
    sequence: int = SEQUENCE

    def __repr__(self) -> str:
        """What makes it again."""
        parts = [repr(self.schedule), str(self.pp), str(self.m), str([*self.features])]
        rest = {"steps": self.steps if self.steps > 1 else None, "chunks": self.chunks, "layers": self.layers}
        rest["sequence"] = self.sequence if self.sequence != SEQUENCE else None
        return f"Case({', '.join([*parts, *(f'{name}={value}' for name, value in rest.items() if value)])})"

    def call(self, hook: str, *arguments: Any) -> None:
        for feature in self.features:
            getattr(feature, hook, lambda *_: None)(*arguments)

    def fold(self, hook: str, value: Any, *arguments: Any) -> Any:
        """Of hooks that return what takes the place of the value."""
        for feature in self.features:
            value = getattr(feature, hook, lambda value, *_: value)(value, *arguments)
        return value

    def get(self, name: str) -> Any:
        return next((feature for feature in self.features if type(feature).__name__ == name), None)

    def of(self, name: str, attribute: str, default: Any) -> Any:
        return getattr(self.get(name), attribute, default)

    def any(self, attribute: str) -> bool:
        return any(getattr(feature, attribute) for feature in self.features)

    def without(self, feature: Feature) -> Case:
        return replace(self, features=[one for one in self.features if one is not feature])

    def autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast("cpu", torch.bfloat16) if self.get("Autocast") else nullcontext()

    num_chunks = property(lambda self: self.chunks or find_schedule(self.schedule).default_chunks)
    num_layers = property(lambda self: self.layers or self.num_stages + 1)
    num_stages = property(lambda self: self.pp * self.num_chunks)
    num_replicas = property(lambda self: self.of("Replicas", "num_replicas", 1))
    mesh = property(lambda self: (self.pp, *self.of("Replicas", "sizes", (1,))))
    kills = property(lambda self: self.of("Failure", "kills", False))
    num_ranks = property(lambda self: self.pp * self.num_replicas)
    can_cut = property(lambda self: bool(find_schedule(self.schedule).slices))
    slice_lengths = property(lambda self: self.of("Slices", "lengths", [SEQUENCE]))
    is_cut = property(lambda self: len(self.slice_lengths) > 1)
    seq_lengths = property(lambda self: self.of("Shapes", "seq_lengths", None) or [self.sequence] * self.m)
    forms = property(lambda self: " ".join(self.of("Forms", "of_stages", [])))
    odd = property(lambda self: {*self.of("OddLayers", "of_layers", {}).values()})
    changes = property(lambda self: {feature.kind for feature in self.features if type(feature).__name__ == "Between"})
    refusal = property(lambda self: "|".join(filter(None, [feature.refuses(self) for feature in self.features])))
    tolerance = property(lambda self: max([feature.tolerance for feature in self.features], default=0.0))

    @property
    def kind(self) -> str:
        """Of its messages."""
        kind: str = self.of("Message", "kind", "tensor")
        return "dict" if kind in OF_X and self.any("has_entries") else kind

    @property
    def traits(self) -> set[str]:
        """What its calls show, by name (megapipe.runtime.combinations.TRAITS)."""
        sizes = (self.schedule, self.pp, self.m, self.num_chunks, len(self.slice_lengths))
        return self.options | traits_of_plan(*sizes)

    options = property(lambda self: {name for feature in self.features for name in feature.traits})
    is_refused = property(lambda self: any(self.options.issuperset(pair) for pair in REFUSED))


@cache
def traits_of_plan(schedule: str, pp: int, m: int, num_chunks: int, num_slices: int) -> set[str]:
    plan = make_plan(schedule, pp, m, num_chunks, num_slices=num_slices)
    has_others = pp * num_chunks > 1 or plan.splits_backward or plan.peak_in_flight(0) > 1
    shown = {
        "a training step": True,
        "several pipeline ranks": pp > 1,
        "several chunks per rank": num_chunks > 1,
        "a V placement": plan.placement.name == "v" and pp > 1,  # a file of one rank says nothing of it
        "overlapped pairs": any(plan.program.pairs),
        "Ws apart from Bs": plan.splits_backward,
        "other actions between an F and its B": has_others,
    }
    return {name for name, is_shown in shown.items() if is_shown}


def draw_sizes(seed: int, number: int) -> Case:
    """A random case that has no feature yet."""
    rng = Random(f"{seed} {number}")
    schedule = rng.choice(SCHEDULES)
    found = find_schedule(schedule)
    pp = rng.randint(1, min(MAX_RANKS, found.max_pp_size or MAX_RANKS))
    chunks = found.num_chunks or rng.randint(found.min_chunks if pp > 1 else 1, 3)
    layers = pp * chunks + rng.randint(0, 3)
    return Case(schedule, pp, rng.randint(1, 2 * pp + 4), (), rng.choice([1, 1, 2, 3, 4]), chunks, layers)


def draw_case(seed: int, number: int) -> Case:
    case = draw_sizes(seed, number)
    for kind in FEATURES:
        rng = Random(f"{seed} {number} {kind.__name__}")  # of its own: one more feature leaves the others as they are
        for _ in range(kind.most):
            if rng.random() < kind.chance and kind.goes(case):
                more = replace(case, features=(*case.features, kind.draw(rng, case)))
                case = case if more.is_refused else more
    return case

"""What a case is, and the hooks by which a feature takes part in it."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from random import Random
from typing import Any

from tools.ranks import MAX_RANKS

import megapipe
from megapipe.plan import find_schedule

from .messages import OF_X

SCHEDULES = [name for name in megapipe.schedule_names() if name != "inference"]
SEQUENCE = 6
FEATURES: list[type[Feature]] = []
"""In the order in which they are drawn, and in which their hooks are called."""


class Feature:
    """One thing that a case may have. Its attributes say all that is drawn of it.

    It takes part by methods of these names, of which it has those that it needs. In the pipeline, and in what that is
    compared with:

        layer(layer, number)             returns what takes the place of a layer
        stage(stage)                     when one has been made
        take(x, stage, entries, tokens)  as it begins, with what its message holds beside x, or with tokens; returns x
        give(stage, entries)             as it ends, with what its message is to hold

    In the pipeline alone, where a trial is the case on one rank:

        config(config), chunk(chunk, stage)      returns what a chunk is wrapped in
        made(trial), before(trial, step)
        after(trial, step), end(trial)           when the gradients of the step were right; when all steps were
    """

    chance = 0.3  # of being drawn, where it goes with the case
    refusal = ""  # a pattern: in place of right results, every rank may raise an error with such a text
    tolerance = 0.0  # by how much gradients may be off, in norms of the largest
    is_whole = True  # slices compute what whole sequences do
    has_entries = False  # messages hold something of it beside x
    needs_seed = False  # layers draw random numbers, the same ones wherever they run

    def __init_subclass__(cls) -> None:
        FEATURES.append(cls)

    @staticmethod
    def goes(case: Case) -> Any:
        """With what the case has already."""
        return True

    def __init__(self, rng: Random, case: Case) -> None: ...

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"


@dataclass(frozen=True)
class Case:
    schedule: str
    pp_size: int
    num_chunks: int
    num_microbatches: int
    num_layers: int
    num_steps: int
    features: tuple[Feature, ...] = ()

    def __str__(self) -> str:
        sizes = [f"{field.name}={getattr(self, field.name)!r}" for field in fields(self)[:-1]]
        return ", ".join([*sizes, *map(repr, self.features)])

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

    def without(self, *texts: str) -> Case:
        """Without features in whose description one of the texts is."""
        return replace(self, features=tuple(f for f in self.features if not any(text in repr(f) for text in texts)))

    num_stages = property(lambda self: self.pp_size * self.num_chunks)
    num_replicas = property(lambda self: self.of("Replicas", "num_replicas", 1))
    kills = property(lambda self: self.of("Failure", "kills", False))
    num_ranks = property(lambda self: self.pp_size * self.num_replicas)
    can_cut = property(lambda self: bool(find_schedule(self.schedule).slices))
    slice_lengths = property(lambda self: self.of("Slices", "lengths", [SEQUENCE]))
    is_cut = property(lambda self: len(self.slice_lengths) > 1)
    seq_lengths = property(lambda self: self.of("Shapes", "seq_lengths", None) or [SEQUENCE] * self.num_microbatches)
    forms = property(lambda self: " ".join(self.of("Forms", "of_stage", [])))
    odd = property(lambda self: {*self.of("OddLayers", "of_layers", {}).values()})
    refusal = property(lambda self: "|".join(feature.refusal for feature in self.features if feature.refusal))
    tolerance = property(lambda self: max([feature.tolerance for feature in self.features], default=0.0))

    @property
    def kind(self) -> str:
        """Of its messages."""
        kind: str = self.of("Message", "kind", "tensor")
        return "dict" if kind in OF_X and self.any("has_entries") else kind


def make_case(seed: int, number: int) -> Case:
    rng = Random(f"{seed} {number}")
    schedule = rng.choice(SCHEDULES)
    found = find_schedule(schedule)
    pp_size = rng.randint(1, min(MAX_RANKS, found.max_pp_size or MAX_RANKS))
    num_chunks = found.num_chunks or rng.randint(1, 3)
    num_layers = pp_size * num_chunks + rng.randint(0, 3)
    case = Case(schedule, pp_size, num_chunks, rng.randint(1, 2 * pp_size + 4), num_layers, rng.choice([1, 1, 2, 3, 4]))
    for kind in FEATURES:
        rng = Random(f"{seed} {number} {kind.__name__}")  # of its own: one more feature leaves the others as they are
        if rng.random() < kind.chance and kind.goes(case):
            case = replace(case, features=(*case.features, kind(rng, case)))
    return case

"""What other differences than those of gradients look like."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import hypot
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from .calls import Departure
from .compare import difference
from .mistakes import near
from .names import Place
from .proof import Difference
from .reference import Reference, WholeStep
from .trial import Evidence

SLICED = 1e-3
"""How much of their norm gradients by slices may be off: sums over a sequence are made in parts."""

ROUNDED = 1e-5
"""Differences over the largest value that another order of sums makes in float32."""


def rounding(differences: Sequence[Difference]) -> str | None:
    """Where all of them are no more than rounding."""
    largest = max((one.by / one.of if one.of else one.by) for one in differences)
    if not largest < ROUNDED:
        return None
    return (
        f"rounding: nothing is off by more than {largest:.2g} of the largest value. Sums were made in another order, "
        f"or by other kernels: pass tolerance={ROUNDED:g} if that is meant."
    )


def loss_mistakes(everybody: Sequence[Evidence], want: WholeStep, step: int) -> list[str]:
    """Losses of other microbatches, or scaled ones."""
    for one in everybody:
        found, wanted = one.steps[step].reports, want.reports[one.replica]
        if not found:
            continue
        if len(found) != len(wanted):
            return [f"{len(found)} losses are reported of {len(wanted)} microbatches."]
        order = [next((k for k, w in enumerate(wanted) if difference(own, w, 1e-6) is None), -1) for own in found]
        if order != list(range(len(order))) and sorted(order) == list(range(len(order))):
            return [
                f"losses are those of other microbatches, in the order {order}: inputs, or labels, of microbatches "
                "were swapped on their way, or the order in which data is read."
            ]
        ratios = [_number(own) / number for own, w in zip(found, wanted) if (number := _number(w))]
        if ratios and max(ratios) - min(ratios) < 1e-4 * abs(ratios[0]) and abs(ratios[0] - 1) > 1e-3:
            return [
                f"losses are {ratios[0]:.4g} times those of the whole model: the reported loss is scaled, by "
                f"{len(found)} microbatches or by something else."
            ]
    return []


def _number(report: Any) -> float:
    values = [float(one) for one in tree_leaves(report) if isinstance(one, (int, float, Tensor))]
    return values[0] if values else 0.0


def slice_mistakes(whole: Reference, first: WholeStep) -> list[str]:
    """A microbatch of the first step whose gradients are not nearly those of its whole sequences."""
    for number, (found, want) in enumerate(zip(whole.parts(first, 0), whole.uncut().parts(first, 0))):
        norms = {key: 0.0 if grad is None else grad.double().norm().item() for key, grad in want.items()}
        off = {key: _distance(found[key], grad) for key, grad in want.items()}
        share = hypot(*off.values()) / (hypot(*norms.values()) or 1.0)
        if share > max(SLICED, whole.question.tolerance):
            return [
                f"slices: gradients of microbatch {number} are off by {share:.2g} of those of its whole sequences, "
                f"most of all that of {max(off, key=lambda key: off[key])}: a layer looks back, and does not get what "
                "earlier slices have (megapipe.slices.attention, earlier), or positions begin anew in each slice "
                "(slices.positions), or a loss is not the slice's part of the microbatch's, or random numbers are "
                "drawn."
            ]
    return []


def _distance(one: Tensor | None, other: Tensor | None) -> float:
    there = [grad.double() for grad in (one, other) if grad is not None]
    return (there[0] - there[1] if len(there) == 2 else there[0]).norm().item() if there else 0.0


def weight_mistakes(
    everybody: Sequence[Evidence], want: WholeStep, step: int, key_of: Mapping[Place, str]
) -> list[str]:
    """Weights that the optimizer has not, and buffers, where all gradients are right."""
    stuck: dict[int, list[str]] = {}
    moved: set[int] = set()
    for one in everybody:
        for place, value in one.steps[step].weights.items():
            key = key_of[place]
            is_moved = not near(value, want.before[key], 0.0)
            if near(want.weights[key], want.before[key], 0.0):
                continue
            if is_moved:
                moved.add(place[0])
            else:
                stuck.setdefault(place[0], []).append(place[1])
    sentences = []
    for stage, names in sorted(stuck.items()):
        what = f"{len(names)} weights of stage {stage} are" if stage in moved else f"the weights of stage {stage} are"
        sentences.append(
            f"{what} not updated, though their gradients are right: {names[0]} is as before the step. The optimizer "
            "does not have them, or another one's step is missing."
        )
    if sentences:
        return sentences
    buffers = [
        (place, difference(value, want.buffers[key_of[place]], 0.0))
        for one in everybody
        if one.replica == 0
        for place, value in one.steps[step].buffers.items()
    ]
    if off := [place for place, differs in buffers if differs is not None]:
        return [
            f"a buffer: {off[0][1]} of stage {off[0][0]} is not what the whole model has. A forward ran more or less "
            "often, or with other numbers, than once for each microbatch."
        ]
    return ["the optimizer made other steps from the same gradients: its settings, or its state, are others."]


def call_mistakes(
    departure: Departure | None, one: Any, other: Any, stages: Mapping[str, int], microbatch: int
) -> list[str]:
    """Where the forward of a microbatch leaves that of the whole model.

    Args:
        one, other: what the whole model reports with two seeds.
        stages: of the tensors, by what the whole model calls them.
    """
    is_random = difference(one, other, 0.0) is not None
    if departure is None:
        if is_random:
            return [RANDOM.format(where="the model")]
        return [
            f"the forward of microbatch {microbatch} differs, though every module gives the same: the loss, or what "
            "forwards compute besides modules, is another one."
        ]
    found = next((stage for key, stage in stages.items() if key.startswith(f"{departure.module}.")), None)
    where = f"{departure.module} ({departure.kind})" + ("" if found is None else f" of stage {found}")
    if is_random and departure.argument == "":
        return [RANDOM.format(where=where)]
    if departure.argument == "":
        return [
            f"{where} gives another output for the same input in microbatch {microbatch}: {departure.found}, and "
            f"{departure.wanted} in the whole model. Its code, its mode or its weights differ."
        ]
    if departure.found == "None":
        return [
            f"a mask, or another argument, that does not reach a stage: {where} is called without "
            f"{departure.argument}, which is {departure.wanted} in the whole model, in microbatch {microbatch}. Pass "
            "it on every stage, or send it along."
        ]
    return [
        f"{where} is the first to differ, in microbatch {microbatch}: its {departure.argument} is {departure.found}, "
        f"and {departure.wanted} in the whole model, though the modules before it give the same."
    ]


RANDOM = (
    "dropout, or other random numbers: {where} draws others than in the whole model, which begins each step with the "
    "same seed but draws for all layers one after the other. Prove it with p=0 or in eval(), or seed each layer by its "
    "number and microbatch."
)

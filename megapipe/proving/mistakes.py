"""What kind of mistake gradients that differ look like.

The gradient of a step is a sum over microbatches. So what a stage has is written as a sum of their parts, each with a
factor of its own, by least squares: all factors are 1 where it is right, and they say what is wrong where it is not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from .names import Place
from .question import Question
from .reference import Gradients, Reference, WholeStep
from .trial import Evidence

CLOSE = 1e-3
"""How much factors may be off by: gradients are sums of rounded numbers."""


class OnStage(NamedTuple):
    """The gradients of a stage in a replica, by what the whole model calls them."""

    stage: int
    replica: int
    found: Gradients


def gradient_mistakes(
    whole: Reference, steps: Sequence[WholeStep], number: int, found: Sequence[Evidence], key_of: Mapping[Place, str]
) -> list[str]:
    """Sentences on the gradients of a step; none where nothing that is known looks like them."""
    stages, want = _stages(found, number, key_of), steps[number]
    tied = _ties(whole, stages, want)
    keys = {key for _, keys in tied for key in keys}
    stages = [one._replace(found={k: g for k, g in one.found.items() if k not in keys}) for one in stages]
    wrong = [one for one in stages if not all(near(grad, want.gradients[key]) for key, grad in one.found.items())]
    absent = {one.stage: missing for one in wrong if (missing := _missing(one, want))}
    sentences = [text for text, _ in tied] + _absent_in_words(absent, stages, want)
    now, before = whole.parts(want, number), whole.parts(steps[number - 1], number - 1) if number else []
    factors = {(one.stage, one.replica): _factors(one, now + before) for one in wrong if one.stage not in absent}
    known = {key: one for key, one in factors.items() if one is not None}
    if known and len(known) == len(factors):
        tokens = want.num_tokens if whole.config.calculate_per_token_loss else []
        counts = Counts(whole.question, 1 + max(one.stage for one in stages), tokens)
        sentences += _factors_in_words(counts, {one.stage for one in stages}, known, len(now))
    return sentences


def _stages(everybody: Sequence[Evidence], step: int, key_of: Mapping[Place, str]) -> list[OnStage]:
    found = []
    for one in everybody:
        for stage in one.stages:
            own = {key_of[place]: g for place, g in one.steps[step].gradients.items() if place[0] == stage}
            found.append(OnStage(stage, one.replica, own))
    return found


def _norm(grad: Tensor | None) -> float:
    return 0.0 if grad is None else grad.double().norm().item()


def near(one: Tensor | None, other: Tensor | None, close: float = 1e-5) -> bool:
    if one is None or other is None:
        return _norm(one) == _norm(other) == 0.0
    other = other.detach().cpu().double()
    return bool((one.double() - other).norm().item() <= close * max(_norm(one), other.norm().item()))


# Ties


def _ties(whole: Reference, stages: Sequence[OnStage], want: WholeStep) -> list[tuple[str, list[str]]]:
    """A weight that several stages have, each with its own part of the gradient."""
    by_tensor: defaultdict[int, dict[tuple[int, str], Tensor | None]] = defaultdict(dict)
    for one in stages:
        if one.replica == 0:
            for key, grad in one.found.items():
                by_tensor[id(whole.named[key])][one.stage, key] = grad
    sentences = []
    for holders in by_tensor.values():
        grads = [grad for grad in holders.values() if grad is not None]
        key = next(iter(holders))[1]
        if len({stage for stage, _ in holders}) < 2 or len(grads) < 2:
            continue
        wrong = [place for place, grad in holders.items() if not near(grad, want.gradients[key])]
        if wrong and near(sum(grads[1:], grads[0]), want.gradients[key]):
            places = " and ".join(f"{name} of stage {stage}" for stage, name in holders)
            text = (
                f"a tie that is not summed: {places} are one weight in the whole model, and each has its own part of "
                "the gradient only. Add the two up after the last backward (TiedWeights does)."
            )
            sentences.append((text, [key for _, key in holders]))
    return sentences


# Stages without a gradient


def _missing(one: OnStage, want: WholeStep) -> list[str]:
    """Names without a gradient, or with one of zeros, that have one in the whole model."""
    return [key for key, grad in one.found.items() if not _norm(grad) and _norm(want.gradients[key])]


def _absent_in_words(absent: Mapping[int, list[str]], stages: Sequence[OnStage], want: WholeStep) -> list[str]:
    if not absent:
        return []
    trained = {
        one.stage: [key for key in one.found if _norm(want.gradients[key])] for one in stages if one.stage in absent
    }
    bare = sorted(stage for stage, names in absent.items() if set(names) == set(trained[stage]))
    sentences = []
    rest = [stage for stage in sorted({one.stage for one in stages}) if stage not in bare]
    if bare and rest and max(bare) < min(rest):
        sentences.append(
            f"no gradient gets back to {_stages_in_words(bare)}: something between it and stage {min(rest)} is "
            "detached, or the gradient is not sent on."
        )
    elif bare:
        sentences.append(
            f"{_stages_in_words(bare)} has no gradient at all, though those before it have one: its weight-gradient "
            "passes (W) have not run, or its gradients were cleared after the backward."
        )
    for stage, names in sorted(absent.items()):
        if stage not in bare:
            sentences.append(
                f"{len(names)} of {len(trained[stage])} parameters of stage {stage} have no gradient, such as "
                f"{names[0]}: their weight-gradient pass (W) has not run, or they do not take part in the forward."
            )
    return sentences


def _stages_in_words(stages: Sequence[int]) -> str:
    return f"stage {stages[0]}" if len(stages) == 1 else f"stages {', '.join(map(str, stages))}"


# Factors


def _factors(one: OnStage, parts: Sequence[Gradients]) -> list[float] | None:
    """Factors with which the parts of microbatches add up to what is there. None where they do not."""
    keys = [key for key, grad in one.found.items() if grad is not None]
    if not keys:
        return None

    def flat(grads: Gradients) -> Tensor:
        like = [(grads[key], one.found[key]) for key in keys]
        return torch.cat(
            [(torch.zeros_like(own) if grad is None else grad.detach().cpu()).double().flatten() for grad, own in like]  # type: ignore[arg-type]
        )

    basis, found = torch.stack([flat(part) for part in parts]), flat(one.found)
    factors = torch.linalg.lstsq(basis.T, found[:, None], driver="gelsd").solution[:, 0]
    off = (found - factors @ basis).norm()
    return factors.tolist() if off <= CLOSE * found.norm() else None


Key = tuple[int, int]
"""A stage and a replica."""


def _factors_in_words(
    counts: Counts, everywhere: set[int], factors: Mapping[Key, list[float]], num_parts: int
) -> list[str]:
    by_text: defaultdict[str, list[int]] = defaultdict(list)
    for (stage, replica), of_stage in factors.items():
        by_text[_one_in_words(counts, replica, of_stage[:num_parts], of_stage[num_parts:])].append(stage)
    if text := _growing(factors, num_parts, everywhere):
        return [text]
    sentences = []
    for text, of_text in by_text.items():
        where = "" if set(of_text) == everywhere else f" on {_stages_in_words(sorted(set(of_text)))}"
        sentences.append(f"gradients{where} are {text}")
    return sentences


class Counts:
    """The numbers that a factor may come from.

    Args:
        tokens: of each microbatch, of all replicas, where gradients are to be divided by all of them.
    """

    def __init__(self, question: Question, num_stages: int, tokens: Sequence[float]) -> None:
        self.m, self.replicas, self.tokens = question.num_microbatches, question.num_replicas, tokens
        self.named = {
            "the number of tokens": sum(tokens),
            "the number of microbatches": self.m,
            "the number of replicas": self.replicas,
            "the number of stages": num_stages,
            "the number of microbatches of all replicas": self.m * self.replicas if self.replicas > 1 else 0,
        }

    def in_words(self, factor: float) -> str:
        """What a factor is, beside 1."""
        sizes = f"{factor:.4g} times too large, by", f"{factor:.4g} of what they should be, 1 over"
        for number, (size, text) in enumerate(zip((factor, 1 / factor if factor else 0.0), sizes)):
            if names := [name for name, n in self.named.items() if n > 1 and abs(size - n) < CLOSE * n]:
                return f"{text} {' or '.join(names)}: {REASONS.get(names[0], OTHER_REASONS)[number]}."
        return f"{factor:.4g} times what they should be: something is scaled once too often, or not at all."

    def by_tokens(self, factors: Sequence[float]) -> str:
        """Whether they are 1 over the tokens of each microbatch, or of each replica; "" where not."""
        rows = [(f, n, sum(self._of_replica(k))) for k, (f, n) in enumerate(zip(factors, self.tokens)) if n]
        for column, whose in ((1, "microbatch"), (2, "replica")):
            if rows and _alike([row[0] * row[column] for row in rows]):
                return (
                    f"divided by the tokens of each {whose} by itself, so that tokens of one that has few count more: "
                    "let losses be sums, and divide behind the step by the tokens of all (divide_by_num_tokens)."
                )
        return ""

    def _of_replica(self, microbatch: int) -> Sequence[float]:
        first = microbatch // self.m * self.m
        return self.tokens[first : first + self.m]


REASONS = {
    "the number of tokens": (
        "losses are sums over tokens, and gradients are not divided behind the step (divide_by_num_tokens)",
        "they are divided by it twice",
    ),
    "the number of microbatches": (
        "the loss, or the gradient, is not divided by it",
        "the loss is divided by it twice: the schedule does so already",
    ),
    "the number of replicas": (
        "they are summed over replicas and not averaged",
        "they are divided by it twice, or not summed before they are divided",
    ),
}
OTHER_REASONS = ("something is counted once too often", "something is divided once too often")


def _one_in_words(counts: Counts, replica: int, now: Sequence[float], before: Sequence[float]) -> str:
    if any(abs(factor) > CLOSE * 10 for factor in before):
        return "those of this step and of the step before: they are not cleared in between (optimizer.zero_grad())."
    if _alike(now):
        return counts.in_words(now[0])
    if text := counts.by_tokens(now):
        return text
    own = now[replica * counts.m : (replica + 1) * counts.m]
    others = [*now[: replica * counts.m], *now[(replica + 1) * counts.m :]]
    if others and _alike(own) and _nothing(others):
        return "those of its own replica alone: they are not averaged over replicas."
    there = [k for k, factor in enumerate(own) if abs(factor) > 10 * CLOSE]
    if there and _alike([own[k] for k in there]):
        which = _microbatches(there) if len(there) <= len(own) / 2 else f"all but {_microbatches(_rest(there, own))}"
        last = ", the last" if there == [counts.m - 1] else ", the first" if there == [0] else ""
        scale = "" if abs(own[there[0]] - 1) < 10 * CLOSE else f", times {own[there[0]]:.4g}"
        reason = "gradients are set anew, or cleared, in each backward" if last == ", the last" else "others are lost"
        return f"those of {which} alone{last}{scale}: {reason}."
    listed = ", ".join(f"{factor:.3g}" for factor in now)
    return f"sums of the microbatches' with other factors than 1: {listed}."


def _rest(there: Sequence[int], own: Sequence[float]) -> list[int]:
    return [k for k in range(len(own)) if k not in there]


def _microbatches(numbers: Sequence[int]) -> str:
    return f"microbatch{'es' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"


def _alike(factors: Sequence[float]) -> bool:
    middle = sum(factors) / len(factors)
    return all(abs(factor - middle) <= 10 * CLOSE * max(abs(middle), 1e-9) for factor in factors)


def _nothing(factors: Iterable[float]) -> bool:
    return all(abs(factor) <= 10 * CLOSE for factor in factors)


def _growing(factors: Mapping[Key, list[float]], num_parts: int, stages: Iterable[int]) -> str:
    """Where each stage has the factor of the one behind it, and once more; "" where it is not like that."""
    by_stage = dict.fromkeys(stages, 1.0)
    by_stage |= {stage: now[0] for (stage, _), now in factors.items() if _alike(now[:num_parts])}
    in_order = [by_stage[stage] for stage in sorted(by_stage)]
    ratios = [one / other for one, other in pairwise(in_order) if other]
    if len(ratios) < 2 or not _alike(ratios) or abs(ratios[0] - 1) < 10 * CLOSE:
        return ""
    return (
        f"gradients are scaled by {ratios[0]:.4g} once more on each stage further back: a scale of the loss is applied "
        "by every stage, and not by the last one alone."
    )

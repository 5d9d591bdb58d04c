"""Every pair of what a call may have is refused, in a row, or listed here, and on docs/limits.md, as not tried."""

from itertools import combinations
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import megapipe
from cases.rows import WRITTEN
from megapipe.config import DEFAULTS
from megapipe.graph import capture
from megapipe.plan import make_plan
from megapipe.runtime.combinations import REFUSED, TRAITS

LIMITS = (Path(__file__).parents[2] / "docs" / "limits.md").read_text()

UNTRIED = [
    {"num_sequence_slices", "a V placement"},
    {"num_sequence_slices", "overlapped pairs"},
    {"a captured stage", "layers that put off weight gradients by themselves"},
]
IN_NO_ROW = {"torch's DistributedDataParallel", "a CUDA graph of the whole step"}
IMPLIED = {"a plan without R": {"a plan without R", "a plan"}}


def is_refused(one: str, other: str) -> bool:
    ones, others = (IMPLIED.get(name, {name}) for name in (one, other))
    return any({this, that} == {*pair} for this in ones for that in others for pair in REFUSED)


def test_every_pair_is_refused_or_tried() -> None:
    """A new option, a new trait, is tried beside all others, or said not to be."""
    right = [row for row in WRITTEN if not row.refusal]  # others may be refused
    tried = {frozenset(pair) for row in right for pair in combinations(row.traits, 2)}
    assert {name for pair in tried for name in pair} == TRAITS.keys() - IN_NO_ROW
    tried -= {frozenset(["a training step", "collect_non_loss_data"])}  # of calls that take turns
    assert [pair for pair in tried if is_refused(*pair)] == []
    left = [pair for pair in map(set, combinations(TRAITS, 2)) if pair not in tried and not is_refused(*pair)]
    assert [pair for pair in left if pair not in UNTRIED and not pair & IN_NO_ROW] == []
    assert [pair for pair in UNTRIED if pair not in left] == []
    page = " ".join(LIMITS.split()).replace("`", "").lower()
    named = [
        "slices with a v placement or with overlapped pairs",
        "layers that put off weight gradients by themselves, in",
    ]
    assert [name for name in [*IN_NO_ROW, *named] if name.lower() not in page] == []


PLAN = {"schedule": make_plan("gpipe", 1, 2)}
SHOWN: dict[str, dict[str, Any]] = {
    "num_sequence_slices": {"num_sequence_slices": 2, "schedule": "seq1f1b"},
    "context_parallel_size": {"context_parallel_size": 2},
    "variable_seq_lengths": {"variable_seq_lengths": True},
    "pipeline_inputs": {"pipeline_inputs": {}},
    "post_validated_optimizer": {
        "post_validated_optimizer": SimpleNamespace(has_pending_step=False, validate=None, finalize_everywhere=None)
    },
    "num_microbatches_with_partial_activation_checkpoints": {"num_microbatches_with_partial_activation_checkpoints": 0},
    "a captured stage": {"captured": True},
    "a data_iterator without __next__()": {"data_iterator": SimpleNamespace()},
    "offload_activations": {"offload_activations": 1.0},
    "recompute": {"recompute": "all"},
    "min_pending_weights": {"min_pending_weights": 1},
    "max_pending_weights": {"max_pending_weights": 0},
    "a plan": PLAN,
    "a plan without R": PLAN,
    "collect_non_loss_data": {"collect_non_loss_data": True},
    "a training step": {},
}
"""What one rank is called with to have a trait. Others take several ranks (test_step.py), or CUDA (test_devices.py)."""


@pytest.mark.parametrize("pair", [pair for pair in REFUSED if SHOWN.keys() >= {*pair}], ids=" and ".join)
def test_a_refused_pair_gives_its_sentence(pair: tuple[str, str]) -> None:
    error = str(refusal_of(*pair))
    assert error.startswith(pair[0])
    assert f"does not go with {pair[1]}" in error
    assert error.endswith(f": {REFUSED[pair]}.")


def test_refused_pairs_beside_others_give_a_sentence() -> None:
    """Of the pairs that such a call has."""
    rng, pairs = Random(5), [pair for pair in REFUSED if SHOWN.keys() >= {*pair} and "a plan" not in " ".join(pair)]
    for _ in range(30):
        names = {*rng.choice(pairs), *rng.sample(sorted(SHOWN.keys() - {"a plan", "a plan without R"}), 2)}
        wanted = [f"{remedy}." for pair, remedy in REFUSED.items() if names | {"a training step"} >= {*pair}]
        assert str(refusal_of(*names)).endswith(tuple(wanted)), names


def refusal_of(*names: str) -> ValueError:
    given: dict[str, Any] = {"schedule": "1f1b", "data_iterator": iter(torch.ones(2, 6, 3))}
    for name in names:
        given |= SHOWN[name]
    model = nn.Linear(3, 1)
    if given.pop("captured", False):
        capture(model, (torch.ones(6, 3),))
    config = {name: given.pop(name) for name in DEFAULTS.keys() & given.keys()}
    model.config = SimpleNamespace(**config)  # type: ignore[assignment]
    function = megapipe.get_forward_backward_func(given.pop("schedule"))
    with pytest.raises(ValueError, match=" does not go with ") as raised:
        function(forward_step_func=print, model=model, num_microbatches=2, seq_length=6, micro_batch_size=1, **given)
    return raised.value

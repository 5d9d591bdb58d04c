"""Where sequences are cut into slices."""

from __future__ import annotations

import itertools

from ..chunks import find_attribute
from ..plan import Schedule
from ..slices import SequenceSlice
from ..stages import Call

__all__ = ["sequence_slices"]


def sequence_slices(schedule: Schedule, step: Call) -> list[SequenceSlice]:
    """The slices of every sequence; none where sequences are whole.

    Raises:
        ValueError: the schedule or another argument does not go with slices, or the sequence cannot be cut like that.
    """
    config = step.config
    num_slices, lengths = config.num_sequence_slices, config.sequence_slice_lengths
    if lengths is not None and len(lengths) != num_slices:
        raise ValueError(
            f"config.sequence_slice_lengths has {len(lengths)} lengths, but num_sequence_slices is {num_slices}: give "
            "one length for each slice."
        )
    schedule.check_units(step.num_microbatches, num_slices)
    if num_slices == 1:
        return []
    _check_others(step)
    seq_length = step.decoder_seq_length or step.seq_length
    if seq_length is None:
        raise ValueError(f"num_sequence_slices={num_slices} takes seq_length, the length of what is cut: pass it.")
    num_shards = config.tensor_model_parallel_size if config.sequence_parallel else 1
    if lengths is None:
        base, extra = divmod(seq_length // num_shards, num_slices)
        lengths = [num_shards * (base + (index < extra)) for index in range(num_slices)]
    if sum(lengths) != seq_length or any(length == 0 or length % num_shards for length in lengths):
        of_shards = f", each a multiple of the {num_shards} tensor-parallel ranks" if num_shards > 1 else ""
        raise ValueError(
            f"a sequence of {seq_length} cannot be cut into {num_slices} slices of {list(lengths)}: choose a "
            f"seq_length, and sequence_slice_lengths of at least 1 that add up to it{of_shards}."
        )
    starts = itertools.accumulate([0, *lengths])
    return [SequenceSlice(k, num_slices, start, length) for k, (start, length) in enumerate(zip(starts, lengths))]


def _check_others(step: Call) -> None:
    """What does not go with slices."""
    config = step.config
    is_captured = any(find_attribute(model, "hands_on_state") is False for model in step.models)
    num_partial = config.num_microbatches_with_partial_activation_checkpoints
    for name, is_set, remedy in (
        ("context_parallel_size", config.context_parallel_size > 1, "cut sequences one way only"),
        ("variable_seq_lengths", config.variable_seq_lengths, "pad sequences to one seq_length"),
        ("pipeline_inputs", step.pipeline_inputs is not None, "leave it None, for inputs of a slice's length"),
        ("post_validated_optimizer", config.post_validated_optimizer is not None, "clip before the optimizer's step"),
        ("num_microbatches_with_partial_activation_checkpoints", num_partial is not None, "leave it None"),
        ("a captured stage", is_captured, "its graph hands on no state, so do not capture it"),
    ):
        if is_set:
            raise ValueError(
                f"num_sequence_slices={config.num_sequence_slices} does not go with {name}: {remedy}, or use 1 slice."
            )

"""Replicas of a pipeline, each with data of its own."""

from __future__ import annotations

from typing import Any

from tools.models import Stage, build

from megapipe.training import GradientReducer

NUM_LAYERS, NUM_MICROBATCHES = 4, 2
SPLIT = ["zb1p", "zb2p", "interleaved_zb1p", "combined_zb1p", "zbv", "v_half", "v_min", "dualpipev"]


def reduced(chunks: list[Any], **options: Any) -> GradientReducer:
    """A GradientReducer that the schedules call."""
    reducer = GradientReducer(chunks, **options)
    for chunk in chunks:
        chunk.config.grad_sync_func, chunk.config.finalize_model_grads_func = reducer.start, reducer.finish
    return reducer


def build_replicas(schedule: str, pp_size: int, **options: Any) -> list[Stage]:
    return build(schedule, pp_size, NUM_LAYERS, deferred=schedule in SPLIT, **options)

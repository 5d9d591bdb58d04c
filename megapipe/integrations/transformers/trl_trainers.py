"""trl's trainers in front of a pipeline."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import torch.distributed as dist

from ... import parallel_state
from ...process_groups import all_gather_json
from .trainer import PipelineMixin

trl: Any = importlib.import_module("trl") if find_spec("trl") else None
SFTTrainer: Any = trl.SFTTrainer if trl else object
DPOTrainer: Any = trl.DPOTrainer if trl else object


class _Telling(PipelineMixin):
    """trl collects its metrics where `compute_loss` ends: on the last stage. It logs them on the first rank."""

    _metrics: dict[str, dict[str, Any]]

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        if trl is None:
            raise ImportError(f"{type(self).__name__} needs trl: pip install trl.")
        super().__init__(*arguments, **keywords)
        for chunk in self.chunks:
            if not chunk.stage.is_last:  # trl puts a forward with a fused head on the model
                vars(chunk).pop("forward", None)

    def log(self, logs: dict[str, float], *others: Any) -> None:
        if dist.is_initialized():
            group = parallel_state.get_pipeline_model_parallel_group()
            has_last = any(chunk.stage.is_last for chunk in self.chunks)
            own = {mode: dict(metrics) for mode, metrics in self._metrics.items()} if has_last else None
            found = next(one for one in all_gather_json(own, group) if one is not None)
            for mode, metrics in found.items():
                self._metrics[mode].clear()
                self._metrics[mode].update(metrics)
        super().log(logs, *others)  # type: ignore[misc]


class PipelineSFTTrainer(_Telling, SFTTrainer):  # type: ignore[misc]
    """trl's SFTTrainer in front of a pipeline, see `PipelineMixin`."""


class PipelineDPOTrainer(_Telling, DPOTrainer):  # type: ignore[misc]
    """trl's DPOTrainer in front of a pipeline, see `PipelineMixin`: with `precompute_ref_log_probs=True`, since a step
    then calls the model once."""

    def __init__(self, model: Any = None, args: Any = None, **keywords: Any) -> None:
        if args is not None and not args.precompute_ref_log_probs:
            raise ValueError("a reference would be a second pipeline: set precompute_ref_log_probs=True.")
        super().__init__(model, args, **keywords)

    def compute_ref_log_probs(self, model: Any, inputs: Mapping[str, Any]) -> Any:
        """What trl asks before training, batch by batch: log-probabilities of what is chosen and what is rejected."""
        whole = super().compute_ref_log_probs

        def step(stage: Any, batch: Any) -> Any:
            chosen, rejected = whole(stage, batch)
            return chosen.sum(), [chosen, rejected]

        (report,) = self._run(step, [self._prepare_inputs(inputs)], forward_only=True)
        return tuple(report)

"""Stages as `megapipe.split` makes them. `make fuzz` draws them; rows do not, since torch.export takes seconds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from tools.models import BATCH, HIDDEN
from torch import nn

import megapipe
from megapipe.integrations.exported import Trace
from megapipe.integrations.splitting import Part, SplitState

from .case import SEQUENCE, Case, Feature

__all__ = ["Split"]

BESIDE = {"Accumulated", "Double", "NumTokens", "Offload", "OddLayers", "Optimizer", "Planned", "Recompute", "Settings"}
BESIDE |= {"Tied", "Validated", "WarmUp"}
ODD = {"idle", "strided", "complex", "weight in list", "weight in closure"}


@dataclass(frozen=True)
class Split(Feature):
    """Each stage is a run of the operations of its graph."""

    @staticmethod
    def goes(case: Case) -> Any:
        kinds = {type(feature).__name__ for feature in case.features}
        return case.kind == "tensor" and kinds - {"Message"} <= BESIDE and case.odd <= ODD

    def chunk(self, chunk: nn.Module, stage: Any) -> nn.Module:
        message: Any = torch.zeros(SEQUENCE, BATCH, HIDDEN, dtype=next(stage.parameters()).dtype)
        arguments = (torch.zeros(SEQUENCE, BATCH, dtype=torch.long) if stage.info.is_first else message,)
        traces = Trace(stage, arguments, True), Trace(stage, arguments, False)
        for trace in traces:
            trace.cut(1, None)
        part = Part(traces, SplitState(stage, *traces), 0, arguments)
        return megapipe.PipelineStage(part, stage.info, stage.config)

"""A model that is there as a whole, cut into stages by the package."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from .. import integrations, weight_grad
from ..config import PipelineConfig
from .question import Question


def is_of_transformers(model: Any) -> bool:
    return any(base.__module__ == "transformers.modeling_utils" for base in type(model).__mro__)


def cut_model(question: Question, config: PipelineConfig) -> list[Any]:
    """This rank's chunks: those of `build_chunks` for a model of transformers, of `split` for any other."""
    model: Any = question.whole
    if isinstance(model, LossOf):
        made: list[Any] = integrations.transformers.build_chunks(
            model.module.config, question.schedule, num_chunks=question.num_chunks, seed=None, **vars(config)
        )
        for chunk in made:
            weight_grad.convert(chunk)
        return made
    first = question.data[0]
    example = tuple(first[:-1]) if isinstance(first, (tuple, list)) else first
    return integrations.splitting.split(
        copy.deepcopy(model), example, question.schedule, num_chunks=question.num_chunks, config=config
    )


class LossOf(nn.Module):
    """A model of transformers, that returns its loss as its last stage does."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, **batch: Any) -> Any:
        return self.module(**batch).loss

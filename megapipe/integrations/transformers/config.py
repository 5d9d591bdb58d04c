"""Two configs in one: the pipeline's settings and the model's."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from ...config import StepConfig

__all__ = ["ChunkConfig"]


class ChunkConfig(StepConfig):
    """The settings of the pipeline, and behind them the model's own config: what is not a setting is read there, and
    written there. The model's layers know the latter only, and so does config.json.

    Args:
        model_config: of transformers.
        settings: fields of `PipelineConfig`.
    """

    def __init__(self, model_config: Any, **settings: Any) -> None:
        self.__dict__["model_config"] = model_config
        super().__init__(**settings)

    def __getattr__(self, name: str) -> Any:
        if "model_config" not in self.__dict__ or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(name)  # while it is copied
        return getattr(self.__dict__["model_config"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _SETTINGS or not (name.startswith("_") or hasattr(self.model_config, name)):
            super().__setattr__(name, value)
        else:
            setattr(self.__dict__["model_config"], name, value)


_SETTINGS = {field.name for field in fields(StepConfig)}

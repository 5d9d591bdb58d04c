"""What a run did, beside what its plan says: timelines, bubbles, pictures, and the command."""

import importlib
from typing import TYPE_CHECKING, Any

from .bubble import BubbleSplit, split_bubble
from .charts import save_picture
from .text import as_text
from .timeline import Timeline, load_timeline, step_time

if TYPE_CHECKING:
    from .recorder import TimelineRecorder
    from .stage_bytes import bytes_of_stages

__all__ = [
    "BubbleSplit",
    "Timeline",
    "TimelineRecorder",
    "as_text",
    "bytes_of_stages",
    "load_timeline",
    "save_picture",
    "split_bubble",
    "step_time",
]

_WITH_TORCH = {"TimelineRecorder": "recorder", "bytes_of_stages": "stage_bytes"}


def __getattr__(name: str) -> Any:
    """What needs torch is imported where it is asked for: the command does without."""
    if name not in _WITH_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_WITH_TORCH[name]}", __name__), name)

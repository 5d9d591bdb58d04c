"""What a run did, beside what its plan says: timelines, bubbles, pictures, and the command."""

from typing import TYPE_CHECKING

from ..first_use import names_on_first_use

if TYPE_CHECKING:
    from .bubble import BubbleSplit, split_bubble
    from .charts import save_picture
    from .recorder import TimelineRecorder
    from .stage_bytes import bytes_of_stages
    from .text import as_text
    from .timeline import Timeline, load_timeline, step_time

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

__getattr__, __dir__ = names_on_first_use(__name__)

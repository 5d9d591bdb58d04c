"""What a run did, beside what its plan says: timelines, bubbles, pictures, and the command."""

from .bubble import BubbleSplit, split_bubble
from .charts import save_picture
from .live import LiveView
from .recorder import TimelineRecorder
from .stage_bytes import bytes_of_stages
from .text import as_text
from .timeline import Timeline, load_timeline, step_time

__all__ = [
    "BubbleSplit",
    "LiveView",
    "Timeline",
    "TimelineRecorder",
    "as_text",
    "bytes_of_stages",
    "load_timeline",
    "save_picture",
    "split_bubble",
    "step_time",
]

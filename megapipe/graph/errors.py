"""What is said of a stage that cannot be captured, and where in its code it is."""

from __future__ import annotations

import contextlib
import traceback
import warnings
from pathlib import Path

import torch
import typing_extensions


class CaptureError(ValueError):
    """A function that cannot be made into a graph. The message names the line."""


def line_in(stack: traceback.StackSummary) -> str:
    """Where in the user's code it is: the innermost frame outside of torch and of this package."""
    around = (contextlib.__file__, warnings.__file__, typing_extensions.__file__)  # decorated functions
    ours = (str(Path(torch.__file__).parent), str(Path(__file__).parent), *around)
    frames = [frame for frame in stack if not frame.filename.startswith((*ours, "<"))]  # "<": code made by torch
    if not frames:
        return "an unknown line"
    frame = frames[-1]
    return f"{frame.filename}:{frame.lineno} ({(frame.line or '').strip()})"


def this_line() -> str:
    return line_in(traceback.extract_stack())

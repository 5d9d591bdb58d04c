"""What a command does now, told where it takes long."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

PATIENCE = 2.0
"""Seconds before the first line. Each further pause is twice as long."""

NAME = "megapipe-progress"
"""That of the thread."""

_now = ""


def doing(what: str) -> None:
    """Keep what is done now, in words that stand behind the command's name."""
    global _now
    _now = what


@contextmanager
def telling(command: str) -> Iterator[None]:
    """A context in which the command's work is told on stderr, by a line each time that it has taken long."""
    ended = threading.Event()

    def tell() -> None:
        pause = PATIENCE
        while not ended.wait(pause):
            if _now:
                print(f"{command}: {_now} ...", file=sys.stderr, flush=True)
            pause *= 2

    thread = threading.Thread(target=tell, name=NAME, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        doing("")

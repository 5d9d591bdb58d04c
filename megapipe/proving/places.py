"""Errors in words, with the caller's own line that led to them."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path

NOT_THE_CALLERS = (str(Path(__file__).parents[1]), *{sysconfig.get_paths()[name] for name in ("stdlib", "purelib")})
"""Folders: this package, Python's library, and what is installed."""


def is_the_callers(file: str) -> bool:
    return not file.startswith((*NOT_THE_CALLERS, "<"))


def error_in_words(error: BaseException) -> str:
    own = [one for one in traceback.extract_tb(error.__traceback__) if is_the_callers(one.filename)]
    where = f" ({Path(own[-1].filename).name}:{own[-1].lineno}: `{own[-1].line}`)" if own else ""
    return f"{type(error).__name__}: {error}{where}"

"""The errors of a failed step, and what other errors say and mean."""

import errno


class PipelineError(RuntimeError):
    """A step failed because of another rank, or waited too long. Says which rank, where it was, and why."""


class NoResponseError(PipelineError):
    """A rank did not respond in time, or the connection to it broke. A report of where all ranks are is added to it."""


class DisagreementError(ValueError):
    """The ranks of a pipeline were called with different arguments."""


def is_disk_full(error: BaseException) -> bool:
    """Whether the disk is full, or what the user may have of it."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def text_of(error: BaseException) -> str:
    """Its text; where it has none, why."""
    try:
        return str(error)
    except Exception as another:
        return f"(no text: its __str__ raises {type(another).__name__})"

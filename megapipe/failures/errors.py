"""The errors of a failed step."""

__all__ = ["DisagreementError", "NoResponseError", "PipelineError"]


class PipelineError(RuntimeError):
    """A step failed because of another rank, or waited too long. Says which rank, where it was, and why."""


class NoResponseError(PipelineError):
    """A rank did not respond in time, or the connection to it broke. A report of where all ranks are is added to it."""


class DisagreementError(ValueError):
    """The ranks of a pipeline were called with different arguments."""

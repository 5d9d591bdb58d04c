"""Split backward: weight gradients put off, to be computed when there is nothing more urgent.

A W needs nothing from other ranks and nobody waits for it. So a layer's backward computes the gradient of its input at
once, and hands the computation of its weight's gradient to `defer`.
"""

from .putting_off import defer

__all__ = ["defer"]

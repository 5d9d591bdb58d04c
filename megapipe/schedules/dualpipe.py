"""DualPipeV: forwards and backwards in pairs, so that each hides the other's communication.

Sources: DeepSeek-V3 (https://arxiv.org/abs/2412.19437), https://github.com/deepseek-ai/DualPipe, and "DualPipe could be
better without the Dual" by Sea AI Lab (https://hackmd.io/@ufotalent/r1lVXsa9Jg), which cuts it in half.
"""

from __future__ import annotations

from typing import Any

from ..plan import Verbs, v_shape
from .calling import schedule
from .combined import pair
from .letters import BW, B, F, W

__all__ = ["forward_backward_dualpipev"]


def FB(pipe: Verbs, forward_chunk: int, backward_chunk: int) -> None:
    """F of one chunk and a whole backward of the other, overlapped; one of them alone where the other has none left."""
    if not (pipe.num_forwards_left(forward_chunk) and pipe.num_backwards_left(backward_chunk)):
        F(pipe, forward_chunk)
        BW(pipe, backward_chunk)
        return
    pair(pipe, forward_chunk, "BW", backward_chunk)


@schedule("dualpipev", placement=v_shape, num_chunks=2)
def forward_backward_dualpipev(pipe: Verbs) -> Any:
    """DualPipeV, for models whose communication inside a layer is long. https://github.com/deepseek-ai/DualPipe"""
    size, rank = pipe.pp_size, pipe.pp_rank

    # Phase 1: nF0.
    for _ in range(2 * (size - rank - 1)):
        F(pipe, 0)

    # Phase 2: n(F0 F1).
    for _ in range(rank + 1):
        F(pipe, 0)
        F(pipe, 1)

    # Phase 3: n(B1 W1 F1).
    for _ in range(size - rank - 1):
        B(pipe, 1)
        W(pipe)
        F(pipe, 1)

    # Phase 4, the steady state: n(F0B1 F1B0). The last rank has both ends of its first pair at hand: it runs them one
    # after the other, and the others get what they wait for sooner.
    for k in range(max(pipe.num_microbatches, 2 * size) - 2 * size + rank + 1):
        if k == 0 and rank == size - 1:
            F(pipe, 0)
            BW(pipe, 1)
        else:
            FB(pipe, 0, 1)
        FB(pipe, 1, 0)

    # Phase 5: n(B1 F1B0).
    for _ in range(size - rank - 1):
        BW(pipe, 1)
        FB(pipe, 1, 0)

    # Phase 6: n(B1 B0), the Ws of the second half deferred.
    for k in range(rank + 1):
        (B if 2 * k > rank else BW)(pipe, 1)
        (B if 2 * k >= rank else BW)(pipe, 0)

    # Phase 7: n(W B0).
    for _ in range(size - rank - 1):
        W(pipe)
        B(pipe, 0)

    # Phase 8: nW.
    while pipe.num_pending_weights():
        W(pipe)

    return pipe.finish()

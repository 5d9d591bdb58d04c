"""What a schedule is made of, in the letters of the figures.

Each does nothing where its chunk has nothing left to do, so a loop may run past the last microbatch.
"""

from __future__ import annotations

from ..plan import Verbs

__all__ = ["BW", "B", "F", "W", "finish_weights", "limit_pending_weights"]


def F(pipe: Verbs, chunk: int = 0) -> None:
    """Forward of the chunk's next microbatch, or slice of one."""
    if pipe.num_forwards_left(chunk):
        pipe.recv_forward(chunk)
        pipe.forward_step(chunk)
        pipe.send_forward(chunk)


def B(pipe: Verbs, chunk: int = 0) -> None:
    """Input gradient of the chunk's next microbatch or slice. Its weight-gradient pass (W) is deferred."""
    if pipe.num_backwards_left(chunk):
        pipe.recompute_step(chunk)
        pipe.recv_backward(chunk)
        pipe.backward_input_step(chunk)
        pipe.send_backward(chunk)
        limit_pending_weights(pipe)


def W(pipe: Verbs, chunk: int | None = None) -> None:
    """The weight-gradient pass deferred longest, of this chunk or of all. While backwards are left, as many stay
    pending as the setting `min_pending_weights` says, the youngest."""
    least = pipe.settings.min_pending_weights
    if least and any(map(pipe.num_backwards_left, range(pipe.num_chunks))):
        if pipe.num_pending_weights() > least:
            pipe.backward_weight_step()
    elif pipe.num_pending_weights(chunk):
        pipe.backward_weight_step(chunk)


def limit_pending_weights(pipe: Verbs) -> None:
    """After a B: the Ws that are too many by the setting `max_pending_weights`."""
    most = pipe.settings.most_pending_weights
    while most is not None and pipe.num_pending_weights() > most:
        pipe.backward_weight_step()


def finish_weights(pipe: Verbs, chunk: int) -> None:
    """Before a BW: the Ws of this chunk that the setting `min_pending_weights` has left, for gradients are added up in
    the order of the microbatches."""
    while pipe.num_pending_weights(chunk):
        pipe.backward_weight_step(chunk)


def BW(pipe: Verbs, chunk: int = 0) -> None:
    """Whole backward of the chunk's next microbatch or slice: B and W in one. Figures that split no backward call it
    B."""
    if pipe.num_backwards_left(chunk):
        pipe.recompute_step(chunk)
        finish_weights(pipe, chunk)
        pipe.recv_backward(chunk)
        pipe.backward_step(chunk)
        pipe.send_backward(chunk)

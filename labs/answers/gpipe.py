"""Lab 1: the solution, and five mistakes with what `megapipe prove --like gpipe` says of them."""

from megapipe import schedule
from megapipe.plan import loop
from megapipe.schedules import BW, B, F

LIKE = "gpipe"


@schedule("solution", placement=loop)
def solution(pipe):
    for _ in range(pipe.num_microbatches):
        F(pipe)
    for _ in range(pipe.num_microbatches):
        BW(pipe)
    return pipe.finish()


@schedule("one_by_one", placement=loop)
def one_by_one(pipe):
    for _ in range(pipe.num_microbatches):
        F(pipe)
        BW(pipe)
    return pipe.finish()


@schedule("forwards_of_ranks", placement=loop)
def forwards_of_ranks(pipe):
    """As many forwards as there are ranks."""
    for _ in range(pipe.pp_size):
        F(pipe)
    for _ in range(pipe.num_microbatches):
        BW(pipe)
    return pipe.finish()


@schedule("no_finish", placement=loop)
def no_finish(pipe):
    for _ in range(pipe.num_microbatches):
        F(pipe)
    for _ in range(pipe.num_microbatches):
        BW(pipe)


@schedule("no_weights", placement=loop)
def no_weights(pipe):
    """B in place of BW: a figure's B may be either."""
    for _ in range(pipe.num_microbatches):
        F(pipe)
    for _ in range(pipe.num_microbatches):
        B(pipe)
    return pipe.finish()


@schedule("backwards_first", placement=loop)
def backwards_first(pipe):
    for _ in range(pipe.num_microbatches):
        pipe.recv_backward()
        pipe.backward_step()
        pipe.send_backward()
    for _ in range(pipe.num_microbatches):
        F(pipe)
    return pipe.finish()


MISTAKES = {
    "one_by_one": "rank 0 runs 1 forwards before its first backward, and there 8. Its step takes",
    "forwards_of_ranks": "108 of 144 sizes are wrong: it needs m <= p; the first is p = 1, m = 2",
    "no_finish": "rank 0 did not end its step with `return pipe.finish()`",
    "no_weights": "rank 0 ended its step without the Ws of 1 microbatches of chunk 0",
    "backwards_first": "rank 0 calls recv_backward(0) for microbatch 0 before send_forward(0)",
}

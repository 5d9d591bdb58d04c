"""Lab 4: the solution, and five mistakes with what `megapipe prove --like zb1p` says of them."""

from megapipe import schedule
from megapipe.plan import loop
from megapipe.schedules import BW, B, F, W

LIKE = "zb1p"


def run(pipe, pending, backward=B, rest=True):
    """`pending`: how many Ws stay pending."""
    for _ in range(min(pipe.pp_size - pipe.pp_rank - 1, pipe.num_microbatches)):
        F(pipe)
    for _ in range(pipe.num_microbatches):
        F(pipe)
        backward(pipe)
        if pipe.num_pending_weights() > pending:
            W(pipe)
    while rest and pipe.num_pending_weights():
        W(pipe)
    return pipe.finish()


@schedule("solution", placement=loop)
def solution(pipe):
    return run(pipe, pipe.pp_rank)


@schedule("at_once", placement=loop)
def at_once(pipe):
    """Each W right behind its B."""
    return run(pipe, 0)


@schedule("all_at_the_end", placement=loop)
def all_at_the_end(pipe):
    return run(pipe, pipe.num_microbatches)


@schedule("one_too_many", placement=loop)
def one_too_many(pipe):
    return run(pipe, pipe.pp_rank + 1)


@schedule("without_the_rest", placement=loop)
def without_the_rest(pipe):
    return run(pipe, pipe.pp_rank, rest=False)


@schedule("whole_backwards", placement=loop)
def whole_backwards(pipe):
    return run(pipe, 0, BW)


MISTAKES = {
    "at_once": "rank 1 runs 1W0 behind 1B0, and there 1F3: the weight gradient comes too early. Its step takes",
    "all_at_the_end": "the weight gradient comes too late. Its step takes 30, and there 27, it holds 8",
    "one_too_many": "and there 0W0: the weight gradient comes too late. It holds 5 microbatches at once, and there 4",
    "without_the_rest": "ended its step without the Ws of 1 microbatches of chunk 0",
    "whole_backwards": "its backwards are whole (BW), and there they are split: say B and W.",
}

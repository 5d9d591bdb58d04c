"""Lab 6: the solution, and five mistakes with what `megapipe prove` says of them."""

from megapipe import schedule
from megapipe.plan import loop
from megapipe.schedules import BW, F

LIKE = "labs/answers/hang.py:solution"


def run(pipe, num_warmup):
    for _ in range(min(num_warmup, pipe.num_microbatches)):
        F(pipe)
    for _ in range(pipe.num_microbatches):
        F(pipe)
        BW(pipe)
    return pipe.finish()


@schedule("solution", placement=loop)
def solution(pipe):
    """Two more on every rank but the last: no rank has fewer than the one behind it."""
    return run(pipe, pipe.pp_size - pipe.pp_rank - 1 + (2 if pipe.pp_rank < pipe.pp_size - 1 else 0))


@schedule("on_odd_ranks", placement=loop)
def on_odd_ranks(pipe):
    """As it is in the lab."""
    return run(pipe, pipe.pp_size - pipe.pp_rank - 1 + (2 if pipe.pp_rank % 2 else 0))


@schedule("on_even_ranks", placement=loop)
def on_even_ranks(pipe):
    return run(pipe, pipe.pp_size - pipe.pp_rank - 1 + (0 if pipe.pp_rank % 2 else 2))


@schedule("on_the_last_rank", placement=loop)
def on_the_last_rank(pipe):
    return run(pipe, pipe.pp_size - pipe.pp_rank - 1 + (2 if pipe.pp_rank == pipe.pp_size - 1 else 0))


@schedule("on_no_rank", placement=loop)
def on_no_rank(pipe):
    """1F1B does not hang, and does not run ahead."""
    return run(pipe, pipe.pp_size - pipe.pp_rank - 1)


@schedule("twice", placement=loop)
def twice(pipe):
    return run(pipe, 2 * (pipe.pp_size - pipe.pp_rank - 1))


MISTAKES = {
    "on_odd_ranks": "would hang: rank 0 waits at 0B0 for the output gradient of microbatch 0 from rank 1",
    "on_even_ranks": "rank 1 waits at 1B0 for the output gradient of microbatch 0 from rank 2, which waits at 2F2",
    "on_the_last_rank": "would hang: rank 0 waits at 0B0 for the output gradient of microbatch 0 from rank 1",
    "on_no_rank": "rank 0 runs 4 forwards before its first backward, and there 6. It holds 4 microbatches at",
    "twice": "rank 0 runs 7 forwards before its first backward, and there 6. It holds 7 microbatches at once, and",
}

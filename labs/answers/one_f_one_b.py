"""Lab 2: the solution, and five mistakes with what `megapipe prove --like 1f1b` says of them."""

from megapipe import schedule
from megapipe.plan import loop
from megapipe.schedules import BW, F

LIKE = "1f1b"


def with_warmup(pipe, num_warmup):
    for _ in range(num_warmup):
        F(pipe)
    for _ in range(pipe.num_microbatches - num_warmup):
        F(pipe)
        BW(pipe)
    for _ in range(num_warmup):
        BW(pipe)
    return pipe.finish()


@schedule("solution", placement=loop)
def solution(pipe):
    return with_warmup(pipe, min(pipe.pp_size - pipe.pp_rank - 1, pipe.num_microbatches))


@schedule("more_than_there_are", placement=loop)
def more_than_there_are(pipe):
    for _ in range(pipe.pp_size - pipe.pp_rank - 1):
        pipe.recv_forward()
        pipe.forward_step()
        pipe.send_forward()
    for _ in range(pipe.num_microbatches):
        F(pipe)
        BW(pipe)
    return pipe.finish()


@schedule("rank_the_wrong_way_round", placement=loop)
def rank_the_wrong_way_round(pipe):
    return with_warmup(pipe, min(pipe.pp_rank, pipe.num_microbatches))


@schedule("one_more", placement=loop)
def one_more(pipe):
    return with_warmup(pipe, min(pipe.pp_size - pipe.pp_rank, pipe.num_microbatches))


@schedule("the_same_everywhere", placement=loop)
def the_same_everywhere(pipe):
    return with_warmup(pipe, min(pipe.pp_size - 1, pipe.num_microbatches))


@schedule("backward_first", placement=loop)
def backward_first(pipe):
    """BW before F in the steady state."""
    num_warmup = min(pipe.pp_size - pipe.pp_rank - 1, pipe.num_microbatches)
    for _ in range(num_warmup):
        F(pipe)
    for _ in range(pipe.num_microbatches):
        BW(pipe)
        F(pipe)
    return pipe.finish()


MISTAKES = {
    "more_than_there_are": "it needs m >= p - 1; the first is p = 3, m = 1: rank 0 calls recv_forward(0) more",
    "rank_the_wrong_way_round": "would hang: rank 0 waits at 0B0 for the output gradient of microbatch 0 from rank 1",
    "one_more": "rank 0 runs 5 forwards before its first backward, and there 4. It holds 5 microbatches at once,",
    "the_same_everywhere": "rank 1 runs 4 forwards before its first backward, and there 3. Its step takes 69, and",
    "backward_first": "rank 0 calls recv_backward(0) for microbatch 0 before send_forward(0)",
}

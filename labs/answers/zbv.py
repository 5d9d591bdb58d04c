"""Lab 5: the solution, and five mistakes with what `megapipe prove --like zbv` says of them."""

from megapipe import schedule
from megapipe.plan import loop, v_shape
from megapipe.schedules import B, F, W

LIKE = "zbv"


def run(pipe, warmup, cooldown=True):
    """`warmup`: how often each of its three phases runs."""
    p, r, m = pipe.pp_size, pipe.pp_rank, pipe.num_microbatches
    for _ in range(warmup[0]):
        F(pipe, 0)
    for _ in range(warmup[1]):
        F(pipe, 1)
        F(pipe, 0)
    for _ in range(warmup[2]):
        F(pipe, 1)
        B(pipe, 1)
        W(pipe, 1)
    for _ in range(max(m, 2 * p - 1) - p):
        for chunk in (0, 1):
            F(pipe, chunk)
            B(pipe, chunk)
            W(pipe, chunk)
    if cooldown:
        for _ in range(r):
            B(pipe, 0)
            B(pipe, 1)
        for _ in range(p - r):
            B(pipe, 0)
            W(pipe, 0)
    else:
        for _ in range(p):
            for chunk in (0, 1):
                B(pipe, chunk)
                W(pipe, chunk)
    for chunk in (1, 0):
        while pipe.num_pending_weights(chunk):
            W(pipe, chunk)
    return pipe.finish()


def phases(pipe):
    return 2 * (pipe.pp_size - pipe.pp_rank) - 1, pipe.pp_rank, pipe.pp_size - pipe.pp_rank


@schedule("solution", placement=v_shape, num_chunks=2)
def solution(pipe):
    return run(pipe, phases(pipe))


@schedule("in_a_loop", placement=loop, num_chunks=2)
def in_a_loop(pipe):
    return run(pipe, phases(pipe))


@schedule("one_forward_too_few", placement=v_shape, num_chunks=2)
def one_forward_too_few(pipe):
    first, second, third = phases(pipe)
    return run(pipe, (first - 1, second, third))


@schedule("warmup_of_1f1b", placement=v_shape, num_chunks=2)
def warmup_of_1f1b(pipe):
    _, second, third = phases(pipe)
    return run(pipe, (pipe.pp_size - pipe.pp_rank, second, third))


@schedule("turns_on_the_wrong_ranks", placement=v_shape, num_chunks=2)
def turns_on_the_wrong_ranks(pipe):
    first, second, third = phases(pipe)
    return run(pipe, (first, third, second))


@schedule("weights_within_the_cooldown", placement=v_shape, num_chunks=2)
def weights_within_the_cooldown(pipe):
    """Each W behind its B, so that others wait."""
    return run(pipe, phases(pipe), cooldown=False)


MISTAKES = {
    "in_a_loop": "would hang: rank 0 waits at",
    "one_forward_too_few": "rank 0 calls recv_backward(0) for microbatch 0 before send_forward(0)",
    "warmup_of_1f1b": "rank 0 runs 5 forwards before its first backward, and there 8. Its step takes 39, and",
    "turns_on_the_wrong_ranks": "rank 0 ended its step after 0 calls of recv_backward(1)",
    "weights_within_the_cooldown": "the weight gradient comes too early",
}

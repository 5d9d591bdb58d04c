"""Lab 3: the solution, and five mistakes with what `megapipe prove --like interleaved_1f1b` says of them."""

from megapipe import schedule
from megapipe.plan import loop, v_shape
from megapipe.schedules import BW, F

LIKE = "interleaved_1f1b"


def rounds(pipe, size):
    """The chunks of all forwards, with so many microbatches in a round."""
    numbers = range(0, pipe.num_microbatches, size)
    return [chunk for first in numbers for chunk in (0, 1) for _ in range(min(size, pipe.num_microbatches - first))]


def run(pipe, forwards, num_warmup, backwards=None):
    if pipe.num_microbatches % pipe.pp_size:
        raise ValueError("m must be a multiple of p: rounds are full")
    num_warmup = min(num_warmup, len(forwards))
    backwards = backwards or [1 - chunk for chunk in forwards]
    for chunk in forwards[:num_warmup]:
        F(pipe, chunk)
    for chunk, other in zip(forwards[num_warmup:], backwards):
        F(pipe, chunk)
        BW(pipe, other)
    for chunk in backwards[len(forwards) - num_warmup :]:
        BW(pipe, chunk)
    return pipe.finish()


def usual_warmup(pipe):
    return 2 * (pipe.pp_size - pipe.pp_rank - 1) + pipe.pp_size


@schedule("solution", placement=loop, num_chunks=2)
def solution(pipe):
    return run(pipe, rounds(pipe, pipe.pp_size), usual_warmup(pipe))


@schedule("chunk_by_chunk", placement=loop, num_chunks=2)
def chunk_by_chunk(pipe):
    """All microbatches through chunk 0, then all through chunk 1."""
    return run(pipe, rounds(pipe, pipe.num_microbatches), usual_warmup(pipe) + pipe.num_microbatches - pipe.pp_size)


@schedule("warmup_of_1f1b", placement=loop, num_chunks=2)
def warmup_of_1f1b(pipe):
    return run(pipe, rounds(pipe, pipe.pp_size), pipe.pp_size - pipe.pp_rank - 1)


@schedule("one_forward_more", placement=loop, num_chunks=2)
def one_forward_more(pipe):
    return run(pipe, rounds(pipe, pipe.pp_size), usual_warmup(pipe) + 1)


@schedule("backwards_like_forwards", placement=loop, num_chunks=2)
def backwards_like_forwards(pipe):
    """Chunk 0 goes backward first."""
    return run(pipe, forwards := rounds(pipe, pipe.pp_size), usual_warmup(pipe), forwards)


@schedule("in_a_v", placement=v_shape, num_chunks=2)
def in_a_v(pipe):
    return run(pipe, rounds(pipe, pipe.pp_size), 2 * pipe.num_microbatches)


MISTAKES = {
    "chunk_by_chunk": "rank 0 runs 15 forwards before its first backward, and there 11. It holds 7.5 microbatches",
    "warmup_of_1f1b": "rank 0 calls recv_backward(1) for microbatch 0 before send_forward(1)",
    "one_forward_more": "rank 0 runs 12 forwards before its first backward, and there 11. It holds 6 microbatches",
    "backwards_like_forwards": "backwards_like_forwards takes 0RECV_B0 on rank 0 before 1SEND_B0, which is on the",
    "in_a_v": "its stages are on ranks 0 1 2 3 3 2 1 0, and there on 0 1 2 3 0 1 2 3: choose another placement.",
}

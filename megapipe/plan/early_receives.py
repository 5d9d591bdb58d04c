"""Finds the receives that may be posted one action early (over NCCL) without a rank that waits for ever.

Over NCCL a message larger than NCCL's buffers travels only once its receive is posted. Posted one action early, it
travels beside that action instead of in front of its own.

But the host may wait for the whole device within any action (`torch.cuda.synchronize()`, a kernel that tunes itself,
the allocator when memory is short), and so for that message too. In the steady state of 1F1B two neighbours compute an
F and a B at the same time, and each needs the other's result for its next action: if both post early, both wait for
ever.

So the plan is simulated as if each host waited for its device in each action. A receive that would stop the simulation
is not posted early, but when its own action needs it. (Buffers are allocated one receive ahead: `Receiver.reserve`.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from .program import Program


class _Launch(NamedTuple):
    """An action, or an overlapped pair, with its messages from and to other ranks."""

    last: int
    """The place of its last action on the rank."""
    needs: dict[int, int]
    """The place of the action that waits for each message."""
    sends: list[int]


def posted_ahead(program: Program) -> list[dict[int, list[int]]]:
    """The places of the actions whose receives are posted before an action is launched, when its own messages are
    there: by rank, and by the place of that action. They are of the next action, or of the next overlapped pair."""
    # Sends wait where messages are large. Ranks with two chunks may then wait for ever whatever is early.
    play = _Play(program, sends_wait=True)
    if not play.run():
        play = _Play(program, sends_wait=False)
        assert play.run(), "a plan that hangs"
    return play.posted_before


class _Play:
    """All ranks side by side. A launch ends when the device has seen the messages that are posted by then, and, where
    `sends_wait`, those that the rank has sent."""

    def __init__(self, program: Program, sends_wait: bool) -> None:
        self._launches = [list(_launches(program, rank)) for rank in range(len(program.sources))]
        self._sends_wait = sends_wait
        self.posted_before: list[dict[int, list[int]]] = [{} for _ in self._launches]
        self._early: list[list[int]] = [[] for _ in self._launches]
        """The messages that the present launch of each rank has posted early."""
        self._num_ended = 0
        self._edges: dict[int, tuple[int, int]] = {}
        """The sender and the receiver of each message."""
        self._numbers: dict[int, int] = {}
        """Its place among the messages of this edge, from 1 on: they travel in the order in which they are sent."""
        self._posted: Counter[tuple[int, int]] = Counter()
        self._sent: Counter[tuple[int, int]] = Counter()
        receivers = {m: rank for rank, launches in enumerate(self._launches) for one in launches for m in one.needs}
        counts: Counter[tuple[int, int]] = Counter()
        for rank, launches in enumerate(self._launches):
            for message in (message for one in launches for message in one.sends):
                self._edges[message] = edge = rank, receivers[message]
                counts[edge] += 1
                self._numbers[message] = counts[edge]

    def run(self) -> bool:
        """Whether all ranks get to their ends."""
        hosts = list(map(self._host, range(len(self._launches))))
        while hosts:
            num_ended = self._num_ended
            hosts = [host for host in hosts if next(host, "at its end") != "at its end"]
            if hosts and num_ended == self._num_ended and not self._post_one_later():
                return False
        return True

    def _host(self, rank: int) -> Iterator[None]:
        """Yields where it has to wait."""
        launches = self._launches[rank]
        last_sent: dict[tuple[int, int], int] = {}
        for launch, following in zip(launches, [*launches[1:], _Launch(0, {}, [])]):
            for message in launch.needs:
                self._posted[self._edges[message]] = max(self._posted[self._edges[message]], self._numbers[message])
            for message in following.needs:
                if self._posted[self._edges[message]] + 1 == self._numbers[message]:
                    self._posted[self._edges[message]] += 1
                    self._early[rank].append(message)
            while not self._may_end(rank, launch, last_sent.values()):
                yield
            self._num_ended += 1
            if self._early[rank]:
                self.posted_before[rank][launch.last] = [following.needs[message] for message in self._early[rank]]
                self._early[rank] = []
            for message in launch.sends:
                self._sent[self._edges[message]] += 1
                if self._sends_wait:
                    last_sent[self._edges[message]] = message

    def _may_end(self, rank: int, launch: _Launch, sent: Iterable[int]) -> bool:
        awaited = (*launch.needs, *self._early[rank])
        return all(self._sent[self._edges[m]] >= self._numbers[m] for m in awaited) and all(
            self._posted[self._edges[m]] >= self._numbers[m] for m in sent
        )

    def _post_one_later(self) -> bool:
        """Take back a receive that was posted early, and whose message has not been sent. False where there is none."""
        for early in reversed(self._early):
            for message in reversed(early):
                edge = self._edges[message]
                if self._sent[edge] < self._numbers[message]:
                    early.remove(message)
                    self._posted[edge] -= 1
                    return True
        return False


def _launches(program: Program, rank: int) -> Iterator[_Launch]:
    sources, sent, pairs = program.sources[rank], program.sent[rank], program.pairs[rank]
    until = [0, *program.sent_until[rank]]
    first = 0
    while first < len(sources):
        last = pairs.get(first, first)
        needs = {sources[at]: at for at in range(first, last + 1) if _travels(program, sources[at])}
        sends = [message for message in sent[until[first] : until[last + 1]] if _travels(program, message)]
        yield _Launch(last, needs, sends)
        first = last + 1


def _travels(program: Program, message: int) -> bool:
    return message >= 0 and program.channels[message] is not None

"""What a pipeline keeps from one step to the next on one rank: its watchdog, and the channels to its neighbours."""

from __future__ import annotations

import atexit
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from .p2p_communication import Communicator
from .placement import Placement
from .registry import Schedule
from .verbs import Settings
from .watchdog import Watchdog
from .weight_tuning import WeightTuner

__all__ = ["Session"]


class Session:
    """One pipeline on one rank, for as long as its steps succeed.

    A failed step leaves messages under way that nobody will take, so it ends the session: the next step begins
    another, with channels of its own. A rank that had left the step before it failed elsewhere raises in its next one.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.ranks = dist.get_process_group_ranks(group)
        self.pp_rank = group.rank()
        name = f"megapipe {'-'.join(map(str, self.ranks))}"
        store = _get_default_store()
        # Counted in the store, which may outlive this process group or have known others before.
        number = store.add(f"{name} sessions of {self.pp_rank}", 1)
        self._store = PrefixStore(f"{name} {number}", store)
        self.watchdog = Watchdog(self._store, self.pp_rank, len(self.ranks))
        self.watchdog.abort = self._abort
        self.watchdog.has_ended = self.has_ended
        self._world = dist.group.WORLD
        self._communicators: dict[tuple[str, int, str, bool, float], Communicator] = {}
        self._tuners: dict[tuple[str, int, int, Settings], WeightTuner] = {}

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> Session:
        """The session of the pipeline that `group` is, begun if there is none."""
        ranks = tuple(dist.get_process_group_ranks(group))
        session = _sessions.get(ranks)
        if session is None or session.has_ended():
            if session is not None:
                session._close()
            session = _sessions[ranks] = cls(group)
        return session

    def has_ended(self) -> bool:
        """Whether torch.distributed was shut down, or initialised anew."""
        return self._world is not dist.group.WORLD

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around everything that one step does."""
        try:
            with self.watchdog.step():
                yield
        except BaseException:
            del _sessions[tuple(self.ranks)]
            self._close()
            raise

    def communicator(
        self, placement: Placement, num_chunks: int, device: torch.device, described: bool
    ) -> Communicator:
        """The channels for this placement, built at the first step that needs them. Collective over the pipeline."""
        # A transport keeps its time limit for good, so another limit takes another transport.
        key = (placement.name, num_chunks, device.type, described, self.watchdog.timeout)
        if key not in self._communicators:
            self._communicators[key] = Communicator(
                PrefixStore(f"channels {key}", self._store),
                self.pp_rank,
                len(self.ranks),
                placement,
                num_chunks,
                device,
                described,
                self.watchdog.timeout + 60,  # the watchdog comes first: it says where everybody is
            )
        return self._communicators[key]

    def tuner(self, schedule: Schedule, num_microbatches: int, num_chunks: int, settings: Settings) -> WeightTuner:
        """What places the Ws of such steps by what was measured in those before."""
        key = (schedule.name, num_microbatches, num_chunks, settings)
        if key not in self._tuners:
            sizes = (schedule, len(self.ranks), num_microbatches, num_chunks)
            self._tuners[key] = WeightTuner(self.watchdog, self.pp_rank, sizes, settings)
        return self._tuners[key]

    def _abort(self) -> None:
        for communicator in list(self._communicators.values()):
            communicator.abort()

    def _close(self) -> None:
        self.watchdog.close()
        for communicator in self._communicators.values():
            communicator.close()


_sessions: dict[tuple[int, ...], Session] = {}


@atexit.register
def _close_sessions() -> None:
    for session in _sessions.values():
        session._close()

"""What a pipeline keeps on one rank between steps: its watchdog, its channels, and its runners."""

from __future__ import annotations

import atexit
import json
import logging
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store, _world

from ..config import StepConfig
from ..failures import (
    TIMING,
    Agreement,
    Board,
    InterruptibleStore,
    Mailbox,
    PipelineError,
    Watchdog,
    join_ranks,
    single_rank_step,
)
from ..p2p_communication import Channels
from ..plan import Placement
from ..transports import Members, make_transport
from .sharing import share

logger = logging.getLogger(__name__)

UNDER_WAY = (
    "a schedule was called while another call of it is under way, where other ranks cannot follow: call it before or "
    "after, not in forward_step_func, and in several threads with a process group for each."
)


class Session:
    """What the pipeline of one process group keeps between steps on this rank. It ends with its process group.

    A failed step leaves messages on their way that no rank will take, so it ends the pipeline. If a rank has finished
    its part of the step when another rank fails, it raises where it clips gradients or steps its optimizer, or else in
    its next step."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        board = Board.current()
        assert board is not None
        board.check()
        self._group = group
        self.ranks = dist.get_process_group_ranks(group)
        self.pp_rank = group.rank()
        number = _number_of(group)
        name = join_ranks(self.ranks) + (f" (group {number})" if number else "")
        store = _get_default_store()
        # Counted in the store, which may outlive this process group or have known others before.
        count = store.add(f"megapipe pipelines of {name}, {self.pp_rank}", 1)
        self._torch_store = PrefixStore(f"megapipe pipeline of {name}, {count}", store)
        self._store = InterruptibleStore(
            self._torch_store, self.pp_rank, len(self.ranks), check_failure=lambda: self.watchdog.check()
        )
        self._channels: dict[tuple[str, int, str, str | None, int, float], Channels] = {}
        self.watchdog = Watchdog(board, name, self.ranks, self._store, self._abort, self._find_error, self.has_ended)
        self._progress = self.watchdog.progress
        self.mailbox = Mailbox(self._store, self.watchdog)
        self.agreement = Agreement(self.mailbox, self.watchdog)
        self._is_in_step = False
        self._devices: dict[str, torch.device] = {}  # by type, that of the channels
        self._seen: set[str] = set()
        self._shared_in: dict[str, int] = {}
        self._is_device_shared = False
        self.runners: list[Any] = []
        """The runners of earlier steps, up to `MOST_RUNNERS`, the last used last."""

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> Session:
        """The session of the pipeline that `group` is, begun if there is none."""
        for session in list(_sessions.values()):
            if session.has_ended():
                session.close()
        if group not in _sessions:
            _sessions[group] = cls(group)
        return _sessions[group]

    def has_ended(self) -> bool:
        """Whether the process group was destroyed."""
        return self._group not in _world.pg_map

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around one step. An exception in it ends the pipeline, unless all ranks refuse the step.

        Raises:
            ValueError: another step of this session, or of this thread, is under way.
            PipelineError: the step failed on another rank.
        """
        if self._is_in_step or getattr(_this_thread, "is_in_step", False):
            raise ValueError(UNDER_WAY)
        self._is_in_step = _this_thread.is_in_step = True
        try:
            with self.watchdog.step():
                try:
                    yield
                except Exception as error:
                    self.agreement.tell(error)
                    raise
        except BaseException:
            if not self.watchdog.is_refused:
                self._close_channels()
            raise
        finally:
            self._is_in_step = _this_thread.is_in_step = False

    def is_first(self, what: str) -> bool:
        """Whether this is asked for the first time."""
        is_first = what not in self._seen
        self._seen.add(what)
        return is_first

    def exchange(self, name: str, own: Any) -> list[Any]:
        """The values of all ranks of the pipeline, by rank. Collective, once for each name.

        Args:
            own: this rank's value, which JSON can hold.
        """
        self.mailbox.post(name, json.dumps(own))
        return [json.loads(text) for text in self.mailbox.collect(name)]

    def channels(
        self, placement: Placement, num_chunks: int, device: torch.device, has_headers: bool, config: StepConfig
    ) -> Channels:
        """The channels for this placement, built at the first step that needs them. Collective over the pipeline.

        Args:
            has_headers: whether headers precede messages.
        """
        # A transport keeps its settings for good, so others take another transport; similar time limits the same one.
        patience = 2.0 ** math.ceil(math.log2(self.watchdog.timeout + TIMING.beyond_limit))
        settings = (config.p2p_transport, config.p2p_max_ctas, patience)
        # Stage by stage: several placements may have one name.
        stages = range(num_chunks * len(self.ranks))
        ranks = ",".join(str(placement.rank(stage, len(self.ranks))) for stage in stages)
        key = (ranks, num_chunks, device.type, *settings)
        if (before := self._devices.setdefault(device.type, device)) != device:
            raise ValueError(
                f"the chunks of pipeline rank {self.pp_rank} are on {device}, but its channels were opened for "
                f"{before}: leave chunks on the device of their first step, or make the process groups anew."
            )
        progress = self._progress
        if key not in self._channels:
            own, torchs = (PrefixStore(f"channels {key}", store) for store in (self._store, self._torch_store))
            members = Members(own, torchs, self.pp_rank, self.ranks, patience)
            chosen = make_transport(config.p2p_transport, members, device, self._is_shared, config.p2p_max_ctas)
            channels = Channels(chosen, placement, self.pp_rank, len(self.ranks), num_chunks)
            self._channels[key] = channels
            progress.action, progress.awaited = "the connecting of its channels", "the others to connect"
            channels.connect()
            progress.awaited = None
            logger.info(
                "pipeline rank %d of %d: connected for %s with %d chunk(s), on %s by %s",
                *(self.pp_rank, len(self.ranks), placement.name, num_chunks, device, type(chosen).__name__),
            )
        channels = self._channels[key]
        if has_headers:
            progress.action, progress.awaited = "the connecting of its channels", "the others to connect"
            channels.connect_headers()
            progress.awaited = None
        return channels

    def _is_shared(self, device: torch.device) -> bool:
        """Whether two ranks of this pipeline are on one GPU."""
        if self.is_first("GPU"):
            devices = self.exchange("GPU", str(torch.cuda.get_device_properties(device).uuid))
            self._is_device_shared = len(set(devices)) < len(devices)
        return self._is_device_shared

    def share(self, value: Any, source: int, device: torch.device, what: str = "results") -> Any:
        """Rank `source`'s value, on every rank. All call it at the end of a step, once for each `what`."""
        step, before = self._progress.step, self._shared_in.get(what)
        self._shared_in[what] = step
        return share(value, self._group, self.mailbox, step, before, source, device, what)

    def _abort(self) -> None:
        """All at once: to abort one can wait for what others have on the device. The first needs no thread: at the end
        of the interpreter none can be started."""
        all_channels = list(self._channels.values())
        others = [threading.Thread(target=one.transport.abort, daemon=True) for one in all_channels[1:]]
        for other in others:
            other.start()
        for one in all_channels[:1]:
            one.transport.abort()
        for other in others:
            other.join()

    def _find_error(self) -> str | None:
        errors = (channels.transport.find_error() for channels in list(self._channels.values()))
        return next((error for error in errors if error is not None), None)

    def close(self) -> None:
        _sessions.pop(self._group, None)
        self.watchdog.close()
        self._close_channels()

    def _close_channels(self) -> None:
        for channels in self._channels.values():
            channels.transport.close()
        self.runners.clear()  # over these channels
        self._channels.clear()  # with their connections: each has threads that poll


class Alone:
    """The session of a pipeline with one rank, one for each thread: it keeps runners, and needs no channels."""

    pp_rank, ranks = 0, [0]
    watchdog = None

    def __init__(self) -> None:
        self.runners: list[Any] = []

    @classmethod
    def of_this_thread(cls) -> Alone:
        """The session of this thread. Steps in two threads at the same time need runners of their own."""
        if not hasattr(_this_thread, "alone"):
            _this_thread.alone = cls()
        alone: Alone = _this_thread.alone
        return alone

    @contextmanager
    def step(self) -> Iterator[None]:
        """The context of one step. Raises what `Session.step` does."""
        if getattr(_this_thread, "is_in_step", False):
            raise ValueError(UNDER_WAY)
        _this_thread.is_in_step = True
        try:
            with single_rank_step():
                yield
        finally:
            _this_thread.is_in_step = False

    def share(self, value: Any, source: int, device: torch.device, what: str = "results") -> Any:
        return value


@contextmanager
def one_step(group: dist.ProcessGroup | None) -> Iterator[Session | Alone]:
    """The context of a step or of a warm-up. Gives the session.

    Args:
        group: the process group of the pipeline; None for one rank.
    """
    session = Alone.of_this_thread() if group is None or group.size() == 1 else Session.of(group)
    try:
        with session.step():
            yield session
    except PipelineError as error:
        raise error.with_traceback(None) from None  # another rank failed: our own calls have nothing to do with it


def _number_of(group: dist.ProcessGroup) -> int:
    """The number of this group among all groups of the same ranks. It is the same on all of these ranks, since they
    made the groups in one order. The name of a group may differ between ranks."""
    ranks = dist.get_process_group_ranks(group)
    alike = [other for other, members in list(_world.pg_group_ranks.items()) if list(members) == ranks]
    return alike.index(group)


_sessions: dict[dist.ProcessGroup, Session] = {}
_this_thread = threading.local()


@atexit.register
def _close_sessions() -> None:
    for session in list(_sessions.values()):
        session.close()

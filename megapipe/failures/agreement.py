"""All ranks of a pipeline are called with the same arguments, or all of them fail.

Nothing is exchanged while a rank's arguments stay as they were. When they change on one rank, it posts them and asks
the others for theirs. Ranks whose arguments did not change answer from their helper threads.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence

from .errors import DisagreementError
from .mailbox import Mailbox
from .watchdog import Watchdog
from .world import join_ranks

__all__ = ["Agreement"]


class Agreement:
    """
    Args:
        watchdog: its helper thread answers the requests of other ranks.
    """

    def __init__(self, mailbox: Mailbox, watchdog: Watchdog) -> None:
        self._mailbox = mailbox
        self._watchdog = watchdog
        self._lock = threading.Lock()
        self._history: list[tuple[int, dict[str, str]]] = [(0, {})]
        """This rank's last two sets of arguments, each with the step from which on it has them."""
        self._known_step = 0  # the last step of this rank whose arguments are in `_history`
        self._posted: list[int] = []  # the steps whose arguments this rank has in the mailbox
        self._answered: dict[int, int] = {}  # by rank, the step of its last request
        watchdog.subscribe(self._answer)

    def agree(self, arguments: dict[str, str]) -> None:
        """Check that ranks that have an argument in common have the same value for it.

        Args:
            arguments: of this step, by name.

        Raises:
            ValueError: they differ. Raised on every rank.
            PipelineError: a rank did not begin this step within the time limit, or failed.
        """
        step = self._watchdog.progress.step
        with self._lock:
            has_asked, self._known_step = self._known_step > 0, step
            if has_asked and arguments == self._history[-1][1]:
                return
            self._history = [self._history[-1], (step, arguments)]
            self._mailbox.post("request", str(step))  # all have answered the one before
            self._post(step)
        if has_asked:  # in a first step all ask, and nobody has to be told
            self._watchdog.notify()
        everybody = self._mailbox.collect(f"arguments {step}", f"began step {step}")
        with self._lock:
            if not has_asked:
                self._answered = dict.fromkeys(range(len(everybody)), step)
            self._withdraw(before=step)  # all ranks have come to this exchange
        _compare([json.loads(text) for text in everybody])

    def _answer(self) -> bool:
        """Post this rank's arguments where others have asked for them. Returns whether all have their answer."""
        with self._lock:
            # Each rank asks in its first step, and nobody goes on from there before all have.
            requests = self._mailbox.find_all("request") or []
            is_ahead = False
            for rank, step in enumerate(map(int, requests)):
                last = self._answered.get(rank, 0)
                if step > self._known_step:
                    is_ahead = True  # this rank has still to come to that step
                elif step > last:
                    if step not in self._posted:
                        self._post(step)
                    self._answered[rank] = step
                    self._withdraw(before=last)  # all had come to that exchange before this one was asked for
            return not is_ahead

    def _post(self, step: int) -> None:
        arguments = next(arguments for since, arguments in reversed(self._history) if since <= step)
        self._mailbox.post(f"arguments {step}", json.dumps(arguments))
        self._posted.append(step)

    def _withdraw(self, before: int) -> None:
        """Delete this rank's arguments of steps that no rank still asks for."""
        for step in self._posted:
            if step < before:
                self._mailbox.withdraw(f"arguments {step}")
        self._posted = [step for step in self._posted if step >= before]


def _compare(everybody: Sequence[dict[str, str]]) -> None:
    """Raises DisagreementError where two ranks have different values for an argument."""
    for name in sorted({name for one in everybody for name in one}):
        ranks_by_value: dict[str, list[int]] = {}
        for rank, one in enumerate(everybody):
            if name in one:
                ranks_by_value.setdefault(one[name], []).append(rank)
        if len(ranks_by_value) > 1:
            values = "; ".join(f"{value} on {join_ranks(ranks)}" for value, ranks in ranks_by_value.items())
            raise DisagreementError(f"the ranks of the pipeline disagree on {name}: {values}. Make them the same.")

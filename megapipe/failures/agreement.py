"""All ranks of a pipeline are called with the same arguments, or all of them refuse the step.

Nothing is exchanged while a rank's arguments stay as they were. When they change on one rank, it posts them and asks
the others for theirs. Ranks whose arguments did not change answer from their helper threads, and compute meanwhile.
Where all ranks exchange, as in the first step, none computes: a disagreement, or a mistake that one of them has found,
is raised by all, and the next step may be better.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from .board import join_ranks
from .errors import DisagreementError, PipelineError
from .mailbox import Mailbox
from .timing import TIMING
from .watchdog import Watchdog


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
        self.known_step = 0
        """The last step of this rank whose arguments are known: those of the step before it, or others."""
        self.agreed: dict[str, str] | None = None
        """The arguments that ranks have agreed on last. A step that has these need not ask again, but sets
        `known_step`."""
        self._all_ask = True  # in this step all ranks exchange, and none has to be told
        self._posted: list[int] = []  # the steps whose arguments this rank has in the mailbox
        self._answered: dict[int, int] = {}  # by rank, the step of its last request
        watchdog.subscribe(self._answer)

    def tell(self, mistake: Exception) -> None:
        """Tell the other ranks of an exception in a step, if they have not agreed on it yet."""
        if self.known_step < self._watchdog.progress.step and self._is_alone() and self._watchdog.board.failure is None:
            with suppress(Exception):  # then it ends the pipeline
                self._exchange({}, self._watchdog.told(mistake), TIMING.for_mistakes)

    def agree(self, arguments: dict[str, str]) -> None:
        """Check that ranks that have an argument in common have the same value for it.

        Args:
            arguments: of this step, by name.

        Raises:
            ValueError: they differ. Raised on every rank.
            PipelineError: a rank did not begin this step within the time limit, made a mistake, or failed.
        """
        with self._lock:
            is_known = not self._all_ask and arguments == self._history[-1][1]
            if is_known:
                self.known_step = self._watchdog.progress.step
        wrong = None if is_known else self._exchange(arguments)
        if wrong is not None:
            raise wrong
        self.agreed = arguments

    def _exchange(
        self, arguments: dict[str, str], mistake: str | None = None, timeout: float | None = None
    ) -> Exception | None:
        """Post this rank's arguments, or its mistake, and collect those of all. Returns what is wrong with them."""
        step = self._watchdog.progress.step
        with self._lock:
            all_ask, self.known_step, self.agreed = self._all_ask, step, None
            self._history = [self._history[-1], (step, arguments)]
            self._mailbox.post("request", str(step))  # all have answered the one before
            self._post(step, waits=True, mistake=mistake)
        if not all_ask:
            self._watchdog.notify()
        texts = self._mailbox.collect(f"arguments {step}", f"began step {step}", timeout)
        everybody = [json.loads(text) for text in texts]
        wrong = _find_wrong(everybody)
        with self._lock:
            if all_ask:
                self._answered = dict.fromkeys(range(len(everybody)), step)
            self._withdraw(before=step)  # all ranks have come to this exchange
            self._all_ask = wrong is not None and all(one["waits"] for one in everybody)
        self._watchdog.is_refused = self._all_ask and self._is_alone()
        return wrong

    def _is_alone(self) -> bool:
        """Whether there are no other pipelines, which may have begun to compute."""
        return len(self._watchdog.ranks) == self._watchdog.board.size

    def _answer(self) -> bool:
        """Post this rank's arguments where others have asked for them. Returns whether all have their answer."""
        with self._lock:
            # Each rank asks in its first step, and none goes on from there before all have.
            requests = self._mailbox.find_all("request") or []
            is_ahead = False
            for rank, step in enumerate(map(int, requests)):
                last = self._answered.get(rank, 0)
                if step > self.known_step:
                    is_ahead = True  # this rank has still to come to that step
                elif step > last:
                    if step not in self._posted:
                        self._post(step, waits=False)
                    self._answered[rank] = step
                    self._withdraw(before=last)  # all had come to that exchange before this one was asked for
            return not is_ahead

    def _post(self, step: int, waits: bool, mistake: str | None = None) -> None:
        arguments = next(arguments for since, arguments in reversed(self._history) if since <= step)
        self._mailbox.post(
            f"arguments {step}", json.dumps({"arguments": arguments, "waits": waits, "mistake": mistake})
        )
        self._posted.append(step)

    def _withdraw(self, before: int) -> None:
        """Delete this rank's arguments of steps that no rank still asks for."""
        for step in self._posted:
            if step < before:
                self._mailbox.withdraw(f"arguments {step}")
        self._posted = [step for step in self._posted if step >= before]


def _find_wrong(everybody: Sequence[dict[str, Any]]) -> Exception | None:
    """The first mistake of a rank, or else an argument for which two ranks have different values."""
    for one in everybody:
        if one["mistake"] is not None:
            return PipelineError(one["mistake"])
    for name in sorted({name for one in everybody for name in one["arguments"]}):
        ranks_by_value: dict[str, list[int]] = {}
        for rank, one in enumerate(everybody):
            if name in one["arguments"]:
                ranks_by_value.setdefault(one["arguments"][name], []).append(rank)
        if len(ranks_by_value) > 1:
            values = "; ".join(f"{value} on {join_ranks(ranks)}" for value, ranks in ranks_by_value.items())
            return DisagreementError(f"the ranks of the pipeline disagree on {name}: {values}. Make them the same.")
    return None

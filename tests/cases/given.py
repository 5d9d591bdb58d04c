"""Features of what a call and its config are given beyond what every case has."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import tee
from random import Random
from typing import Any

import torch

from .case import Case, Feature
from .stages import Source

__all__ = ["Called", "Given"]

NON_LOSS, UNREADABLE = "collect_non_loss_data", "a data_iterator without __next__()"
KINDS = [NON_LOSS, UNREADABLE, "pipeline_inputs", "context_parallel_size"]


@dataclass(frozen=True)
class Given(Feature):
    """What a call is given that few are, by the name of its trait."""

    kind: str

    traits = property(lambda self: {self.kind, *(["forward_only"] if self.kind == NON_LOSS else [])})
    chance = 0.2
    most = 2

    @staticmethod
    def goes(case: Case) -> Any:
        return Given.kinds(case)

    @staticmethod
    def kinds(case: Case) -> list[str]:
        """Those that a case may have. Of the lengths of sequences some are known that ranks do not share here."""
        is_known = case.get("AsPipelineStage") or case.of("Shapes", "kind", "") == "computed"
        is_known = is_known or (case.of("Shapes", "kind", "") == "config" and case.get("WarmUp"))
        taken = case.options | ({"context_parallel_size"} if is_known else set())
        return [name for name in KINDS if name not in taken]

    @classmethod
    def draw(cls, rng: Random, case: Case) -> Feature:
        return cls(rng.choice(cls.kinds(case)))

    def config(self, config: dict[str, Any]) -> None:
        if self.kind == "context_parallel_size":
            config[self.kind] = 2

    def arguments(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """With a length that ranks share, or with data of this kind."""
        if self.kind == "context_parallel_size":
            return arguments | {"seq_length": 2 * arguments["seq_length"]}
        if self.kind == "pipeline_inputs":
            sizes = arguments["micro_batch_size"] * arguments["num_microbatches"], arguments["seq_length"]
            return arguments | {self.kind: {"input_ids": torch.zeros(sizes, dtype=torch.long)}}
        if self.kind == UNREADABLE:
            copies = [Source(one) for one in tee(arguments["data_iterator"], len(arguments["model"]))]
            return arguments | {"data_iterator": copies if len(copies) > 1 else copies[0]}
        return arguments

    def before(self, trial: Any, step: int) -> None:
        if self.kind == NON_LOSS:
            trial.compare_losses(550 + step, forward_only=True, collect_non_loss_data=True)


@dataclass(frozen=True)
class Called(Feature):
    """A function of the config, which returns what is begun and ended in turns."""

    kind: str

    traits = property(lambda self: {self.kind})
    goes = staticmethod(lambda case: not case.get("AsPipelineStage"))  # these are no fields of megapipe's own config

    @classmethod
    def draw(cls, rng: Random, case: Case) -> Feature:
        own = [] if case.of("Replicas", "kind", "") == "reducer" else ["grad_sync_func"]
        return cls(rng.choice(["no_sync_func", "timers", *own]))

    def made(self, trial: Any) -> None:
        self.log(trial).clear()
        trial.configure(**{self.kind: lambda *_, **__: self.around(trial)})

    def log(self, trial: Any) -> list[str]:
        log: list[str] = trial.kept.setdefault(self.kind, [])
        return log

    def around(self, trial: Any) -> Any:
        begin, end = (lambda *_, name=name, **__: self.log(trial).append(name) for name in ("begin", "end"))
        if self.kind == "grad_sync_func":  # which returns nothing
            begin(), end()
        return type("Around", (), {"start": begin, "stop": end, "__enter__": begin, "__exit__": end})()

    def trained(self, trial: Any, step: int) -> None:
        assert self.log(trial).count("begin") == self.log(trial).count("end") > 0

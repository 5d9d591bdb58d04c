"""Chunks that are sharded by torch's FSDP2: gathered and reduced once in a step, not in each forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from torch import nn

from ..chunks import find_attribute
from ..plan import Kind, gathered_chunks
from ..runtime import GradientSync
from ..sharding import ShardedChunks
from ..stages import ActionFunction, Call, Extension, Stage, UnitState


class FullyShard(Extension):
    """Takes part where some module of the chunks is sharded."""

    _sharded: ShardedChunks
    _models: Sequence[nn.Module]

    hides_gradients = True

    def takes_part(self, call: Call) -> bool:
        config = self.config
        is_reduced = config.grad_sync_func is not None or config.finalize_model_grads_func is not None
        sharded = ShardedChunks.find(call.models, call.forward_only, is_reduced)
        if sharded is None:
            return False
        if config.max_gathered_chunks is not None and not call.forward_only:
            sharded.follow(gathered_chunks(self.get_plan(), self.pp_rank, config.max_gathered_chunks))
        self._sharded, self._models = sharded, call.models
        return True

    def action(self, kind: Kind, stage: Stage, run: ActionFunction) -> ActionFunction:
        # FSDP2 ends a backward in all modules, also in those that were not run, and waits itself where one is called.
        if kind.direction != "backward" and not (kind.is_forward and find_attribute(stage.module, "calls_no_modules")):
            return run
        chunk = [model is stage.module for model in self._models].index(True)

        def gathered(unit: UnitState, *extra: bool) -> None:
            self._sharded.wait_for_gathers(chunk)
            run(unit, *extra)

        return gathered

    def gradient_sync(self, make: Callable[..., GradientSync]) -> Callable[..., GradientSync]:
        return partial(ShardedSync, self._sharded)


class ShardedSync(GradientSync):
    """Gathers parameters ahead of their use, and reduces the gradients of a chunk when they are complete."""

    def __init__(self, sharded: ShardedChunks, config: Any, models: Sequence[nn.Module], *sizes: Any) -> None:
        super().__init__(config, models, *sizes)
        self._sharded = sharded

    def _enter_contexts(self, stack: ExitStack) -> None:
        stack.enter_context(self._sharded)
        super()._enter_contexts(stack)

    def __exit__(self, kind: type[BaseException] | None = None, *error: Any) -> None:
        super().__exit__(kind, *error)
        if kind is not None:
            self._sharded.fail()

    def before_action(self) -> None:
        self._sharded.before_action()

    def _gather(self, chunk: int) -> None:
        if not self._sharded.follows_plan:
            self._sharded.gather(chunk)
        super()._gather(chunk)

    def after_weights(self, chunk: int) -> None:
        self._sharded.add_up(chunk)

    def _release(self, chunk: int) -> None:
        self._sharded.reduce(chunk)
        super()._release(chunk)

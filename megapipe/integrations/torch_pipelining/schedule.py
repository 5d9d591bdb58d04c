"""The step of a schedule of torch's, run by megapipe."""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.pipelining.schedules as theirs
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ... import weight_grad
from ...calling import get_forward_backward_func
from ...config import PipelineConfig
from ...plan import AnySchedule, find_schedule, make_plan
from .chunks import Chunk, positions_of
from .orders import order_of, plan_of

TAKES_LISTS = "arg_mbs" in inspect.signature(theirs.PipelineScheduleMulti.step).parameters
NOT_CALLED = (
    "forward_one_chunk",
    "forward_maybe_with_nosync",
    "backward_one_chunk",
    "backward_maybe_with_nosync",
    "backward_weight_one_chunk",
)
"""Methods of torch's stages."""


class Adopted(theirs._PipelineSchedule):
    """Stands before a class of torch's among the bases of another one."""

    _named: AnySchedule | None = None
    """What is run; None where it is the order that torch's attributes hold."""
    _convert = True
    _stage: Any
    _schedule: Any
    pipeline_order: Any
    pipeline_order_with_comms: Any
    _config: PipelineConfig | None = None
    _chunks: Sequence[Chunk] = ()

    def __init__(self, *args: Any, **options: Any) -> None:
        try:
            super().__init__(*args, **options)
        except ValueError:  # some numbers of microbatches are too few for torch, or no multiples
            given = inspect.signature(super().__init__).bind(*args, **options).arguments
            if "n_microbatches" not in given:
                raise
            wanted, given["n_microbatches"] = given["n_microbatches"], _listed(next(iter(given.values())))[0].num_stages
            super().__init__(**given)  # which raises again, if that was not it
            self._n_microbatches = wanted
            self.pipeline_order, self.pipeline_order_with_comms = {}, {}  # torch makes none of that number

    def _load_csv(self, *args: Any, **options: Any) -> None:
        super()._load_csv(*args, **options)  # type: ignore[misc]  # schedules of several stages have it
        self._named, self._chunks = None, ()

    def step(
        self, *args: Any, arg_mbs: Any = None, kwarg_mbs: Any = None, target_mbs: Any = None, **options: Any
    ) -> Any:
        """torch's. Lists of microbatches are taken with any torch, as torch does from 2.14 on."""
        lists = {"arg_mbs": arg_mbs, "kwarg_mbs": kwarg_mbs, "target_mbs": target_mbs}
        if arg_mbs is kwarg_mbs is target_mbs is None or TAKES_LISTS:
            given = {name: value for name, value in lists.items() if value is not None}
            return super().step(*args, **given, **options)  # type: ignore[safe-super]
        others = options.keys() - {"losses", "return_outputs", "loss_kwargs"}
        if args or any(options[name] is not None for name in others):
            raise ValueError("step takes a batch, or lists of its microbatches (arg_mbs, kwarg_mbs, target_mbs).")
        self._step_microbatches(**lists, **{name: options[name] for name in options.keys() - others})
        outputs = [stage.output_chunks for stage in self._own_stages if stage.is_last]
        return self._merge_outputs(outputs[0]) if outputs and options.get("return_outputs", True) else None

    def _step_microbatches(
        self,
        arg_mbs: list[Any] | None = None,
        kwarg_mbs: list[Any] | None = None,
        target_mbs: list[Any] | None = None,
        losses: list[Any] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
    ) -> None:
        schedule = self._prepare()
        outputs: dict[int, Any] = {}
        made: dict[int, Tensor] = {}

        @functools.cache
        def inputs() -> tuple[list[Any], list[Any]]:
            """Checked in the first forward: what is wrong on one rank is told to all."""
            self._check()
            if self._has_backward and not torch.is_grad_enabled():
                raise ValueError("a step that trains was called under torch.no_grad(): call eval(), or leave it out.")
            if self._has_backward and target_mbs is None and any(stage.is_last for stage in self._own_stages):
                raise ValueError("the rank of the last stage computes the loss: call step with target= there.")
            return self._check_inputs(arg_mbs, kwarg_mbs, target_mbs, losses)

        def forward_step(numbers: Iterator[int], chunk: Chunk) -> Any:
            (of_args, of_kwargs), number = inputs(), next(numbers)
            output = chunk(*(of_args[number] if chunk.info.is_first else ()), **of_kwargs[number])
            return output, functools.partial(loss_func, number)

        def loss_func(number: int, output: Any) -> Any:
            if return_outputs:
                outputs[number] = tree_map_only(Tensor, Tensor.detach, output)
            if self._loss_fn is None or target_mbs is None:
                return None, 1, None
            extra = {} if loss_kwargs is None else {"loss_kwargs": loss_kwargs}
            loss = self._compute_loss(  # type: ignore[no-untyped-call]
                output, target_mbs[number], **extra
            )
            made[number] = loss.detach()
            return loss, 1, None

        schedule(
            forward_step_func=forward_step,
            data_iterator=[iter(range(self._n_microbatches)) for _ in self._chunks],
            model=self._chunks,
            num_microbatches=self._n_microbatches,
            forward_only=not self._has_backward,
            pg_collection=SimpleNamespace(pp=self._own_stages[0].group or dist.group.WORLD),
        )
        for stage in self._own_stages:
            if self._has_backward and self.scale_grads:
                stage.scale_grads(self._n_microbatches)
            if stage.is_last:
                stage.output_chunks = [outputs[number] for number in sorted(outputs)]
        if made:
            self._internal_losses = [made[number] for number in sorted(made)]
            self._update_losses(self._own_stages, losses)  # type: ignore[no-untyped-call]

    @property
    def _own_stages(self) -> list[Any]:
        return _listed(self._stages if hasattr(self, "_stages") else self._stage)

    def _prepare(self) -> Any:
        """The schedule to call. Chunks are made anew, and shapes found anew with them, where a stage has another
        module, and where a trainer has told torch that its stages are not initialized."""
        stages = sorted(self._own_stages, key=operator.attrgetter("stage_index"))
        flags = {name: True for name in vars(self) if name.startswith("_stage") and name.endswith("_initialized")}
        modules = [stage.submod for stage in stages]
        if flags.items() <= vars(self).items() and [chunk.module for chunk in self._chunks] == modules:
            return self._schedule
        vars(self).update(flags)
        schedule = find_schedule(self._named or plan_of(order_of(self), type(self).__name__))
        with suppress(ValueError):  # of sizes that cannot be, which are refused on all ranks below
            plan = make_plan(schedule, stages[0].group_size, self._n_microbatches, len(stages))
            if self._convert and plan.splits_backward:
                for module in modules:
                    _let_defer(module)
        config = replace(self._config or PipelineConfig(), calculate_per_token_loss=True)
        self._chunks = [Chunk(stage, config) for stage in stages]
        self._schedule = get_forward_backward_func(schedule)
        return self._schedule

    def _check(self) -> None:
        """Raises NotImplementedError where functions would not be called."""
        if getattr(self, "_comp_type_to_function_map", None):
            raise NotImplementedError("megapipe does not call functions of register_custom_function: leave them out.")
        for stage in self._own_stages:
            if stage.dw_builder is not None:
                raise NotImplementedError(
                    f"stage {stage.stage_index} has a dw_builder, which megapipe does not call: leave it out, and give "
                    "modules that defer weight gradients by themselves a method backward_dw()."
                )
            for name in NOT_CALLED:
                if (where := getattr(stage, name).__module__) != theirs._PipelineStageBase.__module__:
                    raise NotImplementedError(
                        f"stage {stage.stage_index} has another {name} than torch's, from {where}, which megapipe does "
                        "not call: leave the stage as torch makes it."
                    )
            positions_of(stage)


def _let_defer(module: nn.Module) -> None:
    """Layers in `module` leave their weight gradients to W. Subclasses do that have torch's own forward."""
    for layer in module.modules():
        for kind, deferring in ((nn.Linear, weight_grad.Linear), (nn.Embedding, weight_grad.Embedding)):
            inherits = type(layer).forward is kind.forward and "weight" in layer._parameters
            if inherits and type(layer) is not kind:
                weight_grad.let_convert(type(layer), type(type(layer).__name__, (deferring, type(layer)), {}))
    weight_grad.convert(module)


def _listed(stages: Any) -> list[Any]:
    return stages if isinstance(stages, list) else [stages]

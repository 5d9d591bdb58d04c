"""The chunks of a rank seen as one model by optimizers and learning rate schedulers.

One torch optimizer holds the parameters of all chunks. The classes here add what a pipeline needs around it: each
tied tensor once, groups chosen by global names, a count of the steps that were made, and weights that are final when
they are read (see `PostValidatedOptimizer`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CyclicLR, LRScheduler, ReduceLROnPlateau

from .. import parallel_state
from ..chunks import as_list, as_sharded, each_parameter, gradient_like, local
from ..failures import check_failures, collective
from ..gradients import forget_tokens

Hyperparameters = dict[str, Any]


class PipelinedOptimizer(Optimizer):
    """Any torch optimizer over all chunks of this rank.

    It is a proxy of the torch optimizer within, with its state, param_groups and hooks, and a torch optimizer itself:
    so LR schedulers, `PipelinedGradScaler` and `torch.distributed.checkpoint.state_dict` work with it.

    Parameters that are frozen when it is made are in it too, and are trained once they are unfrozen. On a rank whose
    stages have no parameters, or only frozen ones, its steps do nothing.

    Args:
        model: this rank's chunks, or the only one.
        make: makes the optimizer of a list of param_groups: `lambda groups: torch.optim.AdamW(groups, lr=1e-3)`, or
            the class itself.
        group_of: the hyperparameters in which a parameter differs from the others, by its name and itself:
            `lambda name, p: {"weight_decay": 0.0 if p.dim() < 2 else 0.1}`. Parameters with the same ones make up a
            group. None: one group of all.

    Raises:
        ValueError: where there is nothing to train and no other rank in the pipeline.
    """

    _step_supports_amp_scaling = False  # fused optimizers unscale by themselves, but a scaler talks only to this one

    # Optimizer.__init__ is not called: it would make groups, state and hooks besides those of the optimizer within.
    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        make: Callable[[list[dict[str, Any]]], Optimizer],
        group_of: Callable[[str, nn.Parameter], Hyperparameters] | None = None,
    ) -> None:
        self.models = as_list(model)
        groups: list[tuple[Hyperparameters, list[nn.Parameter]]] = []
        for name, parameter in each_parameter(self.models):
            if not parameter.requires_grad and not parameter.is_floating_point():
                continue  # a quantized weight: integers, which may not have a gradient later either
            own = {} if group_of is None else group_of(name, parameter)
            parameters = next((parameters for others, parameters in groups if others == own), None)
            if parameters is None:
                groups.append((own, parameters := []))
            parameters.append(parameter)
        is_trained = any(parameter.requires_grad for _, parameters in groups for parameter in parameters)
        if not is_trained and ((pipeline := parallel_state.find_pipeline_group()) is None or pipeline.size() == 1):
            raise ValueError("no parameter of the model has requires_grad: there is nothing to optimize.")
        self.optimizer = make([{**own, "params": parameters} for own, parameters in groups] or [{"params": []}])
        """The torch optimizer within."""
        self.num_steps = 0
        """How many steps have changed the weights. Steps that were skipped or rolled back do not count."""
        self.on_rollback: list[Callable[[], None]] = []
        """Called when a step that was counted is rolled back and skipped."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optimizer!r})"

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":  # not there yet
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optimizer.state

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step of all chunks.

        Raises:
            TypeError: for a closure: to compute the loss again takes the whole pipeline.
            PipelineError: where another rank has failed.
        """
        if closure is not None:
            raise TypeError("a pipeline's optimizer takes no closure: run the schedule again instead.")
        check_failures()
        self._make_step()

    def _make_step(self) -> None:
        self.optimizer.step()
        self.num_steps += 1
        forget_tokens(self.models)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)
        forget_tokens(self.models)

    def finalize(self) -> None:
        """Wait until the weights are final. They always are, unless steps are validated afterwards."""

    def state_dict(self) -> dict[str, Any]:
        self.finalize()
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.finalize()
        self.optimizer.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.finalize()
        self.optimizer.add_param_group(param_group)


class PipelinedLRScheduler:
    """Any torch scheduler of a `PipelinedOptimizer`, that counts the steps that were made.

    Where a step was skipped (the caller found a NaN, a scaler an Inf), `step` leaves the learning rate as it is. Where
    the optimizer rolls a step back after the scheduler has gone on, the scheduler is rolled back too.

    Args:
        optimizer: its param_groups are scheduled.
        make: makes the scheduler of an optimizer: `lambda optimizer: LambdaLR(optimizer, factor)`.

    Raises:
        TypeError: for a ReduceLROnPlateau, whose step takes a metric.
    """

    def __init__(self, optimizer: PipelinedOptimizer, make: Callable[[Optimizer], LRScheduler]) -> None:
        self._optimizer = optimizer
        self._num_steps = optimizer.num_steps
        self._before: tuple[dict[str, Any], list[Hyperparameters]] | None = None
        self.scheduler = make(optimizer)
        """The torch scheduler within."""
        if isinstance(self.scheduler, ReduceLROnPlateau):
            raise TypeError(
                "a ReduceLROnPlateau steps by a metric, which a PipelinedLRScheduler has not: make it of the optimizer "
                "itself, and call its step(metric) with the same value on every rank."
            )
        optimizer.on_rollback.append(self._roll_back)

    def step(self) -> None:
        """Call it after each step of the optimizer."""
        if self._optimizer.num_steps == self._num_steps:
            return
        self._num_steps = self._optimizer.num_steps
        self._before = copy.deepcopy(self.scheduler.state_dict()), copy_hyperparameters(self._optimizer)
        self.scheduler.step()

    def get_last_lr(self) -> list[Any]:
        """The learning rate of each group."""
        return self.scheduler.get_last_lr()

    def state_dict(self) -> dict[str, Any]:
        self._optimizer.finalize()
        return self.scheduler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Call it after the optimizer's: that has the learning rates."""
        load_scheduler(self.scheduler, state_dict)
        self._num_steps = self._optimizer.num_steps
        self._before = None

    def _roll_back(self) -> None:
        if self._before is not None and self._num_steps == self._optimizer.num_steps:
            state, hyperparameters = self._before
            self.scheduler.load_state_dict(state)
            set_hyperparameters(self._optimizer, hyperparameters)
            self._num_steps -= 1
            self._before = None


class PipelinedGradScaler(torch.amp.GradScaler):
    """torch's scaler for a pipeline: all ranks skip a step where one finds an Inf, and agree on the scale.

    Every rank makes one, unscales and steps with it; `config.grad_scale_func = scaler.scale`. Torch's own skips on the
    ranks that found the Inf only, and knows no scale on ranks without the loss.

    Args:
        device: the type of the model's devices, "cuda" or "cpu".
        group: the ranks that skip together. None: all.
        options: of `torch.amp.GradScaler`.
    """

    def __init__(self, device: str = "cuda", group: dist.ProcessGroup | None = None, **options: Any) -> None:
        super().__init__(device, **options)
        self._group = group
        if self.is_enabled():
            self.scale(torch.zeros((), device=device))  # sets the scale up, where no loss will

    def _unscale_grads_(self, optimizer: Any, *args: Any, **keywords: Any) -> dict[torch.device, Tensor]:
        with collective("the search for Infs in the gradients"):
            parts = [_own_part(parameter) for group in optimizer.param_groups for parameter in group["params"]]
            of_parts = SimpleNamespace(param_groups=[{"params": parts}])
            found: dict[torch.device, Tensor] = super()._unscale_grads_(of_parts, *args, **keywords)  # type: ignore[arg-type]
            if not found:  # no parameter here has a gradient
                found = {torch.device(self._device): torch.zeros(1, device=self._device)}
            anywhere = torch.stack([one.to(self._device) for one in found.values()]).amax(0)
            dist.all_reduce(anywhere, dist.ReduceOp.MAX, group=self._group)
            for one in found.values():
                one.copy_(anywhere)
        return found


def _own_part(parameter: Tensor) -> Tensor:
    """The parameter, or this rank's part where it is sharded: torch's scaler takes no shards beside whole gradients."""
    grad = gradient_like(parameter)
    if grad is None or as_sharded(parameter) is None:
        return parameter
    part = local(parameter).detach()
    part.grad = local(grad)
    return part


def copy_hyperparameters(optimizer: Optimizer) -> list[Hyperparameters]:
    """The settings of each group."""
    return [
        {name: copy.deepcopy(value) for name, value in group.items() if name not in ("params", "param_names")}
        for group in optimizer.param_groups
    ]


def set_hyperparameters(optimizer: Optimizer, hyperparameters: list[Hyperparameters]) -> None:
    for group, own in zip(optimizer.param_groups, hyperparameters):
        for name in group.keys() - own.keys() - {"params", "param_names"}:
            del group[name]
        group.update(copy.deepcopy(own))


def load_scheduler(scheduler: LRScheduler, state_dict: dict[str, Any]) -> None:
    """Load a scheduler's state from a rank whose parameter groups may be others.

    Values of each group come from the optimizer, which must have been loaded before, and from the scheduler as it was
    made.
    """
    made = [
        (one, {name: getattr(one, name) for name in OF_EACH_GROUP if hasattr(one, name)}) for one in _all(scheduler)
    ]
    scheduler.load_state_dict(_fitted(scheduler, state_dict))
    for one, of_each_group in made:
        vars(one).update(of_each_group)
        groups: list[dict[str, Any]] = one.optimizer.param_groups
        if hasattr(one, "base_lrs") and not isinstance(one, CyclicLR):  # whose are its lower bounds
            one.base_lrs = [group["initial_lr"] for group in groups]
        one._last_lr = [group["lr"] for group in groups]


def _fitted(scheduler: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
    """The state, of a LambdaLR with as many functions as the scheduler here has, in nested ones too."""
    fitted = dict(state_dict)
    if (saved := fitted.get("lr_lambdas")) is not None:
        number = len(scheduler.lr_lambdas)
        fitted["lr_lambdas"] = [*saved, *[None] * number][:number]
    if (nested := fitted.get("_schedulers")) is not None:
        fitted["_schedulers"] = [_fitted(one, state) for one, state in zip(scheduler._schedulers, nested)]
    return fitted


OF_EACH_GROUP = ("base_lrs", "max_lrs", "base_momentums", "max_momentums", "min_lrs")
"""The attributes of torch's schedulers that are lists with a value for each parameter group."""


def _all(scheduler: Any) -> list[Any]:
    """A scheduler and those nested in it."""
    nested = getattr(scheduler, "_schedulers", ())
    return [scheduler, *(inner for one in nested for inner in _all(one))]

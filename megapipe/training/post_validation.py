"""An optimizer that steps at once, and validates the step when the norm of the gradients has arrived.

Clipping needs the norm of all stages' gradients, so every rank waits for the last one, in each step: a bubble of
(p - 1) forwards which no schedule can fill. Here each rank assumes that no clipping is needed, makes the optimizer's
step, and starts the warmup of the next step while the all-gather of the norms is in flight. Where the assumption was
wrong, the step is rolled back and repeated.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ..chunks import device_of, each_parameter, find_attribute, gradients, local
from ..failures import check_failures
from .clipping import check_norm, gather_power_sums, norm_of, power_sum, scale_gradients
from .optimizer import Hyperparameters, PipelinedOptimizer, copy_hyperparameters, set_hyperparameters

POLL = 2e-5  # seconds between two looks at a collective: a fraction of the time of a message, 1e-4 over gloo


class PostValidatedOptimizer(PipelinedOptimizer):
    """Clips by the norm of the whole pipeline, skips steps whose norm is NaN or Inf, and does not wait for the norm.

    It is given to the config, so that schedules validate its steps: `config.post_validated_optimizer = optimizer`.

    After the method of https://arxiv.org/abs/2401.10241, section 4, but exact: the weights are bitwise those of

        norm = clip_grad_norm_(model, max_norm)
        if norm.isfinite():
            optimizer.step()

    `step` starts an all-gather of what each rank has to add to the norm, and steps without clipping. In the next call
    of the schedule a rank runs forwards up to its first backward. By then, in a zero-bubble schedule, the last rank has
    long ended its step: a rank's first backward comes p - 1 forwards or more after its first forward, and the last rank
    ends p - 1 forwards or fewer after the first one. So the norms are there, and the wait is none.

    If the norm calls for clipping or skipping, every rank restores weights and optimizer state from copies, and steps
    again from the same gradients. The step that has begun goes on to its end without computing a gradient, and is then
    run once more, with the same data, random numbers and buffers. That costs the forwards of a step; so after such a
    step the next ones wait for the norm in `step`, until one needed neither.

    Between `step` and the schedule's next call the weights may change once more: call `finalize` before you read them,
    write to them or exchange them. `state_dict` and validation (`forward_only`) do so by themselves. The schedule must
    be called with a `data_iterator` that is an iterator or None, whose items are not changed in place. Gradients must
    be cleared by `zero_grad`, or set to None, since they may be needed again.

    Memory: a copy of the weights and of the optimizer's state, and the gradients, from `step` to the first backward of
    the next step. All of it is freed before that backward, when most activations are there.

    Args:
        model, make, group_of: see `PipelinedOptimizer`.
        max_norm, norm_type, group: see `clip_grad_norm_`.

    Raises:
        ValueError: for norms that are not positive, and for an optimizer whose `state_dict()` has more than state and
            param_groups.
        RuntimeError: by `step`, where the step before was not validated. By `finalize` and the schedule's next call,
            where a weight was written to or exchanged since `step`: what comes of it would be lost in a rollback.
            (What is written through `data` is not seen.)
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        make: Callable[[list[dict[str, Any]]], Optimizer],
        max_norm: float,
        group_of: Callable[[str, nn.Parameter], Hyperparameters] | None = None,
        norm_type: float = 2.0,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        check_norm(max_norm, norm_type)
        super().__init__(model, make, group_of)
        if extra := self.optimizer.state_dict().keys() - {"state", "param_groups"}:
            raise ValueError(
                f"{type(self.optimizer).__name__} adds {sorted(extra)} in its state_dict(), of which a step cannot be "
                "rolled back: use a PipelinedOptimizer and clip_grad_norm_ with it."
            )
        self.max_norm = max_norm
        self.norm_type = norm_type
        self.grad_norm: float | None = None
        """The norm of the last step that is final, before clipping."""
        self._group = group
        self._pending: _Pending | None = None
        self._was_rolled_back = False  # by a call of `finalize` on this rank, not yet on the others
        self._is_finite = True
        self._waits = False
        """Whether the last step was clipped or skipped: then the next one waits for its norm."""

    @property
    def has_pending_step(self) -> bool:
        """Whether the next step of the pipeline may turn out to be void."""
        return self._pending is not None or self._was_rolled_back

    def __deepcopy__(self, memo: dict[int, Any]) -> PostValidatedOptimizer:
        """Itself, for copies of a chunk that has it in its config: connections cannot be copied."""
        return self

    def _make_step(self) -> None:
        """Step at once, to be validated by the next call of the schedule."""
        if self._pending is not None:
            raise RuntimeError(
                "the last step of this PostValidatedOptimizer has not been validated: set "
                "config.post_validated_optimizer to it on every rank, or call finalize() before each further step."
            )
        self._was_rolled_back = False
        sums, work = gather_power_sums(power_sum(self.models, self.norm_type), self._group, async_op=True)
        if work is None or self._waits:
            self._conclude(sums, work, check_failures)
            if self._is_finite:
                self._step(gradients(self.models), sums)
            return
        self._pending = _Pending(self.optimizer, gradients(self.models), sums, work)
        super()._make_step()
        if self._pending.has_changed_gradients():
            raise RuntimeError(
                f"{type(self.optimizer).__name__} has changed gradients in its step, as SGD's nesterov does with "
                "foreach=True (torch's default on devices): pass foreach=False, or use a PipelinedOptimizer."
            )
        self._pending.end_step(self.optimizer, self.models)

    def zero_grad(self, set_to_none: bool = True) -> None:
        if not set_to_none:
            raise ValueError(
                "a PostValidatedOptimizer may need the gradients once more: call zero_grad(set_to_none=True)."
            )
        self.optimizer.zero_grad(set_to_none=True)

    def finalize(self) -> None:
        """Wait until the weights are final. A rank may call it alone.

        Raises:
            RuntimeError: where gradients that are needed again were changed in place, or weights written to.
        """
        self.check_weights()
        self._was_rolled_back |= self._finalize(lambda: None)

    def check_weights(self) -> None:
        """Raises RuntimeError where a weight was written to or exchanged since a step that may be rolled back. Called
        before forwards, which may write to weights themselves."""
        if self._pending is not None:
            self._pending.check_weights(self.models)

    def finalize_everywhere(self) -> None:
        """The same, where every rank calls it at this point: then the next step of no rank is void."""
        self.finalize()
        self._was_rolled_back = False

    def validate(self, check: Callable[[], None]) -> bool:
        """`finalize` for a schedule.

        Args:
            check: called while waiting; may raise.

        Returns:
            Whether the last step was rolled back, the same on all ranks.
        """
        was_rolled_back, self._was_rolled_back = self._was_rolled_back, False
        return self._finalize(check) or was_rolled_back

    def _finalize(self, check: Callable[[], None]) -> bool:
        pending = self._pending
        if pending is None:
            return False
        self._conclude(pending.sums, pending.work, check)
        self._pending = None
        if not self._waits:
            return False
        with pending.rolled_back(self.optimizer):
            if self._is_finite:
                self.num_steps -= 1
                self._step(pending.grads, pending.sums)
        if not self._is_finite:
            for roll_back in self.on_rollback:
                roll_back()
            self.num_steps -= 1
        return True

    def _conclude(self, sums: Tensor, work: Any, check: Callable[[], None]) -> None:
        """Read the norm: whether its step is to be skipped, and whether the next one waits.

        It is read in a stream of its own: the current one has the warmup of the next step by now, and to wait for its
        end would leave the device without work."""
        if work is None:
            self.grad_norm = norm_of(sums, self.norm_type).item()
        else:
            _await(work, check)
            module, stream = self._side_stream
            with module.stream(stream):
                work.wait()
                self.grad_norm = norm_of(sums, self.norm_type).item()
        self._is_finite = math.isfinite(self.grad_norm)
        self._waits = not self._is_finite or self.grad_norm > self.max_norm

    @cached_property
    def _side_stream(self) -> tuple[Any, Any]:
        """And torch's module for the device. The CPU has streams, too, which do nothing."""
        device = device_of(self.models)
        module: Any = torch.get_device_module(device)
        return module, module.Stream(device)

    def _step(self, grads: list[Tensor], sums: Tensor) -> None:
        """The ordinary step."""
        scale_gradients(grads, norm_of(sums, self.norm_type), self.max_norm)
        super()._make_step()


def finalize_weights(chunks: Sequence[nn.Module], optimizers: Sequence[Any] = ()) -> None:
    """Wait until the weights are final, whether or not the optimizer that validates them is among `optimizers`. Every
    rank calls it."""
    configs = (find_attribute(chunk, "config") for chunk in chunks)
    training = (getattr(config, "post_validated_optimizer", None) for config in configs)
    for optimizer in (*optimizers, *training):
        if isinstance(optimizer, PostValidatedOptimizer):
            optimizer.finalize_everywhere()


def _await(work: dist.Work, check: Callable[[], None]) -> None:
    while not work.is_completed():
        check()
        time.sleep(POLL)


class _Pending:
    """A step that was made before its norm was known, with copies to roll it back.

    Args:
        grads: those of which `sums` are, which may be fewer than the optimizer steps by: not those of frozen weights.
    """

    def __init__(self, optimizer: Optimizer, grads: list[Tensor], sums: Tensor, work: dist.Work) -> None:
        self.grads = grads
        self.sums = sums
        self.work = work
        self._hyperparameters = copy_hyperparameters(optimizer)
        self._stepped: list[Hyperparameters] = []  # after the step, which may change them
        self._held: dict[nn.Parameter, tuple[str, int, int]] = {}  # as the step leaves it
        self._weights = [_Weight(p) for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        self._state = _copied(dict(optimizer.state))

    def end_step(self, optimizer: Optimizer, models: Sequence[nn.Module]) -> None:
        """The optimizer has made its step."""
        self._stepped = copy_hyperparameters(optimizer)
        stepped = {weight.parameter for weight in self._weights}
        self._held = {parameter: held for parameter, held in _held_by(models).items() if parameter in stepped}

    def check_weights(self, models: Sequence[nn.Module]) -> None:
        now = _held_by(models)
        for parameter, held in self._held.items():
            if now.get(parameter) != held:
                raise RuntimeError(
                    f"{held[0]} was written to, or exchanged, between the step of a PostValidatedOptimizer and the "
                    "next call of the schedule, by which the step may be rolled back: call the optimizer's finalize() "
                    "before you write to weights."
                )

    def has_changed_gradients(self) -> bool:
        return any(local(weight.grad)._version != weight.grad_version for weight in self._weights)

    @contextmanager
    def rolled_back(self, optimizer: Optimizer) -> Iterator[None]:
        """Within, everything is as it was before the step, gradients and learning rates included. Afterwards gradients
        and learning rates are the present ones again."""
        if self.has_changed_gradients():
            raise RuntimeError(
                "gradients were changed in place while a PostValidatedOptimizer still needs them to make its step "
                "again: clear them with zero_grad(set_to_none=True), and add to them only in the next backward."
            )
        hyperparameters = [dict(group) for group in optimizer.param_groups]
        current_grads = [weight.parameter.grad for weight in self._weights]
        optimizer.state.clear()
        optimizer.state.update(self._state)
        set_hyperparameters(optimizer, self._hyperparameters)
        with torch.no_grad():
            for weight in self._weights:
                local(weight.parameter).copy_(weight.value)
                weight.parameter.grad = weight.grad
        yield
        for group, own, stepped in zip(optimizer.param_groups, hyperparameters, self._stepped):
            group.update({name: value for name, value in own.items() if name not in stepped or value != stepped[name]})
        for weight, grad in zip(self._weights, current_grads):
            weight.parameter.grad = grad


class _Weight:
    def __init__(self, parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        self.parameter = parameter
        self.value = local(parameter).detach().clone()
        self.grad = parameter.grad
        self.grad_version = local(parameter.grad)._version


def _held_by(models: Sequence[nn.Module]) -> dict[nn.Parameter, tuple[str, int, int]]:
    """The weights, each with its name, and with the version and the address of its memory: others mean another
    content."""
    found = ((name, parameter, local(parameter)) for name, parameter in each_parameter(models))
    return {parameter: (name, own._version, own.data_ptr()) for name, parameter, own in found}


def _copied(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: _copied(value) for key, value in state.items()}
    return state.detach().clone() if isinstance(state, Tensor) else copy.deepcopy(state)

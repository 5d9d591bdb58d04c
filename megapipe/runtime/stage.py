"""One stage of the model: its forward and its backward, as the caller's forward_step_func and loss function define it.

What has been run is kept as the edges of its graph, not as tensors: a `GradientEdge` is all that backward needs. So an
output is freed as soon as it has been sent, views included, and nothing is ever written into a tensor of the model.
"""

from __future__ import annotations

import functools
import re
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from ..chunks import find_attribute
from ..messages import (
    MessageSpec,
    TensorSpec,
    check_sendable,
    is_no_gradient,
    no_gradient,
    pack,
    unpack,
    zeros_if_none,
)
from ..overlap import Segments
from ..p2p_communication import Transfer
from ..plan import StageInfo
from ..weight_grad import DeferredGrads, deferring, unshared
from . import hooks
from .arguments import StepArguments
from .delayed import DelayedGrads, find_delayed
from .edges import edge_of, run_backward
from .loss import Loss, compute_loss, describe, scale_loss
from .notices import NoGradientWarning, warn

if TYPE_CHECKING:
    from ..slices import SequenceSlice
    from .sliced import Microbatch

__all__ = ["NOTHING", "SavedForward", "Stage"]

NOTHING = nullcontext()
"""Where there is nothing to be around: one for all, since making them shows beside small layers."""


class SavedForward(NamedTuple):
    """A microbatch whose forward is done, for its backward. The graph hangs on the edges."""

    received: Transfer | None
    """The input, for parts that are computed again in the backward."""
    inputs: list[Tensor]
    """The leaves whose gradients go to the previous stage."""
    outputs: list[GradientEdge | None]
    """One per output that a gradient comes back for; None where it does not depend on anything trained."""
    output_grads: list[Tensor] | None = None
    """On the last stage, whose output is the loss: its gradient."""
    has_windows: bool = False
    """Whether it was run in segments, so that its backward may have overlap windows."""
    part: tuple[Microbatch, SequenceSlice] | None = None
    """Where sequences are cut."""


Method = TypeVar("Method", bound=Callable[..., Any])


def _timed(name: str) -> Callable[[Method], Method]:
    """Around a method of a stage: it is timed under this name where the config has timers."""

    def decorate(method: Method) -> Method:
        @functools.wraps(method)
        def timed(self: Stage, *args: Any) -> Any:
            timers = self._step.config.timers
            if timers is None:
                return method(self, *args)
            timer = timers(name, log_level=2)
            timer.start()
            try:
                return method(self, *args)
            finally:
                timer.stop()

        return cast(Method, timed)

    return decorate


_all_given: WeakSet[nn.Module] = WeakSet()
"""Chunks on a device that have been given a gradient for each output, where looking for it makes the host wait."""
_looked_at: WeakSet[nn.Module] = WeakSet()
"""Chunks that had an output, a loss or an input without a gradient."""


class Stage:
    """Runs one chunk of the model.

    Args:
        output_specs: of the message that the next stage expects, or of that of each slice; None if its shapes are
            dynamic.
        is_found: the next stage expects what this one returned in its first step.
        has_headers: it expects the sizes only, and is told the rest with each message.
    """

    def __init__(
        self,
        info: StageInfo,
        chunk: int,
        step: StepArguments,
        output_specs: Sequence[MessageSpec] | None,
        is_found: bool = False,
        has_headers: bool = False,
    ) -> None:
        self.info = info
        self._is_last = info.is_last
        self.module = step.models[chunk]
        self._step = step
        self._data_iterator = step.data_iterators[chunk]
        self._forward_step_func = step.forward_step_func
        if step.config.enable_autocast:
            self._forward_step_func = _autocast(step)(step.forward_step_func)
        self._output_specs = output_specs
        self._output_spec = None if output_specs is None else output_specs[0]
        self._is_found, self._has_headers = is_found, has_headers
        self._set_input_tensor = find_attribute(self.module, "set_input_tensor")
        self._set_is_first_microbatch = find_attribute(self.module, "set_is_first_microbatch")
        self._received: Transfer | None = None
        self._is_on_cpu = step.device.type == "cpu"
        self.looks_for_none = self._is_on_cpu or self.module not in _all_given
        """Whether an output may have no gradient, which is no gradient of zeros."""
        self._around = [
            around
            for find in hooks.around_forwards
            if (around := find(self.module, step.num_units, step.device)) is not None
        ]
        has_delayed = step.config.delay_wgrad_compute and not step.forward_only
        self._delayed = find_delayed(self.module) if has_delayed else []
        self._delayed_in: dict[DeferredGrads, DelayedGrads] = {}  # by the backward that a W belongs to

    @_timed("forward-compute")
    def forward(
        self, received: Transfer | None, microbatch: int, *extra: bool
    ) -> tuple[Transfer | None, SavedForward | None]:
        """F. Returns what to send on (None on the last stage) and what to keep for backward (None if forward only).

        Args:
            received: the input, arrived; None on the first stage.
            extra: the third argument of forward_step_func, where the config asks for one.
        """
        inputs = self.take_input(received)
        output, loss_func = self.begin(microbatch, *extra)
        return self.end(inputs, output, loss_func, microbatch)

    def begin(self, microbatch: int, *extra: bool) -> tuple[Any, Any]:
        """Call the caller's forward_step_func, after `take_input`. Returns what it returns: the output, which may be
        `Segments` that have yet to be run, and the loss function."""
        is_validated = self._step.forward_only and self._step.first_val_step is False
        if self._set_is_first_microbatch is not None and microbatch == 0 and not is_validated:
            self._set_is_first_microbatch()
        for around in self._around:
            around.before(microbatch)
        try:
            returned = self._forward_step_func(self._data_iterator, self.module, *extra)
        except (RuntimeError, StopIteration, TypeError, AttributeError) as error:
            self._explain(error, microbatch)
            raise
        if not isinstance(returned, (tuple, list)) or len(returned) != 2:
            raise TypeError(
                f"forward_step_func must return (output, loss_func), but on stage {self.info.index} it returned "
                f"{describe(returned)}."
            )
        return returned[0], returned[1]

    def end(
        self, inputs: list[Tensor], output: Any, loss_func: Any, microbatch: int
    ) -> tuple[Transfer | None, SavedForward | None]:
        """Run the remaining segments, and on the last stage the loss function. Returns what `forward` returns.

        Args:
            inputs: returned by `take_input`.
            output, loss_func: returned by `begin`.
        """
        has_windows = False
        if isinstance(output, Segments):
            segments = output
            try:
                output = segments.finish()
            except RuntimeError as error:
                self._explain(error, microbatch)
                raise
            has_windows = segments.has_stopped
        return self.save(inputs, output, self.compute_loss(output, loss_func), microbatch, has_windows)

    def save(
        self, inputs: list[Tensor], output: Any, loss: Loss | None, microbatch: int, has_windows: bool = False
    ) -> tuple[Transfer | None, SavedForward | None]:
        """Returns what `forward` returns, once the model and the loss function have been run."""
        for around in self._around:
            around.after()
        if self._is_last:
            return None, self._save_loss(inputs, loss, has_windows)
        structure, tensors = self._pack_output(output, microbatch)
        spec = self._output_spec
        if spec is None or not _fits(structure, tensors, spec):
            spec = self._check_output(structure, tensors, microbatch)
        sent = Transfer(spec, [_without_graph(tensor) for tensor in tensors])
        if self._step.forward_only:
            return sent, None
        outputs = [edge_of(t) for t, s in zip(tensors, spec.tensors) if s.differentiable]
        if not any(outputs):
            self._warn_of_no_gradient("output", inputs)
        return sent, SavedForward(self._received, inputs, outputs, None, has_windows)

    def set_input(self, message: Any) -> None:
        """Hand the model its input: Megatron's models are given a list, also when it holds one tensor, or None."""
        if self._set_input_tensor is not None:
            self._set_input_tensor(message)

    def forget_input(self) -> None:
        """The model has kept its last input, and with it an activation. Where that was one tensor, as Megatron's models
        take it, None may be in its place, as on the first stage; a PipelineStage takes it anyway."""
        received, self._received = self._received, None
        if received is None or received.spec is None:
            return
        if received.spec.structure == "tensor" or find_attribute(self.module, "finds_shapes"):
            with suppress(Exception):  # a model that wants a tensor keeps its last one: no harm but the memory
                self.set_input([None])

    @_timed("backward-compute")
    def backward(
        self, in_flight: SavedForward, output_grads: list[Tensor] | None, deferred: DeferredGrads | None = None
    ) -> list[Tensor]:
        """B, and W unless that is left to `deferred`. Returns the gradients of the received tensors that want one.

        Args:
            output_grads: gradients of the outputs that want one; None on the last stage.
        """
        self.hand_over(in_flight.received)  # for parts that are computed again
        delayed = self.delayed_grads()
        if roots := self.roots(in_flight, output_grads):
            with deferring(deferred):
                run_backward(*zip(*roots))
        if delayed is not None:
            delayed.end_backward(bool(roots))
            if deferred is None:
                delayed.compute()
            else:
                self._delayed_in[deferred] = delayed
        return self.input_grads(in_flight, bool(roots))

    def roots(self, in_flight: SavedForward, output_grads: list[Tensor] | None) -> list[tuple[GradientEdge, Tensor]]:
        """Where backward begins, with which gradients. `output_grads` is None on the last stage."""
        grads = in_flight.output_grads if output_grads is None else output_grads
        assert grads is not None
        roots = [(edge, grad) for edge, grad in zip(in_flight.outputs, grads) if edge is not None]
        if output_grads is None:
            return roots
        if not self.looks_for_none:
            return [(edge, zeros_if_none(grad)) for edge, grad in roots]
        given = [(edge, grad) for edge, grad in roots if not is_no_gradient(grad)]
        if len(given) == len(roots) and not self._is_on_cpu:
            self.looks_for_none = False
            _all_given.add(self.module)
        return given

    def input_grads(self, in_flight: SavedForward, has_run: bool) -> list[Tensor]:
        """What goes to the previous stage after backward, if that has run."""
        grads, num_missing = [], 0
        for leaf in in_flight.inputs:
            if leaf.grad is None:
                num_missing += 1
                grads.append(no_gradient(leaf))
            else:
                # Off the leaf, so that whoever else still holds its memory may write to it.
                grad, leaf.grad = leaf.grad.detach(), None
                grads.append(unshared(grad))
        if has_run and grads and num_missing == len(grads):
            self._warn(
                f"stage {self.info.index} gives stage {self.info.index - 1} no gradient, since it does not use its "
                "input, or detaches it"
            )
        return grads

    @_timed("backward-compute")
    def backward_weights(self, deferred: DeferredGrads) -> None:
        """W of one B."""
        deferred.run()
        if self._delayed:
            self._delayed_in.pop(deferred).compute()

    def delayed_grads(self) -> DelayedGrads | None:
        """For one backward, of the modules that defer by themselves; None where there are none."""
        return DelayedGrads(self._delayed) if self._delayed else None

    # Input

    def take_input(self, received: Transfer | None) -> list[Tensor]:
        """Hand the input to the model. Returns the tensors of it that want a gradient."""
        wanted: list[Tensor] = []
        if received is not None and not self._step.forward_only:
            assert received.spec is not None
            tensors = received.tensors
            for index, spec in enumerate(received.spec.tensors):
                if spec.differentiable:
                    # As a view: of other leaves autocast would keep the cast, and add up gradients in its dtype.
                    tensors[index] = tensors[index].view_as(tensors[index]).requires_grad_()
                    wanted.append(tensors[index])
        self._received = received
        self._set_received()
        return wanted

    def hand_over(self, received: Transfer | None) -> Transfer | None:
        """Let the model have the input of another microbatch again. Returns the one that it had."""
        before, self._received = self._received, received
        if received is not before:
            self._set_received()
        return before

    def _set_received(self) -> None:
        if self._received is None:
            self.set_input([None])
            return
        assert self._received.spec is not None
        structure, tensors = self._received.spec.structure, list(self._received.tensors)
        self.set_input(tensors if structure == "tensor" else unpack(structure, tensors))

    # Output

    def _explain(self, error: Exception, microbatch: int) -> None:
        """Raises a better error, if there is one."""
        if isinstance(error, StopIteration):
            called = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
            if nn.Module._call_impl.__code__ in called:
                raise RuntimeError(
                    f"the model of stage {self.info.index} raised StopIteration for microbatch {microbatch}: {error!r}."
                ) from error
            raise ValueError(
                f"data_iterator ended at microbatch {microbatch} of {self._step.num_microbatches} (stage "
                f"{self.info.index}): it must yield one item per microbatch; give it more, or lower num_microbatches."
            ) from None
        failed = f"stage {self.info.index} failed for microbatch {microbatch}: {error}"
        if "leaf Variable that requires grad" in str(error) and self._received is not None:
            raise RuntimeError(
                f"{failed} That is what it received: compute its first result out of place (inplace=False, or a "
                "clone())."
            ) from error
        if "is not an iterator" in str(error) and not hasattr(self._data_iterator, "__next__"):
            raise TypeError(
                f"{failed}. data_iterator is {describe(self._data_iterator)}: pass an iterator over microbatches, such "
                "as iter(data_loader) or iter(batch.chunk(num_microbatches))."
            ) from error
        is_alone = self._received is None or self._received.spec is None or self._received.spec.structure == "tensor"
        if isinstance(error, (TypeError, AttributeError)) and re.search(r"\blist\b", str(error)) and is_alone:
            raise TypeError(
                f"{failed}. set_input_tensor is called with a list of one item, the tensor received, or None on the "
                "first stage: keep input[0], or wrap the layers in megapipe.PipelineStage."
            ) from error

    def _pack_output(self, output: Any, microbatch: int) -> tuple[Any, list[Tensor]]:
        try:
            structure, tensors = pack(output)
            for tensor in tensors:
                check_sendable(tensor, self._step.device)
            return structure, tensors
        except TypeError as error:
            raise TypeError(
                f"the output of stage {self.info.index} for microbatch {microbatch} cannot be sent on: {error}. Return "
                "a tensor, or tensors, numbers, texts and None in lists, tuples and dicts."
            ) from None

    def _check_output(self, structure: Any, tensors: list[Tensor], microbatch: int) -> MessageSpec:
        """Its spec, if the next stage is told."""
        spec = MessageSpec(structure, tuple(TensorSpec(tuple(t.shape), t.dtype, t.requires_grad) for t in tensors))
        expected = self._output_spec
        if expected is None or (self._has_headers and spec.sizes == expected.sizes):
            return spec
        remedy = "Return what the next stage expects, pass the right seq_length and micro_batch_size, or set "
        if self._is_found:
            remedy = (
                "It was so in the first step. Where it changes from step to step, pass another seq_length or "
                "micro_batch_size with it (shapes are then found anew), or set "
            )
        elif spec.matches(expected):
            remedy = "The model says that part of it has no gradient, but it requires one. Detach it, or set "
        raise ValueError(
            f"stage {self.info.index} returned {spec} for microbatch {microbatch}, but stage {self.info.index + 1} "
            f"expects {expected}. {remedy}variable_seq_lengths."
        )

    # Loss

    def compute_loss(self, output: Any, loss_func: Any) -> Loss | None:
        """None where there is none to differentiate, as on all stages but the last."""
        return compute_loss(self._step, output, loss_func) if self._is_last else None

    def _save_loss(self, inputs: list[Tensor], loss: Loss | None, has_windows: bool) -> SavedForward | None:
        if self._step.forward_only:
            return None
        if loss is None:
            return SavedForward(self._received, inputs, [], [])
        tensor = scale_loss(self._step, loss.tensor)
        if not tensor.requires_grad:
            self._warn_of_no_gradient("loss", inputs)
        grad = torch.full_like(tensor, loss.gradient)
        return SavedForward(self._received, inputs, [edge_of(tensor)], [grad], has_windows)

    # Warnings

    def _warn_of_no_gradient(self, what: str, inputs: list[Tensor]) -> None:
        if self.module not in _looked_at and (inputs or any(p.requires_grad for p in self.module.parameters())):
            number = self.info.index
            whom = f"stages 0 to {number} are" if number else "it is"
            self._warn(
                f"the {what} of stage {number} has no gradient (detached, or computed under no_grad?), so {whom} not "
                "trained by it"
            )
        _looked_at.add(self.module)

    def _warn(self, text: str) -> None:
        """Once for each chunk."""
        if self.module not in _looked_at:
            _looked_at.add(self.module)
            warn(text, NoGradientWarning)

    # Around both

    def autocast(self) -> AbstractContextManager[Any]:
        return _autocast(self._step) if self._step.config.enable_autocast else NOTHING


def _autocast(step: StepArguments) -> torch.autocast:
    return torch.autocast(step.device.type, dtype=step.config.autocast_dtype or step.config.pipeline_dtype)


def _fits(structure: Any, tensors: list[Tensor], spec: MessageSpec) -> bool:
    if structure != spec.structure or len(tensors) != len(spec.tensors):
        return False
    for tensor, (shape, dtype, differentiable) in zip(tensors, spec.tensors):
        if tensor.shape != shape or tensor.dtype != dtype or (tensor.requires_grad and not differentiable):
            return False
    return True


def _without_graph(tensor: Tensor) -> Tensor:
    """A copy if autograd has not made it: it may be a buffer, a parameter, the input, or memory that is not torch's."""
    return tensor.detach() if tensor.grad_fn is not None else tensor.detach().clone()

"""One stage of the model: its forward by the caller's forward_step_func and loss function, and its backward by
autograd.

`Stage` has a method for each kind of action (F, B, BW, W, R, O, L), which runs it for one unit. `Pipeline` calls it,
and extensions wrap it. A stage knows no other rank: it takes inputs and gradients from the unit, and puts its results
there. It changes no values of the model; what the model itself does in its forward is another thing.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from ..chunks import find_attribute
from ..frameworks import find_cut
from ..messages import MessageSpec, TensorSpec, check_sendable, pack, unpack, unshared
from ..overlap import Segments, find_forward_segments
from ..p2p_communication import Transfer
from ..plan import StageInfo
from ..weight_grad import AT_ONCE, DeferredGrads
from .call import Call
from .delayed import DelayedGrads, find_delayed
from .loss import Loss, call_loss_func, describe, divide_loss, scale_loss
from .notices import NoGradientWarning, warn
from .unit import UnitState, edge_of

EXPLAINED = (RuntimeError, StopIteration, TypeError, AttributeError)
"""Errors of the caller's functions for which `_explain` may have a clearer text."""


class Stage:
    """Runs the actions of one chunk of the model. Made anew in each step.

    Args:
        output_specs: the specs of the messages that the next stage expects, one for each slice; None if they are not
            known. Then each message has a header that describes all of it.
        shapes_are_found: output_specs are what this stage returned in its first step.
        has_headers: each message has a header although output_specs are known. output_specs fix its structure and
            sizes, the header tells which tensors require a gradient, and what is no tensor (numbers, texts).
        delays: the chunk has modules with `backward_dw` (transformer-engine), which defer weight gradients themselves.
    """

    unit: UnitState | None = None
    """The unit for which forward_step_func is running, for extensions that wrap that function. None once it has
    returned."""

    def __init__(
        self,
        info: StageInfo,
        chunk: int,
        call: Call,
        output_specs: Sequence[MessageSpec] | None,
        shapes_are_found: bool = False,
        has_headers: bool = False,
        delays: bool = False,
    ) -> None:
        self.info = info
        self._is_last = info.is_last
        self.module = call.models[chunk]
        self._kept = call.structures[chunk].kept
        self._call = call
        self._data_iterator = call.data_iterators[chunk]
        self.device = call.device
        self.forward_step_func = call.forward_step_func
        """The caller's function. `action_functions` (pipeline.py) wraps it by extensions."""
        if call.frameworks and not call.forward_only:
            cut = find_cut(self.module, call.frameworks)
            self.forward_step_func = cut(self.forward_step_func) if cut else self.forward_step_func
        self.output_specs = output_specs
        self._shapes_are_found, self._has_headers = shapes_are_found, has_headers
        self._set_input_tensor = find_attribute(self.module, "set_input_tensor")
        self._set_is_first_microbatch = find_attribute(self.module, "set_is_first_microbatch")
        self._has_input_of: tuple[int, int] | None = None
        """The unit whose input the model's set_input_tensor was last called with, as (microbatch, slice)."""
        self._input_structure: Any = None
        """The structure of that input, as in MessageSpec."""
        self._around = []
        for framework in call.frameworks:
            if (around := framework.around_forwards(self.module, call.num_units, call.device)) is not None:
                self._around.append(around)
        self._delayed = find_delayed(self.module) if delays and not call.forward_only else []

    @cached_property
    def can_overlap(self) -> bool:
        """Whether the model's forward may run in segments (`megapipe.overlap`), between which a backward runs."""
        return (
            find_forward_segments(self.module) is not None or find_cut(self.module, self._call.frameworks) is not None
        )

    def F(self, unit: UnitState, *extra: bool) -> None:
        """Forward. Takes `received`. Sets `output`, except on the last stage, and what the backward needs. Called
        several times for one unit if `run_overlapped` runs it in parts.

        Args:
            extra: the third argument of forward_step_func, if the config asks for one.
        """
        if unit.parts is not None:  # each up to the next window
            next(unit.parts, None)
            return
        self._take_input(unit)
        try:
            returned = self.forward_step_func(self._data_iterator, self.module, *extra)
        except EXPLAINED as error:
            self._explain(error, unit)
            raise
        self.finish_forward(unit, *self._checked(returned))

    def R(self, unit: UnitState) -> None:
        """Recompute activations. F keeps them all, so there is nothing to do; the Recompute extension replaces this."""

    def O(self, unit: UnitState) -> None:  # noqa: E743  # the kind's name
        """O copies saved activations to host memory, L copies them back. The Offloading extension replaces both."""
        raise ValueError(
            "the schedule runs O, but activations are not offloaded, and F has saved none that O could copy to host "
            "memory: set config.offload_activations, which places O and L by itself, or run a plan that has them."
        )

    L = O

    def B(self, unit: UnitState) -> None:
        """Input gradients. Takes `output_grads`. Sets `input_grads`, except on the first stage, and `deferred` for W.
        It is a BW whose weight gradients are deferred."""
        unit.deferred = DeferredGrads()
        self.BW(unit)

    def BW(self, unit: UnitState) -> None:
        """Whole backward: B and W in one. If the unit had overlap windows, weight gradients are left in `deferred`,
        with which windows are filled, and `Pipeline` runs W after it has sent the input gradients."""
        if unit.has_windows and unit.deferred is None:
            unit.deferred = DeferredGrads()
        if unit.received is not None:  # layers under activation checkpointing run again, and may read it
            self.give_input(unit)
        for wait in unit.before_backward:  # of activations that come back from host memory
            wait()
        delayed = DelayedGrads(self._delayed) if self._delayed else None
        roots = self.roots(unit)
        if roots:
            unit.has_run_backward = True
            with unit.deferred or AT_ONCE:
                # `torch.autograd.backward` without the checks of shapes that it makes in Python. The engine checks the
                # gradients against the graph, too.
                torch.autograd.Variable._execution_engine.run_backward(
                    *zip(*roots),
                    keep_graph=False,
                    create_graph=False,
                    inputs=(),
                    allow_unreachable=True,
                    accumulate_grad=True,
                )
        if delayed is not None:
            delayed.end_backward(bool(roots))
            if unit.deferred is None:
                delayed.compute()
            else:
                unit.delayed = delayed
        if not self.info.is_first:
            self._take_input_grads(unit)
        unit.received = unit.output_grads = None  # W needs only `deferred` and `delayed`
        unit.inputs, unit.edges, unit.kept_by, unit.before_backward = [], [], {}, []

    def W(self, unit: UnitState) -> None:
        """Weight gradients. Takes `deferred` and `delayed`, and adds the gradients to those of the parameters."""
        assert unit.deferred is not None
        unit.deferred.run()
        if unit.delayed is not None:
            unit.delayed.compute()
        unit.deferred = unit.delayed = None

    # Forward

    def start_forward(self, unit: UnitState, *extra: bool) -> tuple[Any, Any]:
        """The first part of F, for `run_overlapped`: give the model its input and call forward_step_func. A model
        that runs in segments stops at its first overlap window. Returns the output and the loss function, for
        `finish_forward`."""
        self._take_input(unit)
        try:
            returned = self.forward_step_func(self._data_iterator, self.module, *extra)
        except EXPLAINED as error:
            self._explain(error, unit)
            raise
        return self._checked(returned)

    def _checked(self, returned: Any) -> tuple[Any, Any]:
        """Returns the output and the loss function.

        Raises:
            TypeError: forward_step_func has not returned these two.
        """
        self.unit = None
        if not isinstance(returned, (tuple, list)) or len(returned) != 2:
            raise TypeError(
                f"forward_step_func must return (output, loss_func), but on stage {self.info.index} it returned "
                f"{describe(returned)}."
            )
        return returned[0], returned[1]

    def _take_input(self, unit: UnitState) -> None:
        """Give the model its input for a forward, and keep the tensors whose gradients are sent back."""
        self.unit = unit
        received = unit.received
        if received is not None and not self._call.forward_only:
            assert received.spec is not None
            tensors = received.tensors
            for index, spec in enumerate(received.spec.tensors):
                if spec.differentiable:
                    # A view, since autocast caches the cast of a leaf that is not a view: gradients of several uses
                    # would then be summed in autocast's dtype.
                    tensors[index] = tensors[index].view_as(tensors[index]).requires_grad_()
                    unit.inputs.append(tensors[index])
        self._has_input_of = None
        self.give_input(unit)
        is_later_validation = self._call.forward_only and self._call.first_val_step is False
        if self._set_is_first_microbatch is not None and unit.microbatch == unit.slice == 0 and not is_later_validation:
            self._set_is_first_microbatch()
        for around in self._around:
            around.before(unit.microbatch)

    def finish_forward(self, unit: UnitState, output: Any, loss_func: Any) -> None:
        """The second part of F: run the remaining segments and, on the last stage, the loss function. Sets `output` and
        what the backward needs.

        Args:
            output, loss_func: returned by `start_forward`.
        """
        if isinstance(output, Segments):
            segments = output
            try:
                output = segments.finish()
            except RuntimeError as error:
                self._explain(error, unit)
                raise
            unit.has_windows = segments.has_stopped
        try:
            loss = self.compute_loss(unit, output, loss_func) if self._is_last else None
        except StopIteration as error:  # the loss function takes labels from the iterator
            self._explain(error, unit)
            raise
        for around in self._around:
            around.after()
        if self._is_last:
            self._save_loss(unit, loss)
        else:
            self._save_output(unit, output)

    def compute_loss(self, unit: UnitState, output: Any, loss_func: Any) -> Loss | None:
        """Call the loss function. Returns None if there is no loss to differentiate (validation)."""
        called = call_loss_func(self._call, output, loss_func)
        return None if called is None else divide_loss(self._call, *called)

    def _save_output(self, unit: UnitState, output: Any) -> None:
        try:
            structure, tensors = pack(output)
            for tensor in tensors:
                check_sendable(tensor, self.device)
        except TypeError as error:
            raise TypeError(
                f"the output of stage {self.info.index} for microbatch {unit.microbatch} cannot be sent on: {error}. "
                "Return a tensor, or tensors, numbers, texts and None in lists, tuples and dicts."
            ) from None
        spec = None if self.output_specs is None else self.output_specs[unit.slice]
        if spec is None or not spec.fits(structure, tensors):
            spec = self._check_output(structure, tensors, unit)
        if not self._call.forward_only:
            for tensor, tensor_spec in zip(tensors, spec.tensors):
                if tensor_spec.differentiable:
                    unit.edges.append(edge_of(tensor))
            if not any(unit.edges):
                self._warn_of_no_gradient("output", unit.inputs)
        for index, tensor in enumerate(tensors):
            # Copied if autograd has not computed it: it may be a buffer, a parameter, the input, or shared memory.
            tensors[index] = tensor.detach() if tensor.grad_fn is not None else tensor.detach().clone()
        unit.output = Transfer(spec, tensors)

    def _save_loss(self, unit: UnitState, loss: Loss | None) -> None:
        if self._call.forward_only:
            return
        unit.output_grads = []
        if loss is not None:
            tensor = scale_loss(self._call, loss.tensor)
            if not tensor.requires_grad:
                self._warn_of_no_gradient("loss", unit.inputs)
            unit.edges, unit.output_grads = [edge_of(tensor)], [torch.full_like(tensor, loss.gradient)]

    # Backward

    def roots(self, unit: UnitState) -> list[tuple[GradientEdge, Tensor]]:
        """The edges at which the backward begins, each with its gradient."""
        assert unit.output_grads is not None
        roots = []
        for edge, grad in zip(unit.edges, unit.output_grads):
            if edge is not None:
                roots.append((edge, grad))
        return roots

    def _take_input_grads(self, unit: UnitState) -> None:
        """Set `input_grads` after a backward. A gradient that is None is sent as zeros, since the previous stage has
        posted a receive for it: whether it is None may depend on the data."""
        grads, num_missing = [], 0
        for leaf in unit.inputs:
            if leaf.grad is None:
                num_missing += 1
                grads.append(torch.zeros_like(leaf, memory_format=torch.contiguous_format))
            else:
                # Taken off the leaf, and copied if others still hold its memory, since they may write to it.
                grad, leaf.grad = leaf.grad.detach(), None
                grads.append(unshared(grad))
        if unit.has_run_backward and grads and num_missing == len(grads):
            self._warn(
                f"stage {self.info.index} gives stage {self.info.index - 1} no gradient but zeros, since it does not "
                "use its input, or detaches it. Earlier stages get gradients of zeros, so that weight decay still "
                "changes their parameters: set requires_grad=False for those that are not to be trained"
            )
        unit.input_grads = Transfer(None, grads)

    # Input

    def give_input(self, unit: UnitState) -> None:
        """Call the model's set_input_tensor with the input of a unit, unless it was the last one given. A single tensor
        is given in a list, as to Megatron's models; the first stage gets [None]."""
        this = unit.microbatch, unit.slice
        if self._has_input_of == this:
            return
        self._has_input_of = this
        message: Any = [None]
        if unit.received is not None:
            assert unit.received.spec is not None
            self._input_structure = structure = unit.received.spec.structure
            message = list(unit.received.tensors)
            if structure != "tensor":
                message = unpack(structure, message)
        if self._set_input_tensor is not None:
            self._set_input_tensor(message)

    def forget_input(self) -> None:
        """Called at the end of a step: give the model [None], so that it does not keep its last input in memory. This
        is left out for a user's model that received several tensors: it may unpack them, and fail. A PipelineStage does
        not."""
        structure = self._input_structure
        if structure == "tensor" or (structure is not None and find_attribute(self.module, "finds_shapes")):
            with suppress(Exception):  # a model that wants a tensor keeps its last one: no harm but the memory
                self._set_input_tensor([None])

    # Output

    def _explain(self, error: Exception, unit: UnitState) -> None:
        """Raises a clearer error if the cause of `error` is known; returns if not."""
        if isinstance(error, StopIteration):
            called = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
            if nn.Module._call_impl.__code__ in called:
                raise RuntimeError(
                    f"the model of stage {self.info.index} raised StopIteration for microbatch {unit.microbatch}: "
                    f"{error!r}."
                ) from error
            raise ValueError(
                f"data_iterator ended at microbatch {unit.microbatch} of {self._call.num_microbatches} (stage "
                f"{self.info.index}): it must yield one item per microbatch; give it more, or lower num_microbatches."
            ) from None
        failed = f"stage {self.info.index} failed for microbatch {unit.microbatch}: {error}"
        if "leaf Variable that requires grad" in str(error) and unit.received is not None:
            raise RuntimeError(
                f"{failed} That is what it received: compute its first result out of place (inplace=False, or a "
                "clone())."
            ) from error
        if "is not an iterator" in str(error) and not hasattr(self._data_iterator, "__next__"):
            raise TypeError(
                f"{failed}. data_iterator is {describe(self._data_iterator)}: pass an iterator over microbatches, such "
                "as iter(data_loader) or iter(batch.chunk(num_microbatches))."
            ) from error
        if isinstance(error, (TypeError, AttributeError)) and _took_list_for_tensor(error, unit):
            raise TypeError(
                f"{failed}. set_input_tensor is called with a list of one item, the tensor received, or None on the "
                "first stage: keep input[0], or wrap the layers in megapipe.PipelineStage."
            ) from error

    def _check_output(self, structure: Any, tensors: list[Tensor], unit: UnitState) -> MessageSpec:
        """Returns the spec of an output that differs from `output_specs`.

        Raises:
            ValueError: no header will tell the next stage of the difference, or its sizes are others.
        """
        spec = MessageSpec(structure, tuple(TensorSpec(tuple(t.shape), t.dtype, t.requires_grad) for t in tensors))
        expected = None if self.output_specs is None else self.output_specs[unit.slice]
        if expected is None or (self._has_headers and spec.sizes == expected.sizes):
            return spec
        remedy = "Return what the next stage expects, pass the right seq_length and micro_batch_size, or set "
        if self._shapes_are_found:
            remedy = (
                "That was its shape in the first step. Where it changes from step to step, pass another seq_length or "
                "micro_batch_size with it (shapes are then found anew), or set "
            )
        elif spec.matches(expected):
            remedy = "The model says that part of it has no gradient, but it requires one. Detach it, or set "
        raise ValueError(
            f"stage {self.info.index} returned {spec} for microbatch {unit.microbatch}, but stage "
            f"{self.info.index + 1} expects {expected}. {remedy}variable_seq_lengths."
        )

    # Warnings

    def _warn_of_no_gradient(self, what: str, inputs: list[Tensor]) -> None:
        if inputs or self._is_trained:
            index = self.info.index
            whom = f"stages 0 to {index} are" if index else "it is"
            self._warn(
                f"the {what} of stage {index} has no gradient (detached, or computed under no_grad?), so {whom} not "
                "trained by it"
            )

    @cached_property
    def _is_trained(self) -> bool:
        return any(parameter.requires_grad for parameter in self.module.parameters())

    def _warn(self, text: str) -> None:
        """Warn once for a chunk, and again after its structure has changed."""
        if NoGradientWarning not in self._kept:
            self._kept[NoGradientWarning] = True
            warn(text, NoGradientWarning)


def _took_list_for_tensor(error: Exception, unit: UnitState) -> bool:
    """Whether the function that failed has the list given to set_input_tensor among its variables, or those of its
    modules, where it should have the tensor in it."""
    item = None if unit.received is None else unit.received.tensors[0]
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    values = [*frame.f_locals.values()]
    values += [value for one in values if isinstance(one, nn.Module) for value in vars(one).values()]
    return any(isinstance(value, list) and len(value) == 1 and value[0] is item for value in values)

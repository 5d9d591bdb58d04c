"""One stage of the model: its forward and its backward, as the caller's forward_step_func and loss function define it.

A method for each kind of action, which runs it for one unit. Nothing is ever written into a tensor of the model.
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
"""Errors of the caller's functions for which there may be a better sentence."""


class Stage:
    """Runs one chunk of the model.

    Args:
        output_specs: of the message that the next stage expects, or of that of each slice; None if its shapes are
            dynamic.
        shapes_are_found: the next stage expects what this one returned in its first step.
        has_headers: it expects the sizes only, and is told the rest with each message.
        delays: some modules defer weight gradients by themselves.
    """

    unit: UnitState | None = None
    """That which forward_step_func is called for."""

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
        """The caller's, with what options put around it."""
        if call.frameworks and not call.forward_only:
            cut = find_cut(self.module, call.frameworks)
            self.forward_step_func = cut(self.forward_step_func) if cut else self.forward_step_func
        self.output_specs = output_specs
        self._shapes_are_found, self._has_headers = shapes_are_found, has_headers
        self._set_input_tensor = find_attribute(self.module, "set_input_tensor")
        self._set_is_first_microbatch = find_attribute(self.module, "set_is_first_microbatch")
        self._shown: tuple[int, int] | None = None
        """The unit whose input the model has."""
        self._shown_structure: Any = None
        """That of the input: as MessageSpec's."""
        self._around = []
        for framework in call.frameworks:
            if (around := framework.around_forwards(self.module, call.num_units, call.device)) is not None:
                self._around.append(around)
        self._delayed = find_delayed(self.module) if delays and not call.forward_only else []

    @cached_property
    def can_overlap(self) -> bool:
        """Whether forwards may run in segments."""
        return (
            find_forward_segments(self.module) is not None or find_cut(self.module, self._call.frameworks) is not None
        )

    def F(self, unit: UnitState, *extra: bool) -> None:
        """Needs `received`. Makes `output`, but on the last stage, and what backward needs.

        Args:
            extra: the third argument of forward_step_func, where the config asks for one.
        """
        self._take_input(unit)
        try:
            returned = self.forward_step_func(self._data_iterator, self.module, *extra)
        except EXPLAINED as error:
            self._explain(error, unit)
            raise
        self.finish_forward(unit, *self._checked(returned))

    def R(self, unit: UnitState) -> None:
        """Nothing, unless an option says otherwise: F has kept all."""

    def O(self, unit: UnitState) -> None:  # noqa: E743  # the kind's name
        """An option brings this, and L."""
        raise ValueError(
            "the schedule runs O, but no F knew that what it saves is to be moved: set config.offload_activations, "
            "which places O and L by itself, or run a plan that has them."
        )

    L = O

    def B(self, unit: UnitState) -> None:
        """Needs `output_grads`. Makes `input_grads` and `deferred`, the W that is left."""
        unit.deferred = DeferredGrads()
        self.BW(unit)

    def BW(self, unit: UnitState) -> None:
        """B and W in one. Where F ran in segments W is left as after B, to fill overlap windows."""
        if unit.has_windows and unit.deferred is None:
            unit.deferred = DeferredGrads()
        if unit.received is not None:  # for parts that are computed again
            self.show(unit)
        for wait in unit.before_backward:
            wait()
        delayed = DelayedGrads(self._delayed) if self._delayed else None
        roots = self.roots(unit)
        if roots:
            unit.has_run_backward = True
            with unit.deferred or AT_ONCE:
                # `torch.autograd.backward` without its checks of shapes: the engine's own are made against the graph,
                # which knows the shapes of the outputs.
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
        unit.received = unit.output_grads = None  # what is left is for W
        unit.inputs, unit.edges, unit.kept_by, unit.before_backward = [], [], {}, []

    def W(self, unit: UnitState) -> None:
        """Needs `deferred`."""
        assert unit.deferred is not None
        unit.deferred.run()
        if unit.delayed is not None:
            unit.delayed.compute()
        unit.deferred = unit.delayed = None

    # Forward

    def start_forward(self, unit: UnitState, *extra: bool) -> tuple[Any, Any]:
        """The first part of F, as far as `Segments` go by themselves. Returns what `finish_forward` takes."""
        self._take_input(unit)
        try:
            returned = self.forward_step_func(self._data_iterator, self.module, *extra)
        except EXPLAINED as error:
            self._explain(error, unit)
            raise
        return self._checked(returned)

    def _checked(self, returned: Any) -> tuple[Any, Any]:
        """The output, and the loss function."""
        self.unit = None
        if not isinstance(returned, (tuple, list)) or len(returned) != 2:
            raise TypeError(
                f"forward_step_func must return (output, loss_func), but on stage {self.info.index} it returned "
                f"{describe(returned)}."
            )
        return returned[0], returned[1]

    def _take_input(self, unit: UnitState) -> None:
        """Hand the input of a forward to the model, and keep the tensors of it that want a gradient."""
        self.unit = unit
        received = unit.received
        if received is not None and not self._call.forward_only:
            assert received.spec is not None
            tensors = received.tensors
            for index, spec in enumerate(received.spec.tensors):
                if spec.differentiable:
                    # As a view: of other leaves autocast would keep the cast, and add up gradients in its dtype.
                    tensors[index] = tensors[index].view_as(tensors[index]).requires_grad_()
                    unit.inputs.append(tensors[index])
        self._shown = None
        self.show(unit)
        is_validated = self._call.forward_only and self._call.first_val_step is False
        if self._set_is_first_microbatch is not None and unit.microbatch == unit.slice == 0 and not is_validated:
            self._set_is_first_microbatch()
        for around in self._around:
            around.before(unit.microbatch)

    def finish_forward(self, unit: UnitState, output: Any, loss_func: Any) -> None:
        """Run the remaining segments, and on the last stage the loss function. Keep what they make.

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
        except StopIteration as error:  # of labels that the loss function takes
            self._explain(error, unit)
            raise
        for around in self._around:
            around.after()
        if self._is_last:
            self._save_loss(unit, loss)
        else:
            self._save_output(unit, output)

    def compute_loss(self, unit: UnitState, output: Any, loss_func: Any) -> Loss | None:
        """None where there is none to differentiate."""
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
            for tensor, of in zip(tensors, spec.tensors):
                if of.differentiable:
                    unit.edges.append(edge_of(tensor))
            if not any(unit.edges):
                self._warn_of_no_gradient("output", unit.inputs)
        for index, tensor in enumerate(tensors):
            # A copy if autograd has not made it: it may be a buffer, a parameter, the input, or memory of others.
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
        """The edges at which backward begins, and their gradients."""
        assert unit.output_grads is not None
        roots = []
        for edge, grad in zip(unit.edges, unit.output_grads):
            if edge is not None:
                roots.append((edge, grad))
        return roots

    def _take_input_grads(self, unit: UnitState) -> None:
        """What goes to the previous stage after backward: zeros where there is no gradient. Whether there is one may
        depend on the data, and whoever receives it would have to wait for a device to be told."""
        grads, num_missing = [], 0
        for leaf in unit.inputs:
            if leaf.grad is None:
                num_missing += 1
                grads.append(torch.zeros_like(leaf, memory_format=torch.contiguous_format))
            else:
                # Off the leaf, so that others that still hold its memory may write to it.
                grad, leaf.grad = leaf.grad.detach(), None
                grads.append(unshared(grad))
        if unit.has_run_backward and grads and num_missing == len(grads):
            self._warn(
                f"stage {self.info.index} gives stage {self.info.index - 1} no gradient but zeros, since it does not "
                "use its input, or detaches it: freeze what is not to be trained before it, which weight decay changes"
            )
        unit.input_grads = Transfer(None, grads)

    # Input

    def show(self, unit: UnitState) -> None:
        """Let the model have the input of a unit, unless it has that already: as a list, also where that holds one
        tensor, or None, as Megatron's models take it."""
        this = unit.microbatch, unit.slice
        if self._shown == this:
            return
        self._shown = this
        message: Any = [None]
        if unit.received is not None:
            assert unit.received.spec is not None
            self._shown_structure = structure = unit.received.spec.structure
            message = list(unit.received.tensors)
            if structure != "tensor":
                message = unpack(structure, message)
        if self._set_input_tensor is not None:
            self._set_input_tensor(message)

    def forget_input(self) -> None:
        """The model has kept its last input, and with it an activation: it is given None, as on the first stage. A
        model that takes several tensors might not understand that, and keeps them; a PipelineStage does."""
        structure = self._shown_structure
        if structure == "tensor" or (structure is not None and find_attribute(self.module, "finds_shapes")):
            with suppress(Exception):  # a model that wants a tensor keeps its last one: no harm but the memory
                self._set_input_tensor([None])

    # Output

    def _explain(self, error: Exception, unit: UnitState) -> None:
        """Raises a better error, if there is one."""
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
        if isinstance(error, (TypeError, AttributeError)) and _has_list(error, unit):
            raise TypeError(
                f"{failed}. set_input_tensor is called with a list of one item, the tensor received, or None on the "
                "first stage: keep input[0], or wrap the layers in megapipe.PipelineStage."
            ) from error

    def _check_output(self, structure: Any, tensors: list[Tensor], unit: UnitState) -> MessageSpec:
        """Its spec, if the next stage is told."""
        spec = MessageSpec(structure, tuple(TensorSpec(tuple(t.shape), t.dtype, t.requires_grad) for t in tensors))
        expected = None if self.output_specs is None else self.output_specs[unit.slice]
        if expected is None or (self._has_headers and spec.sizes == expected.sizes):
            return spec
        remedy = "Return what the next stage expects, pass the right seq_length and micro_batch_size, or set "
        if self._shapes_are_found:
            remedy = (
                "It was so in the first step. Where it changes from step to step, pass another seq_length or "
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
            number = self.info.index
            whom = f"stages 0 to {number} are" if number else "it is"
            self._warn(
                f"the {what} of stage {number} has no gradient (detached, or computed under no_grad?), so {whom} not "
                "trained by it"
            )

    @cached_property
    def _is_trained(self) -> bool:
        return any(parameter.requires_grad for parameter in self.module.parameters())

    def _warn(self, text: str) -> None:
        """Once for a chunk, and again when its structure has changed."""
        if NoGradientWarning not in self._kept:
            self._kept[NoGradientWarning] = True
            warn(text, NoGradientWarning)


def _has_list(error: Exception, unit: UnitState) -> bool:
    """Whether the function that failed had the list that `set_input_tensor` was given, in place of its one item."""
    item = None if unit.received is None else unit.received.tensors[0]
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    values = [*frame.f_locals.values()]
    values += [value for one in values if isinstance(one, nn.Module) for value in vars(one).values()]
    return any(isinstance(value, list) and len(value) == 1 and value[0] is item for value in values)

"""One outermost module of torch's `fully_shard` (FSDP2) over one step, by the public functions of torch 2.15.

Torch has functions to set what becomes of parameters and gradients, but none to ask what the user has set. So these
settings are read, and put back, where FSDP2 keeps them; so is what belongs to its groups of parameters.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..chunks import gradient_like, zero_gradient


class Root:
    """An outermost module of FSDP2, and those in it, which share their communication.

    Raises AttributeError where this torch's FSDP2 is not as expected.
    """

    def __init__(self, module: Any, forward_only: bool) -> None:
        from torch.distributed.fsdp import FSDPModule

        self._module = module
        self._forward_only = forward_only
        self._state = module._get_fsdp_state()
        self._state._lazy_init()
        if not self._state._is_root:
            raise ValueError(
                f"{type(module).__name__} is part of another module of fully_shard: call fully_shard on each chunk."
            )
        self._modules = [inner for inner in module.modules() if isinstance(inner, FSDPModule)]
        self._states = list(dict.fromkeys(inner._get_fsdp_state() for inner in self._modules))
        self._groups = [group for state in self._states for group in _groups_of(state)]
        self._settings = [
            (group.reduce_grads, group.reshard_after_backward, group.post_forward_mesh_info) for group in self._groups
        ]
        self._device: torch.device = self._state._device
        self._communication: Any = self._state._comm_ctx
        self._gathers: list[Any] = []
        self._unused: list[_Unused] = []
        self._reduction: Any = None

    def parameters(self) -> Iterator[Tensor]:
        """Whether sharded at the moment or not."""
        for parameter in self._parameters():
            yield parameter.sharded_param
            if hasattr(parameter, "_unsharded_param"):
                yield parameter._unsharded_param

    def check(self, roots: Iterable[Root]) -> None:
        """Raises ValueError for what `finalize_backward` cannot do for one of `roots` while others are computing."""
        if any(group.reduce_grads and not group.all_reduce_grads for group in self._groups):
            raise ValueError(
                "set_requires_all_reduce(False) asks for gradients that are reduced in part, which fully_shard of "
                f"torch {torch.__version__} cannot do for a whole step: use set_requires_gradient_sync(False) instead."
            )
        if any(root is not self and root._communication is self._communication for root in roots):
            raise ValueError(
                "modules of fully_shard share their streams and buffers, so that none can reduce its gradients while "
                "others still compute: do not call share_comm_ctx for the chunks of a pipeline."
            )

    def begin(self) -> None:
        """Keep parameters and gradients whole until told otherwise."""
        self._module.set_manual_backward_finalization(True)
        self._keep_whole()

    def gather(self) -> None:
        """FSDP2's own hooks wait for it, each module ahead of its forward."""
        self._gathers = [module.unshard(async_op=True) for module in self._modules]

    def reshard(self) -> None:
        """Shard the parameters, to be gathered again in the same step."""
        self.wait_for_gathers()
        for module in self._modules:
            module.reshard()

    def add_up(self) -> None:
        """Add a W's gradients up in the dtype that they are reduced in: here it is the parameters' `grad_dtype`."""

    def reduce(self) -> None:
        """Reduce gradients, once they are complete, and shard parameters, as the user has set."""
        self.wait_for_gathers()  # also where a module was never run
        self.add_up()
        self._lay_out_gradients()
        self._restore()
        self._unused = self._fill_up()
        with self._beside_the_step(), torch.no_grad():
            for unused in self._unused:
                unused.exchange_flags()
            self._finish_backwards()

    def end(self) -> None:
        if self._forward_only:
            self._forget_forwards()
            self._restore()
            self.wait_for_gathers()
            for module in self._modules:
                module.reshard()
        else:
            self._wait_for_reduction()
            for unused in self._unused:
                unused.forget_zeros()

    def fail(self) -> None:
        """Forget the gradients of a step, and what was set for it."""
        self._restore()
        for parameter in self._parameters():
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None

    # What torch before 2.15 does otherwise

    def _finish_backwards(self) -> None:
        for group in self._groups:
            group._post_backward_pending = True  # also where no backward came by: it did on other replicas
        self._reduction = self._module.finalize_backward(async_op=True)

    def _wait_for_reduction(self) -> None:
        self._reduction.wait()
        if self._device.type != "cpu":
            torch.get_device_module(self._device).current_stream().wait_stream(self._stream())
        self._module.set_manual_backward_finalization(False)

    def _forget_forwards(self) -> None:
        """The order in which they ran, for FSDP2 to gather parameters in backward by it."""
        self._module.finalize_backward()
        self._module.set_manual_backward_finalization(False)

    def wait_for_gathers(self) -> None:
        for gather in self._gathers:
            gather.wait()

    def _gradient(self, parameter: Any) -> Tensor | None:
        grad: Tensor | None = parameter.unsharded_param.grad
        return grad

    def _lay_out_gradients(self) -> None:
        """Lay out the gradients of tensor-parallel parameters in the stream that made them: FSDP2 would do so in the
        reduction's."""
        for parameter in self._parameters():
            if hasattr(parameter, "_unsharded_param"):
                gradient_like(parameter.unsharded_param)

    def _give_zeros(self, parameter: Any) -> None:
        whole = parameter.unsharded_param
        whole.grad = zero_gradient(whole)

    def _stream(self) -> Any:
        return _stream_beside(self._device)

    # What all torch do alike

    def _parameters(self) -> Iterator[Any]:
        for group in self._groups:
            yield from group.fsdp_params

    def _keep_whole(self) -> None:
        for group in self._groups:
            group.post_forward_mesh_info = None  # what reshard_after_forward=False makes it
            group.reduce_grads = group.reshard_after_backward = False

    def _restore(self) -> None:
        for group, settings in zip(self._groups, self._settings):
            group.reduce_grads, group.reshard_after_backward, group.post_forward_mesh_info = settings

    def _beside_the_step(self) -> AbstractContextManager[Any]:
        """The reduction runs in a stream of its own, or else the stream that computes would wait for all but the last
        reduction."""
        if self._device.type == "cpu":
            return nullcontext()
        device, stream = torch.get_device_module(self._device), self._stream()
        stream.wait_stream(device.current_stream())
        for parameter in self._parameters():
            if (grad := self._gradient(parameter)) is not None:
                grad.record_stream(stream)
        context: AbstractContextManager[Any] = device.stream(stream)
        return context

    def _fill_up(self) -> list[_Unused]:
        """Give zeros to the parameters without gradients: others may have one, and the reduction takes them from all
        replicas or none."""
        alike: dict[tuple[dist.ProcessGroup, ...], list[tuple[Any, bool]]] = {}
        for group in self._groups:
            names = ("shard_process_group", "replicate_process_group")
            found = [getattr(group.mesh_info, name, None) for name in names]
            process_groups = tuple(one for one in found if one is not None and one.size() > 1)
            is_partial = getattr(group, "_partial_reduce_output", None) is not None  # what earlier steps have summed up
            for parameter in group.fsdp_params if group.reduce_grads else ():
                if parameter.sharded_param.requires_grad:
                    had_none = parameter.sharded_param.grad is None and not is_partial
                    alike.setdefault(process_groups, []).append((parameter, had_none))
        filled = []
        for process_groups, known in alike.items():
            parameters = [parameter for parameter, _ in known]
            is_used = [self._gradient(parameter) is not None for parameter in parameters]
            filled.append(_Unused(process_groups, known, is_used))
            for parameter, used in zip(parameters, is_used):
                if not used:
                    self._give_zeros(parameter)
        return filled


class _Unused:
    """Parameters that share process groups, each with whether it had no gradient before, and flags that tell a gradient
    of zeros from none at all."""

    def __init__(
        self, process_groups: tuple[dist.ProcessGroup, ...], parameters: list[tuple[Any, bool]], is_used: list[bool]
    ) -> None:
        self._process_groups = process_groups
        self._parameters = parameters
        self._missing = [index for index, used in enumerate(is_used) if not used]
        # Filled on the device: a copy from the host would wait for it.
        self._flags = torch.ones(len(is_used), dtype=torch.uint8, device=parameters[0][0].device)
        for index in self._missing:
            self._flags[index].zero_()

    def exchange_flags(self) -> None:
        for process_group in self._process_groups:
            dist.all_reduce(self._flags, dist.ReduceOp.MAX, group=process_group)

    def forget_zeros(self) -> None:
        had_none = [index for index in self._missing if self._parameters[index][1]]
        used = self._flags.tolist() if had_none else []  # which waits for the device
        for index in had_none:
            if not used[index]:
                self._parameters[index][0].sharded_param.grad = None


def _groups_of(state: Any) -> list[Any]:
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


@functools.cache
def _stream_beside(device: torch.device) -> Any:
    return torch.get_device_module(device).Stream(device)

"""Chunks with parameters sharded by torch's `fully_shard` (FSDP2), over the microbatches of one step.

By itself FSDP2 gathers parameters for each forward and reduces gradients in each backward, as soon as autograd has
passed by; in a pipeline that is once per microbatch, and too early where a W is still to come. Here a chunk's
parameters are gathered once per step, ahead of its first forward; gradients are kept whole; and once the chunk's last W
is done they are reduced and the parameters sharded again, beside what other chunks still compute.

All that FSDP2 does for it is private to torch, so nobody outside this file touches it. Of what is used, these differ
between torch 2.6 and 2.13: a module's state had one parameter group and has several; `comm_ctx` kept one reduce-scatter
and keeps several. On CPU it needs torch 2.9 or so, as FSDP2 itself.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

__all__ = ["ShardedChunks", "output_dtype"]

PATIENCE = 3.0  # seconds


class ShardedChunks(AbstractContextManager["ShardedChunks"]):
    """Around one step of chunks of which some hold modules of `fully_shard` (or of `replicate`, which is built on it).

    What the user has set on a module (`set_requires_gradient_sync` and its kin) says what becomes of the whole step's
    gradients, as it does for those of one backward elsewhere.
    """

    def __init__(self, models: Sequence[nn.Module], forward_only: bool) -> None:
        self._chunks = [[_Root(module, forward_only) for module in _roots(model)] for model in models]
        self._tasks = _Tasks()

    @classmethod
    def find(cls, models: Sequence[nn.Module], forward_only: bool, is_reduced_elsewhere: bool) -> ShardedChunks | None:
        """None where no chunk is sharded.

        Args:
            is_reduced_elsewhere: the caller has functions of their own for gradients.

        Raises ValueError for what cannot work, and RuntimeError where this torch's FSDP2 is not as expected.
        """
        if "torch.distributed.fsdp" not in sys.modules:  # then nobody has used it, and importing it takes time
            return None
        for number, model in enumerate(models):
            _refuse_fsdp1(number, model)
        if not any(_is_fsdp(module) for model in models for module in model.modules()):
            return None
        sharded = cls(models, forward_only)
        if not forward_only and not is_reduced_elsewhere:
            for number, model in enumerate(models):
                _check_all_reduced(number, model, sharded._chunks[number])
        return sharded

    def __enter__(self) -> ShardedChunks:
        for root in self._roots():
            root.begin()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is not None:
            self._tasks.abandon()
            for root in self._roots():
                root.abandon()
            return
        self._tasks.wait()
        for root in self._roots():
            root.end()

    def before_forward(self, chunk: int, microbatch: int) -> None:
        """Gather parameters one chunk ahead of their use."""
        if microbatch == 0:
            for ahead in (0, 1) if chunk == 0 else (chunk + 1,):
                for root in self._chunks[ahead] if ahead < len(self._chunks) else ():
                    root.gather()

    def after_weights(self, chunk: int) -> None:
        """Add a W's gradients up in the dtype that they are reduced in, as FSDP2 does after a backward."""
        for root in self._chunks[chunk]:
            root.add_up()

    def reduce(self, chunk: int) -> None:
        """Start to reduce the gradients of a chunk, which are complete."""
        for root in self._chunks[chunk]:
            root.reduce(self._tasks)

    def wait(self) -> None:
        """Until the process groups are free for others to use."""
        self._tasks.wait()

    def _roots(self) -> Iterator[_Root]:
        for roots in self._chunks:
            yield from roots


def output_dtype(model: nn.Module) -> torch.dtype | None:
    """The dtype in which a sharded chunk's mixed precision has it compute; None where it has none."""
    for module in _roots(model) if "torch.distributed.fsdp" in sys.modules else ():
        policy = module._get_fsdp_state()._mp_policy
        return policy.output_dtype or policy.param_dtype  # type: ignore[no-any-return]
    return None


class _Root:
    """An outermost module of FSDP2, and those in it, which share their communication."""

    def __init__(self, module: Any, forward_only: bool) -> None:
        self._forward_only = forward_only
        try:
            self._state = module._get_fsdp_state()
            self._state._lazy_init()
            if not self._state._is_root:
                raise ValueError(
                    f"{type(module).__name__} is part of another module of fully_shard: call fully_shard on each chunk."
                )
            self._context = self._state._state_ctx
            self._groups = [group for state in self._context.all_states for group in _groups_of(state)]
            self._settings = [
                (group.reduce_grads, group.reshard_after_backward, group.post_forward_mesh_info)
                for group in self._groups
            ]
            self._is_last_backward = self._context.is_last_backward
            self._finish_backward = self._state._root_post_backward_final_callback
        except AttributeError as error:
            raise RuntimeError(
                f"fully_shard of torch {torch.__version__} is not as megapipe knows it ({error}): use a torch from 2.6 "
                "to 2.13, or megapipe.data_parallel.GradientReducer."
            ) from error
        if self._state._device.type == "cpu" and not hasattr(torch.cpu.Stream, "record_event"):
            raise RuntimeError(
                f"fully_shard of torch {torch.__version__} does not run on CPU: use a newer torch, or "
                "megapipe.data_parallel.GradientReducer."
            )
        self._unused: list[_Unused] = []

    def parameters(self) -> Iterator[Tensor]:
        """Whether sharded at the moment or not."""
        for group in self._groups:
            for parameter in group.fsdp_params:
                yield parameter.sharded_param
                if hasattr(parameter, "_unsharded_param"):
                    yield parameter._unsharded_param

    def begin(self) -> None:
        """Keep parameters and gradients whole until told otherwise."""
        self._context.is_last_backward = False
        for group in self._groups:
            group.post_forward_mesh_info = None  # what reshard_after_forward=False makes it
            group.reduce_grads = group.reshard_after_backward = False

    def gather(self) -> None:
        """FSDP2's own hooks wait for it, each module ahead of its forward."""
        for group in self._groups:
            group.unshard(async_op=True)

    def add_up(self) -> None:
        for group in self._groups:
            if group.mp_policy.reduce_dtype is not None:
                for parameter in group.fsdp_params:
                    parameter.accumulate_unsharded_grad_if_needed()
                    parameter.to_accumulated_grad_if_needed()

    def reduce(self, tasks: _Tasks) -> None:
        for group in self._groups:
            group.wait_for_unshard()  # in vain, where a module was never run
        self.add_up()
        self._restore()
        reduced = [group for group in self._groups if group.reduce_grads]
        self._unused = _fill_up(reduced)

        def work() -> None:
            for unused in self._unused:
                unused.reduce()
            for group in reversed(self._groups):
                group.post_backward()

        if self._state._device.type == "cpu":  # where a collective holds the thread that calls it
            tasks.add(work)
            return
        # In the stream of the reductions, or else the stream that computes would wait for all but the last of them.
        handle, stream = self._state._device_handle, self._state._comm_ctx.reduce_scatter_stream
        stream.wait_stream(handle.current_stream())
        for grad in _gradients(self._groups):
            grad.record_stream(stream)
        with handle.stream(stream), torch.no_grad():
            work()

    def end(self) -> None:
        self._restore()
        if self._forward_only:
            for group in self._groups:
                group.wait_for_unshard()
                group.reshard()
        else:
            # Its end of a backward: waits for what was reduced.
            self._finish_backward()
            for unused in self._unused:
                unused.forget_zeros()
        self._forget_order()

    def abandon(self) -> None:
        """After a failure: sharded parameters, no gradients of the step, and FSDP2 as before a forward."""
        self._restore()
        for state in self._context.all_states:
            state._training_state = type(state._training_state).IDLE
            for group in _groups_of(state):
                group.wait_for_unshard()  # the replicas have begun the step too
                group._training_state = state._training_state
                for parameter in group.fsdp_params:
                    parameter.unsharded_accumulated_grad = None
                    if hasattr(parameter, "_unsharded_param"):
                        parameter._unsharded_param.grad = None
                group.reshard()
        self._context.iter_forward_root = None
        self._context.post_backward_final_callback_queued = False
        self._forget_order()

    def _restore(self) -> None:
        self._context.is_last_backward = self._is_last_backward
        for group, settings in zip(self._groups, self._settings):
            group.reduce_grads, group.reshard_after_backward, group.post_forward_mesh_info = settings

    def _forget_order(self) -> None:
        """In which forwards ran, for FSDP2 to gather parameters in backward by it."""
        self._state._comm_ctx.post_forward_order.clear()
        for group in self._groups:
            group._post_forward_indices.clear()


class _Unused:
    """Parameters that share process groups, and those of them that have no gradient on this rank.

    Others may have one, and the reduction takes gradients from all or none: so these are filled up with zeros, and
    flags are exchanged which tell a gradient of zeros from none at all.
    """

    def __init__(self, process_groups: tuple[dist.ProcessGroup, ...], parameters: list[Any]) -> None:
        self._process_groups = process_groups
        self._parameters = parameters
        used = [_unsharded_gradient(parameter) is not None for parameter in parameters]
        self._flags = torch.tensor(used, dtype=torch.uint8, device=parameters[0].device)
        self._missing = [index for index, is_used in enumerate(used) if not is_used]
        for index in self._missing:
            parameter = parameters[index]
            zeros = torch.zeros_like(parameter.unsharded_param)
            if parameter.reduce_dtype is None:
                parameter.unsharded_param.grad = zeros
            else:
                parameter.unsharded_accumulated_grad = zeros.to(parameter.reduce_dtype)
        self._had_none = [parameters[index].sharded_param.grad is None for index in self._missing]

    def reduce(self) -> None:
        for process_group in self._process_groups:
            dist.all_reduce(self._flags, dist.ReduceOp.MAX, group=process_group)

    def forget_zeros(self) -> None:
        if not any(self._had_none):
            return  # reading the flags waits for the device
        used = self._flags.tolist()
        for index, had_none in zip(self._missing, self._had_none):
            if had_none and not used[index]:
                self._parameters[index].sharded_param.grad = None


def _fill_up(groups: Sequence[Any]) -> list[_Unused]:
    alike: dict[tuple[dist.ProcessGroup, ...], list[Any]] = {}
    for group in groups:
        names = ("shard_process_group", "replicate_process_group")
        found = [getattr(group.mesh_info, name, None) for name in names]
        process_groups = tuple(one for one in found if one is not None and one.size() > 1)
        for parameter in group.fsdp_params:
            if parameter.sharded_param.requires_grad:
                alike.setdefault(process_groups, []).append(parameter)
    return [_Unused(process_groups, parameters) for process_groups, parameters in alike.items()]


def _unsharded_gradient(parameter: Any) -> Tensor | None:
    accumulated: Tensor | None = parameter.unsharded_accumulated_grad
    return parameter.unsharded_param.grad if accumulated is None else accumulated


def _gradients(groups: Sequence[Any]) -> Iterator[Tensor]:
    for group in groups:
        for parameter in group.fsdp_params:
            grad = _unsharded_gradient(parameter)
            if grad is not None:
                yield grad


class _Tasks:
    """What runs beside the main thread, one after the other, in the order in which it was added."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []
        self._error: BaseException | None = None

    def add(self, task: Callable[[], None]) -> None:
        before = self._threads[-1] if self._threads else None

        def run() -> None:
            if before is not None:
                before.join()
            if self._error is None:
                try:
                    with torch.no_grad():
                        task()
                except BaseException as error:
                    self._error = error

        self._threads.append(threading.Thread(target=run, name="megapipe-fsdp", daemon=True))
        self._threads[-1].start()

    def abandon(self) -> None:
        """After a failure. The replicas may not come to what is left, so give them a moment and no more."""
        for thread in self._threads:
            thread.join(PATIENCE)

    def wait(self) -> None:
        for thread in self._threads:
            thread.join()
        self._threads.clear()
        if self._error is not None:
            raise self._error


def _is_fsdp(module: nn.Module) -> bool:
    from torch.distributed.fsdp import FSDPModule

    return isinstance(module, FSDPModule)


def _roots(module: nn.Module) -> Iterator[Any]:
    if _is_fsdp(module):
        yield module
    else:
        for child in module.children():
            yield from _roots(child)


def _groups_of(state: Any) -> list[Any]:
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def _refuse_fsdp1(number: int, model: nn.Module) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise ValueError(
            f"chunk {number} holds a FullyShardedDataParallel, which shards and reduces in every backward and cannot "
            "wait for weight gradients that are put off: use torch.distributed.fsdp.fully_shard."
        )


def _check_all_reduced(number: int, model: nn.Module, roots: Sequence[_Root]) -> None:
    managed = {parameter for root in roots for parameter in root.parameters()}
    for name, parameter in model.named_parameters():
        if managed and parameter.requires_grad and parameter not in managed:
            raise ValueError(
                f"{name} of chunk {number} is in no module of fully_shard, though others are, so nobody averages its "
                "gradient over the replicas: call fully_shard on the chunk too, or set config.grad_sync_func or "
                "config.finalize_model_grads_func (see megapipe.data_parallel)."
            )

"""One weight with a copy on several stages, such as an embedding that is also the head.

The first stage and the last are on different ranks under loop placement and on one under V placement; either way each
has a parameter of its own. They begin equal, have the same gradient, the sum of all copies', and so stay equal.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .. import parallel_state
from ..chunks import Models, as_list, as_sharded, dense, gradient_of, local, named_parameters, zero_gradient
from ..failures import collective
from ..frameworks import AgreedStep, Framework, ties
from ..process_groups import all_gather_json


class TiedWeights:
    """Ties parameters of several stages. Every rank makes it, also those without a copy, after the parallel groups.

        tied = TiedWeights(chunks, ["embedding.tokens.weight", "head.output.weight"])
        config.finalize_model_grads_func = tied.sum_gradients

    Making it copies the first one's values to the others. It marks these with `shared = True`, as Megatron does, so
    that `clip_grad_norm_` counts the weight once. `fully_shard` may come before or after, with all copies sharded
    alike. Chunks of one rank may also have one and the same parameter under several names: that needs no summing.

    Give all copies the same hyperparameters. Over several calls of a schedule before an optimizer step sum once, in the
    last: what has been summed would be counted again (`finalize_model_grads_func` is read at every call).

    Gradients are summed when the step is complete, its last W included, and after they have been reduced over replicas:
    in that order the reduction of a chunk overlaps with the cooldown, and both sums come out the same.

    Args:
        model: this rank's chunks, or the only one.
        names: of the parameters, on whichever ranks they are.
        group: the pipeline's ranks. None: those of `parallel_state`.

    Raises:
        ValueError: on every rank, where a name is on no stage or on several, or where the parameters differ in shape,
            dtype, how they are sharded or whether they are trained.
    """

    def __init__(
        self, model: nn.Module | Sequence[nn.Module], names: Sequence[str], group: dist.ProcessGroup | None = None
    ) -> None:
        named = [item for chunk in as_list(model) for item in named_parameters(chunk, remove_duplicate=False)]
        found = [(name, parameter) for wanted in dict.fromkeys(names) for name, parameter in named if name == wanted]
        self.names = tuple(names)
        self.is_summed = False
        self._summed: list[Any] = []  # copies that hold the sum since the last training step
        owners = {
            id(parameter): (module, key)
            for chunk in as_list(model)
            for module in chunk.modules()
            for key, parameter in module._parameters.items()
        }
        self._names = [name for name, _ in found]
        self._owners = [owners[id(parameter)] for _, parameter in found]
        group = group or parallel_state.find_pipeline_group()
        rank = 0 if group is None else group.rank()
        own = [_Copy(name, rank, list(parameter.shape), _kind_of(parameter)) for name, parameter in found]
        everywhere = [own]
        if group is not None:
            everywhere = all_gather_json(own, group)
        copies = [_Copy(*copy) for one in everywhere for copy in one]
        _check(copies, names)
        self._num_copies = len(copies)
        self._like = [(parameter.requires_grad, parameter.dtype) for _, parameter in found]
        holders = sorted({copy.rank for copy in copies})
        self._group = None if group is None else _group_of(holders, group)
        first = next(copy.rank for copy in copies if copy.name == names[0])
        self._has_first = first == rank
        self._make_equal(holders.index(first))

    def __deepcopy__(self, memo: dict[int, Any]) -> TiedWeights:
        """Itself, for copies of a chunk that has it: connections cannot be copied. Copies that are to be trained need
        one made from them, as `sum_gradients` says."""
        return self

    def _copies(self) -> list[Any]:
        """Those of this rank now: `fully_shard` puts others in their place."""
        return [module._parameters[key] for module, key in self._owners]

    def _make_equal(self, first: int) -> None:
        copies = self._copies()
        if not copies:
            return
        with torch.no_grad():
            value = local(copies[0]).detach().contiguous()
            if self._group is not None:
                dist.broadcast(value, dist.get_global_rank(self._group, first), group=self._group)
            for parameter in copies:
                local(parameter).copy_(value)
        self._mark(copies)

    def _mark(self, copies: list[Any]) -> None:
        """All but the first of the pipeline."""
        for parameter in copies:
            if not self._has_first or parameter is not copies[0]:
                parameter.shared = True

    def sum_in_steps(self, chunks: Sequence[nn.Module]) -> None:
        """Let each training step sum the gradients by itself, behind `finalize_model_grads_func`, unless that has done
        it. `split` and `build_chunks` do so. Gradients may be added up over several calls.

        Args:
            chunks: this rank's.
        """
        for chunk in chunks:
            known: dict[Any, TiedWeights] = chunk.__dict__.setdefault("tied_weights", {})
            known[self.names] = self

    def sum_gradients(self, models: Models = (), *finalize_arguments: object) -> None:
        """Give all copies the sum of their gradients. Every rank calls it, once after each training step.

        It may be the `finalize_model_grads_func` itself, or be called by it.

        Args:
            models: the chunks of the step, to check that the copies are theirs.
            finalize_arguments: further ones, which it ignores.

        Raises:
            ValueError: for gradients kept as `main_grad`, and where the chunks are others.
            TypeError: for sparse gradients.
            PipelineError: where another rank has failed.
        """
        self.is_summed = True
        if models:
            self.check_owned(as_list(models))
        self._mark(copies := self._copies())
        with collective("the summing of tied weights' gradients"):
            trained = {parameter: name for parameter, name in zip(copies, self._names) if parameter.requires_grad}
            if self._have_gradients(copies, trained):
                self._sum(trained)
        self._summed = copies

    @contextmanager
    def around_loops(self) -> Iterator[None]:
        """Around the loops of a training step that sums by itself. What is in the gradients of all copies counts once:
        so all copies but the first begin without, and get theirs back where the loops fail."""
        summed, self._summed = self._summed, []
        aside = [(p, p.grad) for p in summed if p.grad is not None and getattr(p, "shared", False)]
        for parameter, _ in aside:
            parameter.grad = None
        try:
            yield
        except BaseException:
            self._summed = summed
            for parameter, grad in aside:
                parameter.grad = grad
            raise

    def check_owned(self, chunks: Sequence[nn.Module]) -> None:
        """Raises ValueError where the copies are not in these chunks."""
        modules = {module for chunk in chunks for module in chunk.modules()}
        if any(owner not in modules or key not in owner._parameters for owner, key in self._owners):
            raise ValueError(
                f"{', '.join(self._names)}, a tied weight, is not that of the chunks of this step, which are copies or "
                "have other modules now: make a TiedWeights of these, and call its sum_in_steps."
            )

    def _have_gradients(self, copies: list[Any], trained: dict[nn.Parameter, str]) -> bool:
        """Whether any copy, of all ranks, has a gradient to be summed. On a device only a rank that has none waits for
        the answer, or one where what is frozen, or a dtype, has changed.

        Raises:
            ValueError: only some of the copies are frozen, or their dtypes differ.
        """
        own = [(parameter.requires_grad, parameter.dtype) for parameter in copies]
        if not copies:
            return False
        num_own = sum(gradient_of(name, parameter) is not None for parameter, name in trained.items())
        device = local(copies[0]).device
        numbers = [DTYPES.index(parameter.dtype) for parameter in copies]
        sums = (
            sum(not is_trained for is_trained, _ in own),
            num_own,
            sum(numbers),
            sum(number * number for number in numbers),
        )
        counts = torch.cat([torch.full((1,), float(one), device=device) for one in sums])
        if self._group is not None:
            dist.all_reduce(counts, group=self._group)
        if own != self._like or (trained and not num_own) or device.type == "cpu":
            num_frozen, num_given, of_dtypes, of_squares = counts.tolist()
            what = f"the {self._num_copies} copies of {', '.join(sorted({*self.names}))}, one tied weight,"
            if num_frozen not in (0, self._num_copies):
                raise ValueError(f"{num_frozen:g} of {what} are frozen: freeze all of them, or none.")
            if self._num_copies * of_squares != of_dtypes**2:  # which are equal where all numbers are
                raise ValueError(f"{what} have different dtypes now: convert all of them alike.")
            self._like = own
            return bool(num_given)
        return bool(trained)

    def _sum(self, copies: dict[nn.Parameter, str]) -> None:
        if not copies:
            return
        grads = [_gradient(name, parameter) for parameter, name in copies.items()]
        total = grads[0].contiguous()  # copies may be laid out otherwise on other ranks
        for grad in grads[1:]:
            total += grad
        if self._group is not None:
            dist.all_reduce(total, group=self._group)
        for grad in grads:
            if grad is not total:
                grad.copy_(total)


class _InSteps(Framework):
    """Training steps of chunks that have weights which they sum."""

    def check_chunks(self, models: Sequence[nn.Module]) -> None:
        for one in self._of(models):
            one.check_owned(models)

    @contextmanager
    def around_loops(self, step: AgreedStep) -> Iterator[None]:
        with ExitStack() as stack:
            for one in [] if step.call.forward_only else self._of(step.call.models):
                stack.enter_context(one.around_loops())
            yield

    @contextmanager
    def around_finalizing(self, step: AgreedStep) -> Iterator[None]:
        tied = self._of(step.call.models)
        for one in tied:
            one.is_summed = False
        yield
        for one in tied:
            if not one.is_summed and not step.call.forward_only:
                one.sum_gradients(step.call.models)

    def _of(self, models: Sequence[nn.Module]) -> list[TiedWeights]:
        tied = {names: one for chunk in models for names, one in getattr(chunk, "tied_weights", {}).items()}
        return list(tied.values())


DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.complex128)

framework = _InSteps()
ties[__name__] = __name__


class _Copy(NamedTuple):
    name: str
    rank: int
    shape: list[int]
    kind: str

    def __str__(self) -> str:
        return f"{self.name} is {self.kind}{self.shape} on pipeline rank {self.rank}"


def _kind_of(parameter: nn.Parameter) -> str:
    kind = ("" if parameter.requires_grad else "frozen ") + str(parameter.dtype).removeprefix("torch.")
    sharded = as_sharded(parameter)
    return kind if sharded is None else f"{', '.join(map(str, sharded.placements))} of {kind}"


def _check(copies: list[_Copy], names: Sequence[str]) -> None:
    """Raises ValueError, on all ranks alike."""
    for name in names:
        ranks = [copy.rank for copy in copies if copy.name == name]
        if len(ranks) != names.count(name):
            where = f"on pipeline ranks {ranks}" if ranks else "on no stage"
            raise ValueError(
                f"the tied parameter {name!r} is {where}, but should be on {names.count(name)} of them: give the names "
                "that parameters have in the whole model, one that several stages have several times."
            )
    if any(copy[2:] != copies[0][2:] for copy in copies):
        raise ValueError(f"tied parameters must be alike, but {'; '.join(map(str, copies))}.")


def _group_of(holders: list[int], group: dist.ProcessGroup) -> dist.ProcessGroup | None:
    """The holders of this pipeline, on them. Torch wants every process to make every group, so replicas tell."""
    ranks = [dist.get_global_rank(group, holder) for holder in holders]
    everybody = all_gather_json(ranks)
    own = None
    for members in sorted({tuple(one) for one in everybody}):
        if len(members) > 1:
            made = dist.new_group(list(members))
            if list(members) == ranks and dist.get_rank() in members:
                own = made
    return own


def _gradient(name: str, parameter: nn.Parameter) -> Tensor:
    if gradient_of(name, parameter) is None:
        parameter.grad = zero_gradient(parameter)
    assert parameter.grad is not None
    return local(dense(f"{name}, a tied weight,", parameter.grad))

"""The ties of a step to Megatron, where that has been imported."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from ...frameworks import Framework, StepEnd
from . import segments, settings
from .settings import is_in_use, loaded
from .stages import copies_of_embedding, without_embedding, without_embedding_group


@contextmanager
def finish(end: StepEnd) -> Iterator[None]:
    """The end of a step in a V, for Megatron's trainers: they read losses and numbers of tokens on the last rank of the
    pipeline, and sum tied embeddings over a group of ranks, but the last stage is on the first rank beside the first.
    """
    is_last = end.pp_rank == end.pp_size - 1
    if end.last_stage == end.pp_size - 1 or not is_in_use(end.step.models):
        yield
        return
    reports, num_tokens = end.share((end.step.results, end.step.num_tokens))
    if is_last:
        end.step.results[:] = reports
    end.step.num_tokens = num_tokens  # Megatron takes it from the last rank, others from any
    copies = [] if end.step.forward_only else [copy for one in end.step.models for copy in copies_of_embedding(one)]
    _check_summed(copies, end)
    end.finalize_keywords["pg_collection"] = without_embedding(end.finalize_keywords["pg_collection"])
    with without_embedding_group():
        yield
    _sum_gradients(copies)


def _check_summed(copies: Sequence[nn.Parameter], end: StepEnd) -> None:
    if end.step.config.finalize_model_grads_func is None and any(hasattr(copy, "main_grad") for copy in copies):
        raise ValueError(
            "the gradients of tied embeddings are summed when those of all replicas are there: set "
            "config.finalize_model_grads_func to Megatron's finalize_model_grads, or untie them by "
            "share_embeddings_and_output_weights=False."
        )


def _sum_gradients(copies: Sequence[nn.Parameter]) -> None:
    """Add up as Megatron's all_reduce does between ranks. Buckets that hold the copies are alike, so that their shards
    are."""
    grads = [grad for copy in copies if (grad := _gradient(copy)) is not None]
    if len(grads) < 2:
        return
    total = sum(grads[1:], start=grads[0])
    for grad in grads:
        grad.copy_(total)


def _gradient(parameter: nn.Parameter) -> Tensor | None:
    main_grad: Tensor | None = getattr(parameter, "main_grad", None)
    return parameter.grad if main_grad is None else main_grad


class Megatron(Framework):
    """Megatron's groups, its settings, what its schedules do around forwards, and the end of a step."""

    groups = staticmethod(settings.groups)
    check_groups = staticmethod(settings.check_groups)
    read_config = staticmethod(settings.read_config)
    around_forwards = staticmethod(settings.around_forwards)
    find_cut = staticmethod(segments.find_cut)

    def random_streams(self) -> Iterator[tuple[Callable[[], Any], Callable[[Any], Any]]]:
        """Those of its tracker, which dropout in tensor-parallel regions and attention draws from."""
        random = loaded("tensor_parallel.random")
        if random is not None:
            tracker = random.get_cuda_rng_tracker()
            yield tracker.get_states, tracker.set_states

    @contextmanager
    def around_finalizing(self, end: StepEnd) -> Iterator[None]:
        with finish(end), settings.reset_offloading(end):
            yield


framework = Megatron()

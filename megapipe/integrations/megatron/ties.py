"""The ties of a step to Megatron, where that has been imported."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from ...frameworks import AgreedStep, Framework
from ...weight_grad import CHECKPOINTS
from . import segments, settings
from .settings import is_in_use, loaded
from .stages import copies_of_embedding, without_embedding, without_embedding_group


@contextmanager
def finish(step: AgreedStep) -> Iterator[None]:
    """The end of a step in a V, for Megatron's trainers: they read losses and numbers of tokens on the last rank of the
    pipeline, and sum tied embeddings over a group of ranks, but the last stage is on the first rank beside the first.
    """
    is_last = step.pp_rank == step.pp_size - 1
    if not _is_in_a_v(step):
        yield
        return
    reports, num_tokens = step.share((step.call.results, step.call.num_tokens))
    if is_last:
        step.call.results[:] = reports
    step.call.num_tokens = num_tokens  # Megatron takes it from the last rank, others from any
    copies = _copies(step)
    _check_summed(copies, step)
    step.finalize_keywords["pg_collection"] = without_embedding(step.finalize_keywords["pg_collection"])
    with without_embedding_group():
        yield
    _sum_gradients(copies)


@contextmanager
def adding_up(step: AgreedStep) -> Iterator[None]:
    """Around the loops of a step in a V. After an earlier call all copies of the embedding hold the sum of its
    gradients: it counts once, in the first of them."""
    if _is_in_a_v(step):
        for copy in _copies(step)[1:]:
            if (grad := _gradient(copy)) is not None:
                grad.zero_()
    yield


def _is_in_a_v(step: AgreedStep) -> bool:
    return step.last_stage != step.pp_size - 1 and is_in_use(step.call.models)


def _copies(step: AgreedStep) -> list[nn.Parameter]:
    """Those of the embedding on this rank, in a training step."""
    return [] if step.call.forward_only else [copy for one in step.call.models for copy in copies_of_embedding(one)]


def _check_summed(copies: Sequence[nn.Parameter], step: AgreedStep) -> None:
    if step.call.config.finalize_model_grads_func is None and any(hasattr(copy, "main_grad") for copy in copies):
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


CHECKPOINTS.update(
    f"megatron.core.tensor_parallel.random.{name}" for name in ("CheckpointFunction", "CheckpointWithoutOutputFunction")
)


class Megatron(Framework):
    """Megatron's groups, its settings, what its schedules do around forwards, and the end of a step."""

    groups = staticmethod(settings.groups)
    check_groups = staticmethod(settings.check_groups)
    read_config = staticmethod(settings.read_config)
    around_forwards = staticmethod(settings.around_forwards)
    find_cut = staticmethod(segments.find_cut)
    around_loops = staticmethod(adding_up)

    def random_streams(self) -> Iterator[tuple[Callable[[], Any], Callable[[Any], Any]]]:
        """Those of its tracker, which dropout in tensor-parallel regions and attention draws from."""
        random = loaded("tensor_parallel.random")
        if random is not None:
            tracker = random.get_cuda_rng_tracker()
            yield tracker.get_states, tracker.set_states

    @contextmanager
    def around_finalizing(self, step: AgreedStep) -> Iterator[None]:
        with finish(step), settings.reset_offloading(step):
            yield


framework = Megatron()

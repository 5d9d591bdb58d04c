"""`megapipe.prove`: a model and a trainer against the unpartitioned model."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .. import integrations
from ..config import PipelineConfig
from ..plan import StageInfo, find_schedule
from .answer import answer, subject_of
from .cutting import LossOf, is_of_transformers
from .local_ranks import RanksError, on_local_ranks
from .proof import Proof
from .question import Optimizer, PlainSGD, Question, TrainStep, check_question


def prove(
    make_stage: Callable[[StageInfo], nn.Module] | None = None,
    forward_step: Callable[..., Any] | None = None,
    *,
    data: Iterable[Any],
    schedule: Any = "1f1b",
    whole: Callable[[], nn.Module] | nn.Module | None = None,
    model: nn.Module | None = None,
    loss: Callable[[Any, Any], Tensor] | None = None,
    train_step: TrainStep | None = None,
    optimizer: Callable[[list[nn.Parameter]], Optimizer] = PlainSGD,
    num_chunks: int | None = None,
    pp_size: int | None = None,
    num_replicas: int = 1,
    num_steps: int = 2,
    tolerance: float = 0.0,
    name_of: Callable[[str, StageInfo], str] | None = None,
    config: PipelineConfig | None = None,
    options: dict[str, Any] | None = None,
    timeout: float = 60.0,
) -> Proof:
    """Train some steps on a pipeline, and the unpartitioned model in one process: losses, gradients, and weights and
    buffers after the optimizer's step are to be the same to the last bit.

    Where there are process groups already, or under torchrun, every rank calls it. Otherwise it runs on processes of
    this machine, which are forked from this one. Stages begin with the weights of the whole model, by their names.

    Args:
        make_stage: makes the module of a stage. One without `set_input_tensor` becomes a `PipelineStage`.
        forward_step: as the schedule is given it. The whole model is called by it too.
        data: the microbatches of one step, those of the first replica first. Each step is given the same.
        schedule: one of megapipe's, as `get_forward_backward_func` takes it; a function of Megatron's form; a schedule
            that a class of torch.distributed.pipelining has made, with its stages; or a function without arguments
            that makes one of these, once there are process groups.
        whole: the unpartitioned model, or a function that makes it. None takes the model that `make_stage` makes as the
            only stage of one, where its names are those of all stages; or else all stages, one after the other.
        model: in place of `make_stage` and `whole`: a model of transformers, whose microbatches are what it is called
            with, or any module, cut by `split`, whose microbatches are `(*inputs, target)`.
        loss: in place of `forward_step`: a microbatch is `(*inputs, target)`, and it is called with the output and the
            target.
        train_step: your trainer's step, `train_step(chunks, optimizer, microbatches)`: it clears gradients, runs the
            schedule, does what is to be done with gradients, and calls `optimizer.step()`. It returns the losses, in
            the order of microbatches, on a rank that has them. None runs the schedule alone.
        optimizer: makes one from parameters, for the pipeline and for the whole model. None of torch's is needed.
        num_chunks: per rank, where the schedule leaves that open.
        pp_size: ranks of the pipeline; None takes all, of which there are 2 on this machine, or those of a plan.
        num_replicas: of the pipeline. Without `train_step`, a `GradientReducer` averages their gradients.
        num_steps: a second step sees what the first has left behind.
        tolerance: by how much numbers may be off, over the largest of their tensor, where sums have another order.
        name_of: what the whole model calls a tensor, by its name in a stage and the stage.
        config: the settings of stages that are made here: of a PipelineStage, and of what is cut. Stages with a config
            of their own have that. Where it cuts sequences into slices, the whole model runs by slices, too, and its
            gradients are to be those of whole sequences but for rounding.
        options: more keywords of the schedule's call, such as seq_length and micro_batch_size, or forward_only.
        timeout: seconds until ranks on this machine count as hung.

    Returns:
        The proof, on every rank: true where all is right. `print` shows what differs first, and what it looks like.

    Raises:
        ValueError, TypeError: for arguments of which nothing can be proved.
    """
    if model is not None:
        if is_of_transformers(model):
            forward_step = forward_step or integrations.transformers.forward_step
            model = LossOf(model)
        whole = model
    if make_stage is None and model is None and isinstance(schedule, (str, os.PathLike)):
        raise ValueError("give make_stage, which makes the module of a stage, or model, a whole one to be cut.")
    question = Question(
        make_stage, forward_step, list(data), schedule, whole, loss, train_step, optimizer, num_chunks, pp_size,
        num_replicas, num_steps, tolerance, name_of, config, options or {}, timeout,
    )  # fmt: skip
    check_question(question)
    if not dist.is_initialized():
        if not {"RANK", "WORLD_SIZE"} <= os.environ.keys():
            return prove_on_local_ranks(question)
        dist.init_process_group()
    with torch.random.fork_rng(devices=[]):  # which only the first rank draws from for the whole model
        return answer(question)


def prove_on_local_ranks(question: Question, watches_memory: bool = False) -> Proof:
    """The proof, by processes of this machine."""
    if question.pp_size is None:
        sizes = find_schedule(question.schedule).sizes if question.is_of_megapipe else None
        question = replace(question, pp_size=2 if sizes is None else sizes.pp_size)
    question = replace(question, is_local=True)
    assert question.pp_size is not None
    try:
        found = on_local_ranks(
            question.pp_size * question.num_replicas, lambda: answer(question, watches_memory), question.timeout
        )
    except RanksError as error:
        return Proof(f"{subject_of(question)} on {question.pp_size} ranks", mistakes=[str(error)])
    proof: Proof = found[0]
    return proof

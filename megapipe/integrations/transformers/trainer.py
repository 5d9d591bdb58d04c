"""The Trainer of transformers, and trainers derived from it, in front of a pipeline.

    PipelineTrainer(model, args, train_dataset=..., pipeline_parallel_size=2, schedule="zbv").train()

The idea: the trainer's own `training_step` and `prediction_step` run on every stage, for each microbatch, with one
stage in the model's place. Where they call the model, a stage but the last computes what the next one is sent, and
leaves them by an exception. The last stage goes on with the model's output, up to `accelerator.backward`, which hands
the loss to the schedule. So losses, metrics and subclasses need not know of pipelines.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from ... import parallel_state, weight_grad
from ...checkpoint import load_optimizer, save_optimizer
from ...schedules import get_forward_backward_func
from ...training import GradientReducer, PipelinedGradScaler, clip_grad_norm_
from .as_model import PipelineModel, Sent, StageAsModel, gather
from .build import build_chunks
from .generation import generate
from .loading import load_weights
from .saving import save_pretrained
from .trainer_checks import check_batches, check_names, check_trainer, join_pipeline

Trainer: Any = importlib.import_module("transformers").Trainer
Step = Callable[[Any, Any], tuple[Tensor, Any]]
"""(a stage in the model's place, a batch) to the loss and what is reported of it."""

OPTIMIZER = "pipeline_optimizer"
"""The folder in a checkpoint that has the state of the optimizer and of the scheduler."""

FOR_ALL = tuple(f"{kind}_checkpointing_{do}" for kind in ("activation", "gradient") for do in ("enable", "disable"))
"""Methods of a model that trainers call, which are for all chunks."""


class PipelineMixin:
    """What stands in front of a trainer: `class Mine(PipelineMixin, MyTrainer)`. Every rank of torchrun makes one.

    Args:
        model: a folder of transformers, of which each rank reads its own layers, or a model in memory, with adapters of
            `peft` or without.
        args: of the trainer. `per_device_train_batch_size` is the size of a microbatch, and there are
            `gradient_accumulation_steps` of them in a step.
        pipeline_parallel_size: ranks of a pipeline. The others are replicas. None: all ranks.
        schedule: its name, or a plan.
        pipeline_options: further arguments of `build_chunks`: how layers are shared out, the dtype, settings of
            `PipelineConfig`.
        peft_config: an adapter to be added to the chunks.
        keywords: of the trainer.

    Raises:
        ValueError: on every rank, before anything runs, where an argument does not go with a pipeline.
    """

    args: Any
    accelerator: Any
    compute_loss: Any
    compute_loss_func: Any
    data_collator: Any
    lr_scheduler: Any
    model_accepts_loss_kwargs: bool
    optimizer: Any
    pipeline: PipelineModel
    preprocess_logits_for_metrics: Any
    processing_class: Any
    state: Any
    _prepare_inputs: Any

    def __init__(
        self,
        model: Any = None,
        args: Any = None,
        *,
        pipeline_parallel_size: int | None = None,
        schedule: Any = "1f1b",
        pipeline_options: Mapping[str, Any] | None = None,
        peft_config: Any = None,
        **keywords: Any,
    ) -> None:
        check_names()
        check_trainer(type(self), model, args, keywords)
        join_pipeline(args, pipeline_parallel_size)
        self.schedule = get_forward_backward_func(schedule)
        self.chunks = self._build(model, args, pipeline_options or {}, peft_config)
        own = next((chunk for chunk in self.chunks if chunk.stage.is_last), self.chunks[0])
        self._let_act_for_all(own)
        self._process_logits: Any = None
        self._whole_batch: Any = None
        self._loss: Tensor | None = None
        self._is_counting = False
        super().__init__(model=own, args=args, **keywords)  # type: ignore[call-arg]
        self.pipeline = PipelineModel(self.chunks)

    def _build(self, model: Any, args: Any, options: Mapping[str, Any], peft_config: Any) -> list[Any]:
        # Collators pad to the longest sequence of a batch. Every rank logs the loss.
        settings = {"device": args.device, "seed": None, "variable_seq_lengths": True, "broadcast_reports": True}
        chunks = build_chunks(model, self.schedule, **{**settings, **options})
        if not isinstance(model, nn.Module):
            load_weights(chunks, model)
        for chunk in chunks:
            if peft_config is not None:
                torch.manual_seed(args.seed + chunk.stage.index)
                chunk.add_adapter(peft_config)
            weight_grad.convert(chunk)
        config = chunks[0].config
        config.finalize_model_grads_func = lambda models, _: None  # the trainer has divided by the tokens
        if parallel_state.get_data_parallel_world_size() > 1:
            reducer = GradientReducer(chunks)
            config.grad_sync_func = reducer.start
            config.finalize_model_grads_func = lambda models, _: reducer.finish(models)
        return chunks

    def _let_act_for_all(self, own: Any) -> None:
        """What trainers and callbacks do with `self.model` is done with all chunks."""

        def for_all(name: str, *arguments: Any, **keywords: Any) -> None:
            for chunk in self.chunks:
                getattr(type(chunk), name)(chunk, *arguments, **keywords)

        def go_on(inputs: Any = None, *, input_ids: Any = None, **options: Any) -> Tensor:
            return generate(self.chunks, self.schedule, inputs if input_ids is None else input_ids, **options)

        for name in FOR_ALL:
            if hasattr(own, name):
                setattr(own, name, functools.partial(for_all, name))
        own.generate = go_on
        own.save_pretrained = lambda folder, **_: save_pretrained(self.chunks, folder)
        for chunk in self.chunks:
            if chunk.can_generate():
                chunk.generation_config = own.generation_config

    # What the trainer asks

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        accelerator = self.accelerator
        accelerator.backward = self._take_loss
        accelerator.clip_grad_norm_ = self._clip
        if accelerator.scaler is not None:
            accelerator.scaler = PipelinedGradScaler(self.args.device.type)
            self.chunks[0].config.grad_scale_func = accelerator.scaler.scale
        if dist.is_initialized():
            # accelerate knows no pipelines. To its data loaders these are ranks of a tensor parallel group: they read
            # the same batches. (Its ParallelismConfig would say so, but is refused on CPUs.)
            sizes = parallel_state.get_data_parallel_world_size(), self._num_alike
            accelerator.state.device_mesh = init_device_mesh(
                self.args.device.type, sizes, mesh_dim_names=("dp_shard", "tp")
            )
            accelerator.gather = functools.partial(gather, parallel_state.get_data_parallel_group())

    def _take_loss(self, loss: Tensor, **_: Any) -> None:
        self._loss = loss

    def _clip(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor:
        self.accelerator.unscale_gradients()
        return clip_grad_norm_(self.chunks, max_norm, norm_type)

    @property
    def _num_alike(self) -> int:
        """Ranks that read the same batches."""
        return parallel_state.get_pipeline_model_parallel_world_size()

    def get_tp_size(self) -> int:
        """What the trainer divides numbers of ranks by."""
        return 1 if self._is_counting else self._num_alike

    def _get_num_items_in_batch(self, batch_samples: Any, device: Any) -> Any:
        self._is_counting = True  # it divides what was gathered, here over replicas alone
        try:
            whole = batch_samples if self._whole_batch is None else [self._whole_batch]
            return super()._get_num_items_in_batch(whole, device)  # type: ignore[misc]
        finally:
            self._is_counting = False

    def get_batch_samples(self, *arguments: Any) -> Any:
        batches, num_items = super().get_batch_samples(*arguments)  # type: ignore[misc]
        check_batches(batches, self.args.device)
        return batches, num_items

    def _wrap_model(self, model: Any, training: bool = True, dataloader: Any = None) -> Any:
        return self.pipeline  # and not self.model, so that accelerate prepares the optimizer alone

    def create_optimizer(self, model: Any = None) -> Any:
        return super().create_optimizer(self.pipeline)  # type: ignore[misc]

    def floating_point_ops(self, inputs: Any) -> int:
        """Those of this rank's layers; the trainer adds up all ranks."""
        own = sum(chunk.num_parameters(exclude_embeddings=True) for chunk in self.chunks)
        return int(6 * inputs["input_ids"].numel() * own) if "input_ids" in inputs else 0

    # Steps

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Keep a microbatch, or run the schedule on all that were kept where gradients are to be complete.

        Returns:
            The loss of the whole step then, on every rank; before that zero.
        """
        whole_step = super().training_step  # type: ignore[misc]

        def step(stage: Any, batch: Any) -> tuple[Tensor, Any]:
            reported = whole_step(stage, batch, num_items_in_batch)
            loss, self._loss = self._loss, None
            if loss is None:
                raise ValueError("training_step has not called accelerator.backward, which takes the loss.")
            return loss, reported

        held = self.pipeline.held
        held.append(self._prepare_inputs(inputs))
        total = torch.zeros((), device=self.args.device)
        if self.accelerator.sync_gradients:
            batches, held[:] = list(held), []
            with self._drawing():
                for reported in self._run(step, batches, forward_only=False):
                    total += reported
        return total

    @contextmanager
    def _drawing(self) -> Iterator[None]:
        """Stages draw from states of their own, which follow from the step: so a run that is resumed draws what it
        would have drawn, and ranks that read the same data go on to draw the same for it."""
        device = self.args.device
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(self.args.seed + 1_000_003 * (1 + self.state.global_step) + self.args.process_index)
            yield

    def _run(self, step: Step, batches: Sequence[Any], forward_only: bool) -> list[Any]:
        """The schedule, with a trainer's step on every stage. Returns what is reported of each batch."""

        def forward_step(iterator: Any, chunk: Any) -> tuple[Any, Any]:
            try:
                loss, report = step(StageAsModel(chunk, self.accelerator), dict(next(iterator)))
            except Sent as sent:
                return sent.message, None
            if not chunk.stage.is_last:
                raise ValueError("compute_loss has not called the model that it was given.")
            return loss, lambda loss: (loss, 1, report)

        iterators = [iter(batches) for _ in self.chunks]
        reports: list[Any] = self.schedule(
            forward_step_func=forward_step,
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=self.chunks,
            num_microbatches=len(batches),
            forward_only=forward_only,
        )
        return reports

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[Any, Any, Any]:
        whole_step = super().prediction_step  # type: ignore[misc]

        def step(stage: Any, batch: Any) -> tuple[Tensor, Any]:
            loss, logits, labels = whole_step(stage, batch, prediction_loss_only, ignore_keys)
            if logits is not None and self._process_logits is not None:  # before they travel to all ranks
                logits = self._process_logits(logits, labels)
            return torch.zeros((), device=self.args.device), [loss, logits, labels]

        inputs = self._prepare_inputs(inputs)
        self._whole_batch = inputs
        try:
            reports = self._run(step, self._parts(inputs), forward_only=True)
        finally:
            self._whole_batch = None
        join: Any = importlib.import_module("transformers.trainer_pt_utils").nested_concat
        losses, *others = zip(*reports)
        loss = None if losses[0] is None else torch.stack(losses).sum()
        logits, labels = (None if ones[0] is None else functools.reduce(join, ones) for ones in others)
        return loss, logits, labels

    def _parts(self, inputs: dict[str, Any]) -> list[dict[str, Any]]:
        """Microbatches of an evaluation's batch, so that all stages are busy: where its loss is a sum over sequences,
        as the model's own is, and not one of the caller's, nor one that balances experts."""
        chunk, values = self.chunks[0], list(inputs.values())
        is_models = type(self).compute_loss is Trainer.compute_loss and self.compute_loss_func is None
        is_sum = self.model_accepts_loss_kwargs and not chunk.takes_mean and not chunk.balances_load
        if not is_models or not is_sum or not all(isinstance(value, Tensor) and value.ndim for value in values):
            return [inputs]
        number = min(self._num_alike, *map(len, values))
        if len({len(value) for value in values}) > 1 or number < 2:
            return [inputs]
        return [dict(zip(inputs, part)) for part in zip(*(value.tensor_split(number) for value in values))]

    def evaluation_loop(self, *arguments: Any, **keywords: Any) -> Any:
        self._process_logits, self.preprocess_logits_for_metrics = self.preprocess_logits_for_metrics, None
        try:
            return super().evaluation_loop(*arguments, **keywords)  # type: ignore[misc]
        finally:
            self._process_logits, self.preprocess_logits_for_metrics = None, self._process_logits

    # Files

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model as transformers does. Every rank calls it."""
        output_dir = output_dir or self.args.output_dir
        save_pretrained(self.chunks, output_dir)
        if self.args.should_save:
            tokenizer = self.processing_class or getattr(self.data_collator, "tokenizer", None)
            if tokenizer is not None:
                tokenizer.save_pretrained(output_dir)
            torch.save(self.args, os.path.join(output_dir, "training_args.bin"))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        save_optimizer(os.path.join(output_dir, OPTIMIZER), self.chunks, *self._optimizer_and_scheduler())
        if self.args.should_save:  # where it is, a trainer without a pipeline misses its optimizer.pt, and says so
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, "scheduler.pt"))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        folder = os.path.join(checkpoint or "", OPTIMIZER)
        if checkpoint is not None and os.path.isdir(folder):
            load_optimizer(folder, self.chunks, *self._optimizer_and_scheduler())
        elif checkpoint is not None and os.path.exists(os.path.join(checkpoint, "optimizer.pt")):
            raise ValueError(
                f"{checkpoint} is of a trainer without a pipeline, whose optimizer.pt says of no state whose it is: go "
                "on from its weights alone, as model=, or remove optimizer.pt."
            )

    def _optimizer_and_scheduler(self) -> tuple[Any, dict[str, Any]]:
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)  # accelerate wraps it
        return optimizer, {"lr_scheduler": self.lr_scheduler}

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        load_weights(self.chunks, resume_from_checkpoint)

    def _load_best_model(self) -> None:
        load_weights(self.chunks, self.state.best_model_checkpoint)


class PipelineTrainer(PipelineMixin, Trainer):  # type: ignore[misc]
    """transformers' Trainer in front of a pipeline: its arguments, and those of `PipelineMixin`."""

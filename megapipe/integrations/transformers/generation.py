"""Let a model write through a pipeline.

The rank of the last stage runs transformers' own `generate` on a model that only looks whole. Its forward tells all
ranks the new tokens, runs the pipeline, and returns the logits. The other ranks run what they are told. So tokens are
chosen on one rank, by transformers' own code, and only tokens go back to the first stage.
"""

from __future__ import annotations

import copy
import importlib
import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ... import parallel_state
from ...all_ranks import AllRanks
from ...failures import collective
from ...runtime import stages_for_rank
from ...schedules import get_forward_backward_func
from .decoding import cache_argument, make_cache, whole_forward, without_balance

__all__ = ["generate"]

NAMES = ("input_ids", "attention_mask", "position_ids", "token_type_ids")
"""What is told: tensors of [sequences, new tokens]."""

REFUSED = {
    "return_dict_in_generate": (False, "tokens are all that travels back to the ranks"),
    "guidance_scale": (1.0, "guidance runs the model a second time, with other keys and values than stages keep"),
    "cache_implementation": (None, "each stage keeps keys and values in caches of its own"),
}
"""Options that cannot be had, the value that does without, and why."""


def generate(
    chunks: Sequence[Any],
    schedule: Any,
    input_ids: Tensor | None,
    *,
    attention_mask: Tensor | None = None,
    num_microbatches: int | None = None,
    seed: int | None = None,
    **options: Any,
) -> Tensor:
    """Let the model go on with prompts. Every rank of a pipeline calls it; its replicas may have other prompts.

    Each stage keeps the keys and values of its own layers. In each step the sequences go through the pipeline as
    microbatches. Tokens are chosen by transformers' own code, and are those that the whole model's `generate` returns.

    Args:
        chunks: this rank's, from `build_chunks`. They are in evaluation mode meanwhile.
        schedule: the one that they were built for: its name, or what `get_forward_backward_func` returned.
        input_ids: [sequences, tokens], padded on the left. Read, as all that follows it, on the rank of the last stage.
        attention_mask: [sequences, tokens], with zeros where there is padding.
        num_microbatches: into which the sequences are split evenly. None takes as many as there are stages, or the next
            number that can be.
        seed: samples are those of `torch.manual_seed(seed)` before transformers' `generate`, and the state of the
            generators is kept. None draws from them as they are.
        options: what transformers' `generate` takes: `max_new_tokens`, `do_sample`, `temperature`, `eos_token_id`,
            `generation_config`, `logits_processor`, `stopping_criteria`, `streamer`, ... but for beams, assistants,
            guidance, caches of other kinds and returned dicts.

    Returns:
        On every rank: [sequences, tokens], prompts included, padded where a sequence ended before others.

    Raises:
        ValueError: on every rank, where the model or an option cannot do this.
    """
    flow = chunks[0].flow
    if flow is not None and flow.cannot_generate:
        raise ValueError(f"{type(chunks[0]).__name__} cannot generate through a pipeline: {flow.cannot_generate}.")
    if chunks[0].config.num_sequence_slices > 1:
        raise ValueError("generate keeps keys and values of whole sequences: build chunks with num_sequence_slices=1.")
    pipeline = _Pipeline(chunks, schedule, num_microbatches)
    last = next((chunk for chunk in chunks if chunk.stage.is_last), None)
    sequences, error = None, None
    with _evaluating(chunks), torch.no_grad():
        if last is None:
            while (inputs := pipeline.told(None)) is not None:
                pipeline.run(inputs)
        else:
            cache = _follower(pipeline)
            options |= {"attention_mask": attention_mask, pipeline.kept: cache, "use_cache": True}
            try:
                _check_options(options, options.get("generation_config") or last.generation_config)
                with _seeded(seed, last.device):
                    sequences = _as_whole(last, pipeline).generate(input_ids, synced_gpus=False, **options)
            except Exception as own:
                if pipeline.is_running:
                    raise  # which the other ranks know of
                error = own
            pipeline.told({})
        return pipeline.ended(sequences, error)


def _check_options(options: dict[str, Any], defaults: Any) -> None:
    for name, (without, why) in REFUSED.items():
        value = options.get(name, getattr(defaults, name, None))
        if value not in (None, without, "hybrid"):  # which transformers itself passes over in a model's defaults
            raise ValueError(f"generate through a pipeline takes no {name}={value!r}, since {why}: pass {without}.")


class _Pipeline:
    """The steps of one generation on this rank.

    Attributes:
        is_running: a step has begun, and not ended.
        kept: the argument of the model's forward that holds keys and values.
        length: tokens that the stages keep of each sequence.
    """

    is_running = False
    length = 0

    def __init__(self, chunks: Sequence[Any], schedule: Any, num_microbatches: int | None) -> None:
        self.chunks, self.schedule, self.num_microbatches = chunks, schedule, num_microbatches
        self.forward = get_forward_backward_func(schedule)
        self.group = parallel_state.get_pipeline_model_parallel_group() if dist.is_initialized() else None
        self.device = chunks[0].device
        self.kept = cache_argument(whole_forward(chunks[0])) or ""
        self.caches: list[list[Any]] = []
        self.mask: Tensor | None = None

    @property
    def source(self) -> int:
        """The rank, in all of torch.distributed, that has the last stage."""
        assert self.group is not None
        size, num_chunks = self.group.size(), len(self.chunks)
        has_last = [
            any(stage.is_last for stage in stages_for_rank(self.schedule, rank, size, num_chunks))
            for rank in range(size)
        ]
        return dist.get_global_rank(self.group, has_last.index(True))

    def told(self, inputs: dict[str, Tensor] | None) -> dict[str, Tensor] | None:
        """What the rank of the last stage tells all, [sequences, new tokens] each; the others pass None. None at the
        end, which it tells by an empty dict."""
        if self.group is None or self.group.size() == 1:
            return inputs or None
        sizes = next(iter(inputs.values())).shape if inputs else (0, 0)
        header = torch.tensor([*sizes, *(name in (inputs or {}) for name in NAMES)], device=self.device)
        with collective("the next tokens of a generation"):
            dist.broadcast(header, self.source, self.group)
            num_sequences, num_tokens, *flags = header.tolist()
            if not num_sequences:
                return None
            names = [name for name, is_there in zip(NAMES, flags) if is_there]
            if inputs:
                values = torch.stack([inputs[name] for name in names])
            else:
                values = torch.empty(len(names), num_sequences, num_tokens, dtype=torch.long, device=self.device)
            dist.broadcast(values, self.source, self.group)
        return dict(zip(names, values))

    def run(self, inputs: dict[str, Tensor], **of_last: Any) -> list[Tensor]:
        """One step. Returns the logits of each microbatch, on the rank of the last stage."""
        num_sequences, num_tokens = inputs["input_ids"].shape
        number = self.num_microbatches or _even_number(num_sequences, self.chunks[0].stage.num_stages)
        if not self.caches:
            self.caches = [[make_cache(chunk) for _ in range(number)] for chunk in self.chunks]
        if (new := inputs.pop("attention_mask", None)) is not None:
            self.mask = new if self.mask is None else torch.cat([self.mask, new], 1)
            inputs["attention_mask"] = self.mask
        parts = [dict(zip(inputs, ones)) for ones in zip(*(tensor.chunk(number) for tensor in inputs.values()))]
        iterators = [
            iter([{**part, **of_last, self.kept: cache} for part, cache in zip(parts, caches)])
            for caches in self.caches
        ]
        self.is_running = True
        outputs = self.forward(
            forward_step_func=lambda batches, chunk: (chunk(**next(batches)), None),
            data_iterator=iterators,
            model=list(self.chunks),
            num_microbatches=number,
            seq_length=num_tokens,
            micro_batch_size=num_sequences // number,
            forward_only=True,
        )
        self.is_running = False
        self.length += num_tokens
        return outputs

    def ended(self, sequences: Tensor | None, error: Exception | None) -> Tensor:
        """What the rank of the last stage has, on all ranks: the sequences, or an error."""
        with AllRanks("generation", self.group).together() as phase:
            if error is not None:
                raise error
            phase.own = None if sequences is None else list(sequences.shape)
        if sequences is None:
            shape = next(one for one in phase.all if one is not None)
            sequences = torch.empty(shape, dtype=torch.long, device=self.device)
        if self.group is not None:
            with collective("the end of a generation"):
                dist.broadcast(sequences, self.source, self.group)
        return sequences


def _as_whole(last: Any, pipeline: _Pipeline) -> Any:
    """The model of the last stage, but that its forward is that of all stages."""

    def forward(model: Any, logits_to_keep: Any = None, **inputs: Any) -> Any:
        tensors = {name: value for name, value in inputs.items() if torch.is_tensor(value)}
        if strange := [name for name, value in tensors.items() if name not in NAMES or value.dim() != 2]:
            raise ValueError(f"generate goes on with text alone, and was given {', '.join(strange)} too.")
        num_sequences, num_tokens = tensors["input_ids"].shape
        number = pipeline.num_microbatches
        if number is not None and (number < 1 or num_sequences % number):
            raise ValueError(f"{num_sequences} sequences cannot be split into {number} microbatches of the same size.")
        new = {name: value.expand(num_sequences, -1)[:, -num_tokens:] for name, value in tensors.items()}
        told = pipeline.told({name: value.to(pipeline.device, torch.long) for name, value in new.items()})
        assert told is not None
        of_last = {} if logits_to_keep is None else {"logits_to_keep": logits_to_keep}
        logits = torch.cat(pipeline.run(told, **of_last))
        outputs: Any = importlib.import_module("transformers.modeling_outputs")
        return outputs.CausalLMOutputWithPast(logits=logits, **{pipeline.kept: inputs.get(pipeline.kept)})

    forward.__signature__ = inspect.signature(whole_forward(last).__func__)  # type: ignore[attr-defined]
    kind = type(last)
    model = copy.copy(last)
    model.__class__ = type(
        kind.__name__, (kind,), {"forward": forward, "__call__": forward, "__module__": kind.__module__}
    )
    model.config = last.config.model_config
    return model


def _follower(pipeline: _Pipeline) -> Any:
    """A cache that says how much the stages keep, and keeps nothing."""
    cache = importlib.import_module("transformers").DynamicCache()
    cache.get_seq_length = lambda layer_idx=0: pipeline.length

    def refuse(*arguments: Any) -> None:
        raise ValueError("through a pipeline there are no beams and no assistants: set num_beams=1.")

    cache.reorder_cache = cache.crop = cache.batch_repeat_interleave = cache.batch_select_indices = refuse
    return cache


def _even_number(num_sequences: int, num_stages: int) -> int:
    """The first number of equal parts that is not less than the number of stages."""
    return next((n for n in range(num_stages, num_sequences) if num_sequences % n == 0), num_sequences)


@contextmanager
def _evaluating(chunks: Sequence[Any]) -> Iterator[None]:
    before = [(module, module.training) for chunk in chunks for module in chunk.modules()]
    for chunk in chunks:
        chunk.eval()
    try:
        with without_balance(chunks[0].config.model_config):
            yield
    finally:
        for module, was_training in before:
            module.training = was_training


@contextmanager
def _seeded(seed: int | None, device: torch.device) -> Iterator[None]:
    devices = [device] if device.type == "cuda" else []
    with nullcontext() if seed is None else torch.random.fork_rng(devices):
        if seed is not None:
            torch.manual_seed(seed)
        yield

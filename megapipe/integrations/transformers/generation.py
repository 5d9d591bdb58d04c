"""Let a model write through a pipeline.

The rank of the last stage runs transformers' own `generate` on a model that only looks whole. Its forward tells all
ranks the new tokens, runs the pipeline, and returns the logits. The other ranks run what they are told. So tokens are
chosen on one rank, by transformers' own code, and only tokens go back to the first stage. From token to token each
stage keeps keys and values, or states, of its own layers.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from ... import parallel_state
from ...all_ranks import AllRanks
from ...schedules import get_forward_backward_func
from .stage import CACHES, HuggingFaceStage

NAMES = ("input_ids", "attention_mask", "position_ids", "token_type_ids")
"""What is told: numbers for [sequences, new tokens]."""

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
    """Let the model go on with prompts. Every rank of a pipeline calls it; its replicas may have other prompts. Where
    chunks are sharded over the replicas, all of these call it and write the same number of tokens.

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
    pipeline = _Pipeline(chunks, schedule, num_microbatches)
    last = next((chunk for chunk in chunks if chunk.stage.is_last), None)
    devices = [pipeline.device] if pipeline.device.type == "cuda" else []
    with _evaluating(chunks), torch.no_grad(), torch.random.fork_rng(devices, enabled=seed is not None):
        if seed is not None:
            torch.manual_seed(seed)
        if last is None:
            while isinstance(told := pipeline.told(), dict):
                pipeline.run(told)
            return torch.tensor(told, device=pipeline.device)
        options |= {"attention_mask": attention_mask, pipeline.kept: _follower(pipeline), "use_cache": True}
        try:
            _check_options(options, options.get("generation_config") or last.generation_config)
            sequences: Tensor = _as_whole(last, pipeline).generate(input_ids, synced_gpus=False, **options)
        except Exception as error:
            if not pipeline.is_running:  # the other ranks know of what fails within a step
                pipeline.told(error)
            raise
        pipeline.told(sequences.tolist())
        return sequences


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
        self.chunks, self.num_microbatches = chunks, num_microbatches
        self.forward = get_forward_backward_func(schedule)
        self.ranks = AllRanks("generation", parallel_state.find_pipeline_group())
        self.device = chunks[0].device
        self.kept = cache_argument(whole_forward(chunks[0])) or ""
        self.caches: list[list[Any]] = []
        self.mask: Tensor | None = None

    def told(self, own: Any = None) -> Any:
        """What the rank of the last stage calls it with, on all ranks: the inputs of a step, or the sequences at the
        end; an error is raised on all."""
        with self.ranks.together() as phase:
            if isinstance(own, Exception):
                raise own
            phase.own = own
        return next(one for one in phase.all if one is not None)

    def run(self, told: dict[str, Any], **of_last: Any) -> list[Tensor]:
        """One step. Returns the logits of each microbatch, on the rank of the last stage."""
        inputs = {name: torch.tensor(numbers, device=self.device) for name, numbers in told.items()}
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
        new = {name: value.expand(num_sequences, -1)[:, -num_tokens:].long() for name, value in tensors.items()}
        told = pipeline.told({name: value.tolist() for name, value in new.items()})
        of_last = {} if logits_to_keep is None else {"logits_to_keep": logits_to_keep}
        logits = torch.cat(pipeline.run(told, **of_last))
        outputs: Any = importlib.import_module("transformers.modeling_outputs")
        return outputs.CausalLMOutputWithPast(logits=logits, **{pipeline.kept: inputs.get(pipeline.kept)})

    forward.__signature__ = inspect.signature(whole_forward(last).__func__)  # type: ignore[attr-defined]
    kind = type(last)
    own = {"forward": forward, "__call__": forward, "__module__": kind.__module__}
    model: Any = object.__new__(type(kind.__name__, (kind,), own))  # FSDP2's own would make a model without shards
    model.__dict__.update({name: value for name, value in vars(last).items() if name not in ("forward", "generate")})
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


def cache_argument(forward: Any) -> str | None:
    """The name of the argument of a model's forward that holds keys and values; None where it has none."""
    names = inspect.signature(forward).parameters
    return next((name for name in CACHES if name in names), None)


def make_cache(chunk: Any) -> Any:
    """An empty cache of transformers, whose numbers of layers are those of the whole model.

    At the number of another stage's layer is the cache of an own one, of the same sort where there is one: models ask
    the first cache of each sort how many tokens there were, to make masks and positions.
    """
    utils: Any = importlib.import_module("transformers.cache_utils")
    cache = utils.DynamicCache(config=chunk.config.model_config)
    own = [cache.layers[number] for number in chunk.layers if number < len(cache.layers)]
    same = {type(one): one for one in reversed(own)}
    counting = next((one for one in own if isinstance(one, utils.CacheLayerMixin)), None)
    for number, layer in enumerate(cache.layers):
        if number not in chunk.layers:
            others = counting if isinstance(layer, utils.CacheLayerMixin) else None
            cache.layers[number] = same.get(type(layer), others or layer)
    return cache


def whole_forward(chunk: Any) -> Any:
    """The forward of the whole model's class, bound to the chunk."""
    return super(HuggingFaceStage, chunk).forward


def without_balance(config: Any) -> AbstractContextManager[Any]:
    """No loss balances experts while the block runs: transformers' would need the routers of all tokens before."""
    if not getattr(config, "output_router_logits", False):
        return nullcontext()
    return mock.patch.object(config, "output_router_logits", False)


def compare_decoding(whole: Any, chunks: Sequence[Any], tokens: Tensor, tolerance: float) -> str:
    """Give a padded prompt and then two tokens to the whole model and to its stages in a row. Returns what differs, or
    nothing.

    Args:
        tokens: [2, at least 5].
    """
    mask = torch.ones_like(tokens)
    mask[0, :2] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    names = inspect.signature(whole.forward).parameters
    kept = cache_argument(whole.forward)
    if kept is None or not whole.can_generate():
        return "it keeps no keys and values in a cache of transformers"
    given = {"input_ids": tokens, "position_ids": positions, "attention_mask": mask}
    given = {name: tensor for name, tensor in given.items() if name in names}
    cache = importlib.import_module("transformers").DynamicCache(config=whole.config)
    ends = [tokens.shape[1] - 2, tokens.shape[1] - 1, tokens.shape[1]]
    try:
        caches = [make_cache(chunk) for chunk in chunks]
        for start, end in zip([0, *ends], ends):
            part = {
                n: tensor[:, :end] if n == "attention_mask" else tensor[:, start:end] for n, tensor in given.items()
            }
            with torch.no_grad(), without_balance(whole.config):
                wanted = whole(**part, **{kept: cache}, use_cache=True).logits[:, -1]
                message: Any = None
                for chunk, own in zip(chunks, caches):
                    chunk.set_input_tensor(message if isinstance(message, dict) else [message])
                    message = chunk(**part, **{kept: own})
            if not torch.allclose(message[:, -1], wanted, rtol=tolerance, atol=tolerance * float(wanted.abs().max())):
                return f"its stages have other logits than the whole model for the token behind {end}"
    except Exception as error:
        return f"with kept keys and values it fails with {type(error).__name__}: {error}"
    return ""

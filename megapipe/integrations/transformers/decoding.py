"""What a stage keeps from token to token while a model generates: keys and values, or states, of its own layers."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from .stage import CACHES, HuggingFaceStage

__all__ = ["cache_argument", "compare_decoding", "make_cache", "whole_forward", "without_balance"]


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


@contextmanager
def without_balance(config: Any) -> Iterator[None]:
    """No loss balances experts while the block runs: transformers' would need the routers of all tokens before."""
    before = getattr(config, "output_router_logits", None)
    if before:
        config.output_router_logits = False
    try:
        yield
    finally:
        if before:
            config.output_router_logits = before


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

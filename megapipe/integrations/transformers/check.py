"""Whether the stages of a model do together what the whole model does: tried with random numbers and small widths.

All layers are there, as they may differ, and depend on each other: only their widths are small. Each rank tries all
stages, one after the other, and so comes to the same result as all others without a word from them.
"""

from __future__ import annotations

import copy
import inspect
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ...plan import StageInfo
from .config import ChunkConfig
from .cut import CannotCutError, Parts, find_parts
from .stage import as_stage
from .step import tied_names
from .whole import allocate, initialise, make_meta_model, make_small_config

__all__ = ["check_cut"]

LARGE = 2**20
"""Parameters of a model that is tried at a smaller size than its own."""


def check_cut(config: Any, layers: Sequence[range]) -> None:
    """Compare the loss and all gradients of the stages in a row with those of the whole model, bit for bit.

    Args:
        layers: the numbers of those of each stage.

    Raises:
        CannotCutError: where they differ.
    """
    if len(layers) == 1:
        return
    with torch.random.fork_rng(devices=[]), torch.enable_grad(), _one_thread():
        torch.default_generator.manual_seed(0)
        whole = make_meta_model(copy.deepcopy(config), torch.float32, "eager")
        find_parts(whole)
        try:
            if sum(parameter.numel() for parameter in whole.parameters()) > LARGE:
                whole = make_meta_model(make_small_config(config), torch.float32, "eager")
            difference = _difference(_with_numbers(whole), layers)
        except Exception as error:
            difference = f"tried at a small size, it fails with {type(error).__name__}: {error}"
    if difference:
        raise CannotCutError(f"{type(whole).__name__} cannot be cut into stages: {difference}.")


@contextmanager
def _one_thread() -> Iterator[None]:
    """Several may add up numbers in another order each time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _with_numbers(whole: Any) -> Any:
    allocate(whole, "cpu")
    initialise(whole, None)
    for parameter in whole.parameters():
        nn.init.normal_(parameter, std=0.1)  # also what begins with zeros, behind which nothing would be seen
    return whole.eval()


def _difference(whole: Any, layers: Sequence[range]) -> str:
    """What the stages do otherwise than the whole model; empty where there is nothing."""
    parts = find_parts(whole)
    tokens = torch.randint(whole.config.vocab_size, (2, 6), device="cpu")
    batch = {"input_ids": tokens, "labels": tokens}
    with _received(parts.layers_of(whole)) as expected:
        loss = whole(**batch, use_cache=False).loss
    gradients = _gradients(whole, loss)
    chunks = [_chunk(whole, parts, StageInfo(index, len(layers)), own) for index, own in enumerate(layers)]
    if shared := _shared(chunks):
        return shared
    message: Any = None
    with _received(parts.layers_of(whole)) as got:
        for number, chunk in enumerate(chunks):
            chunk.set_input_tensor(message if isinstance(message, dict) else [message])
            try:
                message = chunk(**batch)
            except Exception as error:
                return f"stage {number} of {len(layers)} fails with {type(error).__name__}: {error}"
            if number + 1 < len(chunks):
                wanted = chunk.infer_stage_outputs_from_pipeline_inputs({"input_ids": tokens}, 1)
                if _sizes(message) != _sizes(wanted):
                    return f"stage {number} hands on {_sizes(message)} and not {_sizes(wanted)}"
    for (*where, want), (*place, tensor) in zip(expected, got):
        if where != place or not torch.equal(want, tensor):
            return f"layer {where[0]} is not given the {where[1]} that it has in the whole model"
    if not torch.equal(message, loss):
        return f"its stages have the loss {message.item():.4f}, and the whole model {loss.item():.4f}"
    for name, checksum in _gradients(whole, message).items():
        if checksum != gradients[name]:
            return f"its stages have another gradient of {name} than the whole model"
    return ""


def _chunk(whole: Any, parts: Parts, stage: StageInfo, layers: range) -> Any:
    """A stage whose modules are those of the whole model, which stays whole."""
    chunk = _copy(whole)
    decoder = _copy(parts.decoder_of(whole))
    setattr(chunk, parts.decoder, decoder)
    setattr(decoder, parts.layers, nn.ModuleList(parts.layers_of(whole)))
    as_stage(chunk, stage, layers)
    chunk.config = ChunkConfig(whole.config, hidden_size=whole.config.hidden_size)
    return chunk


def _copy(module: nn.Module) -> Any:
    """The module itself, but that other modules may take the places of its children."""
    copied = copy.copy(module)
    copied._modules, copied._buffers = dict(module._modules), dict(module._buffers)
    return copied


def _shared(chunks: Sequence[Any]) -> str:
    """Which parameter is in two stages, besides those that `tie_weights` looks after; empty where there is none."""
    tied = {name for pair in tied_names(chunks[0]).items() for name in pair}
    found: dict[nn.Parameter, tuple[int, str]] = {}
    for number, chunk in enumerate(chunks):
        for name, parameter in chunk.named_parameters():
            first, its_name = found.setdefault(parameter, (number, name))
            if first != number and not {name, its_name} <= tied:
                return f"stages {first} and {number} share a parameter ({its_name}, {name})"
    return ""


@contextmanager
def _received(layers: nn.ModuleList) -> Iterator[list[tuple[int, str, Tensor]]]:
    """What the layers are called with while the block runs: their numbers, names of parameters, and copies."""
    found: list[tuple[int, str, Tensor]] = []

    def note(number: int, layer: nn.Module, arguments: Any, options: Any) -> None:
        given = inspect.signature(layer.forward).bind(*arguments, **options).arguments
        for name, value in given.items():
            found.extend((number, name, leaf.detach().clone()) for leaf in tree_leaves(value) if torch.is_tensor(leaf))

    hooks = [
        layer.register_forward_pre_hook(partial(note, number), with_kwargs=True) for number, layer in enumerate(layers)
    ]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def _gradients(model: nn.Module, loss: Tensor) -> dict[str, int | None]:
    """Checksums of all gradients. None of them is kept."""
    torch.autograd.backward(loss)
    found = {
        name: None if parameter.grad is None else zlib.crc32(parameter.grad.contiguous().numpy().data)
        for name, parameter in model.named_parameters()
    }
    model.zero_grad()
    return found


def _sizes(message: Any) -> dict[str, list[int]]:
    named = message if isinstance(message, dict) else {"hidden_states": message}
    return {name: list(tensor.shape) for name, tensor in named.items()}

"""The tensors of chunks in the form and under the names that transformers' files have: to be saved, or to be sent.

What is converted back into the form of files (see `loading`) is one tensor at a time, or one layer where several become
one.
"""

from __future__ import annotations

import copy
import functools
import importlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ...safetensors_files import Entry
from ...training import finalize_weights
from ...weights_out import BUCKET, ChunkTensors, send_out
from .adapters import adapted_in, adapters_of, copied_in, has_adapters
from .heads import whole_of
from .step import tied_names

Making = Callable[[bool], Tensor]
"""Makes a tensor; on the meta device if it is called with True."""


def named_weights(
    chunks: Sequence[Any],
    to: int | Sequence[int] | None = None,
    *,
    merge_adapters: bool = False,
    dtype: torch.dtype | None = None,
    bucket_size: int = BUCKET,
) -> Iterator[tuple[str, Tensor]]:
    """All names and tensors of the model, as `save_pretrained` would write them, on the ranks that ask for them: for an
    engine that generates, for example. Every rank calls it with the same arguments and iterates to the end.

    Tensors come from stages in their order, and from the shards of FSDP2. A tied one comes once. Each is the reader's
    own copy. Besides what a rank holds there are only a bucket and a tensor (of a model whose files join several
    tensors of a layer, that layer).

    Args:
        to: ranks among all, which get them. None stands for all ranks. Others get nothing and take part.
        merge_adapters: give the whole model, with active adapters added to its weights as `peft` does. Without it only
            the adapters come, where there are any.
        dtype: of what is sent, for numbers with a point. None leaves it.
        bucket_size: bytes that are sent at once. A larger tensor is sent alone.

    Raises:
        ValueError: on every rank, for wrong arguments, chunks that are missing, or weights that are quantised and no
            adapters.
        RuntimeError: on every rank that is still there, where one stops before the end, or is killed.
    """

    def describe() -> list[ChunkTensors]:
        finalize_weights(chunks)
        parts = []
        for chunk in chunks:
            if merge_adapters or not has_adapters(chunk):
                check_floats(chunk)
            made = to_save(chunk, True, merge_adapters)
            entries = [Entry(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in made]
            tensors = functools.partial(to_save, chunk, merge_adapters=merge_adapters)
            parts.append(ChunkTensors(chunk.stage.index, chunk.stage.num_stages, entries, tensors))
        return parts

    return send_out(describe, chunks[0].device, to, dtype, bucket_size)


def to_save(chunk: Any, on_meta: bool = False, merge_adapters: bool = False) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a chunk as they are in files. Of chunks with adapters only these, or if they are merged the
    model's own."""
    is_of_adapters = has_adapters(chunk) and not merge_adapters
    made = _tensors_of(chunk, is_of_adapters)
    if is_of_adapters:
        for name, make in made.items():
            yield f"base_model.model.{name}", make(on_meta)
        return
    revert = importlib.import_module("transformers.core_model_loading").revert_weight_conversion
    for names in _units(chunk, made, revert):
        yield from revert(chunk, {name: made[name](on_meta) for name in names}).items()


def _units(chunk: Any, made: dict[str, Making], revert: Any) -> Iterator[list[str]]:
    """The names of tensors that are converted together."""
    by_layer: dict[int | None, list[str]] = defaultdict(list)
    for name in made:
        by_layer[chunk.parts.layer_of(name)].append(name)
    for names in by_layer.values():
        on_meta = {name: made[name](True) for name in names}
        together = revert(chunk, on_meta)
        alone = [one for name in names for one in revert(chunk, {name: on_meta[name]}).items()]
        is_alike = {name: tensor.shape for name, tensor in alone} == {n: t.shape for n, t in together.items()}
        yield from [[name] for name in names] if is_alike else [names]


def _tensors_of(chunk: Any, is_of_adapters: bool) -> dict[str, Making]:
    """What makes each tensor, by its name in the chunk; of tied ones the first."""
    if is_of_adapters:  # a copy of the head that an adapter trains is not tied
        return {name: functools.partial(_whole, tensor) for name, tensor in adapters_of(chunk).items()}
    ties, adapted = tied_names(chunk), adapted_in(chunk)
    copied = copied_in(chunk) if has_adapters(chunk) else {}
    made: dict[str, Making] = {}
    for full_name, tensor in chunk.state_dict(keep_vars=True).items():
        if (wrapper := next((one for one in copied if full_name.startswith(f"{one}.")), None)) is not None:
            if full_name.startswith(kept := f"{wrapper}.{copied[wrapper]}."):
                made[f"{wrapper}.{full_name[len(kept) :]}"] = functools.partial(_whole, tensor)
            continue
        within = next((one for one in adapted if full_name.startswith(f"{one}.")), None)
        name = full_name.replace(".base_layer.", ".")  # also of a layer whose adapters were deleted
        if within is not None and not full_name.startswith(f"{within}.base_layer."):
            continue  # of an adapter
        if name not in ties:
            merged = within and functools.partial(_merged, adapted[within], full_name[len(f"{within}.base_layer.") :])
            made[name] = merged or functools.partial(_whole, tensor)
    return made


def _merged(module: Any, name: str, on_meta: bool) -> Tensor:
    """A tensor of a layer with its adapters added, by peft's own code on a copy of the layer."""
    if on_meta:
        return module.get_base_layer().state_dict()[name].to("meta")  # type: ignore[no-any-return]
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        own = _whole(parameter)
        memo[id(parameter)] = nn.Parameter(own if isinstance(parameter, DTensor) else own.clone(), requires_grad=False)
    whole = copy.deepcopy(module, memo)
    whole.merge()
    return whole.get_base_layer().state_dict()[name]  # type: ignore[no-any-return]


def _whole(tensor: Tensor, on_meta: bool = False) -> Tensor:
    """The whole tensor: of a sharded one, all shards."""
    tensor = tensor.detach()
    if on_meta:
        return tensor.to("meta")
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def check_floats(chunk: Any) -> None:
    """Raises ValueError where a weight that is float in the model is quantised here: `from_pretrained` would read it as
    a float."""
    state = {name.replace(".base_layer.", "."): tensor for name, tensor in chunk.state_dict().items()}
    if not (strange := [name for name, tensor in state.items() if is_quantised(tensor)]):
        return
    whole = whole_of(chunk, chunk.dtype).state_dict()
    for name in strange:
        if name in whole and not is_quantised(whole[name]):
            form = state[name].dtype if type(state[name]) in (Tensor, nn.Parameter) else type(state[name]).__name__
            raise ValueError(
                f"{name} is quantised ({form}), and files of a model have its weights in {chunk.dtype}: put layers "
                "with floats in its place, or train adapters of add_adapter, which are saved and sent without the "
                "model. A Checkpointer saves quantised layers as they are."
            )


def is_quantised(tensor: Any) -> bool:
    """Whether its numbers are not floats of 16 bits or more, or lie in other tensors, as torchao's do."""
    lies_elsewhere = is_traceable_wrapper_subclass(tensor) and not isinstance(tensor, DTensor)
    return not tensor.is_floating_point() or tensor.itemsize == 1 or lies_elsewhere

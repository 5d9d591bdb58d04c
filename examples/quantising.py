"""Linear layers whose frozen weights have 8 bits or 4, for adapters to be trained on them (`load_weights`'s
after_layer).

Each function changes the linear layers in one layer of the model, in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn


def linear_layers(layer: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    """The module that has it, its name there, and itself."""
    for parent in list(layer.modules()):
        for name, module in list(parent.named_children()):
            if type(module) is nn.Linear:
                yield parent, name, module


def nf4(layer: nn.Module) -> None:
    """4 bits as QLoRA has them, by bitsandbytes."""
    import bitsandbytes as bnb

    for parent, name, old in linear_layers(layer):
        new = bnb.nn.Linear4bit(
            old.in_features, old.out_features, old.bias is not None, compute_dtype=old.weight.dtype, device="meta"
        )
        new.weight = bnb.nn.Params4bit(old.weight.data, requires_grad=False, quant_type="nf4", module=new)
        new.bias = old.bias
        setattr(parent, name, new.to(old.weight.device))


def llm_int8(layer: nn.Module) -> None:
    """8 bits with outliers apart, by bitsandbytes."""
    import bitsandbytes as bnb

    for parent, name, old in linear_layers(layer):
        new = bnb.nn.Linear8bitLt(
            old.in_features, old.out_features, old.bias is not None, has_fp16_weights=False, device="meta"
        )
        new.weight = bnb.nn.Int8Params(old.weight.data, requires_grad=False, has_fp16_weights=False)
        new.bias = old.bias
        setattr(parent, name, new.to(old.weight.device))


def int8(layer: nn.Module) -> None:
    """8 bits with a scale for each row, by torchao."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantize_(layer, Int8WeightOnlyConfig())


def int4(layer: nn.Module) -> None:
    """4 bits with a scale for 32 numbers, by torchao."""
    from torchao.quantization import IntxWeightOnlyConfig, quantize_
    from torchao.quantization.granularity import PerGroup

    quantize_(layer, IntxWeightOnlyConfig(torch.int4, PerGroup(32)))


def torchao_nf4(layer: nn.Module) -> None:
    """4 bits as QLoRA has them, by torchao."""
    from torchao.quantization import to_nf4

    for _, _, module in linear_layers(layer):
        module.weight = nn.Parameter(to_nf4(module.weight.detach(), 64, 16), requires_grad=False)


KINDS: dict[str, Callable[[Any], None]] = {
    "nf4": nf4,
    "llm-int8": llm_int8,
    "int8": int8,
    "int4": int4,
    "torchao-nf4": torchao_nf4,
}

"""The example's GPT, whole stages and single layers, and the times of what a device does."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megapipe.timing import Clock

sys.path.append(str(Path(__file__).parent.parent / "examples"))
from gpt import GPTConfig, GPTStage, Layer

__all__ = ["GPTConfig", "GPTStage", "Layer", "config_of", "example", "interval", "make_layers"]

VOCABULARY = 256
WARMUP = 3


def config_of(args: argparse.Namespace) -> GPTConfig:
    """By a benchmark's options."""
    return GPTConfig(
        hidden_size=args.hidden_size,
        num_layers=args.layers,
        num_attention_heads=args.heads,
        vocab_size=VOCABULARY,
        max_position_embeddings=args.seq_length,
    )


def make_layers(args: argparse.Namespace, num_layers: int) -> nn.Sequential:
    torch.manual_seed(0)
    with torch.device(args.device):
        layers = nn.Sequential(*(Layer(config_of(args)) for _ in range(num_layers)))
    return layers.to(getattr(torch, args.dtype))


def example(args: argparse.Namespace) -> Tensor:
    """What a stage is given, and as good as any for an output gradient."""
    shape = (args.seq_length, 1, args.hidden_size)
    return torch.randn(shape, device=args.device, dtype=getattr(torch, args.dtype))


def interval(clock: Clock, function: Callable[[], Any]) -> tuple[Any, Any]:
    start = clock.now()
    function()
    return start, clock.now()

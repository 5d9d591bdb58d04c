"""Models as people write them, with no thought of pipelines."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def _double(before: int, width: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(before, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1))


class UNet(nn.Module):
    """Skips from each level down to the one up, and one from the input to the end."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.down1, self.down2, self.bottom = (
            _double(3, width),
            _double(width, 2 * width),
            _double(2 * width, 2 * width),
        )
        self.up2, self.up1 = _double(4 * width, width), _double(2 * width, width)
        self.out = nn.Conv2d(width, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = self.down1(x)
        second = self.down2(F.max_pool2d(first, 2))
        y = F.interpolate(self.bottom(F.max_pool2d(second, 2)), scale_factor=2)
        y = F.interpolate(self.up2(torch.cat([y, second], 1)), scale_factor=2)
        return self.out(self.up1(torch.cat([y, first], 1))) + x


class Block(nn.Module):
    """A layer of a transformer."""

    def __init__(self, width: int, is_causal: bool = False, is_cross: bool = False) -> None:
        super().__init__()
        self.is_causal = is_causal
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.cross = nn.MultiheadAttention(width, 2, batch_first=True) if is_cross else None
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3 if is_cross else 2))
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1]) if self.is_causal else None
        y = self.norms[0](x)
        x = x + self.attention(y, y, y, attn_mask=mask, need_weights=False)[0]
        if self.cross is not None:
            x = x + self.cross(self.norms[2](x), memory, memory, need_weights=False)[0]
        return x + self.mlp(self.norms[1](x))


class Stack(nn.Module):
    def __init__(self, num_layers: int, width: int, is_decoder: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width, is_decoder, is_decoder) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            x = layer(x, memory)
        return self.norm(x)


class EncoderDecoder(nn.Module):
    """Both ends share the embedding, and all layers of the decoder read what the encoder returns, as in T5."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.shared = nn.Embedding(31, width)
        self.encoder, self.decoder = Stack(1, width, False), Stack(2, width, True)
        self.lm_head = nn.Linear(width, 31, bias=False)

    def forward(self, tokens: Tensor, decoder_tokens: Tensor) -> Tensor:
        memory = self.encoder(self.shared(tokens))
        return self.lm_head(self.decoder(self.shared(decoder_tokens), memory))


def _images(generator: torch.Generator) -> tuple[Any, ...]:
    return (torch.randn(2, 3, 16, 16, generator=generator),)


def _two_texts(generator: torch.Generator) -> tuple[Any, ...]:
    return torch.randint(31, (2, 9), generator=generator), torch.randint(31, (2, 12), generator=generator)


MODELS = {"unet": (UNet, _images), "encoder-decoder": (EncoderDecoder, _two_texts)}
"""What makes a model, and what makes a microbatch of it."""

"""A GPT that is built stage by stage: a rank constructs only the layers it owns.

Layers keep their number in the whole model in their parameter names, and each is initialised from that number, so the
model is the same however it is cut.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megapipe import PipelineConfig, StageInfo, distribute_layers


@dataclass
class GPTConfig(PipelineConfig):
    hidden_size: int = 96
    num_layers: int = 8
    num_attention_heads: int = 4
    vocab_size: int = 256
    max_position_embeddings: int = 128
    dropout: float = 0.0
    seed: int = 1234


class Attention(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.dropout = config.dropout
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.proj = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        seq_length, batch_size, hidden_size = x.shape
        heads = self.qkv(x).view(seq_length, batch_size, 3, self.num_heads, -1)
        q, k, v = heads.permute(2, 1, 3, 0, 4)  # each [batch, heads, sequence, hidden of a head]
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
        return self.proj(mixed.permute(2, 0, 1, 3).reshape(seq_length, batch_size, hidden_size))


class Layer(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.hidden_size)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.hidden_size)
        self.up = nn.Linear(config.hidden_size, 4 * config.hidden_size)
        self.down = nn.Linear(4 * config.hidden_size, config.hidden_size)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.down(F.gelu(self.up(self.mlp_norm(x)))))


class Embedding(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(len(tokens), device=tokens.device)
        return self.tokens(tokens) + self.positions(positions).unsqueeze(1)


class Head(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.hidden_size)
        self.output = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.norm(x))


class GPTStage(nn.Module):
    """One stage. Tensors are [sequence, batch, hidden]."""

    def __init__(self, config: GPTConfig, stage: StageInfo) -> None:
        super().__init__()
        self.config = config
        self.stage = stage
        self.embedding = Embedding(config) if stage.is_first else None
        self.layers = nn.ModuleDict({str(n): Layer(config) for n in distribute_layers(config.num_layers, stage)})
        self.head = Head(config) if stage.is_last else None
        self.input_tensor: Tensor | None = None
        self._initialise()

    def set_input_tensor(self, input_tensor: list[Tensor]) -> None:
        """Called before each forward with what the stage before returned."""
        self.input_tensor = input_tensor[0]

    def forward(self, tokens: Tensor | None) -> Tensor:
        """Logits on the last stage, hidden states elsewhere. `tokens` [sequence, batch] are read on the first."""
        x = self.input_tensor if self.embedding is None else self.embedding(tokens)
        for layer in self.layers.values():
            x = layer(x)
        return x if self.head is None else self.head(x)

    def _initialise(self) -> None:
        """Draw every parameter from a seed of its own: the model's and the parameter's name."""
        config = self.config
        for name, parameter in self.named_parameters():
            if parameter.dim() == 1:
                continue  # norms are ones and zeros already; see below for biases
            generator = torch.Generator().manual_seed(
                config.seed + sum(ord(c) * 31**i for i, c in enumerate(name)) % 2**31
            )
            std = 0.02
            if name.endswith(("proj.weight", "down.weight")):
                std /= (2 * config.num_layers) ** 0.5  # so that the sum over all layers keeps its size
            with torch.no_grad():
                parameter.normal_(0.0, std, generator=generator)
        for module in self.modules():
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

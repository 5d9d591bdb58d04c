"""A GPT that is built stage by stage: a rank constructs only the layers it owns.

Layers keep their number in the whole model in their parameter names, and each is initialised from that number, so the
model is the same however it is cut.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from moe import MoE, whole_names
from torch import Tensor, nn

from megapipe import PipelineConfig, StageInfo, distribute_layers, slices
from megapipe.overlap import in_segments, run_segments
from megapipe.weight_grad import convert


@dataclass
class GPTConfig(PipelineConfig):
    hidden_size: int = 96
    num_layers: int = 8
    num_attention_heads: int = 4
    vocab_size: int = 256
    max_position_embeddings: int = 128
    dropout: float = 0.0
    seed: int = 1234

    # Experts
    num_experts: int | None = None
    """Per layer, in all; None for an MLP instead."""
    moe_topk: int = 2
    """Experts of each token, besides the shared one."""
    moe_aux_loss_coeff: float = 1e-2
    moe_aux_loss_scale: float = 1.0
    """1 / num_microbatches, as the loss itself is scaled."""
    expert_model_parallel_group: dist.ProcessGroup | None = None


class Attention(nn.Module):
    """Causal, from slice to slice."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        if config.hidden_size % config.num_attention_heads:
            raise ValueError(
                f"hidden_size={config.hidden_size} cannot be shared out evenly among {config.num_attention_heads} "
                "attention heads: use a divisor of it."
            )
        self.num_heads = config.num_attention_heads
        self.dropout = config.dropout
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.proj = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(x).view(*x.shape[:2], 3, self.num_heads, -1)
        q, k, v = heads.permute(2, 1, 3, 0, 4)  # each [batch, heads, sequence, hidden of a head]
        mixed = slices.attention(q, k, v, owner=self, dropout_p=self.dropout if self.training else 0.0)
        return self.proj(mixed.permute(2, 0, 1, 3).reshape(x.shape))


class Layer(nn.Module):
    """With an MLP, or a mixture of experts in its place."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.hidden_size)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.hidden_size)
        self.moe = None
        if config.num_experts is None:
            self.up = nn.Linear(config.hidden_size, 4 * config.hidden_size)
            self.down = nn.Linear(4 * config.hidden_size, config.hidden_size)
        else:
            self.moe = MoE(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        return run_segments(self.forward_segments(x))

    def forward_segments(self, x: Tensor) -> Generator[None, None, Tensor]:
        """It stops where its experts wait."""
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        y = self.mlp_norm(x)
        y = self.down(F.gelu(self.up(y))) if self.moe is None else (yield from in_segments(self.moe, y))
        return x + self.dropout(y)


class Embedding(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = slices.positions(len(tokens), tokens.device)
        return self.tokens(tokens) + self.positions(positions).unsqueeze(1)


class Head(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.hidden_size)
        self.output = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.norm(x))


class GPTStage(nn.Module):
    """One stage. Tensors are [sequence, batch, hidden]. Its layers leave their weight gradients to W, where the
    schedule has one."""

    def __init__(self, config: GPTConfig, stage: StageInfo) -> None:
        super().__init__()
        self.config = config
        self.stage = stage
        self.embedding = Embedding(config) if stage.is_first else None
        self.layers = nn.ModuleDict({str(n): Layer(config) for n in distribute_layers(config.num_layers, stage)})
        self.head = Head(config) if stage.is_last else None
        self.input_tensor: Tensor | None = None
        convert(self)
        self._initialise()

    def set_input_tensor(self, input_tensor: list[Tensor]) -> None:
        """Called before each forward with what the stage before returned."""
        self.input_tensor = input_tensor[0]

    def forward(self, tokens: Tensor | None) -> Tensor:
        """Logits on the last stage, hidden states elsewhere. `tokens` [sequence, batch] are read on the first."""
        return run_segments(self.forward_segments(tokens))

    def forward_segments(self, tokens: Tensor | None) -> Generator[None, None, Tensor]:
        x = self.input_tensor if self.embedding is None else self.embedding(tokens)
        for layer in self.layers.values():
            x = yield from in_segments(layer, x)
        return x if self.head is None else self.head(x)

    def _initialise(self) -> None:
        """Draw every matrix from a seed of its own: the model's and the matrix's name."""
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            for whole_name, matrix in whole_names(name, parameter, parameter.data) if parameter.dim() > 1 else ():
                number = sum(ord(c) * 31**i for i, c in enumerate(whole_name)) % 2**31
                generator = torch.Generator().manual_seed(self.config.seed + number)
                std = 0.02
                if "proj.weight" in name or "down.weight" in name:
                    std /= (2 * self.config.num_layers) ** 0.5  # so that the sum over all layers keeps its size
                matrix.copy_(torch.empty(matrix.shape).normal_(0.0, std, generator=generator))

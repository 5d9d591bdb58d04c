"""A decoder by its layers: operations, parameters and bytes of each.

Bytes of activations are those of Korthikanti et al. (https://arxiv.org/abs/2205.05198, sections 4 and 5): 34 bytes for
each token and hidden unit of a layer of GPT, scores of attention apart, which flash attention or their selective
recomputation do not keep. By their count each matrix between the hidden states and n values keeps these n for the
backward, in 16 bits. So the bytes of any layer follow from the shapes of its matrices: with grouped heads, latent
attention, gated MLPs and experts.
Operations are those of its appendix A: 2 for each weight and token, and 4 s h for the scores of a layer's attention
over s tokens; a backward takes twice as many.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

NUMBERS = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "vocabulary": "vocab_size",
    "kv_heads": "num_key_value_heads",
    "head_size": "head_dim",
    "ffn": "intermediate_size",
    "experts": "num_local_experts num_experts n_routed_experts",
    "experts_per_token": "num_experts_per_tok",
    "expert_ffn": "moe_intermediate_size",
    "shared_ffn": "shared_expert_intermediate_size",
    "dense_layers": "first_k_dense_replace",
}
"""The numbers of `decoder`, by their names in configs of transformers."""

INSTEAD = "give its numbers instead, such as hidden_size=4096 num_hidden_layers=32"


class LayerCosts(NamedTuple):
    """What a layer has and takes for a token, or the sums over several layers.

    Attributes:
        weights: parameters outside routed experts.
        experts: parameters of all its routed experts.
        products: weights outside routed experts that multiply a token.
        routed: weights of routed experts that multiply a token.
        saved: bytes that its F leaves for the backward.
        attended: sizes of a query and of an attended value, over all heads. Attention takes 2 operations for each, and
            for each token of the sequence.
        keys: sizes of the token's keys and values.
        choices: routed experts that a token goes through.
    """

    weights: float = 0
    experts: float = 0
    products: float = 0
    routed: float = 0
    saved: float = 0
    attended: float = 0
    keys: float = 0
    choices: float = 0

    def scores(self, sequence: int) -> float:
        """Operations of attention in F: twice as many in B, none in W."""
        return 2.0 * sequence * self.attended

    def operations(self, sequence: int) -> float:
        """Those of F."""
        return 2.0 * (self.products + self.routed) + self.scores(sequence)


def layer_of(
    hidden: int,
    matrices: Iterable[Sequence[int]],
    routed: Iterable[Sequence[int]],
    experts: int,
    choices: int,
    attention: tuple[float, float],
    dropout: bool = False,
) -> LayerCosts:
    """A layer without biases, by the shapes of its matrices: those of `experts` routed experts, and all others.

    Args:
        attention: `attended` and `keys` of the layer.
        dropout: it has masks of dropout, as GPT has them.
    """

    def products_and_kept(shapes: Iterable[Sequence[int]]) -> tuple[int, int]:
        kept = [math.prod(shape[:-2]) * (sum(shape[-2:]) - hidden * (hidden in shape[-2:])) for shape in shapes]
        return sum(map(math.prod, shapes)), sum(kept)

    (own, kept), (all_routed, kept_by_all) = products_and_kept(matrices), products_and_kept(routed)
    share = choices / experts if experts else 0.0
    # The inputs of attention, of the MLP and of two norms; masks; the inputs and outputs of experts.
    others = (8 + 2 * dropout + 4 * choices) * hidden
    saved = 2 * (kept + kept_by_all * share) + others
    return LayerCosts(own + 2 * hidden, all_routed, own, all_routed * share, saved, *attention, choices)


@dataclass(frozen=True)
class Transformer:
    """A decoder.

    Attributes:
        layers: each of them.
        hidden, vocabulary: its sizes.
        heads: what tensor parallelism shares out: it divides the heads of queries and of keys of all layers. 0 for a
            model without attention.
        before: parameters in front of the layers: the embedding, and all else outside them but the head.
        head: parameters of the head, also where they are the embedding's.
        tied: the head's matrix is the embedding's.
        experts: routed experts of a layer that has some.
    """

    layers: tuple[LayerCosts, ...]
    hidden: int
    vocabulary: int
    heads: int
    before: int
    head: int
    tied: bool = False
    experts: int = 0

    @cached_property
    def _sums(self) -> list[LayerCosts]:
        """What the first layers sum up to: none, one, two, and so on."""
        return [*itertools.accumulate(self.layers, _plus, initial=LayerCosts())]

    @property
    def whole(self) -> LayerCosts:
        """All layers."""
        return self._sums[-1]

    def stages(self, sizes: Iterable[int]) -> list[LayerCosts]:
        """The layers of each stage, summed up.

        Args:
            sizes: how many each has.
        """
        ends = [self._sums[number] for number in itertools.accumulate(sizes, initial=0)]
        return [LayerCosts(*(b - a for a, b in zip(*pair))) for pair in itertools.pairwise(ends)]

    @property
    def weights(self) -> float:
        return self.whole.weights + self.whole.experts + self.before + (0 if self.tied else self.head)

    @property
    def active_weights(self) -> float:
        """Those that a token meets."""
        return self.weights - self.whole.experts + self.whole.routed

    # For a token

    def head_operations(self) -> float:
        return 2.0 * self.head

    def operations(self, sequence: int) -> float:
        """All of a step, with nothing computed twice."""
        return 3 * (self.whole.operations(sequence) + self.head_operations())

    def boundary(self) -> float:
        """The bytes of hidden states between two layers: what recomputation keeps of a layer, and what is sent to the
        next stage."""
        return 2.0 * self.hidden

    def logits(self) -> float:
        """The bytes of logits in 32 bits, and of the inputs of the last norm and of the head."""
        return 4.0 * self.vocabulary + 4.0 * self.hidden


def _plus(one: LayerCosts, other: LayerCosts) -> LayerCosts:
    return LayerCosts(*(a + b for a, b in zip(one, other)))


class Latent(NamedTuple):
    """Sizes of latent attention: the ranks of queries (0 for a full matrix) and of keys with values, and the sizes of a
    head: the parts of a query without and with rotary positions, and a value."""

    queries: int
    keys: int
    plain: int
    rotary: int
    value: int


def decoder(
    layers: int,
    hidden: int,
    heads: int,
    vocabulary: int,
    *,
    kv_heads: int = 0,
    head_size: int = 0,
    latent: Latent | None = None,
    ffn: int = 0,
    gated: bool = False,
    experts: int = 0,
    experts_per_token: int = 0,
    expert_ffn: int = 0,
    shared_ffn: int = 0,
    dense_layers: int = 0,
    tied: bool = False,
    dropout: bool = False,
) -> Transformer:
    """A decoder by its sizes, without biases.

    Args:
        kv_heads: heads of keys and values; 0 for as many as there are heads.
        head_size: 0 for hidden / heads.
        ffn: units between the matrices of an MLP; 0 for 4 hidden.
        gated: an MLP has three matrices.
        experts, experts_per_token: of each layer; 0 for an MLP instead.
        expert_ffn: units of one expert; 0 for `ffn`.
        shared_ffn: units of the experts that every token goes through.
        dense_layers: how many layers have an MLP before those with experts.
        dropout: with masks of dropout, as GPT has them.
    """
    head_size, kv_heads, ffn = head_size or hidden // heads, kv_heads or heads, ffn or 4 * hidden
    if latent is None:
        inner, both = heads * head_size, 2 * head_size
        attention = [(hidden, inner), *[(hidden, kv_heads * head_size)] * 2]
    else:
        kv_heads, inner, both = heads, heads * latent.value, latent.plain + latent.rotary + latent.value
        through = [size for size in (hidden, latent.queries, heads * (latent.plain + latent.rotary)) if size]
        attention = [*itertools.pairwise(through), (hidden, latent.keys + latent.rotary)]
        attention.append((latent.keys, heads * (latent.plain + latent.value)))
    attention.append((inner, hidden))
    size, matrices = (heads * both, kv_heads * both), 3 if gated else 2
    dense = layer_of(hidden, attention + [(hidden, ffn)] * matrices, [], 0, 0, size, dropout)
    number = dense_layers if experts else layers
    others = [*attention, (hidden, experts), *[(hidden, shared_ffn)] * matrices * bool(shared_ffn)]
    routed = [(experts, hidden, expert_ffn or ffn)] * matrices
    sparse = layer_of(hidden, others, routed, experts, experts_per_token, size, dropout)
    all_layers, table = (dense,) * number + (sparse,) * (layers - number), vocabulary * hidden
    return Transformer(all_layers, hidden, vocabulary, kv_heads, table, table, tied, experts)

"""Attention slice by slice, compared with torch's attention to whole sequences."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import cache
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from tools.by_slices import Run, make_slices, plain, recomputed, recomputed_reentrant, run_by_slices
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from megapipe import slices
from megapipe.slices import CarriedState
from megapipe.weight_grad import convert

SEQUENCE, BATCH, HEADS, SIZE = 24, 2, 4, 6
HIDDEN = HEADS * SIZE
CUTS = [[12, 12], [9, 8, 7], [3] * 8, [7, 1, 4, 2, 1, 5, 4]]
IDS = torch.tensor([[0] * 5 + [1] * 9 + [2] * 10, [0] * 1 + [1] * 22 + [2]])


class Case(NamedTuple):
    kv_heads: int = HEADS
    window: int | None = None
    packed: bool = False
    mask: str | None = None
    scale: float | None = None


CASES = {
    "causal": Case(),
    "grouped queries": Case(kv_heads=2),
    "window": Case(window=5),
    "window of one": Case(window=1),
    "packed with window": Case(packed=True, window=4, kv_heads=1),
    "numbers": Case(mask="numbers", scale=0.3),
    "booleans with window": Case(mask="booleans", window=9),
}


def given_mask(kind: str | None, dtype: torch.dtype) -> Tensor | None:
    """Of whole sequences."""
    generator = torch.Generator().manual_seed(1)
    numbers = torch.randn(HEADS, SEQUENCE, SEQUENCE, dtype=dtype, generator=generator)
    if kind == "booleans":
        return (numbers > 0) | torch.eye(SEQUENCE, dtype=torch.bool)
    return None if kind is None else numbers


@cache
def whole_bias(case: Case, dtype: torch.dtype) -> Tensor:
    """What is added to the scores, written down position by position."""
    mask = given_mask(case.mask, dtype)
    bias = torch.full((BATCH, HEADS, SEQUENCE, SEQUENCE), float("-inf"), dtype=dtype)
    for batch, now in product(range(BATCH), range(SEQUENCE)):
        for then in range(now + 1):
            in_window = case.window is None or now - then < case.window
            if in_window and (not case.packed or IDS[batch, now] == IDS[batch, then]):
                bias[batch, :, now, then] = 0
    if mask is None:
        return bias
    return bias.masked_fill(~mask, float("-inf")) if case.mask == "booleans" else bias + mask


def whole_attention(query: Tensor, key: Tensor, value: Tensor, case: Case) -> Tensor:
    key, value = (kept.repeat_interleave(HEADS // case.kv_heads, dim=1) for kept in (key, value))
    bias = whole_bias(case, query.dtype)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=case.scale)


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary positions of [batch, heads, length, size]."""
    angles = positions[:, None] / 100 ** torch.linspace(0, 1, x.shape[-1] // 2, dtype=x.dtype)
    real, imaginary = x.chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([real * cos - imaginary * sin, real * sin + imaginary * cos], dim=-1)


class Layer(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        self.norm = nn.LayerNorm(HIDDEN)
        self.q = nn.Linear(HIDDEN, HIDDEN)
        self.kv = nn.Linear(HIDDEN, 2 * case.kv_heads * SIZE)
        self.out = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        """Of [batch, length, hidden]."""
        this, case = slices.current(), self.case
        positions = slices.positions(x.shape[1])
        y = self.norm(x)
        q = self.q(y).unflatten(-1, (HEADS, SIZE)).transpose(1, 2)
        k, v = self.kv(y).unflatten(-1, (2, case.kv_heads, SIZE)).permute(2, 0, 3, 1, 4)
        q, k = rotate(q, positions), rotate(k, positions)
        if this is None:
            mixed = whole_attention(q, k, v, case)
        else:
            mask = given_mask(case.mask, x.dtype)
            mixed = slices.attention(
                q,
                k,
                v,
                owner=self,
                attn_mask=None if mask is None else mask[:, this.start : this.stop, : this.stop],
                scale=case.scale,
                enable_gqa=case.kv_heads != HEADS,
                window=case.window,
                document_ids=slices.cut(IDS, 1) if case.packed else None,
            )
        return x + self.out(mixed.transpose(1, 2).flatten(2))


def make_layers(case: Case, dtype: torch.dtype = torch.float64) -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(Layer(case) for _ in range(2)).to(dtype)


def make_input(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(
        BATCH, SEQUENCE, HIDDEN, generator=torch.Generator().manual_seed(2), dtype=dtype
    ).requires_grad_()


def step(layers: nn.ModuleList, x: Tensor, run: Run = plain) -> Tensor:
    x = slices.cut(x, 1)
    for layer in layers:
        x = run(layer, x)
    return x.square().sum()


@cache
def whole_gradients(case: Case, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """The loss, and the gradients of the input and of all parameters, of whole sequences."""
    layers, x = make_layers(case, dtype), make_input(dtype)
    loss = step(layers, x)
    return [loss.detach(), *torch.autograd.grad(loss, [x, *layers.parameters()])]


def gradients(
    case: Case, lengths: Sequence[int], run: Run = plain, dtype: torch.dtype = torch.float64, deferred: bool = False
) -> list[Tensor]:
    layers, x = make_layers(case, dtype), make_input(dtype)
    if deferred:
        convert(layers)
    loss = run_by_slices(lambda: step(layers, x, run), lengths, deferred)
    grads = [tensor.grad for tensor in (x, *layers.parameters())]
    return [loss, *(grad for grad in grads if grad is not None)]


def assert_equal_within(ours: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    """The tolerance is relative to the largest of them: some gradients are zero but for rounding."""
    largest = max(wanted.norm() for wanted in expected)
    for mine, wanted in zip(ours, expected, strict=True):
        assert (mine - wanted).norm() <= tolerance * largest


@pytest.mark.parametrize("number", range(len(CASES)), ids=[*CASES])
def test_gradients_are_those_of_whole_sequences(number: int) -> None:
    """Each case cut in two ways."""
    case = [*CASES.values()][number]
    for lengths in CUTS[number % 2 :: 2]:
        (loss, *grads), (whole_loss, *whole_grads) = gradients(case, lengths), whole_gradients(case)
        assert_equal_within([loss], [whole_loss], 1e-12)
        assert_equal_within(grads, whole_grads, 1e-12)


@pytest.mark.parametrize("name", ["packed with window", "numbers"])
def test_layers_may_be_computed_again(name: str) -> None:
    for run, deferred in ((recomputed, True), (recomputed_reentrant, False)):
        ours, plainly = (gradients(CASES[name], [9, 8, 7], how, torch.float32, deferred) for how in (run, plain))
        for mine, wanted in zip(ours, plainly, strict=True):
            assert torch.equal(mine, wanted)


def test_arithmetic_is_that_of_autocast() -> None:
    case, lengths = CASES["grouped queries"], [9, 8, 7]
    layers, x = make_layers(case, torch.float32), make_input(torch.float32)
    kept: list[torch.dtype] = []

    def under_autocast() -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = step(layers, x)
            kept.extend(tensor.dtype for part in slices.earlier(layers[0]) for tensor in part)
        return loss

    run_by_slices(under_autocast, lengths)
    assert set(kept) == {torch.bfloat16}
    assert x.grad is not None
    expected = whole_gradients(case, torch.float32)[1]
    assert (x.grad - expected).norm() < 0.02 * expected.norm()


def test_whole_sequences_have_the_attention_of_torch() -> None:
    q, k, v = torch.randn(3, BATCH, HEADS, SEQUENCE, SIZE)
    ours = slices.attention(q, k, v, owner="layer")
    assert torch.equal(ours, F.scaled_dot_product_attention(q, k, v, is_causal=True))
    meta = [tensor.to("meta") for tensor in (q, k, v)]  # where torch has no autocast to ask for
    assert slices.attention(*meta, owner="layer").shape == q.shape


def test_dropout_is_drawn_again_as_it_was() -> None:
    """With activations computed again, gradients are those of the first time."""

    def run_with(use: Run) -> list[Tensor]:
        torch.manual_seed(0)
        x = make_input().detach().view(BATCH, SEQUENCE, HEADS, SIZE).transpose(1, 2).requires_grad_()

        def attend() -> Tensor:
            def inner(x: Tensor) -> Tensor:
                return slices.attention(x, x, x, owner="layer", dropout_p=0.5)

            return use(inner, slices.cut(x, 2)).square().sum()

        loss = run_by_slices(attend, [9, 8, 7])
        assert x.grad is not None
        return [loss, x.grad]

    plainly = run_with(plain)
    for use in (recomputed, recomputed_reentrant):
        assert_equal_within(run_with(use), plainly, 1e-12)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"window": 0}, "window must be at least 1, got 0"),
        ({"document_ids": torch.zeros(2, 24)}, r"document_ids must be of shape \[2, 8\] \(batch, length\), got"),
        ({"attn_mask": torch.zeros(8, 8)}, r"attn_mask of shape \[8, 8\] must end in 16"),
        ({"attn_mask": torch.zeros(8, 16, requires_grad=True)}, "attn_mask must not require a gradient"),
        ({"query": torch.zeros(2, 1, 24, 4)}, "keys for its 24 queries and no others, got 8"),
        (dict.fromkeys(("query", "key", "value"), torch.zeros(2, 1, 24, 4)), "slice 1 of 3 has 8 positions, but .* 24"),
    ],
)
def test_mistakes_are_explained(arguments: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = dict.fromkeys(("query", "key", "value"), torch.zeros(2, 1, 8, 4))
    with CarriedState(needs_grad=True).forward(make_slices([8, 8, 8])[1]), pytest.raises(ValueError, match=message):
        slices.attention(**{**given, **arguments}, owner="layer")


class Storages(TorchDispatchMode):
    """Counts the bytes of what operations make, as long as it is there."""

    largest = 0
    """The most bytes that one of them had."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        for result in results if isinstance(results, (tuple, list)) else [results]:
            if isinstance(result, Tensor):
                storage = result.untyped_storage()
                self.largest = max(self.largest, storage.nbytes())
                self._made[storage._cdata] = weakref.ref(storage)
        return results

    def num_bytes(self) -> int:
        return sum(storage.nbytes() for made in self._made.values() if (storage := made()) is not None)


@pytest.mark.parametrize("run", [plain, recomputed])
@pytest.mark.parametrize("name", ["causal", "packed with window"])
def test_slices_save_no_more_than_whole_sequences(name: str, run: Run) -> None:
    """What is joined for each slice would be (n + 1) / 2 times the keys and values, and the masks."""
    case = CASES[name]
    q, k, v = torch.randn(3, BATCH, HEADS, SEQUENCE, SIZE, requires_grad=True).unbind()

    def attend(query: Tensor) -> Tensor:
        documents = slices.cut(IDS, 1) if case.packed else None
        key, value = slices.cut(k, 2), slices.cut(v, 2)
        return slices.attention(query, key, value, owner="layer", window=case.window, document_ids=documents)

    def saved(lengths: Sequence[int]) -> int:
        state = CarriedState(needs_grad=True)
        outputs = []
        with Storages() as storages:
            for this in make_slices(lengths):
                with state.forward(this):
                    outputs.append(run(attend, slices.cut(q, 2)))
            return storages.num_bytes()

    assert 0 < saved([3] * 8) <= saved([24])


def test_causal_attention_alone_makes_no_mask() -> None:
    """It had a number for each pair of positions, which long slices have more of than anything else."""
    tensors = torch.randn(3, 1, 1, 3 * 64, 2, requires_grad=True)

    def attend() -> Tensor:
        return slices.attention(*(slices.cut(one, 2) for one in tensors), owner="layer").square().sum()

    with Storages() as storages:
        run_by_slices(attend, [64, 64, 64])
    assert storages.largest == tensors.nbytes < 4 * 64 * 3 * 64

"""A captured stage computes what the module computes, bit for bit, in one backward or in two."""

from __future__ import annotations

import contextlib
import copy
import cProfile
import importlib
import re
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from tools.against import assert_same_gradients
from tools.graphs import H, Plain, quick_inductor, sequence, skip_without_tracer
from tools.one_layer import backward
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from benchmarks.memory import live_bytes, live_tensors
from megapipe import graph, weight_grad
from megapipe.weight_grad import AT_ONCE, DeferredGrads

skip_without_tracer()

flex = importlib.import_module("torch.nn.attention.flex_attention")  # of which torch.nn.attention has a function, too


class Attention(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.qkv, self.proj, self.dropout = nn.Linear(H, 3 * H), nn.Linear(H, H), dropout

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, -1).permute(2, 1, 3, 0, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout)
        return self.proj(mixed.permute(2, 0, 1, 3).reshape(x.shape))


class Block(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(H), nn.RMSNorm(H)
        self.attention = Attention(dropout)
        self.up, self.down = nn.Linear(H, 4 * H), nn.Linear(4 * H, H, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.down(F.gelu(self.up(self.mlp_norm(x)))))


class Tied(nn.Module):
    """Embedding and head are one."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.block, self.head = nn.Embedding(11, H), Block(), nn.Linear(H, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.block(self.embedding(tokens)))


class SameGradient(nn.Module):
    """Two parameters receive one and the same tensor, another one a view that repeats it, a third what comes in.
    Two more receive views of one tensor, which were added to in place twice over."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.randn(5, 2, H)) for _ in range(3))
        self.repeated = nn.Parameter(torch.randn(5, 2, 1))
        self.p, self.q = nn.Parameter(torch.randn(2, H)), nn.Parameter(torch.randn(1, 2, H))
        self.linear = nn.Linear(H, H)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x + self.a + self.b + self.repeated) + self.c + self.repeated.sum() + (self.p[None] + self.q)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(2, 2, 3, padding=1), nn.BatchNorm1d(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x)).relu()


class NormedInGroups(nn.Module):
    """The gradient that reaches the norm is transposed. The tracer takes that behind a dropout for contiguous, and so
    left out the copy that the kernel needs: gradients of weights were wrong. So were those behind a roll."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(2, 8)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(self.norm(x), 0.5).transpose(0, 1).contiguous().sin()


class WeightNormed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = weight_norm(nn.Conv2d(8, 8, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.roll(1, 2))


class NormedAcross(nn.Module):
    """A batch norm of a transposed tensor. The tracer takes the strides of its result for others than it has, so that a
    view in the graph was none, and the first call failed."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(H), nn.Linear(H, H)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x.transpose(1, 2)).transpose(1, 2))


class Outputs(nn.Module):
    """A dict, one output an integer, one no tensor, one a view of another, one the input itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(H, H)

    def forward(self, x: Tensor, scale: float = 1.0, flag: bool = False) -> dict[str, Any]:
        y = self.linear(x) * scale
        return {"y": y, "best": y.argmax(-1), "none": None, "row": y[0], "x": x, "flag": flag}


class Doubling(torch.autograd.Function):
    """A custom Function whose backward is not that of its forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * 3 + x * 0


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.unused = nn.Linear(H, H), nn.Linear(H, H)

    def forward(self, x: Tensor) -> Tensor:
        return Doubling.apply(self.linear(x).relu_())


class Checkpointed(Block):
    """Its dropout draws its numbers twice; with others, the gradients would be wrong."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class Rotary(nn.Module):
    """As in Llama, by complex numbers. A conjugate looked like the tensor it is of, in shape, stride, offset and dtype,
    and was dropped as a view that changes nothing: gradients were wrong, silently."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(H, H)
        self.register_buffer("angles", torch.polar(torch.ones(H // 2), torch.arange(H / 2)))

    def forward(self, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(self.linear(x).unflatten(-1, (H // 2, 2)))
        return torch.view_as_real(pairs * self.angles).flatten(-2)


class TimesNumber(Plain):
    """The conjugate of a number is a view of nothing, at which the capture ended with an IndexError."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.irfft(torch.fft.rfft(super().forward(x)) * (1 + 2j), n=H)


class BufferToo(Plain):
    """A parameter that is a buffer too had two names, which torch's functional_call refuses."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("again", self.linear.weight)


class HandsOutWhatItSaved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, p: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x + p.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        (x,) = ctx.saved_tensors
        return grad, x.reshape(10, H)


class SavedIsGradient(nn.Module):
    """A saved tensor handed out as a gradient became `.grad`, and the next B added to it in place. The W of the first
    read it only afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.linear = nn.Linear(H, H), nn.Linear(H, H)
        self.p = nn.Parameter(torch.randn(10, H))

    def forward(self, x: Tensor) -> Tensor:
        y = self.before(x).tanh()
        return self.linear(y) + HandsOutWhatItSaved.apply(y, self.p)


class DropsNothing(Plain):
    """Recomputing multiplied with the mask over 1 - p, whether the dropout was in training or not."""

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(torch.native_dropout(self.linear(x), 0.5, False)[0])


def tokens() -> Tensor:
    return torch.randint(11, (5, 2))


def channels_last() -> Tensor:
    return torch.randn(2, 8, 6, 6).to(memory_format=torch.channels_last).requires_grad_()


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Any, ...]]]] = {
    "with dropout": (lambda: Block(dropout=0.5), lambda: (sequence(),)),
    "checkpointed, with dropout": (lambda: Checkpointed(dropout=0.5), lambda: (sequence(),)),
    "tied": (Tied, lambda: (tokens(),)),
    "same gradient": (SameGradient, lambda: (sequence(),)),
    "batch norm": (Normed, lambda: (torch.randn(3, 2, 8, requires_grad=True),)),
    "batch norm, transposed": (NormedAcross, lambda: (torch.randn(3, 8, H, requires_grad=True),)),
    "group norm, dropout, transposed": (NormedInGroups, lambda: (torch.randn(3, 8, 4, requires_grad=True),)),
    "weight norm, rolled": (WeightNormed, lambda: (channels_last(),)),
    "outputs": (Outputs, lambda: (sequence(), 3.0)),
    "custom Function, unused": (Custom, lambda: (sequence(),)),
    "complex": (Rotary, lambda: (sequence(),)),
    "complex number": (TimesNumber, lambda: (sequence(),)),
    "parameter and buffer": (BufferToo, lambda: (sequence(),)),
    "saved is gradient": (SavedIsGradient, lambda: (sequence(),)),
    "drops nothing": (DropsNothing, lambda: (sequence(),)),
}


WAYS = {"with dropout": "autocast", "tied": "autocast", "batch norm": "recompute", "drops nothing": "recompute"}


@pytest.mark.parametrize(("case", "way"), [(case, WAYS.get(case, "")) for case in CASES])
def test_equal_to_eager(case: str, way: str) -> None:
    """Two microbatches in one backward each and two whose Bs come before their Ws, either pair first, accumulated."""
    torch.manual_seed(0)
    make, inputs_of = CASES[case]
    eager = make()  # 0.5 of them dropped, so that the others are doubled: exact in bfloat16 too
    around = torch.autocast("cpu", torch.bfloat16) if way == "autocast" else nullcontext()
    with around:
        # In a capture, layers that defer their weight gradients are plain ones.
        twin = weight_grad.convert(copy.deepcopy(eager))
        captured = graph.capture(twin, inputs_of(), recompute=way == "recompute")
    assert isinstance(captured, type(eager))
    assert captured.state_dict().keys() == eager.state_dict().keys()
    for is_first_split in (False, True):
        eager.zero_grad(), captured.zero_grad()
        for is_split in (is_first_split, not is_first_split):
            pair = [inputs_of() for _ in range(2)]
            assert_same(*(run_pair(model, pair, around, is_split and model is captured) for model in (captured, eager)))
        assert_same_gradients([captured], eager)
    assert_same(list(captured.buffers()), list(eager.buffers()))


def run_pair(model: nn.Module, pair: list[tuple[Any, ...]], around: Any, is_split: bool) -> list[Any]:
    """Outputs, and gradients of inputs."""
    results, waiting = [], []
    for number, inputs in enumerate(pair):
        again = [i.detach().requires_grad_(i.requires_grad) if isinstance(i, Tensor) else i for i in inputs]
        torch.manual_seed(number)
        with around:
            output = model(*again)
        waiting.append(DeferredGrads())
        with waiting[-1] if is_split else AT_ONCE:
            scalar(output).backward()
        results.append((output, [i.grad for i in again if isinstance(i, Tensor)]))
    for deferred in waiting:
        deferred.run()
    return results


def scalar(output: Any) -> Tensor:
    tensors = output.values() if isinstance(output, dict) else [output]
    return sum((t.float().sin().sum() for t in tensors if isinstance(t, Tensor) and t.requires_grad), torch.zeros(()))


def assert_same(ours: Any, theirs: Any, name: str = "") -> None:
    if isinstance(theirs, dict):
        assert ours.keys() == theirs.keys()
        ours, theirs = list(ours.values()), list(theirs.values())
    if isinstance(theirs, (list, tuple)):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs):
            assert_same(one, other, name)
    elif isinstance(theirs, Tensor):
        assert torch.equal(ours, theirs), f"{name}: {(ours - theirs).abs().max()}"
    else:
        assert ours == theirs, name


def test_other_modes_are_captured_when_they_are_run() -> None:
    torch.manual_seed(0)
    eager = nn.Sequential(Normed(), nn.Dropout(0.5))
    captured = graph.capture(copy.deepcopy(eager), (torch.randn(3, 2, 8, requires_grad=True),))
    x = torch.randn(3, 2, 8, requires_grad=True)
    for model in (eager, captured):
        model.eval()
    with torch.no_grad():
        assert_same(captured(x), eager(x))
    captured.train(), eager.train()
    for model in (eager, captured):
        model[0].conv.weight.requires_grad_(False)
        torch.manual_seed(1)
        with torch.no_grad():
            model(x)
        model(x).sum().backward()
    assert captured[0].conv.weight.grad is None
    assert_same(captured[0].conv.bias.grad, eager[0].conv.bias.grad)
    assert_same(list(captured.buffers()), list(eager.buffers()))


def test_what_a_backward_keeps_for_the_weights() -> None:
    """Between B and W at most 1.15 of what the forward saved; nothing after W."""
    stage = graph.capture(Block(), (sequence(),))
    x, deferred = sequence(), DeferredGrads()
    before = live_tensors()
    output = stage(x)
    saved = live_bytes(before)
    grad = torch.randn_like(output)
    with deferred:
        output.backward(grad)
    between = live_bytes(before)
    del output, grad
    x.grad = None
    gradients = sum(p.grad.nbytes for p in stage.parameters() if p.grad is not None)
    assert between - gradients < 1.15 * saved
    deferred.run()
    assert live_bytes(before) == sum(p.nbytes for p in stage.parameters())
    output = stage(x)
    output.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="run a second time"):
        output.sum().backward()


def test_nothing_to_train() -> None:
    eager = Block().requires_grad_(False)
    captured = graph.capture(copy.deepcopy(eager), (sequence().detach(),))
    x = sequence().detach()
    output = captured(x)
    assert_same(output, eager(x))
    assert not output.requires_grad


def test_recompute_saves_a_quarter_at_most() -> None:
    """With dropout, in attention too: bit for bit, and the same numbers drawn."""
    torch.manual_seed(0)
    eager = Block(dropout=0.1)
    stages = eager, graph.capture(copy.deepcopy(eager), (sequence(),), recompute=True)
    x, grad = sequence(), torch.randn(5, 2, H)
    results, saved = [], []
    for stage in stages:
        for split in (False, True):
            again = x.detach().requires_grad_()
            torch.manual_seed(1)
            before = live_tensors()
            output = stage(again)
            saved.append(live_bytes(before) - output.nbytes)
            drawn = torch.rand(1)
            backward(output, grad, split)
        results.append([output, drawn, again.grad, *(p.grad for p in stage.parameters())])
    assert_same(*results)
    assert saved[0] >= 4 * saved[-1], saved


def test_no_copies_of_weights_are_saved_under_autocast() -> None:
    """Each microbatch in flight kept a copy of every weight in bfloat16: as much memory as the weights themselves, with
    two of them."""
    torch.manual_seed(0)
    x = torch.randn(3, 2, H, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        captured = graph.capture(Block(), (x,))
        graphs = captured.__dict__["_megapipe_graphs"].graphs()
        output = captured(x)
    weights = {parameter.shape for parameter in captured.parameters() if parameter.dim() == 2}
    weights |= {shape[::-1] for shape in weights}
    saved = [value.shape for value in output.grad_fn.saved if value is not None]
    assert saved
    assert not weights & set(saved)
    matrices = sum(parameter.dim() == 2 for parameter in captured.parameters())
    assert sum(n < graphs.num_weights for n in graphs.partition.read) >= matrices


PARTS = [
    f"{which}{kind}_{what}" for which in ("", "full_") for kind in ("kv", "q") for what in ("num_blocks", "indices")
]


class Flexible(nn.Module):
    """FlexAttention, with the tensors of its mask in buffers."""

    def __init__(self, is_registered: bool) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(H, 3 * H), nn.Linear(H, H)
        self.mask = flex.create_block_mask(_causal, None, None, 128, 128, device="cpu")
        self.is_registered = is_registered
        for part in PARTS:
            if getattr(self.mask, part) is not None:
                self.register_buffer(part, getattr(self.mask, part))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, -1).permute(2, 1, 3, 0, 4)
        mask = self.mask
        if self.is_registered:
            parts = {part: getattr(self, part, None) for part in PARTS}
            mask = flex.BlockMask((128, 128), **parts, BLOCK_SIZE=mask.BLOCK_SIZE, mask_mod=_causal)
        mixed = flex.flex_attention(q, k, v, block_mask=mask)
        return x + self.proj(mixed.permute(2, 0, 1, 3).reshape(x.shape))


def _causal(batch: Any, head: Any, q: Any, k: Any) -> Any:
    return q >= k


def test_flex_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its capture was refused because torch, which compiles it, puts the random numbers back."""
    monkeypatch.setattr(flex, "_validate_device", lambda *_: None)
    torch.manual_seed(0)
    eager = Flexible(True)
    x = torch.randn(128, 2, H)
    captured = graph.capture(copy.deepcopy(eager), (x.clone().requires_grad_(),))
    for split in (False, True):
        gradients = []
        for model in (eager, captured):
            model.zero_grad()
            mine = x.clone().requires_grad_()
            backward(model(mine).square().sum(), split=split and model is captured)
            gradients.append([mine.grad, *(parameter.grad for parameter in model.parameters())])
        assert_same(gradients[1], gradients[0])
    with pytest.raises(
        graph.CaptureError, match=r"test_graph_capture.py:\d+ \(mixed = flex.flex_att.* uses a tensor that"
    ):
        graph.capture(Flexible(False), (x.clone().requires_grad_(),))


# What it once got wrong


class DrawsMore(Plain):
    def forward(self, x: Tensor) -> Tensor:
        F.dropout(x)
        return super().forward(x) * torch.rand(H)


def test_numbers_that_nothing_reads_are_drawn() -> None:
    """They were not, so what was drawn after them was something else."""
    stage, x = DrawsMore(), sequence()
    for options in ({}, {"recompute": True}):
        captured = graph.capture(copy.deepcopy(stage), (x,), **options)
        for has_gradients in (True, False):
            with torch.set_grad_enabled(has_gradients):
                outputs = [(torch.manual_seed(0), one(x))[1] for one in (stage, captured)]
            assert torch.equal(*outputs)


def test_recurrent_layers() -> None:
    """They look up their weights anew, which was taken for keeping tensors; the CPU's own LSTM has a workspace in some
    calls only, and one that read its stage's input ended in a StopIteration."""
    stage, x = nn.LSTM(H, H), sequence().detach()
    captured = graph.capture(copy.deepcopy(stage), (x,))
    for one in (stage, captured):
        one(x)[0].square().sum().backward()
    torch.testing.assert_close([p.grad for p in captured.parameters()], [p.grad for p in stage.parameters()])


def test_an_example_that_was_expanded() -> None:
    """Later arguments were copied into its layout, where all rows are one."""
    stage, x = graph.capture(Plain(), (torch.randn(1, H).expand(2, H),)), torch.randn(2, H)
    assert torch.equal(stage(x), stage.linear(x))


class Inverting(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) @ torch.linalg.inv(self.linear.weight)


def test_operators_with_effects() -> None:
    """Where torch orders checks of values by tokens, an AssertionError of ours named one."""
    with contextlib.suppress(graph.CaptureError):
        graph.capture(Inverting(), (torch.randn(2, H),))


def test_captured_under_a_profiler() -> None:
    """Under `python -m cProfile` the capture ended with a TypeError: 'Profile' object is not callable."""
    with cProfile.Profile() as profile:
        graph.capture(Plain(), (torch.randn(2, H),))
    assert profile.getstats()


class Scales(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scales", torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scales.sum() / len(self.scales)


def test_a_buffer_of_another_shape() -> None:
    """The shapes of parameters and buffers are in the graph, and nobody looked whether they were still the same."""
    stage = graph.capture(Scales(), (sequence(),))
    stage.scales = torch.ones(4)
    x = sequence()
    assert torch.equal(stage(x), stage.linear(x))


def test_captured_again_in_inference_mode() -> None:
    """A mode that was first run in validation, under torch.inference_mode, was captured without a backward. Run in
    training afterwards, it had none."""
    stage = graph.capture(Plain(), (sequence(),)).eval()
    with torch.inference_mode():
        stage(sequence())
    stage(sequence()).sum().backward()
    assert stage.linear.weight.grad is not None


def test_copies_of_a_captured_stage() -> None:
    """Which modules a stage has was kept by where they lie in memory, so a copy, as averages of weights are kept in,
    was refused: it had "other modules"."""
    module = nn.Sequential(Plain(), nn.GELU(), Plain(), nn.Dropout(0.5))
    plain, captured = copy.deepcopy(module), graph.capture(module, (sequence(),))
    captured(sequence())
    copied = copy.deepcopy(captured)
    for one in (plain, copied):
        torch.manual_seed(3)
        for parameter in one.parameters():
            nn.init.normal_(parameter)
    for is_training in (True, False):  # evaluation is captured after it was copied
        for x in (sequence(), sequence()):
            results = []
            for one in (plain, copied):
                torch.manual_seed(4)
                one.train(is_training)(x).sin().sum().backward()
                results.append([x.grad, *(parameter.grad for parameter in one.parameters())])
                x.grad = None
            assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
    assert all(parameter.grad is None for parameter in captured.parameters())
    copied[0] = Plain()
    with pytest.raises(ValueError, match="its part 0 has been exchanged"):
        copied(sequence())
    captured(sequence())


def test_an_input_changed_between_b_and_w() -> None:
    """Autograd watches what a stage saved until B, and nobody watched it from there to W: the gradient was wrong."""
    stage, x, deferred = graph.capture(Plain(), (sequence(),)), sequence(), DeferredGrads()
    output = stage(x)
    with deferred:
        output.sum().backward()
    x.detach().zero_()
    with pytest.raises(RuntimeError, match="was changed in place between its B and its W"):
        deferred.run()


# Compiled


def test_stages_of_the_same_shape_share_their_compiled_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The forward, the input gradients and a weight gradient are compiled once for both."""
    compiled: list[str] = []

    def compile_nothing(module: GraphModule, examples: list[Any], what: str) -> Callable[..., Any]:
        compiled.append(what)
        return module.forward

    monkeypatch.setattr(graph.compile, "_compile", compile_nothing)
    monkeypatch.setattr(graph.compile, "_compiled", {})
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(H, H), nn.Dropout(0.5))
    stages = [graph.capture(copy.deepcopy(plain), (sequence(),), compile="inductor") for _ in range(2)]
    x, grad = sequence(), torch.randn(5, 2, H)
    results = []
    for stage in (plain, *stages):
        again = x.detach().requires_grad_()
        torch.manual_seed(1)
        backward(output := stage(again), grad)
        results.append([output, again.grad, *(p.grad for p in stage.parameters())])
    for ours in results[1:]:
        assert_same(ours, results[0])
    names = ["the forward", "the input gradients", "a weight gradient"]
    assert compiled == [f"{name} of the stage Sequential" for name in names]


def test_inductor(caplog: pytest.LogCaptureFixture) -> None:
    """Compiles a graph, says so, draws the same random numbers, and frees what it needs no more: each argument was held
    until the graph had ended. The graph has kernels of torch's alone, of which none is compiled for seconds."""
    alive = []

    @torch.library.custom_op("megapipe_tests::look", mutates_args=(), schema="(Tensor x) -> Tensor")
    def look(x: Tensor) -> Tensor:
        alive.append(argument() is not None)
        return x.clone()

    look.register_fake(torch.empty_like)
    x = torch.randn(H, H)
    parts = graph.partition(graph.trace_joint(lambda x: (look(x.mm(x)), torch.rand(3)), [x], "a test"))
    with caplog.at_level("INFO", "megapipe"), quick_inductor():
        compiled = graph.compile_graph(parts.forward_only, "a graph")
    torch.manual_seed(1)
    drawn = torch.rand(3)
    torch.manual_seed(1)
    arguments = [x.clone()]
    argument = weakref.ref(arguments[0])
    product, found = compiled(arguments)
    assert alive == [False]
    torch.testing.assert_close(product, x.mm(x))
    assert torch.equal(found, drawn)
    assert arguments == [], "emptied"
    begun, ended = (record.message for record in caplog.records if record.name.startswith("megapipe."))
    assert re.fullmatch(r"compiling a graph, \d+ operators", begun)
    assert re.fullmatch(r"compiled a graph in \d+\.\d s", ended)
    inductor = importlib.import_module("torch._inductor.config")
    with (
        inductor.patch({"cpp.cxx": (None, "/no/such/g++"), "force_disable_caches": True}),
        pytest.raises(RuntimeError, match=r'install one .* or capture without compile="inductor"'),
    ):
        graph.compile_graph(graph.partition(graph.trace_joint(lambda x: (x.sin(),), [x], "a test")).forward, "a test")


def test_inductor_of_a_split_backward(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """F, B and W are compiled; the Bs of two microbatches come before their Ws. It was tried on GPUs only."""
    monkeypatch.setattr(graph.compile, "_compiled", {})
    torch.manual_seed(0)
    eager = nn.Sequential(nn.Linear(H, H, bias=False), nn.Linear(H, H, bias=False))
    pair = [(sequence(),) for _ in range(2)]
    with caplog.at_level("INFO", "megapipe"), quick_inductor():
        captured, deferred = graph.capture(copy.deepcopy(eager), (sequence(),), compile="inductor"), DeferredGrads()
        with deferred:
            scalar(captured(sequence())).backward()
        assert all(p.grad is None for p in captured.parameters())
        deferred.run()
        captured.zero_grad()
        found, expected = (run_pair(one, pair, nullcontext(), one is captured) for one in (captured, eager))
    compiled = "".join(record.message for record in caplog.records if record.message.startswith("compiled "))
    assert all(what in compiled for what in ("the forward of", "the input gradients of", "a weight gradient of"))
    found.append([p.grad for p in captured.parameters()])
    expected.append([p.grad for p in eager.parameters()])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_inductor_makes_no_cuda_graphs_of_its_own() -> None:
    """A user's setting for the whole process reached captured stages, too: a replay would write to an output that a
    message still reads."""
    inductor = importlib.import_module("torch._inductor")
    settings = []

    def look(module: GraphModule, examples: Any) -> Any:
        settings.append(inductor.config.triton.cudagraphs)
        return module.forward

    traced = graph.partition(graph.trace_joint(lambda x: (x.cos(),), [torch.ones(3)], "a test")).forward
    with inductor.config.patch({"triton.cudagraphs": True}), mock.patch.object(inductor, "compile", look):
        graph.compile_graph(traced, "a test")
    assert settings == [False]

"""Modules cut by themselves: their code is that of plain_models.py and of rows below, which knows nothing of stages."""

from __future__ import annotations

import copy
import re
import warnings
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fuzz.forwards import Forward, judge
from tools import against, plain_models
from tools.against import use_groups
from tools.ranks import on_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import megapipe
from megapipe import CannotSplitError, parallel_state, split
from megapipe.proving.whole import Whole

D = 8


def loss_of(output: Tensor) -> Tensor:
    return output.float().pow(2).mean() + output.float().mean()


def step(batches: Any, chunk: nn.Module) -> Any:
    return chunk(*next(batches)), lambda output: (loss_of(output), loss_of(output).detach())


def run(schedule: str, chunks: list[Any], batches: list[Any], **options: Any) -> list[Tensor]:
    train = megapipe.get_forward_backward_func(schedule)
    data = {"data_iterator": iter(batches), "num_microbatches": len(batches)}
    losses: list[Tensor] = train(forward_step_func=step, model=chunks, **data, **options)
    return losses


def make(name: str) -> tuple[nn.Module, list[tuple[Tensor, ...]]]:
    make_model, make_batch = plain_models.MODELS[name]
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    return make_model(), [make_batch(generator) for _ in range(4)]


def check(
    model: nn.Module, batches: list[tuple[Any, ...]], schedule: str, tied: tuple[str, ...] = (), **options: Any
) -> Any:
    """Losses, gradients and names, against the model itself, in training and then in evaluation."""
    chunks = split(model, batches[0], schedule, **options)
    got = [(name, parameter) for chunk in chunks for name, parameter in chunk.named_parameters(remove_duplicate=False)]
    torch.manual_seed(3)
    losses = run(schedule, chunks, batches)
    gradients = {name: parameter.grad for name, parameter in got}
    model.zero_grad()
    torch.manual_seed(3)
    expected, wanted = Whole([model], step).step(batches), against.gradients(model)
    assert losses == (expected if losses else [])
    for name, gradient in gradients.items():
        against.assert_close(gradient, wanted[name], 1e-5 if name in tied else 0.0, name)
    for one in (model, *chunks):
        one.eval()
    torch.backends.mha.set_fastpath_enabled(False)  # which rounds otherwise, and which torch.export does not take
    torch.manual_seed(3)
    losses = run(schedule, chunks, batches, forward_only=True)
    torch.manual_seed(3)
    assert losses == (Whole([model], step).step(batches, forward_only=True) if losses else [])
    return chunks


@pytest.mark.parametrize(
    ("num_ranks", "name", "schedule", "num_chunks"),
    [(1, "encoder-decoder", "interleaved_1f1b", 4), (2, "unet", "zbv", None)],
)
@on_ranks()
def test_gradients_are_those_of_the_whole_module(
    rank: int, num_ranks: int, name: str, schedule: str, num_chunks: int | None
) -> None:
    use_groups()
    model, batches = make(name)
    chunks = check(model, batches, schedule, tied=("shared.weight",), num_chunks=num_chunks)
    assert all(any(True for _ in chunk.parameters()) for chunk in chunks)
    assert {name for chunk in chunks for name in chunk.state_dict()} <= model.state_dict().keys()


@on_ranks(2)
def test_a_view_of_what_was_strided(rank: int) -> None:
    """Messages are contiguous: transposed back, what was strided where it was made cannot be viewed any more. In a
    region with autocast neither."""

    def run(net: Net, x: Tensor) -> Tensor:
        strided = net.layers[0](x).transpose(0, 1)
        y = net.head(net.layers[1](strided)).reshape(15, D) + strided.transpose(0, 1).view(15, D)
        with torch.autocast("cpu", torch.bfloat16):
            return y + strided.transpose(0, 1).view(15, D) @ net.head.weight

    use_groups()
    torch.manual_seed(0)
    check(Net(run), [(torch.randn(3, 5, D),) for _ in range(4)], "1f1b", points=["layers.1"])


class ConvNeXtBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.linear = nn.Conv2d(D, D, 7, padding=3, groups=D), nn.LayerNorm(D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        y = F.gelu(self.linear(self.norm(self.conv(x).permute(0, 2, 3, 1))))
        return y.permute(0, 3, 1, 2) + x


@on_ranks(2)
def test_channels_that_lie_last(rank: int) -> None:
    """They arrived with channels first in memory, and sums over them were added up in another order than in the whole
    model, as in torchvision's ConvNeXt. Each message was copied before it was sent, too."""
    use_groups()
    torch.manual_seed(0)
    model = nn.Sequential(ConvNeXtBlock(), ConvNeXtBlock())
    check(model, [(torch.randn(2, D, 16, 16),) for _ in range(4)], "1f1b", points=["1"])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l, self.n, self.aux = nn.Linear(D, D), nn.LayerNorm(D), torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        y = x + torch.tanh(self.l(self.n(x)))
        self.aux = y.pow(2).mean()
        return y


class Net(nn.Module):
    """Three blocks, around which `run` is the forward."""

    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block() for _ in range(3)])
        self.head = nn.Linear(D, D)
        self.emb = nn.Embedding(16, D)
        self.register_buffer("mean", torch.zeros(D))
        self.run = run

    def forward(self, *arguments: Any) -> Tensor:
        return self.run(self, *arguments)


def through(net: Net, x: Tensor) -> Tensor:
    for layer in net.layers:
        x = layer(x)
    return x


def test_points_and_tied_weights() -> None:
    model = Net(lambda net, tokens: net.out(through(net, net.emb(tokens))))
    model.out = nn.Linear(D, 16, bias=False)
    model.out.weight = model.emb.weight
    batches = [TOKENS() for _ in range(4)]
    first, last = check(model, batches, "zbv", tied=("emb.weight", "out.weight"), points=["layers.1"])
    assert first.state_dict().keys() >= {"emb.weight", "layers.0.l.weight"}
    assert not any(name.startswith(("out", "layers.1", "layers.2")) for name in first.state_dict())
    assert "out.weight" in last.state_dict()


def reads_a_weight_again(net: Net, tokens: Tensor) -> Tensor:
    return F.linear(through(net, net.emb(tokens)), net.emb.weight)


X, TOKENS = (lambda: (torch.randn(3, 5, D),)), (lambda: (torch.randint(16, (3, 5)),))


BLOCK = "made[-1] + own(MLP)(made[-1])"
SUM = 'torch._foreach_add_(other["sum"], [made[-1]]); z = made[-1]'
ROWS: dict[str, tuple[str, ...]] = {
    "what is given back, kept or drawn between layers": (
        "torch.randn_like(made[0])",
        "made[0] + made[-1]",
        BLOCK,
        "self.last = made[-1].pow(2).mean()",
        "F.dropout(made[-2], 0.0, False)",
        BLOCK,
        "made[-1] + self.last - made[1]",
    ),
    "an input and a list that are written to": (
        'made[0].mul_(2.0); other["sum"] = [made[0] * 0]',
        BLOCK,
        SUM,
        f"{BLOCK} + made[0]",
        SUM,
        'other["sum"][0] + made[0]',
    ),
    # Nothing of an export is left in the module: a lazy cache was, as a fake tensor; what a forward writes to had been
    # written to, so that counts of batches began at 1.
    "parts, buffers and caches that are written to": (
        'vars(self).setdefault("table", torch.arange(D) / D); z = made[-1] * self.table',
        'z = torch.zeros(T, D); z[:, ::2] = 1; other["first"] = z.clone(); z[:, 1::2] = 2',
        "made[1] + made[-1]",
        BLOCK,
        "z = own(MLP)(made[-1]).clone(); z[:, 0] = made[-1][:, 1]",
        "self.mean = 0.9 * self.mean + made[0].detach().mean((0, 1)); self.plain.add_(1); z = made[-1] * self.plain",
        'own(nn.BatchNorm1d, T)(made[-1]) + other["first"]',
    ),
    "regions without gradients or with autocast, and checkpoints": (
        "with torch.no_grad(): z = own(MLP)(made[0]).abs().mean()",
        'with torch.autocast("cpu", torch.bfloat16): z = own(MLP)(made[0])',
        "made[-1].float() / made[-2]",
        "checkpoint(lambda x, m: checkpoint(m, x, use_reentrant=False), made[-1], own(MLP), use_reentrant=False)",
        BLOCK,
    ),
    "weights in a list, and read again": (
        "torch.tanh(own(nn.Linear, D, D)(made[-1]))",
        'vars(self).setdefault("cache", [own(Scale, D, D).weight]); z = made[-1] @ self.cache[0]',
        *["torch.tanh(linear(self)(made[-1]))"] * 2,
        "F.linear(made[-1], linear(self).weight)",
        "made[-1] + F.linear(made[-1], self.head.bias)[..., None]",
    ),
}


@pytest.mark.parametrize("row", ROWS)
def test_rows(row: str) -> None:
    """These were done wrongly without a word, or crashed."""
    judged = judge(Forward("split zbv", ROWS[row]))
    assert judged == "right" or (not EXPORTS_MORE and "was assigned during export" in judged)


def reads_a_weight_by_its_second_name(net: Net, x: Tensor) -> Tensor:
    net.layers[1].l.weight = net.layers[2].l.weight = net.layers[0].l.weight
    with torch.no_grad():
        net.layers[1](x)
    return net.layers[2](x)


def test_a_weight_of_several_names_has_the_first() -> None:
    """It had the one of the module that a stage calls, and no gradient under that which optimizers know."""
    model = Net(reads_a_weight_by_its_second_name)
    reads_a_weight_by_its_second_name(model, X()[0])
    (chunk,) = split(model, X(), "no_pipelining", num_chunks=1)
    assert {*dict(chunk.module.named_parameters())} == {*dict(model.named_parameters())}


def test_a_shared_weight_that_is_unfrozen_later() -> None:
    """Its copies were not summed, and had lost the marks by which optimizers group parameters."""
    model, batches = Net(reads_a_weight_again), [TOKENS() for _ in range(4)]
    model.emb.weight.no_decay = True
    model.emb.weight.requires_grad_(False)
    chunks = split(model, batches[0], "zbv")
    copies = [p for chunk in chunks for name, p in chunk.named_parameters() if name.endswith("emb.weight")]
    assert [(p.no_decay, p.requires_grad) for p in copies] == [(True, False)] * 2
    assert copies[0] is not copies[1], "optimizers of both stages would step it twice"
    assert all(len(chunk.tied_weights) == 1 for chunk in chunks)
    model.emb.weight.requires_grad_(True).register_hook(lambda grad: 2 * grad)
    with pytest.raises(CannotSplitError, match=r"emb.weight has hooks, and several stages read it"):
        split(model, batches[0], "zbv")


@on_ranks(1)
def test_layers_that_are_sharded(rank: int) -> None:
    """They are never called, so nothing waited for their parameters: an error of mixed tensors."""
    use_groups()
    model, batches = Net(reads_a_weight_again), [TOKENS() for _ in range(4)]
    expected = [loss_of(model(*batch)) for batch in batches]
    torch.stack(expected).mean().backward()
    wanted = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    (chunk,) = split(model, batches[0], "1f1b")
    for one in (chunk.module.layers.get_submodule("1"), chunk):
        fully_shard(one, mesh=parallel_state.get_data_parallel_mesh())
    assert run("1f1b", [chunk], batches, forward_only=True) == expected
    assert run("1f1b", [chunk], batches) == expected
    for name, grad in wanted.items():
        torch.testing.assert_close(chunk.module.get_parameter(name).grad.full_tensor(), grad)


def test_a_part_called_module() -> None:
    """A stage with nothing else was taken for a wrapper: names that others know lacked it, and tied weights were on no
    stage. What a wrapper wraps would be computed again, which here is never called."""
    torch.manual_seed(0)
    inner = Net(lambda net, tokens: F.linear(through(net, emb(tokens)), emb.weight))
    emb = inner.emb  # which the forward has from a closure
    model = nn.Sequential(OrderedDict(module=inner, out=nn.Linear(16, D)))
    config = megapipe.PipelineConfig(recompute="all")
    check(model, [TOKENS() for _ in range(4)], "zbv", tied=("module.emb.weight",), config=config)


def test_one_tensor_twice_in_the_example() -> None:
    """They became one argument: the second was left out of every step."""
    x, y = torch.randn(3, 5, D), torch.randn(3, 5, D)
    model = Net(lambda net, x, y: net.head(x) - y)
    (chunk,) = split(model, (x, x), "no_pipelining")
    assert torch.equal(chunk.module(x, y), model(x, y))


def test_a_parameter_that_is_returned() -> None:
    """The last stage had no name for it: a KeyError."""
    first, last = split(Net(lambda net, x: (net.head(net.layers[0](x)), net.emb.weight)), X(), "zbv")
    assert isinstance(last.module(first.module(X()[0]))[1], nn.Parameter)


def test_copies_of_a_stage() -> None:
    """As averages of weights are made. torch warned of how its structure of the arguments is copied, on every rank."""
    (chunk,) = split(Net(lambda net, x: net.head(x)), X(), "no_pipelining")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        average = copy.deepcopy(chunk)
    (x,) = X()
    before = average.module(x)
    with torch.no_grad():
        for parameter in chunk.parameters():
            parameter.zero_()
    assert torch.equal(average.module(x), before)
    assert not torch.equal(chunk.module(x), before)


def draws_like(net: Net, x: Tensor) -> Tensor:
    """As torchvision's stochastic depth does."""
    y = net.head(through(net, x))
    return y * torch.empty(3, 1, 1, dtype=y.dtype).bernoulli_(0.7).div_(0.7)


def test_autocast_and_recomputation() -> None:
    """The numbers that a forward makes with `x.dtype` were float32 in a stage, and bfloat16 in the module: stochastic
    depth rounded otherwise, and what came behind it was computed in float32."""
    torch.manual_seed(0)
    model, batches = Net(draws_like), [X() for _ in range(4)]
    config = megapipe.PipelineConfig(enable_autocast=True, autocast_dtype=torch.bfloat16)
    plain, half = split(model, batches[0], "zbv"), split(model, batches[0], "zbv", config=config)
    losses = []
    for chunks, recompute in ((plain, None), (plain, "all"), (half, None)):
        chunks[0].config.recompute = chunks[1].config.recompute = recompute
        torch.manual_seed(1)
        losses.append(run("zbv", chunks, batches))
    assert losses[0] == losses[1] != losses[2]
    torch.manual_seed(1)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        outputs = [model(*batch) for batch in batches]
    assert outputs[0].dtype == torch.bfloat16
    assert losses[2] == [loss_of(output) for output in outputs]


ADD = "with torch.no_grad(): torch.add(made[1], made[-1].detach(), out=made[1])"
REFUSED: dict[str, tuple[str | tuple[str, ...], str]] = {
    "out of two views": (
        (
            'z = made[0] * 0; other["view"] = z.view(-1)',
            "made[0] * 1.0",
            *[BLOCK, ADD] * 4,
            'made[-1] + other["view"].view(B, T, D)',
        ),
        r"stage 1 writes to memory that view and .* share, which stage 1 receives apart",
    ),
    "a buffer on two stages": (
        (f"{BLOCK} + self.mean.add_(1)", f"{BLOCK} + self.mean.add_(1)"),
        r"stage \d writes to mean, which stages \[\d.*\] read",
    ),
    "a buffer of another stage in evaluation": (
        (
            "made[0] if self.training else made[0] - self.mean",
            BLOCK,
            BLOCK,
            "z = made[-1]; self.training and self.mean.copy_(z.detach().mean((0, 1)))",
        ),
        r"stage 1 writes to mean, .* \[0, 1\]",  # the first stage read what the buffer had been at the split
    ),
    "a seed": (
        "torch.manual_seed(3); z = F.dropout(made[-1], 0.5)",  # the graph left it out, without a word
        r"its forward cannot be captured: at .*forwards.py:\d+ .* it sets the seed",
    ),
    "a buffer that grows": ("self.mean = self.mean.repeat(2); z = made[-1]", "its graph does not run: "),
    "a buffer that the forward makes": (
        "late(self); z = made[-1] * self.late",  # torch.export writes it into the input
        "its forward makes late, .*: make it in the constructor",
    ),
    "a count of calls": (
        "self.calls += 1; z = made[-1] * self.calls",  # torch.export puts the number back
        "its forward changes calls, a number .*: keep it in a buffer",
    ),
    "a list that grows": (
        "self.kept.append(made[-1]); z = made[-1] * len(self.kept)",
        "its forward changes kept, a number or the length of a list",
    ),
    "a tensor that is set anew": (  # the next microbatch read what had been there at the split, without a word
        "z = made[-1] - self.plain; self.plain = z.detach().mean((0, 1))",
        r"reads Net\.plain and sets it anew, .*: register it as a buffer",
    ),
    "numbers of Python's": ("made[-1] * random.random()", "draws random numbers of Python"),
    "a generator": ("made[-1] + torch.rand(D, generator=torch.Generator())", "uses a Generator"),
    "a hook of a tensor": ("hooked(made[-1] * 1.0)", "calls register_hook on a tensor"),
    "vmap": ("torch.vmap(lambda row: row * 2)(made[-1])", r"uses torch\.vmap or torch\.func"),
    "values": ("made[-1] if made[-1].sum() > 0 else -made[-1]", "torch.export refuses it with"),
    "a backward of its own": ("Reversed.apply(made[-1])", r"calls Reversed, a torch.autograd.Func"),
    "reentrant": ("checkpoint(own(MLP), made[-1], use_reentrant=True)", "CheckpointFunc"),
}

EXPORTS_MORE = torch.__version__ >= "2.13"
REFUSED_BY_EXPORT = {"a count of calls", "a list that grows", "a tensor that is set anew", "a generator", "vmap"}
"""By torch.export itself, in its own words, where it exports less."""


@pytest.mark.parametrize("row", REFUSED)
def test_what_would_be_wrong_is_refused(row: str) -> None:
    lines, message = REFUSED[row]
    if row in REFUSED_BY_EXPORT and not EXPORTS_MORE:
        message = f"({message}|torch.export refuses it with)"
    said = judge(Forward("split zbv", (BLOCK, lines) if isinstance(lines, str) else lines))
    assert re.match(f"refused: Net cannot be split.*{message}", said), said
    assert torch._C._functorch.maybe_current_level() is None, "in which nothing can be drawn"


def test_arguments_are_checked() -> None:
    model, tokens = nn.Sequential(nn.Embedding(16, D), nn.Linear(D, D)), torch.zeros(2, 8, dtype=torch.long)
    with pytest.raises(ValueError, match=r"no module that Sequential calls: take some of 0, 1"):
        split(model, tokens, "no_pipelining", points=["blocks"])
    (chunk,) = split(model, tokens, "no_pipelining")
    for wrong in ((torch.zeros(2, 9, dtype=torch.long),), (tokens, tokens), (tokens.int(),)):
        with pytest.raises(ValueError, match=r"arguments like the example's, \['torch\.int64 \[2, 8\]'\], got"):
            chunk(*wrong)
    scaled, (x,) = Net(lambda net, x, scale: net.head(x) * scale), X()
    (chunk,) = split(scaled, (x, 0.5), "no_pipelining")
    assert torch.equal(chunk(x, 0.5), scaled(x, 0.5))
    with pytest.raises(ValueError, match=r"like the example's, \['torch\.float32 \[3, 5, 8\]', 0\.5\], got .*, 1\.0\]"):
        chunk(x, 1.0)
    model[1].eval()
    with pytest.raises(CannotSplitError, match="some modules are in training mode and some are not"):
        split(model, tokens, "no_pipelining")


def test_a_module_without_memory_stays_so() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    (chunk,) = split(model, torch.zeros(2, 3, 8, 8, device="meta"), "no_pipelining")
    assert all(parameter.is_meta for parameter in chunk.parameters())
    assert chunk.state_dict().keys() == model.state_dict().keys()


def test_checkpoints_of_a_weight_that_two_stages_read(tmp_path: Path) -> None:
    """Both stages save it by one name, and a V has both on one rank."""
    torch.manual_seed(1)
    batches = [TOKENS() for _ in range(4)]

    def make(schedule: str) -> tuple[megapipe.checkpoint.Checkpointer, Callable[[], list[Tensor]]]:
        torch.manual_seed(0)
        chunks = split(Net(reads_a_weight_again), batches[0], schedule, num_chunks=2 if schedule == "zbv" else 1)
        optimizer = megapipe.PipelinedOptimizer(chunks, lambda groups: torch.optim.AdamW(groups, lr=0.1))

        def train() -> list[Tensor]:
            losses = run(schedule, chunks, batches)
            optimizer.step()
            optimizer.zero_grad()
            return losses

        return megapipe.checkpoint.Checkpointer(tmp_path / "run", chunks, optimizer), train

    saved, train = make("zbv")
    train()
    saved.save(1)
    expected = train()
    for checkpointer, train_on in ((saved, train), make("1f1b")):
        checkpointer.load()
        torch.testing.assert_close(train_on(), expected, rtol=1e-5, atol=0)


class Seq2Seq(nn.Module):
    """One of transformers' encoder-decoders, called by position."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        logits: Tensor = self.model(inputs, labels=labels, use_cache=False).logits
        return logits


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["t5", "bart", "whisper"])
def test_encoder_decoders_of_transformers(kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    sizes: dict[str, Any] = {"d_model": 16, "vocab_size": 32, "decoder_start_token_id": 0, "pad_token_id": 0}
    sizes |= {"eos_token_id": 1, "bos_token_id": 1}
    if kind == "t5":
        sizes |= {"num_layers": 1, "num_decoder_layers": 2, "num_heads": 2, "d_kv": 8, "d_ff": 16}
    else:
        sizes |= {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
        sizes |= {"encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    if kind == "whisper":
        sizes |= {"num_mel_bins": 4, "max_source_positions": 6, "max_target_positions": 8}
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **sizes)
    auto = transformers.AutoModelForSpeechSeq2Seq if kind == "whisper" else transformers.AutoModelForSeq2SeqLM
    model = Seq2Seq(auto.from_config(config)).eval()
    tied = [f"model.{name}" for pair in model.model.all_tied_weights_keys.items() for name in pair]
    inputs = torch.randn(4, 2, 4, 12) if kind == "whisper" else torch.randint(2, 32, (4, 2, 7))
    check(model, list(zip(inputs, torch.randint(2, 32, (4, 2, 5)))), "zbv", tuple(tied))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda part: part.get_submodule("0").register_forward_hook(lambda *_: None), "0 has other hooks than then"),
        (lambda part: part.get_submodule("1").eval(), "1 is in evaluation mode by itself"),
        (lambda part: part.set_submodule("0", nn.Linear(D, D)), "0 has been exchanged, added or removed"),
    ],
)
def test_changes_behind_a_split(change: Callable[[nn.Module], object], words: str) -> None:
    """Stages never call the modules in them: hooks on these never ran, a BatchNorm that was put into evaluation mode
    trained on, and an adapter in place of a layer had no effect."""
    batches = [(torch.randn(4, D),)] * 2
    (chunk,) = split(nn.Sequential(nn.Linear(D, D), nn.BatchNorm1d(D)), batches[0], "1f1b")
    run("1f1b", [chunk], batches)
    change(chunk.module)
    with pytest.raises(ValueError, match=words):
        run("1f1b", [chunk], batches)

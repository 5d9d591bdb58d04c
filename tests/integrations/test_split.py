"""Modules cut by themselves: their code is that of plain_models.py and of rows below, which knows nothing of stages."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from tools import plain_models
from tools.marks import needs_masks_exported
from tools.ranks import on_ranks
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import megapipe
from megapipe import CannotSplitError, parallel_state, split

D = 8


def loss_of(output: Tensor) -> Tensor:
    return output.float().pow(2).mean() + output.float().mean()


def step(batches: Any, chunk: nn.Module) -> Any:
    return chunk(*next(batches)), lambda output: (loss_of(output), loss_of(output).detach())


def make(name: str) -> tuple[nn.Module, list[tuple[Tensor, ...]]]:
    make_model, make_batch = plain_models.MODELS[name]
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    return make_model(), [make_batch(generator) for _ in range(4)]


def initialise(size: int) -> None:
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(pipeline_model_parallel_size=size)


def check(
    model: nn.Module, batches: list[tuple[Any, ...]], schedule: str, tied: tuple[str, ...] = (), **options: Any
) -> Any:
    """Losses, gradients, buffers and names, against the model itself, in training and then in evaluation."""
    chunks = split(model, batches[0], schedule, **options)
    got = [(name, parameter) for chunk in chunks for name, parameter in chunk.named_parameters(remove_duplicate=False)]
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    train = megapipe.get_forward_backward_func(schedule)

    def run(**options: Any) -> list[Tensor]:
        torch.manual_seed(3)
        data = iter([tuple(one.clone() if torch.is_tensor(one) else one for one in batch) for batch in batches])
        reports: list[Tensor] = train(
            forward_step_func=step, data_iterator=data, model=chunks, num_microbatches=len(batches), **options
        )
        return reports

    losses = run()
    gradients = {name.removeprefix("module."): parameter.grad for name, parameter in got}
    after = {name.removeprefix("module."): b.clone() for chunk in chunks for name, b in chunk.named_buffers()}
    for name, buffer in model.named_buffers():
        buffer.data.copy_(buffers[name])
    model.zero_grad()
    torch.manual_seed(3)
    expected = []
    for batch in batches:
        loss = loss_of(model(*(one.clone() if torch.is_tensor(one) else one for one in batch)))
        expected.append(loss.detach())
        (loss / len(batches)).backward()
    assert losses == (expected if losses else [])
    wanted = dict(model.named_parameters(remove_duplicate=False))
    for name, gradient in gradients.items():
        assert (gradient is None) == (wanted[name].grad is None), name
        if name in tied:
            torch.testing.assert_close(gradient, wanted[name].grad, rtol=1e-5, atol=1e-6)
        elif gradient is not None:
            assert torch.equal(gradient, wanted[name].grad), name
    own = {name.rpartition(".")[0] for name in gradients}
    for name, buffer in model.named_buffers():
        if name.rpartition(".")[0] in own and name in after:
            assert torch.equal(after[name], buffer), name
    for one in (model, *chunks):
        one.eval()
    torch.backends.mha.set_fastpath_enabled(False)  # which rounds otherwise, and which torch.export does not take
    losses = run(forward_only=True)
    torch.manual_seed(3)
    with torch.no_grad():
        assert losses == ([loss_of(model(*batch)) for batch in batches] if losses else [])
    return chunks


@pytest.mark.parametrize("name", plain_models.MODELS)
@on_ranks(2)
def test_gradients_are_those_of_the_whole_module(rank: int, name: str) -> None:
    initialise(2)
    model, batches = make(name)
    chunks = check(model, batches, "zbv", tied=("shared.weight", "head.weight"))
    assert all(any(True for _ in chunk.parameters()) for chunk in chunks)
    names = {name for chunk in chunks for name in chunk.state_dict()}
    assert names <= model.state_dict().keys()


@on_ranks(4)
def test_on_four_ranks(rank: int) -> None:
    initialise(4)
    check(*make("gpt"), "interleaved_1f1b", num_chunks=2)


@on_ranks(2)
def test_points_and_tied_weights(rank: int) -> None:
    initialise(2)
    _, batches = make("gpt")
    model = plain_models.GPT(is_tied=True)
    chunks = check(model, batches, "1f1b", tied=("tokens.weight", "head.weight"), points=["blocks.1"])
    wanted = [name for name in model.state_dict() if name.startswith(("tokens", "positions", "blocks.0"))]
    assert ({*wanted} == {*chunks[0].state_dict()}) == (rank == 0)


@on_ranks(2)
def test_a_view_of_what_was_strided(rank: int) -> None:
    """Messages are contiguous: transposed back, what was strided where it was made cannot be viewed any more. In a
    region with autocast neither."""

    def run(net: Net, x: Tensor) -> Tensor:
        strided = net.layers[0](x).transpose(0, 1)
        y = net.head(net.layers[1](strided)).reshape(15, D) + strided.transpose(0, 1).view(15, D)
        with torch.autocast("cpu", torch.bfloat16):
            return y + strided.transpose(0, 1).view(15, D) @ net.head.weight

    initialise(2)
    torch.manual_seed(0)
    check(Net(run), [(torch.randn(3, 5, D),) for _ in range(4)], "1f1b", points=["layers.1"])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l, self.n, self.aux = nn.Linear(D, D), nn.LayerNorm(D), torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        y = x + torch.tanh(self.l(self.n(x)))
        self.aux = y.pow(2).mean()
        return y


class Net(nn.Module):
    """Four blocks, `made` by a row, around which `run` is the forward."""

    def __init__(self, run: Callable[..., Tensor], make: Callable[[Net], None] | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block() for _ in range(4)])
        self.head = nn.Linear(D, D)
        self.emb = nn.Embedding(16, D)
        self.register_buffer("mean", torch.zeros(D))
        self.run = run
        self.cache: Any = None
        if make is not None:
            make(self)

    def forward(self, *arguments: Any) -> Tensor:
        return self.run(self, *arguments)


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return -grad


def through(net: Net, x: Tensor, call: Callable[..., Any] = lambda layer, x: layer(x)) -> Tensor:
    for layer in net.layers:
        x = call(layer, x)
    return x


def identity_skip(net: Net, x: Tensor) -> Tensor:
    h = net.layers[0](x)
    kept = nn.functional.dropout(h, 0.0, training=False)
    return net.head(net.layers[1](kept) + h)


def writes_to_its_input(net: Net, x: Tensor, bias: Tensor) -> Tensor:
    bias.mul_(2.0)
    return net.head(through(net, x, lambda layer, x: layer(x) + bias))


def draws_noise(net: Net, x: Tensor) -> Tensor:
    noise = torch.randn_like(x)
    return through(net, x + noise) - noise


def adds_to_a_list(net: Net, x: Tensor) -> Tensor:
    total = [torch.zeros_like(x)]
    for layer in net.layers:
        x = layer(x)
        torch._foreach_add_(total, [x])
    return net.head(total[0])


def writes_through_a_view(net: Net, x: Tensor) -> Tensor:
    first = net.layers[0](x)
    second = net.layers[1](x).clone()
    second[:, 0] = first[:, 1]
    return through(net, second)


def sets_a_buffer_anew(net: Net, x: Tensor) -> Tensor:
    x = net.layers[0](x)
    net.mean = 0.9 * net.mean + 0.1 * x.detach().mean((0, 1))
    return net.head(through(net, x))


def caches(net: Net, x: Tensor) -> Tensor:
    if net.cache is None:
        net.cache = torch.cos(torch.arange(D, dtype=torch.float32))
    return net.head(through(net, x) * net.cache)


def has_a_region(net: Net, x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = net.layers[0](x).abs().mean()
    with torch.autocast("cpu", torch.bfloat16):
        y = net.layers[1](x)
    return net.head(through(net, y.float() / scale))


def reads_attributes(net: Net, x: Tensor) -> Tensor:
    return net.head(through(net, x)) + sum(layer.aux for layer in net.layers)


def reads_a_weight_again(net: Net, tokens: Tensor) -> Tensor:
    return F.linear(through(net, net.emb(tokens)), net.emb.weight)


def fills_in_two_steps(net: Net, x: Tensor) -> Tensor:
    table = torch.zeros(5, D)
    table[:, ::2] = 1
    first = table.clone()
    table[:, 1::2] = 2
    return net.head(through(net, x + table) + first)


def checkpointed(call: Callable[..., Any], x: Tensor) -> Tensor:
    return checkpoint(call, x, use_reentrant=False)


def share_blocks(net: Net) -> None:
    net.layers = nn.ModuleList([net.layers[0]] * 4)


def share_in_closure(net: Net) -> None:
    emb = net.emb
    net.run = lambda net, tokens: through(net, emb(tokens)) @ emb.weight.t()


def keep_in_list(net: Net) -> None:
    net.cache = [net.layers[1].l.weight]


def encode(net: Net) -> None:
    net.layers = nn.ModuleList(  # torch's own, which reads attributes of its layers
        [nn.TransformerEncoder(nn.TransformerEncoderLayer(D, 2, 16, 0.0, batch_first=True), 2) for _ in range(2)]
    )


X, TOKENS = (lambda: (torch.randn(3, 5, D),)), (lambda: (torch.randint(16, (3, 5)),))
TWO = lambda: (torch.randn(3, 5, D), torch.rand(3, 5, D))  # noqa: E731
ROWS: dict[str, tuple[Any, ...]] = {  # forward, batch, what is made besides, tied names
    "a unit returns what it was given": (identity_skip, X),
    "an input is written to": (writes_to_its_input, TWO),
    "noise between units": (draws_noise, X),
    "an operation writes to a list": (adds_to_a_list, X),
    "a part is written": (writes_through_a_view, X, None, ("layers",)),
    "a buffer is set anew": (sets_a_buffer_anew, X, None, ("layers.0",)),
    "a lazy cache": (caches, X),
    "regions without gradients or with autocast": (has_a_region, X, None, ("layers.0", "layers.1")),
    "tensors in attributes": (reads_attributes, X),
    "a layer with a vector": (lambda net, x: F.linear(through(net, x), net.head.bias), X),
    "a number": (lambda net, x, scale: through(net, x) * scale, lambda: (torch.randn(3, 5, D), 0.5)),
    "checkpoints": (lambda net, x: through(net, x, checkpointed), X),
    "nested checkpoints": (
        lambda net, x: through(net, x, lambda m, x: checkpointed(lambda x: checkpointed(m, x), x)),
        X,
    ),
    "a table filled in two steps": (fills_in_two_steps, X),
    "a weight read again": (reads_a_weight_again, TOKENS, None, ("emb.weight",)),
    "a weight in a closure": (reads_a_weight_again, TOKENS, share_in_closure, ("emb.weight",)),
    "a weight in a list": (
        lambda net, x: net.head(through(net, x) @ net.cache[0]),
        X,
        keep_in_list,
        ("layers.1.l.weight",),
    ),
    "one block four times": (through, X, share_blocks, ("layers",)),
    "torch's encoder": (lambda net, x: net.head(through(net, x)), X, encode),
}


@pytest.mark.parametrize("row", ROWS)
@on_ranks(1)
def test_rows(rank: int, row: str) -> None:
    """The home-made runner of units did these wrongly without a word, or crashed."""
    initialise(1)
    torch.manual_seed(0)
    run, batch, made, tied = (*ROWS[row], *(None, ())[len(ROWS[row]) - 2 :])
    model = Net(run, made)
    names = tuple(name for name in dict(model.named_parameters(remove_duplicate=False)) if name.startswith(tied or "-"))
    torch.manual_seed(1)
    check(model, [batch() for _ in range(4)], "zbv", tied=names)


def reads_a_weight_by_its_second_name(net: Net, x: Tensor) -> Tensor:
    net.layers[2].l.weight = net.layers[3].l.weight = net.layers[1].l.weight
    with torch.no_grad():
        net.layers[2](x)
    return net.layers[3](net.layers[0](x))


@on_ranks(1)
def test_a_weight_of_several_names_has_the_first(rank: int) -> None:
    """It had the one of the module that a stage calls, and no gradient under that which optimizers know."""
    initialise(1)
    model = Net(reads_a_weight_by_its_second_name, None)
    reads_a_weight_by_its_second_name(model, X()[0])
    (chunk,) = split(model, X(), "no_pipelining", num_chunks=1)
    assert {*dict(chunk.module.named_parameters())} == {*dict(model.named_parameters())}


@on_ranks(1)
def test_a_shared_weight_that_is_unfrozen_later(rank: int) -> None:
    """Its copies were not summed, and had lost the marks by which optimizers group parameters."""
    initialise(1)
    model, batches = Net(reads_a_weight_again), [TOKENS() for _ in range(4)]
    model.emb.weight.no_decay = True
    model.emb.weight.requires_grad_(False)
    chunks = split(model, batches[0], "zbv")
    copies = [p for chunk in chunks for name, p in chunk.named_parameters() if name.endswith("emb.weight")]
    assert [(p.no_decay, p.requires_grad) for p in copies] == [(True, False)] * 2
    assert all(len(chunk.tied_weights) == 1 for chunk in chunks)
    model.emb.weight.requires_grad_(True).register_hook(lambda grad: 2 * grad)
    with pytest.raises(CannotSplitError, match=r"emb.weight has hooks, and several stages read it"):
        split(model, batches[0], "zbv")


@on_ranks(1)
def test_one_tensor_twice_in_the_example(rank: int) -> None:
    """They became one argument: the second was left out of every step."""
    initialise(1)
    x, y = torch.randn(3, 5, D), torch.randn(3, 5, D)
    model = Net(lambda net, x, y: net.head(through(net, x) - y))
    (chunk,) = split(model, (x, x), "no_pipelining")
    assert torch.equal(chunk.module(x, y), model(x, y))


@on_ranks(1)
def test_a_parameter_that_is_returned(rank: int) -> None:
    """The last stage had no name for it: a KeyError."""
    initialise(1)
    first, last = split(Net(lambda net, x: (net.head(through(net, x)), net.emb.weight)), X(), "zbv")
    assert isinstance(last.module(first.module(X()[0]))[1], nn.Parameter)


def adds_out(net: Net, x: Tensor) -> Tensor:
    total = torch.zeros_like(x)
    view = total.view(-1)
    for layer in net.layers:
        x = layer(x)
        with torch.no_grad():
            torch.add(total, x.detach(), out=total)
    return net.head(x) + view.view_as(x)


def counts_in_a_buffer(net: Net, x: Tensor) -> Tensor:
    return net.head(through(net, x, lambda layer, x: layer(x) + net.mean.add_(1)))


def grows(net: Net, x: Tensor) -> Tensor:
    net.mean = net.mean + x.detach().mean(0)
    return net.head(through(net, x))


def makes_buffer(self: Net, x: Tensor) -> Tensor:
    """torch.export writes it into the input."""
    if "late" not in self._buffers:
        self.register_buffer("late", torch.arange(D) / D)
    return through(self, x * self.late)


def counts_calls(net: Net, x: Tensor) -> Tensor:
    """torch.export puts the number back."""
    net.calls = getattr(net, "calls", 0) + 1
    net.layers[1].l.out_features += 1
    return through(net, x * net.layers[1].l.out_features)


def lengthens(net: Net, x: Tensor) -> Tensor:
    net.sums.append(x)
    return through(net, x * len(net.sums))


def with_generator(net: Net) -> None:
    net.cache, net.sums, net.kept = torch.Generator(), [], torch.zeros(D)


def sets_the_seed(net: Net, x: Tensor) -> Tensor:
    """The graph left it out, without a word."""
    torch.manual_seed(3)
    return through(net, nn.functional.dropout(x, 0.5))


def reads_elsewhere_in_evaluation(net: Net, x: Tensor) -> Tensor:
    """The first stage read what the buffer had been at the split."""
    if not net.training:
        return net.head(through(net, x - net.mean))
    y = through(net, x)
    net.mean.copy_(y.detach().mean((0, 1)))
    return net.head(y)


def hooks_a_tensor(net: Net, x: Tensor) -> Tensor:
    y = net.head(x)
    y.register_hook(lambda grad: 2 * grad)
    return through(net, y)


def moves_an_attribute(net: Net, x: Tensor) -> Tensor:
    """The next microbatch read what had been there at the split, without a word."""
    x = through(net, x) - net.kept
    net.kept = x.detach().mean((0, 1))
    return net.head(x)


REFUSED: dict[str, tuple[Callable[..., Tensor], str]] = {
    "out of two views": (adds_out, r"stage 1 writes to memory that view and .* share, which stage 1 receives apart"),
    "a buffer on two stages": (counts_in_a_buffer, r"stage \d writes to mean, which stages \[\d.*\] read"),
    "a buffer of another stage in evaluation": (reads_elsewhere_in_evaluation, r"stage 1 writes to mean, .* \[0, 1\]"),
    "a seed": (sets_the_seed, r"its forward cannot be captured: at .*test_split.py:\d+ .* it sets the seed"),
    "a buffer that grows": (grows, "its graph does not run: output with shape"),
    "a buffer that the forward makes": (makes_buffer, "its forward makes late, .*: make it in the constructor"),
    "a count of calls": (counts_calls, "its forward changes out_features, a number .*: keep it in a buffer"),
    "a list that grows": (lengthens, "its forward changes sums, a number or the length of a list"),
    "a tensor that is set anew": (moves_an_attribute, r"reads Net\.kept and sets it anew, .*: register it as a buffer"),
    "numbers of Python's": (lambda net, x: through(net, x * random.random()), "draws random numbers of Python"),
    "numbers of NumPy's": (lambda net, x: through(net, x * float(numpy.random.rand())), "random numbers of NumPy"),
    "a generator": (lambda net, x: through(net, x + torch.rand(D, generator=net.cache)), "uses a Generator"),
    "a hook of a tensor": (hooks_a_tensor, "calls register_hook on a tensor"),
    "vmap": (lambda net, x: through(net, torch.vmap(lambda row: row * 2)(x)), r"uses torch\.vmap or torch\.func"),
    "a gradient": (lambda net, x: through(net, x + torch.func.grad(torch.sum)(x)), r"uses torch\.vmap or torch\.func"),
    "values": (lambda net, x: through(net, x if x.sum() > 0 else -x), "torch.export refuses it with"),
    "a backward of its own": (lambda net, x: through(net, Reversed.apply(x)), r"calls Reversed, a torch.autograd.Func"),
    "reentrant": (lambda net, x: through(net, x, lambda m, x: checkpoint(m, x, use_reentrant=True)), "CheckpointFunc"),
}


EXPORTS_MORE = torch.__version__ >= "2.13"
REFUSED_BY_EXPORT = {"a count of calls", "a list that grows", "a tensor that is set anew", "a generator", "vmap"}
REFUSED_BY_EXPORT |= {"a gradient"}
"""By torch.export itself, in its own words, where it exports less."""


@pytest.mark.parametrize("row", REFUSED)
@on_ranks(2)
def test_what_would_be_wrong_is_refused(rank: int, row: str) -> None:
    initialise(2)
    run, message = REFUSED[row]
    if row in REFUSED_BY_EXPORT and not EXPORTS_MORE:
        message = f"({message}|torch.export refuses it with)"
    with pytest.raises(CannotSplitError, match=f"Net cannot be split.*{message}"):
        split(Net(run, with_generator), torch.ones(3, 5, D), "1f1b")
    assert torch._C._functorch.maybe_current_level() is None, "in which nothing can be drawn"


def test_arguments_are_checked() -> None:
    tokens = torch.zeros(2, 8, dtype=torch.long)
    with pytest.raises(ValueError, match=r"no module that GPT calls: take some of tokens, blocks\.0"):
        split(plain_models.GPT(1), tokens, "no_pipelining", points=["blocks"])
    (chunk,) = split(plain_models.GPT(1), tokens, "no_pipelining")
    for wrong in ((torch.zeros(2, 9, dtype=torch.long),), (tokens, tokens), (tokens.int(),)):
        with pytest.raises(ValueError, match=r"arguments like the example's, \['torch\.int64 \[2, 8\]'\], got"):
            chunk(*wrong)
    mixed = plain_models.GPT(1)
    mixed.blocks[0].eval()
    with pytest.raises(CannotSplitError, match="some modules are in training mode and some are not"):
        split(mixed, tokens, "no_pipelining")


def makes_table(self: Net, x: Tensor) -> Tensor:
    if not hasattr(self, "table"):
        self.table = torch.arange(D) / D
    self.cache["outputs"][x.shape] = y = self.head(x) * self.table
    return y


@pytest.mark.skipif(torch.__version__ < "2.9", reason="torch.export refuses it")
def test_nothing_of_the_export_is_left_in_the_module() -> None:
    """A table that the first forward makes was left there as a fake tensor, which the module's next run met; so were
    outputs in a dict of them."""
    model = Net(makes_table)
    model.cache = {"outputs": {}}
    split(model, torch.ones(3, 5, D), "no_pipelining")
    assert not hasattr(model, "table")
    assert model.cache == {"outputs": {}}


def counts(net: Net, x: Tensor) -> Tensor:
    net.cache.add_(1)
    return net.head((x * net.cache).flatten(0, 1))


def test_exporting_writes_to_nothing() -> None:
    """What a forward writes to was written to by the exports: counts of batches began at 1, a tensor that is no buffer
    at 4."""
    model = Net(counts)
    model.cache, model.head = torch.zeros(D), nn.BatchNorm1d(D)
    whole, x = copy.deepcopy(model), torch.randn(3, 5, D)
    (chunk,) = split(model, x, "no_pipelining")
    for _ in range(2):
        assert torch.equal(chunk(x), whole(x))
    assert torch.equal(chunk.module.head.num_batches_tracked, whole.head.num_batches_tracked)


def test_a_module_without_memory_stays_so() -> None:
    with torch.device("meta"):
        model = plain_models.ResNet()
    (chunk,) = split(model, torch.zeros(2, 3, 16, 16, device="meta"), "no_pipelining")
    assert all(parameter.is_meta for parameter in chunk.parameters())
    assert chunk.state_dict().keys() == model.state_dict().keys()


@on_ranks(1)
def test_autocast_and_recomputation(rank: int) -> None:
    initialise(1)
    model, batches = make("gpt")
    losses = []
    config = megapipe.PipelineConfig(enable_autocast=True, autocast_dtype=torch.bfloat16)
    plain, half = split(model, batches[0], "zbv"), split(model, batches[0], "zbv", config=config)
    train = megapipe.get_forward_backward_func("zbv")
    for chunks, recompute in ((plain, None), (plain, "all"), (half, None)):
        chunks[0].config.recompute = chunks[1].config.recompute = recompute
        losses.append(train(forward_step_func=step, data_iterator=iter(batches), model=chunks, num_microbatches=4))
    assert losses[0] == losses[1]
    assert not losses[0] or losses[0] != losses[2]
    with torch.autocast("cpu", torch.bfloat16):
        assert losses[2] == ([loss_of(model(*batch)) for batch in batches] if losses[2] else [])


@on_ranks(2)
def test_checkpoints_of_a_weight_that_two_stages_read(rank: int, tmp_path: Path) -> None:
    """Both stages save it by one name, and a V has both on one rank."""
    initialise(2)
    torch.manual_seed(1)
    batches = [(torch.randint(16, (3, 5)),) for _ in range(4)]

    def make(schedule: str) -> tuple[Any, Any, Callable[[], list[float]]]:
        torch.manual_seed(0)
        config = megapipe.PipelineConfig(broadcast_reports=True)
        chunks = split(Net(reads_a_weight_again), batches[0], schedule, config=config)
        optimizer = megapipe.PipelinedOptimizer(chunks, lambda groups: torch.optim.AdamW(groups, lr=0.1))
        train = megapipe.get_forward_backward_func(schedule)

        def run() -> list[float]:
            losses = train(forward_step_func=step, data_iterator=iter(batches), model=chunks, num_microbatches=4)
            optimizer.step()
            optimizer.zero_grad()
            return [float(loss) for loss in losses]

        return chunks, optimizer, run

    chunks, optimizer, run = make("zbv")
    run()
    megapipe.checkpoint.Checkpointer(tmp_path / "run", chunks, optimizer).save(1)
    expected = run()
    for schedule in ("zbv", "1f1b"):
        chunks, optimizer, run = make(schedule)
        megapipe.checkpoint.Checkpointer(tmp_path / "run", chunks, optimizer).load()
        assert run() == pytest.approx(expected, rel=1e-5)


class Seq2Seq(nn.Module):
    """One of transformers' encoder-decoders, called by position."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        logits: Tensor = self.model(inputs, labels=labels, use_cache=False).logits
        return logits


@pytest.mark.parametrize(
    "kind", ["t5", *(pytest.param(kind, marks=needs_masks_exported) for kind in ("bart", "whisper"))]
)
@on_ranks(1)
def test_encoder_decoders_of_transformers(rank: int, kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    initialise(1)
    sizes: dict[str, Any] = {"d_model": 16, "vocab_size": 32, "decoder_start_token_id": 0, "pad_token_id": 0}
    sizes |= {"eos_token_id": 1, "bos_token_id": 1}
    if kind == "t5":
        sizes |= {"num_layers": 2, "num_heads": 2, "d_kv": 8, "d_ff": 16}
    else:
        sizes |= {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
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

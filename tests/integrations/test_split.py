"""Modules cut by themselves: their code is that of plain_models.py, which knows nothing of stages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tools import plain_models
from tools.ranks import on_ranks
from torch import Tensor, nn

import megapipe
from megapipe import CannotSplitError, parallel_state, split
from megapipe.integrations.splitting.running import run_once, units_of


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
    model: nn.Module, batches: list[tuple[Tensor, ...]], schedule: str, tied: tuple[str, ...] = (), **options: Any
) -> Any:
    """Losses, gradients, buffers and names, against the model itself."""
    chunks = split(model, batches[0], schedule, **options)
    got = [(name, parameter) for chunk in chunks for name, parameter in chunk.named_parameters(remove_duplicate=False)]
    kept = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    losses = megapipe.get_forward_backward_func(schedule)(
        forward_step_func=step, data_iterator=iter(batches), model=chunks, num_microbatches=len(batches)
    )
    gradients = {name.removeprefix("module."): parameter.grad for name, parameter in got}
    after = {name.removeprefix("module."): b.clone() for chunk in chunks for name, b in chunk.named_buffers()}
    for name, buffer in model.named_buffers():
        buffer.data.copy_(buffers[name])
    model.zero_grad()
    expected = []
    for batch in batches:
        loss = loss_of(model(*batch))
        expected.append(loss.detach())
        (loss / len(batches)).backward()
    assert losses == (expected if losses else [])
    wanted = dict(model.named_parameters(remove_duplicate=False))
    for name, gradient in gradients.items():
        assert (gradient is None) == (wanted[name].grad is None), name
        if name in tied:
            torch.testing.assert_close(gradient, wanted[name].grad, rtol=1e-6, atol=1e-6)
        elif gradient is not None:
            assert torch.equal(gradient, wanted[name].grad), name
    own = {name.rpartition(".")[0] for name in gradients}
    for name, buffer in model.named_buffers():
        if name.rpartition(".")[0] in own:
            assert torch.equal(after[name], buffer), name
    assert kept.keys() >= set(gradients) - set(tied)
    return chunks


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
@pytest.mark.parametrize("name", plain_models.MODELS)
@on_ranks(2)
def test_gradients_are_those_of_the_whole_module(rank: int, name: str, schedule: str) -> None:
    initialise(2)
    chunks = check(*make(name), schedule)
    assert all(any(True for _ in chunk.parameters()) for chunk in chunks)


@on_ranks(4)
def test_on_four_ranks(rank: int) -> None:
    initialise(4)
    check(*make("unet"), "1f1b")
    check(*make("encoder-decoder"), "interleaved_1f1b", num_chunks=2)


@on_ranks(2)
def test_deferring_layers_points_and_tied_weights(rank: int) -> None:
    initialise(2)
    _, batches = make("gpt")
    model = plain_models.GPT(is_tied=True)
    chunks = check(model, batches, "1f1b", tied=("tokens.weight", "head.weight"), points=["blocks.1"])
    assert len([m for m in chunks[0].modules() if isinstance(m, plain_models.Block)]) == (1, 5)[rank]
    model, batches = make("resnet")
    for chunk in split(model, batches[0], "zbv"):
        megapipe.weight_grad.convert(chunk)
    check(model, batches, "zbv")


class Seq2Seq(nn.Module):
    """One of transformers' encoder-decoders, called by position."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        logits: Tensor = self.model(inputs, labels=labels, use_cache=False).logits
        return logits


@pytest.mark.parametrize("kind", ["t5", "bart", "whisper"])
@on_ranks(2)
def test_encoder_decoders_of_transformers(rank: int, kind: str) -> None:
    """The dropout of T5's encoder, which runs before its layers and behind them, was bound to the first stage."""
    transformers = pytest.importorskip("transformers")
    initialise(2)
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


def test_what_would_be_wrong_is_refused() -> None:
    class Branching(plain_models.GPT):
        def forward(self, tokens: Tensor) -> Tensor:
            return super().forward(tokens if tokens.sum() > 0 else tokens + 1)

    class Counting(plain_models.GPT):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def forward(self, tokens: Tensor) -> Tensor:
            self.count += 1
            return super().forward(tokens)

    class Box:
        def __init__(self, x: Tensor) -> None:
            self.x = x

    class Boxed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), plain_models.GPT()

        def forward(self, x: Tensor) -> Any:
            return self.second.head(Box(self.first(x)))

    tokens = torch.zeros(2, 8, dtype=torch.long)
    for model, example, why in (
        (Branching(), tokens, "looks at the values of tensors"),
        (Counting(), tokens, "writes to the buffer count"),
        (Boxed(), torch.zeros(2, 4), "second.head is called with a Box"),
    ):
        with pytest.raises(CannotSplitError, match=why):
            split(model, example, "no_pipelining")
    with pytest.raises(ValueError, match=r"is no unit that GPT calls: take some of tokens, blocks\.0"):
        split(plain_models.GPT(), tokens, "no_pipelining", points=["blocks"])
    (chunk,) = split(plain_models.GPT(), tokens, "no_pipelining")
    with pytest.raises(ValueError, match=r"example's shape \[2, 8\], got \[2, 9\]"):
        chunk(torch.zeros(2, 9, dtype=torch.long))


def test_what_is_written_through_a_view_travels() -> None:
    """A skip written into a part of a tensor changes the whole of it, of which the tensor itself knows nothing."""

    class Writing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            first = self.layers[0](x)
            second = self.layers[1](x).clone()
            second[:, 0] = first[:, 1]
            return self.layers[2](second)

    model, x = Writing(), torch.randn(2, 4)
    run = run_once(model, units_of(model, 2), (x,))
    assert run.calls[2].reads == {"layers.0", "layers.1"}


def test_a_module_without_memory_stays_so() -> None:
    with torch.device("meta"):
        model = plain_models.ResNet()
    (chunk,) = split(model, torch.zeros(2, 3, 16, 16), "no_pipelining")
    assert all(parameter.is_meta for parameter in chunk.parameters())
    assert chunk.state_dict().keys() == model.state_dict().keys()

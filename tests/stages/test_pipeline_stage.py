"""Plain modules as stages: the scripts that one writes without having read how stages talk to each other."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from tools.graphs import skip_without_tracer
from tools.models import Window, seed_cpu
from tools.ranks import RankPool, on_ranks, start_again
from torch import Tensor, nn

import megapipe
from megapipe import PipelineConfig, PipelineStage, StageInfo, distribute_layers, graph, parallel_state, stages_for_rank
from megapipe.overlap import in_segments, run_segments

NUM_MICROBATCHES = 5
BATCH, SEQUENCE, WIDTH, VOCABULARY = 2, 6, 8, 11

Make = Callable[[StageInfo], nn.Module]


def forward_step(data_iterator: Iterator[Any], chunk: nn.Module) -> Any:
    *inputs, target = next(data_iterator)

    def loss_func(output: Tensor) -> tuple[Tensor, Tensor]:
        loss = loss_of(output, target)
        return loss, loss.detach()

    return chunk(*inputs), loss_func


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    if target.is_floating_point():
        return F.mse_loss(output, target)
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def train(schedule: str, chunks: list[Any], data: list[Any], **options: Any) -> list[Any]:
    arguments = {"forward_step_func": forward_step, "data_iterator": iter(data), "num_microbatches": len(data)}
    return megapipe.get_forward_backward_func(schedule)(model=chunks, **{**arguments, **options})


def whole(
    make: Make, num_stages: int, data: list[Any], num_steps: int = 1, **keywords: Any
) -> tuple[list[nn.Module], list[Tensor]]:
    """The same layers without a pipeline, with their gradients after some steps, and the losses of one."""
    modules = [make(StageInfo(index, num_stages)) for index in range(num_stages)]
    for _ in range(num_steps):
        losses = []
        for *inputs, target in data:
            output = modules[0](*inputs, **keywords)
            for module in modules[1:]:
                output = module(output, **keywords)
            loss = loss_of(output, target)
            losses.append(loss.detach())
            (loss / len(data)).backward()
    return modules, losses


def compare(
    make: Make,
    data: list[Any],
    schedules: tuple[str, ...] = ("1f1b", "zbv"),
    keywords: dict[str, Any] | None = None,
    **options: Any,
) -> None:
    """Train with every schedule; a second step begins with the shapes that the first has found."""
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(torch.distributed.get_world_size())
    for schedule in schedules:
        config = PipelineConfig()
        infos = stages_for_rank(schedule)
        chunks = [PipelineStage(make(info), info, config) for info in infos]
        expected, losses = whole(make, infos[0].num_stages, data, num_steps=2, **(keywords or {}))
        for _ in range(2):
            reports = train(schedule, chunks, data, **options)
            assert not reports or all(map(torch.equal, reports, losses))
            assert bool(reports) == any(info.is_last for info in infos)
        for chunk, info in zip(chunks, infos):
            assert not chunk._received  # no activation is kept from one step to the next
            same = dict(expected[info.index].named_parameters())
            for name, parameter in chunk.module.named_parameters():
                want = same[name].grad
                assert (parameter.grad is None) == (want is None), name
                assert want is None or torch.equal(parameter.grad, want), name


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def tokens(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (BATCH, SEQUENCE), generator=generator)


def mlp(info: StageInfo) -> nn.Module:
    seed_cpu(info.index)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in distribute_layers(8, info)]
    return nn.Sequential(*layers)


@on_ranks(2)
def test_an_mlp(rank: int) -> None:
    data = [(random(BATCH, WIDTH, seed=k), random(BATCH, WIDTH, seed=k + 100)) for k in range(NUM_MICROBATCHES)]
    compare(mlp, data, ("1f1b", "interleaved_1f1b", "zb1p", "zbv", "dualpipev"))


class GPT(nn.Module):
    """Batch first, with a mask that the first stage makes and all others are handed."""

    def __init__(self, info: StageInfo) -> None:
        super().__init__()
        seed_cpu(info.index)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH) if info.is_first else None
        layers = [nn.TransformerEncoderLayer(WIDTH, 2, 16, 0.0, batch_first=True) for _ in distribute_layers(4, info)]
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(WIDTH, VOCABULARY) if info.is_last else None

    def forward(self, x: Any) -> Any:
        if self.embedding is not None:
            x = self.embedding(x), nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        hidden, mask = x
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask)
        return (hidden, mask) if self.head is None else self.head(hidden)


@on_ranks(2)
def test_a_gpt_with_its_batch_first(rank: int) -> None:
    compare(GPT, [(tokens(k), tokens(k + 100)) for k in range(NUM_MICROBATCHES)])


class Scaled(nn.Module):
    def __init__(self, info: StageInfo) -> None:
        super().__init__()
        seed_cpu(info.index)
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *, scale: Tensor) -> Tensor:
        return self.layer(x) * scale

    def forward_segments(self, x: Tensor, *, scale: Tensor) -> Iterator[None]:
        x = Window.apply(self.layer(x))
        yield
        return x * scale


@on_ranks(2)
def test_keywords_reach_every_stage(rank: int) -> None:
    """Behind the first stage they were dropped with the batch, and training went on without the mask."""
    scale = random(BATCH, 1, seed=1)
    data = [(random(BATCH, WIDTH, seed=k), random(BATCH, WIDTH, seed=k + 100)) for k in range(NUM_MICROBATCHES)]

    def with_keyword(data_iterator: Iterator[Any], chunk: nn.Module) -> Any:
        x, target = next(data_iterator)
        return chunk(x, scale=scale), lambda output: (loss := loss_of(output, target), loss.detach())

    def in_parts(data_iterator: Iterator[Any], chunk: nn.Module) -> Any:
        x, target = next(data_iterator)
        output = in_segments(chunk, x, scale=scale)
        return output, lambda output: (loss := loss_of(output, target), loss.detach())

    compare(Scaled, data, ("1f1b", "zbv"), keywords={"scale": scale}, forward_step_func=with_keyword)
    compare(Scaled, data, ("1f1b", "dualpipev"), keywords={"scale": scale}, forward_step_func=in_parts)


class State(NamedTuple):
    source: Tensor
    target: Tensor
    memory: Tensor | None
    info: dict[str, Any]


class Translator(nn.Module):
    """Encoders on the first stages, decoders on the others, which look at what the encoders have made."""

    def __init__(self, info: StageInfo) -> None:
        super().__init__()
        seed_cpu(info.index)
        self.info = info
        if info.is_first:
            self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.is_encoder = info.index < info.num_stages // 2
        kind = nn.TransformerEncoderLayer if self.is_encoder else nn.TransformerDecoderLayer
        self.layer = kind(WIDTH, 2, 16, 0.0, batch_first=True)
        if info.is_last:
            self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, *inputs: Any) -> Any:
        if self.info.is_first:
            source, target = inputs
            state = State(self.embedding(source), self.embedding(target), None, {"depth": 0, "causal": True})
        else:
            (state,) = inputs
        assert state.info == {"depth": self.info.index, "causal": True}
        further = {**state.info, "depth": self.info.index + 1}
        if self.is_encoder:
            return state._replace(source=self.layer(state.source), info=further)
        memory = state.source if state.memory is None else state.memory
        state = State(state.source, self.layer(state.target, memory), memory, further)
        return self.head(state.target) if self.info.is_last else state


@on_ranks(2)
def test_an_encoder_and_a_decoder(rank: int) -> None:
    compare(Translator, [(tokens(k), tokens(k + 50), tokens(k + 100)) for k in range(NUM_MICROBATCHES)])


class LoRA(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, base.in_features))
        self.up = nn.Parameter(torch.randn(base.out_features, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T


def with_adapters(info: StageInfo) -> nn.Module:
    """The first stage is frozen: nothing asks it for gradients."""
    seed_cpu(info.index)
    layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2)).requires_grad_(False)
    return nn.Sequential(*layers if info.is_first else map(LoRA, layers))


@on_ranks(2)
def test_adapters_of_frozen_layers(rank: int) -> None:
    data = [(random(BATCH, WIDTH, seed=k), random(BATCH, WIDTH, seed=k + 100)) for k in range(NUM_MICROBATCHES)]
    compare(with_adapters, data)


def with_gaps(info: StageInfo) -> nn.Module:
    seed_cpu(info.index)
    layout = {2: [3, 0], 4: [1, 0, 2, 0]}[info.num_stages]
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in distribute_layers(3, info, layout=layout)))


@on_ranks(2)
def test_stages_without_layers(rank: int) -> None:
    compare(with_gaps, [(random(BATCH, WIDTH, seed=k), random(BATCH, WIDTH, seed=k + 100)) for k in range(3)])


# What a stage hands on


class Shaped(nn.Module):
    """Hands on its numbers in a container, and takes them out of it."""

    def __init__(self, info: StageInfo, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> None:
        super().__init__()
        seed_cpu(info.index)
        self.info, self.pack, self.unpack = info, pack, unpack
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        x = self.layer(x if self.info.is_first else self.unpack(x)).tanh()
        return x if self.info.is_last else self.pack(x)


def the_only(items: list[Tensor]) -> Tensor:
    assert type(items) is list
    (item,) = items
    return item


CONTAINERS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "a list of one": (lambda x: [x], the_only),
    "a dict of one": (lambda x: {"x": x}, lambda m: m["x"]),
    "a list of lists": (lambda x: [[x, None], [x * 2, [3]]], lambda m: m[0][0] + m[1][0] * m[1][1][0]),
    "two in a list": (lambda x: [x, x.detach()], lambda m: m[0] + m[1]),
}


@on_ranks(2)
def test_a_stage_receives_what_the_one_before_returned(rank: int) -> None:
    data = [(random(BATCH, WIDTH, seed=k), random(BATCH, WIDTH, seed=k + 100)) for k in range(2)]
    for functions in CONTAINERS.values():
        compare(lambda info: Shaped(info, *functions), data, ("1f1b", "zbv"))  # noqa: B023


# Shapes


def of_sizes(*sizes: int) -> list[Any]:
    return [(random(size, WIDTH, seed=k), random(size, WIDTH, seed=k + 100)) for k, size in enumerate(sizes)]


@on_ranks(2)
def test_microbatches_that_differ_in_the_first_step_may_always(rank: int) -> None:
    parallel_state.initialize_model_parallel(2)
    for schedule in ("1f1b", "zbv"):
        infos = stages_for_rank(schedule)
        chunks = [PipelineStage(mlp(info), info) for info in infos]
        for sizes in ((2, 3, 3, 1), (4, 4), (1, 5, 2)):
            for chunk in chunks:
                chunk.zero_grad()
            data = of_sizes(*sizes)
            train(schedule, chunks, data)
            expected, _ = whole(mlp, infos[0].num_stages, data)
            for chunk, info in zip(chunks, infos):
                for mine, theirs in zip(chunk.parameters(), expected[info.index].parameters()):
                    assert torch.equal(mine.grad, theirs.grad)


@on_ranks(2)
def test_other_shapes_after_the_first_step(rank: int) -> None:
    """They are found anew where they differ by what all ranks know. Otherwise all ranks are told."""
    parallel_state.initialize_model_parallel(2)
    (info,) = stages_for_rank("1f1b")
    chunk = PipelineStage(mlp(info), info, PipelineConfig(timeout=20.0))
    for _ in range(2):
        train("1f1b", [chunk], of_sizes(4, 4))
        train("1f1b", [chunk], of_sizes(3, 3, 3), forward_only=True)
        train("1f1b", [chunk], of_sizes(2, 2, 2), micro_batch_size=2)
    with pytest.raises((ValueError, megapipe.PipelineError), match=r"stage 0 returned float32.*microbatch 1") as caught:
        train("1f1b", [chunk], of_sizes(4, 3))
    assert "stage 1 expects float32[4, 8]. It was so in the first step." in str(caught.value)
    assert "pass another seq_length or micro_batch_size with it" in str(caught.value)


@on_ranks(2)
def test_stages_that_are_trained_only_later(rank: int) -> None:
    """In the first step nobody sent gradients back to them, and only their own ranks know when they are unfrozen: the
    next step failed on every rank."""
    parallel_state.initialize_model_parallel(2)
    for schedule in ("1f1b", "zbv", "interleaved_1f1b"):
        infos = stages_for_rank(schedule)
        chunks = [PipelineStage(mlp(info), info) for info in infos]
        expected = [mlp(StageInfo(index, infos[0].num_stages)) for index in range(infos[0].num_stages)]
        for num_frozen in (len(expected) - 1, len(expected) - 1, 1, 0, 1, 0):
            for index, module in [*enumerate(expected), *((info.index, c) for info, c in zip(infos, chunks))]:
                module.requires_grad_(index >= num_frozen)
                module.zero_grad()
            train(schedule, chunks, of_sizes(4, 4, 4))
            for x, target in of_sizes(4, 4, 4):
                (loss_of(nn.Sequential(*expected)(x), target) / 3).backward()
            for chunk, info in zip(chunks, infos):
                for mine, theirs in zip(chunk.parameters(), expected[info.index].parameters(), strict=True):
                    assert (mine.grad is None) == (theirs.grad is None) == (info.index < num_frozen)
                    assert mine.grad is None or torch.equal(mine.grad, theirs.grad)


class Counting(nn.Module):
    """Hands on a number and a text that change from call to call, from the second step on."""

    def __init__(self, info: StageInfo) -> None:
        super().__init__()
        seed_cpu(info.index)
        self.info, self.layer, self.num_calls = info, nn.Linear(WIDTH, WIDTH), 0

    def forward(self, x: Any) -> Any:
        self.num_calls += 1
        number = max(self.num_calls - NUM_MICROBATCHES, 0)
        values = {"number": number, "text": "x" * number, "rest": (number / 2, number > 2)}
        if not self.info.is_first:
            x, received = x
            assert received == values
        x = self.layer(x)
        return x if self.info.is_last else (x, values)


@on_ranks(2)
def test_plain_values_that_change(rank: int) -> None:
    """Every second step failed: those of the first were expected from then on."""
    data = [(random(BATCH, WIDTH, seed=k), random(BATCH, WIDTH, seed=k + 100)) for k in range(NUM_MICROBATCHES)]
    compare(Counting, data, ("1f1b", "interleaved_1f1b", "zbv"))


@on_ranks(2)
def test_one_rank_with_new_chunks_is_told(rank: int) -> None:
    """It finds shapes while the other expects those it has found: no rank may wait for a header that nobody sends."""
    parallel_state.initialize_model_parallel(2)
    (info,) = stages_for_rank("1f1b")
    chunk = PipelineStage(mlp(info), info, PipelineConfig(timeout=20.0))
    train("1f1b", [chunk], of_sizes(4, 4))
    other = PipelineStage(mlp(info), info, chunk.config) if rank else chunk
    with pytest.raises(
        ValueError, match=r"the message from stage 0 to stage 1: float32\[4, 8\] on rank 0; described by"
    ):
        train("1f1b", [other], of_sizes(4, 4))
    start_again()
    parallel_state.initialize_model_parallel(2)
    with pytest.raises(ValueError, match="disagree on seq_length, micro_batch_size and decoder_seq_length"):
        train("1f1b", [other], of_sizes(4, 4), micro_batch_size=4 + rank)
    train("1f1b", [other], of_sizes(4, 4))


class Inferring(nn.Sequential):
    """Says what it exchanges."""

    def infer_stage_inputs_from_pipeline_inputs(self, inputs: dict[str, Tensor], num_microbatches: int) -> Tensor:
        return torch.empty(len(inputs["images"]) // num_microbatches, WIDTH)

    infer_stage_outputs_from_pipeline_inputs = infer_stage_inputs_from_pipeline_inputs


@on_ranks(2)
def test_shapes_that_the_model_says_are_not_looked_for(rank: int) -> None:
    parallel_state.initialize_model_parallel(2)
    (info,) = stages_for_rank("1f1b")
    chunk = PipelineStage(Inferring(*mlp(info)), info)
    for size in (4, 3):
        train("1f1b", [chunk], of_sizes(size, size), pipeline_inputs={"images": torch.empty(2 * size, WIDTH)})
    assert not megapipe.runtime.session.Session.of(
        parallel_state.get_pipeline_model_parallel_group()
    ).found_shapes._seen


# The module in it


def test_names_are_those_of_the_module() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    stage = PipelineStage(module, StageInfo(0, 2))
    assert list(stage.state_dict()) == list(module.state_dict())
    around = nn.ModuleDict({"inner": stage})
    assert list(around.state_dict()) == [f"inner.{name}" for name in module.state_dict()]
    for target in (stage, around):
        saved = {name: torch.full_like(tensor, 3) for name, tensor in target.state_dict().items()}
        nn.init.zeros_(module[0].weight)
        target.load_state_dict(saved)
        assert module[0].weight.eq(3).all()
    with pytest.raises(RuntimeError, match=r'Missing key.* "module.0.weight"'):
        stage.load_state_dict({name: t for name, t in stage.state_dict().items() if name != "0.weight"})


def test_what_is_no_stage() -> None:
    with pytest.raises(TypeError, match="takes a module, got a function"):
        PipelineStage(mlp, StageInfo(0, 2))
    with pytest.raises(TypeError, match=r"takes a StageInfo second, .* got 0"):
        PipelineStage(nn.Linear(2, 2), 0)
    with pytest.raises(ValueError, match="stage 1 has received nothing"):
        PipelineStage(nn.Linear(2, 2), StageInfo(1, 2))(torch.ones(2))


class Segmented(nn.Module):
    def __init__(self, info: StageInfo) -> None:
        super().__init__()
        seed_cpu(info.index)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward_segments(self, x: Tensor) -> Iterator[None]:
        for layer in self.layers:
            x = Window.apply(layer(x).tanh())
            yield
        return x

    def forward(self, x: Tensor) -> Tensor:
        return run_segments(self.forward_segments(x))


@on_ranks(2)
def test_a_forward_in_segments_has_its_input_too(rank: int) -> None:
    """In segments, forwards of wrappers are skipped: the module of a later stage would have been given the batch."""
    data = [(random(BATCH, WIDTH, seed=k), random(BATCH, WIDTH, seed=k + 100)) for k in range(NUM_MICROBATCHES)]

    def in_parts(data_iterator: Iterator[Any], chunk: nn.Module) -> Any:
        x, target = next(data_iterator)
        return in_segments(chunk, x), lambda output: (loss := loss_of(output, target), loss.detach())

    compare(Segmented, data, ("1f1b", "dualpipev"), forward_step_func=in_parts)


def captured(rank: int) -> None:
    parallel_state.initialize_model_parallel(2)
    data = [(random(BATCH, WIDTH, seed=k), random(BATCH, WIDTH, seed=k + 100)) for k in range(NUM_MICROBATCHES)]
    infos = stages_for_rank("zb1p")
    chunks = [PipelineStage(mlp(info), info) for info in infos]
    for chunk, info in zip(chunks, infos):
        x = torch.empty(BATCH, WIDTH)
        graph.capture(chunk, (x,), input_tensor=None if info.is_first else x)
    train("zb1p", chunks, data)
    expected, _ = whole(mlp, infos[0].num_stages, data)
    for chunk, info in zip(chunks, infos):
        for mine, theirs in zip(chunk.parameters(), expected[info.index].parameters()):
            assert torch.equal(mine.grad, theirs.grad)


def test_a_captured_stage(ranks: RankPool) -> None:
    skip_without_tracer()
    ranks.run(2, captured)

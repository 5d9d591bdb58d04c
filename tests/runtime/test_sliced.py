"""Sequences cut into slices: the model's gradients, its losses, data and messages, and what is refused."""

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tools.against import Received, assert_same_gradients, use_groups
from tools.by_slices import run_by_slices
from tools.marks import needs_fsdp_on_cpu, needs_graphs
from tools.models import seed_cpu
from tools.ranks import on_ranks
from tools.replicas import reduced
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import megapipe
from megapipe import PipelineError, StageInfo, distribute_layers, parallel_state, slices, stages_for_rank, weight_grad
from megapipe.analysis import load_timeline
from megapipe.plan import Action, Costs, make_plan, place_weights

HIDDEN, HEADS, VOCABULARY, BATCH = 8, 2, 11, 2


class Layer(nn.Module):
    """A recurrent state, which a slice hands to the next, and causal attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.step = nn.Linear(HIDDEN, HIDDEN)
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.out = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        state = self.step(x)
        before = [last for (last,) in slices.earlier((self, "state"))][-1:]
        state = torch.cat([*before, state]).cumsum(0)[len(before) :]
        slices.keep((self, "state"), state[-1:])
        x = x + torch.tanh(state)
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 1, 3, 0, 4)
        seen = slices.attention(q, k, v, owner=self)
        return x + self.out(seen.permute(2, 0, 1, 3).flatten(2))


class Chunk(Received):
    """The layers of a stage. The whole model is the only stage of one."""

    def __init__(self, info: StageInfo, num_layers: int = 4, **config: Any) -> None:
        super().__init__(info, hidden_size=HIDDEN, **config)
        self.num_first = 0
        self.layers = nn.ModuleDict()
        for number in distribute_layers(num_layers, info):
            seed_cpu(number)
            self.layers[str(number)] = Layer()
        seed_cpu(99)
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN) if info.is_first else None
        seed_cpu(98)
        self.head = nn.Linear(HIDDEN, VOCABULARY) if info.is_last else None

    def set_is_first_microbatch(self) -> None:
        self.num_first += 1

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(slices.cut(tokens, 0)) if self.embedding is not None else self.input_tensor
        for layer in self.layers.values():
            x = layer(x)
        return x if self.head is None else self.head(x)


def batches(num_microbatches: int, seq_length: int, seed: int = 1) -> Iterator[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(num_microbatches):
        text = torch.randint(VOCABULARY, (seq_length + 1, BATCH), generator=generator)
        yield {"tokens": text[:-1], "labels": text[1:]}


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    """Of a slice its part of the mean over the microbatch."""
    part = slices.cut(labels, 0)
    return F.cross_entropy(logits.flatten(0, 1), part.flatten(), reduction="sum") / labels.numel()


def forward_step(data_iterator: Iterator[dict[str, Tensor]], model: nn.Module) -> tuple[Tensor, Any]:
    batch = next(data_iterator)

    def loss_func(output: Tensor) -> tuple[Tensor, dict[str, Any]]:
        loss = loss_of(output, batch["labels"])
        return loss, {"loss": loss.detach(), "count": 1, "at": slices.current(), "parts": (loss.detach(),)}

    return model(batch["tokens"]), loss_func


def build(
    schedule: str, num_chunks: int | None = None, dtype: torch.dtype = torch.float32, **options: Any
) -> list[Chunk]:
    use_groups()
    return [Chunk(info, **options).to(dtype) for info in stages_for_rank(schedule, num_chunks=num_chunks)]


def run(schedule: str, model: Any, m: int, lengths: Sequence[int], **options: Any) -> list[Any]:
    chunks = model if isinstance(model, list) else [model]
    chunks[0].config.num_sequence_slices = len(lengths)
    chunks[0].config.sequence_slice_lengths = lengths
    seq_length = sum(lengths)
    seed = options.pop("seed", 1)
    arguments = {"forward_step_func": forward_step, "data_iterator": batches(m, seq_length, seed), **options}
    sizes = {"num_microbatches": m, "seq_length": seq_length, "micro_batch_size": BATCH}
    return megapipe.get_forward_backward_func(schedule)(model=model, **sizes, **arguments)


def reference(
    m: int,
    lengths: Sequence[int],
    by_slices: bool,
    deferred: bool = False,
    dtype: torch.dtype = torch.float32,
    seed: int = 1,
    tied: bool = False,
) -> Chunk:
    """The unpartitioned model after one step, whole or slice by slice.

    Args:
        tied: the head begins as the embedding does. Their gradients are not summed.
    """
    model = Chunk(StageInfo(0, 1)).to(dtype)
    if tied:
        model.head.weight.data.copy_(model.embedding.weight)
    if deferred:
        weight_grad.convert(model)
    for batch in batches(m, sum(lengths), seed):

        def step(batch: dict[str, Tensor] = batch) -> Tensor:
            return loss_of(model(batch["tokens"]), batch["labels"]) / m

        if by_slices:
            run_by_slices(step, lengths, deferred)
        else:
            step().backward()
    return model


known = functools.cache(reference)  # what several tests only read


def assert_same(chunks: Sequence[nn.Module], expected: nn.Module, tolerance: float = 0.0) -> None:
    """Gradients within `tolerance` of the norm of all of them; bit for bit without. In float32 that of a single bias,
    where much cancels out, is off by up to 2.4e-6 of its own norm."""
    norm = torch.stack([p.grad.norm() for p in expected.parameters()]).norm()
    assert_same_gradients(chunks, expected, atol=tolerance * norm.item())


def assert_right(schedule: str, m: int, lengths: Sequence[int], num_chunks: int | None = None) -> None:
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-6)):
        chunks = build(schedule, num_chunks, dtype)
        run(schedule, chunks, m, lengths)
        assert_same(chunks, known(m, lengths, by_slices=False, dtype=dtype), tolerance)
        assert_same(chunks, known(m, lengths, by_slices=True, dtype=dtype))


@pytest.mark.soak
@pytest.mark.parametrize("num_slices", range(1, 9))
@pytest.mark.parametrize("num_microbatches", range(1, 10))
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@on_ranks()
def test_gradients_of_every_size(rank: int, num_ranks: int, num_microbatches: int, num_slices: int) -> None:
    m = num_microbatches
    for lengths in ([2] * num_slices, [1 + (3 * k + m) % 4 for k in range(num_slices)]):
        for schedule in ("seq1f1b", "seq_zb1p"):
            assert_right(schedule, m, lengths)
        if num_ranks <= 2:
            assert_right("seq_interleaved_1f1b", m, lengths, 2)


class Plain(nn.Module):
    """The same layers in a module that knows nothing of stages, so that shapes are found."""

    def __init__(self, chunk: Chunk) -> None:
        super().__init__()
        self.embedding, self.layers, self.head = chunk.embedding, chunk.layers, chunk.head

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.embedding is None else self.embedding(slices.cut(x, 0))
        for layer in self.layers.values():
            x = layer(x)
        return x if self.head is None else self.head(x)


@on_ranks(2)
def test_shapes_of_slices_are_found(rank: int) -> None:
    """In the first step headers precede messages, and gradients come back last slice first: of other sizes than the
    outputs, in the order in which these were sent."""
    (chunk,) = build("seq1f1b")
    stage = megapipe.PipelineStage(Plain(chunk), chunk.info)
    for lengths in ((3, 2, 1), (2, 2, 2)):
        for _ in range(2):
            stage.zero_grad()
            run("seq1f1b", [stage], 3, lengths)
            assert_same([stage.module], reference(3, lengths, by_slices=True))


@on_ranks(2)
def test_slices_in_autocast(rank: int) -> None:
    options = {"enable_autocast": True, "autocast_dtype": torch.bfloat16, "pipeline_dtype": torch.float32}
    chunks = build("seq1f1b", **options)
    run("seq1f1b", chunks, 2, (3, 3))
    assert_same(chunks, reference(2, (3, 3), by_slices=False), 0.05)


@on_ranks(2)
def test_each_microbatch_has_one_report_and_one_item_of_data(rank: int) -> None:
    (chunk,) = build("seq1f1b")
    data = batches(4, 7)
    reports = run("seq1f1b", chunk, 3, (4, 2, 1), data_iterator=data)
    assert len(list(data)) == 1  # each chunk has read three items
    assert chunk.num_first == 1
    if not chunk.info.is_last:
        assert reports == []
        return
    model = Chunk(StageInfo(0, 1))
    losses = [loss_of(model(batch["tokens"]), batch["labels"]) for batch in batches(3, 7)]
    for report, loss in zip(reports, losses, strict=True):
        torch.testing.assert_close(report["loss"], loss.detach())
        assert torch.equal(report["parts"][0], report["loss"])
        assert report["count"] == 3
        assert report["at"] == slices.SequenceSlice(2, 3, 6, 1)
    assert slices.current() is None


@pytest.mark.parametrize("per_token", [False, True])
@on_ranks(2)
def test_a_loss_is_divided_by_the_tokens_of_all_slices(rank: int, per_token: bool) -> None:
    """A slice's own number of tokens would give each slice the same weight, however few tokens it has."""
    lengths, m = (3, 2, 1), 2
    counted = []

    def step(data_iterator: Iterator[dict[str, Tensor]], model: nn.Module) -> tuple[Tensor, Any]:
        batch = next(data_iterator)

        def loss_func(output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            labels = slices.cut(batch["labels"], 0)
            loss = F.cross_entropy(output.flatten(0, 1), labels.flatten(), ignore_index=0, reduction="sum")
            num_tokens = (labels != 0).sum()
            return loss, num_tokens, {"sums": torch.stack([loss.detach(), num_tokens])}

        return model(batch["tokens"]), loss_func

    def finalize(models: Any, num_tokens: Tensor | None) -> None:
        counted.append(num_tokens)

    chunks = build("seq1f1b", calculate_per_token_loss=per_token, finalize_model_grads_func=finalize)
    reports = run("seq1f1b", chunks, m, lengths, forward_step_func=step)
    whole = Chunk(StageInfo(0, 1))
    sums = []
    for batch in batches(m, sum(lengths)):
        output, loss_func = step(iter([batch]), whole)
        loss, num_tokens, report = loss_func(output)
        sums.append(report["sums"])
        (loss if per_token else loss / num_tokens / m).backward()
    assert_same(chunks, whole, 1e-6)
    if chunks[0].info.is_last:
        torch.testing.assert_close([report["sums"] for report in reports], sums)
        assert (counted[0] is None) == (not per_token)
        assert not per_token or counted[0] == sum(one[1] for one in sums)


@on_ranks(1)
def test_tokens_divide_in_the_dtype_of_the_loss(rank: int) -> None:
    """The weight of a token was computed in float32 where tokens are whole numbers or Python's: gradients in float64
    were off by 3e-8. And a loss function that counts into the same tensor each time counted for all slices before."""
    parallel_state.initialize_model_parallel(1)
    (info,) = stages_for_rank("seq1f1b")
    x, count = torch.randn(2, 8, 4, dtype=torch.float64), torch.zeros((), dtype=torch.int64)
    for count_by in (int, torch.tensor, count.fill_, lambda k: k * 1.1):

        def step(data: Iterator[Tensor], model: nn.Module, count_by: Any = count_by) -> tuple[Tensor, Any]:
            part = slices.cut(next(data), 1)
            return model(part), lambda output: (output.square().sum(), count_by(part.shape[1] + 1), None)

        config = megapipe.PipelineConfig(num_sequence_slices=3)
        chunk = megapipe.PipelineStage(nn.Linear(4, 4).double(), info, config)
        run("seq1f1b", [chunk], 1, (3, 3, 2), forward_step_func=step, data_iterator=iter([x]))
        grad, chunk.module.weight.grad = chunk.module.weight.grad, None
        (chunk(x).square().sum() / count_by(11)).backward()
        torch.testing.assert_close(grad, chunk.module.weight.grad, rtol=1e-12, atol=1e-12)


@on_ranks(2)
def test_validation_reports_microbatches_and_hands_out_slices(rank: int) -> None:
    (chunk,) = build("seq1f1b")
    reports = run("seq1f1b", chunk, 3, (4, 2), forward_only=True)

    def without_loss(data_iterator: Iterator[dict[str, Tensor]], model: nn.Module) -> tuple[Tensor, None]:
        return model(next(data_iterator)["tokens"]), None

    def with_reports_only(data_iterator: Iterator[dict[str, Tensor]], model: nn.Module) -> tuple[Tensor, Any]:
        return model(next(data_iterator)["tokens"]), lambda output: (0, None, len(output))

    outputs = run("seq1f1b", chunk, 3, (4, 2), forward_only=True, forward_step_func=without_loss)
    lengths = run("seq1f1b", chunk, 3, (4, 2), forward_only=True, forward_step_func=with_reports_only)
    assert lengths == ([6, 6, 6] if chunk.info.is_last else [])
    assert all(parameter.grad is None for parameter in chunk.parameters())
    if chunk.info.is_last:
        model = Chunk(StageInfo(0, 1))
        for batch, report, output in zip(batches(3, 6), reports, outputs, strict=True):
            logits = model(batch["tokens"]).detach()
            torch.testing.assert_close(report["loss"], loss_of(logits, batch["labels"]))
            assert [part.shape[0] for part in output] == [4, 2]
            torch.testing.assert_close(torch.cat(output), logits)


@on_ranks(2)
def test_a_recorded_step_has_slices(rank: int, tmp_path: Path) -> None:
    recorder = megapipe.TimelineRecorder()
    chunks = build("seq1f1b", record_timeline=recorder)
    for _ in range(2):
        run("seq1f1b", chunks, 2, (4, 2))
    timeline = recorder.gather()
    if rank == 0:
        timeline.save(tmp_path / "timeline.json")
        assert load_timeline(tmp_path / "timeline.json").steps[0][0].spans[1].action == Action(0, "F", 0, 1)
    timeline.plan.check()
    assert timeline.plan.actions == megapipe.plan.make_plan("seq1f1b", 2, 2, num_slices=2).actions
    assert len(timeline.costs().slices) == 2
    assert timeline.predict().makespan > 0


@on_ranks(2)
def test_gradients_are_exchanged_after_the_last_slice(rank: int) -> None:
    log: list[str] = []

    @contextmanager
    def no_sync() -> Iterator[None]:
        log.append("held")
        yield
        log.append("released")

    def step(data_iterator: Iterator[dict[str, Tensor]], model: nn.Module) -> tuple[Tensor, Any]:
        output, loss_func = forward_step(data_iterator, model)
        if output.requires_grad:
            output.register_hook(lambda grad: log.append("backward"))
        return output, loss_func

    for schedule, last in (("seq1f1b", ["released", "backward"]), ("seq_zb1p", ["backward", "released"])):
        log.clear()
        run(schedule, build(schedule, no_sync_func=no_sync), 2, (3, 2), forward_step_func=step)
        assert log == ["held", *["backward"] * 3, *last, "held", "released"]
    log.clear()
    synced = build("seq1f1b", no_sync_func=no_sync, grad_sync_func=lambda parameters: log.append("synced"))
    run("seq1f1b", synced, 2, (3, 2), forward_step_func=step)
    assert log == ["held", *["backward"] * 4, "released", "synced", "held", "released"]


@needs_fsdp_on_cpu
@on_ranks(4)
def test_slices_of_sharded_chunks(rank: int) -> None:
    """Both replicas have the same data, so that the mean of their gradients is that of either."""
    from torch.distributed.fsdp import fully_shard

    parallel_state.initialize_from_mesh(init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp")))
    for schedule in ("seq1f1b", "seq_zb1p"):
        (chunk,) = build(schedule)
        mesh = parallel_state.get_data_parallel_mesh()
        for layer in chunk.layers.values():
            fully_shard(layer, mesh=mesh)
        fully_shard(chunk, mesh=mesh)
        run(schedule, chunk, 3, (3, 2, 1))
        assert_same_gradients([chunk], reference(3, (3, 2, 1), by_slices=True))


@pytest.mark.parametrize("schedule", ["seq1f1b", "seq_interleaved_1f1b", "seq_zb1p"])
@on_ranks(2)
def test_weights_tied_between_the_ends(rank: int, schedule: str) -> None:
    chunks = build(schedule, 2 if "interleaved" in schedule else None)
    tied = megapipe.TiedWeights(chunks, ["embedding.weight", "head.weight"])
    for chunk in chunks:
        chunk.config.finalize_model_grads_func = tied.sum_gradients
        weight_grad.convert(chunk)
    run(schedule, chunks, 3, (3, 2, 1))
    expected = reference(3, (3, 2, 1), by_slices=True, deferred="zb" in schedule, tied=True)
    both = expected.embedding.weight.grad + expected.head.weight.grad
    expected.embedding.weight.grad = expected.head.weight.grad = both
    assert_same(chunks, expected)


@on_ranks(4)
def test_replicas_of_sliced_pipelines(rank: int) -> None:
    """Two replicas of two stages, each with data of its own. The sum of two gradients has only one order."""
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    for schedule in ("seq1f1b", "seq_zb1p"):
        (chunk,) = build(schedule)
        reduced([chunk])
        run(schedule, chunk, 3, (3, 2, 1), seed=parallel_state.get_data_parallel_rank())
        expected, other = (reference(3, (3, 2, 1), by_slices=True, seed=replica) for replica in range(2))
        for parameter, others in zip(expected.parameters(), other.parameters()):
            parameter.grad = (parameter.grad + others.grad) / 2
        assert_same([chunk], expected)


@on_ranks(2)
def test_a_plan_of_slices_runs(rank: int) -> None:
    chunks = build("seq_zb1p")
    plan = place_weights(make_plan("seq_zb1p", 2, 3, num_slices=2), Costs(1.0, 3.0, 0.5), 100)
    run(plan, chunks, 3, (3, 2))
    assert_same(chunks, reference(3, (3, 2), by_slices=True))
    # The error of this rank, or of the other one.
    with pytest.raises((ValueError, PipelineError), match=r"is a plan of 3 microbatches in 2 slice\(s\), got 2 in 2"):
        run(plan, chunks, 2, (3, 2))


REFUSED = [
    ({}, {"schedule": "1f1b"}, "1f1b cannot cut sequences, got 2 slices: choose seq1f1b, "),
    ({"sequence_slice_lengths": [1, 2, 3]}, {}, "has 3 lengths, but num_sequence_slices is 2"),
    ({"sequence_slice_lengths": [1, 2]}, {}, r"a sequence of 6 cannot be cut into 2 slices of \[1, 2\]"),
    ({"sequence_slice_lengths": [6, 0]}, {}, "a sequence of whole numbers from 1 on"),
    ({"num_sequence_slices": 7}, {}, r"a sequence of 6 cannot be cut into 7 slices of \[1, 1, 1, 1, 1, 1, 0\]"),
    ({"num_sequence_slices": 0}, {}, "num_sequence_slices must be a whole number from 1 on"),
    ({}, {"seq_length": None}, "num_sequence_slices=2 takes seq_length"),
    (
        {"sequence_parallel": True, "tensor_model_parallel_size": 2, "sequence_slice_lengths": [3, 3]},
        {},
        "each a multiple of the 2 tensor-parallel ranks",
    ),
    ({"context_parallel_size": 2}, {}, "does not go with context_parallel_size: cut sequences one way only"),
    ({"variable_seq_lengths": True}, {}, "does not go with variable_seq_lengths"),
    ({}, {"pipeline_inputs": {}}, "does not go with pipeline_inputs"),
    ({"num_microbatches_with_partial_activation_checkpoints": 1}, {}, "does not go with num_microbatches_with_partial"),
]


@pytest.mark.parametrize(("config", "arguments", "text"), REFUSED)
def test_what_does_not_go_with_slices_is_refused(config: Any, arguments: Any, text: str) -> None:
    model = Chunk(StageInfo(0, 1), **{"num_sequence_slices": 2, **config})
    arguments = {"schedule": "seq1f1b", "seq_length": 6, "micro_batch_size": BATCH, **arguments}
    function = megapipe.get_forward_backward_func(arguments.pop("schedule"))
    data = {"data_iterator": batches(2, 6), "num_microbatches": 2}
    with pytest.raises(ValueError, match=text):
        function(forward_step_func=forward_step, model=model, **data, **arguments)


def test_a_model_that_does_not_ask_for_its_slice_is_refused() -> None:
    """On one rank each slice computed the whole sequence, and trained on it once per slice, in silence."""
    model = nn.Linear(3, 1)
    stage = megapipe.PipelineStage(model, StageInfo(0, 1), megapipe.PipelineConfig(num_sequence_slices=2))

    def step(data_iterator: Iterator[Tensor], stage: nn.Module) -> tuple[Tensor, Any]:
        return stage(next(data_iterator)), lambda output: (output.mean(), {})

    with pytest.raises(ValueError, match=r"run slice 0 of 2 without asking which it is.* megapipe.slices.cut"):
        run("seq1f1b", stage, 1, (3, 3), forward_step_func=step, data_iterator=iter(torch.ones(1, 6, 3)))


@needs_graphs
def test_a_captured_stage_is_refused() -> None:
    """Its graph was made of one sequence, and would leave out what earlier slices kept."""
    from megapipe.graph import capture

    model = Chunk(StageInfo(0, 1), num_sequence_slices=2)
    capture(model, (torch.zeros(3, BATCH, dtype=torch.long),))
    with pytest.raises(ValueError, match="does not go with a captured stage: its graph hands on no state"):
        run("seq1f1b", model, 2, (3, 3))


def test_slices_are_as_equal_as_can_be() -> None:
    lengths = []

    def step(data_iterator: Iterator[dict[str, Tensor]], model: nn.Module) -> tuple[Tensor, Any]:
        this = slices.current()
        lengths.append(None if this is None else this.length)
        return forward_step(data_iterator, model)

    for options, expected in (
        ({"num_sequence_slices": 4}, [3, 3, 2, 2]),
        ({"num_sequence_slices": 3, "sequence_parallel": True, "tensor_model_parallel_size": 2}, [4, 4, 2]),
        ({"num_sequence_slices": 1}, [None]),
    ):
        lengths.clear()
        model = Chunk(StageInfo(0, 1), **options)
        megapipe.get_forward_backward_func("seq1f1b")(
            forward_step_func=step, data_iterator=batches(1, 10), model=model, num_microbatches=1, seq_length=10
        )
        assert lengths == expected

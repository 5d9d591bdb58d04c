"""A forward and a backward at once, on one thread, in the ways that a model may know."""

import functools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import SEQUENCE, Stage, assert_same_gradients, build, loss_of, reference, run
from ranks import on_ranks
from torch import Tensor, nn
from torch.autograd import Variable

import megapipe
from megapipe import TimelineRecorder, parallel_state, stages_for_rank
from megapipe.analysis import load_timeline
from megapipe.overlap import fill_window, in_segments, run_segments
from megapipe.plan import make_plan
from megapipe.runtime import boundary, overlapped
from megapipe.weight_grad import DeferredGrads

NUM_LAYERS = 8


class Window(torch.autograd.Function):
    """Stands for a communication: its backward has an overlap window."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        LOG.append("window")
        fill_window()
        return grad


LOG: list[str] = []


class InSegments(Stage):
    """Each layer waits once."""

    def forward_segments(self, tokens: Tensor, seed: int = 0) -> Iterator[None]:
        x = self.input_tensor if self.embedding is None else self.embedding(tokens)
        for layer in self.layers.values():
            x = Window.apply(x)
            LOG.append("segment")
            yield
            x = layer(x)
        return x if self.head is None else self.head(x)

    def forward(self, tokens: Tensor, seed: int = 0) -> Tensor:
        return run_segments(self.forward_segments(tokens, seed))


expect = functools.lru_cache(maxsize=None)(reference)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@on_ranks()
def test_equal_in_segments(rank: int, num_ranks: int) -> None:
    build("dualpipev", num_ranks, NUM_LAYERS)
    for m in range(2 * num_ranks, 4 * num_ranks + 1, max(1, num_ranks // 2)):
        chunks = [InSegments(info, NUM_LAYERS, deferred=True) for info in stages_for_rank("dualpipev")]
        LOG.clear()
        reports = run("dualpipev", chunks, m)
        assert LOG.count("window") == LOG.count("segment") == m * sum(len(chunk.layers) for chunk in chunks)
        in_windows = sum(LOG[k : k + 2] == ["window", "segment"] for k in range(len(LOG)))
        assert in_windows > m // 2  # forwards went on while backwards waited
        expected, losses = expect(NUM_LAYERS, m)
        assert_same_gradients(chunks, expected)
        if rank == 0:
            assert [report["loss"] for report in reports] == losses


@on_ranks(2)
def test_a_timeline_tells_its_pairs(rank: int) -> None:
    """A measured step showed the halves of a pair one after the other: a forward that took no time, and a backward as
    long as both."""
    planned = make_plan("dualpipev", 2, 8).program.pairs
    for model, expected in ((InSegments, planned), (Stage, [{}, {}])):
        build("dualpipev", 2, NUM_LAYERS)
        chunks = [model(info, NUM_LAYERS, deferred=True) for info in stages_for_rank("dualpipev")]
        recorder = TimelineRecorder()
        for chunk in chunks:
            chunk.config.record_timeline = recorder
        run("dualpipev", chunks, 8)
        timeline = recorder.gather()
        assert timeline.plan.program.pairs == expected
        with tempfile.TemporaryDirectory() as folder:
            timeline.save(Path(folder) / "timeline.json")
            loaded = load_timeline(Path(folder) / "timeline.json")
        assert loaded is not None
        assert loaded.plan.program.pairs == expected
        assert [rank.pairs for rank in loaded.steps[0]] == [rank.pairs for rank in timeline.steps[0]]
    assert any(planned)


def call_the_model(data_iterator: Iterator[dict[str, Any]], model: nn.Module) -> Any:
    batch = next(data_iterator)
    return model(batch["tokens"], batch["seed"]), lambda output: (loss_of(output, batch["labels"]), {})


@on_ranks(2)
def test_a_forward_step_func_that_calls_its_model_is_not_overlapped(rank: int) -> None:
    build("dualpipev", 2, NUM_LAYERS)
    chunks = [InSegments(info, NUM_LAYERS, deferred=True) for info in stages_for_rank("dualpipev")]
    LOG.clear()
    run("dualpipev", chunks, 8, forward_step_func=call_the_model)
    num_layers = len(chunks[0].layers)
    assert len(LOG) == 8 * 2 * 2 * num_layers
    for start in range(0, len(LOG), num_layers):
        assert len(set(LOG[start : start + num_layers])) == 1, "a forward or a backward of a chunk, whole"
    assert_same_gradients(chunks, expect(NUM_LAYERS, 8)[0])


@on_ranks(2)
def test_what_a_pair_makes_is_sent_early(rank: int) -> None:
    """The forward of a pair is sent before its backward ends, also where they run one after the other. Where they are
    overlapped, the gradient is sent before the Ws."""
    for model in (Stage, InSegments):
        events: list[str] = []
        build("dualpipev", 2, NUM_LAYERS)
        chunks = [model(info, NUM_LAYERS, deferred=True) for info in stages_for_rank("dualpipev")]
        original, original_backward = boundary.RemoteAbove.send_output, boundary.RemoteBelow.send_gradient
        weights = megapipe.runtime.stage.Stage.backward_weights
        pair = megapipe.runtime.pipeline.Pipeline.forward_backward_step

        def watched(self: Any, *args: Any, pair: Any = pair, events: list[str] = events) -> None:
            events.append("(")
            pair(self, *args)
            events.append(")")

        def send(self: Any, output: Any, original: Any = original, events: list[str] = events) -> None:
            events.append("F")
            original(self, output)

        def send_backward(self: Any, grads: Any, original: Any = original_backward, events: list[str] = events) -> None:
            events.append("B")
            original(self, grads)

        def run_weights(self: Any, deferred: Any, original: Any = weights, events: list[str] = events) -> None:
            events.append("W")
            original(self, deferred)

        boundary.RemoteAbove.send_output, boundary.RemoteBelow.send_gradient = send, send_backward
        megapipe.runtime.stage.Stage.backward_weights = run_weights
        megapipe.runtime.pipeline.Pipeline.forward_backward_step = watched
        try:
            run("dualpipev", chunks, 8)
        finally:
            boundary.RemoteAbove.send_output, boundary.RemoteBelow.send_gradient = original, original_backward
            megapipe.runtime.stage.Stage.backward_weights = weights
            megapipe.runtime.pipeline.Pipeline.forward_backward_step = pair
        expected = ["(", "F", ")", "B"] if model is Stage else ["(", "F", "B", "W", ")"]
        assert expected in [events[k : k + len(expected)] for k in range(len(events))]
        if model is InSegments:
            assert events.count("B") == 8  # nothing is sent twice


def test_a_lone_backward_fills_its_windows_with_its_own_weight_gradients() -> None:
    """And calls each weight's hooks once per microbatch, when all is done. A model that never stops defers nothing."""
    for model, has_windows in ((InSegments, True), (NeverStops, False)):
        LOG.clear()
        hooked: list[str] = []
        chunk = model(megapipe.StageInfo(0, 1), 2, deferred=True)
        for name, parameter in chunk.named_parameters():
            parameter.register_post_accumulate_grad_hook(lambda _, name=name, hooked=hooked: hooked.append(name))
        for layer in chunk.layers.values():
            layer.up.register_forward_pre_hook(lambda *_: LOG.append("F"))
        original = DeferredGrads.compute

        def compute(self: DeferredGrads, original: Any = original) -> None:
            LOG.append(f"{sum(len(each.left) for weights in self._running.values() for each in weights.values())} Ws")
            original(self)

        DeferredGrads.compute = compute
        try:
            for _ in range(2):
                run("no_pipelining", [chunk], 2)
        finally:
            DeferredGrads.compute = original
        last_backward = LOG[LOG.index("F", len(LOG) - LOG[::-1].index("F") - 1) + 1 :]
        if has_windows:  # those of the head and the last layer, and of the first layer; at the end the embedding's
            assert last_backward == ["window", "3 Ws", "window", "2 Ws"]
        else:
            assert last_backward == []
        assert sorted(hooked) == sorted(4 * [name for name, _ in chunk.named_parameters()])
        assert_same_gradients([chunk], expect(2, 2, seeds=(0, 0))[0])


class NeverStops(Stage):
    def forward_segments(self, tokens: Tensor, seed: int = 0) -> Iterator[None]:
        yield from ()
        return Stage.forward(self, tokens, seed)


class Breaks(InSegments):
    def forward_segments(self, tokens: Tensor, seed: int = 0) -> Iterator[None]:
        self.count = getattr(self, "count", 0) + 1
        output = yield from super().forward_segments(tokens, seed)
        if self.count == 6:
            raise RuntimeError("the sixth forward breaks")
        return output


@on_ranks(2)
def test_a_forward_that_fails_inside_of_a_backward(rank: int) -> None:
    build("dualpipev", 2, NUM_LAYERS)
    model = Breaks if rank == 1 else InSegments
    with pytest.raises((RuntimeError, megapipe.PipelineError), match="the sixth forward breaks"):
        run("dualpipev", [model(info, NUM_LAYERS) for info in stages_for_rank("dualpipev")], 8)
    chunks = [InSegments(info, NUM_LAYERS) for info in stages_for_rank("dualpipev")]
    run("dualpipev", chunks, 4)
    assert_same_gradients(chunks, reference(NUM_LAYERS, 4)[0])


# DualPipe's hook


class Chunk(nn.Module):
    """As in DualPipe's example: a plain MLP whose class overlaps, here one after the other."""

    calls = 0

    def __init__(self, hidden: int, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.up = nn.Linear(hidden, 4 * hidden, bias=False)
        self.down = nn.Linear(4 * hidden, hidden, bias=False)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.up(x)))

    @classmethod
    def overlapped_forward_backward(
        cls,
        module0: nn.Module,
        inputs0: list[Tensor],
        criterion0: Any,
        labels0: list[Tensor],
        module1: nn.Module,
        loss1: Any,
        outputs1: list[Any],
        output_grads1: list[Tensor],
    ) -> tuple[list[Tensor], Tensor | None]:
        Chunk.calls += 1
        outputs0 = [module0(*inputs0)]
        loss0 = None if criterion0 is None else criterion0(*outputs0, *labels0)
        if loss1 is not None:
            loss1.backward()
            loss1.detach_()
        else:
            Variable._execution_engine.run_backward(
                tuple(outputs1), tuple(output_grads1), False, False, (), allow_unreachable=True, accumulate_grad=True
            )
        return outputs0, loss0


class Adapted(Chunk):
    """What a model written for DualPipe needs besides: to be given its input."""

    def __init__(self, hidden: int, seed: int) -> None:
        super().__init__(hidden, seed)
        self.config = SimpleNamespace(hidden_size=hidden, pipeline_dtype=torch.float64)
        self.input: Tensor | None = None

    def set_input_tensor(self, tensors: list[Tensor]) -> None:
        self.input = tensors[0]


HIDDEN, ROWS = 24, 3


def samples(m: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        tuple(torch.randn(SEQUENCE, ROWS, HIDDEN, dtype=torch.float64, generator=generator) for _ in range(2))
        for _ in range(m)
    ]


def forward_step(data_iterator: Iterator[tuple[Tensor, Tensor]], model: nn.Module) -> Any:
    x, target = next(data_iterator)
    given = model.input if model.input is not None else x
    return in_segments(model, given), lambda output: (F.mse_loss(output, target), {})


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@on_ranks()
def test_models_written_for_dualpipe_run(rank: int, num_ranks: int) -> None:
    m = 2 * num_ranks + 3
    parallel_state.initialize_model_parallel(num_ranks)
    infos = stages_for_rank("dualpipev")
    chunks = [Adapted(HIDDEN, info.index) for info in infos]
    whole = nn.Sequential(*(Chunk(HIDDEN, index) for index in range(2 * num_ranks)))
    for x, target in samples(m):
        (F.mse_loss(whole(x), target) / m).backward()
    Chunk.calls = 0
    megapipe.get_forward_backward_func("dualpipev")(
        forward_step_func=forward_step,
        data_iterator=iter(samples(m)),
        model=chunks,
        num_microbatches=m,
        seq_length=SEQUENCE,
        micro_batch_size=ROWS,
    )
    for info, chunk in zip(infos, chunks):
        for ours, theirs in zip(chunk.parameters(), whole[info.index].parameters()):
            assert (ours.grad - theirs.grad).abs().max() < 1e-13
    assert Chunk.calls > 0


@on_ranks(1)
def test_inputs_with_keywords_are_refused_with_a_hook(rank: int) -> None:
    """It takes the model's inputs in their order."""
    parallel_state.initialize_model_parallel(1)

    def forward_step(data_iterator: Iterator[Any], model: nn.Module) -> Any:
        return in_segments(model, x=next(data_iterator)[0]), lambda output: (output.sum(), {})

    with pytest.raises(TypeError, match=r"without keywords: return in_segments\(model, \*inputs\), loss_func"):
        megapipe.get_forward_backward_func("dualpipev")(
            forward_step_func=forward_step,
            data_iterator=[iter(samples(4))] * 2,
            model=[Adapted(HIDDEN, info.index) for info in stages_for_rank("dualpipev")],
            num_microbatches=4,
            seq_length=SEQUENCE,
            micro_batch_size=ROWS,
        )


def test_who_can_overlap() -> None:
    def stage(module: Any) -> Any:
        return SimpleNamespace(module=module)

    plain, hooked = nn.Linear(2, 2), Adapted(2, 0)
    assert not overlapped.can_overlap(stage(plain), stage(hooked))
    assert overlapped.has_hook(stage(hooked), stage(Adapted(2, 1)))
    assert not overlapped.has_hook(stage(hooked), stage(Chunk(2, 1)))


class SeesAutocast(Stage):
    def forward_segments(self, tokens: Tensor, seed: int = 0) -> Iterator[None]:
        yield
        self.seen = [*getattr(self, "seen", []), torch.is_autocast_enabled("cpu")]
        return super().forward(tokens, seed)

    def forward(self, tokens: Tensor, seed: int = 0) -> Tensor:
        return run_segments(self.forward_segments(tokens, seed))


@on_ranks(2)
def test_autocast_in_overlapped_forwards(rank: int) -> None:
    """A forward in segments takes autocast along from where it is made, which was behind the end of the stage's. So
    forwards of overlapped pairs ran in float32, and all others in half precision."""
    options = {"enable_autocast": True, "autocast_dtype": torch.bfloat16, "variable_seq_lengths": True}
    build("dualpipev", 2, 4)
    chunks = [SeesAutocast(info, 4, **options) for info in megapipe.stages_for_rank("dualpipev")]
    run("dualpipev", chunks, 4)
    assert all(chunk.seen == [True] * 4 for chunk in chunks)

"""A forward and a backward at once, on one thread."""

import functools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from tools import models
from tools.models import Stage, assert_same_gradients, build, loss_of, reference, run
from tools.ranks import on_ranks, start_again
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import megapipe
from megapipe import TimelineRecorder
from megapipe.analysis import load_timeline
from megapipe.overlap import run_segments
from megapipe.p2p_communication import Sender
from megapipe.plan import Schedule, Verbs, load_plan, loop, make_plan
from megapipe.proving.whole import Whole
from megapipe.schedules import B, F, W
from megapipe.weight_grad import DeferredGrads

NUM_LAYERS = 8


class Window(models.Window):
    """Its backward says so."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        LOG.append("window")
        return models.Window.backward(ctx, grad)


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


WINDOWS = [("zbv", 2, 2, 1), ("combined_zb1p", 1, 1, 2)]


@pytest.mark.parametrize(("schedule", "num_ranks", "num_chunks", "num_pending"), WINDOWS)
@on_ranks()
def test_pending_weights_fill_windows(
    rank: int, schedule: str, num_ranks: int, num_chunks: int, num_pending: int
) -> None:
    """Of forwards and of backwards without a partner: products of older Ws first."""
    m = num_ranks + 2
    expected, _ = expect(NUM_LAYERS, m)
    for weights_per_window in (0, 1):
        config = {"min_pending_weights": num_pending, "weights_per_window": weights_per_window}
        chunks = build(schedule, num_ranks, NUM_LAYERS, num_chunks, InSegments, deferred=True, **config)
        LOG.clear()
        with mock.patch.object(DeferredGrads, "compute_next", logged_product):
            run(schedule, chunks, m)
        num_windows = 2 * LOG.count("window")
        assert ("product" in LOG) == bool(weights_per_window)
        assert LOG.count("product") <= weights_per_window * num_windows
        if weights_per_window and schedule != "combined_zb1p":
            assert LOG.count("product") > num_windows / 2, "most windows have one"
        assert_same_gradients(chunks, expected)


compute_next = DeferredGrads.compute_next


def logged_product(deferred: DeferredGrads) -> bool:
    has_computed = compute_next(deferred)
    LOG.extend(["product"] * has_computed)
    return has_computed


@on_ranks(2)
def test_a_timeline_tells_its_pairs(rank: int) -> None:
    """A measured step showed the halves of a pair one after the other: a forward that took no time, and a backward as
    long as both."""
    planned = make_plan("dualpipev", 2, 8).program.pairs
    for model, expected in ((InSegments, planned), (Stage, [{}, {}])):
        recorder = TimelineRecorder()
        chunks = build("dualpipev", 2, NUM_LAYERS, kind=model, deferred=True, record_timeline=recorder)
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
def test_what_a_pair_makes_is_sent_early(rank: int) -> None:
    """The forward of a pair is sent before its backward ends, also where they run one after the other. Where they are
    overlapped, the gradient is sent before the Ws."""
    for model in (Stage, InSegments):
        events: list[str] = []
        chunks = build("dualpipev", 2, NUM_LAYERS, kind=model, deferred=True)
        weights, pair = megapipe.stages.stage.Stage.W, megapipe.runtime.pipeline.Pipeline.run_pair

        def watched(self: Any, *args: Any, pair: Any = pair, events: list[str] = events) -> None:
            events.append("(")
            pair(self, *args)
            events.append(")")

        def log_and_send(self: Any, number: int, send: Any = Sender.send, events: list[str] = events) -> None:
            if number == self._num_sent:
                events.append("B" if self._gradients is None else "F")
            send(self, number)

        def run_weights(self: Any, unit: Any, original: Any = weights, events: list[str] = events) -> None:
            events.append("W")
            original(self, unit)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Sender, "send", log_and_send)
            patch.setattr(megapipe.stages.stage.Stage, "W", run_weights)
            patch.setattr(megapipe.runtime.pipeline.Pipeline, "run_pair", watched)
            run("dualpipev", chunks, 8)
        expected = ["(", "F", ")", "B"] if model is Stage else ["(", "F", "B", "W", ")"]
        assert expected in [events[k : k + len(expected)] for k in range(len(events))]
        if model is InSegments:
            assert events.count("B") == 8  # nothing is sent twice


class ReadsAgain(InSegments):
    """Each segment reads the input anew, and so does what is computed again in the backward."""

    def segment(self, x: Tensor, layer: nn.Module) -> Tensor:
        return layer(x if self.embedding is not None else x + self.input_tensor)

    def forward_segments(self, tokens: Tensor, seed: int = 0) -> Iterator[None]:
        x = self.input_tensor if self.embedding is None else self.embedding(tokens)
        for layer in self.layers.values():
            x = Window.apply(checkpoint(self.segment, x, layer, use_reentrant=False))
            LOG.append("segment")
            yield
        return x if self.head is None else self.head(x)


def pairs_with_later_weights(pipe: Verbs) -> Any:
    """1F1B whose steady state overlaps an F with the input half of a backward of the same chunk; its Ws come last."""
    num_warmup = min(pipe.pp_size - pipe.pp_rank, pipe.num_microbatches)
    for _ in range(num_warmup):
        F(pipe)
    for _ in range(pipe.num_microbatches - num_warmup):
        pipe.recv_forward()
        pipe.recv_backward()
        pipe.run_pair(("F", 0), ("B", 0))
        pipe.send_forward()
        pipe.send_backward()
    for _ in range(num_warmup):
        B(pipe)
    while pipe.num_pending_weights():
        W(pipe)
    return pipe.finish()


@pytest.mark.parametrize("num_ranks", [1, 2])
@on_ranks()
def test_a_forward_beside_a_backward_whose_w_comes_later(rank: int, num_ranks: int, tmp_path: Path) -> None:
    plan = make_plan(Schedule("mine", pairs_with_later_weights, loop, 1), num_ranks, 5)
    plan.check()
    path = tmp_path / str(rank) / "mine.csv"
    path.parent.mkdir()
    plan.save_csv(path)
    assert load_plan(path).cells() == plan.cells()
    assert any(plan.program.pairs)
    for kind in (InSegments, ReadsAgain):
        chunks = build("1f1b", num_ranks, NUM_LAYERS, kind=kind, deferred=True)
        stages = [kind(megapipe.StageInfo(index, num_ranks), NUM_LAYERS) for index in range(num_ranks)]
        Whole(stages, models.forward_step).step([*models.batches(5)])
        LOG.clear()
        run(path, chunks, 5)
        assert "window segment window segment" in " ".join(LOG)
        assert_same_gradients(chunks, stages)


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
        chunk.config.weights_per_window = 10
        with mock.patch.object(DeferredGrads, "compute_next", logged_product):
            for _ in range(2):
                run("no_pipelining", [chunk], 2)
        last_backward = LOG[LOG.index("F", len(LOG) - LOG[::-1].index("F") - 1) + 1 :]
        if has_windows:  # those of the head and the last layer, and of the first layer; at the end the embedding's
            assert last_backward == ["window", *3 * ["product"], "window", *2 * ["product"]]
        else:
            assert last_backward == []
        assert sorted(hooked) == sorted(4 * [name for name, _ in chunk.named_parameters()])
        assert_same_gradients([chunk], expect(2, 2, seeds=(0, 0))[0])


def test_backwards_have_windows_where_forwards_have_none() -> None:
    """As where tensor-parallel ranks all have the whole input: only its gradient has to be added up."""
    chunk = InSegments(megapipe.StageInfo(0, 1), 2, deferred=True, min_pending_weights=1)
    LOG.clear()
    with mock.patch.object(DeferredGrads, "compute_next", logged_product):
        run("zb1p", [chunk], 4, forward_step_func=call_the_model)
    assert LOG.count("product") == LOG.count("window") == 4 * 2
    assert_same_gradients([chunk], expect(2, 4)[0])


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
    chunks = build("dualpipev", 2, NUM_LAYERS, kind=Breaks if rank == 1 else InSegments)
    with pytest.raises((RuntimeError, megapipe.PipelineError), match="the sixth forward breaks"):
        run("dualpipev", chunks, 8)
    start_again()
    chunks = build("dualpipev", 2, NUM_LAYERS, kind=InSegments)
    run("dualpipev", chunks, 4)
    assert_same_gradients(chunks, reference(NUM_LAYERS, 4)[0])

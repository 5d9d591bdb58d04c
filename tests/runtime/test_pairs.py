"""A forward and a backward at once, on one thread, in the ways that a model may know."""

import functools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import SEQUENCE, Stage, assert_same_gradients, build, reference, run
from ranks import RankPool
from torch import Tensor, nn
from torch.autograd import Variable

import megapipe
from megapipe import parallel_state, stages_for_rank
from megapipe.overlap import fill_gap, run_parts
from megapipe.runtime import boundary
from megapipe.runtime import overlapped as pairs
from megapipe.weight_grad import DeferredGrads

NUM_LAYERS = 8


class Gap(torch.autograd.Function):
    """Stands for a communication: its backward has a gap."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        LOG.append("gap")
        fill_gap()
        return grad


LOG: list[str] = []


class InParts(Stage):
    """Each layer waits once."""

    def forward_parts(self, tokens: Tensor, seed: int = 0) -> Iterator[None]:
        x = self.input_tensor if self.embedding is None else self.embedding(tokens)
        for layer in self.layers.values():
            x = Gap.apply(x)
            LOG.append("part")
            yield
            x = layer(x)
        return x if self.head is None else self.head(x)

    def forward(self, tokens: Tensor, seed: int = 0) -> Tensor:
        return run_parts(self.forward_parts(tokens, seed))


expect = functools.lru_cache(maxsize=None)(reference)


def in_parts(rank: int, pp_size: int) -> None:
    build("dualpipev", pp_size, NUM_LAYERS)
    for m in range(2 * pp_size, 4 * pp_size + 1, max(1, pp_size // 2)):
        chunks = [InParts(info, NUM_LAYERS, deferred=True) for info in stages_for_rank("dualpipev")]
        LOG.clear()
        reports = run("dualpipev", chunks, m)
        assert LOG.count("gap") == LOG.count("part") == m * sum(len(chunk.layers) for chunk in chunks)
        in_gaps = sum(LOG[k : k + 2] == ["gap", "part"] for k in range(len(LOG)))
        assert in_gaps > m // 2  # forwards went on while backwards waited
        expected, losses = expect(NUM_LAYERS, m)
        assert_same_gradients(chunks, expected)
        if rank == 0:
            assert [report["loss"] for report in reports] == losses


@pytest.mark.parametrize("pp_size", [1, 2, 3, 4])
def test_equal_in_parts(ranks: RankPool, pp_size: int) -> None:
    ranks.run(pp_size, in_parts, pp_size)


def sent_early(rank: int) -> None:
    """The forward of a pair is sent before its backward ends, also where they run one after the other. Where they are
    overlapped, the gradient is sent before the Ws."""
    for model in (Stage, InParts):
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
        if model is InParts:
            assert events.count("B") == 8  # nothing is sent twice


def test_what_a_pair_makes_is_sent_early(ranks: RankPool) -> None:
    ranks.run(2, sent_early)


def test_a_lone_backward_fills_its_gaps_with_its_own_weight_gradients() -> None:
    """And calls each weight's hooks once per microbatch, when all is done. A model without gaps keeps nothing back."""
    for model, is_in_gaps in ((InParts, True), (WithoutGaps, False)):
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
        if is_in_gaps:  # those of the head and the last layer, and of the first layer; at the end the embedding's
            assert last_backward == ["gap", "3 Ws", "gap", "2 Ws"]
        else:
            assert last_backward == []  # the first step has found out
        assert sorted(hooked) == sorted(4 * [name for name, _ in chunk.named_parameters()])
        assert_same_gradients([chunk], expect(2, 2, seeds=(0, 0))[0])


class WithoutGaps(Stage):
    def forward_parts(self, tokens: Tensor, seed: int = 0) -> Iterator[None]:
        yield
        return Stage.forward(self, tokens, seed)


class Breaks(InParts):
    def forward_parts(self, tokens: Tensor, seed: int = 0) -> Iterator[None]:
        self.count = getattr(self, "count", 0) + 1
        output = yield from super().forward_parts(tokens, seed)
        if self.count == 6:
            raise RuntimeError("the sixth forward breaks")
        return output


def breaks(rank: int) -> str:
    build("dualpipev", 2, NUM_LAYERS)
    model = Breaks if rank == 1 else InParts
    with pytest.raises((RuntimeError, megapipe.PipelineError), match="the sixth forward breaks"):
        run("dualpipev", [model(info, NUM_LAYERS) for info in stages_for_rank("dualpipev")], 8)
    chunks = [InParts(info, NUM_LAYERS) for info in stages_for_rank("dualpipev")]
    run("dualpipev", chunks, 4)
    assert_same_gradients(chunks, reference(NUM_LAYERS, 4)[0])
    return "told"


def test_a_forward_that_fails_inside_of_a_backward(ranks: RankPool) -> None:
    assert ranks.run(2, breaks) == ["told"] * 2


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
    return model(given), lambda output: (F.mse_loss(output, target), {})


def by_hook(rank: int, pp_size: int) -> int:
    m = 2 * pp_size + 3
    parallel_state.initialize_model_parallel(pp_size)
    infos = stages_for_rank("dualpipev")
    chunks = [Adapted(HIDDEN, info.index) for info in infos]
    whole = nn.Sequential(*(Chunk(HIDDEN, index) for index in range(2 * pp_size)))
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
    return Chunk.calls


@pytest.mark.parametrize("pp_size", [1, 2, 4])
def test_models_written_for_dualpipe_run(ranks: RankPool, pp_size: int) -> None:
    calls = ranks.run(pp_size, by_hook, pp_size)
    assert all(count > 0 for count in calls)


def test_who_can_overlap() -> None:
    def stage(module: Any) -> Any:
        return SimpleNamespace(module=module)

    plain, hooked = nn.Linear(2, 2), Adapted(2, 0)
    assert not pairs.can_overlap(stage(plain), stage(hooked))
    assert pairs.has_hook(stage(hooked), stage(Adapted(2, 1)))
    assert not pairs.has_hook(stage(hooked), stage(Chunk(2, 1)))

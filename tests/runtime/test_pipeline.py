"""What a step does besides the right gradients: Megatron's semantics, messages of every kind, and what it leaves."""

import contextlib
import gc
import itertools
import time
import weakref
from collections import Counter
from collections.abc import Generator, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tools.against import Received, same_as_whole, use_groups
from tools.failing import calling
from tools.models import (
    BATCH,
    HIDDEN,
    SEQUENCE,
    Stage,
    assert_same_gradients,
    batches,
    build,
    forward_step,
    loss_of,
    reference,
    run,
)
from tools.ranks import RankPool, on_ranks
from torch import Tensor, nn
from torch._subclasses import FakeTensor

from megapipe import PipelineError, PipelineStage, StageInfo, get_forward_backward_func, stages_for_rank
from megapipe.config import StepConfig
from megapipe.overlap import in_segments, run_segments
from megapipe.plan import make_plan
from megapipe.proving.whole import Whole
from megapipe.transports.outbox import Outbox

# Steps


def live_tensors() -> list[Tensor]:
    return [t for t in gc.get_objects() if isinstance(t, Tensor) and not isinstance(t, FakeTensor)]


def storages(tensors: list[Tensor]) -> set[int]:
    found = set()
    for tensor in tensors:
        with contextlib.suppress(RuntimeError):  # of what a tracer of another test has left, which has no memory
            if tensor.untyped_storage().nbytes():
                found.add(tensor.untyped_storage().data_ptr())
    return found


@on_ranks(2)
def test_forward_only_leaves_no_gradient_and_no_activation(rank: int) -> None:

    def validate(schedule: str, chunks: list[Stage], num_microbatches: int) -> int:
        before = live_tensors()  # held: what others free meanwhile does not count
        run(schedule, chunks, num_microbatches, forward_only=True)
        assert all(p.grad is None for chunk in chunks for p in chunk.parameters())
        gc.collect()
        return len(storages(live_tensors()) - storages(before))

    for schedule in ("interleaved_1f1b", "inference"):
        chunks = build(schedule, 2, 4)
        assert validate(schedule, chunks, 2) == validate(schedule, chunks, 6)


# Memory


class Buffer(bytearray):
    """Memory of one tensor, freed when its storage is."""


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, buffer: Buffer) -> Tensor:
        return torch.frombuffer(buffer, dtype=x.dtype).view(x.shape).copy_(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


@pytest.mark.parametrize(("view", "forward_only"), [(False, True), (True, False)])
@on_ranks(2)
def test_sent_outputs_are_freed(rank: int, view: bool, forward_only: bool) -> None:
    """The next stage has taken an output: its storage goes, though its graph is still needed. Small ones are waited for
    many at a time, so here none counts as small."""
    (chunk,) = build("gpipe", 2, 4)
    buffers: list[weakref.ref[Buffer]] = []

    def step(data_iterator: Any, model: Any) -> Any:
        output, loss_func = forward_step(data_iterator, model)
        if rank == 0:
            if buffers:
                dist.barrier()  # rank 1 has taken all that was sent
                end = time.monotonic() + 60
                while any(buffer() is not None for buffer in buffers) and time.monotonic() < end:
                    time.sleep(0.001)
                assert [buffer() for buffer in buffers] == [None] * len(buffers)
            buffer = Buffer(output.numel() * 4)
            buffers.append(weakref.ref(buffer))
            output = _Copy.apply(output, buffer)
            if view:
                output = output.view(-1).view(SEQUENCE, BATCH, HIDDEN)
                assert output._is_view()
        elif len(buffers) < 7:
            buffers.append(weakref.ref(Buffer()))
            dist.barrier()
        return output, loss_func

    with mock.patch.object(Outbox, "MIN_THREAD_BYTES", 1):
        run("gpipe", chunk, 8, forward_step_func=step, forward_only=forward_only)


# Loss and gradients


@on_ranks(2)
def test_three_tuple_loss_functions(rank: int) -> None:
    """Numbers that are no whole ones, such as sums of weights, were cut to integers, and larger ones wrapped around."""
    for tokens, per_token in itertools.product(([0.5, 0.25, 1.5], [2**31, 0, 2**33 + 1]), (False, True)):
        finalized: list[Any] = []
        chunks = build("1f1b", 2, 4, calculate_per_token_loss=per_token)
        chunks[0].config.finalize_model_grads_func = lambda *given, seen=finalized: seen.append(given)
        model = Stage(StageInfo(0, 1), 4)

        def step(data_iterator: Any, model: Any, tokens: Any = tokens) -> Any:
            batch = next(data_iterator)
            count: Any = tokens[batch["seed"]]
            if batch["seed"]:
                count = torch.tensor(count)
            if batch["seed"] == 2:
                count = count.reshape(1)

            def loss_func(output: Tensor) -> Any:
                loss = loss_of(output, batch["labels"])
                return loss, count, {"loss": loss.detach()}

            return model(batch["tokens"], batch["seed"]), loss_func

        run("1f1b", chunks, 3, forward_step_func=step)
        Whole([model], step, chunks[0].config).step([*batches(3)])
        assert_same_gradients(chunks, model, tokens)
        ((models, num_tokens),) = finalized
        assert models == chunks
        if per_token:
            assert num_tokens.dtype == torch.float64
            assert num_tokens == (sum(tokens) if chunks[0].info.is_last else 0)
        else:
            assert num_tokens is None


@on_ranks(2)
def test_gradient_and_parameter_synchronisation(rank: int) -> None:
    log: list[str] = []

    @contextlib.contextmanager
    def no_sync() -> Iterator[None]:
        log.append("hold")
        yield
        log.append("release")

    (chunk,) = build("1f1b", 2, 4)
    chunk.config.no_sync_func = no_sync
    handle = chunk.layers[next(iter(chunk.layers))].up.weight.register_post_accumulate_grad_hook(
        lambda p: log.append("hook")
    )
    run("1f1b", [chunk], 3)
    assert log == ["hold", "hook", "hook", "release", "hook", "hold", "release"]

    log.clear()
    chunk.config.grad_sync_func = lambda parameters: log.append(f"sync {len(list(parameters))}")
    chunk.config.param_sync_func = [lambda parameters: log.append("gather")]
    chunk.config.finalize_model_grads_func = lambda models, tokens, **keywords: log.append(f"finalize {keywords}")
    run("1f1b", [chunk], 2)
    count = len(list(chunk.parameters()))
    finalize = "finalize {'pg_collection': None, 'force_all_reduce': False}"
    assert log == ["hold", "gather", "hook", "hook", "release", f"sync {count}", "hold", "release", finalize]

    log.clear()
    run("1f1b", [chunk], 2, forward_only=True)
    assert log == []
    handle.remove()


# Around the forward


class Timer:
    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def start(self, barrier: bool = False) -> None:
        self.log.append(f"start {self.name}")

    def stop(self) -> None:
        self.log.append(f"stop {self.name}")


@on_ranks(2)
def test_timers_and_profiler_ranges(rank: int) -> None:
    (chunk,) = build("1f1b", 2, 4)
    log: list[str] = []
    chunk.config.timers = lambda name, log_level=0: Timer(name, log)
    with torch.profiler.profile() as profile:
        run("1f1b", [chunk], 2)
    names = ["forward-compute", "backward-compute"] * 2
    if rank == 0:
        names = ["forward-compute", "forward-compute", "backward-compute", "backward-compute"]
    inner = [f"{what} {name}" for name in names for what in ("start", "stop")]
    assert log == ["start forward-backward", *inner, "stop forward-backward"]
    ranges = {event.key for event in profile.key_averages()}
    assert {f"{rank}F0", f"{rank}F1", f"{rank}B0", f"{rank}B1"} <= ranges

    log.clear()
    with pytest.raises((PipelineError, ValueError)):  # a step that failed left its timers running
        run("1f1b", [chunk], 2, data_iterator=iter([]))
    assert "start forward-compute" in log or rank == 1
    assert Counter(text.removeprefix("start ") for text in log if "start" in text) == Counter(
        text.removeprefix("stop ") for text in log if "stop" in text
    )


class InSegments(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return run_segments(self.forward_segments(x))

    def forward_segments(self, x: Tensor) -> Generator[None, None, Tensor]:
        for layer in self.layers:
            yield
            x = layer(x)
        return x


@on_ranks(1)
def test_options_are_around_each_part_of_an_overlapped_forward(rank: int) -> None:
    """They were around forwards that are run at once only: Megatron's timers had no time for those of pairs."""
    log: list[str] = []
    chunks = [PipelineStage(InSegments(), info) for info in stages_for_rank("dualpipev", 0, 1)]
    chunks[0].config = chunks[1].config = StepConfig(timers=lambda name, log_level=0: Timer(name, log))

    def step(data_iterator: Any, chunk: nn.Module) -> Any:
        return in_segments(chunk, next(data_iterator)), lambda output: (output.sum(), 0)

    use_groups()
    get_forward_backward_func("dualpipev")(step, iter(torch.ones(4, 2, 4)), chunks, 4)
    num_pairs = len(make_plan("dualpipev", 1, 4).program.pairs[0])
    assert num_pairs
    expected = 8 + num_pairs * len(chunks[0].module.layers) + num_pairs  # each of 3 stops, and the end
    assert log.count("start forward-compute") == log.count("stop forward-compute") == expected


@on_ranks(1)
def test_autocast_has_a_dtype_of_its_own_or_that_of_messages(rank: int) -> None:
    for own, expected in ((torch.bfloat16, torch.bfloat16), (None, torch.float16)):
        (chunk,) = build("1f1b", 1, 1, enable_autocast=True, autocast_dtype=own, pipeline_dtype=torch.float16)
        computed: set[torch.dtype] = set()
        linear = next(module for module in chunk.modules() if isinstance(module, nn.Linear))
        linear.register_forward_hook(lambda module, args, output, computed=computed: computed.add(output.dtype))
        run("1f1b", [chunk], 1, forward_only=True)
        assert computed == {expected}


@on_ranks(2)
def test_set_is_first_microbatch(rank: int) -> None:
    (chunk,) = build("1f1b", 2, 4)
    calls: list[str] = []
    chunk.set_is_first_microbatch = lambda: calls.append("first")
    seen: list[str] = []

    def step(data_iterator: Any, model: Any) -> Any:
        seen.append(f"{len(calls)}")
        return forward_step(data_iterator, model)

    run("1f1b", [chunk], 3, forward_step_func=step)
    assert seen == ["1", "1", "1"]
    run("1f1b", [chunk], 3, forward_only=True, first_val_step=True)
    assert len(calls) == 2
    run("1f1b", [chunk], 3, forward_only=True, first_val_step=False)
    assert len(calls) == 2


@on_ranks(2)
def test_validation_does_not_look_at_the_loss(rank: int) -> None:
    """Megatron's own tests report a plain number as the loss where nothing is differentiated; it was refused."""

    def step(data_iterator: Any, model: Any) -> Any:
        output, loss_func = forward_step(data_iterator, model)
        return output, lambda output: ("no tensor", float(loss_func(output)[0]))

    chunks = build("zbv", 2, 4)
    reports = run("zbv", chunks, 2, forward_step_func=step, forward_only=True)
    assert reports == [float(loss) for loss in reference(4, 2)[1] if rank == 0]


@on_ranks(2)
def test_collect_non_loss_data(rank: int) -> None:
    chunks = build("1f1b", 2, 4)

    def step(data_iterator: Any, model: Any) -> Any:
        output, _ = forward_step(data_iterator, model)
        return output, lambda output, non_loss_data: ("data", non_loss_data, output.shape)

    with pytest.raises(ValueError, match="nothing would be trained: pass forward_only=True"):  # nor was it, silently
        run("1f1b", chunks, 2, forward_step_func=step, collect_non_loss_data=True)
    data = run("1f1b", chunks, 2, forward_step_func=step, forward_only=True, collect_non_loss_data=True)
    assert data == ([("data", True, (SEQUENCE, BATCH, 11))] * 2 if chunks[0].info.is_last else [])


def partial_checkpoints(rank: int) -> list[bool]:
    chunks = build("1f1b", 4, 4, num_microbatches_with_partial_activation_checkpoints=2)
    arguments: list[bool] = []

    def step(data_iterator: Any, model: Any, checkpoint_activations_microbatch: bool) -> Any:
        arguments.append(checkpoint_activations_microbatch)
        return forward_step(data_iterator, model)

    run("1f1b", chunks, 6, forward_step_func=step)
    dist.barrier()  # rank 3 has ended its step first, and would end those of the others with the failure of its next
    with pytest.raises((TypeError, RuntimeError), match="checkpoint_activations_microbatch"):
        run("1f1b", chunks, 6)
    return arguments


def test_partial_activation_checkpoints(ranks: RankPool) -> None:
    """As Megatron: of each window of p - r microbatches the first two are not recomputed in full."""
    full = ranks.run(4, partial_checkpoints)
    assert full == [[i % window >= 2 for i in range(6)] for window in (4, 3, 2, 1)]


# Megatron's other keywords


@on_ranks(2)
def test_shapes_adjusted_by_the_caller(rank: int) -> None:
    """Two tensors between the stages, of shapes that the caller works out, and a decoder's own sequence length."""

    class TwoTensors(Received):
        def __init__(self, info: StageInfo) -> None:
            super().__init__(info, hidden_size=HIDDEN)
            torch.manual_seed(info.index)
            self.linear = nn.Linear(HIDDEN, HIDDEN)

        def forward(self, x: Tensor) -> Any:
            if self.info.is_first:
                hidden = self.linear(x)
                return [hidden, hidden.sum(0)]
            hidden, pooled = self.input_tensor
            assert hidden.shape == (7, BATCH, HIDDEN)
            assert pooled.shape == (BATCH, HIDDEN)
            return self.linear(hidden).sum() + self.linear(pooled).sum()

    def adjust(received: list[tuple[int, ...]], sent: list[tuple[int, ...]]) -> Any:
        assert received == sent == [(7, BATCH, HIDDEN)]
        both = [received[0], received[0][1:]]
        return both, both

    data = [(torch.full((7, BATCH, HIDDEN), float(i)), None) for i in range(3)]
    sizes = {"seq_length": SEQUENCE, "micro_batch_size": BATCH, "decoder_seq_length": 7}
    same_as_whole(TwoTensors, ["1f1b"], data, lambda output, _: output, adjust_tensor_shapes_fn=adjust, **sizes)


@on_ranks(2)
def test_shapes_adjusted_in_a_later_step_only(rank: int) -> None:
    """The function was passed over: the connections were those of the step before."""
    chunks, longer = build("1f1b", 2, 4), [(SEQUENCE + 2, BATCH, HIDDEN)]
    run("1f1b", chunks, 2)
    data = batches(2, seq_lengths=[SEQUENCE + 2] * 2)
    run("1f1b", chunks, 2, data_iterator=data, adjust_tensor_shapes_fn=lambda received, sent: (longer, longer))


@pytest.mark.parametrize("num_ranks", [1, 2])
@on_ranks()
def test_a_schedule_within_its_own_step(rank: int, num_ranks: int) -> None:
    """On one rank it ran, and the step around it ended with an AttributeError. On two it hung: the second one's forward
    needs what the first one's returns."""
    chunks = build("1f1b", num_ranks, 2)
    nested = calling(lambda: run("1f1b", chunks, 2), 0)
    with pytest.raises(PipelineError if rank else ValueError, match="a schedule was called while another call"):
        run("1f1b", chunks, 2, forward_step_func=nested)


@on_ranks(2)
def test_a_decoder_length_counts_where_a_rank_has_one_chunk(rank: int) -> None:
    """Megatron's interleaved schedule ignores it, as its own tests have it. Here the messages took it, and the step
    failed with the shape of the first."""
    chunks = build("interleaved_1f1b", 2, 4)
    run("interleaved_1f1b", chunks, 3, decoder_seq_length=SEQUENCE + 1)
    assert_same_gradients(chunks, reference(4, 3)[0])


@on_ranks(2)
def test_groups_that_come_with_the_call(rank: int) -> None:
    """Process groups come with the call; parallel_state is not initialised at all."""
    group = dist.new_group([0, 1])
    (info,) = stages_for_rank("1f1b", rank, 2)
    for keywords in (
        {"pg_collection": SimpleNamespace(pp=group)},
        {"p2p_communicator": SimpleNamespace(pp_group=group)},
    ):
        chunk = Stage(info, 4)
        run("1f1b", chunk, 3, **keywords)
        assert_same_gradients([chunk], reference(4, 3)[0])


@on_ranks(2)
def test_groups_that_do_not_exist(rank: int) -> None:
    with pytest.raises(RuntimeError, match=r"call megapipe\.parallel_state\.initialize_model_parallel"):
        run("1f1b", Stage(StageInfo(rank, 2), 4), 3)


class Demanding(Stage):
    def set_input_tensor(self, received: list[Tensor]) -> None:
        self.input_tensor = received[0].contiguous() if self.embedding is None else None


@on_ranks(2)
def test_a_model_that_cannot_take_none(rank: int) -> None:
    """After a step a model is asked to forget its last input; one that cannot just keeps it."""
    build("1f1b", 2, 4)  # the groups
    chunk = Demanding(stages_for_rank("1f1b")[0], 4)
    for _ in range(2):
        chunk.zero_grad()
        run("1f1b", chunk, 3)
    assert_same_gradients([chunk], reference(4, 3)[0])

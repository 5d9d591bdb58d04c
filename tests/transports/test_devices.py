"""Pipelines on an asynchronous device: what they compute, when the host waits, what hangs, what is held."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import threading
import time
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tools import against
from tools.against import Received, assert_same_gradients, use_groups
from tools.device import needs_devices, on_lazy_device
from tools.device import ranks as ranks
from tools.ranks import on_ranks
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_store

import megapipe
from megapipe import PipelineError, StageInfo, TimelineRecorder, parallel_state, stages_for_rank, weight_grad
from megapipe.failures import check_failures
from megapipe.messages import MessageSpec, TensorSpec
from megapipe.p2p_communication import Channels
from megapipe.plan import loop
from megapipe.timing.records import CudaClock
from megapipe.transports import Members, make_transport
from megapipe.transports.nccl import NcclTransport

pytestmark = needs_devices

WIDTH = 4
SCHEDULES = [name for name in megapipe.schedule_names() if name not in ("no_pipelining", "inference")]
TRANSPORTS = ["host", "nccl"]


class Stage(Received):
    """Whole numbers and float64: every sum is exact, in whatever order it is added up."""

    def __init__(self, config: Any, info: StageInfo) -> None:
        super().__init__(info)
        self.config = config
        generator = torch.Generator().manual_seed(info.index)
        self.layer = weight_grad.Linear(WIDTH, WIDTH, dtype=torch.float64)
        for parameter in self.layer.parameters():
            parameter.data.copy_(torch.randint(-1, 2, parameter.shape, generator=generator))
        self.disturb: Any = lambda: None

    def forward(self, x: Tensor) -> Tensor:
        self.disturb()
        y = torch.relu(self.layer(x if self.info.is_first else self.input_tensor))
        if y.requires_grad:
            y.register_hook(lambda grad: self.disturb())
        return y


def step(
    schedule: str, chunks: list[Stage], place: Any, num_microbatches: int = 4, length: int = 3, **options: Any
) -> Any:
    generator = torch.Generator().manual_seed(9)
    inputs = [torch.randint(-1, 2, (length, 1, WIDTH), generator=generator).double() for _ in range(num_microbatches)]
    data = [(place(x), None) for x in inputs]  # before the step, as a data loader does
    sizes = {"seq_length": length, "micro_batch_size": 1}
    return against.step(schedule, chunks, data, lambda output, _: output.sum(), **sizes, **options)


def build(schedule: str, pp_size: int, transport: str, **config: Any) -> list[Stage]:
    use_groups(pp_size)
    config = {"hidden_size": WIDTH, "pipeline_dtype": torch.float64, "p2p_transport": transport, **config}
    settings = SimpleNamespace(**config)
    return [Stage(settings, info) for info in stages_for_rank(schedule)]


def wait_for(condition: Any) -> None:
    while not condition():
        time.sleep(0.01)


def assert_same(chunks: list[Stage], expected: list[Stage], read: Any, what: str = "") -> None:
    for mine, theirs in zip(chunks, expected, strict=True):
        on_host = {name: read(parameter.grad) for name, parameter in mine.named_parameters()}
        assert_same_gradients([theirs], on_host, what)


IN_SHORT = [(2, "host", ["interleaved_1f1b"]), (3, "nccl", ["zbv"])]
"""Over each transport one; all of them are a soak."""
ALL = [(num_ranks, transport, SCHEDULES) for num_ranks in (2, 4) for transport in TRANSPORTS]
CASES = pytest.mark.parametrize(
    ("num_ranks", "transport", "schedules"),
    [*IN_SHORT, *(pytest.param(*case, marks=pytest.mark.soak) for case in ALL)],
    ids=lambda value: value if isinstance(value, (int, str)) else "all" if value is SCHEDULES else "some",
)


@pytest.mark.parametrize(
    ("schedule", "length", "lookahead"), [("zbv", 3, 1), ("interleaved_1f1b", 2**16, 1), ("1f1b", 2**16, None)]
)
@on_ranks(2)
def test_a_device_wide_wait_within_a_step_ends(rank: int, schedule: str, length: int, lookahead: int | None) -> None:
    """Megatron's timers and autotuned kernels make the host wait for the whole device. Where a receive had been posted
    ahead, that included a message that this very host had still to bring about, and every rank waited for ever.

    Over NCCL a message that does not fit its buffers occupies the device until it is received. Its receive is posted
    ahead where the plan shows that ranks do not wait for each other by it: 1F1B with all of them ahead hangs here.

    An allocator that is short of memory waits, too. Memory for a receive was taken just before it was posted, when the
    rank's own message was still to be received by a neighbour that did the same."""
    chunks = build(schedule, 2, "nccl", p2p_lookahead=lookahead)
    with (
        on_lazy_device(chunks) as lazy,
        mock.patch.object(megapipe.transports.nccl, "BUFFER", 2**15),
        mock.patch.object(lazy.device.ALLOCATOR, "limit", 0),
    ):
        for chunk in chunks:
            chunk.disturb = lazy.device.synchronize
            for parameter in chunk.parameters():
                parameter.register_post_accumulate_grad_hook(lambda _: lazy.device.synchronize())
        step(schedule, chunks, lazy.device.to_device, length=length)


@pytest.mark.parametrize("transport", TRANSPORTS)
@on_ranks(2)
def test_nothing_sent_is_held_when_a_step_returns(rank: int, transport: str) -> None:
    """Sent tensors were kept until the host had seen their sends complete, at the next send of any channel. The host
    runs ahead of the device, so at the end of a step most outputs were still there."""
    chunks = build("zbv", 2, transport)
    outputs: list[Any] = []
    with on_lazy_device(chunks) as lazy:
        for chunk in chunks:
            chunk.register_forward_hook(lambda _, inputs, output: outputs.append(weakref.ref(output)))
        step("zbv", chunks, lazy.device.to_device)
        gc.collect()
        assert len(outputs) == 4 * len(chunks)
        assert not [output for output in outputs if output() is not None]


class Alive:
    """How many inputs from other ranks, and gradients that are sent or received, have memory at a time."""

    def __init__(self, chunks: list[Stage]) -> None:
        self.sets: dict[str, Any] = {name: weakref.WeakSet() for name in ("inputs", "input grads", "output grads")}
        self.peaks = dict.fromkeys(self.sets, 0)
        for chunk in chunks:
            if chunk.info.index in received_by(chunks):
                chunk.set_input_tensor = functools.partial(self._receive, chunk)  # type: ignore[method-assign]
            chunk.register_forward_hook(self._watch_output)

    def _receive(self, chunk: Stage, received: list[Any]) -> None:
        chunk.input_tensor = received[0]
        if received[0] is not None:
            self._note("inputs", received[0])
            if received[0].requires_grad:
                received[0].register_hook(functools.partial(self._note_gradient, chunk))

    def _note_gradient(self, chunk: Stage, grad: Any) -> None:
        chunk.input_tensor = None  # it was shown again, for a backward that computes it again
        self._note("input grads", grad)

    def _watch_output(self, chunk: Any, inputs: Any, output: Any) -> None:
        chunk.input_tensor = None  # a model keeps its last input, whatever becomes of it
        if output.requires_grad and not chunk.info.is_last:
            output.register_hook(functools.partial(self._note, "output grads"))

    def _note(self, name: str, tensor: Any) -> None:
        self.sets[name].add(tensor.memory)
        self.peaks[name] = max(self.peaks[name], len(self.sets[name]))


def received_by(chunks: list[Stage]) -> set[int]:
    """The stages whose inputs come from another rank. Others' the stage below keeps for its backward."""
    mine = {chunk.info.index for chunk in chunks}
    return {index for index in mine if index and index - 1 not in mine}


def most_inputs(actions: Any, stages: set[int]) -> int:
    """By the plan, from the forward until the last weight gradient that needs it."""
    held = most = 0
    for action in actions:
        if action.stage in stages:
            held += action.kind == "F"
            most = max(most, held)
            held -= megapipe.plan.KINDS[action.kind].completes_weights
    return most


@CASES
@on_ranks()
def test_same_as_on_cpu(rank: int, num_ranks: int, transport: str, schedules: list[str]) -> None:
    """And no more memory than the plan says: what was received stayed, with its gradient, until a helper thread saw,
    four times a second, that it had come: 48 inputs of 48 microbatches on the last rank of 1F1B, which needs one."""
    num_microbatches = num_ranks + 2
    for schedule in schedules:
        expected = build(schedule, num_ranks, transport)
        losses = step(schedule, expected, lambda x: x, num_microbatches)
        validated = step(schedule, expected, lambda x: x, num_microbatches, forward_only=True)
        step(schedule, expected, lambda x: x, num_microbatches)
        chunks = build(schedule, num_ranks, transport)
        with on_lazy_device(chunks) as lazy:
            place, read = lazy.device.to_device, lazy.device.to_host
            got = step(schedule, chunks, place, num_microbatches)
            # Over NCCL the host never waits, but once for each chunk, to look whether it is given gradients.
            assert transport == "host" or len(lazy.device.SYNCS) <= len(chunks), schedule
            lazy.device.SYNCS.clear()
            got_validated = step(schedule, chunks, place, num_microbatches, forward_only=True)
            before, alive = lazy.device.ALLOCATOR.allocated, Alive(chunks)
            step(schedule, chunks, place, num_microbatches)
            assert transport == "host" or not lazy.device.SYNCS, lazy.device.SYNCS[0]
            gc.collect()
            assert not any(alive.sets.values()), (schedule, alive.sets)
            assert lazy.device.ALLOCATOR.allocated <= before, schedule
            assert [read(one) for one in got] == losses, schedule
            assert [read(one) for one in got_validated] == validated, schedule
            assert_same(chunks, expected, read, schedule)
        plan = megapipe.plan.make_plan(schedule, num_ranks, num_microbatches, len(chunks))
        most = most_inputs(plan.actions[rank], received_by(chunks))
        assert alive.peaks["inputs"] <= most, (schedule, alive.peaks, most)
        assert max(alive.peaks["input grads"], alive.peaks["output grads"]) <= 2, (schedule, alive.peaks)


@pytest.mark.parametrize(("schedule", "lookahead"), [("gpipe", 0), ("zb2p", 1)])
@on_ranks(2)
def test_how_long_messages_take(rank: int, schedule: str, lookahead: int) -> None:
    """What NCCL's buffers hold of a message travels beside the computation that comes before its receive, as in a
    simulated plan. The rest is added to each F and B after the first, unless their receives are posted early: then to
    the first alone, which has nothing in front."""
    length, num_microbatches = 2**14, 4
    chunks = build(schedule, 2, "nccl", p2p_lookahead=lookahead)
    with (
        on_lazy_device(chunks) as lazy,
        mock.patch.object(lazy.nccl, "link", "network"),
        mock.patch.object(megapipe.transports.nccl, "BUFFER", 2**14),
    ):
        begin = lazy.device.set_clocks()
        for chunk in chunks:
            chunk.disturb = lambda: lazy.device.current_stream().spend(1e-3)  # each F, and each B
        step(schedule, chunks, lazy.device.to_device, num_microbatches, length)
        lazy.device.synchronize()
        taken = 1000 * (lazy.device.COMPUTE.now - begin)
        buffered, speed, _ = lazy.nccl.LINKS["network"]
        num_bytes = length * WIDTH * 8
        plan = megapipe.plan.make_plan(schedule, 2, num_microbatches)
        times = plan.simulate(1.0, 1.0, 0.0, message=1000 * num_bytes / speed).spans[rank]
        exposed = 1000 * (num_bytes - buffered) / speed
        assert exposed > 0
        num_exposed = (3 if rank == 1 else 6) if lookahead == 0 else 1
        assert taken == pytest.approx(times[-1].end + exposed * num_exposed)


@on_ranks(3)
def test_many_chunks_take_no_more_of_a_device(rank: int) -> None:
    """Each boundary had communicators of its own, with a receive posted on each at all times. With eight chunks their
    kernels held every multiprocessor, and two of them shared one of the 32 streams, so that neither could go on."""
    parallel_state.initialize_model_parallel(3, virtual_pipeline_model_parallel_size=3)
    chunks = build("interleaved_1f1b", 3, "nccl")
    with on_lazy_device(chunks) as lazy:
        lazy.nccl.MOST_OCCUPIED = 0
        step("interleaved_1f1b", chunks, lazy.device.to_device, 3)
        lazy.device.synchronize()
        assert len(lazy.nccl.COMMUNICATORS) == 4  # two for each neighbour
        assert lazy.nccl.MOST_OCCUPIED == 1  # a receive at a time: sends are small
        for communicator in lazy.nccl.COMMUNICATORS:
            assert communicator.options.is_high_priority_stream
            assert communicator.options.config.max_ctas <= 4


def failing_at(rank: int, number: int) -> Callable[[], None]:
    """Disturbs rank 1: its forward or backward of that number fails."""
    numbers = itertools.count(1)

    def fail() -> None:
        if next(numbers) == number and rank == 1:
            raise MemoryError

    return fail


@pytest.mark.parametrize(
    ("transport", "schedule", "number", "length"),
    [("nccl", "zbv", 7, 2**16), ("nccl", "1f1b", 5, 3), ("host", "1f1b", 5, 3)],
)
@on_ranks(2)
def test_a_failure_is_known_before_weights_change(
    rank: int, transport: str, schedule: str, number: int, length: int
) -> None:
    """A rank whose host had left the step before another one failed went on to its optimizer, and heard of the failure
    in the next step: the weights had been changed by then, with gradients of messages that had never come.

    While messages occupied the device, communicators were aborted one after the other. The first abort waited for the
    device, which waited for what the second communicator had there: the failed rank hung before it could show its
    error."""
    fail = failing_at(rank, number)
    chunks = build(schedule, 2, transport)
    with on_lazy_device(chunks) as lazy:
        for chunk in chunks:
            chunk.disturb = fail

        def one_step() -> None:
            step(schedule, chunks, lazy.device.to_device, length=length)
            check_failures()

        text = "^$" if rank == 1 else r"rank 1 failed at .*MemoryError"
        with pytest.raises(MemoryError if rank == 1 else PipelineError, match=text):
            one_step()
        lazy.device.synchronize()


@pytest.mark.parametrize(
    ("transport", "where"),
    [*((one, (Channels, "connect")) for one in TRANSPORTS), ("nccl", (NcclTransport, "_set_up"))],
)
@on_ranks(2)
def test_connecting_ends_where_a_rank_fails(rank: int, transport: str, where: tuple[Any, str]) -> None:
    """The others were in the transport by then, where nobody could reach them: they waited for as long as that does,
    eleven minutes, and then showed its error and not the cause."""

    def fail(*args: Any) -> None:
        raise MemoryError

    chunks = build("1f1b", 2, transport)
    with on_lazy_device(chunks) as lazy:
        message = "rank 1 failed at the connecting of its channels: MemoryError"
        with (
            mock.patch.object(*where, fail if rank == 1 else getattr(*where)),
            mock.patch.object(lazy.nccl, "patience", 60.0),
        ):
            with pytest.raises(MemoryError) if rank == 1 else pytest.raises(PipelineError, match=message):
                step("1f1b", chunks, lazy.device.to_device)
            if rank == 0 and where[0] is NcclTransport:
                # NCCL itself cannot be told to give up: its thread begins, even after the abort, and waits on.
                wait_for(lambda: lazy.nccl.CONNECTING)
            else:
                assert not lazy.nccl.CONNECTING
            lazy.nccl.patience = 0.0
            wait_for(lambda: not lazy.nccl.CONNECTING)


@on_ranks(2)
def test_a_process_ends_where_another_one_is_gone(rank: int) -> None:
    """Communicators were given back at the end of a process one after the other, and each waits for its other end:
    where a rank was gone, the others never ended."""
    chunks = build("1f1b", 2, "nccl")
    with on_lazy_device(chunks) as lazy:
        step("1f1b", chunks, lazy.device.to_device)
        is_over = threading.Event()
        for_the_other = mock.Mock(side_effect=is_over.wait)
        with (
            mock.patch.object(lazy.nccl.LikeNccl, "shutdown", for_the_other),
            mock.patch.object(megapipe.transports.nccl, "PATIENCE", 0.2),
        ):
            megapipe.runtime.session._close_sessions()
        assert for_the_other.call_count == 2
        is_over.set()


@on_ranks(1)
def test_a_step_on_one_rank_as_a_graph(rank: int) -> None:
    """Nothing in it asks the host: replayed on other numbers it gives their gradients."""
    expected = build("zbv", 1, "host")
    losses = step("zbv", expected, lambda x: -x)
    chunks = build("zbv", 1, "host")
    with on_lazy_device(chunks) as lazy:
        inputs: list[Any] = []

        def place(x: Tensor) -> Any:
            inputs.append(lazy.device.to_device(x))
            return inputs[-1]

        step("zbv", chunks, lazy.device.to_device)
        for chunk in chunks:
            chunk.zero_grad()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            reports = step("zbv", chunks, place)
        for x in inputs:
            x.neg_()
        for _ in range(2):  # the second one writes over what the first has left
            graph.replay()
        assert [lazy.device.to_host(one) for one in reports] == losses
        assert_same(chunks, expected, lazy.device.to_host)


@pytest.mark.parametrize(
    ("num_ranks", "config", "text"),
    [
        (2, {}, "a CUDA graph of the whole step does not go with several pipeline ranks"),
        (1, {"record_timeline": TimelineRecorder()}, "a CUDA graph of the whole step does not go with record_timeline"),
        (1, {"timers": mock.MagicMock}, "a CUDA graph of the whole step does not go with timers"),
    ],
    ids=["two ranks", "timeline", "timers"],
)
@on_ranks()
def test_a_step_that_is_no_graph(rank: int, num_ranks: int, config: dict[str, Any], text: str) -> None:
    """Nothing kept a step of several ranks from being captured, but for CUDA's own error in the middle of it, if it was
    met: the replays would have waited for ever where another rank is gone."""
    chunks = build("1f1b", num_ranks, "nccl", **config)
    with on_lazy_device(chunks) as lazy:
        placed = lazy.device.to_device(torch.zeros(()))
        with torch.cuda.graph(torch.cuda.CUDAGraph()), pytest.raises(ValueError, match=text):
            step("1f1b", chunks, lambda x: placed)


@pytest.mark.parametrize("is_device_wide", [False, True])
@on_ranks(2)
def test_a_time_limit_holds_where_only_the_device_waits(rank: int, is_device_wide: bool) -> None:
    """The host of a rank goes on when its device waits for a message, so no wait was ever seen to last too long: the
    report of where every rank is never came, and the optimizer stepped with what was in the buffers.

    While the host waits for the whole device, questions for events may have no answer: the thread that asked them was
    the one that keeps the time.

    Another time limit takes other channels. Those of the first step were aborted first, and waited ten seconds for what
    the others have on the device."""

    def stall() -> None:
        counter[0] += 1
        if rank == 1 and counter[0] == 3:
            is_over.wait(20)

    counter = [0]
    is_over = threading.Event()
    chunks = build("1f1b", 2, "nccl")
    with on_lazy_device(chunks) as lazy:
        step("1f1b", chunks, lazy.device.to_device)  # which connects, without a time limit
        dist.barrier()
        for chunk in chunks:
            chunk.disturb = stall if rank or not is_device_wide else lazy.device.synchronize
            chunk.config.timeout = 2.0

        def steps() -> None:
            while True:
                step("1f1b", chunks, lazy.device.to_device)
                check_failures()

        message = r"rank 0 waits for the output gradient of microbatch \d from rank 1, which is at 1F1"
        if rank == 1:
            # The other rank's device waits; this one's host hears of it, once it looks.
            watchdog = megapipe.runtime.session.Session.of(parallel_state.get_pipeline_model_parallel_group()).watchdog
            release = threading.Thread(target=lambda: (wait_for(lambda: watchdog.board.failure), is_over.set()))
            release.start()
        patience = mock.patch.object(megapipe.transports.nccl, "PATIENCE", 600.0)
        with pytest.raises(PipelineError, match=message), patience:
            steps()
        lazy.device.synchronize()


@on_ranks(2)
def test_a_message_never_arrives_by_an_error(rank: int) -> None:
    """Between nodes NCCL hears that a rank is gone, and torch then counts its messages as completed, while the device
    still waits. The guard before the optimizer let the step pass, with gradients of messages that had never come.

    Torch's own thread ends the process a minute later: the error has to be shown before."""
    chunks = build("1f1b", 2, "nccl")
    with on_lazy_device(chunks) as lazy:
        optimizer = megapipe.PipelinedOptimizer(chunks, lambda groups: torch.optim.SGD(groups, lr=0.1, foreach=False))
        step("1f1b", chunks, lazy.device.to_device)
        before = [lazy.device.to_host(parameter) for parameter in chunks[0].parameters()]
        board = megapipe.failures.Board.current()
        assert board is not None
        with mock.patch.multiple(lazy.nccl, link="network", heard_at=None):
            if rank == 1:  # its device is gone, and it says nothing
                for communicator in lazy.nccl.COMMUNICATORS:
                    communicator.abort()
                wait_for(lambda: board.failure)
            with contextlib.suppress(PipelineError) if rank == 0 else contextlib.nullcontext():
                if rank == 0:
                    step("1f1b", chunks, lazy.device.to_device)  # which the host leaves, or hears of the failure in it
            with pytest.raises(PipelineError, match=r"rank 0 lost its connection at 0[FB]\d \(NCCL reports COMM_ERROR"):
                optimizer.step()
            assert (lazy.nccl.heard_at is not None) == (rank == 0)
            assert not lazy.nccl.has_ended_process()
        assert all(torch.equal(a, lazy.device.to_host(b)) for a, b in zip(before, chunks[0].parameters()))


@on_ranks(2)
def test_found_shapes_take_no_other_communicators(rank: int) -> None:
    """Headers precede the messages of steps that find shapes. A step whose shapes are given had none, and so
    communicators of its own: twice as many, for good."""
    chunks = build("1f1b", 2, "nccl", hidden_size=None)
    with on_lazy_device(chunks) as lazy:
        for size in (None, WIDTH):
            for chunk in chunks:
                chunk.config.hidden_size = size
            step("1f1b", chunks, lazy.device.to_device)
        lazy.device.synchronize()
        assert len(lazy.nccl.COMMUNICATORS) == 2


@on_ranks(2)
def test_a_step_on_another_stream(rank: int) -> None:
    expected = build("1f1b", 2, "nccl")
    for _ in range(2):
        step("1f1b", expected, lambda x: x)
    chunks = build("1f1b", 2, "nccl")
    with on_lazy_device(chunks) as lazy:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(2):
                step("1f1b", chunks, lazy.device.to_device)
        assert_same(chunks, expected, lazy.device.to_host)


@on_ranks(2)
def test_headers_keep_their_order(rank: int) -> None:
    """Those of lengths that vary, and of messages whose sizes are known: of a frozen stage, found in a first step,
    since it may be unfrozen."""
    schedule, transport = "interleaved_1f1b", "nccl"
    expected, varying = build(schedule, 2, transport), build(schedule, 2, transport, variable_seq_lengths=True)
    step(schedule, expected, lambda x: x)
    with on_lazy_device(varying) as lazy:
        step(schedule, varying, lazy.device.to_device)
        assert_same(varying, expected, lazy.device.to_host, schedule)
    expected, chunks = build(schedule, 2, transport), build(schedule, 2, transport, hidden_size=None)
    with on_lazy_device(chunks) as lazy:
        for is_trained in (False, True, True):
            for chunk in (*expected, *chunks):
                chunk.requires_grad_(is_trained or chunk.info.index > 1)
            step(schedule, expected, lambda x: x)
            step(schedule, chunks, lazy.device.to_device)
        assert_same(chunks, expected, lazy.device.to_host, schedule)


@on_ranks(2)
def test_types_of_numbers_that_nccl_does_not_know(rank: int) -> None:
    """Gloo has complex numbers and 16-bit integers. NCCL has not: it raised a TypeError in the middle of a step."""
    tensors = [
        torch.arange(6, dtype=torch.int16).view(2, 3),
        torch.tensor([1 + 2j, -0.5j], dtype=torch.complex64).conj(),
        torch.tensor(2 - 1j, dtype=torch.complex128),
        torch.ones(3),
    ]
    with on_lazy_device([]) as lazy:
        device = lazy.device.DEVICE
        store = dist.PrefixStore("types", _get_default_store())
        members = Members(store, store, rank, range(2), 60)
        channels = Channels(make_transport("nccl", members, device, lambda _: False, 4), loop, rank, 2, 1)
        channels.connect()
        channel = channels.channel("forward", 0)
        if rank == 0:
            channel.send([lazy.device.to_device(tensor) for tensor in tensors])
        else:
            spec = MessageSpec("list", tuple(TensorSpec(tuple(t.shape), t.dtype, False) for t in tensors))
            received = channel.receive(spec).wait()
            assert all(torch.equal(lazy.device.to_host(a), b) for a, b in zip(received, tensors, strict=True))
        lazy.device.synchronize()
        dist.barrier()
        channels.transport.close()


@on_ranks(1)
def test_a_norm_is_read_while_the_device_has_other_work(rank: int) -> None:
    """The norm of a step that is validated later was read in the stream of the warmup: the host waited for forwards
    that it had just launched, with the inputs they waited for, and the device had nothing to do after them."""

    class Gathered:
        """A collective that has come to its end."""

        wait = staticmethod(lambda: None)
        is_completed = staticmethod(lambda: True)

    def sgd(groups: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(groups, lr=0.1, foreach=False)

    chunks = build("1f1b", 1, "host")
    with on_lazy_device(chunks) as lazy:
        for parameter in chunks[0].parameters():
            parameter.grad = lazy.device.to_device(torch.full(parameter.shape, 0.01, dtype=torch.float64))
        optimizer = megapipe.PostValidatedOptimizer(chunks, sgd, 1.0)
        gather = "megapipe.training.post_validation.gather_power_sums"
        with mock.patch(gather, lambda own, group, async_op: (own.reshape(1), Gathered())):
            optimizer.step()
        lazy.device.synchronize()
        is_over = threading.Event()
        lazy.device.COMPUTE.put(is_over.wait)  # the warmup of the next step
        validating = threading.Thread(target=optimizer.finalize, daemon=True)
        validating.start()
        validating.join(20)
        is_over.set()
        assert not validating.is_alive()
        assert optimizer.grad_norm == pytest.approx(0.01 * (WIDTH * WIDTH + WIDTH) ** 0.5)


@on_ranks(2)
def test_events_are_used_again(rank: int) -> None:
    """Each message had events of its own, and each action of a recorded step two to four: thousands in a step of many
    microbatches, made and destroyed by the host while the device waited for it."""
    recorder = TimelineRecorder(num_steps=1)
    chunks = build("1f1b", 2, "nccl", record_timeline=recorder)
    counts = []
    clock_of = functools.cache(CudaClock)
    with on_lazy_device(chunks) as lazy, mock.patch("megapipe.analysis.recorder.clock_of", clock_of):
        for _ in range(4):
            step("1f1b", chunks, lazy.device.to_device)
            check_failures()
            counts.append(lazy.cuda.NUM_EVENTS)
        timeline = recorder.gather()
    assert counts[1] - counts[0] > 2 * 8  # meanwhile there are two records
    assert counts[-1] - counts[1] <= 8  # not even one for each message of a step
    for one in timeline.steps[0]:
        assert len(one.spans) == 8
        times = [time for span in one.spans for time in (span.start, span.end)]
        assert times == sorted(times)


@on_ranks(3)
def test_events_of_a_microbatch(rank: int) -> None:
    """NCCL's own apart, two for each message that is received: where the device comes to its wait, and past it."""
    chunks = build("1f1b", 3, "nccl")
    with on_lazy_device(chunks) as lazy:
        step("1f1b", chunks, lazy.device.to_device)
        before = lazy.cuda.NUM_RECORDS, lazy.cuda.NUM_WAITS
        step("1f1b", chunks, lazy.device.to_device)
        num_received = 4 * (2 if rank == 1 else 1)
        assert lazy.cuda.NUM_RECORDS - before[0] == 2 * num_received  # 4 for each microbatch of the inner rank
        assert before[1] == lazy.cuda.NUM_WAITS
        lazy.device.synchronize()


@on_ranks(1)
def test_stand_ins_for_cuda_are_called_like_it(rank: int) -> None:
    with on_lazy_device([]) as lazy:
        lazy.cuda.check_signatures()


@pytest.mark.parametrize("planted", ["fakes.nccl_like.Work.wait", "fakes.lazy_device.LazyTensor.record_stream"])
@on_ranks(2)
def test_races_are_found(rank: int, planted: str) -> None:
    """A stream that does not wait for a message, and memory of a message that is given out again while it is sent: on a
    machine that is slow or fast enough the numbers are right."""
    chunks = build("gpipe", 2, "nccl")
    race = pytest.raises(AssertionError, match="CSAN detected a possible data race")
    with race, on_lazy_device(chunks) as lazy, mock.patch(planted):
        for _ in range(2):
            step("gpipe", chunks, lazy.device.to_device)
        lazy.device.synchronize()

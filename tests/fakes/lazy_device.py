"""An asynchronous device in Python, for what a GPU would show and a CPU hides.

Operators on its tensors are put on a stream, a thread that runs them on the CPU one after the other, while the host
goes on. Autograd uses a device thread, as for CUDA. Host waits for the device are counted, with their stacks.
So a test sees host waits within a step, reads of messages that have not arrived, memory that is held too long or was
given to somebody else too early, and ranks that wait for each other because a device does. Streams have virtual clocks
besides: see `Stream.now`.

Needs torch's backends in Python (PrivateUse1), from torch 2.10 on. Registered once per process, for good.
"""

from __future__ import annotations

import itertools
import queue
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from fakes.caching_allocator import Allocation, CachingAllocator
from fakes.races import Races
from torch import Tensor
from torch.cuda._sanitizer import zip_arguments
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend
from torch.utils.weak import WeakTensorKeyDictionary

DEVICE = torch.device("lazy", 0)
SYNCS: list[str] = []
"""The stacks of host waits for the device, since it was last cleared."""
syncs_are_errors = False
"""Whether such a wait raises."""


class Module(_DummyBackendModule):
    """torch.lazy"""

    def get_rng_state(self, device: Any = None) -> Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)

    def manual_seed_all(self, seed: int) -> None:
        synchronize()  # draws that are queued take from the host's generator; CUDA has its own

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]

    def Stream(self, device: Any = None) -> Stream:
        return Stream()

    def current_stream(self, device: Any = None) -> Stream:
        return current_stream()

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        global _of_main
        before, before_of_main = current_stream(), _of_main
        _current.stream = stream
        if threading.current_thread() is threading.main_thread():
            _of_main = stream
        try:
            yield
        finally:
            _current.stream, _of_main = before, before_of_main


class Moment(threading.Event):
    """Set once a stream has come to the point at which it was recorded."""

    time = 0.0
    """That of the stream's clock then."""


class Passed(NamedTuple):
    """A moment as torch has it."""

    moment: Moment

    def wait(self, stream: Stream) -> None:
        stream.wait_for(self.moment)


class Stream:
    """Runs what is put on it in order, in a thread of its own."""

    def __init__(self) -> None:
        self.now = 0.0
        """Virtual seconds. Only `spend`, waits for other streams and messages take any, so what a step takes does not
        depend on the machine."""
        self.number = next(NUMBERS)
        self._queue: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self._errors: list[BaseException] = []
        self.capture: list[Callable[[], Any]] | None = None
        """Where what is put here is kept instead of run."""
        STREAMS.add(self)
        threading.Thread(target=_run, args=(self._queue, self._errors), daemon=True).start()

    def __del__(self) -> None:
        self._queue.put(None)

    def put(self, work: Callable[[], Any]) -> None:
        if self.capture is None:
            self._queue.put(work)
        else:
            self.capture.append(work)

    def spend(self, seconds: float) -> None:
        """As an operation that takes this long."""

        def pass_by() -> None:
            self.now += seconds

        self.put(pass_by)

    def record(self) -> Moment:
        """Set once all that was put before has run."""
        assert self.capture is None, "nothing can be waited for while a graph is captured"
        moment = Moment()
        RACES.record(moment, self)
        self.put(lambda: self.reach(moment))
        return moment

    def wait_for(self, moment: Moment) -> None:
        RACES.wait(moment, self)
        self.put(lambda: self.come_after(moment))

    def reach(self, moment: Moment) -> None:
        """In the stream's own thread, as is the next one."""
        moment.time = self.now
        moment.set()

    def come_after(self, moment: Moment) -> None:
        moment.wait()
        self.now = max(self.now, moment.time)

    def record_event(self) -> Passed:
        return Passed(self.record())

    def wait_event(self, event: Any) -> None:
        event.wait(self)

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def synchronize(self) -> None:
        (moment := self.record()).wait()
        RACES.wait_on_host(moment)
        if self._errors:
            raise self._errors[0]


def _run(works: queue.SimpleQueue[Callable[[], Any] | None], errors: list[BaseException]) -> None:
    while (work := works.get()) is not None:
        try:
            work()
        except BaseException as error:
            errors.append(error)
        del work  # nothing may stay alive while this waits


RACES = Races()
NUMBERS = itertools.count()
STREAMS: weakref.WeakSet[Stream] = weakref.WeakSet()
_current = threading.local()


def current_stream() -> Stream:
    """Of this thread. A thread that has not chosen one, such as autograd's, has the main thread's, as autograd has the
    stream of the forward."""
    return getattr(_current, "stream", _of_main)


CONTEXT = threading.RLock()
"""Held while a thread waits for the whole device: CUDA may let others that ask for an event wait meanwhile."""


def synchronize() -> None:
    """Wait for all streams, as torch.cuda.synchronize does."""
    with CONTEXT:
        for stream in list(STREAMS):
            stream.synchronize()


def set_clocks() -> float:
    """Called by all ranks at the same time, while their devices have nothing to do. Their clocks then agree."""
    synchronize()
    latest = torch.tensor(max(stream.now for stream in STREAMS), dtype=torch.float64)
    dist.all_reduce(latest, dist.ReduceOp.MAX)
    for stream in STREAMS:
        stream.now = latest.item()
    return latest.item()


ALLOCATOR = CachingAllocator(RACES, synchronize)


class Cell:
    """Where the numbers will be."""

    __slots__ = ("__weakref__", "cpu")
    cpu: Tensor

    def put(self, numbers: Tensor) -> None:
        """In the same memory, where an operation is replayed: views of it change."""
        if not hasattr(self, "cpu") or self.cpu.untyped_storage().data_ptr() == numbers.untyped_storage().data_ptr():
            self.cpu = numbers
        else:
            self.cpu.copy_(numbers)


def allocate(meta: Tensor, cell: Cell) -> Allocation:
    """Memory for new numbers, in the current stream's order."""
    return ALLOCATOR.allocate(meta.untyped_storage().nbytes(), current_stream(), cell)


class LazyTensor(Tensor):
    cell: Cell
    meta: Tensor
    memory: Allocation
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, meta: Tensor, cell: Cell, memory: Allocation) -> LazyTensor:
        made = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            meta.shape,
            dtype=meta.dtype,
            device=DEVICE,
            strides=meta.stride(),
            storage_offset=meta.storage_offset(),
        )
        made.cell, made.meta, made.memory = cell, meta, memory
        return made

    def __init__(self, *args: Any) -> None:
        pass

    def __repr__(self, **kwargs: Any) -> str:
        return f"LazyTensor{list(self.shape)}"

    def data_ptr(self) -> int:
        return id(self.memory.block) + self.meta.storage_offset() * self.meta.element_size()

    def record_stream(self, stream: Any) -> None:
        self.memory.used_by.add(stream)

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return enqueue(op, args, kwargs or {})


def to_device(tensor: Tensor) -> LazyTensor:
    """Without waiting, as from pinned memory."""
    cell = Cell()
    cell.cpu = tensor.detach().clone()
    meta = tensor.detach().to("meta")
    made = LazyTensor(meta, cell, allocate(meta, cell))
    RACES.launch(current_stream(), [], blocks_of(made), "to_device")
    return made


def to_host(tensor: Any) -> Tensor:
    """For a test that wants to see it when all is done: not counted."""
    synchronize()
    return tensor.cell.cpu.clone()


def enqueue(op: Any, args: Any, kwargs: Any) -> Any:
    """Compute the result's shape now and its numbers on the stream."""
    device = kwargs.get("device")
    to_cpu = op is torch.ops.aten._to_copy.default and device is not None and torch.device(device).type == "cpu"
    from_cpu = op is torch.ops.aten._to_copy.default and not isinstance(args[0], LazyTensor)
    if op is torch.ops.aten.copy_.default and not isinstance(args[0], LazyTensor):
        return _copy_out(*args, **kwargs)
    is_pinned = from_cpu and kwargs.get("non_blocking", False)
    if op is torch.ops.aten._local_scalar_dense.default or to_cpu or (from_cpu and not is_pinned):
        count_sync()
        current_stream().synchronize()
        if not from_cpu:
            return op(args[0].cell.cpu, *args[1:], **kwargs)
    results, cells, spec = _shapes(op, args, kwargs, device)
    if not (op.is_view or "empty" in op.name()):
        new = [result for result, cell in zip(results, cells) if cell is not None]
        changed = [value for argument, value in zip_arguments(op._schema, args, kwargs) if _is_changed(argument)]
        RACES.launch(current_stream(), blocks_of((args, kwargs)), blocks_of((new, changed)), op)
    on_cpu = kwargs | ({"device": torch.device("cpu")} if device is not None else {})
    # What is queued holds the numbers, and not their memory: another tensor may get that, and then ruins them.
    given = mapped(lambda value: value.cell if isinstance(value, LazyTensor) else value, (args, on_cpu))

    def work() -> None:
        real_args, real_kwargs = mapped(lambda one: one.cpu if isinstance(one, Cell) else one, given)
        with torch.no_grad():
            numbers = pytree.tree_leaves(op(*real_args, **real_kwargs))
        for cell, value in zip(cells, numbers):
            if cell is not None:
                cell.put(value)

    current_stream().put(work)
    return pytree.tree_unflatten(results, spec)


def leaves_of(value: Any) -> Iterator[Any]:
    """Those of an operator's arguments. Torch's pytrees look up the class of each container."""
    if isinstance(value, (list, tuple, dict)):
        for one in value.values() if isinstance(value, dict) else value:
            yield from leaves_of(one)
    else:
        yield value


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(mapped(function, one) for one in value)
    if isinstance(value, dict):
        return {name: mapped(function, one) for name, one in value.items()}
    return function(value)


def _is_changed(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def blocks_of(values: Any) -> list[Any]:
    """The memory of tensors, and that of the host from which the device copies by itself."""
    leaves = [leaf for leaf in leaves_of(values) if isinstance(leaf, Tensor)]
    blocks = [one.memory.block if isinstance(one, LazyTensor) else PINNED.get(one) for one in leaves]
    return [block for block in blocks if block is not None]


def count_sync() -> None:
    if syncs_are_errors:
        raise RuntimeError("called a synchronizing CUDA operation")
    SYNCS.append("".join(traceback.format_stack(limit=13)[:-4]))


PINNED: Any = WeakTensorKeyDictionary()
"""Host memory that copies need not wait for, each with its number."""


def _copy_out(target: Tensor, source: LazyTensor, non_blocking: bool = False) -> Tensor:
    cell = source.cell
    RACES.launch(current_stream(), blocks_of(source), blocks_of(target), "a copy to the host")
    current_stream().put(lambda: target.copy_(cell.cpu))
    if not (non_blocking and target in PINNED):
        count_sync()
        current_stream().synchronize()
    return target


_known_shapes: dict[Any, tuple[list[Any], Any]] = {}
"""By operator and arguments: its results, each as meta tensor, as a view of an input, as the input that it is, or as
plain value; and their tree. Most operators' shapes are computed in Python, which takes milliseconds."""


def _shapes(op: Any, args: Any, kwargs: Any, device: Any) -> tuple[list[Any], list[Cell | None], Any]:
    """The results of an operator, and the cells of those that are new."""
    inputs = [leaf for leaf in leaves_of((args, kwargs)) if isinstance(leaf, Tensor)]
    key = (op, _key(args), _key(kwargs))
    if key not in _known_shapes:
        _known_shapes[key] = _computed_shapes(op, inputs, args, kwargs, device)
    leaves, spec = _known_shapes[key]
    results: list[Any] = []
    cells: list[Cell | None] = []
    for leaf in leaves:
        of = leaf.of if isinstance(leaf, View) else None
        leaf = leaf.meta if isinstance(leaf, View) else leaf
        if isinstance(leaf, Tensor):
            meta = torch.as_strided(leaf, leaf.shape, leaf.stride(), leaf.storage_offset())  # one for each tensor
            cells.append(cell := Cell())
            results.append(LazyTensor(meta, cell, allocate(meta, cell) if of is None else inputs[of].memory))
        else:
            cells.append(None)
            results.append(inputs[leaf.number] if isinstance(leaf, Input) else leaf)
    return results, cells, spec


class Input(NamedTuple):
    number: int


class View(NamedTuple):
    meta: Tensor
    of: int
    """The number of the input."""


def _computed_shapes(op: Any, inputs: list[Tensor], args: Any, kwargs: Any, device: Any) -> tuple[list[Any], Any]:
    copies = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
    if op not in copies and any(t.dim() and not isinstance(t, LazyTensor) for t in inputs):
        raise RuntimeError(f"{op}: tensors on lazy and cpu")

    def meta(value: Any) -> Any:
        if isinstance(value, LazyTensor):
            return value.meta
        return value.to("meta") if isinstance(value, Tensor) else value

    on_meta = kwargs | ({"device": torch.device("meta")} if device is not None else {})
    meta_args, meta_kwargs = pytree.tree_map(meta, (args, on_meta))
    leaves, spec = pytree.tree_flatten(op(*meta_args, **meta_kwargs))
    lazy = [(number, t.meta) for number, t in enumerate(inputs) if isinstance(t, LazyTensor)]
    numbers = {id(meta): number for number, meta in lazy}
    storages = {meta.untyped_storage()._cdata: number for number, meta in reversed(lazy)}

    def described(leaf: Any) -> Any:
        if id(leaf) in numbers:
            return Input(numbers[id(leaf)])
        of = storages.get(leaf.untyped_storage()._cdata) if isinstance(leaf, Tensor) else None
        return leaf if of is None else View(leaf, of)

    return [described(leaf) for leaf in leaves], spec


def _key(value: Any) -> Any:
    if isinstance(value, Tensor):
        return type(value), value.shape, value.stride(), value.storage_offset(), value.dtype
    if isinstance(value, (list, tuple)):
        return type(value), tuple(_key(one) for one in value)
    if isinstance(value, dict):
        return tuple((name, _key(one)) for name, one in value.items())
    return type(value), value


class Factories(TorchDispatchMode):
    """Makes torch.zeros(device="lazy") and copies to the device."""

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        is_pinned = kwargs.pop("pin_memory", False)
        device = kwargs.get("device")
        is_lazy = device is not None and torch.device(device).type == DEVICE.type
        if is_lazy or any(isinstance(leaf, LazyTensor) for leaf in leaves_of((args, kwargs))):
            return enqueue(op, args, kwargs)
        if (used := blocks_of((args, kwargs))) and not op.is_view:
            RACES.launch(None, used, used if op._schema.is_mutable else [], op)
        made = op(*args, **kwargs)
        if is_pinned:
            PINNED[made] = object()
        return made


@contextmanager
def lazily() -> Iterator[None]:
    """Around what uses the device."""
    SYNCS.clear()
    with Factories():
        yield


_setup_privateuseone_for_python_backend("lazy", Module())
COMPUTE = Stream()
_of_main = COMPUTE

"""What a forward saves for its backward, moved to host memory and back.

The copies run on streams of their own, one each way: out as soon as the forward is done, back when they are told to.
Memory of the device is freed and taken again where the schedule says so, so that its peak is that of the plan. On a CPU
the same is done at once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..timing import uncounted
from .saver import Fingerprint, Saver, check_version, first_difference

SMALLEST = 2**20
"""Bytes of what is copied between a device and the host: a copy takes the host 25 us, by an estimate."""


def storages_of(tensors: Iterable[Tensor]) -> set[int]:
    """What identifies the memory of tensors, for as long as they are there. Sparse ones have none of their own, and
    parameters of lazy layers none yet."""
    own = (tensor for tensor in tensors if tensor.layout == torch.strided and not nn.parameter.is_lazy(tensor))
    return {tensor.untyped_storage()._cdata for tensor in own}


def _is_parameter(tensor: Tensor) -> bool:
    return isinstance(tensor if tensor._base is None else tensor._base, nn.Parameter)


class _Wrapped(NamedTuple):
    """A saved tensor of a kind that wraps others, as DTensor does."""

    kind: Any
    inner: dict[str, Any]
    context: Any
    size: torch.Size
    stride: tuple[int, ...]


class _Memory:
    """A piece of the device's memory, seen as a vector, and its copy in host memory."""

    __slots__ = ("device", "host")

    def __init__(self, whole: Tensor) -> None:
        self.device: Tensor | None = whole
        self.host: Tensor | None = None


class _Saved:
    """A saved tensor: itself, and, once that is freed, where it lies in memory that is moved."""

    __slots__ = ("fingerprint", "is_conj", "is_neg", "memory", "now", "offset", "size", "stride", "tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor: Tensor | None = tensor
        self.version = self.now = tensor._version
        self.memory: _Memory | None = None
        self.fingerprint: Fingerprint | None = None
        self.size = tensor.shape

    def move(self, memory: _Memory, is_compared: bool) -> None:
        assert self.tensor is not None
        tensor, self.memory = self.tensor, memory
        self.stride, self.offset = tensor.stride(), int(tensor.storage_offset())
        self.is_conj, self.is_neg = tensor.is_conj(), tensor.is_neg()
        if is_compared:
            self.fingerprint = Fingerprint.of(tensor)

    def free(self) -> None:
        assert self.tensor is not None
        self.now, self.tensor = self.tensor._version, None

    def get(self, what: str) -> Tensor:
        now = self.now if self.tensor is None else self.tensor._version
        check_version(what, list(self.size), now, self.version)
        if self.tensor is not None:
            return self.tensor
        assert self.memory is not None
        assert self.memory.device is not None
        tensor = self.memory.device.as_strided(self.size, self.stride, self.offset)
        tensor = torch._neg_view(tensor) if self.is_neg else tensor
        tensor = tensor.conj() if self.is_conj else tensor
        if self.fingerprint is not None and first_difference([(self.fingerprint, Fingerprint.of(tensor))]):
            raise RuntimeError(
                f"{what}: a saved tensor ({self.fingerprint.kind}) came back from host memory as another. Leave the "
                "stage out of config.offload_activations, or the O and L out of its plan, and please report it."
            )
        return tensor


class Offload:
    """What one forward saves.

    Args:
        kept: the memory that stays, as others hold it: that of parameters, of buffers and of what was received.
        what: names the stage in errors.
        is_compared: what comes back is compared with what was saved, to the last bit.
    """

    def __init__(self, device: torch.device, kept: set[int], what: str, is_compared: bool = False) -> None:
        self._device, self._kept, self._what, self._is_compared = device, kept, what, is_compared
        self._memories: dict[tuple[int, torch.dtype], _Memory] = {}
        self._moved: list[_Saved] = []
        self._storages: list[torch.UntypedStorage] = []
        """During the forward, those that keys of `_memories` mean: no other may get their addresses."""
        self._left: Any = None
        self._returned: Any = None
        self.is_away = False

    def saving(self) -> Saver:
        """The context of the forward."""
        return Saver(self._pack, self._unpack)

    def _pack(self, tensor: Any) -> Any:
        if not isinstance(tensor, Tensor):  # a part of a tensor that wraps others
            return tensor
        saved: Any = tensor.detach()
        if is_traceable_wrapper_subclass(saved) and not _is_parameter(tensor):
            names, context = saved.__tensor_flatten__()
            inner = {name: self._pack(getattr(tensor, name)) for name in names}
            return _Wrapped(type(saved), inner, context, tensor.shape, tensor.stride())
        packed = _Saved(saved)
        if tensor.layout != torch.strided or tensor.device != self._device or _is_parameter(tensor):
            return packed
        storage = tensor.untyped_storage()
        number = storage.nbytes() // tensor.itemsize
        is_part = 4 * tensor.numel() < number  # of a larger memory, as a microbatch is of a batch: it would not free it
        is_small = self._device.type != "cpu" and storage.nbytes() < SMALLEST
        if is_part or is_small or not number or storage._cdata in self._kept:
            return packed
        key = storage._cdata, tensor.dtype
        if key not in self._memories:
            self._storages.append(storage)
            plain = torch._neg_view(saved) if saved.is_neg() else saved
            plain = plain.conj() if plain.is_conj() else plain
            self._memories[key] = _Memory(plain.as_strided((number,), (1,), 0))
        packed.move(self._memories[key], self._is_compared)
        self._moved.append(packed)
        return packed

    def _unpack(self, saved: Any) -> Any:
        if isinstance(saved, _Wrapped):
            inner = {name: self._unpack(of) for name, of in saved.inner.items()}
            return saved.kind.__tensor_unflatten__(inner, saved.context, saved.size, saved.stride)
        if not isinstance(saved, _Saved):
            return saved
        if saved.memory is not None:
            self.wait()
        return saved.get(self._what)

    def wait(self) -> None:
        """Wait until what was saved is back, before it is used."""
        if self.is_away:
            self.load()
        if self._returned is not None:
            self._returned()
            self._returned = None

    def begin(self) -> None:
        """Begin to copy it to the host, once the forward is done."""
        self._storages = []
        self._left = _beside(self._device, "out", self._copy_out)

    def _copy_out(self) -> None:
        for memory in self._memories.values():
            assert memory.device is not None
            with uncounted():
                memory.host = torch.empty(
                    memory.device.shape, dtype=memory.device.dtype, device="cpu", pin_memory=self._device.type != "cpu"
                )
            memory.host.copy_(memory.device, non_blocking=True)

    def free(self) -> None:
        """Free the device's memory, once the copy is done."""
        self._left()
        self.is_away = True
        for saved in self._moved:
            saved.free()
        for memory in self._memories.values():
            memory.device = None
        self._moved = []

    def load(self) -> None:
        """Take memory of the device again, and begin to copy back."""
        self.is_away = False
        for memory in self._memories.values():
            assert memory.host is not None
            memory.device = torch.empty(memory.host.shape, dtype=memory.host.dtype, device=self._device)
        self._returned = _beside(self._device, "back", self._copy_back)
        self._memories = {}  # from here on only autograd holds them

    def _copy_back(self) -> None:
        for memory in self._memories.values():
            assert memory.device is not None
            assert memory.host is not None
            memory.device.copy_(memory.host, non_blocking=True)
            memory.host = None


def _beside(device: torch.device, way: str, copy: Callable[[], None]) -> Callable[[], None]:
    """Run copies on a stream of their own, after all that is under way. Returns what lets the current stream wait."""
    if device.type == "cpu":
        copy()
        return lambda: None
    module, stream = torch.get_device_module(device), _stream(device, way)
    stream.wait_stream(module.current_stream(device))
    with module.stream(stream):
        copy()
        done = stream.record_event()
    return lambda: module.current_stream(device).wait_event(done)


@functools.cache
def _stream(device: torch.device, way: str) -> Any:
    return torch.get_device_module(device).Stream(device)

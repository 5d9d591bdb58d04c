"""What a function allocates on a device, as torch's allocator counts it, and what tensors hold."""

from __future__ import annotations

import gc
import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from megapipe.sharding import ShardedChunks


class Memory(NamedTuple):
    """In bytes, above what was there before: the most at any time, and what was left in the end."""

    peak: int
    held: int


def memory_of(device: torch.device | str, function: Callable[[], Any]) -> Memory:
    """Run `function` once. On CPU all that this thread allocates counts, so backward too, which runs on it there."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        function()
        torch.cuda.synchronize(device)
        return Memory(torch.cuda.max_memory_allocated(device) - before, torch.cuda.memory_allocated(device) - before)
    # The allocator of the CPU tells only the profiler what it does.
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    events = sorted((event for event in events if event["name"] == "[memory]"), key=lambda event: event["ts"])
    totals = [event["args"]["Total Allocated"] for event in events]
    if not totals:
        return Memory(0, 0)
    before = totals[0] - events[0]["args"]["Bytes"]
    return Memory(max(totals) - before, totals[-1] - before)


def live_tensors() -> list[Tensor]:
    """All tensors on the CPU that Python knows."""
    return [t for t in gc.get_objects() if type(t) in (Tensor, nn.Parameter) and t.device.type == "cpu"]


def live_bytes(before: list[Tensor]) -> int:
    """Bytes of the live tensors whose storages are not those of `before`, each storage once. A caller that keeps the
    `live_tensors` of an earlier moment does not count what others free meanwhile."""
    sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in live_tensors()}
    known = {t.untyped_storage().data_ptr() for t in before}
    return sum(size for pointer, size in sizes.items() if pointer not in known)


@contextmanager
def gathered_bytes() -> Iterator[list[int]]:
    """The bytes of gathered weights in each action of a step, whose storages FSDP2 makes once and resizes."""
    found: list[int] = []
    before_action = ShardedChunks.before_action

    def look(sharded: ShardedChunks) -> None:
        before_action(sharded)
        for root in sharded._roots():
            root.wait_for_gathers()
        parameters: list[Any] = [p for root in sharded._roots() for p in root._parameters()]
        weights = [p._unsharded_param for p in parameters if hasattr(p, "_unsharded_param")]
        found.append(sum(weight.untyped_storage().nbytes() for weight in weights))

    with mock.patch.object(ShardedChunks, "before_action", look):
        yield found

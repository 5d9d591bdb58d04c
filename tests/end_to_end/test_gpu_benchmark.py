"""The lines for CUDA of the benchmark on GPUs, run on the tests' asynchronous device."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from tools.device import needs_devices
from tools.ranks import RankPool
from torch.multiprocessing import ProcessExitedException

from megapipe.timing.records import CudaClock

pytestmark = needs_devices

SIZES = "--device cpu --dtype float32 --layers 2 --hidden-size 8 --heads 1 --seq-length 4 --microbatches 1 --repeats 1"
MIB = 2**20


class CalledCuda(str):
    """The name of the asynchronous device, taken for that of CUDA."""

    def __eq__(self, other: object) -> bool:
        return other == "cuda"

    __hash__ = str.__hash__


def launch(grid: Any, block: Any, args: Any, shared_mem: int, stream: Any) -> None:
    """The kernel that waits for its flag."""
    (flag,) = args

    def wait() -> None:
        while not flag.item():
            time.sleep(0.0001)

    stream.put(wait)


def called_like(name: str, result: Any = None) -> Any:
    """In place of a function of torch.cuda, which takes no other arguments than that."""
    return mock.create_autospec(getattr(torch.cuda, name), return_value=result)


ROOT = str(Path(__file__).parents[2])


def tables(rank: int) -> Any:
    from fakes import cuda_like, lazy_device

    sys.path.append(ROOT)
    from benchmarks import gpu, gpu_pipelines, gpu_stages, memory

    args = gpu.parse([*SIZES.split(), "--captures", "eager"])
    args.device = CalledCuda("lazy")
    kernel = mock.create_autospec(torch.cuda._utils._CudaKernel, instance=True, side_effect=launch)
    functions = {
        "_compile_kernel": called_like("_compile_kernel", kernel),
        "get_device_properties": called_like(
            "get_device_properties", mock.Mock(shared_memory_per_block_optin=227 * 1024)
        ),
        "device_count": called_like("device_count", 1),
        "max_memory_allocated": called_like("max_memory_allocated", 5 * MIB),
        "memory_allocated": called_like("memory_allocated", MIB),
        **{name: called_like(name) for name in ("empty_cache", "reset_peak_memory_stats", "set_device")},
    }
    with (
        cuda_like.as_cuda(),
        mock.patch.multiple(torch.cuda, **functions),
        mock.patch.multiple(gpu_stages, clock_of=lambda device: CudaClock(lazy_device.DEVICE), WARMUP=1, CTAS=(0, 4)),
        mock.patch.object(gpu_pipelines, "memory_of", lambda device, run: memory.memory_of("cuda", run)),
        mock.patch.object(gpu_pipelines, "SCHEDULES", ["zbv"]),
        mock.patch.object(gpu_pipelines, "WAYS", {"as it is": {}, "offloaded": gpu_pipelines.WAYS["offloaded"]}),
    ):
        parts = (gpu_stages.measure, gpu_pipelines.measure_memory, gpu_pipelines.measure_ways)
        return [rows for part in parts for _, _, _, rows, _ in part(rank, args)]


def test_what_runs_on_gpus_only() -> None:
    pool = RankPool(1)  # a process of its own: a device that is registered stays so
    try:
        ((waiting, captured, memory, ways),) = pool.run(1, tables)
    finally:
        pool.stop()
    assert [row[0] for row in waiting] == ["0", "4"]
    assert [row[0] for row in captured] == ["eager"]
    names = ["zbv", "gpipe, offloaded", "1f1b, offloaded", "zbv, offloaded"]
    assert memory == [[name, "4.0", "NCCL"] for name in names]
    assert [(peak, off_by) for *_, peak, off_by in ways] == [("4.0", "0e+00")] * 4


def test_a_part_that_fails_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first GPU met by a kernel that does not compile there would have shown nothing else in its ten minutes."""
    monkeypatch.syspath_prepend(ROOT)
    from benchmarks import gpu

    def launch(num_ranks: int, measured: Any, *args: Any, **options: Any) -> list[Any]:
        done.append(measured)
        if measured is gpu.gpu_stages.measure:
            raise ProcessExitedException("process 0 terminated with exit code 1", 0, 1, 1)
        return []

    done: list[Any] = []
    monkeypatch.setattr(gpu, "launch", launch)
    with pytest.raises(SystemExit, match="stages failed"):
        gpu.main(["--device", "cpu"])
    assert done == [measured for measured, _ in gpu.SECTIONS.values()]

"""Megatron's own tests of its schedules, on the CPU and with our functions in the place of its own.

    torchrun --nproc-per-node 8 tests/integrations/megatron_own.py path/to/Megatron-LM

`make test-megatron MEGATRON=path/to/Megatron-LM` installs what they need and runs this. All that they import of
Megatron is the checkout's. Rank 0 prints a line for each test. The first that fails ends the run, and its ranks say how
it failed.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

FILE = "tests/unit_tests/pipeline_parallel/test_schedules.py"
OURS = (
    "get_forward_backward_func",
    "forward_backward_no_pipelining",
    "forward_backward_pipelining_without_interleaving",
    "forward_backward_pipelining_with_interleaving",
)
SEVEN = "7 microbatches on 4 ranks are to raise a RuntimeError; here they work"
LEFT_OUT = {
    # From 0.20 on.
    "test_schedule_enables_grad_sync_on_first_stage": "looks at calls of Megatron's own forward_step and backward_step",
    "test_get_pipeline_parallel_order": "looks at tables of Megatron's own, which no schedule here reads",
    "test_forward_backward_func_with_interleaving": SEVEN,
    "test_forward_backward_func_with_uneven_interleaving": SEVEN,
}


def embedding_groups(pp_group: dist.ProcessGroup) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Stands for their function, whose groups differ from rank to rank but are made at the same time: gloo takes those
    for one. Here every rank makes all of them."""
    own = dist.get_process_group_ranks(pp_group)
    pipelines = [own] * dist.get_world_size()
    dist.all_gather_object(pipelines, own)
    made = {}
    for ranks in pipelines:
        if ranks[0] not in made:
            made[ranks[0]] = dist.new_group([ranks[0]]), dist.new_group(sorted({ranks[0], ranks[-1]}))
    return made[own[0]]


class OnOurSchedules:
    """A plugin of pytest."""

    def pytest_collection_modifyitems(self, items: list[pytest.Function]) -> None:
        for name in dict.fromkeys(item.originalname for item in items if item.originalname in LEFT_OUT):
            _say(f"left out {name}: {LEFT_OUT[name]}")
        items[:] = [item for item in items if item.originalname not in LEFT_OUT]
        for item in items:
            item.module._populate_embedding_and_position_groups = embedding_groups

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        _say_if_failed(report)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        _say_if_failed(report)
        if report.skipped:
            _say(f"skipped  {_name(report)}: {report.longrepr[2]}")
        elif report.when == "call" and report.passed:
            _say(f"passed   {_name(report)}")


def _name(report: pytest.CollectReport | pytest.TestReport) -> str:
    return report.nodeid.split("::")[-1]


def _say(line: str) -> None:
    if dist.get_rank() == 0:
        print(line, flush=True)


def _say_if_failed(report: pytest.CollectReport | pytest.TestReport) -> None:
    if report.failed:
        end = "\n".join(report.longreprtext.splitlines()[-20:])
        print(f"failed   {_name(report)} on rank {dist.get_rank()}\n{end}", flush=True)


def main(checkout: Path) -> int:
    sys.path[:0] = [str(checkout), str(Path(__file__).parents[1])]
    dist.init_process_group("gloo")  # before theirs, which would take NCCL

    from fakes import megatron_on_cpu

    megatron_on_cpu.prepare()
    from megatron.core import pipeline_parallel
    from megatron.core.pipeline_parallel import schedules

    import megapipe

    for name in OURS:
        setattr(schedules, name, getattr(megapipe.schedules, name))
    pipeline_parallel.get_forward_backward_func = megapipe.get_forward_backward_func
    os.chdir(checkout)
    alone = ["--noconftest", "-c", os.devnull, "--rootdir", str(checkout), "-p", "no:cacheprovider"]
    failed = pytest.main([*alone, "-p", "no:terminal", "-x", FILE], plugins=[OnOurSchedules()])
    if failed:
        time.sleep(2)  # torchrun ends the other ranks, which may have something to say
    return failed


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve()))

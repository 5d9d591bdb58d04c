"""Copies of the last state in the memory of nodes: what is lost with a node is found on its neighbour."""

from __future__ import annotations

import errno
import os
import shutil
import warnings
from collections import OrderedDict
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from megapipe import parallel_state
from megapipe.checkpoint import Checkpointer, memory
from megapipe.checkpoint.files import checkpoints_in


class Run:
    """Two stages on two replicas; ranks 0 and 1 are one node, 2 and 3 another, or as `node` says."""

    def __init__(self, rank: int, folder: Path, node: int | None = None, shards: bool = False) -> None:
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(2)
        self.rank = rank
        self.node = folder / f"node {rank // 2 if node is None else node}"
        stage = parallel_state.get_pipeline_model_parallel_rank()
        torch.manual_seed(stage)
        self.chunk = nn.Sequential(OrderedDict({f"{stage}": nn.Linear(8, 8)}))
        if shards:
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
            fully_shard(self.chunk, mesh=mesh["dp"])
        self.optimizer = torch.optim.AdamW(self.chunk.parameters(), lr=0.1)
        self.checkpointer = Checkpointer(folder / "disk", self.chunk, self.optimizer, memory=self.node)

    def step(self) -> None:
        for parameter in self.chunk.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()
        torch.rand(self.rank)

    def state(self) -> list[torch.Tensor]:
        tensors = [*self.chunk.parameters(), *(self.optimizer.state[p]["exp_avg"] for p in self.chunk.parameters())]
        local = (t.to_local() if hasattr(t, "to_local") else t for t in tensors)
        return [*(tensor.detach().clone() for tensor in local), torch.get_rng_state()]

    def steps(self) -> list[int]:
        return [step for folder in self.node.glob("run_*") for step in checkpoints_in(folder)]


def assert_equal(got: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True))


def lose(rank: int, *paths: Path) -> None:
    dist.barrier()
    if rank == 0:
        for path in paths:
            shutil.rmtree(path)
    dist.barrier()


@on_ranks(4)
@pytest.mark.parametrize("shards", [False, True])
def test_a_lost_node_costs_the_steps_since_the_last_copy(rank: int, tmp_path: Path, shards: bool) -> None:
    """Weights, optimizer state and random states come from the neighbour's memory, bit for bit, whichever node is
    lost; from the disk where both are."""
    run = Run(rank, tmp_path, shards=shards)
    assert run.checkpointer.load(may_be_empty=True) is None
    run.step()
    run.checkpointer.save(1)
    on_disk = run.state()
    for step in (2, 3):
        run.step()
        run.checkpointer.save_in_memory(step, {"consumed": step})
    expected = run.state()
    run.step()  # it goes on while the copy is under way
    run.checkpointer.wait()
    assert run.steps() == [3], "the copy before was removed"
    for lost in (None, 0, 1):
        if lost is not None:
            lose(rank, tmp_path / f"node {lost}")
        run = Run(rank, tmp_path, shards=shards)
        assert run.checkpointer.load() == (3, {"consumed": 3})
        assert_equal(run.state(), expected)
        run.checkpointer.check_can_save(4)
        run.checkpointer.save_in_memory(3, {"consumed": 3})  # what the neighbour lacks is copied there again
        run.checkpointer.wait()
    lose(rank, tmp_path / "node 0", tmp_path / "node 1")
    run = Run(rank, tmp_path, shards=shards)
    assert run.checkpointer.load() == (1, None)
    assert_equal(run.state(), on_disk)


def saved_twice(rank: int, folder: Path) -> Run:
    """Step 1 on the disk, step 2 in memory."""
    run = Run(rank, folder)
    run.step()
    run.checkpointer.save(1)
    run.step()
    run.checkpointer.save_in_memory(2)
    run.checkpointer.wait()
    return run


@on_ranks(4)
def test_files_travel_in_parts_to_wherever_they_are_needed(rank: int, tmp_path: Path) -> None:
    """Ranks that find themselves on other nodes than before, or with another number of nodes, bring their files."""
    with mock.patch.object(memory, "LARGEST_MESSAGE", 1000):
        expected = saved_twice(rank, tmp_path).state()
        for lost, node in (([0], 1 - rank // 2), ([1], rank % 2), ([], 0), ([], rank)):
            lose(rank, *(tmp_path / f"node {one}" for one in lost))
            run = Run(rank, tmp_path, node)
            assert run.checkpointer.load() == (2, None)
            assert_equal(run.state(), expected)
            run.checkpointer.save_in_memory(2)
            run.checkpointer.wait()


@on_ranks(4)
def test_damaged_copies_are_passed_over(rank: int, tmp_path: Path) -> None:
    """A bit that flipped in memory is found; then the disk has what is left."""
    run = saved_twice(rank, tmp_path)
    dist.barrier()
    if rank == 3:
        (file,) = tmp_path.glob("node 1/*/step_00000002/__3_0.distcp")
        changed = bytearray(file.read_bytes())
        changed[len(changed) // 2] ^= 1
        file.write_bytes(changed)
        (tmp_path / file.parent / ".metadata").write_bytes(b"")  # this the other node has too
    dist.barrier()
    run = Run(rank, tmp_path)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert run.checkpointer.load() == (1, None)
    texts = [str(one.message) for one in said if "in its place" in str(one.message)]
    assert len(texts) == (rank == 0)
    assert all("__3_0.distcp: " in text and "step_00000001 is loaded in its place" in text for text in texts)
    run.checkpointer.check_can_save(2)
    assert run.steps() == []


@on_ranks(4)
def test_what_copies_in_memory_refuse(rank: int, tmp_path: Path) -> None:
    """A full memory, another run in the same folder, and copies of another run are told on every rank."""
    run = saved_twice(rank, tmp_path)

    def full(*arguments: int) -> None:
        if rank == 2:
            raise OSError(errno.ENOSPC, "No space left on device")

    with mock.patch.object(os, "posix_fallocate", full):
        run.checkpointer.save_in_memory(3)
        with pytest.raises(RuntimeError, match=r"copying to memory failed \(.*No space left.*\): it takes twice"):
            run.checkpointer.wait()
    assert run.steps() == [2], "what was there before is untouched"
    other = Run(rank, tmp_path)
    other.checkpointer = Checkpointer(tmp_path / "other", other.chunk, other.optimizer, memory=run.node)
    assert other.checkpointer.load(may_be_empty=True) is None, "those are copies of another run"
    (run.node / "else").mkdir(exist_ok=True)
    other.checkpointer.check_can_save(1)
    dist.barrier()
    assert run.steps() == [], "they make room for this run's"
    assert (run.node / "else").is_dir(), "what is no copy is left alone"
    refused = ValueError("another run saves to it")
    refusing = mock.patch.object(memory, "lock_folder", side_effect=refused if rank == 2 else None)
    with refusing, pytest.raises(ValueError, match="another run saves to it"):
        other.checkpointer.check_can_save(1)
    with pytest.raises(ValueError, match=r"needs a folder in memory: pass memory='/dev/shm"):
        Checkpointer(tmp_path / "none", run.chunk).save_in_memory(1)

"""What is read is what was written, of one checkpoint; and what cannot be loaded leaves everything as it is."""

from __future__ import annotations

import errno
import io
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tools.ranks import on_ranks
from tools.saving import error_of, filled
from torch import Tensor, nn

from megapipe import parallel_state
from megapipe.checkpoint import Checkpointer, reading, save_safetensors
from megapipe.checkpoint.files import checkpoints_in
from megapipe.checkpoint.reading import DamagedError

# Files of one checkpoint


def saved_twice(folder: Path) -> Checkpointer:
    """Steps 1 and 2 of a stage for each rank, filled with the number of the step."""
    parallel_state.initialize_model_parallel(2)
    layer = filled(1.0)
    checkpointer = Checkpointer(folder, nn.ModuleDict({str(dist.get_rank()): layer}))
    for step in (1, 2):
        nn.init.constant_(layer.weight, float(step))
        checkpointer.save(step)
    return checkpointer


@on_ranks(2)
def test_files_of_two_checkpoints_are_not_taken_for_one(rank: int, tmp_path: Path) -> None:
    """A data file of step 1 in the folder of step 2, as a copy that broke off leaves it, was loaded as part of step 2.
    Each file was whole, and nothing said to which checkpoint it belonged, nor of which rank it was."""
    checkpointer = saved_twice(tmp_path)
    first, second = checkpoints_in(tmp_path).values()
    names = [f"__{number}_0.distcp" for number in range(2)]
    if rank == 0:
        kept = [(second / name).read_bytes() for name in names]
    changes: list[tuple[Callable[[], Any], str]] = [
        (
            lambda: shutil.copy(first / names[1], second / names[1]),
            rf"__1_0.distcp.*{first.name}.* not with.*{second.name}",
        ),
        (
            lambda: shutil.copy(second / names[0], second / names[1]),
            r"__0_0.distcp' and not with 'megapipe .*__1_0.distcp",
        ),
        (lambda: shutil.copy(first / ".metadata", second / ".metadata"), rf"{second.name}.* not with.*{first.name}"),
    ]
    for change, message in changes:
        if rank == 0:
            change()
        with pytest.raises(DamagedError, match=message):
            checkpointer.load(second)
        if rank == 0:
            for name, data in zip(names, kept):
                (second / name).write_bytes(data)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert checkpointer.load() == (1, None)
    assert any("step_00000001 is loaded in its place" in str(one.message) for one in said) == (rank == 0)


@on_ranks(2)
def test_ranks_that_see_different_checkpoints(rank: int, tmp_path: Path) -> None:
    """Where a path leads each node to a disk of its own, ranks loaded parts of different checkpoints."""
    saved_twice(tmp_path)
    layer = nn.ModuleDict({str(rank): filled(0.0)})
    checkpointer = Checkpointer(tmp_path, layer)
    own = list(checkpoints_in(tmp_path).values())[rank]
    with pytest.raises(ValueError, match="on rank 1 is another checkpoint than on rank 0: give a folder that all"):
        checkpointer._load(own, [[0, 0], [1, 0]])
    assert not layer[str(rank)].weight.any()


# Damage


class Broken(io.FileIO):
    """A file on a disk that does not answer."""

    def read(self, size: int | None = -1) -> bytes:
        raise OSError(errno.EIO, "Input/output error")


def out_of_files(path: Path, mode: str) -> Any:
    raise OSError(errno.EMFILE, "Too many open files")


def out_of_memory(*arguments: Any, **keywords: Any) -> Any:
    raise RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory")


@pytest.mark.parametrize(
    ("replace", "message"),
    [
        (lambda patch: patch.setattr(reading, "open", out_of_files, raising=False), "Too many open files"),
        (lambda patch: patch.setattr(reading, "open", Broken, raising=False), "Input/output error"),
        (lambda patch: patch.setattr(torch, "load", out_of_memory), "can't allocate memory"),
    ],
)
def test_what_a_disk_or_the_memory_does_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replace: Callable[[pytest.MonkeyPatch], None], message: str
) -> None:
    """A process that had too many files open took the newest checkpoint for damaged. It went on from an older one, and
    the next save renamed the newest."""
    layer = filled(1.0)
    checkpointer = Checkpointer(tmp_path, layer)
    for step in (1, 2):
        checkpointer.save(step)
    loading = Checkpointer(tmp_path, layer)
    with monkeypatch.context() as patch:
        replace(patch)
        error = error_of(loading.load, OSError, RuntimeError)
    assert message in error
    assert not error.startswith("DamagedError")
    loading.save(3)
    assert list(checkpoints_in(tmp_path)) == [1, 2, 3]


def test_a_whole_list_of_contents_is_never_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that a newer torch has written, with a class that this megapipe does not know: it was passed over."""
    checkpointer = Checkpointer(tmp_path, filled(1.0))
    for step in (1, 2):
        checkpointer.save(step)
    key = next(key for key in reading._ALLOWED if key[1] == "TensorProperties")
    monkeypatch.delitem(reading._ALLOWED, key)
    with pytest.raises(ValueError, match=r"step_00000002 is not .*: it asks for .*TensorProperties") as caught:
        checkpointer.load()
    assert not isinstance(caught.value, DamagedError)


class Positions(nn.Module):
    """Numbers that an expanded buffer shows several times."""

    def __init__(self, positions: Tensor) -> None:
        super().__init__()
        self.register_buffer("positions", positions)


def test_expanded_buffers_are_loaded(tmp_path: Path) -> None:
    """torch writes to no tensor that shows a number several times: a checkpoint with one was called damaged."""
    numbers = torch.tensor([1.5, torch.nan, 3.0])
    Checkpointer(tmp_path, Positions(numbers.expand(2, 3))).save(1)
    loaded = Positions(torch.zeros(3).expand(2, 3))
    Checkpointer(tmp_path, loaded).load()
    torch.testing.assert_close(loaded.positions, numbers.expand(2, 3), equal_nan=True)
    Checkpointer(tmp_path, Positions(torch.arange(6.0).view(2, 3))).save(2)
    with pytest.raises(ValueError, match=r"model.positions is expanded here: .* has different ones"):
        Checkpointer(tmp_path, loaded).load()
    torch.testing.assert_close(loaded.positions, numbers.expand(2, 3), equal_nan=True)


# Everything is checked before anything is written


def state_of(*objects: Any) -> list[Any]:
    return [{key: torch.as_tensor(value).clone() for key, value in one.state_dict().items()} for one in objects]


def trained(value: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.ModuleDict({str(number): filled(value) for number in range(4)})
    optimizer = torch.optim.AdamW(model.parameters(), lr=value)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, value)
    optimizer.step()
    return model, optimizer


@on_ranks(2)
def test_a_refused_load_has_overwritten_nothing(rank: int, tmp_path: Path) -> None:
    """A load that was refused had written all tensors but the damaged one; ranks whose own were right had written
    theirs where another rank's were missing. Who caught the error trained on with a mixture."""
    parallel_state.initialize_model_parallel(1)
    model, optimizer = trained(1.0)
    Checkpointer(tmp_path, model, optimizer).save(1)
    saved = optimizer.state_dict()
    (path,) = checkpoints_in(tmp_path).values()
    model, optimizer = trained(2.0)
    before, packed = state_of(model), optimizer.state_dict()
    expected = {key: [value.clone() for value in state.values()] for key, state in packed["state"].items()}

    def refused(load: Callable[[], Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            load()
        assert all(torch.equal(value, before[0][key]) for key, value in model.state_dict().items())
        assert optimizer.param_groups[0]["lr"] == 2.0
        for key, state in optimizer.state_dict()["state"].items():
            assert all(torch.equal(one, other) for one, other in zip(state.values(), expected[key]))

    strange: Any = model if rank == 0 else nn.ModuleDict({**model, "4": filled(2.0)})
    refused(lambda: Checkpointer(tmp_path, strange).load(), "has no model.4")
    wider: Any = model if rank == 0 else nn.ModuleDict({**model, "3": nn.Linear(3, 3)})
    refused(lambda: Checkpointer(tmp_path, wider).load(), r"model.3.weight has shape \[4, 4\]")
    refused(lambda: Checkpointer(tmp_path, nn.ModuleDict(list(model.items())[:3])).load(), "has 2 entries that no rank")
    moments = next(iter(saved["state"].values()))["exp_avg"]  # alike of all four weights
    files = {file: file.read_bytes() for file in path.glob("*.distcp")}
    file = next(file for file, data in files.items() if moments.numpy().tobytes() in data)
    at = files[file].rindex(moments.numpy().tobytes())
    dist.barrier()
    if rank == 0:
        file.write_bytes(files[file][:at] + b"?" + files[file][at + 1 :])
    dist.barrier()
    refused(lambda: Checkpointer(tmp_path, model, optimizer).load(), "cannot be read")


def test_numbers_of_another_kind_are_refused(tmp_path: Path) -> None:
    """Weights in 8 bits were loaded as floats of their size, without their scale."""
    quantised = filled(1.0)
    quantised.weight = nn.Parameter(torch.ones(4, 4, dtype=torch.int8), requires_grad=False)
    Checkpointer(tmp_path, quantised).save(1)
    layer = filled(2.0)
    with pytest.raises(ValueError, match=r"model.weight is of torch.int8 in .* and of torch.float32 here"):
        Checkpointer(tmp_path, layer).load()
    assert (layer.weight == 2).all()
    Checkpointer(tmp_path, layer).save(2)
    Checkpointer(tmp_path, filled(0.0).bfloat16()).load()
    save_safetensors(tmp_path / "step_00000001", tmp_path / "exported")

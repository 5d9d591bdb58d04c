"""A run's folder: one run at a time, checkpoints whole or not there, read without executing anything."""

from __future__ import annotations

import errno
import gc
import io
import os
import pickle
import re
import shutil
import signal
import socket
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint
from tools.ranks import on_ranks
from tools.saving import error_of, filled
from torch import nn
from torch.distributed.checkpoint import metadata as contents
from torch.distributed.checkpoint.filesystem import FileSystem, _StorageInfo

from megapipe import parallel_state
from megapipe.checkpoint import Checkpointer, read_position, save_safetensors
from megapipe.checkpoint.files import INCOMPLETE, checkpoints_in, mark_of


def saving_process(folder: Path, step: int) -> tuple[int, int]:
    """Another run that has saved and goes on, until what is returned second is closed: its process id first."""
    if torch.cuda.is_initialized():
        pytest.skip("CUDA does not outlive a fork")
    told, tell = os.pipe()
    stay, let_go = os.pipe()
    process = os.fork()
    if process == 0:
        try:
            os.close(let_go)
            Checkpointer(folder, filled(1.0)).save(step)
            helper = os.fork()  # such as a loader's worker, which may outlive it
            if helper != 0:
                os.write(tell, b"saved")
            os.read(stay, 1)
        finally:
            os._exit(0)
    os.close(tell)
    os.close(stay)
    assert os.read(told, 5) == b"saved"
    os.close(told)
    return process, let_go


def test_two_runs_do_not_save_into_one_folder(tmp_path: Path) -> None:
    """Two runs that saved into one folder left checkpoints with weights of both, all reported as saved. The second is
    told, and once the first was killed, nothing that it left holds up a restart."""
    process, let_go = saving_process(tmp_path, 1)
    try:
        second = Checkpointer(tmp_path, filled(2.0))
        message = rf"another run saves to {tmp_path} \(process {process} on .*\): end that one, or save to"
        with pytest.raises(ValueError, match=message):
            second.save(2)
        with pytest.raises(ValueError, match=message):
            second.check_can_save(2)
        assert second.load() == (1, None)  # reading is for all
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        with pytest.warns(UserWarning, match=f"was locked by process {process} on .*, which is gone: this run goes on"):
            second.check_can_save(2)
        # Another checkpointer of this run, and what was left of the failed ones, do not end this one's lock.
        Checkpointer(tmp_path, filled(2.0)).save(2)
        gc.collect()
        third = os.fork()
        if third == 0:
            os._exit(int(error_of(lambda: Checkpointer(tmp_path, filled(3.0)).save(3)) == "no error"))
        assert os.waitstatus_to_exitcode(os.waitpid(third, 0)[1]) == 0
        second.save(3)
    finally:
        os.close(let_go)
    assert names_in(tmp_path) == ["step_00000001", "step_00000002", "step_00000003"]


def test_locks_that_were_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody can ask another host for a process: there an earlier start of the same torchrun is known by its id, and
    for others the remedy is said. A process that was killed before its lock had its name holds nobody up."""
    monkeypatch.setattr(socket, "gethostname", lambda: "far/away")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "mine")
    process, let_go = saving_process(tmp_path, 1)
    os.close(let_go)
    os.waitpid(process, 0)
    monkeypatch.undo()
    remedy = rf"process {process} on far/away.* If it has ended, remove {tmp_path}/\.locked,"
    for job in ("none", "another"):
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", job)
        with pytest.raises(ValueError, match=remedy):
            Checkpointer(tmp_path, filled(2.0)).save(2)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "mine")
    checkpointer = Checkpointer(tmp_path, filled(2.0))
    with pytest.warns(UserWarning, match=f"by process {process} on far/away, which is gone"):
        checkpointer.save(2)
    checkpointer.save(3)
    (owner,) = tmp_path.glob(".locked,*")
    (tmp_path / ".locked,another").mkdir()
    with pytest.raises(ValueError, match=r"another run has locked .* too"):
        checkpointer.save(4)
    (tmp_path / ".locked,another").rmdir()
    checkpointer.save(4)
    code = "import sys, pathlib, megapipe.checkpoint.folder_lock as f; f.lock_folder(pathlib.Path(sys.argv[1]))"
    owner.rmdir()  # as where a process was killed between two calls
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
    assert not [*tmp_path.glob(".locked,*")], "a process that ends removes its lock"


def test_what_is_not_a_checkpoint_is_left_alone(tmp_path: Path) -> None:
    """Everything that was called *.incomplete was removed, the user's too, and a file of such a name or a link to an
    old checkpoint made every later save fail."""
    (tmp_path / "download.incomplete").mkdir()
    (tmp_path / "video.incomplete").touch()
    (tmp_path / f"step_00000002{INCOMPLETE}").touch()
    (tmp_path / "step_99999999").touch()
    (tmp_path / f"step_00000001.0123abcd{INCOMPLETE}").mkdir()  # a save that was interrupted
    elsewhere = tmp_path / "another disk"
    Checkpointer(elsewhere, filled(1.0)).save(1)
    (tmp_path / "step_00000001").symlink_to(elsewhere / "step_00000001")
    checkpointer = Checkpointer(tmp_path, filled(2.0), keep_last=1)
    assert checkpointer.load() == (1, None)
    for step in (2, 3):
        checkpointer.save(step)
    left = ["another disk", "download.incomplete", f"step_00000002{INCOMPLETE}", "step_00000003", "step_99999999"]
    assert names_in(tmp_path) == [*left, "video.incomplete"]
    assert names_in(elsewhere) == ["step_00000001"]


def test_what_cannot_be_removed_holds_nothing_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stuck(path: Path) -> None:
        raise OSError(errno.EBUSY, "Device or resource busy")

    monkeypatch.setattr(shutil, "rmtree", stuck)
    checkpointer = Checkpointer(tmp_path, filled(2.0), keep_last=1)
    checkpointer.save(1)
    with pytest.warns(UserWarning, match=r"step_00000001\..* is no longer needed, but cannot be removed \(.*busy"):
        checkpointer.save(2)
    assert list(checkpoints_in(tmp_path)) == [2]


def exit_at(number: int) -> Callable[[str, tuple[Any, ...]], None]:
    """An audit hook: the process is gone at its n-th change of the file system."""
    counted = [0]

    def count(event: str, arguments: tuple[Any, ...]) -> None:
        changes = ("os.mkdir", "os.rename", "os.remove", "os.rmdir")
        if event in changes or (event == "open" and "w" in str(arguments[1])):
            counted[0] += 1
            if counted[0] == number:
                os._exit(9)

    return count


def names_in(folder: Path) -> list[str]:
    """But for the lock."""
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith(".locked"))


def test_a_crash_at_any_moment_of_saving(tmp_path: Path) -> None:
    """There is always a whole checkpoint: the last one or the new one. With the removal of old ones, too."""
    process, let_go = saving_process(tmp_path, 1)
    os.close(let_go)
    os.waitpid(process, 0)
    steps = [1]
    for number in range(1, 100):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                sys.addaudithook(exit_at(number))
                Checkpointer(tmp_path, filled(number + 1.0), keep_last=1).save(number + 1)
                code = 0
            finally:
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code in (0, 9)
        loaded = filled(0.0)
        position = Checkpointer(tmp_path, loaded).load()
        assert position is not None
        assert position.step in (steps[-1], number + 1)
        assert torch.equal(loaded.weight, torch.full((4, 4), float(position.step)))
        steps.append(position.step)
        if code == 0:
            break
    assert code == 0
    assert steps[-1] == number + 1
    assert number >= 8, "changes of the file system were counted"
    assert 2 <= len(set(steps)) < len(steps), "some crashes came before and some after the new one was there"
    assert names_in(tmp_path) == [f"step_{number + 1:08d}"], "nothing is left lying about"


def test_keeps_the_last(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path, filled(0.0), keep_last=2)
    (tmp_path / f"step_00000001{INCOMPLETE}").mkdir()
    for step in (1, 5, 100_000_000):
        checkpointer.save(step)
    assert names_in(tmp_path) == ["step_00000005", "step_100000000"]
    assert read_position(tmp_path) == (100_000_000, None)
    # Given a checkpoint and not its run's folder, it looked for others in that one, and the run began anew, silently.
    assert Checkpointer(tmp_path, filled(0.0)).load(tmp_path / "step_00000005", may_be_empty=True) == (5, None)
    with pytest.raises(ValueError, match="keep_last=0 would leave no checkpoint"):
        Checkpointer(tmp_path, filled(0.0), keep_last=0)


class FullDisk(io.FileIO):
    def write(self, data: Any) -> int:
        if self.tell() > 10_000:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(data) or 0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_full_disk_is_called_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch said "unexpected pos 704 vs 598" where the disk was full."""
    monkeypatch.setattr(FileSystem, "create_stream", lambda self, path, mode: FullDisk(path, mode))
    with pytest.raises(RuntimeError, match=r"failed on rank 0 \(.*No space left on device\).*full: make room, or keep"):
        Checkpointer(tmp_path, nn.Linear(200, 200)).save(1)
    gc.collect()  # torch's writer flushes its closed file when it goes, of which Python 3.13 tells


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.path),))


def test_loading_executes_nothing(tmp_path: Path) -> None:
    evil = Evil(tmp_path / "executed")
    good = tmp_path / "run" / "step_00000001"
    Checkpointer(tmp_path / "run", filled(1.0)).save(1)
    whole = pickle.loads((good / ".metadata").read_bytes())

    def refused(pattern: str) -> None:
        for call in (lambda: Checkpointer(good, filled(0.0)).load(), lambda: read_position(good)):
            with pytest.raises((ValueError, pickle.UnpicklingError), match=pattern):
                call()
        assert not evil.path.exists()

    def write(**changed: Any) -> None:
        (good / ".metadata").write_bytes(pickle.dumps(contents.Metadata(**{**vars(whole), **changed})))

    def serialised(value: Any) -> bytes:
        stream = io.BytesIO()
        torch.save(value, stream)
        return stream.getvalue()

    # In the list of contents
    (good / ".metadata").write_bytes(pickle.dumps(evil))
    refused("it asks for posix.mkdir, which no checkpoint needs")
    write(planner_data=evil)
    refused("it asks for posix.mkdir")
    (good / ".metadata").write_bytes(b"cbuiltins\neval\n(S'1'\ntR.")
    refused("it asks for builtins.eval")
    (good / ".metadata").write_bytes(b"not a pickle")
    refused("is not a checkpoint that megapipe wrote, or it is damaged")
    # As an entry that is no tensor, which torch would unpickle
    write(state_dict_metadata={**whole.state_dict_metadata, "run": contents.BytesStorageMetadata()})
    refused("run is no tensor")
    # In place of a tensor's data, and within a tensor that holds what is no tensor
    for data in (serialised(evil), serialised(torch.frombuffer(bytearray(serialised(evil)), dtype=torch.uint8))):
        mark = mark_of(whole.storage_meta.save_id, "evil.distcp")
        (good / "evil.distcp").write_bytes(mark + data)
        stored = {
            index: _StorageInfo("evil.distcp", len(mark), len(data)) if index.fqn == "run" else info
            for index, info in whole.storage_data.items()
        }
        size = torch.Size([len(serialised(evil))])
        run = contents.TensorStorageMetadata(
            whole.state_dict_metadata["run"].properties, size, [contents.ChunkStorageMetadata(torch.Size([0]), size)]
        )
        write(storage_data=stored, state_dict_metadata={**whole.state_dict_metadata, "run": run})
        refused("Weights only load failed")
    # In another folder
    write(storage_data={index: _StorageInfo("../evil.distcp", 0, 9) for index in whole.storage_data})
    refused("it points to ../evil.distcp, outside of the folder")
    write()
    assert read_position(good) == (1, None)


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    """A bit that had flipped on the disk was loaded as a weight. With any bit of any file flipped, a checkpoint is
    refused, or the bit meant nothing. Of a broken archive, whose directory has no checksum, Python and torch say many
    things."""
    layer = filled(1.0)
    optimizer = torch.optim.AdamW(layer.parameters())
    Checkpointer(tmp_path, layer, optimizer).save(1)
    (path,) = checkpoints_in(tmp_path).values()
    num_refused = {}
    for file in path.iterdir():
        whole = file.read_bytes()
        directory = range(whole.find(b"PK\x01\x02"), whole.find(b"PK\x05\x06"), 13) if b"PK" in whole else ()
        for position in (*range(0, len(whole), len(whole) // 50), *directory):
            changed = bytearray(whole)
            changed[position] ^= 1 << position % 8
            file.write_bytes(changed)
            loaded = filled(0.0)
            try:
                Checkpointer(tmp_path, loaded, torch.optim.AdamW(loaded.parameters())).load()
            except (ValueError, pickle.UnpicklingError):
                num_refused[file.name] = num_refused.get(file.name, 0) + 1
            else:
                assert torch.equal(loaded.weight, layer.weight)
                assert torch.equal(loaded.bias, layer.bias)
        file.write_bytes(whole)
    assert num_refused[".metadata"] >= 50, "every bit of it counts"
    with open(path / "__0_0.distcp", "r+b") as stored:
        at = stored.read().index(torch.ones(4).numpy().tobytes())
        stored.seek(at + 3)
        stored.write(b"\xbf")
    where = r"cannot be read \(__0_0.distcp: checksum .* where it was .*\): its files are damaged"
    with pytest.raises(ValueError, match=where):
        Checkpointer(tmp_path, layer).load()


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="counts the bytes that the process has read")
def test_each_tensor_is_read_once(tmp_path: Path) -> None:
    """Once for its checksum, and once more by torch's reader."""

    def num_read() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    layer = nn.Linear(1024, 1024)
    Checkpointer(tmp_path, layer).save(1)
    before = num_read()
    Checkpointer(tmp_path, layer).load()
    assert 1 <= (num_read() - before) / layer.weight.nbytes < 1.5


def test_damaged_and_foreign_checkpoints(tmp_path: Path) -> None:
    """Damaged files raised an EOFError without a word, or torch's advice to let them execute code; a checkpoint of
    somebody else's raised a KeyError. What was exported of one without a model was an empty file."""
    layer = nn.Linear(2, 2)
    Checkpointer(tmp_path, layer).save(1)
    (data,) = (tmp_path / "step_00000001").glob("*.distcp")
    whole = data.read_bytes()
    for content in (whole[:100], b"x" * len(whole), None):
        data.unlink() if content is None else data.write_bytes(content)
        with pytest.raises(ValueError, match=r"step_00000001 cannot be read \(\w+.*\): its files are damaged"):
            Checkpointer(tmp_path, layer).load()
    foreign = tmp_path / "foreign"
    torch.distributed.checkpoint.save({"weight": torch.ones(2)}, checkpoint_id=str(foreign))
    for call in (lambda: Checkpointer(tmp_path, layer).load(foreign), lambda: read_position(foreign)):
        with pytest.raises(ValueError, match=r"foreign has no run: .*Checkpointer"):
            call()
    with pytest.raises(ValueError, match=r"foreign holds no model"):
        save_safetensors(foreign, tmp_path / "exported")


@on_ranks(2)
def test_the_newest_whole_checkpoint_is_found(rank: int, tmp_path: Path) -> None:
    """Where the latest checkpoint was damaged, a run stood still until somebody pointed it to the one before."""
    parallel_state.initialize_model_parallel(1)
    layer = filled(0.0)
    checkpointer = Checkpointer(tmp_path, layer)
    for step in (1, 2, 3):
        nn.init.constant_(layer.weight, float(step))
        checkpointer.save(step)
    if rank == 0:
        (tmp_path / "step_00000002" / ".metadata").write_bytes(b"")
        max((tmp_path / "step_00000003").glob("*.distcp"), key=lambda file: file.stat().st_size).unlink()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert Checkpointer(tmp_path, layer).load() == checkpointer.load() == (1, None)
    assert torch.equal(layer.weight, torch.ones(4, 4))
    texts = [str(one.message) for one in said if one.category is UserWarning and "in its place" in str(one.message)]
    patterns = [
        r"step_00000003 cannot be read \(__\d_0.distcp: .*No such file.*\).* step_00000002 is loaded in its place",
        r"step_00000002 is not .*, or it is damaged \(.metadata: .*\). .* step_00000001 is loaded in its place",
    ]
    assert len(texts) == (4 if rank == 0 else 0)
    for text, pattern in zip(texts, patterns):
        assert re.search(pattern, text)
    with pytest.raises(ValueError, match="step_00000003 cannot be read"):  # asked for by name
        checkpointer.load(tmp_path / "step_00000003")
    checkpointer.save(2)  # a step that is there, damaged
    assert list(checkpoints_in(tmp_path)) == [1, 2]
    assert len(list(tmp_path.glob("step_0000000[23].*.damaged"))) == 2
    if rank == 0:
        for path in checkpoints_in(tmp_path).values():
            (path / ".metadata").unlink()
    with pytest.raises(ValueError, match="step_00000001 is not a checkpoint that megapipe wrote"):
        checkpointer.load()

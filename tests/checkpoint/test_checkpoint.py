"""Saved under one arrangement of stages and replicas, gone on with under another, as if nothing had happened."""

from __future__ import annotations

import errno
import gc
import io
import json
import os
import pickle
import random
import re
import shutil
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from models import HIDDEN, Stage, build, run
from ranks import RankPool
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint import metadata as contents
from torch.distributed.checkpoint.filesystem import FileSystem, _StorageInfo
from torch.optim.swa_utils import AveragedModel

from megapipe import StageInfo, parallel_state
from megapipe.checkpoint import Checkpointer, folder_lock, read_position, save_safetensors
from megapipe.checkpoint.files import INCOMPLETE, Reader, Writer, checkpoints_in
from megapipe.checkpoint.fingerprints import fingerprint
from megapipe.training import PipelinedOptimizer

NUM_LAYERS, NUM_MICROBATCHES = 8, 4


class Run:
    """A model under a schedule, its optimizer and LR scheduler, and a checkpointer for them."""

    def __init__(
        self,
        schedule: str,
        pp_size: int,
        folder: Path,
        make: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
        num_chunks: int | None = None,
        **options: Any,
    ) -> None:
        parallel_state.destroy_model_parallel()
        self.schedule = schedule
        self.chunks = build(schedule, pp_size, NUM_LAYERS, num_chunks, finalize_model_grads_func=average, deferred=True)
        matrices = [p for chunk in self.chunks for p in chunk.parameters() if p.dim() > 1]
        vectors = [p for chunk in self.chunks for p in chunk.parameters() if p.dim() == 1]
        self.optimizer = make([{"params": matrices, "weight_decay": 0.1}, {"params": vectors}], lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=20)
        others = {"lr_scheduler": self.scheduler}
        self.checkpointer = Checkpointer(folder, self.chunks, self.optimizer, others=others, **options)

    def train(self, first: int, last: int) -> list[float]:
        losses = []
        for step in range(first, last):
            self.optimizer.zero_grad()
            reports = run(self.schedule, self.chunks, NUM_MICROBATCHES, seed=step)
            self.optimizer.step()
            self.scheduler.step()
            losses.append(total([report["loss"] for report in reports]))
        return losses


def average(models: list[nn.Module], num_tokens: Tensor | None) -> None:
    """Replicas see the same data here, so that any arrangement does the same arithmetic to the bit."""
    for model in models:
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=parallel_state.get_data_parallel_group())
            parameter.grad /= parallel_state.get_data_parallel_world_size()


def total(losses: list[Tensor]) -> float:
    sum_of_replicas = torch.stack([*losses, torch.zeros(())]).double().sum()
    dist.all_reduce(sum_of_replicas)
    return sum_of_replicas.item() / parallel_state.get_data_parallel_world_size()


# Any arrangement


ARRANGEMENTS = [
    ("1f1b", 4, None),
    ("zbv", 2, None),
    ("1f1b", 4, None),
    ("interleaved_1f1b", 2, 2),
    ("no_pipelining", 1, 3),
]


def go_on_elsewhere(rank: int, folder: Path, make: Callable[..., torch.optim.Optimizer], asynchronous: bool) -> Any:
    """Two steps under each arrangement, the rest of the ranks being replicas."""
    losses: list[float] = []
    for schedule, pp_size, num_chunks in ARRANGEMENTS:
        this = Run(schedule, pp_size, folder, make, num_chunks, asynchronous=asynchronous)
        loaded = this.checkpointer.load(may_be_empty=not losses)
        assert (loaded is None) == (not losses)
        if loaded is not None:
            assert loaded == (len(losses), {"consumed": 100 * len(losses)})
        losses += this.train(len(losses), len(losses) + 2)
        this.checkpointer.save(len(losses), {"consumed": 100 * len(losses)})
        this.checkpointer.wait()
    return losses


def uninterrupted(rank: int, folder: Path, make: Callable[..., torch.optim.Optimizer]) -> Any:
    """On one rank; with its weights and optimizer state by name, read from a checkpoint."""
    this = Run("no_pipelining", 1, folder, make)
    losses = this.train(0, 2 * len(ARRANGEMENTS))
    this.checkpointer.save(len(losses))
    return losses


def everything_in(folder: Path) -> dict[str, Tensor]:
    (path,) = list(checkpoints_in(folder).values())[-1:]
    reader = Reader(path)
    keys = [key for key in reader.contents if key.startswith(("model.", "optimizer."))]
    targets = {k: torch.empty(reader.contents[k].size, dtype=reader.contents[k].properties.dtype) for k in keys}
    reader.read(targets)
    return targets


def sgd(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9)


@pytest.mark.parametrize(("make", "asynchronous"), [(torch.optim.AdamW, False), (sgd, True)])
def test_goes_on_under_any_arrangement(
    ranks: RankPool, tmp_path: Path, make: Callable[..., torch.optim.Optimizer], asynchronous: bool
) -> None:
    """1f1b on 4 stages, zbv on 2 stages x 2 replicas, and back, and more: losses, weights and optimizer state are those
    of the uninterrupted run, bit for bit."""
    (expected,) = ranks.run(1, uninterrupted, tmp_path / "one", make)
    for losses in ranks.run(4, go_on_elsewhere, tmp_path / "many", make, asynchronous):
        assert losses == expected
    want, got = everything_in(tmp_path / "one"), everything_in(tmp_path / "many")
    assert want.keys() == got.keys()
    assert sum(key.startswith("optimizer.") for key in want) >= sum(key.startswith("model.") for key in want)
    for key, tensor in want.items():
        assert torch.equal(got[key], tensor), key


# Names


class Tied(Stage):
    """The head's weight is the embedding's, on whichever ranks the two are."""

    def __init__(self, info: StageInfo) -> None:
        super().__init__(info, NUM_LAYERS)
        if self.head is not None:
            torch.manual_seed(99)
            tied = nn.Embedding(11, HIDDEN) if self.embedding is None else self.embedding
            self.head.weight = tied.weight


def as_embedding(chunk: nn.Module, name: str) -> str:
    return "embedding.weight" if name == "head.weight" else name


def tied(rank: int, folder: Path) -> None:
    """Saved by one process, where it is one tensor, or by two ranks, where it is two, under one name or two."""
    for number, (global_name, pp_sizes) in enumerate(
        [(None, (1, 2)), (None, (2, 1)), (as_embedding, (1, 2)), (as_embedding, (2, 1))]
    ):
        for pp_size in pp_sizes:
            parallel_state.destroy_model_parallel()
            parallel_state.initialize_model_parallel(pp_size)
            pp_rank = parallel_state.get_pipeline_model_parallel_rank()
            chunk = Tied(StageInfo(pp_rank, pp_size))
            optimizer = torch.optim.AdamW(chunk.parameters())
            checkpointer = Checkpointer(folder / str(number), chunk, optimizer, global_name=global_name)
            ends = [layer.weight for layer in (chunk.embedding, chunk.head) if layer is not None]
            if pp_size == pp_sizes[0]:
                for weight in ends[:1]:
                    weight.data.fill_(1.5)
                    weight.grad = torch.ones_like(weight)
                optimizer.step()
                checkpointer.save(1)
                saved = ends[0].detach().clone()
                keys = Reader(next(iter(checkpoints_in(folder / str(number)).values()))).contents
                names = [key for key in keys if key in ("model.embedding.weight", "model.head.weight")]
                assert len(names) == (2 if global_name is None and pp_size == 2 else 1)
            else:
                assert checkpointer.load() == (1, None)
                for weight in ends:
                    assert torch.equal(weight, saved)
                    assert optimizer.state[weight]["step"] == 1
                    assert torch.equal(optimizer.state[weight]["exp_avg"], torch.full_like(weight, 0.1))


def test_tied_parameters_are_saved_once(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, tied, tmp_path)


class Local(nn.Module):
    """Layers counted from 0 on every stage."""

    def __init__(self, first: int, num_layers: int, size: int = 3) -> None:
        super().__init__()
        self.first = first
        self.layers = nn.ModuleList(nn.Linear(size, size) for _ in range(num_layers))
        for number, layer in enumerate(self.layers):
            nn.init.constant_(layer.weight, first + number)


def renumber(chunk: nn.Module, name: str) -> str:
    return re.sub(r"\d+", lambda match: str(chunk.first + int(match[0])), name)


def local_numbers(rank: int, folder: Path) -> list[str]:
    parallel_state.initialize_model_parallel(2)
    Checkpointer(folder, [Local(2 * rank, 2)], global_name=renumber).save(3)
    whole = Local(0, 4)
    nn.init.zeros_(whole.layers[3].weight)
    Checkpointer(folder, [whole]).load()
    assert [layer.weight[0, 0] for layer in whole.layers] == [0, 1, 2, 3]

    def save(name: str, chunk: nn.Module) -> None:
        Checkpointer(folder / name, [chunk]).save(1)

    (empty := folder / "empty").mkdir(exist_ok=True)
    errors = [
        error_of(lambda: save("values", Local(2 * rank, 2))),
        error_of(lambda: save("shapes", Local(0, 2, size=3 + rank))),
        error_of(lambda: Checkpointer(folder, [Local(2 * rank, 2)]).load()),
        error_of(lambda: Checkpointer(folder, [Local(2 * rank, 4)], global_name=renumber).load()),
        error_of(lambda: Checkpointer(folder, [Local(2 * rank, 2, size=4)], global_name=renumber).load()),
        error_of(lambda: Checkpointer(folder, whole, torch.optim.SGD(whole.parameters(), lr=1.0)).load()),
        error_of(lambda: Checkpointer(folder, whole, torch.optim.SGD(nn.Linear(2, 2).parameters())).save(9)),
        error_of(lambda: Checkpointer(folder, whole, others={"scaler": torch.amp.GradScaler("cpu")}).load()),
        error_of(lambda: Checkpointer(folder, whole).save(2)),
        error_of(lambda: Checkpointer(folder, whole).save(4, data={"loader": object()})),
        error_of(lambda: Checkpointer(folder / "nowhere", whole).load()),
        error_of(lambda: Checkpointer(folder, whole).load(empty)),
    ]
    assert Checkpointer(folder / "nowhere", whole).load(may_be_empty=True) is None
    assert list(checkpoints_in(folder)) == [3]
    return errors


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except (ValueError, TypeError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_what_does_not_fit_is_told_alike_on_every_rank(ranks: RankPool, tmp_path: Path) -> None:
    first, second = ranks.run(2, local_numbers, tmp_path)
    assert first == second
    expected = [
        r"ValueError: layers.0.weight is the name of different parameters, of chunk 0 on pipeline rank 0 and of chunk "
        r"0 on pipeline rank 1: their values differ. Name parameters as in the whole model",
        r"ValueError: layers.0.weight is the name .*: their shapes differ",
        r"ValueError: the checkpoint .*step_00000003 has 4 entries that no rank's chunks have, such as "
        r"model.layers.2.bias: it is of another model, or the chunks count their layers from 0 and need global_name",
        r"ValueError: the checkpoint .*step_00000003 has no model.layers.4.weight",
        r"ValueError: model.layers.0.weight has shape \[3, 3\] in the checkpoint .* and \[4, 4\] here",
        r"ValueError: no optimizer trained layers.0.weight when the checkpoint was saved",
        r"ValueError: optimizer 0 has 2 parameters that none of the 1 chunks has, the first of shape \[2, 2\]",
        r"ValueError: the checkpoint .* has no state of \['scaler'\], only of \[\]",
        r"ValueError: .* holds a checkpoint of step 3, from which a restart would go on rather than from step 2",
        r"TypeError: what is passed to save, .* so that loading it executes no code: use numbers, .*, not .*object",
        r"ValueError: .*nowhere is no folder: give a folder that was saved to",
        r"ValueError: .*empty holds no complete checkpoint",
    ]
    assert len(first) == len(expected)
    for pattern, error in zip(expected, first):
        assert re.match(pattern, error), error


# What optimizers keep in their own way


class Slow(torch.optim.SGD):
    """A state key with a dot."""

    def step(self, closure: None = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter].setdefault("ema.%2E", torch.zeros_like(parameter)).add_(parameter.grad)


class Counting(torch.optim.SGD):
    """State of no parameter, as MADGRAD's."""

    def step(self, closure: None = None) -> None:
        super().step()
        self.state["k"] = self.state.get("k", torch.tensor(0)) + 1


class Adding(torch.optim.SGD):
    """More in its state_dict() than torch's has."""

    t = 0

    def step(self, closure: None = None) -> None:
        self.t += 1

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "t": self.t}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.t = state_dict.pop("t")
        super().load_state_dict(state_dict)


@pytest.mark.parametrize("make", [Slow, Counting, Adding])
def test_what_optimizers_keep_in_their_own_way(tmp_path: Path, make: type[torch.optim.Optimizer]) -> None:
    """Keys with a dot came back as another parameter's, state of no parameter and what an optimizer adds in its
    state_dict() not at all. torch's own state_dict() and load_state_dict() bring all three back."""
    layer = filled(1.0)
    optimizer = make(layer.parameters(), lr=0.1)
    for parameter in layer.parameters():
        parameter.grad = torch.ones_like(parameter)
    for _ in range(3):
        optimizer.step()
    Checkpointer(tmp_path, layer, PipelinedOptimizer(layer, lambda groups: optimizer)).save(3)
    loaded = make(layer.parameters(), lr=0.1)
    Checkpointer(tmp_path, layer, loaded).load()
    want, got = optimizer.state_dict(), loaded.state_dict()
    assert want.keys() == got.keys()
    assert fingerprint(want) == fingerprint(got)
    assert fingerprint(want) != fingerprint(make(layer.parameters(), lr=0.1).state_dict())


def test_what_an_optimizer_cannot_have_saved(tmp_path: Path) -> None:
    layer = filled(1.0)
    for key, message in (
        (nn.Parameter(torch.ones(3)), r"optimizer 0 has state of a tensor of shape \[3\], which is none of its"),
        (7, "optimizer 0 has state under 7, which cannot be saved: use a string"),
    ):
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        optimizer.state[key] = {"k": torch.tensor(0)}
        with pytest.raises(ValueError, match=message):
            Checkpointer(tmp_path, layer, optimizer).save(1)


# What must be the same on all ranks


def differing(rank: int, folder: Path) -> list[str]:
    """Each rank saves to folders and steps of its own, or has what only rank 0's is saved of."""
    parallel_state.initialize_model_parallel(2)
    chunk = nn.ModuleDict({str(rank): filled(float(rank))})
    average = AveragedModel(chunk)
    counting = Counting(chunk.parameters())
    counting.state["k"] = torch.tensor(rank)
    (folder / f"disk {rank}").mkdir()
    elsewhere = Checkpointer(folder / f"disk {rank}", chunk)
    errors = [
        error_of(lambda: elsewhere.save(1)),
        error_of(lambda: Checkpointer(folder, chunk).save(1 + rank)),
        error_of(lambda: Checkpointer(folder, chunk).check_can_save(1 + rank)),
        error_of(lambda: Checkpointer(folder, chunk, others={"average": average}).save(1)),
        error_of(lambda: Checkpointer(folder, chunk, others={"mine": average} if rank else {}).save(1)),
        error_of(lambda: Checkpointer(folder, chunk, counting).save(1)),
    ]
    assert not checkpoints_in(folder)
    # As the error says. And what schedulers say of each parameter group differs with the groups.
    Checkpointer(folder / "average", average).save(1)
    nn.init.zeros_(average.module[str(rank)].weight)
    Checkpointer(folder / "average", average).load()
    assert (average.module[str(rank)].weight == rank).all()
    groups = [{"params": [p], "lr": 0.1 + rank} for p in chunk.parameters()][: rank + 1]
    scheduler = torch.optim.lr_scheduler.LambdaLR(torch.optim.SGD(groups), lambda step: 0.5**step)
    Checkpointer(folder, chunk, scheduler.optimizer, others={"scheduler": scheduler}).save(1)
    return errors


def test_what_ranks_must_have_alike_is_compared(ranks: RankPool, tmp_path: Path) -> None:
    """Ranks that saved to disks or steps of their own were told that all was well, and nothing could be loaded. Of
    what each rank had for itself in others, rank 0's was loaded on every rank."""
    first, second = ranks.run(2, differing, tmp_path)
    assert first == second
    expected = [
        r"ValueError: .*disk 1 on .* is not the folder that rank 0 saves to, which is on another disk: give a folder "
        "that all ranks can reach",
        "ValueError: rank 0 saves step 1 and rank 1 step 2: save the same one on all",
        "ValueError: rank 0 saves step 1 and rank 1 step 2",
        r"ValueError: the state of others\['average'\] differs between rank 0 and rank 1, and rank 0's would be loaded",
        r"ValueError: the state of others\['mine'\] differs between rank 0 and rank 1",
        "ValueError: what optimizer 0 has besides the state of its parameters differs between rank 0 and rank 1",
    ]
    assert len(first) == len(expected)
    for pattern, error in zip(expected, first):
        assert re.match(pattern, error), error


def test_fingerprints() -> None:
    a, b = torch.arange(4.0), torch.arange(8.0)[::2] / 2
    assert fingerprint({"x": [a, None], "y": {"s"}}) == fingerprint({"y": {"s"}, "x": [b.clone(), None]})
    assert fingerprint([b]) == fingerprint([a.clone()])
    different = [{}, [], [[]], [{}], 0, 0.0, None, a, a.double(), a.view(2, 2), -a, {"x": a}, {"y": a}, "0", object]
    assert len({fingerprint(value) for value in different}) == len(different)
    assert fingerprint(object()) == fingerprint(object())


# One run at a time


def saving_process(folder: Path, step: int) -> tuple[int, int]:
    """Another run that has saved and goes on, until what is returned second is closed: its process id first."""
    told, tell = os.pipe()
    stay, let_go = os.pipe()
    process = os.fork()
    if process == 0:
        os.close(let_go)
        checkpointer = Checkpointer(folder, filled(1.0))
        checkpointer.save(step)
        helper = os.fork()  # such as a loader's worker, which may outlive it
        if helper == 0:
            os.read(stay, 1)
            os._exit(0)
        os.write(tell, b"saved")
        os.read(stay, 1)
        os._exit(0)
    os.close(tell)
    os.close(stay)
    assert os.read(told, 5) == b"saved"
    os.close(told)
    return process, let_go


def test_two_runs_do_not_save_into_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs that saved into one folder left checkpoints with weights of both, all reported as saved. The second is
    told, and once the first was killed, nothing that it left holds up a restart."""
    monkeypatch.setattr(folder_lock, "PATIENCE", 0.1)
    process, let_go = saving_process(tmp_path, 1)
    try:
        second = Checkpointer(tmp_path, filled(2.0))
        message = rf"another run saves to {tmp_path} \(process {process} on .*, since .*\): end that one, or save to"
        with pytest.raises(ValueError, match=message):
            second.save(2)
        with pytest.raises(ValueError, match=message):
            second.check_can_save(2)
        assert second.load() == (1, None)  # reading is for all
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
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


def test_where_nothing_can_be_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is said, once for each run, and what may be another run's is not removed."""

    def no_locks(*arguments: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(folder_lock.fcntl, "lockf", no_locks)
    (tmp_path / f"step_00000001.0123abcd{INCOMPLETE}").mkdir()
    checkpointer = Checkpointer(tmp_path, filled(0.0))
    with pytest.warns(UserWarning, match="cannot be locked .*No locks available"):
        checkpointer.save(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpointer.save(2)
    assert names_in(tmp_path) == ["step_00000001", f"step_00000001.0123abcd{INCOMPLETE}", "step_00000002"]


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


# A crash at any moment


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


def filled(value: float) -> nn.Linear:
    layer = nn.Linear(4, 4)
    for parameter in layer.parameters():
        nn.init.constant_(parameter, value)
    return layer


def names_in(folder: Path) -> list[str]:
    """But for the lock, which stays."""
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


def test_a_crash_at_any_moment_of_saving(tmp_path: Path) -> None:
    """There is always a whole checkpoint: the last one or the new one. With the removal of old ones, too."""
    Checkpointer(tmp_path, filled(1.0)).save(1)
    steps = [1]
    for number in range(1, 100):
        child = os.fork()
        if child == 0:
            sys.addaudithook(exit_at(number))
            Checkpointer(tmp_path, filled(number + 1.0), keep_last=1).save(number + 1)
            os._exit(0)
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
    assert Checkpointer(tmp_path, filled(0.0)).load(tmp_path / "step_00000005") == (5, None)
    with pytest.raises(ValueError, match="keep_last=0 would leave no checkpoint"):
        Checkpointer(tmp_path, filled(0.0), keep_last=0)


def failing_disk(rank: int, folder: Path) -> None:
    """What goes wrong while writing is told on every rank, at once or, in the background, at the next call."""
    parallel_state.initialize_model_parallel(1)
    layer = filled(1.0)
    Checkpointer(folder, layer).save(1)
    finish = Writer.finish

    def fail(*arguments: Any, **keywords: Any) -> None:
        raise OSError(28, "No space left on device")

    later = Checkpointer(folder, layer, asynchronous=True)
    expected = r"RuntimeError: saving to .* failed on rank 0 \(.*No space left on device\). What was saved before is"
    try:
        Writer.finish = fail  # type: ignore[method-assign]
        assert re.match(expected, (error := error_of(lambda: Checkpointer(folder, layer).save(2)))), error
        later.save(2)
        assert re.match(expected, error_of(later.wait))
        later.save(2)
        assert re.match(expected, error_of(lambda: later.save(3)))
    finally:
        Writer.finish = finish  # type: ignore[method-assign]
    assert list(checkpoints_in(folder)) == [1]
    later.save(2)
    nn.init.constant_(layer.weight, 7.0)  # while it is being written
    later.save(3)
    later.wait()
    for step, value in ((2, 1.0), (3, 7.0)):
        Checkpointer(folder, layer).load(checkpoints_in(folder)[step])
        assert torch.equal(layer.weight, torch.full((4, 4), value))


class FullDisk(io.FileIO):
    def write(self, data: Any) -> int:
        if self.tell() > 10_000:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(data) or 0


def test_a_full_disk_is_called_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch said "unexpected pos 704 vs 598" where the disk was full."""
    monkeypatch.setattr(FileSystem, "create_stream", lambda self, path, mode: FullDisk(path, mode))
    with pytest.raises(RuntimeError, match=r"failed on rank 0 \(.*No space left on device\).*full: make room, or keep"):
        Checkpointer(tmp_path, nn.Linear(200, 200)).save(1)


def in_the_background(rank: int, folder: Path) -> None:
    parallel_state.initialize_model_parallel(2)
    chunk = nn.ModuleDict({str(rank): filled(1.0)})
    checkpointer = Checkpointer(folder, chunk, asynchronous=True)
    for step in range(1, 6):
        checkpointer.save(step)
        checkpointer.check_can_save(step + 1)
    if rank:
        chunk.register_buffer("nowhere", torch.empty(3, device="meta"))
    error = error_of(lambda: checkpointer.save(6))
    assert error.startswith("NotImplementedError: Cannot copy out of meta tensor"), error
    assert list(checkpoints_in(folder)) == [1, 2, 3, 4, 5]


def test_a_save_in_the_background_disturbs_nothing(ranks: RankPool, tmp_path: Path) -> None:
    """check_can_save spoke over the group that a save in the background was using, and a copy to the host that failed
    on one rank left the others waiting for it: both hung."""
    ranks.run(2, in_the_background, tmp_path)


def test_errors_of_writing(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, failing_disk, tmp_path)


# Nothing is executed


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
        (good / "evil.distcp").write_bytes(data)
        stored = {
            index: _StorageInfo("evil.distcp", 0, len(data)) if index.fqn == "run" else info
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
    refused, or the bit meant nothing."""
    layer = filled(1.0)
    optimizer = torch.optim.AdamW(layer.parameters())
    Checkpointer(tmp_path, layer, optimizer).save(1)
    (path,) = checkpoints_in(tmp_path).values()
    num_refused = {}
    for file in path.iterdir():
        whole = file.read_bytes()
        positions = range(0, len(whole), len(whole) // 50)
        for position in positions:
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
    with pytest.raises(
        ValueError, match=r"cannot be read \(BadZipFile: checksum .* where it was .*\): its files are damaged"
    ):
        Checkpointer(tmp_path, layer).load()


# Random states


def draw() -> list[float]:
    return [torch.rand(()).item(), random.random(), np.random.rand()]


def random_states(rank: int, folder: Path, expected: list[list[float]] | None) -> list[float]:
    parallel_state.initialize_model_parallel(1)
    torch.manual_seed(7 + rank)
    random.seed(rank)
    np.random.seed(rank)
    layer = filled(0.0)
    checkpointer = Checkpointer(folder, layer, torch.optim.SGD(layer.parameters()))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if expected is None:
            checkpointer.save(3)
            return draw()
        checkpointer.load()
    drawn = draw()
    if len(expected) == dist.get_world_size():
        assert drawn == expected[rank]
        assert not caught
    else:
        assert drawn not in expected
        said = [str(warning.message) for warning in caught]
        assert len(said) == (rank == 0)
        assert all(
            "was saved by 2 ranks and is loaded by 3" in text and "from the seed 7, step 3" in text for text in said
        )
    return drawn


def test_random_states(ranks: RankPool, tmp_path: Path) -> None:
    expected = ranks.run(2, random_states, tmp_path, None)
    ranks.run(2, random_states, tmp_path, expected)
    drawn = ranks.run(3, random_states, tmp_path, expected)
    assert drawn == ranks.run(3, random_states, tmp_path, expected)
    assert len({tuple(one) for one in drawn}) == 3


# Shards


def shards(rank: int, folder: Path) -> None:
    """2 stages x 2 shards to 4 replicas of the whole model and back: every rank reads its shards only."""
    from torch.distributed.fsdp import fully_shard

    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))

    def make(pp_size: int, sharded: bool, value: float) -> tuple[Stage, torch.optim.Optimizer]:
        parallel_state.destroy_model_parallel()
        (chunk,) = build("1f1b" if pp_size > 1 else "no_pipelining", pp_size, NUM_LAYERS)
        if sharded:
            fully_shard(chunk, mesh=mesh["dp"])
        optimizer = torch.optim.AdamW(chunk.parameters(), lr=value)
        for parameter in chunk.parameters():
            parameter.grad = torch.full_like(parameter, value)
        optimizer.step()
        return chunk, optimizer

    chunk, optimizer = make(2, True, 0.5)
    Checkpointer(folder, chunk, optimizer).save(1)
    expected, expected_optimizer = make(1, False, 0.5)
    whole, whole_optimizer = make(1, False, 0.25)
    checkpointer = Checkpointer(folder, whole, whole_optimizer)
    checkpointer.load()
    for parameter, wanted in zip(whole.parameters(), expected.parameters(), strict=True):
        assert torch.equal(parameter, wanted)
        for key, value in expected_optimizer.state[wanted].items():
            assert torch.equal(whole_optimizer.state[parameter][key], value)
    assert whole_optimizer.param_groups[0]["lr"] == 0.5
    checkpointer.save(2)
    again, again_optimizer = make(2, True, 0.25)
    Checkpointer(folder, again, again_optimizer).load()
    for parameter, wanted in zip(again.parameters(), chunk.parameters(), strict=True):
        assert torch.equal(parameter.to_local(), wanted.to_local())
        for key, value in optimizer.state[wanted].items():
            found = again_optimizer.state[parameter][key]
            assert type(found) is type(value)
            assert torch.equal(*(t.to_local() if key != "step" else t for t in (found, value)))


def test_fsdp_shards(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(4, shards, tmp_path)


# For others


def test_safetensors(ranks: RankPool, tmp_path: Path) -> None:
    """The whole model of a run that was cut, in one file or several."""
    ranks.run(2, save_cut, tmp_path / "run")
    expected = Stage(StageInfo(0, 1), NUM_LAYERS).state_dict()
    (path,) = save_safetensors(tmp_path / "run", tmp_path / "one")
    assert [file.name for file in (tmp_path / "one").iterdir()] == ["model.safetensors"]
    whole = load_file(path)
    assert whole.keys() == expected.keys()
    assert all(torch.equal(whole[name], tensor) for name, tensor in expected.items())
    paths = save_safetensors(tmp_path / "run", tmp_path / "several", max_file_size=10_000)
    index = json.loads((tmp_path / "several" / "model.safetensors.index.json").read_text())
    assert len(paths) > 2
    assert paths[0].name == f"model-00001-of-{len(paths):05d}.safetensors"
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in whole.values())
    parts = {name: load_file(tmp_path / "several" / file)[name] for name, file in index["weight_map"].items()}
    assert parts.keys() == expected.keys()
    assert all(torch.equal(parts[name], tensor) for name, tensor in expected.items())
    assert max(path.stat().st_size for path in paths) < 15_000  # with the list of contents


def save_cut(rank: int, folder: Path) -> None:
    Checkpointer(folder, build("zbv", 2, NUM_LAYERS)).save(1)

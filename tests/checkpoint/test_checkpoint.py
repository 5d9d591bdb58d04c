"""Saved under one arrangement of stages and replicas, gone on with under another, as if nothing had happened."""

from __future__ import annotations

import gc
import os
import random
import re
import threading
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tools.models import HIDDEN, Stage, build, run
from tools.ranks import RankPool, on_ranks
from tools.saving import Counting, error_of, everything_in, filled
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.optim.swa_utils import AveragedModel

from megapipe import PipelinedOptimizer, StageInfo, parallel_state
from megapipe.checkpoint import Checkpointer
from megapipe.checkpoint.files import Writer, checkpoints_in
from megapipe.checkpoint.fingerprints import fingerprint
from megapipe.checkpoint.random_states import find_state
from megapipe.checkpoint.reading import Reader
from megapipe.process_groups import all_gather_json

NUM_LAYERS, NUM_MICROBATCHES = 4, 2


class Run:
    """A model under a schedule, its optimizer and LR scheduler, and a checkpointer for them."""

    def __init__(
        self, schedule: str, pp_size: int, folder: Path, num_chunks: int | None = None, **options: Any
    ) -> None:
        parallel_state.destroy_model_parallel()
        self.schedule = schedule
        self.chunks = build(schedule, pp_size, NUM_LAYERS, num_chunks, finalize_model_grads_func=average, deferred=True)
        matrices = [p for chunk in self.chunks for p in chunk.parameters() if p.dim() > 1]
        vectors = [p for chunk in self.chunks for p in chunk.parameters() if p.dim() == 1]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors}]
        self.optimizer = torch.optim.AdamW(groups, lr=1e-2)
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


ARRANGEMENTS = [("1f1b", 4, None), ("zbv", 2, None), ("no_pipelining", 1, 3)]


def go_on_elsewhere(rank: int, folder: Path) -> Any:
    """A step under each arrangement, the rest of the ranks being replicas."""
    losses: list[float] = []
    for schedule, pp_size, num_chunks in ARRANGEMENTS:
        this = Run(schedule, pp_size, folder, num_chunks, asynchronous=True)
        loaded = this.checkpointer.load(may_be_empty=not losses)
        assert (loaded is None) == (not losses)
        if loaded is not None:
            assert loaded == (len(losses), {"consumed": 100 * len(losses)})
        losses += this.train(len(losses), len(losses) + 1)
        this.checkpointer.save(len(losses), {"consumed": 100 * len(losses)})
        this.checkpointer.wait()
    return losses


def uninterrupted(rank: int, folder: Path) -> Any:
    """On one rank; with its weights and optimizer state by name, read from a checkpoint."""
    this = Run("no_pipelining", 1, folder)
    losses = this.train(0, len(ARRANGEMENTS))
    this.checkpointer.save(len(losses))
    return losses


def test_goes_on_under_any_arrangement(ranks: RankPool, tmp_path: Path) -> None:
    """1f1b on 4 stages, zbv on 2 stages x 2 replicas, and more: losses, weights and optimizer state are those of the
    uninterrupted run, bit for bit."""
    (expected,) = ranks.run(1, uninterrupted, tmp_path / "one")
    for losses in ranks.run(4, go_on_elsewhere, tmp_path / "many"):
        assert losses == expected
    want, got = (everything_in([*checkpoints_in(tmp_path / name).values()][-1]) for name in ("one", "many"))
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


@on_ranks(2)
def test_tied_parameters_are_saved_once(rank: int, tmp_path: Path) -> None:
    """Saved by one process, where it is one tensor, or by two ranks, where it is two, under one name or two."""
    for number, (global_name, pp_sizes) in enumerate([(None, (1, 2)), (None, (2, 1)), (as_embedding, (2, 1))]):
        for pp_size in pp_sizes:
            parallel_state.destroy_model_parallel()
            parallel_state.initialize_model_parallel(pp_size)
            pp_rank = parallel_state.get_pipeline_model_parallel_rank()
            chunk = Tied(StageInfo(pp_rank, pp_size))
            optimizer = torch.optim.AdamW(chunk.parameters())
            checkpointer = Checkpointer(tmp_path / str(number), chunk, optimizer, global_name=global_name)
            ends = [layer.weight for layer in (chunk.embedding, chunk.head) if layer is not None]
            if pp_size == pp_sizes[0]:
                for weight in ends[:1]:
                    weight.data.fill_(1.5)
                    weight.grad = torch.ones_like(weight)
                optimizer.step()
                checkpointer.save(1)
                saved = ends[0].detach().clone()
                keys = Reader(next(iter(checkpoints_in(tmp_path / str(number)).values()))).contents
                names = [key for key in keys if key in ("model.embedding.weight", "model.head.weight")]
                assert len(names) == (2 if global_name is None and pp_size == 2 else 1)
            else:
                assert checkpointer.load() == (1, None)
                for weight in ends:
                    assert torch.equal(weight, saved)
                    assert optimizer.state[weight]["step"] == 1
                    assert torch.equal(optimizer.state[weight]["exp_avg"], torch.full_like(weight, 0.1))


class Local(nn.Module):
    """Layers counted from 0 on every stage."""

    def __init__(self, first: int, num_layers: int, size: int = 3) -> None:
        super().__init__()
        self.first = first
        self.layers = nn.ModuleList(nn.Linear(size, size) for _ in range(num_layers))
        for number, layer in enumerate(self.layers):
            nn.init.constant_(layer.weight, first + number)


class Stateful(nn.Module):
    def __init__(self, value: int) -> None:
        super().__init__()
        self.value = value

    def get_extra_state(self) -> int:
        return self.value

    def set_extra_state(self, state: int) -> None:
        self.value = state


def renumber(chunk: nn.Module, name: str) -> str:
    return re.sub(r"\d+", lambda match: str(chunk.first + int(match[0])), name)


@on_ranks(2)
def test_what_does_not_fit_is_told_alike_on_every_rank(rank: int, tmp_path: Path) -> None:
    parallel_state.initialize_model_parallel(2)
    Checkpointer(tmp_path, [Local(2 * rank, 2)], global_name=renumber).save(3)
    whole = Local(0, 4)
    nn.init.zeros_(whole.layers[3].weight)
    Checkpointer(tmp_path, [whole]).load()
    assert [layer.weight[0, 0] for layer in whole.layers] == [0, 1, 2, 3]

    def save(name: str, chunk: nn.Module) -> None:
        Checkpointer(tmp_path / name, [chunk]).save(1)

    (empty := tmp_path / "empty").mkdir(exist_ok=True)
    errors = [
        error_of(lambda: save("values", Local(2 * rank, 2))),
        error_of(lambda: save("shapes", Local(0, 2, size=3 + rank))),
        error_of(lambda: save("extra", Stateful(rank))),
        error_of(
            lambda: Checkpointer(tmp_path, whole, [torch.optim.SGD(whole.parameters()) for _ in range(2)]).save(9)
        ),
        error_of(lambda: Checkpointer(tmp_path, [Local(2 * rank, 2)]).load()),
        error_of(lambda: Checkpointer(tmp_path, [Local(2 * rank, 4)], global_name=renumber).load()),
        error_of(lambda: Checkpointer(tmp_path, [Local(2 * rank, 2, size=4)], global_name=renumber).load()),
        error_of(lambda: Checkpointer(tmp_path, whole, torch.optim.SGD(whole.parameters(), lr=1.0)).load()),
        error_of(lambda: Checkpointer(tmp_path, whole, torch.optim.SGD(nn.Linear(2, 2).parameters())).save(9)),
        error_of(lambda: Checkpointer(tmp_path, whole, others={"scaler": torch.amp.GradScaler("cpu")}).load()),
        error_of(lambda: Checkpointer(tmp_path, whole).save(2)),
        error_of(lambda: Checkpointer(tmp_path, whole).save(4, data={"loader": object()})),
        error_of(lambda: Checkpointer(tmp_path / "nowhere", whole).load()),
        error_of(lambda: Checkpointer(tmp_path, whole).load(empty)),
    ]
    assert Checkpointer(tmp_path / "nowhere", whole).load(may_be_empty=True) is None
    assert list(checkpoints_in(tmp_path)) == [3]
    expected = [
        r"ValueError: layers.0.weight is the name of different parameters, of chunk 0 on pipeline rank 0 and of chunk "
        r"0 on pipeline rank 1: their values differ. Name parameters as in the whole model",
        r"ValueError: layers.0.weight is the name .*: their shapes differ",
        r"ValueError: _extra_state is the name .*: their values differ",
        r"ValueError: optimizers 0 and 1 train the same parameter, of shape \[3, 3\], .* give each a Checkpointer",
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
    assert all_gather_json(errors) == [errors] * 2
    for pattern, error in zip(expected, errors, strict=True):
        assert re.match(pattern, error), error


# What must be the same on all ranks


@on_ranks(2)
def test_what_ranks_must_have_alike_is_compared(rank: int, tmp_path: Path) -> None:
    """Ranks that saved to disks or steps of their own were told that all was well, and nothing could be loaded. Of
    what each rank had for itself in others, rank 0's was loaded on every rank."""
    parallel_state.initialize_model_parallel(2)
    chunk = nn.ModuleDict({str(rank): filled(float(rank))})
    average = AveragedModel(chunk)
    counting = Counting(chunk.parameters())
    counting.state["k"] = torch.tensor(rank)
    (tmp_path / f"disk {rank}").mkdir()
    elsewhere = Checkpointer(tmp_path / f"disk {rank}", chunk)
    errors = [
        error_of(lambda: elsewhere.save(1)),
        error_of(lambda: Checkpointer(tmp_path, chunk).save(1 + rank)),
        error_of(lambda: Checkpointer(tmp_path, chunk).check_can_save(1 + rank)),
        error_of(lambda: Checkpointer(tmp_path, chunk, others={"average": average}).save(1)),
        error_of(lambda: Checkpointer(tmp_path, chunk, others={"mine": average} if rank else {}).save(1)),
        error_of(lambda: Checkpointer(tmp_path, chunk, counting).save(1)),
    ]
    assert not checkpoints_in(tmp_path)
    # As the error says. And what schedulers say of each parameter group differs with the groups.
    Checkpointer(tmp_path / "average", average).save(1)
    nn.init.zeros_(average.module[str(rank)].weight)
    Checkpointer(tmp_path / "average", average).load()
    assert (average.module[str(rank)].weight == rank).all()
    groups = [{"params": [p], "lr": 0.1 + rank} for p in chunk.parameters()][: rank + 1]
    scheduler = torch.optim.lr_scheduler.LambdaLR(torch.optim.SGD(groups), lambda step: 0.5**step)
    Checkpointer(tmp_path, chunk, scheduler.optimizer, others={"scheduler": scheduler}).save(1)
    expected = [
        r"ValueError: .*disk 1 on .* is not the folder that rank 0 saves to, which is on another disk: give a folder "
        "that all ranks can reach",
        "ValueError: rank 0 saves step 1 and rank 1 step 2: save the same one on all",
        "ValueError: rank 0 saves step 1 and rank 1 step 2",
        r"ValueError: the state of others\['average'\] differs between rank 0 and rank 1, and rank 0's would be loaded",
        r"ValueError: the state of others\['mine'\] differs between rank 0 and rank 1",
        "ValueError: what optimizer 0 has besides the state of its parameters differs between rank 0 and rank 1",
    ]
    assert all_gather_json(errors) == [errors] * 2
    for pattern, error in zip(expected, errors, strict=True):
        assert re.match(pattern, error), error


def test_fingerprints() -> None:
    a, b = torch.arange(4.0), torch.arange(8.0)[::2] / 2
    assert fingerprint({"x": [a, None], "y": {"s"}}) == fingerprint({"y": {"s"}, "x": [b.clone(), None]})
    assert fingerprint([b]) == fingerprint([a.clone()])
    different = [{}, [], [[]], [{}], 0, 0.0, None, a, a.double(), a.view(2, 2), -a, {"x": a}, {"y": a}, "0", object]
    assert len({fingerprint(value) for value in different}) == len(different)
    assert fingerprint(object()) == fingerprint(object())


@on_ranks(2)
def test_errors_of_writing(rank: int, tmp_path: Path) -> None:
    """What goes wrong while writing is told on every rank, at once or, in the background, at the next call."""
    parallel_state.initialize_model_parallel(1)
    layer = filled(1.0)
    Checkpointer(tmp_path, layer).save(1)
    finish = Writer.finish

    def fail(*arguments: Any, **keywords: Any) -> None:
        raise OSError(28, "No space left on device")

    later = Checkpointer(tmp_path, layer, asynchronous=True)
    expected = r"RuntimeError: saving to .* failed on rank 0 \(.*No space left on device\). What was saved before is"
    try:
        Writer.finish = fail  # type: ignore[method-assign]
        assert re.match(expected, (error := error_of(lambda: Checkpointer(tmp_path, layer).save(2)))), error
        later.save(2)
        assert re.match(expected, error_of(later.wait))
        later.save(2)
        assert re.match(expected, error_of(lambda: later.save(3)))
    finally:
        Writer.finish = finish  # type: ignore[method-assign]
    assert list(checkpoints_in(tmp_path)) == [1]
    later.save(2)
    nn.init.constant_(layer.weight, 7.0)  # while it is being written
    later.save(3)
    later.wait()
    for step, value in ((2, 1.0), (3, 7.0)):
        Checkpointer(tmp_path, layer).load(checkpoints_in(tmp_path)[step])
        assert torch.equal(layer.weight, torch.full((4, 4), value))


@on_ranks(2)
def test_a_save_in_the_background_disturbs_nothing(rank: int, tmp_path: Path) -> None:
    """check_can_save spoke over the group that a save in the background was using, and a copy to the host that failed
    on one rank left the others waiting for it: both hung."""
    parallel_state.initialize_model_parallel(2)
    chunk = nn.ModuleDict({str(rank): filled(1.0)})
    checkpointer = Checkpointer(tmp_path, chunk, asynchronous=True)
    for step in range(1, 6):
        checkpointer.save(step)
        checkpointer.check_can_save(step + 1)
    if rank:
        chunk.register_buffer("nowhere", torch.empty(3, device="meta"))
    error = error_of(lambda: checkpointer.save(6))
    assert error.startswith("NotImplementedError: Cannot copy out of meta tensor"), error
    assert list(checkpoints_in(tmp_path)) == [1, 2, 3, 4, 5]


def threads_and_files() -> list[int]:
    gc.collect()
    return [len(os.listdir(f"/proc/self/{what}")) for what in ("task", "fd")]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts the threads and files of the process")
@on_ranks(2)
def test_a_closed_checkpointer_leaves_nothing_behind(rank: int, tmp_path: Path) -> None:
    """Each asynchronous Checkpointer kept six threads and ten open files until torch.distributed ended: nothing could
    end one before."""
    parallel_state.initialize_model_parallel(1)
    layer = filled(1.0)
    counted = []
    for step in range(1, 4):
        with Checkpointer(tmp_path, layer, asynchronous=True) as checkpointer:
            checkpointer.save(step)
        assert step in checkpoints_in(tmp_path), "it waits"
        checkpointer.close()
        counted.append(threads_and_files())
    assert all(now <= before for later in counted[1:] for now, before in zip(later, counted[0]))
    for call in (checkpointer.load, lambda: checkpointer.save(4), lambda: checkpointer.check_can_save(4)):
        assert error_of(call).startswith("ValueError: this Checkpointer is closed: make another one")
    failing = Checkpointer(tmp_path, layer, asynchronous=True)
    with mock.patch.object(Writer, "finish", side_effect=OSError(28, "No space left on device")):
        failing.save(9)
        error = error_of(failing.close)
    assert re.match(r"RuntimeError: saving to .* failed on rank 0 \(.*No space left", error), error
    failing.close()
    del failing
    assert all(now <= before for now, before in zip(threads_and_files(), counted[0]))


@on_ranks(2)
def test_two_checkpointers_of_one_folder(rank: int, tmp_path: Path) -> None:
    """The second took what the first was still writing in the background for what a dead run had left, and removed it.
    The first failed with "No such file"."""
    parallel_state.initialize_model_parallel(1)
    first, second = (Checkpointer(tmp_path, filled(value), asynchronous=True) for value in (1.0, 2.0))
    held = threading.Event()
    first._thread.submit(held.wait)
    first.save(1)
    (begun,) = tmp_path.glob("*.incomplete")
    second.save(2)
    assert begun.exists()
    held.set()
    second.close()
    first.close()
    assert list(checkpoints_in(tmp_path)) == [1, 2]


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
            "was saved by 2 ranks in another arrangement than these 3" in text and "from the seed 7, step 3" in text
            for text in said
        )
    return drawn


def test_random_states(ranks: RankPool, tmp_path: Path) -> None:
    expected = ranks.run(2, random_states, tmp_path, None)
    ranks.run(2, random_states, tmp_path, expected)
    drawn = ranks.run(3, random_states, tmp_path, expected)
    assert drawn == ranks.run(3, random_states, tmp_path, expected)
    assert len({tuple(one) for one in drawn}) == 3


@pytest.mark.filterwarnings("ignore:.*random states do not fit")
@on_ranks(4)
def test_ranks_of_one_place_draw_the_same(rank: int, tmp_path: Path) -> None:
    """States were found again by the number of the rank, or seeded by it. So where a run went on with another tp, the
    ranks of a tensor-parallel group dropped out different elements of what they share."""
    layer = filled(0.0)

    def use(**shape: int) -> Checkpointer:
        parallel_state.destroy_model_parallel()
        mesh = dist.init_device_mesh("cpu", tuple(shape.values()), mesh_dim_names=tuple(shape))
        parallel_state.initialize_from_mesh(mesh)
        return Checkpointer(tmp_path, layer, torch.optim.SGD(layer.parameters()))

    def drawn() -> dict[str, list[list[float]]]:
        """What ranks draw next, by their stage and replica."""
        own = parallel_state.get_pipeline_model_parallel_rank(), parallel_state.get_data_parallel_rank()
        by_place: dict[str, list[list[float]]] = {}
        for place, numbers in all_gather_json([str(own), draw()]):
            by_place.setdefault(place, []).append(numbers)
        return by_place

    checkpointer = use(pp=2, tp=2)
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(parallel_state.get_pipeline_model_parallel_rank())
    checkpointer.save(1)
    expected = drawn()
    assert [len(numbers) for numbers in expected.values()] == [2, 2]
    for shape in ({"pp": 2, "tp": 2}, {"tp": 2, "pp": 2}):
        use(**shape).load()
        assert drawn() == expected
    for shape, num_places in (({"pp": 4}, 4), ({"pp": 1, "dp": 2, "tp": 2}, 2)):
        use(**shape).load()
        numbers = drawn()
        assert len(numbers) == len({tuple(one) for all_of in numbers.values() for one in all_of}) == num_places, shape


def test_whose_state_a_rank_goes_on_with() -> None:
    saved = [[0, 0], [1, 0], [0, 0], [1, 0]]
    assert [find_state(rank, saved, saved) for rank in range(4)] == [0, 1, 2, 3]
    assert [find_state(rank, [[0, 0], [1, 0]], saved) for rank in range(2)] == [0, 1]
    assert [find_state(rank, [[1, 0], [0, 0]] * 3, saved) for rank in range(6)] == [1, 0] * 3
    assert [find_state(rank, sorted(saved), saved) for rank in range(4)] == [0, 2, 1, 3]
    assert find_state(0, [[0, 0], [0, 1]], saved) is None
    assert find_state(0, [[0, 0]], saved) is None


def test_no_gpu_is_taken_for_random_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where ranks compute on the CPU of a machine with a GPU, each took a part of the GPU when it saved, or failed in
    a process that had been forked."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: pytest.fail("it initialises CUDA"))
    Checkpointer(tmp_path, filled(0.0)).save(1)
    assert Checkpointer(tmp_path, filled(1.0)).load() == (1, None)


# Shards


@on_ranks(2)
def test_fsdp_shards(rank: int, tmp_path: Path) -> None:
    """To replicas of the whole model and back: every rank reads its shards only."""

    def make(sharded: bool, value: float) -> tuple[Stage, torch.optim.Optimizer]:
        (chunk,) = build("no_pipelining", 1, 2)
        if sharded:
            fully_shard(chunk, mesh=parallel_state.get_data_parallel_mesh())
        optimizer = torch.optim.AdamW(chunk.parameters(), lr=value)
        for parameter in chunk.parameters():
            parameter.grad = torch.full_like(parameter, value)
        optimizer.step()
        return chunk, optimizer

    chunk, optimizer = make(True, 0.5)
    Checkpointer(tmp_path, chunk, optimizer).save(1)
    expected, expected_optimizer = make(False, 0.5)
    whole, whole_optimizer = make(False, 0.25)
    checkpointer = Checkpointer(tmp_path, whole, whole_optimizer)
    checkpointer.load()
    for parameter, wanted in zip(whole.parameters(), expected.parameters(), strict=True):
        assert torch.equal(parameter, wanted)
        for key, value in expected_optimizer.state[wanted].items():
            assert torch.equal(whole_optimizer.state[parameter][key], value)
    assert whole_optimizer.param_groups[0]["lr"] == 0.5
    checkpointer.save(2)
    again, again_optimizer = make(True, 0.25)
    Checkpointer(tmp_path, again, again_optimizer).load()
    for parameter, wanted in zip(again.parameters(), chunk.parameters(), strict=True):
        assert torch.equal(parameter.to_local(), wanted.to_local())
        for key, value in optimizer.state[wanted].items():
            found = again_optimizer.state[parameter][key]
            assert type(found) is type(value)
            assert torch.equal(*(t.to_local() if key != "step" else t for t in (found, value)))


class TwoArguments(Exception):  # noqa: N818
    def __init__(self, one: int, other: int) -> None:
        super().__init__(f"{one} {other}")


class Unloadable:
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Any) -> None:
        if dist.get_rank():
            raise TwoArguments(1, 2)


@on_ranks(2)
def test_errors_that_cannot_be_sent(rank: int, tmp_path: Path) -> None:
    """An exception that pickle cannot make again, or a setting that it cannot take, failed on one rank only. The others
    waited for it until they were killed."""
    chunks = build("1f1b", 2, 2)
    optimizer = PipelinedOptimizer(chunks, torch.optim.SGD)
    Checkpointer(tmp_path, chunks, others={"other": Unloadable()}).save(1)
    with pytest.raises(RuntimeError, match=r"TwoArguments: 1 2"):
        Checkpointer(tmp_path, chunks, others={"other": Unloadable()}).load()
    optimizer.param_groups[0]["rule"] = (lambda: 0) if rank else 0
    with pytest.raises(TypeError, match=r"what the optimizer has in its groups .* cannot be saved so that .*lambda"):
        Checkpointer(tmp_path, chunks, optimizer).save(2)


@on_ranks(2)
def test_names_that_are_new_are_compared(rank: int, tmp_path: Path) -> None:
    """Only the first save looked for one name of different parameters: of those added later, and of those that were
    still equal then, one was lost."""
    parallel_state.initialize_model_parallel(2)
    chunk = nn.ModuleDict({str(rank): filled(1.0)})
    checkpointer = Checkpointer(tmp_path, chunk)
    checkpointer.save(1)
    chunk["new"] = filled(float(rank))
    with pytest.raises(ValueError, match=r"new\.weight is the name of different parameters"):
        checkpointer.save(2)
    chunk["new"] = filled(1.0)
    checkpointer.save(2)
    nn.init.constant_(chunk["new"].weight, float(rank))
    with pytest.raises(ValueError, match=r"new\.weight is the name of different parameters"):
        checkpointer.save(3)
    del chunk["new"]
    if rank == 1:
        chunk["new"] = filled(1.0)
    checkpointer.save(3)
    chunk["0"] = filled(1.0 + rank)  # a name that rank 0 has had from the first
    with pytest.raises(ValueError, match=r"0\.weight is the name of different parameters"):
        checkpointer.save(4)


@on_ranks(2)
def test_ranks_tell_each_other_three_times(rank: int, tmp_path: Path) -> None:
    """A save had ten exchanges, the first seventeen, and a load fifteen, all pickled. Now what a rank tells comes with
    its error, as JSON."""
    parallel_state.initialize_model_parallel(2)
    checkpointer = Checkpointer(tmp_path, nn.ModuleDict({str(rank): filled(1.0)}))
    gather = mock.Mock(wraps=all_gather_json)
    with mock.patch("megapipe.all_ranks.all_gather_json", gather):
        for number, call in enumerate((lambda: checkpointer.save(1), lambda: checkpointer.save(2), checkpointer.load)):
            call()
            assert gather.call_count == 3 * (number + 1)

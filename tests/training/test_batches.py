"""A batch cut into microbatches, and who reads what of it."""

from __future__ import annotations

import dataclasses
from collections import UserDict
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from tools.models import assert_same_gradients, batches, build, loss_of, reference, run
from tools.ranks import RankPool, on_ranks
from torch import Tensor, nn

from megapipe import StageInfo
from megapipe.training import data_iterators, split_batch


class Pair(NamedTuple):
    a: Tensor
    b: Tensor


def test_split_batch() -> None:
    x = torch.arange(24).view(6, 4)
    assert torch.equal(torch.stack(split_batch(x, 3)), x.view(3, 2, 4))
    assert split_batch(x, 3)[1].data_ptr() == x[2:].data_ptr(), "views"
    batch = {"x": x, "pair": Pair(x.T, x), "mask": x[0], "name": "text", "none": None}
    spec = {"x": 0, "pair": Pair(1, -2), "mask": None, "name": 0, "none": 0}
    pieces = split_batch(batch, 2, spec)
    assert len(pieces) == 2
    for index, piece in enumerate(pieces):
        rows = slice(3 * index, 3 * index + 3)
        assert torch.equal(piece["x"], x[rows])
        assert isinstance(piece["pair"], Pair)
        assert torch.equal(piece["pair"].a, x.T[:, rows])
        assert torch.equal(piece["pair"].b, x[rows])
        assert piece["mask"] is batch["mask"]
        assert (piece["name"], piece["none"]) == ("text", None)
    # A spec for the upper levels only
    assert [piece["pair"].b.shape for piece in split_batch({"pair": Pair(x, x)}, 2, {"pair": 1})] == [(6, 2), (6, 2)]
    assert [len(piece) for piece in split_batch(x, 4, uneven=True)] == [2, 2, 1, 1]
    assert split_batch({"whole": x}, 2, None)[1]["whole"] is x
    assert split_batch({}, 2) == [{}, {}]


def test_batches_that_do_not_fit() -> None:
    x = torch.zeros(6, 4)
    for arguments, keywords, message in (
        ((x, 4), {}, "the 6 samples of batch cannot be divided evenly into 4 microbatches: use a multiple of 4, or"),
        (({"x": x}, 7), {"uneven": True}, r"6 samples of batch\['x'\] cannot .* into 7 .*: use a multiple of 7\.$"),
        (
            ({"x": x, "y": [x.T]}, 2),
            {},
            r"batch\['x'\] has 6 samples and batch\['y'\]\[0\] has 4 \(dimension 0 of \[4, 6",
        ),
        ((x, 2, 2), {}, r"batch has shape \[6, 4\], so dimension 2 of it cannot count samples"),
        (({"x": x}, 2, {"y": 0}), {}, r"the spec \{'y': 0\} does not fit the batch \{'x': \[6, 4\]\}"),
        ((x, 0), {}, "a batch cannot be cut into 0 microbatches"),
    ):
        with pytest.raises(ValueError, match=message):
            split_batch(*arguments, **keywords)  # type: ignore[arg-type]


class Reads(Mapping[str, Any]):
    """A batch that is read when asked, and remembers what was asked for."""

    def __init__(self, batch: dict[str, Any], asked: list[str]) -> None:
        self.batch, self.asked = batch, asked

    def __getitem__(self, name: str) -> Any:
        self.asked.append(name)
        return self.batch[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.batch)

    def __len__(self) -> int:
        return len(self.batch)


def forward_step(data_iterator: Iterator[dict[str, Tensor]] | None, model: nn.Module) -> tuple[Tensor, Any]:
    batch = {} if data_iterator is None else next(data_iterator)
    return model(batch.get("tokens")), partial(loss_func, batch.get("labels"))


def loss_func(labels: Tensor, output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    loss = loss_of(output, labels)
    return loss, {"loss": loss.detach()}


def train(rank: int, schedule: str, pp_size: int, needs: list[list[str]]) -> None:
    """Two steps on batches of 4 microbatches, with one iterator for both."""
    asked: list[str] = []
    begun = []

    def read() -> Iterator[Mapping[str, Any]]:
        for seed in (0, 1):
            begun.append(seed)
            step = list(batches(4, seed))
            yield Reads({name: torch.cat([one[name] for one in step], dim=1) for name in ("tokens", "labels")}, asked)

    chunks = build(schedule, pp_size, 4)
    infos = [chunk.info for chunk in chunks]
    iterators = data_iterators(
        read(), 4, infos, inputs=("tokens",), labels=("labels",), spec={"tokens": 1, "labels": 1}
    )
    for _ in (0, 1):
        run(schedule, chunks, 4, forward_step_func=forward_step, data_iterator=iterators)
    assert_same_gradients(chunks, reference(4, 4, seeds=(0, 1))[0])
    assert asked == 2 * needs[rank]
    assert begun == ([0, 1] if needs[rank] else [])


def test_each_rank_reads_what_its_stages_need(ranks: RankPool) -> None:
    ranks.run(1, train, "no_pipelining", 1, [["tokens", "labels"]])
    ranks.run(3, train, "1f1b", 3, [["tokens"], [], ["labels"]])
    ranks.run(2, train, "zbv", 2, [["tokens", "labels"], []])


def test_keywords_are_read_for_every_stage() -> None:
    """Stages between the first and the last got no data. A mask for all of them had to travel with every message."""
    batch = {name: torch.arange(4) + 10 * number for number, name in enumerate(("x", "y", "mask"))}
    needs = [["x", "mask"], ["mask"], ["y", "mask"]]
    for number, names in enumerate(needs):
        (iterator,) = data_iterators([batch], 2, [StageInfo(number, 3)], inputs=["x"], labels=["y"], keywords=["mask"])
        assert iterator is not None
        second = [next(iterator), next(iterator)][1]
        assert list(second) == names
        assert all(torch.equal(second[name], batch[name][2:]) for name in names)
    (iterator,) = data_iterators([batch], 2, [StageInfo(0, 1)], inputs=["x"], labels=["x"], keywords=["x"])
    assert iterator is not None
    assert list(next(iterator)) == ["x"]


def test_a_name_that_is_not_there() -> None:
    (iterator,) = data_iterators([{"x": torch.zeros(2)}], 2, [StageInfo(0, 1)], inputs=["x"], labels=["y"])
    assert iterator is not None
    with pytest.raises(ValueError, match=r"the batch has no 'y', only \['x'\]"):
        next(iterator)


class Loader:
    """The batches of steps 0, 1, 2 and on. Step 1's cannot be read, and the next one can."""

    def __init__(self) -> None:
        self.step = -1

    def __iter__(self) -> Loader:
        return self

    def __next__(self) -> dict[str, Tensor]:
        self.step += 1
        if self.step == 1:
            raise OSError("bad block")
        step = list(batches(4, self.step))
        return {name: torch.cat([one[name] for one in step], dim=1) for name in ("tokens", "labels")}


@on_ranks(1)
def test_a_batch_that_cannot_be_read(rank: int) -> None:
    """A loader that raised once had ended for good."""
    chunks = build("looped_bfs", 1, 4, 2)
    iterators = data_iterators(
        Loader(), 4, [chunk.info for chunk in chunks], inputs=["tokens"], labels=["labels"], spec=1
    )
    run("looped_bfs", chunks, 4, forward_step_func=forward_step, data_iterator=iterators)
    with pytest.raises(OSError, match="bad block"):
        run("looped_bfs", chunks, 4, forward_step_func=forward_step, data_iterator=iterators)
    for chunk in chunks:
        chunk.zero_grad()
    run("looped_bfs", chunks, 4, forward_step_func=forward_step, data_iterator=iterators)
    assert_same_gradients(chunks, reference(4, 4, seeds=(2,))[0])


def test_iterators_over_one_batch() -> None:
    """Each end takes its own time within a batch. After a step that failed, inputs were paired with the labels of other
    samples ever after."""
    loader = ({"x": torch.full((4,), float(number))} for number in range(3))
    stages = [StageInfo(0, 2), StageInfo(1, 2)]
    first, last = data_iterators(loader, 2, stages, inputs=["x"], labels=["x"])
    assert [next(one)["x"][0] for one in (first, first, last, last, first)] == [0, 0, 0, 0, 1]
    next(first)
    with pytest.raises(ValueError, match=r"failed within its batch.*make new data_iterators"):
        next(first)


@dataclasses.dataclass
class Samples:
    tokens: Tensor


def test_batches_that_are_not_cut() -> None:
    """Arrays, and containers that torch's pytrees do not know, went into every microbatch as a whole: each sample was
    trained on once per microbatch. A name that the spec lacks was a KeyError."""
    tokens = torch.arange(4)
    for batch, what in (
        (UserDict(tokens=tokens), "batch is a UserDict"),
        ({"x": Samples(tokens)}, r"batch\['x'\] is a Samples"),
        ([tokens.numpy()], r"batch\[0\] is a ndarray"),
    ):
        with pytest.raises(ValueError, match=rf"{what}, which cannot be cut.*None in the spec"):
            split_batch(batch, 2)
        assert split_batch(batch, 2, None) == [batch, batch]
    assert split_batch({"x": tokens.numpy()[0], "y": tokens}, 2)[1]["x"] == 0
    with pytest.raises(ValueError, match=r"spec .* has no 'labels'"):
        data_iterators([], 2, [StageInfo(0, 1)], inputs=["tokens"], labels=["labels"], spec={"tokens": 0})

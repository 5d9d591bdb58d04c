"""A checkpoint's model for those who know nothing of pipelines."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from models import Stage, build
from ranks import RankPool
from safetensors.torch import load_file
from torch import nn

from megapipe import StageInfo
from megapipe.checkpoint import Checkpointer, save_safetensors


def test_safetensors(ranks: RankPool, tmp_path: Path) -> None:
    """The whole model of a run that was cut, in one file or several."""
    ranks.run(2, save_cut, tmp_path / "run")
    expected = Stage(StageInfo(0, 1), 8).state_dict()
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
    Checkpointer(folder, build("zbv", 2, 8)).save(1)


def test_exporting_twice_into_one_folder(tmp_path: Path) -> None:
    """The files of an earlier export in another number of files stayed. transformers reads model.safetensors first, and
    so the old weights."""
    layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    Checkpointer(tmp_path / "run", layers).save(1)
    for size in (10**9, 300, 600, 10**9):
        paths = save_safetensors(tmp_path / "run", tmp_path / "model", max_file_size=size)
        index = {tmp_path / "model" / "model.safetensors.index.json"} if len(paths) > 1 else set()
        assert set((tmp_path / "model").iterdir()) == {*paths, *index}

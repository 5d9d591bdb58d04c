"""A checkpoint's model for those who know nothing of pipelines, theirs for a pipeline, and weights that are sent."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from tools.megatron_models import megatron, provider
from tools.models import Stage, build, reference
from tools.ranks import RankPool, on_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from megapipe import StageInfo
from megapipe.checkpoint import Checkpointer, named_weights, save_safetensors


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
    index_file = tmp_path / "several" / "model.safetensors.index.json"
    assert {path.stat().st_mode for path in paths} == {index_file.stat().st_mode}  # the library's nobody else may read


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


def test_what_files_of_safetensors_take(tmp_path: Path) -> None:
    layer = nn.Linear(2, 2)
    layer.register_buffer("phases", torch.zeros(2, dtype=torch.complex128))
    Checkpointer(tmp_path / "run", layer).save(1)
    with pytest.raises(ValueError, match=r"^phases is of torch.complex128, which files of safetensors cannot hold\.$"):
        save_safetensors(tmp_path / "run", tmp_path / "model")
    assert list((tmp_path / "model").iterdir()) == []
    missing = {"safetensors": None, "safetensors.torch": None}
    with (
        mock.patch.dict(sys.modules, missing),
        pytest.raises(ValueError, match=r"pip install 'megapipe\[safetensors\]'\.$"),
    ):
        save_safetensors(tmp_path / "run", tmp_path / "model")


@on_ranks(2)
def test_checkpoints_of_torch(rank: int, tmp_path: Path) -> None:
    """torch loads what it has saved of a whole model into chunks, and what megapipe has saved into a whole model. No
    page and no error said so: a Checkpointer called such a checkpoint damaged."""
    model, _ = reference(4, 2)
    trained = torch.optim.AdamW(model.parameters())
    trained.step()
    alone = dist.new_group([0])
    if rank == 0:
        saved = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, trained)}
        dcp.save(saved, checkpoint_id=tmp_path / "whole", process_group=alone)
        dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "weights", process_group=alone)
    dist.barrier()
    chunks = build("zbv", 2, 4)
    dcp.load({"model": {k: v for one in chunks for k, v in one.state_dict().items()}}, checkpoint_id=tmp_path / "whole")
    for chunk in chunks:
        optimizer = torch.optim.AdamW(chunk.parameters())
        state = {"optimizer": get_optimizer_state_dict(chunk, optimizer)}
        dcp.load(state, checkpoint_id=tmp_path / "whole")
        set_optimizer_state_dict(chunk, optimizer, state["optimizer"])
        for name, parameter in chunk.named_parameters():
            expected = model.get_parameter(name)
            assert torch.equal(parameter, expected)
            for key, value in optimizer.state[parameter].items():
                assert torch.equal(value, trained.state[expected][key])
    for folder in ("whole", "weights"):
        with pytest.raises(ValueError, match=r"its own load reads into the state_dict\(\) of the chunks"):
            Checkpointer(tmp_path / "run", chunks).load(tmp_path / folder)
    Checkpointer(tmp_path / "run", chunks).save(1)
    whole = Stage(StageInfo(0, 1), 4)
    dcp.load({"model": whole.state_dict()}, checkpoint_id=tmp_path / "run" / "step_00000001")
    assert all(torch.equal(p, q) for p, q in zip(whole.parameters(), model.parameters()))


# Weights of any chunks, sent by name


@on_ranks(4)
def test_replicas_in_a_v_and_a_weight_of_two_stages(rank: int) -> None:
    """By the name that two stages have for it, the weight comes from the first of them, once."""
    chunks = build("zbv", 2, 8)
    whole = dict(reference(8, 1)[0].named_parameters())
    for chunk in chunks:
        if chunk.embedding is not None or chunk.head is not None:
            chunk.tied = nn.Parameter(torch.full((3,), float(chunk.embedding is None)))
    found = list(named_weights(chunks, to=range(1, 4), bucket_size=3000))
    if rank == 0:
        assert found == []
        return
    assert [name for name, _ in found].count("tied") == 1
    by_name = dict(found)
    assert torch.equal(by_name.pop("tied"), torch.zeros(3))
    assert by_name.keys() == whole.keys()
    assert all(torch.equal(by_name[name], parameter) for name, parameter in whole.items())


@pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="make test installs megatron-core")
@on_ranks(2)
def test_megatrons_names(rank: int) -> None:
    """They are the whole model's, and the copy of a tied embedding does not come."""
    from megapipe.integrations.megatron import build_model_chunks, global_name

    chunks = build_model_chunks(provider(megatron(2, 2), is_tied=True), "zbv")
    found = dict(named_weights(chunks, global_name=global_name, dtype=torch.bfloat16))
    whole = dict(provider(megatron(1), is_tied=True)().named_parameters())
    assert found.keys() == whole.keys()
    assert all(torch.equal(found[name], parameter.bfloat16()) for name, parameter in whole.items())

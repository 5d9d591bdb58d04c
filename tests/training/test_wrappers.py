"""Chunks inside wrappers: everybody finds what is inside, under the names of the whole model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tools.models import build, run
from tools.ranks import on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from megapipe import PipelinedOptimizer, TiedWeights, clip_grad_norm_
from megapipe.checkpoint import Checkpointer
from megapipe.chunks import find_attribute, named_parameters, unwrap
from megapipe.training import GradientReducer


class Keeping(nn.Module):
    """Keeps its model in `module` and something else under a name of torch's, as Megatron's wrappers do."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.buffers = ["gradients of all replicas"]

    def forward(self, *inputs: Any) -> Any:
        return self.module(*inputs)


def by_torch(chunk: nn.Module) -> nn.Module:
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    return compiled(DistributedDataParallel(chunk, process_group=alone))


def compiled(module: Any) -> Any:
    """Nothing is compiled before it is called; the backend of its own would be imported here."""
    return torch.compile(module, backend="eager")


def test_what_is_no_wrapper_keeps_its_names() -> None:
    """A module with a child called `module` and parameters beside it is a model, not a wrapper."""
    model = nn.ModuleDict({"module": nn.Linear(2, 2), "head": nn.Linear(2, 2)})
    for wrapped in (model, compiled(model), Keeping(model), Keeping(compiled(Keeping(model)))):
        assert unwrap(wrapped) is model
        names = [name for name, _ in named_parameters(wrapped)]
        assert names == ["module.weight", "module.bias", "head.weight", "head.bias"]


def test_what_is_no_wrapper_keeps_its_attributes() -> None:
    """The config and the stage of a part called `module` were taken for those of the model around it."""
    part, model = nn.Linear(2, 2), nn.ModuleDict({"head": nn.Linear(2, 2)})
    model.module, part.config = part, "that of a part"
    assert find_attribute(Keeping(part), "config") == "that of a part"
    assert find_attribute(Keeping(model), "config") is None


@on_ranks(2)
def test_names_of_wrapped_chunks(rank: int, tmp_path: Path) -> None:
    """torch.compile puts `_orig_mod.` before every name, and wrappers such as Megatron's Float16Module `module.`. So
    tied weights were on no stage, and rules for parameters by their names applied to none."""
    for number, wrap in enumerate([by_torch, lambda chunk: Keeping(Keeping(chunk))]):
        bare = build("1f1b", 2, 2)
        chunks: Any = [wrap(chunk) for chunk in bare]
        seen: list[str] = []
        optimizer = PipelinedOptimizer(
            nn.ModuleList(chunks), torch.optim.AdamW, lambda name, _, seen=seen: seen.append(name) or {}
        )
        assert seen == [name for name, _ in bare[0].named_parameters()]
        TiedWeights(chunks, ["embedding.weight", "head.weight"])

        checkpointer = Checkpointer(tmp_path / str(number), chunks, optimizer)
        checkpointer.save(1)
        Checkpointer(tmp_path / str(number), bare, torch.optim.AdamW(bare[0].parameters())).load()


@on_ranks(1)
def test_errors_name_parameters_without_wrappers(rank: int) -> None:
    chunk = Keeping(build("1f1b", 1, 1)[0])
    run("1f1b", chunk, 2)
    chunk.module.head.weight.grad.fill_(torch.nan)
    with pytest.raises(RuntimeError, match=r"in the gradient of head\.weight on rank 0\. Skip"):
        clip_grad_norm_(chunk, 1.0, error_if_nonfinite=True)
    reducer = GradientReducer([chunk])
    chunk.module.extra = nn.Linear(1, 1)
    with pytest.raises(ValueError, match=r"^extra\.weight has no part in the GradientReducer"):
        reducer.finish([chunk])

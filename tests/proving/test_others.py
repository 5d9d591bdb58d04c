"""`prove` on what others run: torch's schedules, models of transformers and of `split`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.pipelining.schedules as theirs
import torch.nn.functional as F
from tools.torchs import against_torch
from torch import nn
from torch.distributed.pipelining import PipelineStage

import megapipe
from megapipe import StageInfo
from megapipe.plan import find_schedule
from megapipe.proving import toy


def whole(num_layers: int) -> Any:
    return lambda: toy.Layers(StageInfo(0, 1), num_layers)


@against_torch
@pytest.mark.parametrize(("name", "like"), [("ScheduleLoopedBFS", "looped_bfs"), ("ScheduleZBVZeroBubble", "zbv")])
def test_schedules_of_torch(name: str, like: str) -> None:
    def make() -> Any:
        infos = find_schedule(like).stages(dist.get_rank(), 2)
        stages = [PipelineStage(toy.Layers(of, 4), of.index, of.num_stages, torch.device("cpu")) for of in infos]
        return getattr(theirs, name)(stages, 4, loss_fn=toy.loss_of)

    question: dict[str, Any] = {"whole": whole(4), "loss": toy.loss_of, "data": toy.microbatches(4), "pp_size": 2}
    proof = megapipe.prove(schedule=make, **question)
    if name == "ScheduleLoopedBFS":  # whose backwards run from the last microbatch to the first: another order of sums
        assert proof.mistakes[0].startswith("rounding: nothing is off by more than")
        proof = megapipe.prove(schedule=make, tolerance=1e-4, **question)
    assert proof, proof


@against_torch
def test_torchs_scale_that_is_left_out() -> None:
    def make() -> Any:
        rank = dist.get_rank()
        stage = PipelineStage(toy.Layers(StageInfo(rank, 2), 4), rank, 2, torch.device("cpu"))
        return theirs.ScheduleGPipe(stage, 4, loss_fn=toy.loss_of, scale_grads=False)

    proof = megapipe.prove(schedule=make, whole=whole(4), loss=toy.loss_of, data=toy.microbatches(4), pp_size=2)
    assert "4 times too large, by the number of microbatches" in proof.mistakes[0]


def test_a_module_that_is_split() -> None:
    model = nn.Sequential(
        nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)
    )
    generator = torch.Generator().manual_seed(0)
    data = [(torch.randn(3, 8, generator=generator), torch.randn(3, 4, generator=generator)) for _ in range(4)]
    proof = megapipe.prove(model=model, loss=F.mse_loss, data=data, schedule="zbv")
    assert proof, proof
    assert proof.same["buffer"] == (6, 6)


def test_a_model_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(vocab_size=64, num_hidden_layers=4, tie_word_embeddings=True, **sizes)
    torch.default_generator.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    tokens = torch.randint(64, (4, 2, 16), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": ids, "labels": ids} for ids in tokens]
    proof = megapipe.prove(model=model, data=data, schedule="zbv", tolerance=1e-4)  # a tie's sum has another order
    assert proof, proof

"""`prove` on what others run: torch's schedules, Megatron's functions, models of transformers and of `split`."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
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

TORCHS = {
    "ScheduleGPipe": "gpipe",
    "Schedule1F1B": "1f1b",
    "ScheduleInterleaved1F1B": "interleaved_1f1b",
    "ScheduleLoopedBFS": "looped_bfs",
    "ScheduleInterleavedZeroBubble": "interleaved_zb1p",
    "ScheduleZBVZeroBubble": "zbv",
    "ScheduleDualPipeV": "dualpipev",
}


def whole(num_layers: int) -> Any:
    return lambda: toy.Layers(StageInfo(0, 1), num_layers)


@against_torch
@pytest.mark.parametrize("name", TORCHS)
def test_schedules_of_torch(name: str) -> None:
    kind = getattr(theirs, name)
    pp_size, m = (3, 8) if name in ("Schedule1F1B", "ScheduleZBVZeroBubble") else (2, 4)
    of_one = issubclass(kind, theirs.PipelineScheduleSingle)
    num_layers = 2 * pp_size

    def make() -> Any:
        infos = find_schedule(TORCHS[name]).stages(dist.get_rank(), pp_size)
        cpu = torch.device("cpu")
        stages = [PipelineStage(toy.Layers(of, num_layers), of.index, of.num_stages, cpu) for of in infos]
        return kind(stages[0] if of_one else stages, m, loss_fn=toy.loss_of)

    data = toy.microbatches(m)
    question: dict[str, Any] = {"whole": whole(num_layers), "loss": toy.loss_of, "data": data, "pp_size": pp_size}
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


class OfMegatron(toy.Layers):
    """A stage of Megatron's protocol."""

    def __init__(self, info: StageInfo, config: Any) -> None:
        super().__init__(info, 8)
        self.config, self.info, self.model_type = config, info, None
        self.received: Any = None

    def set_input_tensor(self, received: Any) -> None:
        self.received = received[0] if isinstance(received, list) else received

    def forward(self, tokens: Any) -> Any:
        return super().forward(tokens if self.info.is_first else self.received)


@pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="make test installs megatron-core")
@pytest.mark.parametrize(("pp_size", "vp_size"), [(1, None), (3, None), (2, 2)])
def test_functions_of_megatron(pp_size: int, vp_size: int | None) -> None:
    importlib.import_module("megatron.core.pipeline_parallel")  # here, once: the ranks are forks
    config: list[Any] = []

    def make() -> Any:
        from tools.megatron_models import megatron

        config.append(megatron(pp_size, vp_size))
        from megatron.core.pipeline_parallel import get_forward_backward_func

        return get_forward_backward_func()

    def forward_step(data: Iterator[Any], chunk: nn.Module) -> Any:
        tokens, labels = next(data)
        return chunk(tokens), lambda output: ((loss := toy.loss_of(output, labels)), loss.detach().clone())

    proof = megapipe.prove(
        lambda info: OfMegatron(info, config[-1]),
        forward_step,
        schedule=make,
        data=toy.microbatches(4),
        pp_size=pp_size,
        num_chunks=vp_size or 1,
        options={"seq_length": toy.BATCH, "micro_batch_size": toy.LENGTH, "decoder_seq_length": toy.BATCH},
    )
    assert proof, proof


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

"""A student and a teacher of another size, as docs/howto/distillation.md has them, against both in one process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tools.ranks import on_ranks

pytest.importorskip("transformers")

import torch
import torch.nn.functional as F
from tools import hf_models
from tools.against import assert_same_losses
from torch import Tensor

import megapipe


def loss_of(own: Tensor, teachers: Tensor) -> Tensor:
    found, wanted = (logits.float().log_softmax(-1) for logits in (own, teachers))
    return F.kl_div(found, wanted, reduction="batchmean", log_target=True)


@on_ranks(2)
def test_losses_and_gradients_are_those_of_whole_models(rank: int, tmp_path: Path) -> None:
    schedule = "zbv"
    sizes: dict[str, Any] = {"teacher": {"hidden_size": 64, "num_hidden_layers": 6}, "student": {}}
    models = {name: hf_models.make_model("qwen2", **own).eval() for name, own in sizes.items()}
    pipelines = {}
    for name, model in models.items():
        hf_models.save_on_first(model, tmp_path / name)
        pipelines[name] = [chunk.eval() for chunk in hf_models.load_chunks(tmp_path / name, schedule)]
    teacher, student = pipelines.values()
    for chunk in student:
        megapipe.weight_grad.convert(chunk)
    optimizer = megapipe.PipelinedOptimizer(student, lambda groups: torch.optim.AdamW(groups, lr=1e-2))
    whole = torch.optim.AdamW(models["student"].parameters(), lr=1e-2)

    def output(batches: Iterator[Tensor], chunk: Any) -> Any:
        return chunk(input_ids=next(batches)), None

    for step in range(2):
        tokens = [batch["input_ids"] for batch in hf_models.batches(3, seed=step)]
        logits = hf_models.run(schedule, teacher, tokens, forward_step_func=output, forward_only=True)
        losses = []
        for number, ids in enumerate(tokens):
            with torch.no_grad():
                wanted = models["teacher"](ids).logits
            assert not logits or torch.equal(logits[number], wanted)
            loss = loss_of(models["student"](ids, use_cache=False).logits, wanted)
            (loss / len(tokens)).backward()
            losses.append(loss.detach())

        def forward_step(batches: Iterator[Any], chunk: Any, logits: list[Tensor] = logits) -> Any:
            number, ids = next(batches)

            def loss_func(own: Tensor) -> Any:
                loss = loss_of(own, logits[number])
                return loss, {"loss": loss.detach()}

            return chunk(input_ids=ids), loss_func

        reports = hf_models.run(schedule, student, list(enumerate(tokens)), forward_step_func=forward_step)
        assert_same_losses(reports, losses, student)
        hf_models.assert_same_gradients(student, models["student"])
        for one in (optimizer, whole):
            one.step()
            one.zero_grad()

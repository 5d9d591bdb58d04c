"""transformers' Trainer in front of a pipeline, compared with the plain one: the shortest cases. All others are in
trainers_of_transformers.py: `make test-trainer`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tools.ranks import RankPool, on_ranks

pytest.importorskip("accelerate")

from tools import trainers

from megapipe.integrations.transformers import PipelineTrainer
from megapipe.integrations.transformers.trainer_checks import check_names, check_trainer

CASES: dict[str, tuple[int, str, dict[str, Any]]] = {
    "metrics, and generating in a callback": (
        2, "1f1b", {"predicts": True, "writes": True, "keywords": {"compute_metrics": trainers.accuracy}},
    ),
    "own compute_loss, and label smoothing in bf16": (
        2, "1f1b", {"has_own_loss": True, "label_smoothing_factor": 0.1, "bf16": True},
    ),
    "compute_loss_func, and norms that are not clipped": (
        2, "zbv", {"predicts": True, "max_grad_norm": 0.0, "keywords": {
            "compute_loss_func": trainers.loss_func, "compute_metrics": trainers.accuracy,
            "preprocess_logits_for_metrics": trainers.guessed,
        }},
    ),
    "in one process": (1, "1f1b", {}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_training_is_that_of_the_plain_trainer(ranks: RankPool, name: str, tmp_path: Path) -> None:
    num_ranks, schedule, case = CASES[name]
    trainers.compare(ranks, num_ranks, schedule, case, tmp_path)
    if case.get("writes"):
        saved = [
            transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "pipeline" / one)
            for one in ("final", "by callback")
        ]
        assert all(torch.equal(a, b) for a, b in zip(*(one.parameters() for one in saved)))


def test_replicas_are_those_of_ddp(ranks: RankPool, tmp_path: Path) -> None:
    """With an evaluation set that two replicas cannot share evenly."""
    trainers.compare_replicas(ranks, "1f1b", {"max_steps": 2}, tmp_path)


def test_a_run_goes_on_under_another_schedule(ranks: RankPool, tmp_path: Path) -> None:
    """And a second run into the same folder saves there again, as the plain trainer does."""
    case = {"save_strategy": "steps", "save_steps": 1, "max_steps": 2, "eval_strategy": "no"}
    through, _ = ranks.run(2, trainers.run, 2, tmp_path / "run", "zbv", case)
    saved = tmp_path / "run" / "checkpoint-1"
    before = (saved / "model.safetensors").stat().st_mtime_ns
    ranks.run(2, trainers.run, 2, tmp_path / "run", "1f1b", case)
    assert (saved / "model.safetensors").stat().st_mtime_ns > before
    assert "model.safetensors" in {path.name for path in saved.iterdir()}
    (got, _) = ranks.run(2, trainers.run, 2, tmp_path / "resumed", "zbv", {**case, "resume": saved})
    assert len(got["logs"]) < len(through["logs"])
    trainers.assert_same({**got, "logs": []}, {**through, "logs": []})


@on_ranks(1)
def test_all_chunks_of_a_rank_are_checkpointed(rank: int, tmp_path: Path) -> None:
    """The trainer switches it on in the one module that it is given."""
    with trainers.started(rank, 1):
        trainer = PipelineTrainer(
            model=trainers.make_model(),
            args=trainers.arguments(tmp_path, gradient_checkpointing=True, max_steps=1),
            data_collator=trainers.collate,
            train_dataset=trainers.samples(8),
            eval_dataset=trainers.samples(2),
            schedule="zbv",
        )
        trainer.train()
        assert [chunk.is_gradient_checkpointing for chunk in trainer.chunks] == [True, True]


# What is refused


@pytest.mark.parametrize(
    ("kind", "model", "options", "keywords", "message"),
    [
        (PipelineTrainer, None, {}, {}, "model must be a folder or a model of transformers, got a NoneType"),
        (PipelineTrainer, "meta-llama/Llama-3.1-8B", {}, {}, "is no folder: download the model first, "),
        (PipelineTrainer, None, {"optim": "lomo"}, {}, "optim=.*lomo does not work with a pipeline"),
        (PipelineTrainer, None, {"bf16_full_eval": True}, {}, "^bf16_full_eval does not work with a pipeline: stages"),
        (PipelineTrainer, None, {}, {"model_init": object()}, "^model_init does not work with a pipeline: "),
        (type("KTOTrainer", (PipelineTrainer,), {}), None, {}, {}, "KTOTrainer does not .* a second batch"),
        (type("Own", (type("GRPOTrainer", (), {}),), {}), None, {}, {}, "GRPOTrainer does not .* docs/"),
    ],
)  # fmt: skip
def test_what_is_refused_before_anything_runs(
    kind: type, model: Any, options: dict[str, Any], keywords: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check_trainer(kind, model, trainers.arguments(Path("nowhere"), **options), keywords)


def test_names_of_others_that_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    check_names()
    monkeypatch.delattr(transformers.Trainer, "_load_best_model")
    with pytest.raises(ImportError, match=r"of transformers .* has no _load_best_model: take transformers 5\.20"):
        check_names()


class Twice(PipelineTrainer):
    def compute_loss(self, model: Any, inputs: Any, **options: Any) -> Any:
        other = {**inputs, "input_ids": inputs["input_ids"].flip(1)}
        return super().compute_loss(model, inputs, **options) + super().compute_loss(model, other, **options)


class Breaks(PipelineTrainer):
    def compute_loss(self, model: Any, inputs: Any, **options: Any) -> Any:
        super().compute_loss(model, inputs, **options)
        raise KeyError("mine")


class Never(PipelineTrainer):
    def compute_loss(self, model: Any, inputs: Any, **options: Any) -> Any:
        return torch.zeros((), requires_grad=True)


def collate_by_rank(examples: Any) -> Any:
    batch = trainers.collate(examples)
    batch["labels"][0, 0] = torch.distributed.get_rank()
    return batch


def try_to_train(rank: int, folder: Path, kind: str, collator: Any) -> None:
    made = globals()[kind]
    with trainers.started(rank, 2):
        args = trainers.arguments(folder, eval_strategy="no")
        data = {"data_collator": collator, "train_dataset": trainers.samples(16)}
        made(model=trainers.make_model(), args=args, **data).train()


@pytest.mark.parametrize(
    ("kind", "collator", "message"),
    [
        ("Twice", trainers.collate, "compute_loss calls the model with other input_ids than before"),
        ("Breaks", trainers.collate, "mine"),
        ("Never", trainers.collate, "has not called the model"),
        ("PipelineTrainer", collate_by_rank, "the ranks of a pipeline have read different batches"),
    ],
)
def test_a_mistake_is_told_to_all_ranks(
    ranks: RankPool, kind: str, collator: Any, message: str, tmp_path: Path
) -> None:
    errors = ranks.run(2, try_to_train, tmp_path, kind, collator, errors=True)
    assert all(isinstance(error, Exception) for error in errors)
    assert all(message in str(error) for error in errors), errors

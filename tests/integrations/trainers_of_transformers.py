"""All that a trainer in front of a pipeline does, compared with the plain one: `make test-trainer`. test_trainer.py has
the shortest cases."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tools.ranks import RankPool

pytest.importorskip("trl")
pytest.importorskip("peft")

from tools import trainers
from tools.trainers import run, train
from tools.trainers_of_trl import train_with_trl

ACCURACY = {"compute_metrics": trainers.accuracy}
CASES: dict[str, tuple[int, str, dict[str, Any]]] = {
    "gpipe": (2, "gpipe", {"predicts": True, "keywords": ACCURACY}),
    "four ranks": (4, "1f1b", {"gradient_accumulation_steps": 5, "max_steps": 6, "lr_scheduler_type": "linear"}),
    "four ranks, interleaved": (
        4, "interleaved_1f1b", {"sizes": {"num_hidden_layers": 8}, "gradient_accumulation_steps": 4},
    ),
    "an epoch's last step is shorter": (2, "zbv", {"max_steps": -1, "num_train_epochs": 2}),
    "one microbatch": (2, "1f1b", {"gradient_accumulation_steps": 1}),
    "a stream": (2, "1f1b", {"is_stream": True}),
    "gradient checkpointing": (2, "zbv", {"gradient_checkpointing": True}),
    "experts": (2, "zbv", {"kind": "qwen3-moe", "predicts": True, "keywords": ACCURACY}),
    "experts in bf16": (2, "1f1b", {"kind": "qwen3-moe", "bf16": True}),
    "adapters": (2, "zbv", {"is_adapted": True}),
    "adapters on four ranks": (4, "1f1b", {"is_adapted": True}),
    "a folder": (2, "zbv", {"is_in_folder": True}),
    "by epochs of data grouped by length": (
        2, "1f1b", {"train_sampling_strategy": "group_by_length", "max_steps": -1, "num_train_epochs": 2},
    ),
    "a collator that draws": (
        2, "1f1b", {"keywords": {"data_collator": trainers.collate_at_random}, "max_steps": -1, "num_train_epochs": 2},
    ),
    "columns of no model": (2, "1f1b", {"columns": True}),
    "evaluation before, accumulated": (2, "zbv", {
        "eval_on_start": True, "eval_accumulation_steps": 1, "keywords": ACCURACY, "predicts": True,
    }),
    "tokens counted": (2, "1f1b", {"include_num_input_tokens_seen": "all"}),
    "another optimizer": (2, "zbv", {"optim": "adafactor", "lr_scheduler_type": "constant"}),
    "the best is not the last": (2, "zbv", {
        "stops_early": True, "load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "max_steps": 12,
        "save_strategy": "steps", "save_steps": 1, "eval_steps": 1, "save_total_limit": 1, "learning_rate": 0.1,
    }),
    "the best adapter": (2, "1f1b", {
        "load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "max_steps": 4, "is_adapted": True,
        "save_strategy": "steps", "save_steps": 1, "eval_steps": 1, "save_only_model": True,
    }),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_training_is_that_of_the_plain_trainer(ranks: RankPool, name: str, tmp_path: Path) -> None:
    num_ranks, schedule, case = CASES[name]
    trainers.compare(ranks, num_ranks, schedule, case, tmp_path)


def test_tied_weights(ranks: RankPool, tmp_path: Path) -> None:
    """Their gradients are added up in another order."""
    case = {"tied": True, "gradient_accumulation_steps": 5, "max_steps": 6}
    trainers.compare(ranks, 4, "1f1b", case, tmp_path, rounding=1e-6)


@pytest.mark.parametrize("case", [{"tied": True}, {"has_own_loss": True}, {"average_tokens_across_devices": False}])
def test_replicas_are_those_of_ddp(ranks: RankPool, case: dict[str, Any], tmp_path: Path) -> None:
    trainers.compare_replicas(ranks, "zbv", case, tmp_path)


def test_dropout_draws_from_nothing_that_data_are_drawn_from(ranks: RankPool, tmp_path: Path) -> None:
    """Stages draw different amounts, so that ranks would have read other data than their neighbours in a second
    epoch."""
    case = {"kind": "gpt2", "train_sampling_strategy": "group_by_length", "max_steps": -1, "num_train_epochs": 2}
    case |= {"keywords": {"data_collator": trainers.collate_at_random}}
    for got in ranks.run(4, run, 4, tmp_path, "1f1b", case):
        assert got["state"][0] == 12


def test_dropout_is_drawn_by_step_and_stage(ranks: RankPool, tmp_path: Path) -> None:
    """So a run that goes on draws what it would have drawn; the plain trainer draws others."""
    case = {"kind": "gpt2", "save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    through, _ = ranks.run(2, run, 2, tmp_path / "through", "1f1b", case)
    resume = {"resume": tmp_path / "through" / "checkpoint-2"}
    got, _ = ranks.run(2, run, 2, tmp_path / "resumed", "1f1b", {**case, **resume})
    trainers.assert_same({**got, "logs": []}, {**through, "logs": []})
    (plain,) = ranks.run(1, run, 1, tmp_path / "plain", None, case)
    assert trainers.largest_difference(plain["weights"], got["weights"]) > 1e-6
    assert abs(plain["logs"][-1]["train_loss"] - through["logs"][-1]["train_loss"]) < 0.05


def with_a_new_adapter(rank: int, folder: Path, sizes: dict[str, Any]) -> Any:
    peft: Any = importlib.import_module("peft")
    adapter = peft.LoraConfig(r=4, target_modules=["q_proj", "lm_head"])
    return train(rank, 2, folder, "zbv", is_in_folder=True, keywords={"peft_config": adapter}, **sizes)


def test_a_new_adapter_on_a_folder(ranks: RankPool, tmp_path: Path) -> None:
    """What is written is what was trained, and evaluated last."""
    import peft

    got, _ = ranks.run(2, with_a_new_adapter, tmp_path, {"max_steps": 2, "label_smoothing_factor": 0.1})
    assert {name.rsplit(".", 2)[1] for name in got["weights"]} == {"lora_A", "lora_B"}
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "start")
    adapted = peft.PeftModel.from_pretrained(model, tmp_path / "final").eval()
    batches = [trainers.collate(trainers.samples(10, seed=1)[at : at + 4]) for at in (0, 4, 8)]
    smoother = transformers.trainer_pt_utils.LabelSmoother(0.1)
    with torch.no_grad():
        losses = [smoother(adapted(**batch), batch["labels"], shift_labels=True) for batch in batches]
    wanted = float(torch.stack([losses[0], losses[0], losses[1], losses[1], losses[2]]).mean())
    found = next(row["eval_loss"] for row in reversed(got["logs"]) if "eval_loss" in row)
    assert found == pytest.approx(wanted, abs=1e-5)


def test_adapters_go_on_under_another_schedule(ranks: RankPool, tmp_path: Path) -> None:
    case = {"is_adapted": True, "save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    through, _ = ranks.run(2, run, 2, tmp_path / "through", "1f1b", case)
    saved = tmp_path / "through" / "checkpoint-2"
    got, _ = ranks.run(2, run, 2, tmp_path / "resumed", "zbv", {**case, "resume": saved})
    trainers.assert_same({**got, "logs": []}, {**through, "logs": []})
    more = ranks.run(4, run, 4, tmp_path / "by four", "gpipe", {**case, "resume": saved})[0]
    trainers.assert_same({**more, "logs": []}, {**through, "logs": []})


def resume(rank: int, num_ranks: int, folder: Path, schedule: str | None, saved: Path, case: dict[str, Any]) -> str:
    try:
        train(rank, num_ranks, folder, schedule, **case, resume=saved)
    except (ValueError, OSError) as error:
        return str(error)
    return "no error"


def test_what_a_plain_trainer_saved_is_refused(ranks: RankPool, tmp_path: Path) -> None:
    """Its optimizer's state was ignored without a word. The plain trainer does not ignore ours either."""
    case = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "eval_strategy": "no"}
    ranks.run(1, run, 1, tmp_path / "plain", None, case)
    ranks.run(2, run, 2, tmp_path / "pipeline", "1f1b", case)
    of_plain, ours = (tmp_path / one / "checkpoint-2" for one in ("plain", "pipeline"))
    (error,) = ranks.run(1, resume, 1, tmp_path / "a", None, ours, case)
    assert "optimizer.pt" in error
    for error in ranks.run(2, resume, 2, tmp_path / "b", "1f1b", of_plain, case):
        assert "is of a trainer without a pipeline, whose optimizer.pt says of no state whose it is" in error


def test_reports_of_tensorboard(ranks: RankPool, tmp_path: Path) -> None:
    """One run, of the first rank."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    case = {"report_to": "tensorboard"}
    want, got = tmp_path / "plain", tmp_path / "pipeline"
    ranks.run(1, logged_to, 1, want, None, case)
    ranks.run(2, logged_to, 2, got, "1f1b", case)
    found = []
    for folder in (want, got):
        (file,) = folder.rglob("events.out.tfevents.*")
        events = EventAccumulator(str(file)).Reload()
        found.append({tag: [one.value for one in events.Scalars(tag)] for tag in events.Tags()["scalars"]})
    assert found[0].keys() == found[1].keys()
    assert found[0]["train/loss"] == found[1]["train/loss"]


def logged_to(rank: int, num_ranks: int, folder: Path, schedule: str | None, case: dict[str, Any]) -> None:
    import os

    os.environ["TENSORBOARD_LOGGING_DIR"] = str(folder / "runs")
    try:
        run(rank, num_ranks, folder, schedule, case)
    finally:
        os.environ.pop("TENSORBOARD_LOGGING_DIR", None)


def scaled(rank: int, num_ranks: int, folder: Path, schedule: str | None) -> dict[str, Any]:
    """fp16, which accelerate has on GPUs only, as far as its scaler goes: with float32 stages, and Infs in a step."""
    from unittest import mock

    from accelerate import Accelerator

    from megapipe.integrations.transformers import trainer as ours

    made = Accelerator.__init__

    def init(self: Any, *arguments: Any, **keywords: Any) -> None:
        made(self, *arguments, **keywords)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4, growth_interval=3)

    def scaler(device: str) -> Any:
        return ours_scaler(device, init_scale=2.0**4, growth_interval=3)

    def unscale(self: Any, optimizer: Any = None) -> None:
        for one in self._optimizers:
            self.scaler.unscale_(getattr(one, "optimizer", one))

    ours_scaler = ours.PipelinedGradScaler
    with (
        mock.patch.object(Accelerator, "__init__", init),
        mock.patch.object(Accelerator, "unscale_gradients", unscale),
        mock.patch.object(ours, "PipelinedGradScaler", scaler),
        mock.patch.object(trainers, "clip_like_megapipe", scaling_clip),
    ):
        return train(rank, num_ranks, folder, schedule, keywords={"compute_loss_func": infinite_at_times}, max_steps=6)


def scaling_clip(trainer: Any) -> None:
    import megapipe

    def clip(parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        trainer.accelerator.unscale_gradients()
        return megapipe.clip_grad_norm_(trainer.model, max_norm, norm_type)

    trainer.accelerator.clip_grad_norm_ = clip


def infinite_at_times(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    loss = trainers.loss_func(outputs, labels, num_items_in_batch)
    return loss * torch.inf if outputs["logits"].requires_grad and int(num_items_in_batch) % 2 == 0 else loss


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_a_scaler_skips_steps_on_all_ranks(ranks: RankPool, schedule: str, tmp_path: Path) -> None:
    (want,) = ranks.run(1, scaled, 1, tmp_path / "plain", None)
    norms = torch.tensor([row["grad_norm"] for row in want["logs"] if "grad_norm" in row])
    assert 0 < norms.isfinite().sum() < len(norms)
    for got in ranks.run(2, scaled, 2, tmp_path / "pipeline", schedule):
        trainers.assert_same({**got, "logs": []}, {**want, "logs": []})


# trl

OF_TRL: dict[str, tuple[int, int, str, str, dict[str, Any]]] = {
    "nll": (1, 2, "sft", "1f1b", {}),
    "nll, two chunks per rank": (1, 2, "sft", "zbv", {"gradient_checkpointing": False}),
    "dft": (1, 2, "sft", "1f1b", {"loss_type": "dft"}),
    "label smoothing": (1, 2, "sft", "1f1b", {"label_smoothing_factor": 0.1}),
    "packing": (1, 2, "sft", "1f1b", {"packing": True}),
    "experts": (1, 2, "sft", "zbv", {"model_kind": "qwen3-moe"}),
    "replicas": (2, 4, "sft", "1f1b", {"pp": 2, "gradient_accumulation_steps": 2}),
    "preferences": (1, 2, "dpo", "1f1b", {}),
    "preferences, two chunks per rank": (1, 2, "dpo", "zbv", {"loss_type": ["sigmoid"]}),
    "preferences, replicas": (2, 4, "dpo", "1f1b", {"pp": 2, "gradient_accumulation_steps": 2}),
}


def run_trl(
    rank: int, num_ranks: int, folder: Path, kind: str, schedule: str | None, case: dict[str, Any]
) -> dict[str, Any]:
    case = {name: value for name, value in case.items() if schedule is not None or name != "pp"}
    return train_with_trl(rank, num_ranks, folder, kind, schedule, **case)


@pytest.mark.parametrize("name", OF_TRL)
def test_trl_trains_as_without_a_pipeline(ranks: RankPool, name: str, tmp_path: Path) -> None:
    """With all its metrics, on every rank."""
    replicas, num_ranks, kind, schedule, case = OF_TRL[name]
    want = ranks.run(replicas, run_trl, replicas, tmp_path / "plain", kind, None, case)[0]
    for got in ranks.run(num_ranks, run_trl, num_ranks, tmp_path / "pipeline", kind, schedule, case):
        trainers.assert_same(got, want, of_logs=1e-6)

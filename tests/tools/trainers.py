"""Runs of transformers' Trainer, plain in one process or in front of a pipeline, with all that they log and write."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from tools import ranks
from tools.hf_models import check_once
from torch import Tensor, nn

import megapipe
from megapipe import parallel_state
from megapipe.integrations.transformers import build

ranks.IMPORTED_ONCE += [name for name in ["transformers.trainer"] if name not in ranks.IMPORTED_ONCE]

build.check_cut = check_once

OFFLINE = {"TRL_DISABLE_TELEMETRY": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
VOCABULARY = 64
MEASURED = ("runtime", "per_second", "preparation_time", "total_flos")
"""What two runs cannot have in common, and what is looked at by itself."""


def samples(count: int, seed: int = 0) -> list[dict[str, Tensor]]:
    """Sequences of several lengths."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(6, 17, (count,), generator=generator).tolist()
    firsts, steps = (torch.randint(1, 8, (count,), generator=generator).tolist() for _ in range(2))
    return [{"input_ids": (a + b * torch.arange(n)) % (VOCABULARY - 1) + 1} for n, a, b in zip(lengths, firsts, steps)]


def collate(examples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    longest = max(len(one["input_ids"]) for one in examples)
    ids = torch.zeros(len(examples), longest, dtype=torch.long)
    mask, labels = ids.clone(), torch.full_like(ids, -100)
    for row, one in enumerate(examples):
        n = len(one["input_ids"])
        ids[row, :n], mask[row, :n], labels[row, :n] = one["input_ids"], 1, one["input_ids"]
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def collate_at_random(examples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Some labels are left out, drawn from torch's own generator."""
    batch = collate(examples)
    batch["labels"][torch.rand(batch["labels"].shape) < 0.2] = -100
    return batch


def make_model(kind: str = "llama", **changes: Any) -> Any:
    transformers.set_seed(0)
    sizes = {"vocab_size": VOCABULARY, "num_hidden_layers": 4, "hidden_size": 32, "intermediate_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}
    own = {
        "llama": ("LlamaConfig", {}),
        "gpt2": ("GPT2Config", {"tie_word_embeddings": True}),  # with dropout
        "qwen3-moe": ("Qwen3MoeConfig", {
            "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
            "output_router_logits": True, "router_aux_loss_coef": 0.1,
        }),
    }  # fmt: skip
    name, more = own[kind]
    config = getattr(transformers, name)(**{**sizes, **heads, **more, **changes})
    return transformers.AutoModelForCausalLM.from_config(config)


class Log(transformers.TrainerCallback):
    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self.rows.append(dict(logs))


@contextlib.contextmanager
def started(rank: int, world_size: int) -> Iterator[None]:
    """As torchrun starts a process; with one rank as python does. What accelerate keeps for the process ends."""
    accelerate: Any = importlib.import_module("accelerate.state")
    own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    before = dict(os.environ)
    torch.set_num_threads(1)
    os.environ.update(OFFLINE)
    if world_size > 1:
        os.environ.update({name: str(value) for name, value in own.items()})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        parallel_state.destroy_model_parallel()
        accelerate.AcceleratorState._reset_state(reset_partial_state=True)
        accelerate.GradientState._reset_state()


def clip_like_megapipe(trainer: Any) -> None:
    """Let a plain trainer compute norms as a pipeline does, in float64: the one difference that there is in float32."""

    def clip(parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor:
        return megapipe.clip_grad_norm_(trainer.model, max_norm, norm_type)

    trainer.accelerator.clip_grad_norm_ = clip


def arguments(folder: Path, **changes: Any) -> Any:
    options = {
        "output_dir": str(folder), "use_cpu": True, "per_device_train_batch_size": 2, "per_device_eval_batch_size": 4,
        "gradient_accumulation_steps": 4, "max_steps": 3, "eval_strategy": "steps", "eval_steps": 2,
        "save_strategy": "no", "learning_rate": 1e-2, "lr_scheduler_type": "cosine", "warmup_steps": 2, "seed": 3,
        "weight_decay": 0.1, "logging_steps": 1, "disable_tqdm": True, "report_to": "none",
    }  # fmt: skip
    return transformers.TrainingArguments(**{**options, **changes})


def result_of(trainer: Any, log: Log, folder: Path) -> dict[str, Any]:
    """What was logged, and the weights that were written, which every rank reads."""
    trainer.save_model(str(folder / "final"))
    if dist.is_initialized():
        dist.barrier()
    flos = [row.pop("total_flos") for row in log.rows if "total_flos" in row]
    logs = [{k: v for k, v in row.items() if not any(word in k for word in MEASURED)} for row in log.rows]
    files: Any = importlib.import_module("safetensors.torch")
    (file,) = [*(folder / "final").glob("*model.safetensors")]
    # No tensors: they would be sent to another process by a thread that stays.
    return {"logs": logs, "flos": flos, "weights": {k: v.numpy() for k, v in files.load_file(file).items()}}


def largest_difference(one: Any, other: Any) -> float:
    """0 where all numbers are the same."""
    if isinstance(one, dict):
        assert one.keys() == other.keys(), one.keys() ^ other.keys()
        return max((largest_difference(one[key], other[key]) for key in one), default=0.0)
    if isinstance(one, (list, tuple)):
        assert len(one) == len(other), (one, other)
        return max(map(largest_difference, one, other), default=0.0)
    if isinstance(one, Tensor):
        assert one.shape == other.shape
        return float((one.double() - other.double()).abs().max()) if one.numel() else 0.0
    if hasattr(one, "dtype"):
        return largest_difference(torch.as_tensor(one), torch.as_tensor(other))
    return 0.0 if one == other else abs(one - other)


class OwnLoss:
    """A compute_loss that reads the logits and calls the one above it."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        whole: Any = super()
        loss, outputs = whole.compute_loss(model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch)
        loss = loss + 1e-3 * outputs.logits.square().mean()
        return (loss, outputs) if return_outputs else loss


def loss_func(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    logits = outputs["logits"][:, :-1].flatten(0, 1)
    loss = nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum")
    return 2.0 * loss / (1 if num_items_in_batch is None else num_items_in_batch)


def accuracy(prediction: Any) -> dict[str, float]:
    predictions = prediction.predictions
    if isinstance(predictions, tuple):  # of models with experts
        predictions = next(one for one in predictions if one.ndim == 3)
    guesses, labels = torch.tensor(predictions).argmax(-1)[:, :-1], torch.tensor(prediction.label_ids)[:, 1:]
    return {"accuracy": float((guesses == labels)[labels != -100].double().mean()), "count": len(labels)}


def guessed(logits: Any, labels: Tensor) -> Tensor:
    return nn.functional.one_hot(logits.argmax(-1), VOCABULARY)


class Stream(torch.utils.data.IterableDataset):
    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Any]:
        return iter(self.rows)


def draw_adapters(model: Any) -> None:
    """Other than zeros, by their names."""
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            own = torch.Generator().manual_seed(sum(map(ord, name.removeprefix("base_model.model."))))
            parameter.data.copy_(0.05 * torch.randn(parameter.shape, generator=own))


def adapted(model: Any) -> Any:
    peft: Any = importlib.import_module("peft")
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"))
    draw_adapters(model)
    return model


class Writes(transformers.TrainerCallback):
    """Lets the model go on with a prompt in the middle of training, and saves it at the end."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.written = folder, []  # type: tuple[Path, list[Any]]

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        prompts = torch.tensor([[3, 5, 7], [2, 4, 6]])
        found = model.generate(input_ids=prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=4)
        self.written.append(found.tolist())

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        model.save_pretrained(str(self.folder / "by callback"))


def train(
    rank: int,
    num_ranks: int,
    folder: Path,
    schedule: str | None = None,
    *,
    pp: int | None = None,
    kind: str = "llama",
    tied: bool = False,
    sizes: dict[str, Any] | None = None,
    has_own_loss: bool = False,
    is_stream: bool = False,
    is_adapted: bool = False,
    is_in_folder: bool = False,
    writes: bool = False,
    columns: bool = False,
    stops_early: bool = False,
    resume: Path | None = None,
    keywords: dict[str, Any] | None = None,
    predicts: bool = False,
    **changes: Any,
) -> dict[str, Any]:
    """Train a small model. Without a schedule by the plain trainer.

    Args:
        columns: the data are a `datasets.Dataset` with a column that no model reads.
    """
    with started(rank, num_ranks):
        model: Any = make_model(kind, tie_word_embeddings=tied or kind == "gpt2", **(sizes or {}))
        model = adapted(model) if is_adapted else model
        if is_in_folder:
            if rank == 0:
                model.save_pretrained(folder / "start")
            if dist.is_initialized():
                dist.barrier()
        rows, log, writing = samples(44), Log(), Writes(folder)
        early = [transformers.EarlyStoppingCallback(2)] if stops_early else []
        given = {
            "args": arguments(folder, **changes), "data_collator": collate, "eval_dataset": samples(10, seed=1),
            "train_dataset": Stream(rows) if is_stream else rows, **(keywords or {}),
        }  # fmt: skip
        if columns:
            given["train_dataset"] = with_columns(rows)
        given["callbacks"] = [log, *early, *([writing] if writes else [])]
        base: Any = transformers.Trainer
        if schedule is not None:
            base = importlib.import_module("megapipe.integrations.transformers").PipelineTrainer
            given |= {"pipeline_parallel_size": pp, "schedule": schedule}
        made = type("Own", (OwnLoss, base), {}) if has_own_loss else base
        trainer = made(model=str(folder / "start") if is_in_folder and schedule is not None else model, **given)
        if schedule is None:
            parallel_state.initialize_model_parallel(1)
            clip_like_megapipe(trainer)
        trainer.train(resume_from_checkpoint=resume and str(resume))
        result = result_of(trainer, log, folder)
        best = trainer.state.best_model_checkpoint
        result["state"] = [trainer.state.global_step, str(best and Path(best).name)]
        result["written"] = writing.written
        if predicts:
            found = trainer.predict(samples(10, seed=1))
            predictions = found.predictions  # of models with experts a tuple
            result["predictions"] = predictions[1] if isinstance(predictions, tuple) else predictions
            result["metrics"] = {k: v for k, v in found.metrics.items() if k.split("_", 1)[1] in ("loss", "accuracy")}
        return result


def with_columns(rows: list[dict[str, Tensor]]) -> Any:
    datasets: Any = importlib.import_module("datasets")
    whole = [{**row, "title": "of no model", "position_hint": 1} for row in rows]
    return datasets.Dataset.from_list(whole).with_format("torch", columns=["input_ids"], output_all_columns=True)


def assert_same(got: dict[str, Any], want: dict[str, Any], rounding: float = 0.0, of_logs: float = 1e-15) -> None:
    """Weights and predictions to the last bit, where `rounding` is 0. Norms are in float64, and added up stage by
    stage. The loss of an evaluation is a sum over parts of its batches, and rounds."""
    evaluated = ("eval_loss", "test_loss")
    for one, other in zip(got["logs"], want["logs"]):
        of_eval = {name for name in one if name in evaluated}
        assert one.keys() == other.keys()
        for name in one:
            most = 1e-6 if name in of_eval else max(rounding, of_logs) * max(1.0, abs(other[name]))
            assert largest_difference(one[name], other[name]) <= most, (name, one[name], other[name])
    assert len(got["logs"]) == len(want["logs"])
    for name in ("weights", "predictions", "written", "state"):
        if name in want:
            same = got[name] == want[name] if name == "state" else largest_difference(got[name], want[name]) <= rounding
            assert same, (name, got[name] if name == "state" else largest_difference(got[name], want[name]))
    for name, value in want.get("metrics", {}).items():
        assert abs(got["metrics"][name] - value) <= 1e-6


def run(rank: int, num_ranks: int, folder: Path, schedule: str | None, case: dict[str, Any]) -> dict[str, Any]:
    """`train`, as a pool of ranks calls it."""
    return train(rank, num_ranks, folder, schedule, **case)


def compare(
    pool: ranks.RankPool, num_ranks: int, schedule: str, case: dict[str, Any], folder: Path, rounding: float = 0.0
) -> None:
    """On every rank, all is as by the plain trainer in one process."""
    (want,) = pool.run(1, run, 1, folder / "plain", None, case)
    for got in pool.run(num_ranks, run, num_ranks, folder / "pipeline", schedule, case):
        assert_same(got, want, rounding)
        assert got["flos"] == want["flos"] or case.get("tied")  # which count on two stages


def compare_replicas(pool: ranks.RankPool, schedule: str, case: dict[str, Any], folder: Path) -> None:
    """Two pipelines of two ranks are two processes of DDP. The trainer logs the mean of all ranks, here of four with
    two values."""
    case = {"gradient_accumulation_steps": 2, "keywords": {"compute_metrics": accuracy}, **case}
    want, _ = pool.run(2, run, 2, folder / "plain", None, case)
    for got in pool.run(4, run, 4, folder / "pipeline", schedule, {**case, "pp": 2}):
        assert_same(got, want, rounding=1e-6 if "tied" in case else 0.0, of_logs=1e-6)

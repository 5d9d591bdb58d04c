"""Runs of trl's trainers, plain in one process or in front of a pipeline."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import torch.distributed as dist
import transformers
from tools.trainers import Log, arguments, clip_like_megapipe, make_model, result_of, started

from megapipe import parallel_state

WORDS = [f"w{number}" for number in range(60)]


def tokenizer() -> Any:
    tokenizers: Any = importlib.import_module("tokenizers")
    vocabulary = {word: number for number, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, "<unk>")),
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
    )
    made.backend_tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return made


def text(seed: int, length: int) -> str:
    return " ".join(WORDS[(seed * 3 + (seed % 5 + 1) * place) % 60] for place in range(length))


def rows_of(kind: str, first: int, count: int) -> list[dict[str, str]]:
    seeds = range(first, first + count)
    if kind == "sft":
        return [{"text": text(seed, 6 + seed % 9)} for seed in seeds]
    return [
        {"prompt": text(seed, 4), "chosen": text(seed + 1, 3 + seed % 4), "rejected": text(seed + 2, 5)}
        for seed in seeds
    ]


def dataset(folder: Path, name: str, rows: list[dict[str, str]]) -> Any:
    """In a folder: what is in memory only has a cache of each process."""
    made: Any = importlib.import_module("datasets").Dataset
    if not dist.is_initialized() or dist.get_rank() == 0:
        made.from_list(rows).save_to_disk(str(folder / name))
    if dist.is_initialized():
        dist.barrier()
    return made.load_from_disk(str(folder / name))


def train_with_trl(
    rank: int,
    num_ranks: int,
    folder: Path,
    kind: str,
    schedule: str | None = None,
    *,
    pp: int | None = None,
    model_kind: str = "llama",
    **changes: Any,
) -> dict[str, Any]:
    """`kind` is "sft" or "dpo". Without a schedule by trl's own trainer."""
    with started(rank, num_ranks):
        trl: Any = importlib.import_module("trl")
        base = arguments(folder, max_steps=3).to_dict()
        options = {name: base[name] for name in (
            "output_dir", "use_cpu", "per_device_train_batch_size", "per_device_eval_batch_size", "max_steps",
            "gradient_accumulation_steps", "eval_strategy", "eval_steps", "save_strategy", "learning_rate", "seed",
            "logging_steps", "disable_tqdm", "report_to", "lr_scheduler_type", "warmup_steps",
        )}  # fmt: skip
        config, maker = {"sft": (trl.SFTConfig, trl.SFTTrainer), "dpo": (trl.DPOConfig, trl.DPOTrainer)}[kind]
        own = {"precompute_ref_log_probs": True} if kind == "dpo" else {}
        log = Log()
        given = {
            "model": make_model(model_kind), "args": config(max_length=16, bf16=False, **{**options, **own, **changes}),
            "train_dataset": dataset(folder, "train", rows_of(kind, 0, 36)),
            "eval_dataset": dataset(folder, "eval", rows_of(kind, 48, 10)),
            "processing_class": tokenizer(), "callbacks": [log],
        }  # fmt: skip
        if schedule is not None:
            ours: Any = importlib.import_module("megapipe.integrations.transformers")
            maker = {"sft": ours.PipelineSFTTrainer, "dpo": ours.PipelineDPOTrainer}[kind]
            given |= {"pipeline_parallel_size": pp, "schedule": schedule}
        trainer = maker(**given)
        if schedule is None:
            parallel_state.initialize_model_parallel(1)
            clip_like_megapipe(trainer)
        trainer.train()
        return result_of(trainer, log, folder)

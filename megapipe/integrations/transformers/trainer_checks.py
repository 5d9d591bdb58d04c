"""What a trainer in front of a pipeline needs of transformers and accelerate, and what does not go with it."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from ... import parallel_state

TESTED = "transformers 5.20 to 5.24, accelerate 1.10 to 1.15"

OF_TRAINER = (
    *("training_step", "prediction_step", "evaluation_loop", "create_optimizer", "save_model", "get_batch_samples"),
    *("create_accelerator_and_postprocess", "floating_point_ops", "get_tp_size"),
    *("_wrap_model", "_get_num_items_in_batch", "_save_optimizer_and_scheduler", "_load_optimizer_and_scheduler"),
    *("_load_from_checkpoint", "_load_best_model"),
)
"""Methods of transformers' Trainer that are overridden. Those of the last two rows are private."""

OF_ACCELERATOR = ("backward", "clip_grad_norm_", "gather", "autocast", "unscale_gradients")
"""Methods of accelerate's Accelerator that are used or replaced, besides `scaler`, `native_amp` and
`state.device_mesh`."""

REFUSED_ARGS = {
    "torch_compile": "stages are not compiled",
    "deepspeed": "it has an engine of its own",
    "fsdp": "it would shard a whole model: take replicas, by a pipeline_parallel_size below the number of ranks",
    "parallelism_config": "what ranks there are is said by pipeline_parallel_size",
    "auto_find_batch_size": "the rank that is out of memory would begin anew alone",
    "neftune_noise_alpha": "it adds noise to an embedding, which the first stage has alone",
    "use_liger_kernel": "it replaces the forward of a whole model",
    "bf16_full_eval": "stages keep their dtype: save the model, and evaluate it in bfloat16",
    "fp16_full_eval": "stages keep their dtype: save the model, and evaluate it in float16",
    "eval_use_gather_object": "it gathers from all ranks, and ranks of a pipeline have the same",
    "activation_offloading": 'set pipeline_options={"offload_activations": ...}',
    "push_to_hub": "it was not tried: upload the folder after save_model",
}
"""Fields of TrainingArguments, or of trl's, with the reason."""

REFUSED_KEYWORDS = {
    "model_init": "chunks are made once, so there is no hyperparameter search either: pass a model",
    "optimizers": "they hold parameters of a whole model: pass optimizer_cls_and_kwargs, or override create_optimizer",
    "quantization_config": "quantised weights are not cut into stages",
    "ref_model": "it would be a second pipeline: set precompute_ref_log_probs=True, and leave it out",
}

REFUSED_TRAINERS = {
    "KTOTrainer": "it calls the model for a second batch in a step",
    **dict.fromkeys(["GRPOTrainer", "RLOOTrainer"], "it writes texts within a step: docs/huggingface.md does GRPO"),
    **dict.fromkeys(["RewardTrainer", "PRMTrainer"], "its model has another head than for tokens"),
    **dict.fromkeys(
        ["DistillationTrainer", "GKDTrainer", "OnlineDPOTrainer"], "it has a second model, or writes texts"
    ),
    "Seq2SeqTrainer": "encoder-decoders are cut by megapipe.split alone",
}

LAYERWISE = ("lomo", "layerwise", "galore", "apollo")


def check_names() -> None:
    """Raises ImportError where transformers or accelerate lack something that is overridden here."""
    for package, kind, names in (
        ("transformers", "Trainer", OF_TRAINER),
        ("accelerate", "Accelerator", OF_ACCELERATOR),
    ):
        module: Any = importlib.import_module(package)
        if missing := [name for name in names if not hasattr(getattr(module, kind), name)]:
            raise ImportError(
                f"{kind} of {package} {module.__version__} has no {', '.join(missing)}: take {TESTED}, with which "
                "PipelineTrainer was tested."
            )


def check_trainer(kind: type, model: Any, args: Any, keywords: Mapping[str, Any]) -> None:
    """Raises ValueError for what would be ignored without a word, be wrong, or hang."""
    if args is None:
        raise ValueError("PipelineTrainer needs args: pass TrainingArguments(output_dir, ...).")
    for name in [one.__name__ for one in kind.__mro__ if one.__name__ in REFUSED_TRAINERS]:
        raise ValueError(f"{name} does not work with a pipeline: {REFUSED_TRAINERS[name]}.")
    for name, reason in REFUSED_ARGS.items():
        if getattr(args, name, None):
            raise ValueError(f"{name} does not work with a pipeline: {reason}.")
    for name, reason in REFUSED_KEYWORDS.items():
        if keywords.get(name) not in (None, (None, None)):
            raise ValueError(f"{name} does not work with a pipeline: {reason}.")
    optimizer, sampling = str(args.optim).lower(), getattr(args, "train_sampling_strategy", None)
    if any(word in optimizer for word in LAYERWISE):
        raise ValueError(
            f"optim={optimizer} does not work with a pipeline: it goes through the layers of a whole model."
        )
    if sampling == "batch_rebalance":
        raise ValueError("batch_rebalance does not work with a pipeline: it gives each rank batches of its own.")
    if args.n_gpu > 1:
        raise ValueError(f"one process has {args.n_gpu} GPUs: start one for each by torchrun.")
    if isinstance(model, (str, os.PathLike)):
        if not os.path.isdir(model):
            raise ValueError(
                f"{model} is no folder: download the model first, by huggingface_hub.snapshot_download, and pass its "
                "folder, or pass AutoModelForCausalLM.from_pretrained(...)."
            )
        if getattr(args, "model_init_kwargs", None):
            raise ValueError("model_init_kwargs are not read for a folder: set pipeline_options, such as dtype.")
    elif not isinstance(model, torch.nn.Module):
        raise ValueError(f"model must be a folder or a model of transformers, got a {type(model).__name__}.")


def join_pipeline(args: Any, size: int | None) -> None:
    """Make the process groups, where there are none yet: ranks of a pipeline follow each other, as accelerate has it
    for ranks that read the same batches.

    Raises:
        ValueError: where the number of ranks does not fit, or there are other groups.
    """
    num_ranks = args.world_size  # asking for it starts torch.distributed
    size = size or num_ranks
    if num_ranks % size:
        raise ValueError(f"{num_ranks} ranks cannot form pipelines of {size}: start a multiple of that by torchrun.")
    if not dist.is_initialized():
        return
    if not parallel_state.model_parallel_is_initialized():
        sizes = num_ranks // size, size
        parallel_state.initialize_from_mesh(init_device_mesh(args.device.type, sizes, mesh_dim_names=("dp", "pp")))
    ranks = dist.get_process_group_ranks(parallel_state.get_pipeline_model_parallel_group())
    if ranks != [*range(ranks[0], ranks[0] + size)]:
        raise ValueError(
            f"there is a pipeline of ranks {ranks} already, and PipelineTrainer needs {size} that follow each other: "
            "call parallel_state.destroy_model_parallel() first, on every rank."
        )


def check_batches(batches: Sequence[Any], device: torch.device) -> None:
    """Raises ValueError, on all ranks of a pipeline, where they have read different batches: the first stage would
    embed other tokens than the last one has labels for."""
    if not dist.is_initialized():
        return
    own = torch.tensor([len(batches), 0], dtype=torch.float64, device=device)
    for value in (one for batch in batches for one in batch.values() if isinstance(one, Tensor)):
        own[1] += _sum_of(value).to(device)
    both = torch.stack([own, -own])
    dist.all_reduce(both, dist.ReduceOp.MAX, parallel_state.get_pipeline_model_parallel_group())
    if not torch.equal(both[0], -both[1]):
        raise ValueError(
            "the ranks of a pipeline have read different batches: a dataset or a collator that draws at random does so "
            "in workers that each rank seeds otherwise. Set dataloader_num_workers=0, or draw beforehand."
        )


def _sum_of(tensor: Tensor) -> Tensor:
    """The same for the same numbers in the same order. The host does not wait for it."""
    flat = tensor.detach().flatten().double().nan_to_num()
    places = torch.arange(1, len(flat) + 1, device=flat.device, dtype=flat.dtype)
    return flat @ places

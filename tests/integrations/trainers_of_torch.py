"""torchtitan's trainer and NeMo Automodel's AutoPipeline on the CPU: three steps by torch's schedule, three by ours.

    python tests/integrations/trainers_of_torch.py

`make test-torchtitan` installs both and runs this. A line for each case says how torch's losses and parameters differ
from ours; they are to be the same to the last digit. What is replaced of the trainers are kernels and questions for
GPUs, the data, and what a newer torch has.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
import tempfile
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._functorch.partitioners  # before triton is replaced
import torch._inductor.compile_fx
import torch.distributed as dist
import torch.distributed.pipelining.schedules as theirs
import torch.nn.functional as F
import torch.utils._triton as triton_of_torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from tools.absent import Absent

from megapipe import weight_grad
from megapipe.integrations.torch_pipelining import adopt
from megapipe.proving.local_ranks import on_local_ranks

NUM_STEPS = 3
PATIENCE = 300.0

Result = tuple[list[float], list[float]]
"""The loss of each step, and the sum of each stage's parameters behind the last one."""


def prepare() -> None:
    """What it takes without a GPU, and with a torch that is older than the one that torchtitan is made for."""
    for is_there in (triton_of_torch.has_triton_package, triton_of_torch.has_triton):
        is_there()  # asked once
    Absent("triton", "datasets", "wandb", "torch.utils.tensorboard")
    torch.compile = lambda function=None, **_: function or (lambda other: other)  # type: ignore[assignment]


# torchtitan


def sdpa(self: Any, q_BLNH: Any, k_BLNH: Any, v_BLNH: Any, *, scale: Any = None, **options: Any) -> Any:  # noqa: N803
    """Stands for FlexAttention, which has no backward on the CPU. Its arguments are known by name."""
    heads = (one.transpose(1, 2) for one in (q_BLNH, k_BLNH, v_BLNH))
    is_grouped = options.get("enable_gqa", False)
    return F.scaled_dot_product_attention(*heads, is_causal=True, scale=scale, enable_gqa=is_grouped).transpose(1, 2)


def step_of_lists(own: Callable[..., Any]) -> Callable[..., Any]:
    """torch's step, which takes lists of microbatches from 2.14 on."""

    def step(
        self: Any, *args: Any, arg_mbs: Any = None, kwarg_mbs: Any = None, target_mbs: Any = None, **options: Any
    ) -> Any:
        if arg_mbs is kwarg_mbs is target_mbs is None:
            return own(self, *args, **options)
        for stage in getattr(self, "_stages", None) or [self._stage]:
            stage.has_backward = self._has_backward
            stage.clear_runtime_states()
        return self._step_microbatches(arg_mbs, kwarg_mbs, target_mbs, **options)

    return step


def titans_config(schedule: str, is_chunked: bool, num_replicas: int) -> Any:
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.models.llama3 import config_registry

    class Data(BaseDataLoader):
        @dataclasses.dataclass(kw_only=True, slots=True)
        class Config(BaseDataLoader.Config):
            pass

        def __init__(self, config: Any, *, seq_len: int, local_batch_size: int, **_: Any) -> None:
            self.shape = local_batch_size, seq_len + 1

        def __iter__(self) -> Any:
            generator = torch.Generator().manual_seed(7)
            while True:
                text = torch.randint(0, 2048, self.shape, generator=generator)
                positions = torch.arange(self.shape[1] - 1).repeat(self.shape[0], 1)
                yield {"input": text[:, :-1].contiguous(), "positions": positions}, text[:, 1:].contiguous()

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: Any) -> None:
            pass

    config = config_registry.llama3_debugmodel()
    if not is_chunked:
        config.loss = config.loss.loss_fn
    sizes = {"local_batch_size": 8, "seq_len": 32, "steps": NUM_STEPS, "mixed_precision_param": "float32"}
    config.training = dataclasses.replace(config.training, disable_cuda_graphs=True, **sizes)
    parallelism = config.parallelism
    parallelism.pipeline_parallel_degree, parallelism.pipeline_parallel_schedule = 2, schedule
    parallelism.pipeline_parallel_microbatch_size, parallelism.data_parallel_shard_degree = 2, num_replicas
    if num_replicas > 1:
        parallelism.spmd_backend = "partial_dtensor"
    config.dataloader, config.validator.enable, config.activation_checkpoint = Data.Config(), False, None
    config.debug.seed, config.checkpoint.enable, config.hf_assets_path = 3, False, "tokenizer"
    return config


def write_tokenizer(folder: Path) -> None:
    """The trainer wants one, and encodes nothing."""
    from tokenizers import Tokenizer, models

    folder.mkdir(exist_ok=True)
    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(folder / "tokenizer.json"))


def titan(is_ours: bool, schedule: str, is_chunked: bool, num_replicas: int) -> Result:
    """torchtitan's small Llama on 2 stages or 4, by its trainer."""
    from torchtitan.tools import utils

    utils.device_type, utils.device_module = "cpu", Cuda()
    utils.get_local_device = lambda: torch.device("cpu")
    from torch.distributed.fsdp import FSDPModule
    from torchtitan.distributed import utils as dist_utils
    from torchtitan.models.common.attention import FlexAttention

    FlexAttention.forward = sdpa
    dist_utils.set_pg_timeouts = lambda *_, **__: None  # calls a function of a newer torch
    if torch.__version__ < "2.14":
        for cls in (theirs.PipelineScheduleSingle, theirs.PipelineScheduleMulti):
            cls.step = step_of_lists(cls.step)  # type: ignore[method-assign]
    config = titans_config(schedule, is_chunked, num_replicas)
    trainer = config.build()
    if is_ours:
        adopt(trainer.pp_schedule)
    for module in (module for part in trainer.model_parts for module in part.modules()):
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # as gloo needs
    losses, own_step = [], trainer.forward_backward_step

    def step(**options: Any) -> Any:
        losses.append(float((loss := own_step(**options)).sum()))
        return loss

    trainer.forward_backward_step = step
    trainer.train()
    layers = [one for part in trainer.model_parts for one in part.modules() if isinstance(one, torch.nn.Linear)]
    leave = {isinstance(layer, weight_grad.Linear) for layer in layers}
    assert leave == {is_ours and "ZeroBubble" in schedule}, "linear layers leave their weight gradients to W"
    return losses, [sum_of_parameters(part) for part in trainer.model_parts]


class Cuda(types.SimpleNamespace):
    """Stands for torch.cuda."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None

    def device_count(self) -> int:
        return 1

    def get_device_name(self, device: Any = None) -> str:
        return "cpu"

    def get_device_properties(self, device: Any) -> Any:
        return types.SimpleNamespace(total_memory=2**34)

    def memory_stats(self, device: Any = None) -> dict[str, int]:
        return {}


# Automodel


def automodel(is_ours: bool, schedule: str, is_static: bool) -> Result:
    """A Llama of transformers by AutoPipeline. If `is_static`, the last batch is longer, and all are told by
    `update_seq_len`."""
    import nemo_automodel.components.distributed.pipelining.functional as functional
    from nemo_automodel.components.distributed.pipelining.autopipeline import AutoPipeline
    from torch.distributed.device_mesh import init_device_mesh
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 4}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, attn_implementation="sdpa", use_cache=False))
    functional._warmup_pipeline_stage_neighbors = lambda stage: None  # calls torch.cuda
    pipe = AutoPipeline(
        world_mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("pp",)),
        pp_schedule=schedule,
        pp_batch_size=8,
        pp_microbatch_size=2,
        device=torch.device("cpu"),
        layers_per_stage=None if schedule == "1f1b" else 1,
        pp_seq_len=16 if is_static else None,
    )
    pipe.build(model, loss_fn=lambda logits, target: F.cross_entropy(logits.flatten(0, 1), target.flatten()))
    if is_ours:
        adopt(pipe.info.schedule)
    optimizer = torch.optim.SGD([one for part in pipe.parts for one in part.parameters()], lr=0.1)
    generator = torch.Generator().manual_seed(1)
    losses = []
    runs = ["step"] * NUM_STEPS + ["eval"] * (schedule != "ZBVZeroBubble")  # torch's eval fails under ZBV
    for number, run in enumerate(runs):
        length = 24 if is_static and number >= 2 else 16
        text = torch.randint(0, 64, (8, length), generator=generator)
        if is_static:
            pipe.update_seq_len(length)
        given: dict[str, Any] = {"position_ids": torch.arange(length).expand(8, -1)}
        own: list[torch.Tensor] | None = [] if pipe.info.has_last_stage else None
        batch = [text] if pipe.info.has_first_stage else []
        target = text.clone() if pipe.info.has_last_stage else None
        getattr(pipe.info.schedule, run)(*batch, target=target, losses=own, **given)
        losses.append(float(sum(own)) if own else -1.0)
        if run == "step":
            optimizer.step()
            optimizer.zero_grad()
    return losses, [sum_of_parameters(part) for part in pipe.parts]


# All of them

CASES: list[tuple[Callable[..., Result], int, tuple[Any, ...]]] = [
    (titan, 2, ("1F1B", False, 1)),
    (titan, 2, ("Interleaved1F1B", True, 1)),
    (titan, 2, ("InterleavedZeroBubble", False, 1)),
    (titan, 2, ("ZBVZeroBubble", False, 1)),
    (titan, 4, ("1F1B", False, 2)),
    (titan, 4, ("InterleavedZeroBubble", False, 2)),
    (automodel, 2, ("1f1b", False)),
    (automodel, 2, ("1f1b", True)),
    (automodel, 2, ("InterleavedZeroBubble", False)),
    (automodel, 2, ("ZBVZeroBubble", True)),
]


def sum_of_parameters(module: torch.nn.Module) -> float:
    parameters = (getattr(one.detach(), "_local_tensor", one.detach()) for one in module.parameters())
    return sum(float(one.double().sum()) for one in parameters)


def run(case: Callable[..., Result], size: int, args: tuple[Any, ...]) -> list[Result]:
    """The results by rank, each a fork of this process, which has imported torch."""

    def on_rank() -> Result:
        os.environ.update(RANK=f"{dist.get_rank()}", LOCAL_RANK=f"{dist.get_rank()}", WORLD_SIZE=f"{size}")
        return case(*args)

    return on_local_ranks(size, on_rank, PATIENCE)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    prepare()
    os.chdir(folder := tempfile.mkdtemp())
    write_tokenizer(Path(folder, "tokenizer"))
    differ = 0
    for case, size, args in CASES:
        torchs, ours = (run(case, size, (is_ours, *args)) for is_ours in (False, True))
        losses = max(ours, key=lambda result: result[0])[0]
        is_same = torchs == ours
        differ += not is_same
        verdict = "the same" if is_same else f"DIFFERENT: torch {torchs}, ours {ours}"
        print(f"{case.__name__:9} {' '.join(map(str, args)):32} {size} ranks, losses {losses}: {verdict}", flush=True)
    raise SystemExit(differ)

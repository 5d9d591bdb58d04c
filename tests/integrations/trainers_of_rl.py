"""The modules of verl and SkyRL that call Megatron's schedules, unchanged, on the CPU: by Megatron's schedules, and by
ours behind `install`.

    python tests/integrations/trainers_of_rl.py

`make test-rl` installs both and runs this. A line for each case says whether log-probabilities, losses and gradients
are the same to the last digit. What is replaced: packages that these modules import and do not use here, Megatron's
questions for CUDA, and of verl the parts of its engine that it leaves to subclasses.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
import typing
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import typing_extensions

sys.path.insert(0, str(Path(__file__).parents[1]))

from tools.absent import Absent
from tools.megatron_models import VOCABULARY, batches, forward_step, megatron, provider

from megapipe.integrations.megatron import build_model_chunks, install, uninstall
from megapipe.proving.local_ranks import on_local_ranks

PATIENCE = 300.0

Result = dict[str, Any]


def gradients(chunks: list[Any]) -> dict[str, float]:
    from megapipe.integrations.megatron import global_name

    named = {global_name(chunk, name): p for chunk in chunks for name, p in chunk.named_parameters()}
    return {name: float(p.grad.double().abs().sum()) for name, p in named.items() if p.grad is not None}


def chunks_for(schedule: str, vp_size: int | None) -> tuple[Any, list[Any]]:
    config = megatron(2, vp_size, variable_seq_lengths=True, moe_token_dispatcher_type="alltoall")
    return config, build_model_chunks(provider(config), schedule)


def skyrl(schedule: str, vp_size: int | None) -> Result:
    """Its wrapper of a model: log-probabilities, then a step of PPO's loss with them."""
    wrappers = importlib.import_module("skyrl.backends.skyrl_train.workers.megatron.megatron_model_wrapper")
    losses = importlib.import_module("skyrl.backends.skyrl_train.utils.ppo_utils")
    settings = importlib.import_module("skyrl.train.config")
    config, chunks = chunks_for(schedule, vp_size)
    algorithm = settings.AlgorithmConfig()
    algorithm.policy_loss_type, algorithm.use_kl_loss, algorithm.use_entropy_loss = "regular", True, False
    cfg = SimpleNamespace(
        remove_microbatch_padding=False,
        logprobs_chunk_size=None,
        algorithm=algorithm,
        policy=SimpleNamespace(
            megatron_config=SimpleNamespace(mtp_loss_weight=0, mtp_loss_chunk_size=None, mtp_loss_topk=None)
        ),
    )
    wrapper = wrappers.MegatronModelWrapper(cfg, chunks, policy_loss_fn=losses.ppo_policy_loss)
    config.finalize_model_grads_func = None  # it averages over replicas in Megatron's wrapper, which is not here
    generator = torch.Generator().manual_seed(3)
    data = []
    for lengths in ([7, 12], [12, 3], [9, 9]):
        mask = torch.stack([torch.arange(12) >= 12 - length for length in lengths]).long()
        advantages = torch.randn(2, 2, generator=generator)
        data.append(
            {
                "sequences": torch.randint(VOCABULARY, (2, 12), generator=generator),
                "attention_mask": mask,
                "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
                "num_actions": 2,
                "advantages": advantages,
                "loss_mask": torch.ones(2, 2),
                "rollout_action_logprobs": None,
                "num_microbatches": 3,
            }
        )
    log_probs = wrapper.forward([dict(one) for one in data], 12, 2)
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, log_probs)
    for number, one in enumerate(data):
        old = everyone[-1][2 * number : 2 * number + 2]
        one |= {"old_action_log_probs": old - 0.1, "base_action_log_probs": old + 0.1}
    reports = wrapper.forward_backward_mini_batch([dict(one) for one in data], 12, 2)
    return {"log_probs": log_probs.tolist(), "reports": str(reports), "gradients": gradients(chunks)}


def verl(schedule: str, vp_size: int | None) -> Result:
    """Its engine's `forward_backward_batch`, which makes microbatches by tokens, and calls the schedule."""
    engines = importlib.import_module("verl.workers.engine.megatron.transformer_impl")
    tensordict = importlib.import_module("tensordict")
    engines.get_device_id = lambda: "cpu"
    importlib.import_module("verl.utils.seqlen_balancing").get_device_name = lambda: "cpu"

    class Engine(engines.MegatronEngine):  # type: ignore[misc, name-defined]
        def __init__(self, config: Any, module: list[Any]) -> None:
            self.tf_config, self.module = config, module
            self.engine_config = SimpleNamespace(
                context_parallel_size=1,
                dynamic_context_parallel=False,
                pad_bshd_to_minibatch_max=False,
                router_replay=SimpleNamespace(mode="disabled"),
            )
            self.model_config = SimpleNamespace(mtp=SimpleNamespace(enable=False))

        def forward_step(self, batch_iter: Any, model: Any, postprocess_micro_batch_func: Any, **others: Any) -> Any:
            data = next(batch_iter)
            output, _ = forward_step(iter([data["input_ids"]]), model)
            return output, lambda output: postprocess_micro_batch_func(output, data)

        def postprocess_micro_batch_func(self, output: Any, data: Any, forward_only: bool, loss_function: Any) -> Any:
            count = engines.tu.get_non_tensor_data(data, key="num_micro_batch", default=1)
            total = engines.tu.get_non_tensor_data(data, key="batch_num_tokens", default=1)
            loss = (output * data["loss_mask"]).sum() / total
            found = torch.nested.as_nested_tensor([*-output.detach()], layout=torch.jagged)
            metrics = {"pg_loss": loss.detach().item()}
            return loss * count, {"model_output": {"log_probs": found}, "loss": loss.item(), "metrics": metrics}

    config, chunks = chunks_for(schedule, vp_size)
    tokens = torch.cat(batches(6, 5))  # 12 sequences of 9 tokens
    fields = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "loss_mask": (tokens % 3 != 0).float()}
    fields["loss_mask"] = fields["loss_mask"][:, 1:]
    data = tensordict.TensorDict(fields, batch_size=[12])
    engines.tu.assign_non_tensor(data, max_token_len_per_gpu=18)
    engine = Engine(config, chunks)
    outputs = [engine.forward_backward_batch(data, None, forward_only=is_only) for is_only in (True, False)]
    found = [[one["loss"], one["model_output"]["log_probs"].to_padded_tensor(0).tolist()] for one in outputs if one]
    return {"outputs": found, "gradients": gradients(chunks)}


CASES: list[tuple[Callable[..., Result], str, str | None, int | None]] = [
    (skyrl, "1f1b", None, None),
    (skyrl, "1f1b", "zb1p", None),
    (verl, "1f1b", None, None),
    (verl, "1f1b", "zb2p", None),
    (verl, "interleaved_1f1b", None, 2),
    (verl, "interleaved_1f1b", "zbv", 2),
]
"""The trainer, Megatron's schedule, ours (None for the same), virtual stages."""


def run(case: Callable[..., Result], theirs: str, ours: str | None, vp_size: int | None) -> list[tuple[Result, Result]]:
    """Our results and Megatron's, by rank, each a fork of this process, which has imported torch."""

    def on_rank() -> tuple[Result, Result]:
        os.environ.update(RANK=f"{dist.get_rank()}", LOCAL_RANK=f"{dist.get_rank()}", WORLD_SIZE="2")
        install(ours)
        own = case(ours or theirs, vp_size)
        uninstall()
        return own, case(theirs, vp_size)

    return on_local_ranks(2, on_rank, PATIENCE)


def is_same(results: list[tuple[Result, Result]]) -> bool:
    """What ranks return, but that layers, and with them gradients, lie on other ranks in a V."""
    merged = [{name: value for one in side for name, value in one.pop("gradients").items()} for side in zip(*results)]
    return merged[0] == merged[1] and all(ours == theirs for ours, theirs in results)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    Absent("datasets", "pandas", "skyrl_gym")
    typing.TypedDict = typing_extensions.TypedDict  # type: ignore[assignment]  # which pydantic wants before 3.12
    differ = 0
    for case, theirs, ours, vp_size in CASES:
        results = run(case, theirs, ours, vp_size)
        same = is_same([({**ours}, {**theirs}) for ours, theirs in results])
        differ += not same
        verdict = "the same" if same else f"DIFFERENT: {results}"
        print(f"{case.__name__:6} Megatron's {theirs}, ours {ours or theirs}: {verdict}", flush=True)
    raise SystemExit(differ)

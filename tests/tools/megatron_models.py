"""A small GPT of Megatron's, its chunks, and steps of it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from megapipe.integrations.megatron import global_name

SEQUENCE, BATCH, VOCABULARY, HIDDEN = 8, 2, 32, 16


def megatron(pp_size: int, vp_size: int | None = None, ep_size: int = 1, num_layers: int = 4, **options: Any) -> Any:
    """Initialises Megatron's groups and returns its config for a small GPT."""
    from fakes import megatron_on_cpu

    megatron_on_cpu.prepare()
    from megatron.core import parallel_state
    from megatron.core.transformer.transformer_config import TransformerConfig

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=pp_size,
        virtual_pipeline_model_parallel_size=vp_size,
        expert_model_parallel_size=ep_size,
    )
    return TransformerConfig(
        num_layers=num_layers,
        hidden_size=HIDDEN,
        num_attention_heads=2,
        pipeline_model_parallel_size=pp_size,
        virtual_pipeline_model_parallel_size=vp_size,
        expert_model_parallel_size=ep_size,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        # Megatron's batched messages mix up the neighbours at PP=2 with virtual stages.
        overlap_p2p_comm=vp_size is not None,
        batch_p2p_comm=vp_size is None,
        **options,
    )


def provider(config: Any, is_tied: bool = False) -> Any:
    def provide(
        pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None, **options: Any
    ) -> nn.Module:
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec

        has_experts = config.num_moe_experts is not None
        spec = (
            get_gpt_decoder_block_spec(config, False, vp_stage=vp_stage) if has_experts else get_gpt_layer_local_spec()
        )
        model = GPTModel(
            config=config,
            transformer_layer_spec=spec,
            vocab_size=VOCABULARY,
            max_sequence_length=4 * SEQUENCE,
            pre_process=pre_process,
            post_process=post_process,
            share_embeddings_and_output_weights=is_tied,
            vp_stage=vp_stage,
            **options,
        )
        for name, parameter in model.named_parameters():  # the same wherever it is built
            name = global_name(model, name)
            if is_tied and name == "output_layer.weight":
                name = "embedding.word_embeddings.weight"
            generator = torch.Generator().manual_seed(len(name) + sum(map(ord, name)))
            with torch.no_grad():
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator) + (parameter.dim() == 1))
        return model

    return provide


def batches(num_microbatches: int, seed: int, lengths: list[int] | None = None) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    lengths = lengths or [SEQUENCE] * num_microbatches
    return [torch.randint(VOCABULARY, (BATCH, length + 1), generator=generator) for length in lengths]


def forward_step(
    data_iterator: Iterator[Tensor], model: nn.Module, return_schedule_plan: bool = False
) -> tuple[Any, Any]:
    tokens = next(data_iterator)
    length = tokens.shape[1] - 1
    positions = torch.arange(length).expand(BATCH, -1)
    mask = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
    call = model.build_schedule_plan if return_schedule_plan else model
    losses = call(tokens[:, :-1], positions, mask, labels=tokens[:, 1:])

    def loss_func(output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        loss = output.mean()
        return loss, {"loss": loss.detach().clone()}

    return losses, loss_func


def step(function: Any, chunks: list[nn.Module], data: list[Tensor], **options: Any) -> list[float]:
    reports = function(
        **{"forward_step_func": forward_step, **options},
        data_iterator=[iter(data) for _ in chunks] if len(chunks) > 1 else iter(data),
        model=chunks if len(chunks) > 1 else chunks[0],
        num_microbatches=len(data),
        seq_length=SEQUENCE,
        micro_batch_size=BATCH,
    )
    return [float(report["loss"]) for report in reports]


def copy_of(chunks: list[nn.Module]) -> list[nn.Module]:
    """A deep copy, but for the config and the process groups."""
    config = chunks[0].config
    memo: dict[int, Any] = {id(config): config}
    for chunk in chunks:
        for module in chunk.modules():
            for value in vars(module).values():
                if type(value).__name__ in ("ProcessGroup", "ProcessGroupCollection", "_GroupSeenFrom"):
                    memo[id(value)] = value
    return copy.deepcopy(chunks, memo)

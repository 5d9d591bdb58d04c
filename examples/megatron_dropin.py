"""Train Megatron-core's own GPTModel with Megatron's schedule and with ours, and print both losses side by side.

    torchrun --nproc-per-node 4 examples/megatron_dropin.py
    torchrun --nproc-per-node 4 examples/megatron_dropin.py --pipeline-model-parallel-size 2 --virtual-stages 2
    torchrun --nproc-per-node 4 examples/megatron_dropin.py --schedule gpipe

Everything but the schedule is Megatron's: the model with its tied embeddings, its process groups, its
DistributedDataParallel and the way it finalizes gradients. Without CUDA a few of its calls are replaced first
(tests/fakes/megatron_on_cpu.py says which and why).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from running import make_parser
from text_data import TextSamples, read_text
from torch import Tensor, nn

import megapipe
from megapipe.integrations.megatron import build_model_chunks
from megapipe.plan import find_schedule

OPTIONS = {
    "pipeline_model_parallel_size": (4, ""),
    "virtual_stages": (int, "chunks per rank"),
    "schedule": (str, "ours; default: the one that Megatron takes"),
    "num_layers": (8, ""),
    "hidden_size": (64, ""),
    "seq_length": (64, ""),
    "micro_batch_size": (2, ""),
    "num_microbatches": (8, ""),
    "train_iters": (20, ""),
    "lr": (1e-3, ""),
}


def setup() -> torch.device:
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
        return device
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
    from fakes import megatron_on_cpu

    torch.set_num_threads(1)
    megatron_on_cpu.prepare()
    dist.init_process_group("gloo")
    return torch.device("cpu")


class Trainer:
    """One model with its data parallelism and its optimizer. Which schedule runs it is up to the caller."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.transformer.transformer_config import TransformerConfig

        self.args = args
        self.config = TransformerConfig(
            num_layers=args.num_layers,
            hidden_size=args.hidden_size,
            num_attention_heads=4,
            pipeline_model_parallel_size=args.pipeline_model_parallel_size,
            virtual_pipeline_model_parallel_size=args.virtual_stages,
            pipeline_dtype=torch.float32,
            use_cpu_initialization=True,
            attention_dropout=0.0,
            hidden_dropout=0.0,
            masked_softmax_fusion=False,
            bias_dropout_fusion=False,
            gradient_accumulation_fusion=False,
            overlap_p2p_comm=args.virtual_stages is not None,
            batch_p2p_comm=args.virtual_stages is None,
            finalize_model_grads_func=finalize_model_grads,
        )
        torch.manual_seed(0)
        schedule = args.schedule or ("1f1b" if args.virtual_stages is None else "interleaved_1f1b")
        ddp = DistributedDataParallelConfig(overlap_grad_reduce=False)
        self.chunks = [
            DistributedDataParallel(self.config, ddp, chunk.to(device))
            for chunk in build_model_chunks(self.build, schedule)
        ]
        self.optimizer = torch.optim.AdamW([p for c in self.chunks for p in c.parameters()], lr=args.lr)

    def build(self, pre_process: bool, post_process: bool, vp_stage: int | None) -> nn.Module:
        """A model provider, as Megatron's trainers have it."""
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

        return GPTModel(
            config=self.config,
            transformer_layer_spec=get_gpt_layer_local_spec(),
            vocab_size=256,
            max_sequence_length=self.args.seq_length,
            pre_process=pre_process,
            post_process=post_process,
            share_embeddings_and_output_weights=True,
            vp_stage=vp_stage,
        )

    def step(self, forward_backward: Any, batches: list[dict[str, Tensor]]) -> float | None:
        """Mean loss, where the last stage is; None elsewhere."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        reports = forward_backward(
            forward_step_func=forward_step,
            data_iterator=[iter(batches) for _ in self.chunks] if len(self.chunks) > 1 else iter(batches),
            model=self.chunks if len(self.chunks) > 1 else self.chunks[0],
            num_microbatches=self.args.num_microbatches,
            seq_length=self.args.seq_length,
            micro_batch_size=self.args.micro_batch_size,
        )
        for chunk in self.chunks:
            for parameter in chunk.parameters():
                parameter.grad = parameter.main_grad
        self.optimizer.step()
        self.optimizer.zero_grad()
        return sum(float(report["loss"]) for report in reports) / len(reports) if reports else None


def forward_step(data_iterator: Iterator[dict[str, Tensor]], model: nn.Module) -> tuple[Tensor, Any]:
    batch = next(data_iterator)
    tokens, labels = batch["tokens"].t(), batch["labels"].t()  # Megatron's models take [batch, sequence]
    length = tokens.shape[1]
    positions = torch.arange(length, device=tokens.device).expand_as(tokens)
    mask = torch.ones(1, 1, length, length, dtype=torch.bool, device=tokens.device).triu(1)

    def loss_func(output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        loss = output.mean()
        return loss, {"loss": loss.detach().clone()}

    return model(tokens, positions, mask, labels=labels), loss_func


def main() -> None:
    args = make_parser(__doc__, options=OPTIONS).parse_args()
    if args.schedule is not None and find_schedule(args.schedule).placement.name == "v":
        raise SystemExit("Megatron's schedules cannot run chunks placed in a V (docs/megatron.md says how ours do).")
    device = setup()
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func as get_megatrons

    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=args.virtual_stages,
    )
    theirs, ours = Trainer(args, device), Trainer(args, device)
    for chunk, other in zip(theirs.chunks, ours.chunks):
        other.load_state_dict(chunk.state_dict())
    samples = TextSamples(read_text(None), args.seq_length, args.micro_batch_size, 0, device)
    prints = dist.get_rank() == dist.get_world_size() - 1  # the last stage of the last replica
    differences = 0
    for iteration in range(args.train_iters):
        first = iteration * args.num_microbatches * args.micro_batch_size
        batches = list(samples.batches("train", first, args.num_microbatches))
        their_loss = theirs.step(get_megatrons(), batches)
        our_loss = ours.step(megapipe.get_forward_backward_func(args.schedule), batches)
        if prints:
            if iteration == 0:
                print("iteration   megatron-core        megapipe")
            same = their_loss == our_loss
            differences += not same
            print(f"{iteration + 1:9d}   {their_loss:.9f}     {our_loss:.9f}   {'equal' if same else 'DIFFERENT'}")
    if prints:
        print(f"{args.train_iters - differences} of {args.train_iters} losses are equal to the last bit")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:  # ^C reaches every rank
        sys.exit("Interrupted." if os.environ["RANK"] == "0" else 130)

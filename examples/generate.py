"""Let a GPT that examples/pretrain_gpt.py has saved go on with texts, through a pipeline of any number of ranks.

    torchrun --nproc-per-node 4 examples/pretrain_gpt.py --pipeline-model-parallel-size 4 --save checkpoints/pretrain
    torchrun --nproc-per-node 2 examples/generate.py --load checkpoints/pretrain "def __init__(self" "import "

Each text is a microbatch. Every new byte costs a forward of all before it, up to --seq-length of the training: no keys
and values are kept.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch
import torch.distributed as dist
from gpt import GPTConfig, GPTStage
from moe import whole_names
from running import DEVICE, count, make_parser, run
from torch import Tensor, nn

import megapipe
from megapipe import parallel_state
from megapipe.checkpoint import Checkpointer, read_position


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    options = {
        "load": ("checkpoints/pretrain", "what pretrain_gpt.py was told to --save to"),
        "max_new_bytes": (100, "", count),
        "temperature": (0.8, "0 takes the likeliest byte each time"),
        "num_virtual_stages_per_pipeline_rank": (1, "", count),
        **DEVICE,
    }
    parser = make_parser(__doc__, {"options": options})
    parser.add_argument("prompts", nargs="*", default=["def __init__(self", "import ", "    return "], metavar="TEXT")
    args = parser.parse_args(argv)
    if not all(args.prompts):
        parser.error("a TEXT must have at least one byte to go on from")
    return args


def forward_step(tokens: Iterator[Tensor], chunk: nn.Module) -> tuple[Tensor, None]:
    return chunk(next(tokens)), None  # without a loss function the outputs themselves are returned


def generate(args: argparse.Namespace, device: torch.device) -> list[bytes]:
    """The texts with what follows. All ranks are one pipeline, and all have them."""
    config = GPTConfig(**read_position(args.load).data["model"])
    parallel_state.initialize_model_parallel(dist.get_world_size(), args.num_virtual_stages_per_pipeline_rank)
    chunks = [GPTStage(config, stage).to(device).eval() for stage in megapipe.stages_for_rank("inference")]
    with Checkpointer(args.load, chunks, parts=whole_names) as checkpointer:
        checkpointer.load()
    random = torch.Generator(device).manual_seed(args.seed)  # drawn from by the last rank only
    texts = [prompt.encode() for prompt in args.prompts]
    for _ in range(args.max_new_bytes):
        logits = next_logits(chunks, [text[-config.max_position_embeddings :] for text in texts], device)
        chosen = torch.zeros(len(texts), dtype=torch.long, device=device)
        if logits:
            chosen = torch.stack([choose(one, args.temperature, random) for one in logits])
        dist.broadcast(chosen, src=dist.get_world_size() - 1)
        texts = [text + bytes([byte]) for text, byte in zip(texts, chosen.tolist())]
    return texts


def next_logits(chunks: list[GPTStage], texts: list[bytes], device: torch.device) -> list[Tensor]:
    """Of the byte after each text. Empty but on the last rank."""
    longest = max(len(text) for text in texts)
    # What follows a byte does not change what is computed for it.
    tokens = [torch.tensor([*text.ljust(longest, b" ")], device=device).unsqueeze(1) for text in texts]
    outputs = megapipe.get_forward_backward_func("inference")(
        forward_step_func=forward_step,
        data_iterator=iter(tokens),
        model=chunks,
        num_microbatches=len(texts),
        seq_length=longest,
        micro_batch_size=1,
    )
    return [output[len(text) - 1, 0].float() for text, output in zip(texts, outputs)]


def choose(logits: Tensor, temperature: float, random: torch.Generator) -> Tensor:
    if temperature == 0:
        return logits.argmax()
    return torch.multinomial((logits / temperature).softmax(-1), 1, generator=random).squeeze()


def write(args: argparse.Namespace, device: torch.device) -> None:
    texts = generate(args, device)
    if dist.get_rank() == 0:
        print("\n----\n".join(text.decode(errors="replace") for text in texts))


if __name__ == "__main__":
    run(write, parse_args())

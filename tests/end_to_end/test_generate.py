"""What is generated through a pipeline is what the unpartitioned model generates."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from tools.models import batches, build, reference, run
from tools.pretraining import EXAMPLES, pretrain
from tools.pretraining import text as text  # the fixture
from tools.ranks import RankPool, on_ranks

from megapipe import StageInfo, parallel_state

PROMPTS = ["7 times", "i", "12 times 12 is 144, and far more than the model can look back at"]


def forward_only(data_iterator: Any, model: Any) -> tuple[torch.Tensor, None]:
    return model(next(data_iterator)["tokens"]), None


@on_ranks(2)
def test_inference_returns_outputs_in_order(rank: int) -> None:
    """Without a loss function the outputs come back, in the order of the microbatches, for any number of chunks."""
    model, _ = reference(8, 1)
    for num_chunks in (1, 4):
        for num_microbatches in (1, 5):
            parallel_state.destroy_model_parallel()
            chunks = build("inference", 2, 8, num_chunks)
            outputs = run("inference", chunks, num_microbatches, forward_step_func=forward_only)
            with torch.no_grad():
                expected = [model(batch["tokens"]) for batch in batches(num_microbatches)]
            assert len(outputs) == (num_microbatches if rank == 1 else 0)
            assert all(torch.equal(*both) for both in zip(outputs, expected))


def generate(rank: int, options: str) -> list[bytes]:
    sys.path.insert(0, str(EXAMPLES))
    import generate

    return generate.generate(generate.parse_args([*options.split(), "--", *PROMPTS]), torch.device("cpu"))


def greedily(rank: int, folder: Path) -> list[bytes]:
    """By the whole model as it is, text by text."""
    sys.path.insert(0, str(EXAMPLES))
    from gpt import GPTConfig, GPTStage
    from moe import whole_names

    from megapipe.checkpoint import Checkpointer, read_position

    parallel_state.initialize_model_parallel(1)
    model = GPTStage(GPTConfig(**read_position(folder).data["model"]), StageInfo(0, 1)).eval()
    Checkpointer(folder, model, parts=whole_names).load()
    texts = []
    for prompt in PROMPTS:
        tokens = list(prompt.encode())
        for _ in range(8):
            with torch.no_grad():
                tokens.append(int(model(torch.tensor(tokens[-32:]).unsqueeze(1))[-1, 0].argmax()))
        texts.append(bytes(tokens))
    return texts


def test_generates_what_the_whole_model_would(ranks: RankPool, text: str, tmp_path: Path) -> None:
    """On other ranks and chunks than the model was trained on. What is drawn by chance is the same on every rank."""
    trained = "--num-experts 4 --lr 1e-6 --train-iters 1 --dropout 0.1 --schedule zbv"
    ranks.run(2, pretrain, 2, f"{text} {trained} --save {tmp_path}")
    (expected,) = ranks.run(1, greedily, tmp_path)
    assert len({one[-8:] for one in expected}) == 3
    shared = f"--load {tmp_path} --max-new-bytes 8"
    for num_ranks, chunks in ((3, 1), (2, 2)):
        virtual = f"--num-virtual-stages-per-pipeline-rank {chunks}"
        got = ranks.run(num_ranks, generate, f"{shared} {virtual} --temperature 0")
        assert got == [expected] * num_ranks
    (drawn,) = ranks.run(1, generate, f"{shared} --temperature 1 --seed 5")
    assert drawn != expected
    assert ranks.run(2, generate, f"{shared} --temperature 1 --seed 5") == [drawn, drawn]
    assert [one[: len(prompt)] for one, prompt in zip(drawn, PROMPTS)] == [prompt.encode() for prompt in PROMPTS]

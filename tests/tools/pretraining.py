"""The example, examples/pretrain_gpt.py, made small."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = (
    "--num-layers 4 --hidden-size 16 --num-attention-heads 2 --seq-length 32 --micro-batch-size 2 "
    "--global-batch-size 8 --train-iters 4 --log-interval 1 --eval-interval 2 --eval-iters 1 --lr-warmup-iters 2"
)


def pretrain(rank: int, pp_size: int, arguments: str, device: str = "cpu") -> list[float]:
    sys.path.insert(0, str(EXAMPLES))
    import pretrain_gpt

    args = pretrain_gpt.parse_args([*SMALL.split(), *arguments.split(), "--pipeline-model-parallel-size", str(pp_size)])
    return pretrain_gpt.train(args, torch.device(device))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"{n} times {n} is {n * n}, and {n} more is {n * n + n}.\n" for n in range(400)))
    return f"--data-path {path}"

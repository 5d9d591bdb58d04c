"""examples/train_images.py on several ranks against a plain loop over the whole model, in one process."""

from __future__ import annotations

import copy
import math
import shutil
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from tools.pretraining import EXAMPLES
from tools.ranks import RankPool
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

sys.path.insert(0, str(EXAMPLES))

import train_images

SMALL = "--image-size 16 --batch-size 16 --micro-batch-size 4 --epochs 2 --clip-grad inf --lr-warmup-steps 3"
NUMBER, SEED = 27, 1234
"""Images: a batch of 16, then one of 11, whose third microbatch has 3 of 4."""


def parsed(options: str) -> Any:
    return train_images.parse_args([*SMALL.split(), *options.split()])


def by_example(rank: int, options: str) -> Any:
    draw = train_images.draw_stripes
    with mock.patch.object(train_images, "draw_stripes", lambda _, size, seed: draw(NUMBER, size, seed)):
        return train_images.train(parsed(options), torch.device("cpu"))


def plainly(rank: int, options: str, seed: int) -> Any:
    """As people train without a pipeline, with accumulated gradients. `seed` is of what dropout draws."""
    args = parsed(options)
    (images, labels), (held_out, answers) = (train_images.draw_stripes(NUMBER, 16, which).tensors for which in (0, 1))
    torch.manual_seed(SEED)
    model = train_images.make_model("small", train_images.CLASSES)
    average = copy.deepcopy(model).eval()
    groups = [{"params": [parameter], "weight_decay": 0.05 * (parameter.dim() > 1)} for parameter in model.parameters()]
    optimizer = torch.optim.AdamW(groups, lr=args.lr)
    scheduler = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3) * (1 + math.cos(math.pi * step / 4)) / 2)
    torch.manual_seed(seed)

    def run(net: nn.Module, numbers: Tensor, images: Tensor, labels: Tensor) -> Tensor:
        total = torch.zeros(3, dtype=torch.float64)
        for first in range(0, len(numbers), 4):
            own = numbers[first : first + 4]
            filled = torch.cat([own, numbers])[:4] if len(own) < 4 else own  # its first images once more
            with torch.autocast("cpu", torch.bfloat16, enabled=args.bf16):
                logits = net(images[filled])[: len(own)]
            loss = F.cross_entropy(logits.float(), labels[own], reduction="sum")
            if net.training:
                (loss / len(numbers)).backward()
            right = (logits.argmax(1) == labels[own]).sum()
            total += torch.tensor([loss.item(), right.item(), len(own)], dtype=torch.float64)
        return total

    printed: list[float] = []
    for epoch in range(2):
        order, total = torch.randperm(NUMBER, generator=torch.Generator().manual_seed(SEED + epoch)), torch.zeros(3)
        model.train()
        for step, numbers in enumerate(order.split(16), 2 * epoch):
            total = total + run(model, numbers, images, labels)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            for old, new in zip(average.state_dict().values(), model.state_dict().values()):
                old.copy_(torch.lerp(old, new, 1 - step / (step + 10)) if old.is_floating_point() else new)
        model.eval()
        with torch.no_grad():
            evaluated = [
                sum(run(net, part, held_out, answers) for part in torch.arange(NUMBER).split(16))
                for net in (model, average)
            ]
        printed += [number for one in (total, *evaluated) for number in (one[:2] / one[2]).tolist()]
    return printed


def test_two_ranks_are_a_plain_loop(ranks: RankPool, tmp_path: Path) -> None:
    """To the last digit, under autocast: BatchNorm, dropout (which draws on the rank that has it, here the second),
    averages, the rate, the smaller last batch. And it goes on under another schedule."""
    (expected,) = ranks.run(1, plainly, "--bf16", SEED + 1)
    assert ranks.run(2, by_example, f"--bf16 --save {tmp_path}") == [expected] * 2
    shutil.rmtree(tmp_path / "step_00000002")  # as if it had been stopped before
    resumed = ranks.run(2, by_example, f"--bf16 --save {tmp_path} --load {tmp_path} --schedule gpipe")
    assert resumed == [expected[6:]] * 2


def of_one_image(rank: int, options: str, number: int) -> Any:
    """Without dropout, whose masks replicas draw apart."""
    make = train_images.make_model

    def without_dropout(*names: Any) -> nn.Module:
        *layers, _, head = make(*names)
        return nn.Sequential(*layers, head)

    image, label = train_images.draw_stripes(1, 16, 0)[0]
    data = [(image, label)] * number
    with (
        mock.patch.object(train_images, "make_data", return_value=(data, data, train_images.CLASSES)),
        mock.patch.object(train_images, "make_model", without_dropout),
    ):
        return train_images.train(parsed(options), torch.device("cpu"))


def test_replicas_of_like_batches_are_one_of_half_the_size(ranks: RankPool) -> None:
    """What each gives, averaged: a step of 16 images, then one of 12 with two that only fill it up."""
    (expected,) = ranks.run(1, of_one_image, "--batch-size 8", 14)
    assert ranks.run(2, of_one_image, "--pipeline-model-parallel-size 1", 28) == [expected] * 2

"""Train a classifier of images through a pipeline: a model of torchvision or timm as it is, cut by `megapipe.split`.

    torchrun --nproc-per-node 2 examples/train_images.py
    torchrun --nproc-per-node 4 examples/train_images.py --model resnet50 --data imagenet --image-size 224 --bf16 \\
        --schedule zbv --workers 4 --save checkpoints/resnet50 --load checkpoints/resnet50

Without --data it learns the direction of stripes, on images that are drawn here. After each epoch the model and the
average of its weights (EMA) are validated, and a checkpoint is saved. A run that was interrupted goes on from there
when it is started again, also with other sizes or another schedule. Ranks beyond one pipeline are replicas of it.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from running import DEVICE, count, make_parser, run
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

import megapipe
from megapipe import parallel_state
from megapipe.checkpoint import Checkpointer
from megapipe.training import GradientReducer

OPTIONS = {
    "model": ("small", "of torchvision, timm/NAME of timm, or small: a few convolutions, which need neither"),
    "data": (str, "folder with train/ and val/, each with a folder of images for each class"),
    "image_size": (32, "", count),
    "workers": (0, "processes that read images, of each rank"),
    "schedule": ("1f1b", f"one of {', '.join(megapipe.schedule_names())}"),
    "pipeline_model_parallel_size": (count, "default: all ranks"),
    "epochs": (4, "", count),
    "batch_size": (64, "images of a step, over all replicas", count),
    "micro_batch_size": (8, "images of a microbatch: BatchNorm has their mean and variance", count),
    "lr": (3e-3, ""),
    "lr_warmup_steps": (10, "", count),
    "weight_decay": (0.05, ""),
    "clip_grad": (1.0, ""),
    "ema_decay": (0.99, "of the average of weights, in a step"),
    "bf16": (False, "compute in bfloat16 by autocast, with weights in float32"),
    "save": (str, "folder for checkpoints"),
    "load": (str, "folder to go on from; that of --save may be empty, at the first start"),
    **DEVICE,
}
CLASSES = 8


def make_model(name: str, num_classes: int) -> nn.Module:
    if name == "small":
        sizes = [(3, 16), (16, 32), (32, 32), (32, 64)]
        convs = [[nn.Conv2d(*size, 3, 2, 1, bias=False), nn.BatchNorm2d(size[1]), nn.ReLU()] for size in sizes]
        head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.1), nn.Linear(64, num_classes)]
        return nn.Sequential(*(layer for layers in convs for layer in layers), *head)
    if name.startswith("timm/"):
        return importlib.import_module("timm").create_model(name.removeprefix("timm/"), num_classes=num_classes)
    return importlib.import_module("torchvision.models").get_model(name, num_classes=num_classes)


def make_data(folder: str | None, size: int) -> tuple[Dataset[Any], Dataset[Any], int]:
    """To train on, to validate with, and the number of classes."""
    if folder is None:
        return draw_stripes(1000, size, seed=0), draw_stripes(200, size, seed=1), CLASSES
    v2, read = (importlib.import_module(f"torchvision.{one}") for one in ("transforms.v2", "datasets"))
    scale = v2.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
    scaled = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), scale]
    augment = v2.Compose([v2.RandomResizedCrop(size), v2.RandomHorizontalFlip(), *scaled])
    plain = v2.Compose([v2.Resize(size * 8 // 7), v2.CenterCrop(size), *scaled])
    training = read.ImageFolder(f"{folder}/train", augment)
    return training, read.ImageFolder(f"{folder}/val", plain), len(training.classes)


def draw_stripes(number: int, size: int, seed: int) -> Dataset[Any]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (number,), generator=generator)
    angles, phases = labels * math.pi / CLASSES, torch.rand(number, 1, generator=generator) * 2 * math.pi
    x, y = (one.flatten() for one in torch.meshgrid(torch.arange(size), torch.arange(size), indexing="xy"))
    waves = torch.sin(angles.cos().outer(x) + angles.sin().outer(y) + phases).view(number, 1, size, size)
    return TensorDataset(waves + torch.randn(number, 3, size, size, generator=generator), labels)


def make_loader(data: Dataset[Any], args: argparse.Namespace, shuffle: bool) -> DataLoader[Any]:
    """All ranks of a pipeline read the same images, and replicas others."""
    num_replicas, replica = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
    sampler = DistributedSampler(data, num_replicas, replica, shuffle=shuffle, seed=args.seed)
    own = torch.Generator().manual_seed(args.seed)  # dropout draws from another
    return DataLoader(data, args.batch_size // num_replicas, sampler=sampler, num_workers=args.workers, generator=own)


def cut(images: Tensor, labels: Tensor, size: int) -> list[tuple[Tensor, Tensor]]:
    """Microbatches of one size, as `split` wants them. The last one of a smaller batch is filled up with images that
    are in it already, whose labels no loss counts."""
    missing = -len(images) % size
    again = torch.arange(len(images) + missing) % len(images)
    return list(zip(images[again].split(size), F.pad(labels, (0, missing), value=-100).split(size)))


def learning_rate(num_warmup_steps: int, num_steps: int, step: int) -> float:
    """A share of --lr: linear warm-up, times half a cosine."""
    return min(1.0, (step + 1) / num_warmup_steps) * (1 + math.cos(math.pi * step / num_steps)) / 2


def forward_step(microbatches: Iterator[Any], chunk: nn.Module, scale: float) -> tuple[Any, Any]:
    images, labels = next(microbatches)

    def loss_func(logits: Tensor) -> tuple[Tensor, Tensor]:
        loss = F.cross_entropy(logits.float(), labels, reduction="sum")  # leaves out -100
        report = [loss.detach(), (logits.argmax(1) == labels).sum(), (labels >= 0).sum()]
        return loss * scale, torch.stack(report).double()

    return chunk(images), loss_func


@torch.no_grad()
def update(averages: Sequence[nn.Module], chunks: Sequence[nn.Module], decay: float) -> None:
    """Buffers too, as BatchNorm's statistics are."""
    for average, chunk in zip(averages, chunks):
        for old, new in zip(average.state_dict().values(), chunk.state_dict().values()):
            old.lerp_(new, 1 - decay) if old.is_floating_point() else old.copy_(new)


def train(args: argparse.Namespace, device: torch.device) -> list[float]:
    """Returns the losses and the shares of right answers that it prints."""
    parallel_state.initialize_model_parallel(args.pipeline_model_parallel_size or dist.get_world_size())
    *data, num_classes = make_data(args.data, args.image_size)
    training, validation = (make_loader(one, args, shuffle) for one, shuffle in zip(data, (True, False)))
    torch.manual_seed(args.seed)  # all ranks begin with the same weights
    model = make_model(args.model, num_classes).to(device)
    example = torch.zeros(args.micro_batch_size, 3, args.image_size, args.image_size, device=device)
    config = megapipe.PipelineConfig(enable_autocast=args.bf16, autocast_dtype=torch.bfloat16)
    schedule = megapipe.get_forward_backward_func(args.schedule)
    chunks = megapipe.split(model, example, schedule, config=config)
    del model  # this rank keeps its own stages only
    averages = [copy.deepcopy(chunk).requires_grad_(False) for chunk in chunks]
    if parallel_state.get_data_parallel_world_size() > 1:
        reducer = GradientReducer(chunks)
        config.grad_sync_func, config.finalize_model_grads_func = reducer.start, reducer.finish
    optimizer = megapipe.PipelinedOptimizer(
        chunks,
        lambda groups: torch.optim.AdamW(groups, lr=args.lr),
        lambda name, parameter: {"weight_decay": args.weight_decay if parameter.dim() > 1 else 0.0},
    )
    rate = partial(learning_rate, args.lr_warmup_steps, args.epochs * len(training))
    scheduler = megapipe.PipelinedLRScheduler(optimizer, lambda one: LambdaLR(one, rate))
    named = [nn.ModuleDict({"average": average}) for average in averages]
    others = {"scheduler": scheduler}
    checkpointer = Checkpointer(args.save or args.load or ".", [*chunks, *named], optimizer, others=others, keep_last=2)
    torch.manual_seed(args.seed + dist.get_rank())  # dropout
    loaded = checkpointer.load(args.load, may_be_empty=args.load == args.save) if args.load else None

    def run(models: Sequence[nn.Module], batches: DataLoader[Any], epoch: int | None = None) -> Tensor:
        """Train, where there is an epoch. Returns sums of losses, right answers and images, on the last stage."""
        total = torch.zeros(3, dtype=torch.float64, device=device)
        for chunk in models:
            chunk.train(epoch is not None)
        for number, (images, labels) in enumerate(batches):
            microbatches = cut(images.to(device), labels.to(device), args.micro_batch_size)
            reports = schedule(
                forward_step_func=partial(forward_step, scale=len(microbatches) / len(images)),
                data_iterator=iter(microbatches),
                model=models,
                num_microbatches=len(microbatches),
                forward_only=epoch is None,
            )
            total += sum(reports)
            if epoch is not None:
                megapipe.clip_grad_norm_(chunks, args.clip_grad)
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
                step = epoch * len(batches) + number
                update(averages, chunks, min(args.ema_decay, step / (step + 10)))
        return total

    printed: list[float] = []
    for epoch in range(loaded.step if loaded else 0, args.epochs):
        training.sampler.set_epoch(epoch)
        totals = torch.stack([run(chunks, training, epoch), run(chunks, validation), run(averages, validation)])
        dist.all_reduce(totals)
        printed += (numbers := (totals[:, :2] / totals[:, 2:]).flatten().tolist())
        if dist.get_rank() == 0:
            line = "trained: loss {:.4f}, right {:.1%} | validated: {:.4f}, {:.1%} | average: {:.4f}, {:.1%}"
            print(f"epoch {epoch + 1}/{args.epochs} | {line.format(*numbers)}", flush=True)
        if args.save:
            checkpointer.save(epoch + 1)
    checkpointer.close()
    return printed


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    return make_parser(__doc__, {"options": OPTIONS}).parse_args(argv)


if __name__ == "__main__":
    run(train, parse_args())

"""What the examples' commands have in common: their options, and what they run in."""

from __future__ import annotations

import argparse
import gc
import os
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

DEVICE = {"device": ((None, "cuda", "cpu"), "default: GPUs, if there are any"), "seed": (1234, "")}


def count(text: str) -> int:
    """The type of an option that cannot be 0."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


def make_parser(doc: str, groups: dict[str, dict[str, Any]], **defaults: Any) -> argparse.ArgumentParser:
    """Each option has a default and a text, and its type where that is not the default's. In place of a default a type
    says that there is none, `...` that the option must be given; False is a switch, and the first one of a tuple is the
    default of a choice. `defaults` are others than those of the tables."""
    parser = argparse.ArgumentParser(description=doc.partition("\n")[0])
    for title, options in groups.items():
        group = parser.add_argument_group(title)
        for name, (default, text, *types) in options.items():
            kind: dict[str, Any] = {"type": types[0] if types else type(default), "default": default}
            if default is ...:
                kind = {"required": True}
            elif default is bool:
                kind = {"action": argparse.BooleanOptionalAction}
            elif default is False:
                kind = {"action": "store_true"}
            elif isinstance(default, tuple):
                kind = {"choices": [one for one in default if one], "default": default[0]}
            elif callable(default):
                kind = {"type": default}
            group.add_argument("--" + name.replace("_", "-"), help=text or None, **kind)
    parser.set_defaults(**defaults)
    return parser


def run(train: Callable[[argparse.Namespace, torch.device], Any], args: argparse.Namespace) -> Any:
    """Call `train(args, device)` in a process group."""
    try:
        result = train(args, setup(args.device))
    except KeyboardInterrupt:  # ^C reaches every rank
        sys.exit("Interrupted." if os.environ["RANK"] == "0" else 130)
    dist.destroy_process_group()
    return result


def setup(device_type: str | None) -> torch.device:
    num_gpus = torch.cuda.device_count()
    if device_type == "cuda" and not num_gpus:
        raise ValueError("--device cuda needs a GPU, and torch finds none: leave it out, or say --device cpu.")
    if num_gpus and device_type != "cpu":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % num_gpus)
        torch.cuda.set_device(device)
        store, rank, world_size = next(dist.rendezvous("env://"))
        own = have_own_gpus(store, rank, world_size, device)  # as NCCL wants
        backend = {"backend": "nccl", "device_id": device} if own else {"backend": "gloo"}
        dist.init_process_group(**backend, store=store, rank=rank, world_size=world_size)
    else:
        device = torch.device("cpu")
        torch.set_num_threads(1)  # the same arithmetic, to the bit, for every pipeline size
        dist.init_process_group("gloo")
    return device


@contextmanager
def without_collector() -> Iterator[None]:
    """Around training steps: a rank that looks for garbage at a step of its own has all others wait."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def have_own_gpus(store: dist.Store, rank: int, world_size: int, device: torch.device) -> bool:
    """Whether no two ranks share a GPU. Each may see all GPUs of its machine, or only its own."""
    store.set(f"GPU of rank {rank}", str(torch.cuda.get_device_properties(device).uuid))
    gpus = {store.get(f"GPU of rank {one}") for one in range(world_size)}
    return len(gpus) == world_size


def count_microbatches(args: argparse.Namespace, num_replicas: int) -> int:
    """Of a step, for each replica."""
    number, rest = divmod(args.global_batch_size, args.micro_batch_size * num_replicas)
    if rest or not number:
        raise ValueError(
            f"--global-batch-size {args.global_batch_size} is no multiple of --micro-batch-size "
            f"{args.micro_batch_size} times {num_replicas} replicas."
        )
    return number


def peak_memory(device: torch.device) -> float:
    """The largest of all ranks, in GiB: of the GPU, or of the process."""
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device) / 2**30
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    largest = torch.tensor(peak, dtype=torch.float64, device=device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return largest.item()

"""What any process group is good for: its ranks tell each other values, and what they wait for is ended."""

from __future__ import annotations

import contextlib
import datetime
import json
import threading
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _world


def all_gather_json(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """The values of all ranks of a group, by rank. Collective.

    Read as JSON, they cannot run code here, as those of torch's `all_gather_object` can, which are pickled.

    Args:
        value: which JSON can hold. Tuples come as lists.
        group: None for all ranks of torch.distributed.
    """
    config = str(dist.get_backend_config(group))  # "cpu:gloo,cuda:nccl"
    device = "cpu" if "cpu:" in config else config.partition(":")[0]
    own = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)
    num_ranks = dist.get_world_size(group)
    sizes = list(torch.empty(num_ranks, 1, dtype=torch.int64, device=device))
    dist.all_gather(sizes, torch.tensor([own.numel()], device=device), group)
    num_bytes = [int(size) for size in sizes]
    padded = torch.zeros(max(num_bytes), dtype=torch.uint8, device=device)
    padded[: own.numel()] = own
    texts = list(torch.empty(num_ranks, max(num_bytes), dtype=torch.uint8, device=device))
    dist.all_gather(texts, padded, group)
    return [json.loads(text[:size].cpu().numpy().tobytes()) for text, size in zip(texts, num_bytes)]


def abort_process_groups(patience: float = 10.0) -> None:
    """End all collectives that this process waits for, in any process group: they raise. The groups are of no use
    after it.

    Args:
        patience: seconds until a communicator that does not come to its end is left to itself.
    """
    others = []
    for group in list(_world.pg_map):
        for device in group._device_types:
            backend: Any = group._get_backend(device)
            if isinstance(backend, dist.ProcessGroupGloo):
                abort_gloo(backend)
            elif hasattr(backend, "abort"):  # NCCL's waits for kernels of others on the device
                others.append(threading.Thread(target=backend.abort, daemon=True))
    for thread in others:
        thread.start()
    for thread in others:
        thread.join(patience)


def abort_gloo(backend: Any) -> None:
    """Gloo has no abort that ends waits, but a wait that times out closes all pairs of its group. One that fails since
    its peer closes the pair meanwhile does not: so each pair is tried. A closed one refuses at once."""
    unused_tag = 2**31 - 1
    for peer in range(backend.size()):
        if peer != backend.rank():
            with contextlib.suppress(RuntimeError):
                backend.recv([torch.empty(1, device="cpu")], peer, unused_tag).wait(datetime.timedelta(milliseconds=1))

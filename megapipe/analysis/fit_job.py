"""What `fit` is asked: a job, and the ways of training that it tries."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .transformer import Transformer


@dataclass(frozen=True)
class Job:
    """What is trained, and on what.

    Attributes:
        sequence: tokens of one.
        batch: sequences of a step, over all replicas.
        devices: how many there are; `node` of them are connected at `node_bandwidth`, all others at `bandwidth`.
        memory: bytes of one; or of each, in the order of ranks, of which those of a pipeline rank follow each other.
        flops: operations a second of one.
        efficiency: the share of them that the products of a stage reach.
        expert_efficiency: the share of `flops` that the products of routed experts reach, also where other products
            are in 8 bits; 0 for `efficiency`.
        fp8_flops: operations a second of one in 8 bits, for products of layers outside routed experts; 0 where these
            are in 16 bits. Scores of attention, the head and all that is saved are in any case.
        node_bandwidth, bandwidth: bytes a second of one device, one way.
        host_bandwidth: the same between a device and its host's memory; 0 where activations stay on the device.
        weight, gradient, optimizer: bytes of each weight, of its gradient, and of its optimizer state: in mixed
            precision 2, 4, and 12 for Adam. The optimizer state is shared out over replicas.
        speeds: how fast each device is beside `flops`, or one number for all.
        reserve: the share of the memory that nothing is planned for: the context, communicators, fragments.
    """

    model: Transformer
    sequence: int
    batch: int
    devices: int
    memory: float | Sequence[float]
    flops: float
    efficiency: float
    node: int = 8
    node_bandwidth: float = float("inf")
    bandwidth: float = float("inf")
    host_bandwidth: float = 0.0
    weight: float = 2.0
    gradient: float = 4.0
    optimizer: float = 12.0
    reserve: float = 0.1
    speeds: Sequence[float] = (1.0,)
    expert_efficiency: float = 0.0
    fp8_flops: float = 0.0

    def __post_init__(self) -> None:
        for name in ("sequence", "batch", "devices", "flops", "node", "node_bandwidth", "bandwidth"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be more than 0, got {getattr(self, name):g}.")
        for name in ("flops", "fp8_flops"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be finite, got {getattr(self, name):g}.")
        for name, values in (("memory", self.memory), ("speeds", self.speeds)):
            if isinstance(values, Sequence) and (
                len(values) not in (1, self.devices) or not all(0 < value < math.inf for value in values)
            ):
                raise ValueError(
                    f"{name} is one number, or one for each of {self.devices} devices, all more than 0, got {values}."
                )
        for name in ("efficiency", "expert_efficiency"):
            if not 0 < (getattr(self, name) or self.efficiency) <= 1:
                raise ValueError(f"{name} is a share, more than 0 and at most 1, got {getattr(self, name):g}.")
        if not 0 <= self.reserve < 1:
            raise ValueError(f"reserve is a share, from 0 on and less than 1, got {self.reserve:g}.")

    @property
    def is_uneven(self) -> bool:
        return any(isinstance(values, Sequence) and len(set(values)) > 1 for values in (self.memory, self.speeds))

    def least(self, values: float | Sequence[float], rank: int, pp: int) -> float:
        """The slowest device of a pipeline rank, or the one with least memory."""
        if not isinstance(values, Sequence) or len(values) == 1:
            return float(values[0] if isinstance(values, Sequence) else values)
        number = self.devices // pp
        return min(values[rank * number : (rank + 1) * number])

    def rooms(self, pp: int) -> list[float]:
        """The bytes that may be planned for on each pipeline rank."""
        return [self.least(self.memory, rank, pp) * (1 - self.reserve) for rank in range(pp)]

    def speeds_of(self, pp: int) -> list[float]:
        """The speed of each pipeline rank."""
        return [self.least(self.speeds, rank, pp) for rank in range(pp)]


class Layout(NamedTuple):
    """One way of training: pipeline, data, tensor, context and expert parallelism (`ep` of the `dp` replicas share the
    experts), a schedule with its microbatches, and what becomes of activations.

    `activations` is "kept"; "checkpointed", where each layer keeps its input, and its B begins with it; "recomputed",
    where each chunk keeps its input, and has an R before its B (`config.recompute`); or "offloaded"
    (`config.offload_activations`).
    """

    pp: int
    dp: int
    tp: int
    cp: int
    ep: int
    schedule: str
    chunks: int
    microbatch: int
    activations: str

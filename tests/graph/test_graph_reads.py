"""Sizes that are read from an accelerator, on the asynchronous device."""

from __future__ import annotations

import torch
from tools.device import needs_devices, on_lazy_device
from tools.device import ranks as ranks
from tools.ranks import RankPool

from megapipe.graph.size_reads import finish_read, start_read

pytestmark = needs_devices


def seconds_waited(rank: int) -> tuple[list[int], float, float]:
    """What a host finds that reads while the device has an hour of other work, and at what time of the device, in two
    halves and as it is."""
    with on_lazy_device([]) as lazy:
        x = lazy.device.to_device(torch.arange(3)) * 2
        stream = lazy.device.current_stream()
        host = start_read(x)
        stream.spend(3600)  # the other part of a pair, or a W
        read = finish_read(host, x).tolist()
        in_halves = max(one.now for one in lazy.device.STREAMS if one is not stream)
        assert lazy.device.SYNCS == []
        x.cpu()
        return read, in_halves, stream.now


def test_the_host_waits_for_the_copy_alone(ranks: RankPool) -> None:
    """Of a plain read the host knew nothing before all was done that the device had been given."""
    assert ranks.run(1, seconds_waited) == [([0, 2, 4], 0.0, 3600.0)]

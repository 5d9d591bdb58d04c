"""Gloo as NCCL is: messages from one rank to another are told apart by their order alone."""

from __future__ import annotations

from typing import Any
from unittest import mock

from megapipe.plan import ChannelName
from megapipe.transports import GlooTransport
from megapipe.transports.channel import BackendChannel


class InOrderTransport(GlooTransport):
    matches_by_order = True

    def channel(self, name: ChannelName, peer: int, sends: bool) -> BackendChannel:
        channel = super().channel(name, peer, sends)
        channel._tag = 1 if name.kind == "header" else 0
        return channel


def transport_in_order() -> Any:
    """Around all steps of a pipeline: its channels are made in the first one."""
    return mock.patch("megapipe.transports.choice.GlooTransport", InOrderTransport)

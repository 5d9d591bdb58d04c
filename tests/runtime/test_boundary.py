"""What is expected over a boundary to another rank: from slices, and where a step is run again after a rollback."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megapipe.messages import HEADER, MessageSpec, TensorSpec
from megapipe.p2p_communication import Lookahead, Transfer
from megapipe.runtime.boundary import RemoteAbove, RemoteBelow

SPEC = MessageSpec("tensor", (TensorSpec((2,), torch.float32, True),))


class Expecting:
    """An inbox that has everything at once."""

    def __init__(self) -> None:
        self.expected: list[MessageSpec] = []

    def expect(self, spec: MessageSpec, count: int = 1) -> None:
        self.expected.extend([spec] * count)

    def take(self) -> Transfer:
        return Transfer(self.expected.pop(0), [])

    def post_ahead(self) -> None:
        pass

    def is_empty(self) -> bool:
        return not self.expected


def communicator(inbox: Expecting) -> Any:
    channel = SimpleNamespace(send=lambda tensors: None)
    return SimpleNamespace(outgoing=lambda *args: channel, incoming=lambda *args, **options: inbox)


@pytest.mark.parametrize("spec", [SPEC, None], ids=["known", "with headers"])
@pytest.mark.parametrize("forward_only", [False, True], ids=["training", "forward_only"])
def test_one_gradient_for_each_output(spec: MessageSpec | None, forward_only: bool) -> None:
    """Also where two of three outputs were sent before the rollback, and are sent again."""
    options = (Lookahead(0), forward_only, spec is None)
    above = RemoteAbove(communicator(inbox := Expecting()), 0, 1, spec and [spec], 3, 1, *options)
    for num_outputs in (2, 3):
        above.discard_outputs()
        for number in range(num_outputs):
            above.put_output(Transfer(SPEC, [torch.zeros(2)]))
            above.send_output(number)
    assert inbox.expected == ([] if forward_only else [SPEC.gradient()] * 3)
    for _ in inbox.expected[:]:
        above.recv_gradient()
        above.take_gradient()
    assert above.is_empty()


@pytest.mark.parametrize("spec", [SPEC, None], ids=["known", "with headers"])
def test_discarded_inputs_come_again(spec: MessageSpec | None) -> None:
    """Of the two that the stage below sends before the rollback, this one has taken one."""
    below = RemoteBelow(communicator(inbox := Expecting()), 0, 0, spec and [spec], 3, 1, Lookahead(0), spec is None)
    below.recv_input()
    below.take_input()
    assert len(below.discard_inputs(2)) == 1
    assert inbox.expected == [spec or HEADER] * 3
    for _ in range(3):
        below.recv_input()
        below.take_input()
    assert below.is_empty()


@pytest.mark.parametrize("is_known", [True, False], ids=["known", "with headers"])
def test_messages_of_slices_come_in_their_order_and_gradients_in_reverse(is_known: bool) -> None:
    """A slice of another length has another shape, and a receive is posted with the shape of what comes next."""
    long, short = (MessageSpec("tensor", (TensorSpec((length,), torch.float32, True),)) for length in (3, 2))
    specs = [long, short] if is_known else None
    RemoteBelow(communicator(inbox := Expecting()), 0, 0, specs, 2, 2, Lookahead(0), not is_known)
    assert inbox.expected == (specs or [HEADER] * 2) * 2
    above = RemoteAbove(communicator(inbox := Expecting()), 0, 1, specs, 2, 2, Lookahead(0), False, not is_known)
    for number, spec in enumerate((long, short, long, short)):
        above.put_output(Transfer(spec, [torch.zeros(spec.tensors[0].shape)]))
        above.send_output(number)
    assert inbox.expected == [spec.gradient() for spec in (short, long, short, long)]

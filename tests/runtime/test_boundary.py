"""What is expected over a link to another rank, from slices too."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megapipe.messages import HEADER, MessageSpec, TensorSpec, encode_header
from megapipe.p2p_communication import Lookahead, Receiver, Sender, Transfer

SPEC = MessageSpec("tensor", (TensorSpec((2,), torch.float32, True),))
CHANNEL: Any = SimpleNamespace(send=lambda tensors: None, receive=lambda spec: Transfer(spec, [encode_header(SPEC)]))


def receiver(specs: list[MessageSpec], count: int, has_headers: bool = False) -> Receiver:
    headers = Receiver(CHANNEL, 0, [HEADER] * len(specs), count, Lookahead(0)) if has_headers else None
    made = Receiver(CHANNEL, 0, specs, count, Lookahead(0), headers)
    made.reset()
    return made


def send(sender: Sender, specs: list[MessageSpec]) -> None:
    for number, spec in enumerate(specs):
        sender.put(Transfer(spec, [torch.zeros(spec.tensors[0].shape)]))
        sender.send(number)


@pytest.mark.parametrize("has_headers", [False, True], ids=["known", "with headers"])
@pytest.mark.parametrize("forward_only", [False, True], ids=["training", "forward_only"])
def test_one_gradient_for_each_output(has_headers: bool, forward_only: bool) -> None:
    grads = receiver([] if has_headers or forward_only else [SPEC.gradient_spec()], 3)
    sender = Sender(CHANNEL, 1, CHANNEL if has_headers else None, None if forward_only else grads)
    sender.reset()
    send(sender, [SPEC] * 3)
    assert list(grads._expected) == ([] if forward_only else [SPEC.gradient_spec()] * 3)
    for _ in range(0 if forward_only else 3):
        grads.request()
        grads.pop().wait()
    assert grads.is_empty()
    assert sender.is_empty()


@pytest.mark.parametrize("is_known", [True, False], ids=["known", "with headers"])
def test_messages_of_slices_come_in_their_order_and_gradients_in_reverse(is_known: bool) -> None:
    """A slice of another length has another shape, and a receive is posted with the shape of what comes next."""
    long, short = (MessageSpec("tensor", (TensorSpec((length,), torch.float32, True),)) for length in (3, 2))
    assert list(receiver([long, short], 2)._expected) == [long, short] * 2
    reverse = [spec.gradient_spec() for spec in (short, long)]
    grads = receiver(reverse if is_known else [], 2)
    sender = Sender(CHANNEL, 1, None if is_known else CHANNEL, grads, num_slices=2)
    sender.reset()
    send(sender, [long, short, long, short])
    assert list(grads._expected) == reverse * 2

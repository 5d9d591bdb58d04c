"""What lies between two neighbouring stages: nothing, this rank's own memory, or a wire to another rank.

Each kind answers the same four calls, so the verbs need not ask where the neighbour is. The stage below calls
`send_output` and `take_gradient`, the stage above `take_input` and `send_gradient`. None of them waits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence

from torch import Tensor

from ..messages import DESCRIPTION, MessageSpec, describe
from ..p2p_communication import Communicator, Lookahead, Transfer
from ..plan import ChannelName, Placement, StageInfo

__all__ = ["Boundary", "End", "Here", "Wire", "boundaries_around"]


class Boundary(ABC):
    peer: int | None = None
    """Pipeline rank of the other side, where it is not this one."""

    @abstractmethod
    def take_input(self) -> Transfer | None:
        """The next forward input."""

    @abstractmethod
    def send_output(self, output: Transfer | None) -> None: ...

    @abstractmethod
    def take_gradient(self) -> Transfer | None:
        """The gradients of the oldest output that has none yet: one for each of its tensors that wants one."""

    @abstractmethod
    def send_gradient(self, grads: list[Tensor]) -> None: ...

    def post_ahead(self) -> None:  # noqa: B027
        """Post receives of what comes next. To be called after a send: that is, when nobody waits for this rank."""

    def post_all(self) -> None:  # noqa: B027
        """Post receives of all that may be posted. To be called when this rank waits for others."""

    @abstractmethod
    def is_empty(self) -> bool:
        """Whether everything expected has been taken."""

    @abstractmethod
    def begin_again(self, num_sent: int) -> list[Transfer]:
        """Forget a step of which nothing but forwards were run. Returns the inputs still to come, to be waited for: of
        the `num_sent` that the stage below has sent, or will, in vain."""


class End(Boundary):
    """Before the first stage and behind the last: data and loss come and go by themselves."""

    def take_input(self) -> None:
        return None

    def send_output(self, output: Transfer | None) -> None:
        pass

    def take_gradient(self) -> None:
        return None

    def send_gradient(self, grads: list[Tensor]) -> None:
        pass

    def is_empty(self) -> bool:
        return True

    def begin_again(self, num_sent: int) -> list[Transfer]:
        return []


class Here(Boundary):
    """Between two stages of this rank: tensors change hands without being copied, but leave their graph behind."""

    def __init__(self) -> None:
        self._outputs: deque[Transfer] = deque()
        self._gradients: deque[Transfer] = deque()

    def take_input(self) -> Transfer:
        assert self._outputs, "recv_forward before send_forward of the stage below, which is on the same rank"
        return self._outputs.popleft()

    def send_output(self, output: Transfer | None) -> None:
        assert output is not None
        self._outputs.append(Transfer(output.spec, [tensor.detach() for tensor in output.tensors]))

    def take_gradient(self) -> Transfer:
        assert self._gradients, "recv_backward before send_backward of the stage above, which is on the same rank"
        return self._gradients.popleft()

    def send_gradient(self, grads: list[Tensor]) -> None:
        self._gradients.append(Transfer(None, grads))

    def is_empty(self) -> bool:
        return not self._outputs and not self._gradients

    def begin_again(self, num_sent: int) -> list[Transfer]:
        self._outputs.clear()
        return []


class Wire(Boundary):
    """To another rank, over the two channels of this boundary.

    Args:
        index: the boundary's number, that of the stage below it.
        spec: the message that goes forward; None where each one is described ahead of it.
        num_inputs: how many messages will come from the stage below: 0 where this rank holds that stage.
        num_gradients: how many will come from the stage above: 0 there, and where nothing is trained.
    """

    def __init__(
        self,
        communicator: Communicator,
        index: int,
        peer: int,
        spec: MessageSpec | None,
        num_inputs: int,
        num_gradients: int,
        lookahead: Lookahead,
    ) -> None:
        self.peer = peer
        forward, backward = ChannelName("forward", index), ChannelName("backward", index)
        self._forward = communicator.outgoing(forward, peer)
        self._backward = communicator.outgoing(backward, peer)
        self._inputs = communicator.incoming(forward, peer, lookahead, is_described=spec is None)
        self._input_spec = spec or DESCRIPTION
        self._inputs.expect(self._input_spec, num_inputs)
        self._inputs.post_ahead()
        self._num_taken = 0
        self._gradients = communicator.incoming(backward, peer, lookahead, is_described=False)
        self._descriptions = None
        self._num_to_come_again = 0  # outputs that were sent in vain: their gradients are expected already
        if spec is None:
            self._descriptions = communicator.outgoing(ChannelName("description", index), peer)
        else:
            self._gradients.expect(spec.gradient(), num_gradients)
        self._expects_each = spec is None and num_gradients > 0
        self._num_expected = 0  # of those that are expected one by one, as many as have not been taken

    def take_input(self) -> Transfer:
        self._num_taken += 1
        return self._inputs.take()

    def send_output(self, output: Transfer | None) -> None:
        assert output is not None
        assert output.spec is not None
        if self._descriptions is not None:
            self._descriptions.send([describe(output.spec)])
        self._forward.send(output.tensors)
        if self._num_to_come_again:
            self._num_to_come_again -= 1
        elif self._expects_each:
            self._gradients.expect(output.spec.gradient())
            self._num_expected += 1
        self._gradients.post_ahead()

    def take_gradient(self) -> Transfer:
        self._num_expected -= 1
        return self._gradients.take()

    def send_gradient(self, grads: list[Tensor]) -> None:
        self._backward.send(grads)

    def post_ahead(self) -> None:
        self._inputs.post_ahead()
        self._gradients.post_ahead()

    def post_all(self) -> None:
        self._inputs.post_all()
        self._gradients.post_all()

    def is_empty(self) -> bool:
        return self._inputs.is_empty() and self._gradients.is_empty()

    def begin_again(self, num_sent: int) -> list[Transfer]:
        # Receives that have been posted stay so: they will take what is sent when everything begins again.
        to_come = [self.take_input() for _ in range(num_sent - self._num_taken)]
        self._inputs.expect(self._input_spec, num_sent)
        self._num_taken = 0
        if self._expects_each:
            self._num_to_come_again = self._num_expected
        return to_come


def boundaries_around(
    stages: Sequence[StageInfo],
    placement: Placement,
    pp_rank: int,
    specs: Sequence[tuple[MessageSpec | None, MessageSpec | None]],
    communicator: Communicator | None,
    num_microbatches: int,
    lookahead: Lookahead,
    forward_only: bool,
) -> list[tuple[Boundary, Boundary]]:
    """For each of a rank's stages, the boundary below it and the one above.

    Args:
        specs: per stage the message that it receives and the one that it sends, where known.
        communicator: None where the pipeline has one rank only.
    """
    num_stages = stages[0].num_stages
    boundaries: dict[int, Boundary] = {-1: End(), num_stages - 1: End()}  # by the number of the stage below
    for stage, (received, sent) in zip(stages, specs):
        sides = ((stage.index - 1, stage.index - 1, received), (stage.index, stage.index + 1, sent))
        for index, neighbour, spec in sides:
            if index in boundaries:
                continue  # an end, or made for the stage on the other side
            peer = placement.rank(neighbour, num_stages // len(stages))
            if peer == pp_rank:
                boundaries[index] = Here()
            else:
                assert communicator is not None
                num_inputs = num_microbatches if neighbour < stage.index else 0
                num_gradients = 0 if forward_only else num_microbatches - num_inputs
                boundaries[index] = Wire(communicator, index, peer, spec, num_inputs, num_gradients, lookahead)
    return [(boundaries[stage.index - 1], boundaries[stage.index]) for stage in stages]

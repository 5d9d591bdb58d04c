"""Weight gradients that come in W, to those who watch for them as Megatron does."""

import contextlib
import functools
from collections.abc import Iterator

import pytest
import torch
from tools.models import assert_same_gradients, build, reference, run
from tools.ranks import on_ranks
from torch import Tensor, nn


class Sync:
    """A no_sync_func, and those who look at parameters while it does not hold them back."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.held = 0
        self.seen: list[list[Tensor | None]] = [[] for _ in parameters]
        self.nodes = [parameter.expand_as(parameter).grad_fn.next_functions[0][0] for parameter in parameters]
        for parameter, node, seen in zip(parameters, self.nodes, self.seen):
            node.register_hook(functools.partial(self._look, parameter, seen))

    def _look(self, parameter: nn.Parameter, seen: list[Tensor | None], *grads: object) -> None:
        if not self.held:
            seen.append(None if parameter.grad is None else parameter.grad.clone())

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        self.held += 1
        yield
        self.held -= 1


@pytest.mark.parametrize("schedule", ["zb1p", "zbv"])
@on_ranks(2)
def test_those_who_watch_gradient_nodes_see_them_once_and_complete(rank: int, schedule: str) -> None:
    """As Megatron's DistributedDataParallel does."""
    chunks = build(schedule, 2, 6, deferred=True)
    parameters = [p for chunk in chunks for p in chunk.parameters()]
    chunks[0].config.no_sync_func = (sync := Sync(parameters)).no_sync
    run(schedule, chunks, 5)
    for seen, parameter in zip(sync.seen, parameters):
        assert len(seen) == 1
        assert torch.equal(seen[0], parameter.grad)


@on_ranks(2)
def test_a_hook_that_insists_on_a_gradient_finds_one(rank: int) -> None:
    """Megatron's hooks, with reductions that overlap, fail where they find no gradient when autograd has passed by. So
    every step of a model whose weight gradients are put off, or added to `main_grad` at once, ended there."""
    for schedule in ("1f1b", "zb1p", "zbv"):
        chunks = build(schedule, 2, 4, deferred=True, no_sync_func=contextlib.nullcontext)
        nodes = []
        for parameter in (p for chunk in chunks for p in chunk.parameters()):
            parameter.main_grad, parameter.grad_added_to_main_grad = torch.zeros_like(parameter), False

            def hook(*grads: object, parameter: torch.nn.Parameter = parameter) -> None:
                assert parameter.grad is not None
                if not parameter.grad_added_to_main_grad:
                    parameter.main_grad += parameter.grad
                parameter.grad = None

            nodes.append(parameter.expand_as(parameter).grad_fn.next_functions[0][0])
            nodes[-1].register_hook(hook)
        run(schedule, chunks, 3)
        for parameter in (p for chunk in chunks for p in chunk.parameters()):
            assert parameter.grad is None
            parameter.grad = parameter.main_grad
        assert_same_gradients(chunks, reference(4, 3)[0], schedule)

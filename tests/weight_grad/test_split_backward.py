"""Weight gradients that come in W, to those who watch for them as Megatron does."""

import contextlib

import torch
from tools.models import assert_same_gradients, build, reference, run
from tools.ranks import on_ranks


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

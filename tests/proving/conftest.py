"""Ranks of a proof are forks of the process that asks for it."""

import os

import pytest
import torch


@pytest.fixture(autouse=True)
def forks() -> None:
    """Gradients that an earlier test has computed on a device leave threads, without which autograd runs in no fork.
    Torch 2.15 has them where graphs of a device were traced."""
    if (child := os.fork()) == 0:
        try:
            torch.ones(1, requires_grad=True).sum().backward()
        except RuntimeError:
            os._exit(1)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        pytest.skip("autograd has threads in this process, which no fork has: run tests/proving alone")

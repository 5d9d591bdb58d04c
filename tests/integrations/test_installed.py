"""Trainers that import Megatron's function get ours, unchanged, between `install` and `uninstall`."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from tools.megatron_models import batches, forward_step, megatron, provider, step
from tools.ranks import on_ranks

from megapipe.integrations.megatron import build_model_chunks, install, uninstall

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None,
    reason="make test installs megatron-core; pip install --no-deps megatron-core==0.16.1",
)

TRAINER = """
from megatron.core.pipeline_parallel import get_forward_backward_func
import megatron.core.pipeline_parallel.schedules as schedules

def function():
    return get_forward_backward_func()

def from_file(pp_size, vp_size):
    return schedules.get_forward_backward_func(pp_size, vp_size)
"""


@contextlib.contextmanager
def unchanged_trainer() -> Iterator[Callable[[], types.ModuleType]]:
    """Gives what imports a package that a user does not edit."""

    def imported() -> types.ModuleType:
        module = types.ModuleType("trainer_of_somebody")
        exec(TRAINER, module.__dict__)
        sys.modules[module.__name__] = module
        return module

    try:
        yield imported
    finally:
        uninstall()
        sys.modules.pop("trainer_of_somebody", None)


def asking_step(data_iterator: Any, model: Any) -> Any:
    """It asks Megatron where it is, as that of verl and SkyRL do to know whether to look at the logits."""
    from megatron.core import parallel_state

    place = {"ignore_virtual": False, "vp_stage": model.vp_stage}
    assert model.pre_process == parallel_state.is_pipeline_first_stage(**place)
    assert model.post_process == parallel_state.is_pipeline_last_stage(**place)
    return forward_step(data_iterator, model)


@on_ranks(2)
def test_an_unchanged_trainer_runs_any_schedule(rank: int) -> None:
    """Losses and gradients of its steps are Megatron's own to the last bit, also of zbv with chunks built for it."""
    data = batches(4, 0)
    config = megatron(2)
    with unchanged_trainer() as imported:
        theirs = build_model_chunks(provider(config), "1f1b")
        from megatron.core.pipeline_parallel.schedules import forward_backward_pipelining_without_interleaving as own

        expected = step(own, theirs, data)
        own_gradients = {name: p.grad for name, p in theirs[0].named_parameters()}
        with install("zb1p"):
            chunks = build_model_chunks(provider(config), "zb1p")
            assert step(imported().function(), chunks, data) == expected
        for name, parameter in chunks[0].named_parameters():
            assert torch.equal(parameter.grad, own_gradients[name]), name
        config = megatron(2, 2)
        install("zbv")
        chunks = build_model_chunks(provider(config), "zbv")
        losses = step(sys.modules["trainer_of_somebody"].function(), chunks, data, forward_step_func=asking_step)
        assert expected == (losses if rank == 1 else [])  # where Megatron's trainers read them


@on_ranks(1)
def test_the_schedule_by_name_by_variable_and_as_megatron_would(rank: int) -> None:
    with unchanged_trainer() as imported:
        install()
        module = imported()
        assert module.from_file(4, 2).name == "interleaved_1f1b"
        assert module.from_file(4, None).name == "1f1b"
        with mock.patch.dict(os.environ, MEGAPIPE_SCHEDULE="zb2p"):
            assert module.function().name == "zb2p"
        install("zbv")  # another one, for who has imported it already
        assert module.function().args[0].name == "zbv"  # which is told where its forwards are
        with pytest.raises(ValueError, match="zbw"):
            install("zbw")
        uninstall()
        uninstall()
        assert module.from_file(4, 2).__module__ == "megatron.core.pipeline_parallel.schedules"
        with install("v_min"):
            assert module.function().args[0].name == "v_min"
        assert module.from_file(4, None).__module__ == "megatron.core.pipeline_parallel.schedules"


@on_ranks(1)
def test_a_trainer_that_was_imported_before_is_named(rank: int) -> None:
    """It would have gone on to call Megatron's schedules, without a word."""
    with unchanged_trainer() as imported:
        imported()
        with pytest.raises(RuntimeError, match="trainer_of_somebody imported get_forward_backward_func from Megatron"):
            install("zbv")

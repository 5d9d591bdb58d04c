"""The settings: what `help` shows of them, and what they refuse."""

import inspect
import re
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megapipe import PipelineConfig, get_forward_backward_func
from megapipe.config import StepConfig, common_config

OF_MEGATRON = "read where the config is another object, such as Megatron's?"


@pytest.mark.parametrize("config", [PipelineConfig, StepConfig])
def test_help_has_every_field_with_its_default(config: type[PipelineConfig]) -> None:
    """In the order of the fields. Where no default is said, it is None."""
    names = [field.name for field in fields(config)]
    texts = inspect.getdoc(config).partition("Attributes:\n")[2]
    assert re.findall(r"^    (\w+): ", texts, flags=re.MULTILINE) == names
    defaults = [repr(field.default) for field in fields(config) if field.default is not None]
    assert re.findall(r" Default:\s+(.+)\.$", texts, flags=re.MULTILINE) == defaults
    assert list(inspect.signature(config).parameters) == names


WRONG: list[tuple[str, Any, str]] = [
    ("broadcast_report", 1, "PipelineConfig has no field 'broadcast_report': do you mean broadcast_reports?"),
    ("num_microbatchs", 1, "do you mean num_microbatches, an argument of the schedule's call?"),
    ("pipeline_model_parallel_size", 1, "an argument of parallel_state.initialize_model_parallel?"),
    ("params_dtype", 1, "do you mean pipeline_dtype?"),
    ("recompute_granularity", 1, "do you mean recompute?"),
    ("no_sync_func", print, f"do you mean no_sync_func, {OF_MEGATRON}"),
    ("colour", 1, "help(megapipe.PipelineConfig) has all"),
    ("enable_autocast", np.True_, "config.enable_autocast must be True or False, got"),
    ("variable_seq_lengths", None, "config.variable_seq_lengths must be True or False, got None."),
    ("num_sequence_slices", True, "config.num_sequence_slices must be a whole number from 1 on, got True."),
    ("p2p_lookahead", -1, "config.p2p_lookahead must be a whole number from 0 on, or None, got -1."),
    ("microbatch_group_size_per_vp_stage", 2.5, "must be a whole number from 1 on, or None, got 2.5."),
    ("min_pending_weights", None, "config.min_pending_weights must be a whole number from 0 on, got None."),
    ("max_gathered_chunks", np.ones(2), "config.max_gathered_chunks must be a whole number from 1 on, or None, got"),
    ("sequence_slice_lengths", [6, 0], "must be a sequence of whole numbers from 1 on, or None, got [6, 0]."),
    ("timeout", None, "config.timeout must be more than 0 and at most 1e9 seconds (30 years), got None."),
    ("timeout", 1e16, "at most 1e9 seconds (30 years), got 1e+16."),
    ("max_in_flight", "80GB", "must be a number of microbatches (not bytes), or None, got '80GB'."),
    ("offload_activations", 0, "config.offload_activations must be more than 0, or None, got 0."),
    ("recompute", "al", 'must be "all", a number of layers, a sequence with one of these for each stage, or None, got'),
    ("recompute", ["all", -1], "got ['all', -1]."),
    ("pipeline_dtype", "float32", "must be a torch.dtype, like torch.bfloat16, or None, got 'float32'."),
    ("p2p_transport", "ib", "config.p2p_transport must be 'nccl' or 'host', or None, got 'ib'."),
    ("grad_scale_func", 2.0, "config.grad_scale_func must be a function, or None, got 2.0."),
    ("grad_sync_func", [True, None], "config.grad_sync_func must be a function, a list of them, or None, got [True"),
    ("record_timeline", True, "config.record_timeline must be a megapipe.TimelineRecorder, or None, got True."),
    ("post_validated_optimizer", 1, "must be a megapipe.PostValidatedOptimizer, or None, got 1."),
]


@pytest.mark.parametrize(("name", "value", "message"), WRONG)
def test_what_cannot_be_set(name: str, value: Any, message: str) -> None:
    """Attributes, which nearly all pages set, were not looked at: a misspelt one let replicas drift apart."""
    for make in (PipelineConfig, lambda **given: replace(PipelineConfig(), **given)):
        with pytest.raises((TypeError, ValueError), match=re.escape(message)):
            make(**{name: value})
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        setattr(PipelineConfig(), name, value)


def test_other_numbers_become_ours() -> None:
    """Those of NumPy ended in an AssertionError."""
    config = PipelineConfig(p2p_max_ctas=np.int64(2), recompute=[np.int32(1), None, "all"])
    config.recompute, config.sequence_slice_lengths = np.int64(1), (np.int8(3), 3)
    assert [type(config.p2p_max_ctas), type(config.recompute)] == [int, int]
    assert config.sequence_slice_lengths == (3, 3)
    config.max_in_flight = np.float64(1.5)
    assert type(config.max_in_flight) is float, "or a later step does not see that it is another one"


def test_a_config_is_no_dict() -> None:
    with pytest.raises(TypeError, match=r"got a dict: pass megapipe.PipelineConfig\(\*\*it\)"):
        StepConfig.of({"recompute": "all"})


def test_chunks_of_a_rank_have_one_config() -> None:
    """A setting of any chunk but the first was passed over."""
    first = SimpleNamespace(max_in_flight=2)
    assert common_config([None, first, PipelineConfig(), SimpleNamespace(max_in_flight=2.0, anything=1)]) is first
    assert common_config([None]) is None
    with pytest.raises(ValueError, match=r"max_in_flight is 3 for one of this rank's chunks and 2 for the first"):
        common_config([first, PipelineConfig(max_in_flight=3)])


def test_an_argument_that_a_schedule_does_not_take() -> None:
    with pytest.raises(
        TypeError, match=r"no argument 'collect_nonloss_data' \(do you mean 'collect_non_loss_data'\?\)"
    ):
        get_forward_backward_func("1f1b")(print, None, None, 1, collect_nonloss_data=True)  # type: ignore

"""The settings as `help` shows them."""

import inspect
import re
from dataclasses import fields, replace

import pytest

from megapipe import PipelineConfig


def test_the_docstring_has_every_field_with_its_default() -> None:
    """In the order of the fields. Where no default is said, it is None."""
    entries = inspect.getdoc(PipelineConfig).partition("Attributes:\n")[2].partition("\nRaises:")[0]
    texts = dict(re.findall(r"^    (\w+): (.*(?:\n        .*)*)", entries, flags=re.MULTILINE))
    assert list(texts) == [field.name for field in fields(PipelineConfig)]
    for field in fields(PipelineConfig):
        said = re.findall(r"Default:\s+(.+)\.$", texts[field.name])
        assert said == ([] if field.default is None else [repr(field.default)]), field.name


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("broadcast_report", "do you mean broadcast_reports?"),
        ("num_microbatchs", "do you mean num_microbatches, an argument of the schedule's call?"),
        ("n_microbatches", "do you mean num_microbatches, an argument of the schedule's call?"),
        (
            "pipeline_model_parallel_size",
            "do you mean pipeline_model_parallel_size, an argument of parallel_state.initialize_model_parallel?",
        ),
        ("params_dtype", "do you mean pipeline_dtype?"),
        ("recompute_granularity", "do you mean recompute?"),
        ("colour", "help(megapipe.PipelineConfig) has all"),
    ],
)
def test_a_wrong_field_is_told_what_is_meant(wrong: str, meant: str) -> None:
    """It was Python's bare TypeError."""
    for make in (PipelineConfig, lambda **given: replace(PipelineConfig(), **given)):
        with pytest.raises(TypeError, match=re.escape(f"PipelineConfig has no field {wrong!r}: {meant}") + "$"):
            make(**{wrong: 1})


def test_the_signature_has_the_fields() -> None:
    assert list(inspect.signature(PipelineConfig).parameters) == [field.name for field in fields(PipelineConfig)]

"""The settings as `help` shows them."""

import inspect
import re
from dataclasses import fields

from megapipe import PipelineConfig


def test_the_docstring_has_every_field_with_its_default() -> None:
    """In the order of the fields. Where no default is said, it is None."""
    entries = inspect.getdoc(PipelineConfig).partition("Attributes:\n")[2].partition("\nRaises:")[0]
    texts = dict(re.findall(r"^    (\w+): (.*(?:\n        .*)*)", entries, flags=re.MULTILINE))
    assert list(texts) == [field.name for field in fields(PipelineConfig)]
    for field in fields(PipelineConfig):
        said = re.findall(r"Default:\s+(.+)\.$", texts[field.name])
        assert said == ([] if field.default is None else [repr(field.default)]), field.name

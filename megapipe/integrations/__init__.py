"""Ties to other frameworks. A framework's own is imported where that framework has been."""

from typing import TYPE_CHECKING

from ..first_use import names_on_first_use
from ..frameworks import ties

if TYPE_CHECKING:
    from . import megatron as megatron

__all__: list[str] = []
__getattr__, __dir__ = names_on_first_use(__name__)

ties["megatron.core"] = f"{__name__}.megatron"

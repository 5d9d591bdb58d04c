"""Adapters of `peft` on stages.

Which modules get them is found out in the whole model, on the meta device: then a stage may have none of them, and what
the whole model has not is the same error on every rank.
"""

from __future__ import annotations

import copy
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from .boundaries import Absent
from .heads import whole_of


class WithAdapters(nn.Module):
    """What stages do otherwise than transformers' models."""

    config: Any
    stage: Any
    peft_config: dict[str, Any]
    _active: list[str]

    def add_adapter(
        self, adapter_config: Any, adapter_name: str | None = None, autocast_adapter_dtype: bool = True
    ) -> None:
        """What there is of it on this stage, as in transformers. Every rank calls it for all of its chunks.

        Args:
            autocast_adapter_dtype: whether adapters on weights of 16 bits or less are float32, as those of peft's
                `get_peft_model` are.

        Raises:
            ValueError: where single tokens are to be trained, whose embedding or head other stages lack.
        """
        name = adapter_name or "default"
        wanted, own = self._configs(adapter_config, name)
        with _casting(autocast_adapter_dtype):
            super().add_adapter(own, name)  # type: ignore[misc]
        wanted.base_model_name_or_path = own.base_model_name_or_path
        self.peft_config[name] = wanted

    def load_adapter(
        self,
        peft_model_id: Any = None,
        adapter_name: str | None = None,
        peft_config: Any = None,
        autocast_adapter_dtype: bool = True,
        **options: Any,
    ) -> Any:
        """What a folder of `save_pretrained` has of it for this stage, as in transformers. Every rank calls it for all
        of its chunks.

        Args:
            autocast_adapter_dtype: as for `add_adapter`.

        Raises:
            ValueError: as `add_adapter`.
        """
        name = adapter_name or "default"
        if peft_config is None:
            peft_config = importlib.import_module("peft").PeftConfig.from_pretrained(peft_model_id)
        wanted, own = self._configs(peft_config, name)
        with _casting(autocast_adapter_dtype):
            loaded = super().load_adapter(peft_model_id, name, own, **options)  # type: ignore[misc]
        wanted.inference_mode = own.inference_mode
        self._active, self.peft_config[name] = [name], wanted
        vars(self).pop("_weight_conversions", None)  # those of the adapter's file, which the model's own would follow
        return loaded

    def _configs(self, adapter_config: Any, name: str) -> tuple[Any, Any]:
        """Two copies: for the whole model, and for the modules that are here."""
        if self.stage.num_stages > 1 and getattr(adapter_config, "trainable_token_indices", None):
            raise ValueError(
                "trainable_token_indices are not known to the stages without an embedding, nor summed over those of a "
                "tied one: name the embedding among target_modules."
            )
        peft, constants = (importlib.import_module(name) for name in ("peft", "peft.utils.constants"))
        wanted, own = copy.deepcopy(adapter_config), copy.deepcopy(adapter_config)
        whole = whole_of(self, torch.float32)
        peft.inject_adapter_in_model(wanted, whole, name, low_cpu_mem_usage=True)
        # Parameters that are targets by themselves are found on the stage by their own names.
        adapted = {key for key, one in whole.named_modules() if _is_adapted(one) and not hasattr(one, "parameter_name")}
        here = {key for key, module in self.named_modules() if not isinstance(module, Absent)}
        own.target_modules = sorted(adapted & here) or constants.DUMMY_TARGET_MODULES
        return wanted, own

    def set_adapter(self, adapter_name: list[str] | str) -> None:
        """The method of transformers, but that no layer need have adapters."""
        self._active = [adapter_name] if isinstance(adapter_name, str) else list(adapter_name)
        if any(map(_is_adapted, self.modules())):
            super().set_adapter(adapter_name)  # type: ignore[misc]

    def active_adapters(self) -> list[str]:
        """The method of transformers, but that no layer need have adapters."""
        if any(map(_is_adapted, self.modules())):
            return list(super().active_adapters())  # type: ignore[misc]
        return self._active


@contextmanager
def _casting(is_cast: bool) -> Iterator[None]:
    """Adapters that transformers makes meanwhile are float32, before their weights are loaded. They had the dtype of
    their layer: in bfloat16 small steps of an optimizer are lost."""
    peft: Any = importlib.import_module("peft")
    cast, inject = peft.tuners.tuners_utils.cast_adapter_dtype, peft.inject_adapter_in_model

    def inject_and_cast(config: Any, model: Any, name: str, **options: Any) -> Any:
        found = inject(config, model, name, **options)
        cast(model, name, is_cast)
        return found

    with mock.patch.object(peft, "inject_adapter_in_model", inject_and_cast):  # which is looked up in each call
        yield


def _is_adapted(module: nn.Module) -> bool:
    kind: type = importlib.import_module("peft.tuners.tuners_utils").BaseTunerLayer
    return isinstance(module, kind)


def has_adapters(chunk: Any) -> bool:
    """Whether `add_adapter` has been called."""
    return bool(getattr(chunk, "_hf_peft_config_loaded", False))


def adapted_in(chunk: Any) -> dict[str, Any]:
    """The layers with adapters, by name; nothing where `peft` has made none."""
    return {name: one for name, one in chunk.named_modules() if has_adapters(chunk) and _is_adapted(one)}


def copied_in(chunk: Any) -> dict[str, str]:
    """The modules that an adapter trains as a copy (`modules_to_save`), by name, each with the name within of the one
    that runs."""
    kind: Any = importlib.import_module("peft.utils.other").ModulesToSaveWrapper
    found = {}
    for name, module in chunk.named_modules():
        if isinstance(module, kind):
            active = [one for one in module.active_adapters if one in module.modules_to_save]
            runs = active and not module.disable_adapters
            found[name] = f"modules_to_save.{active[0]}" if runs else "original_module"
    return found


def adapters_of(chunk: Any) -> dict[str, Tensor]:
    """The tensors of the active adapter on this stage."""
    peft: Any = importlib.import_module("peft")
    (name,) = chunk.active_adapters()
    tensors: dict[str, Tensor] = peft.get_peft_model_state_dict(chunk, adapter_name=name, save_embedding_layers=False)
    return tensors


def load_adapters(chunk: Any, folder: Path) -> None:
    """Read the tensors of the active adapter from a folder of `save_pretrained`.

    Raises:
        ValueError: where some are missing, or of another shape.
        FileNotFoundError: where there is no adapter.
    """
    peft: Any = importlib.import_module("peft")
    (name,) = chunk.active_adapters()
    file, wanted = folder / "adapter_model.safetensors", adapters_of(chunk)
    with importlib.import_module("safetensors").safe_open(file, framework="pt") as saved:
        names = {key.removeprefix("base_model.model."): key for key in saved.keys()}  # noqa: SIM118  # no mapping
        for key, tensor in wanted.items():
            shape = saved.get_slice(names[key]).get_shape() if key in names else None
            if shape != list(tensor.shape):
                has = "no" if shape is None else f"{shape} for"
                raise ValueError(f"{file} has {has} {key}, which the adapter has as {list(tensor.shape)}.")
        tensors = {key: saved.get_tensor(names[key]) for key in wanted}
    peft.set_peft_model_state_dict(chunk, tensors, adapter_name=name)


def save_adapter_config(chunk: Any, folder: Path) -> None:
    (name,) = chunk.active_adapters()
    chunk.peft_config[name].save_pretrained(folder)

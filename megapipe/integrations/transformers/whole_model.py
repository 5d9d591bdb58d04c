"""The whole model, without memory or small."""

from __future__ import annotations

import copy
import importlib
import math
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from .boundaries import Absent, CannotCutError

OTHER_HEAD = re.compile(r"For(?=[A-Z])(?!CausalLM|ConditionalGeneration|MaskedLM|PreTraining)|Reward|Value")


def check_kind(config: Any) -> None:
    """Raises CannotCutError where the config is of no decoder with a head for tokens."""
    transformers: Any = importlib.import_module("transformers")
    name = type(config).__name__.removesuffix("Config")
    if config.is_encoder_decoder:
        raise CannotCutError(
            f"{name} cannot be cut into stages: it has an encoder besides its decoder: try megapipe.split."
        )
    known = [transformers.MODEL_FOR_CAUSAL_LM_MAPPING, transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING]
    made = [mapping[type(config)].__name__ for mapping in known if type(config) in mapping]
    if not made:
        raise CannotCutError(f"{name} cannot be cut into stages: it is no decoder with a head for the next token.")
    if classifier_of(config) is not None:
        made += config.architectures
    if other := [one for one in config.architectures or () if OTHER_HEAD.search(one) and one not in made]:
        raise CannotCutError(
            f"{other[0]} cannot be cut into stages: {made[0]} would be built, without the weights of its head. If it "
            "gives scores, pass its head as head; for a model of language set architectures in the config to "
            f"[{made[0]!r}]; or write its stages (docs/own_model.md)."
        )
    if getattr(config, "layerdrop", 0) or getattr(config, "decoder_layerdrop", 0):
        raise CannotCutError(f"{name} cannot be cut into stages: it leaves out layers at random: set layerdrop=0.")
    if (quantised := getattr(config, "quantization_config", None)) is not None:
        fields = quantised if isinstance(quantised, dict) else quantised.to_dict()
        raise CannotCutError(
            f"{name} cannot be cut into stages: its weights are quantised ({fields.get('quant_method')}). Save it with "
            "model.dequantize(), and for adapters let load_weights(..., after_layer=...) quantise each layer again. "
            "For new weights take quantization_config out of the config."
        )


CLASSIFIERS = {
    "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING": "AutoModelForTokenClassification",
    "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING": "AutoModelForSequenceClassification",
}
"""What transformers has of models that give a score to each token or sequence, and how it makes them."""


def classifier_of(config: Any) -> str | None:
    """The name in `CLASSIFIERS`, where the config says that its model is one of them."""
    transformers: Any = importlib.import_module("transformers")
    for name in CLASSIFIERS:
        mapping = getattr(transformers, name)
        if type(config) in mapping and list(config.architectures or ()) == [mapping[type(config)].__name__]:
            return name
    return None


def has_towers(config: Any) -> bool:
    """Whether the model sees or hears besides reading."""
    return config.get_text_config(decoder=True) is not config


def make_meta_model(config: Any, dtype: torch.dtype, attn_implementation: str | None = None) -> Any:
    """The whole model, on the meta device."""
    with torch.device("meta"):
        return make_model(config, dtype, attn_implementation)


def make_model(config: Any, dtype: torch.dtype, attn_implementation: str | None = None) -> Any:
    """The whole model, as transformers makes and initialises it."""
    transformers: Any = importlib.import_module("transformers")
    options = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
    sees = has_towers(config) and type(config) in transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    kind = transformers.AutoModelForImageTextToText if sees else transformers.AutoModelForCausalLM
    if (classifier := classifier_of(config)) is not None:
        kind = getattr(transformers, CLASSIFIERS[classifier])
    return kind.from_config(config, dtype=dtype, **options)


def keep_in_float32(model: Any) -> None:
    """Let buffers of a model on the meta device have the dtype in which transformers loads them, whatever the model's:
    the bias that routes tokens, for one. Parameters have one dtype, as FSDP2 wants."""
    for pattern, dtype in model._get_dtype_plan(model.dtype).items():
        for name, buffer in model.named_buffers():
            if re.search(pattern.replace("*", ".*"), name):
                buffer.data = buffer.data.to(dtype)


def allocate(model: Any, device: torch.device | str) -> None:
    """Give memory to a model on the meta device, also to a part of one. Names of one parameter stay so."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    model.to_empty(device=device)
    for first, *others in names.values():
        for name in others:
            owner, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(owner), attribute, model.get_parameter(first))


def make_untouched(config: Any, dtype: torch.dtype, attn_implementation: str | None = None) -> Any:
    """The whole model on the CPU. What constructors set has its value, and what is drawn is undefined."""
    with torch.device("cpu"), importlib.import_module("transformers.initialization").no_init_weights():
        model = make_model(config, dtype, attn_implementation)
    model.tie_weights()
    return model


def allocate_around(model: Any, layers: nn.ModuleList, device: torch.device | str) -> None:
    """Give memory to what is not in the layers, which stay on the meta device."""
    own, layers._modules = layers._modules, {}
    try:
        allocate(model, device)
    finally:
        layers._modules = own


def initialise(model: Any, seed: int | None, within: str = "") -> None:
    """Initialise as the model does by itself, module by module, each with its own seed; without a seed only its
    buffers.

    Args:
        within: the name of the module that is initialised, and what is in it.
    """
    state = model.state_dict() if seed is not None else {}
    for tensor in state.values():
        tensor.fill_(torch.nan) if tensor.is_floating_point() else None
    part = model.get_submodule(within)
    for tensor in part.parameters():
        tensor._is_hf_initialized = seed is None  # which transformers then leaves alone
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    generators = [torch.default_generator, *(torch.cuda.default_generators[device.index] for device in devices)]
    with torch.random.fork_rng(devices=devices), torch.no_grad():
        for name, module in reversed(list(part.named_modules(prefix=within))):  # those within a module come first
            has_tensors = bool(module._buffers) or any(True for _ in module.parameters())
            if not has_tensors and any(isinstance(one, Absent) for one in module.children()):
                continue  # some initialise what is in them
            for generator in generators:  # torch.manual_seed would seed those of all devices
                generator.manual_seed(((seed or 0) + zlib.crc32(name.encode())) % 2**63)
            while not hasattr(owner := model.get_submodule(name), "_init_weights"):
                name = name.rpartition(".")[0]  # a model within the model initialises what is in it
            with _without_absent(module):
                owner._init_weights(module)
    for tensor in part.parameters():
        del tensor._is_hf_initialized
    left = [name for name, tensor in state.items() if tensor.numel() and bool(tensor.flatten()[0].isnan())]
    if left:
        _copy_constructed(model, state, left)


@contextmanager
def _without_absent(module: nn.Module) -> Iterator[None]:
    """The lists of layers in a module have those of this stage only, while the block runs."""
    lists = [child for child in module.children() if isinstance(child, nn.ModuleList)]
    before = [dict(one._modules) for one in lists]
    for one in lists:
        one._modules = {name: layer for name, layer in one._modules.items() if not isinstance(layer, Absent)}
    try:
        yield
    finally:
        for one, modules in zip(lists, before):
            one._modules = modules


def _copy_constructed(model: Any, state: dict[str, torch.Tensor], names: list[str]) -> None:
    """Give tensors that only constructors set their values, which the model on the meta device has not."""
    small = make_untouched(make_small_config(model.config), torch.float32).state_dict()
    for name in names:
        if small[name].shape != state[name].shape:
            raise CannotCutError(
                f"{type(model).__name__} has no new weights for {name}, which only its constructor knows: build it "
                "with seed=None, and load weights."
            )
        state[name].copy_(small[name])


COUNTS = re.compile(r"(^n_head|heads|groups|heads_per_layer)$")
WIDTHS = re.compile(r"(^|_)hidden_size$|^d_model$|^n_embd$|^embedding_(size|dim)$|_width$|_d_ssm$|embed_proj_dim$")
LARGEST = {
    re.compile(r"vocab_size(_|$)"): 64,
    re.compile(r"intermediate|ffn_?(hidden|dim)|n_inner|d_inner|^dff$|dim_ff|feed_forward|_rank$|hidden_size_per"): 32,
    re.compile(r"chunk_size$"): 8,
    re.compile(r"experts$|expert_num$"): 4,
    re.compile(r"_per_tok|top_?k$|_k$|_per_token$"): 2,
    re.compile(r"n_group$|topk_group|expert_group"): 1,
}
"""How large a config's fields may be in a small one, by name."""


def make_small_config(config: Any, num_heads: int = 2) -> Any:
    """A config of the same kind with the same layers, but `num_heads` or one, whose size is kept, and few experts. Of
    towers only the width of what they return is another.

    Configs bind their numbers to each other: the width is often that of all heads, and other sorts of heads may have to
    fill it too. So numbers of heads and widths are divided by the same number.
    """
    if has_towers(config):
        small = copy.deepcopy(config)
        text = make_small_config(config.get_text_config(), num_heads)
        text.vocab_size, text.pad_token_id = config.get_text_config().vocab_size, config.get_text_config().pad_token_id
        for name in config.sub_configs:
            if getattr(config, name, None) is config.get_text_config():
                setattr(small, name, text)
            elif (tower := getattr(small, name, None)) is not None and hasattr(tower, "out_hidden_size"):
                tower.out_hidden_size = text.hidden_size
        return small
    fields = config.to_dict()
    heads = fields.get(config.attribute_map.get("num_attention_heads", "num_attention_heads"), fields.get("num_heads"))
    if heads is None:
        divisor = max(1, config.hidden_size // 64)
    else:
        size = fields.get("head_dim") or config.hidden_size // heads
        divisor = heads // num_heads if heads % num_heads == 0 and size < 200 else heads

    def fewer(name: str, value: Any) -> Any:
        if isinstance(value, list):
            return [fewer(name, one) for one in value]
        if type(value) is not int or not value or "layers" in name:
            return value
        if COUNTS.search(name):
            return max(1, value // divisor)
        if WIDTHS.search(name):
            return math.ceil(value / divisor / 8) * 8  # kernels ask for rows of 16 bytes
        return min([value, *(most for names, most in LARGEST.items() if names.search(name))])

    small = copy.deepcopy(config)
    for name, value in fields.items():
        if (less := fewer(name, value)) != value:
            setattr(small, name, less)
    if getattr(small, "pad_token_id", None) is not None:
        small.pad_token_id = 0
    return small

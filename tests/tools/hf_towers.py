"""Small models of transformers that read images, with random weights, and microbatches for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import transformers
from tools import hf_models
from tools.hf_models import BASE

from megapipe.integrations.transformers import count_items

IMAGE = 5
"""The token that stands for a piece of an image."""

_TEXT = BASE | {"num_hidden_layers": 4, "vocab_size": 64}
_LLAMA = _TEXT | {"model_type": "llama"}
_VISION = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
_VISION |= {"image_size": 8, "patch_size": 4, "num_channels": 3}
_CLIP = _VISION | {"model_type": "clip_vision_model", "projection_dim": 16}
_SIGLIP = _VISION | {"model_type": "siglip_vision_model"}
_ID, _INDEX = {"image_token_id": IMAGE}, {"image_token_index": IMAGE}
_LLAMA4 = {"num_local_experts": 2, "intermediate_size_mlp": 32, "attention_chunk_size": 4, "pad_token_id": 0}
_SIZES4 = dict.fromkeys(("vision_output_dim", "projector_input_dim", "projector_output_dim"), 16)
_SIZES4 |= {"intermediate_size": 64, "pixel_shuffle_ratio": 0.5}
_QWEN = {"depth": 2, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
_QWEN |= {"in_channels": 3}
_QWEN3 = _QWEN | {"hidden_size": 16, "intermediate_size": 32, "out_hidden_size": 32}
_QWEN_TEXT = _TEXT | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}
_QWEN_IDS = _ID | {"video_token_id": 6, "vision_start_token_id": 7, "vision_end_token_id": 8}


class Kind(NamedTuple):
    config: str
    text: dict[str, Any]
    vision: dict[str, Any]
    others: dict[str, Any]
    num_tokens: int
    """Of an image."""
    how: str = "square"
    """It is given."""


def _tokens(**more: Any) -> dict[str, Any]:
    return _TEXT | more


KINDS = {
    "llava": Kind("LlavaConfig", _LLAMA, _CLIP, _ID | _INDEX, 4),
    "vipllava": Kind(
        "VipLlavaConfig", _LLAMA, _CLIP | {"num_hidden_layers": 3}, _INDEX | {"vision_feature_layers": [-2, -3]}, 4
    ),
    "aya_vision": Kind(
        "AyaVisionConfig", _tokens(model_type="cohere2", head_dim=8), _SIGLIP, _INDEX | {"downsample_factor": 2}, 1
    ),
    "paligemma": Kind(
        "PaliGemmaConfig",
        _tokens(model_type="gemma", head_dim=8, tie_word_embeddings=True),
        _SIGLIP | {"projection_dim": 32},
        _INDEX | {"projection_dim": 32},
        4,
        "types",
    ),
    "gemma3": Kind(
        "Gemma3Config",
        _tokens(head_dim=8, sliding_window=4, tie_word_embeddings=True),
        _SIGLIP,
        _ID | _INDEX | {"mm_tokens_per_image": 4},
        4,
        "types",
    ),
    "idefics3": Kind("Idefics3Config", _LLAMA, _VISION, _ID | {"scale_factor": 2}, 1, "several"),
    "smolvlm": Kind("SmolVLMConfig", _LLAMA, _VISION, _ID | {"scale_factor": 2}, 1, "several"),
    "mistral3": Kind(
        "Mistral3Config",
        _tokens(model_type="mistral", head_dim=8),
        _VISION | {"model_type": "pixtral", "head_dim": 8},
        _INDEX | {"spatial_merge_size": 2},
        1,
        "sizes",
    ),
    "internvl": Kind(
        "InternVLConfig",
        _tokens(model_type="qwen2"),
        _VISION | {"image_size": [8, 8], "patch_size": [4, 4]},
        _ID | {"downsample_ratio": 0.5},
        1,
    ),
    "llama4": Kind("Llama4Config", _tokens(head_dim=8, **_LLAMA4), _VISION | _SIZES4, _ID | _INDEX, 1),
    "qwen2_vl": Kind("Qwen2VLConfig", _QWEN_TEXT, _QWEN | {"embed_dim": 16, "hidden_size": 32}, _QWEN_IDS, 1, "grid"),
    "qwen2_5_vl": Kind(
        "Qwen2_5_VLConfig", _QWEN_TEXT, _QWEN3 | {"window_size": 8, "fullatt_block_indexes": [1]}, _QWEN_IDS, 1, "grid"
    ),
    "qwen3_vl": Kind(
        "Qwen3VLConfig",
        _QWEN_TEXT | {"head_dim": 8},
        _QWEN3 | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
        _QWEN_IDS,
        1,
        "grid",
    ),
}


def make_config(kind: str) -> Any:
    of_kind = KINDS[kind]
    return getattr(transformers, of_kind.config)(
        text_config=of_kind.text, vision_config=of_kind.vision, **of_kind.others
    )


def make_model(kind: str) -> Any:
    torch.manual_seed(0)
    return transformers.AutoModelForImageTextToText.from_config(make_config(kind)).eval()


def batches(kind: str, number: int) -> list[dict[str, Any]]:
    """Microbatches of two sequences, each with an image."""
    *_, num_tokens, how = KINDS[kind]
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(number):
        tokens = torch.randint(10, 64, (2, 12), generator=generator)
        tokens[:, 2 : 2 + num_tokens] = IMAGE
        batch: dict[str, Any] = {"input_ids": tokens, "labels": torch.where(tokens == IMAGE, -100, tokens)}
        images = torch.randn(2, 3, 8, 8, generator=generator)
        if how == "grid":
            batch["pixel_values"] = torch.randn(8, 3 * 2 * 4 * 4, generator=generator)
            batch["image_grid_thw"] = torch.tensor([[1, 2, 2], [1, 2, 2]])
            batch["mm_token_type_ids"] = (tokens == IMAGE).int()
        elif how == "several":
            batch["pixel_values"] = images[:, None]
        else:
            batch["pixel_values"] = images
        if how == "sizes":
            batch["image_sizes"] = torch.tensor([[8, 8], [8, 8]])
        if how == "types":
            batch["token_type_ids"] = (tokens == IMAGE).long()
        found.append(batch)
    return found


def load(kind: str, folder: Path, schedule: str, **options: Any) -> tuple[Any, list[Any]]:
    """The whole model, and chunks that have read its weights."""
    model = make_model(kind)
    hf_models.save_on_first(model, folder)
    chunks = hf_models.load_chunks(folder, schedule, **options)
    for chunk in chunks:
        chunk.eval()
    return model, chunks


def check(model: Any, chunks: list[Any], schedule: str, microbatches: list[dict[str, Any]]) -> None:
    hf_models.compare(schedule, chunks, model, count_items(microbatches))


def run_all(kind: str, schedule: str, folder: Path) -> None:
    """One step with the towers trained, one with them frozen, and files."""
    microbatches = batches(kind, 2)
    layout = [1, 0, 1, 1, 0, 1, 0, 0] if dist.get_world_size() == 4 and schedule == "zbv" else None
    model, chunks = load(kind, folder / "given", schedule, example=microbatches[0], layout=layout)
    check(model, chunks, schedule, microbatches)
    for part in (model, *chunks):
        part.zero_grad()
        for name, parameter in part.named_parameters():
            parameter.requires_grad = ".layers." in name and "vision" not in name and "visual" not in name
    check(model, chunks, schedule, microbatches)
    hf_models.assert_saved(chunks, model, folder / "saved")

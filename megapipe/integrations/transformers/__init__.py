"""Models of Hugging Face's transformers, trained under any schedule.

    chunks = build_chunks("path/to/model", schedule="zbv")  # this rank's layers only
    load_weights(chunks, "path/to/model")  # this rank's tensors only
    ...
    save_pretrained(chunks, "out")  # what AutoModelForCausalLM.from_pretrained loads

A chunk is the model itself, with the layers of other stages taken out. What it runs is the model's own forward, so
masks, positions and rotary embeddings are computed by the model's code on every stage, and parameters have the names
they have in the whole model. See docs/huggingface.md. transformers is imported when a function here is called, or a
trainer is asked for.
"""

from typing import TYPE_CHECKING

from ...first_use import names_on_first_use

if TYPE_CHECKING:
    from .boundaries import CannotCutError
    from .build import build_chunks
    from .generation import generate
    from .loading import load_weights
    from .log_probs import token_log_probs
    from .saving import save_pretrained
    from .stage import ChunkConfig, HuggingFaceStage
    from .step import count_items, forward_step, tie_weights
    from .trainer import PipelineMixin, PipelineTrainer
    from .trl_trainers import PipelineDPOTrainer, PipelineSFTTrainer
    from .weights import named_weights

__all__ = [
    "CannotCutError",
    "ChunkConfig",
    "HuggingFaceStage",
    "PipelineDPOTrainer",
    "PipelineMixin",
    "PipelineSFTTrainer",
    "PipelineTrainer",
    "build_chunks",
    "count_items",
    "forward_step",
    "generate",
    "load_weights",
    "named_weights",
    "save_pretrained",
    "tie_weights",
    "token_log_probs",
]

__getattr__, __dir__ = names_on_first_use(__name__)

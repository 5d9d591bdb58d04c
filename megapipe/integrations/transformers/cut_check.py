"""Whether the stages of a model do together what the whole model does: tried with random numbers and small widths.

All layers are there, as they may differ, and depend on each other: only their widths are small. Each rank tries all
stages, one after the other, and so comes to the same result as all others without a word from them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from ...plan import StageInfo
from .boundaries import CannotCutError, Crossing, ModelParts, Reached, find_parts
from .data_flow import Flow, StageTrial, WholeRun, borders_of, watched
from .generation import compare_decoding
from .stage import ChunkConfig, as_stage, is_for_first
from .step import names_between_stages
from .whole_model import classifier_of, initialise, make_meta_model, make_small_config, make_untouched

LARGE = 2**20
"""Parameters of a model that is tried at a smaller size than its own."""

ROUNDING = 1e-5
"""What gradients may differ by, relative to their norm, where the stages add up numbers in another order."""

Result = TypeVar("Result")


class Checked(NamedTuple):
    """What the trial has shown."""

    flow: Flow | None
    """None for a single stage."""
    difference: float = 0.0
    """The largest relative difference of a gradient: zero, or of rounding."""
    takes_mean: bool = False
    """Whether the whole model's loss is a mean, whatever `num_items_in_batch` says."""


def check_cut(
    config: Any, layers: Sequence[range], example: Mapping[str, Any] | None = None, text_only: bool = False
) -> Checked:
    """Find out what the loss is divided by and what has to travel between stages, and compare the loss and all
    gradients of the stages in a row with those of the whole model.

    Args:
        layers: the numbers of those of each stage.
        example: a microbatch. None takes random tokens.
        text_only: towers are on no stage.

    Raises:
        CannotCutError: where they differ by more than rounding.
    """
    is_cut = len(layers) > 1 or text_only
    with torch.random.fork_rng(devices=[]), torch.enable_grad(), _one_thread():
        torch.default_generator.manual_seed(0)
        return _small(config, lambda size: _tried(_make_whole(size), layers, example, text_only, is_cut))


def _small(config: Any, check: Callable[[Any], Result | str]) -> Result:
    """The result of a check of a small config. Raises CannotCutError where it is a text."""
    whole = make_meta_model(copy.deepcopy(config), torch.float32, "eager")
    find_parts(whole)
    sizes = [config]
    if sum(parameter.numel() for parameter in whole.parameters()) > LARGE:
        sizes = [make_small_config(config, num_heads) for num_heads in (2, 4)]  # which some kinds need
    for size in map(copy.deepcopy, sizes):
        if classifier_of(size) is not None:  # of a single label there is no loss to compare
            size.num_labels, size.problem_type = max(2, size.num_labels), None
        try:
            result = check(size)
            break
        except CannotCutError:
            raise
        except Exception as error:
            result = f"tried at a small size, it fails with {type(error).__name__}: {error}"
    if isinstance(result, str):
        raise CannotCutError(f"{type(whole).__name__} cannot be cut into stages: {result}.")
    return result


def _on_cpu(example: Mapping[str, Any]) -> dict[str, Any]:
    """The example as the trial takes it: in float32, and with labels."""
    batch = dict(example)
    for name, value in batch.items():
        if torch.is_tensor(value):
            batch[name] = value.to("cpu", torch.float32 if value.is_floating_point() else value.dtype)
    batch.setdefault("labels", batch["input_ids"])
    return batch


@contextmanager
def _one_thread() -> Iterator[None]:
    """Several may add up numbers in another order each time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _make_whole(config: Any) -> Any:
    """The whole model with random numbers."""
    whole = make_untouched(config, torch.float32, "eager")
    initialise(whole, None)
    for parameter in whole.parameters():
        nn.init.normal_(parameter, std=0.1)  # also what begins with zeros, behind which nothing would be seen
    return whole.eval()


def _tried(
    whole: Any, layers: Sequence[range], example: Mapping[str, Any] | None, text_only: bool, is_cut: bool
) -> Checked | str:
    """What was found, or what is wrong."""
    parts = find_parts(whole)
    tokens = torch.randint(whole.config.get_text_config().vocab_size, (2, 6), device="cpu")
    batch = {"input_ids": tokens, "labels": _labels_for(whole, tokens)} if example is None else _on_cpu(example)
    takes_mean = _takes_mean(whole, batch)
    if not is_cut:
        return Checked(None, takes_mean=takes_mean)
    with _untied(whole), watched(whole, parts) as course:
        loss = whole(**batch, use_cache=False).loss
    if not loss.requires_grad or not torch.isfinite(loss):
        return f"at a small size its loss is {loss.item()}"
    if text_only:
        course.unread = frozenset()
    loss = whole(**batch, use_cache=False).loss
    gradients = _gradients(whole, loss)
    result: Checked | str = ""
    for reads_tokens in (False, True) if example is None else (True,):  # positions may depend on images' sizes
        flow = _find_flow(whole, parts, course, layers, batch, reads_tokens)
        if isinstance(flow, Flow) and (flow.is_plain or reads_tokens):
            result = _compared(whole, parts, flow, layers, batch, loss.detach(), gradients)
            if isinstance(result, Checked):
                return result._replace(takes_mean=takes_mean)
        elif isinstance(flow, str):
            result = flow
    return result


def _labels_for(whole: Any, tokens: Tensor) -> Tensor:
    """Labels of the kind that its loss takes: tokens, or one of its labels for each token or each sequence."""
    classifier = classifier_of(whole.config)
    if classifier is None:
        return tokens
    labels: Tensor = tokens % whole.config.num_labels
    return labels[:, 0] if "SEQUENCE" in classifier else labels


def _takes_mean(whole: Any, batch: Mapping[str, Any]) -> bool:
    """Whether its loss is the same whatever number of items it is told."""
    with torch.no_grad():
        losses = [whole(**batch, num_items_in_batch=torch.tensor(n), use_cache=False).loss for n in (1, 2)]
    return torch.equal(*losses)


def _find_flow(
    whole: Any, parts: ModelParts, course: WholeRun, layers: Sequence[range], batch: dict[str, Any], reads_tokens: bool
) -> Flow | str:
    trials = []
    for index, own in enumerate(layers):
        stage, trial = StageInfo(index, len(layers)), StageTrial(course, own)
        chunk = _chunk(whole, parts, stage, own, course, trial)
        given = {name: value for name, value in batch.items() if stage.is_first or not is_for_first(name)}
        if not (reads_tokens or stage.is_first):
            given = {"input_ids": torch.zeros_like(batch["input_ids"])}
        given.pop("labels", None)
        try:
            with torch.no_grad():
                type(whole).forward(chunk, **given, use_cache=False)
        except Reached:
            pass
        except Exception as error:
            return f"stage {index} of {len(layers)} fails with {type(error).__name__}: {error}"
        trials.append(trial)
    borders = borders_of(course, trials)
    if isinstance(borders, str):
        return borders
    sent = [[*border.takes, *(n for n in border.passes if n not in border.takes)] for border in borders[1:]]
    shapes = {
        tuple(course.calls[place.layer][place.path].shape) for b in borders[1:] for p in b.takes.values() for place in p
    }
    width = whole.config.get_text_config().hidden_size
    is_plain = all(len(names) == 1 for names in sent) and shapes <= {(*batch["input_ids"].shape, width)}
    return Flow(course, borders, is_plain, reads_tokens)


def _compared(
    whole: Any,
    parts: ModelParts,
    flow: Flow,
    layers: Sequence[range],
    batch: dict[str, Any],
    loss: Tensor,
    gradients: dict[str, Tensor | None],
) -> Checked | str:
    """Run the stages in a row."""
    chunks = []
    for index, own in enumerate(layers):
        stage = StageInfo(index, len(layers))
        crossing = Crossing(flow.borders[index], own, flow.course.forms)
        chunk = _chunk(whole, parts, stage, own, flow.course, crossing)
        chunk.flow = flow
        chunks.append(chunk)
    if shared := _shared(chunks):
        return shared
    message: Any = None
    for number, chunk in enumerate(chunks):
        chunk.set_input_tensor(message if isinstance(message, dict) else [message])
        needs = number in (0, len(chunks) - 1) or flow.reads_tokens
        try:
            message = chunk(**batch) if needs else chunk()
        except Exception as error:
            return f"stage {number} of {len(layers)} fails with {type(error).__name__}: {error}"
        if number + 1 < len(chunks) and flow.is_plain:
            wanted = chunks[number + 1].example_input(batch)
            if _sizes(message) != _sizes(wanted):
                return f"stage {number} hands on {_sizes(message)} and not {_sizes(wanted)}"
    if not torch.allclose(message, loss, rtol=ROUNDING, atol=0):
        return f"its stages have the loss {message.item():.7g}, and the whole model {loss.item():.7g}"
    largest, most = 0.0, _largest_norm(gradients)
    for name, got in _gradients(whole, message).items():
        largest = max(largest, _distance(got, gradients[name], most))
        if largest > ROUNDING:
            return f"its stages have another gradient of {name} than the whole model"
    generation = compare_decoding(whole, chunks, batch["input_ids"], ROUNDING)
    return Checked(replace(flow, cannot_generate=generation), largest)


def _largest_norm(gradients: Mapping[str, Tensor | None]) -> float:
    return max(float(one.norm()) for one in gradients.values() if one is not None)


def _distance(got: Tensor | None, wanted: Tensor | None, most: float) -> float:
    """Relative to the norm, of which what is only rounding, beside the largest of all, is not expected to agree."""
    if got is None or wanted is None:
        return 0.0 if got is wanted else float("inf")
    if torch.equal(got, wanted):
        return 0.0
    return float((got - wanted).norm()) / max(float(wanted.norm()), 1e-3 * most)


def _chunk(whole: Any, parts: ModelParts, stage: StageInfo, layers: range, course: WholeRun, crossing: Crossing) -> Any:
    """A stage whose modules are those of the whole model, which stays whole."""
    chunk = _copy(whole, parts)
    as_stage(chunk, stage, layers, course, crossing)
    chunk.config = ChunkConfig(whole.config, hidden_size=whole.config.get_text_config().hidden_size)
    return chunk


def _copy(module: nn.Module, parts: ModelParts, prefix: str = "") -> Any:
    """The module itself, but that other modules may take the places of all in it, but for what is in its layers."""
    copied = copy.copy(module)
    copied._modules, copied._buffers = dict(module._modules), dict(module._buffers)
    copied._parameters = dict(module._parameters)
    if prefix == f"{parts.layers}." or not prefix.startswith(f"{parts.layers}."):
        for name, child in module.named_children():
            copied._modules[name] = _copy(child, parts, f"{prefix}{name}.")
    return copied


@contextmanager
def _untied(model: nn.Module) -> Iterator[None]:
    """Each name has a parameter of its own while the block runs."""
    seen: set[nn.Parameter] = set()
    changed: list[tuple[nn.Module, str, nn.Parameter]] = []
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter in seen:
            owner, _, attribute = name.rpartition(".")
            changed.append((model.get_submodule(owner), attribute, parameter))
        seen.add(parameter)
    for module, attribute, parameter in changed:
        setattr(module, attribute, nn.Parameter(parameter.detach().clone()))
    try:
        yield
    finally:
        for module, attribute, parameter in changed:
            setattr(module, attribute, parameter)


def _shared(chunks: Sequence[Any]) -> str:
    """Which parameter is in two stages, besides those that `tie_weights` looks after; empty where there is none."""
    tied = set(names_between_stages(chunks[0]))
    found: dict[nn.Parameter, tuple[int, str]] = {}
    for number, chunk in enumerate(chunks):
        for name, parameter in chunk.named_parameters():
            first, its_name = found.setdefault(parameter, (number, name))
            if first != number and not ({name, its_name} <= tied and name != its_name):
                return f"stages {first} and {number} share a parameter ({its_name}, {name})"
    return ""


def _gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor | None]:
    torch.autograd.backward(loss)
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    return found


def _sizes(message: Any) -> dict[str, list[int]]:
    named = message if isinstance(message, dict) else {"hidden_states": message}
    return {name: list(tensor.shape) for name, tensor in named.items()}

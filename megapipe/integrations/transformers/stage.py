"""A model of transformers as one stage of a pipeline."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import fields
from types import FunctionType
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn

from ... import slices
from ...config import StepConfig
from ...plan import StageInfo
from .adapters import WithAdapters
from .boundaries import Absent, Crossing, ModelParts, Reached, cut, find_parts, let_cross
from .data_flow import Flow, WholeRun

CACHES = ("cache", "past_key_values")
"""The argument that holds keys and values: the first from transformers 5.24 on, the second before."""

HIDDEN = "hidden_states"
FOR_FIRST = re.compile(r"^(inputs_embeds$|pixel_values|input_features|image_(?!grid|sizes)|audio_values|video_values)")
FOR_LAST = ("shift_labels", "logits_to_keep")
GIVEN = "given "
"""What the names of the first stage's batch begin with in messages."""


def is_for_first(name: str) -> bool:
    """Whether an argument of the whole model is for embeddings or towers alone."""
    return bool(FOR_FIRST.match(name))


class ChunkConfig(StepConfig):
    """The settings of the pipeline, and behind them the model's own config: what is not a setting is read there, and
    written there. The model's layers know the latter only, and so does config.json.

    Args:
        model_config: of transformers.
        head: in the place of the one that the model's class has.
        settings: fields of `PipelineConfig`.
    """

    def __init__(self, model_config: Any, head: nn.Module | None = None, **settings: Any) -> None:
        self.__dict__["model_config"], self.__dict__["head"] = model_config, head
        super().__init__(**settings)

    def __getattr__(self, name: str) -> Any:
        if "model_config" not in self.__dict__ or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(name)  # while it is copied
        return getattr(self.__dict__["model_config"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _SETTINGS or not (name.startswith("_") or hasattr(self.model_config, name)):
            super().__setattr__(name, value)
        else:
            setattr(self.__dict__["model_config"], name, value)


_SETTINGS = {field.name for field in fields(StepConfig)}


class Routers(NamedTuple):
    """The routers of a model with experts."""

    own: list[nn.Module]
    """Those of this stage, in the order of its layers."""
    place: int
    """Where the logits are in what they return."""
    num_before: int
    """Routers in the stages before."""
    num_experts: int
    """How many experts each of them has."""


class HuggingFaceStage(WithAdapters):
    """What a chunk is, besides being a model of transformers. Its batches are that model's: tensors are [batch,
    sequence], and hidden states [batch, sequence, hidden]."""

    config: ChunkConfig
    stage: StageInfo
    """Which stage of how many this is."""
    layers: range
    """The numbers of its layers in the whole model."""
    parts: ModelParts
    routers: Routers | None
    flow: Flow | None
    """What travels between the stages; None where there is only one."""
    crossing: Crossing | None
    is_drawn: bool
    """Whether its weights have been drawn from a seed."""
    takes_mean: bool = False
    """Whether its loss is the mean over a microbatch, whatever `num_items_in_batch` says."""
    stands_in: Tensor | None
    """An empty tensor, on a stage without weights, that has their dtype and device."""
    finds_shapes = True  # of messages, in the first step: megapipe reads this name
    _received: Any = None
    _is_at_the_end = False

    @property
    def dtype(self) -> torch.dtype:
        return self._of_weights("dtype")  # type: ignore[no-any-return]

    @property
    def device(self) -> torch.device:
        return self._of_weights("device")  # type: ignore[no-any-return]

    def _of_weights(self, name: str) -> Any:
        """The answer of the model, which looks at its weights."""
        return getattr(super() if self.stands_in is None else self.stands_in, name)

    @property
    def own_layers(self) -> list[nn.Module]:
        """The layers of this stage: what `fully_shard` is called with, for instance."""
        return [layer for layer in self.parts.layers_of(self) if not isinstance(layer, Absent)]

    def resize_token_embeddings(self, *arguments: Any, **options: Any) -> Any:
        if self.stage.num_stages > 1:
            raise ValueError("a chunk has a part of the tables: resize those of the whole model, and save it, first.")
        whole: Any = super()
        return whole.resize_token_embeddings(*arguments, **options)

    def set_input_tensor(self, input_tensor: Any) -> None:
        """Called before forward and backward with what the stage before returned: a list of one tensor, or a dict."""
        self._received = input_tensor

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | None = None,
        **others: Any,
    ) -> Any:
        """Run this stage on a microbatch, given in the words of the whole model: each stage takes what it needs. Masks
        and positions that the first stage is given travel with the hidden states, to stages that are given none.

        Returns on the last stage the loss, or the logits where there are no `labels`; with `return_dict=True` all that
        the whole model returns. Elsewhere hidden states, and with them the routers' logits where the loss is to balance
        the load of experts.

        Raises:
            ValueError: this stage was not given what does not travel (`cu_seq_lens_q`, a mask for each query), and the
                first one was; or sequences are cut into slices.
        """
        batch = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            "labels": labels,
            "num_items_in_batch": num_items_in_batch,
            **others,
        }
        if slices.current() is not None:
            raise ValueError(f"{type(self).__name__} sees whole sequences: leave num_sequence_slices at 1.")
        received = self._take_input()
        given = to_hand_on(batch) if self.stage.is_first else self._take_given(received, batch)
        return self._run(received, given, **batch)

    def _run(
        self,
        received: dict[str, Tensor],
        given: dict[str, Tensor],
        input_ids: Any,
        labels: Any,
        num_items_in_batch: Any,
        return_dict: bool | None = None,
        **batch: Any,
    ) -> Any:
        """
        Args:
            given: goes on to the next stage as it is.
        """
        batch["use_cache"] = any(batch.get(name) is not None for name in CACHES)
        batch["input_ids"] = input_ids
        routed = received.pop("router_logits", None)
        if not self.stage.is_first:
            batch = {name: value for name, value in batch.items() if not is_for_first(name)}
            batch["input_ids"] = self._tokens(input_ids, received)
        with _telling_of_tracing(next(iter(received.values()), input_ids)):
            if not self.stage.is_last:
                return self._run_own(batch, received, routed, given)
            if labels is not None:
                if self.takes_mean and num_items_in_batch is not None and not return_dict:
                    raise ValueError(
                        f"the loss of {type(self).__name__} is the mean over its microbatch, whatever "
                        "num_items_in_batch says: leave count_items out, and train one replica."
                    )
                batch |= {"labels": labels, "num_items_in_batch": num_items_in_batch}
            with self._at_the_end(received, routed):
                output = super().forward(**batch)
            if return_dict:
                return output
            return output.logits if labels is None else output.loss

    def _take_input(self) -> dict[str, Tensor]:
        if self.stage.is_first or self.crossing is None:
            return {}
        border = self.crossing.border
        names = list(dict.fromkeys([*border.takes, *border.passes]))
        if not isinstance(self._received, dict):
            return dict(zip(names, self._received))
        received = dict(self._received)
        if len(names) == 1:
            received[names[0]] = received.pop(HIDDEN, None)
        return received

    def _take_given(self, received: dict[str, Tensor], batch: dict[str, Any]) -> dict[str, Tensor]:
        """Take from what was received what the first stage was given, and put it into the batch where that has none."""
        given = {name: received.pop(name) for name in [*received] if name.startswith(GIVEN)}
        for of_message, value in given.items():
            name = of_message.removeprefix(GIVEN)
            if batch.get(name) is not None:
                continue
            if value.dim() == 0:
                raise ValueError(
                    f"stage {self.stage.index} of {type(self).__name__} was given no {name}, but the first stage was: "
                    "let data_iterator yield it on every rank. Only masks and positions that are integers for each "
                    "token travel by themselves."
                )
            batch[name] = value
        return given

    def _tokens(self, input_ids: Tensor | None, received: Mapping[str, Tensor]) -> Tensor:
        """The tokens, or zeros: behind the first stage most models only look at their shape."""
        assert self.flow is not None
        if input_ids is not None:
            return input_ids
        if self.flow.reads_tokens:
            raise ValueError(
                f"stage {self.stage.index} of {type(self).__name__} reads input_ids too: let data_iterator yield whole "
                "microbatches on every rank."
            )
        hidden = next(iter(received.values()))
        return torch.zeros(hidden.shape[:2], dtype=torch.long, device=hidden.device)

    def _run_own(
        self, batch: dict[str, Any], received: dict[str, Tensor], routed: Tensor | None, given: dict[str, Tensor]
    ) -> Any:
        """The model's own forward, up to what the next stage is to be given."""
        assert self.crossing is not None
        for name in FOR_LAST:
            batch.pop(name, None)
        message = {name: received[name] for name in self.crossing.border.passes}
        with self._crossed(received), self._recorded() as own:
            if self.crossing.border.gives:
                with suppress(Reached):
                    super().forward(**batch)
                message.update(self.crossing.found)
        hidden = next(iter(message.values()))
        if len(message) == 1:
            message = {HIDDEN: hidden}
        if self.balances_load and (logits := _joined(routed, own)) is not None:
            message["router_logits"] = logits
        message |= given
        return message if len(message) > 1 or self.balances_load else hidden

    @contextmanager
    def _crossed(self, received: dict[str, Tensor]) -> Iterator[None]:
        """The crossing holds tensors only while the block runs."""
        if self.crossing is None:
            yield
            return
        self.crossing.received, self.crossing.found = received, {}
        try:
            yield
        finally:
            self.crossing.received, self.crossing.found = None, {}

    def _router_dtype(self, hidden: Tensor) -> torch.dtype:
        """What linear layers return for hidden states."""
        kind = hidden.device.type
        return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype

    @contextmanager
    def _recorded(self) -> Iterator[list[Tensor]]:
        """The logits of this stage's routers, in the order in which they run."""
        logits: list[Tensor] = []
        with ExitStack() as stack:
            if self.balances_load:
                assert self.routers is not None
                for router in self.routers.own:

                    def note(module: nn.Module, inputs: Any, output: Any, place: int = self.routers.place) -> None:
                        logits.append(output[place] if isinstance(output, tuple) else output)

                    stack.callback(router.register_forward_hook(note).remove)
            yield logits

    @contextmanager
    def at_the_end(self) -> Iterator[None]:
        """While the block runs, on the last stage, the model's parts are the whole model's for those who call them: its
        decoder goes on with what the stage has received. For a forward of another's that was put on the model, as trl
        does. The chunk itself may be called in the block too."""
        received = self._take_input()
        with self._at_the_end(received, received.pop("router_logits", None)):
            yield

    @contextmanager
    def _at_the_end(self, received: dict[str, Tensor], routed: Tensor | None) -> Iterator[None]:
        """The decoder adds the routers of earlier stages to its own."""

        def add_earlier(decoder: nn.Module, inputs: Any, output: Any) -> None:
            own = output.router_logits
            assert routed is not None
            earlier = routed.to(own[0].dtype if own else self._router_dtype(output[0]))
            output["router_logits"] = (*earlier.unbind(), *own)

        if self._is_at_the_end:
            yield
            return
        hook = None if routed is None else self.parts.decoder_of(self).register_forward_hook(add_earlier)
        self._is_at_the_end = True
        try:
            with self._crossed(received):
                yield
        finally:
            self._is_at_the_end = False
            if hook is not None:
                hook.remove()

    @property
    def balances_load(self) -> bool:
        """Whether the loss is to balance the load of experts."""
        return self.routers is not None and bool(getattr(self.config, "output_router_logits", False))

    def example_input(self, batch: Mapping[str, Any]) -> Any:
        """What this stage receives for a microbatch, without its values: for `capture` and `warm_up`. None on the first
        stage.

        Raises:
            ValueError: more than hidden states and routers' logits travels, which steps find out.
        """
        if self.stage.is_first:
            return None
        if self.flow is None or not self.flow.is_plain:
            raise ValueError(f"what travels between stages of {type(self).__name__} is known only in a step.")
        sizes = num_sequences, seq_length = batch["input_ids"].shape
        own = torch.float32 if getattr(self.config, "residual_in_fp32", False) else self.dtype
        dtype = self.config.pipeline_dtype or own
        message = {HIDDEN: torch.empty(*sizes, self.config.hidden_size or 0, dtype=dtype, device=self.device)}
        if self.balances_load and self.routers is not None and self.routers.num_before:
            shape = self.routers.num_before, num_sequences * seq_length, self.routers.num_experts
            message["router_logits"] = torch.empty(shape, dtype=torch.float32, device=self.device)
        message |= to_hand_on(batch)
        return message if len(message) > 1 or self.balances_load else message[HIDDEN]


def to_hand_on(batch: Mapping[str, Any]) -> dict[str, Tensor]:
    """What of the first stage's batch the others need too, by its names in messages: integers for each token, such as
    masks and positions, as they are, since their sizes go with those of hidden states. Of all else only that it was
    given, as an empty mark: a tensor without dimensions.

    Nothing where keys and values are kept: `generate` gives all stages the same.
    """
    first = batch.get("input_ids")
    first = batch.get("inputs_embeds") if first is None else first
    if first is None or any(batch.get(name) is not None for name in CACHES):
        return {}
    others = ("input_ids", "labels", "num_items_in_batch", *FOR_LAST)
    given: dict[str, Any] = {}
    for name, value in batch.items():
        if name in others or is_for_first(name) or not isinstance(value, (Tensor, dict)):
            continue
        travels = isinstance(value, Tensor) and _is_for_each_token(value, first.shape[1])
        given[GIVEN + name] = value if travels else torch.zeros((), dtype=torch.bool, device=first.device)
    return given


def _is_for_each_token(value: Tensor, length: int) -> bool:
    return value.dim() in (2, 3) and value.shape[-1] == length and not value.is_floating_point()


def _telling_of_tracing(tensor: Any) -> AbstractContextManager[Any]:
    """While a stage is captured: transformers then makes masks without a look at the values of tensors."""
    functional = importlib.import_module("torch._subclasses.functional_tensor").FunctionalTensor
    if not isinstance(tensor, functional):
        return nullcontext()
    return mock.patch.object(torch.compiler, "_is_compiling_flag", True)  # which transformers asks


def _joined(earlier: Tensor | None, own: list[Tensor]) -> Tensor | None:
    """[routers, tokens, experts] in float32, which holds 16 bits too; None where there are no routers yet."""
    parts = [] if earlier is None else [earlier]
    parts += [torch.stack(own).float()] if own else []
    return torch.cat(parts) if parts else None


def find_routers(parts: ModelParts, model: nn.Module, own: range) -> Routers | None:
    """The routers of a model that is still whole: those whose logits transformers records. None where there are
    none."""
    recorded = (getattr(parts.decoder_of(model), "_can_record_outputs", None) or {}).get("router_logits")
    kind = getattr(recorded, "target_class", recorded)
    if not isinstance(kind, type):
        return None
    routers = [[m for m in layer.modules() if isinstance(m, kind)] for layer in parts.layers_of(model)]
    found = [router for of_layer in routers for router in of_layer]
    if not found:
        return None
    before = sum(len(routers[number]) for number in range(own.start))
    here = [router for number in own for router in routers[number]]
    return Routers(here, getattr(recorded, "index", 1), before, len(next(found[0].parameters())))


_classes: dict[type, type] = {}


def _forward_like(own: type[nn.Module]) -> Any:
    """`HuggingFaceStage.forward`, which says that it takes its own arguments by place, and what else the model takes by
    keyword: libraries look there for the columns of a dataset, and for whether its loss takes a number of items."""
    made = FunctionType(HuggingFaceStage.forward.__code__, globals(), "forward", HuggingFaceStage.forward.__defaults__)
    made.__doc__ = HuggingFaceStage.forward.__doc__
    *first, rest = inspect.signature(HuggingFaceStage.forward).parameters.values()
    known = {one.name for one in (*first, rest)}
    others = [one for one in inspect.signature(own.forward).parameters.values() if one.name not in known]
    taken = [one if one.kind == one.VAR_KEYWORD else one.replace(kind=one.KEYWORD_ONLY) for one in others]
    made.__signature__ = inspect.Signature([*first, *taken])  # type: ignore[attr-defined]
    return made


def as_stage(
    model: Any, stage: StageInfo, layers: range, course: WholeRun | None = None, crossing: Crossing | None = None
) -> None:
    """Leave in a whole model what belongs to `stage`, and make it a `HuggingFaceStage` too: its class is swapped for
    one derived from both, of the same name, by which transformers finds things."""
    parts, dtype, device = find_parts(model), model.dtype, model.device
    routers = find_routers(parts, model, layers)
    if course is not None and crossing is not None:
        cut(model, parts, lambda name: course.is_kept(name, stage, layers))
        let_cross(parts.layers_of(model), crossing)
    own = type(model)
    if own not in _classes:
        members = {"__module__": own.__module__, "forward": _forward_like(own)}
        _classes[own] = type(own.__name__, (HuggingFaceStage, own), members)
    has_weights = any(True for _ in model.parameters())
    model.__class__ = _classes[own]
    model.stage, model.layers, model.parts, model.routers, model.crossing = stage, layers, parts, routers, crossing
    model.flow = None
    stands_in = None if has_weights else torch.empty(0, dtype=dtype, device=device)
    model.register_buffer("stands_in", stands_in, persistent=False)

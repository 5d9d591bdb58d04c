"""An ordinary module as a stage of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import Any, NamedTuple, NoReturn

from torch import Tensor, nn

from ..config import PipelineConfig
from ..overlap import find_forward_segments
from ..plan import StageInfo


class ListOfOne(NamedTuple):
    """Goes in the place of a list of one item, which Megatron's stages take for the item."""

    item: Any


def as_sent(output: Any) -> Any:
    """What a module has returned, as its PipelineStage sends it."""
    return ListOfOne(output[0]) if type(output) is list and len(output) == 1 else output


class PipelineStage(nn.Module):
    """A module that is a stage of a pipeline, and need not know.

    Where `forward_step_func` calls the stage with `(*batch, **options)`, the first stage calls `module(*batch,
    **options)`. Later ones call `module(received, **options)`: what the module of the stage before returned takes
    the place of the batch. That is a tensor, or tensors, numbers, texts and None in lists, tuples, dicts, named tuples
    and what else torch's pytrees know. Tensors of floating point that require a gradient have one there too. Their
    shapes need not be said: they are found in the first step.

    `state_dict()`, `load_state_dict()`, `named_parameters()` and `named_buffers()` use the names of the module, and so
    does everything in megapipe. Parts of the module are found on the stage, too: `stage.layers` is
    `stage.module.layers`.

    Args:
        module: the layers of this stage.
        info: which stage it is, as `stages_for_rank` has them.
        config: the settings of the pipeline, the same for all chunks. None for the defaults. It is the attribute
            `config` of the stage.

    Raises:
        TypeError: `module` or `info` is something else.
    """

    finds_shapes = True
    """Whatever sizes the schedule is called with: Megatron's, with the sequence first, say nothing of this module."""

    def __init__(self, module: nn.Module, info: StageInfo, config: Any = None) -> None:
        super().__init__()
        if not isinstance(module, nn.Module):
            raise TypeError(f"PipelineStage takes a module, got a {type(module).__name__}: wrap it in an nn.Module.")
        if not isinstance(info, StageInfo):
            raise TypeError(
                f"PipelineStage takes a StageInfo second, one of those that stages_for_rank(schedule) returns, got "
                f"{info!r}."
            )
        self.module = module
        self.info = info
        self.config = PipelineConfig() if config is None else config
        self._received: tuple[Any, ...] = ()
        self.register_state_dict_post_hook(_without_prefix)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_with_prefix)  # type: ignore[no-untyped-call]

    def named_parameters(self, prefix: str = "", *args: Any, **options: Any) -> Iterator[tuple[str, nn.Parameter]]:
        start = f"{prefix}." if prefix else ""
        for name, parameter in super().named_parameters(prefix, *args, **options):
            yield start + name.removeprefix(start).removeprefix(PREFIX), parameter

    def named_buffers(self, prefix: str = "", *args: Any, **options: Any) -> Iterator[tuple[str, Tensor]]:
        start = f"{prefix}." if prefix else ""
        for name, buffer in super().named_buffers(prefix, *args, **options):
            yield start + name.removeprefix(start).removeprefix(PREFIX), buffer

    def __getattr__(self, name: str) -> Any:
        """Parts of the module: torch follows the names of parameters from attribute to attribute."""
        module = self.__dict__.get("_modules", {}).get("module")
        if name != "module" and isinstance(module, nn.Module):
            for parts in (module._modules, module._parameters, module._buffers):
                if name in parts:
                    return parts[name]
        return super().__getattr__(name)

    def set_input_tensor(self, received: Any) -> None:
        """Called by the schedule with what the stage before returned, with [None] on the first stage."""
        if isinstance(received, ListOfOne):
            self._received = ([received.item],)
        elif isinstance(received, list) and len(received) == 1:
            self._received = () if received[0] is None else (received[0],)
        else:
            self._received = (received,)

    def forward(self, *batch: Any, **options: Any) -> Any:
        if not self.info.is_first:
            batch = self._received or self._nothing_received()
        try:
            output = self._modules["module"](*batch, **options)  # type: ignore[misc]  # not by __getattr__
        except TypeError as error:
            self._explain(error, options)
            raise
        return output if type(output) is not list or self.info.is_last else as_sent(output)

    @property
    def forward_segments(self) -> Callable[..., Generator[None, None, Any]] | None:
        """The module's segments, for `in_segments(stage, *batch)`. None where it has none."""
        segments = find_forward_segments(self.module)
        if segments is None:
            return None

        def run(*batch: Any, **options: Any) -> Generator[None, None, Any]:
            if not self.info.is_first:
                batch = self._received or self._nothing_received()
            try:
                output = yield from segments(*batch, **options)
            except TypeError as error:
                self._explain(error, options)
                raise
            return output if self.info.is_last else as_sent(output)

        return run

    def _nothing_received(self) -> NoReturn:
        raise ValueError(
            f"stage {self.info.index} has received nothing: the schedule that calls forward_step_func hands it what "
            f"stage {self.info.index - 1} returns. To run the module by itself, call stage.module."
        )

    def _explain(self, error: TypeError, options: dict[str, Any]) -> None:
        """Raises a better error, if there is one."""
        for name in options:
            if f"argument '{name}'" in str(error):
                raise TypeError(
                    f"the module of stage {self.info.index} cannot be called with the keyword {name}: {error}. "
                    "Keywords reach the module of every stage: let it take this one, or pass what is for the first "
                    "stage alone by position."
                ) from error
        forward = f"{type(self.module).__name__}.forward()"
        if not self.info.is_first and forward in str(error) and "positional argument" in str(error):
            raise TypeError(
                f"the module of stage {self.info.index} is called with one positional argument, what stage "
                f"{self.info.index - 1} returned: {error}. Return the others from the stage before, or pass them "
                "as keywords, which reach every stage."
            ) from error


PREFIX = "module."


def _without_prefix(stage: nn.Module, state_dict: Any, prefix: str, local_metadata: Any) -> None:
    long = prefix + PREFIX
    for key in [key for key in state_dict if key.startswith(long)]:
        state_dict[prefix + key.removeprefix(long)] = state_dict.pop(key)


def _with_prefix(stage: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    own = {*stage._parameters, *stage._buffers, *stage._modules} - {"module"}  # registered on the stage itself
    names = [key.removeprefix(prefix) for key in state_dict if key.startswith(prefix)]
    of_module = {name: state_dict.pop(prefix + name) for name in names if name.partition(".")[0] not in own}
    for name, value in of_module.items():  # behind that: one may have the name that another one gets
        state_dict[prefix + PREFIX + name] = value

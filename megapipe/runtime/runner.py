"""What this rank keeps from step to step for one way of calling a schedule.

There is one `Runner` for each `CallKey`. It keeps the checked arguments and the specs of messages, and for each number
of microbatches a `PreparedStep`: the plan's key, and the `Pipeline` with its links. Each step resets their counters.
What refers to a model (`Stage`, `Extension`, `GradientSync`) is made anew in each step and dropped at its end.

`run_step` (step.py) finds or makes the runner of a call, and calls `fits`, `prepare` and `run`. CONTRIBUTING.md
explains the words of the code: call, step, unit, action, loops, extension, spec, header.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from ..chunks import find_attribute
from ..config import DEFAULTS, OPTIONS, StepConfig
from ..p2p_communication import Channels, Line, Lookahead
from ..plan import Action, Schedule, ScheduleError
from ..stages import Call, Extension, Stage, find_delayed
from .arguments import NO_PEERS, check_arguments, remote_peers, specs_of, to_agree_on
from .combinations import check_combinations
from .first_step import FirstStep, end_first_steps, make_first_steps
from .found_shapes import FoundShapes, Specs
from .grad_sync import GradientSync
from .links import lines_of, links_around
from .monitor import Monitor
from .pipeline import Pipeline, checkpoint_arguments
from .plans import PlanKey
from .session import Alone, Session

PLAIN = {bool, int, float, str, type(None), torch.dtype}
"""Types whose values are part of a `CallKey`. Of values of other types only the type is; of a sequence its items."""

MODULES = {option.module for option in OPTIONS if option.module}
"""Modules that switch an option on if the user has imported them (torch.distributed.fsdp)."""

MOST_PREPARED = 64
"""The number of `PreparedStep`s that a runner keeps: those used last."""

_read_all = attrgetter(*DEFAULTS)


class CallKey(NamedTuple):
    """What a runner is for: calls with equal keys use the same one."""

    schedule: Schedule
    forward_only: bool
    sizes: tuple[int | None, ...]
    """The arguments that the shapes of messages depend on: three sizes, and whether adjust_tensor_shapes_fn is
    given."""
    inputs: tuple[Any, ...]
    """The types of the data iterators, whether pipeline_inputs are passed, and collect_non_loss_data."""
    settings: tuple[Any, ...]
    """The values of all fields of the config. Of a function or another object only the type, since it may hold a model:
    each step reads the object itself from its own call."""
    chunks: tuple[Any, ...]
    """The `Structure` of each model (structure.py), and which of `MODULES` are imported."""
    device: torch.device


def call_key(schedule: Schedule, call: Call) -> CallKey:
    """The key of a call."""
    settings = [value if type(value) in PLAIN else _by_type(value) for value in _read_all(call.config)]
    chunks = (MODULES & sys.modules.keys(), *call.structures)
    adjusts_shapes = call.adjust_tensor_shapes_fn is not None
    sizes = (call.seq_length, call.micro_batch_size, call.decoder_seq_length, adjusts_shapes)
    inputs = (*map(type, call.data_iterators), call.pipeline_inputs is not None, call.collect_non_loss_data)
    return CallKey(schedule, call.forward_only, sizes, inputs, tuple(settings), chunks, call.device)


def _by_type(value: Any) -> Any:
    """The type of a value, in place of the value: a function may hold a model, which no key may keep alive."""
    if isinstance(value, Sequence):
        return tuple(one if type(one) in PLAIN else type(one) for one in value)
    return type(value)


class PreparedStep:
    """What a runner keeps for all steps with the same number of microbatches.

    Args:
        plan_key: of the plan that the schedule follows.
        loops: the schedule's function; or, if options have added actions to its plan, a function that runs that plan.
        arguments: those that must be the same on all ranks of the pipeline, by name.
    """

    def __init__(self, plan_key: PlanKey, loops: Callable[[Any], Any], arguments: dict[str, str]) -> None:
        self.plan_key = plan_key
        self.kinds = plan_key.kinds
        self.loops = loops
        self.arguments = arguments
        self.pipeline: Pipeline | None = None
        self.lines: list[Line] = []


class Runner:
    """A schedule on this rank, for all steps with one `CallKey`.

    Attributes:
        plan_key: of the plan that the schedule follows, for the number of microbatches of this step.
        specs: for each chunk of this rank the specs of the messages that it receives, and of those that it sends, one
            per slice; None in their place if they are not known.
        found_shapes: the messages whose shapes can not be told before the first step of this runner. What the stages
            return in that step tells them.

    Raises:
        ValueError, TypeError: the arguments are wrong, or do not go together.
    """

    def __init__(self, call_key: CallKey, call: Call, session: Session | Alone) -> None:
        self.call_key = call_key
        config = call.config
        self._session = session
        self.pp_rank, self._pp_size = session.pp_rank, len(session.ranks)
        schedule = call_key.schedule
        self.stages = schedule.stages(self.pp_rank, self._pp_size, len(call.models))
        check_arguments(call, self.stages)
        self._kinds: set[str] = set()  # of action, in the plan of this step
        self._check(call)
        self.slices, self._stage_type = call.slices, Stage
        for extension in self._of_options(config):  # cutting sequences into slices takes stages of another class
            self.slices, self._stage_type = extension.cut(call) or (self.slices, self._stage_type)
        call.slices, call.stages = self.slices, self.stages
        self._peers = [remote_peers(stage, schedule.placement, self.pp_rank, self._pp_size) for stage in self.stages]
        self._static_specs = specs_of(call, self.stages, self._peers)
        self._shapes_may_change = call.adjust_tensor_shapes_fn is not None or any(
            find_attribute(model, "infer_stage_inputs_from_pipeline_inputs") is not None for model in call.models
        )
        of_unknown_shape = {
            chunk: peers
            for chunk, peers in enumerate(self._peers)
            if not config.variable_seq_lengths and peers != NO_PEERS and self._static_specs[chunk] == (None, None)
        }
        self.found_shapes = FoundShapes(session, call, self.stages, of_unknown_shape)
        self._delays_weights = [config.delay_wgrad_compute and bool(find_delayed(model)) for model in call.models]
        self._is_new = True
        self.specs: Specs = []
        self._channels: Channels | None = None
        self._prepared: dict[int, PreparedStep] = {}
        self._update_specs(call)
        self._select(call)

    def _update_specs(self, call: Call) -> None:
        """Take the shapes that are known so far: from arguments and models, and from the first step. If they have
        changed, all `PreparedStep`s are dropped, and the next step makes new ones."""
        specs = list(self._static_specs)
        self.found_shapes.fill_in(specs)
        if not self._is_new and specs == self.specs:
            return
        self.specs = specs
        self._shapes_are_found = [chunk in self.found_shapes for chunk in range(len(specs))]
        self._have_headers = [self.found_shapes.have_headers(chunk, sent) for chunk, (_, sent) in enumerate(specs)]
        self._prepared.clear()

    def _select(self, call: Call) -> None:
        """Take the `PreparedStep` for the number of microbatches of a call, or make it."""
        prepared, number = self._prepared, call.num_microbatches
        self._current = prepared.pop(number) if number in prepared else self._prepare_for(call)
        self.plan_key, self._kinds = self._current.plan_key, self._current.kinds
        prepared[number] = self._current
        for oldest in list(prepared)[:-MOST_PREPARED]:
            del prepared[oldest]

    def _prepare_for(self, call: Call) -> PreparedStep:
        schedule, config = self.call_key.schedule, call.config
        self._check(call)
        sizes = (self._pp_size, call.num_microbatches, len(self.stages))
        key = PlanKey(schedule, *sizes, config.settings, config.num_sequence_slices)
        if (config.max_in_flight, config.recompute, config.offload_activations) != (None, None, None):
            _ = key.plan  # raises if the schedule cannot be run with these
        agreed = to_agree_on(schedule.name, call, self.stages, self.specs) | self.found_shapes.to_agree_on(self.specs)
        return PreparedStep(key, schedule.loops if call.forward_only else key.loops, agreed)

    def _check(self, call: Call) -> None:
        """Raises ValueError if options do not go together, or not with this number of microbatches."""
        self.call_key.schedule.check_units(call.num_microbatches, call.config.num_sequence_slices)
        check_combinations(call, self._pp_size)

    def fits(self, call: Call) -> bool:
        """Whether the messages of this call have the same shapes as those of earlier calls, as far as arguments and
        models tell them. If not, the caller makes another runner.

        The key does not hold what adjust_tensor_shapes_fn, or a model's infer_stage_inputs_from_pipeline_inputs, will
        answer. So they are asked again. Without them the answer is yes."""
        if not self._shapes_may_change:
            return True
        return specs_of(replace(call, slices=self.slices), self.stages, self._peers) == self._static_specs

    def extensions(self, call: Call) -> list[Extension]:
        """Make the extensions of this step: of options that are set and have something to do in it."""
        extensions = []
        for extension in self._of_options(call.config):
            if extension.takes_part(call):
                extensions.append(extension)
        return extensions

    def _of_options(self, config: StepConfig) -> Iterator[Extension]:
        """Make the extension of each option whose field of the config is set, whose module the user has imported, or of
        whose kind there are actions in the plan."""
        for option in OPTIONS:
            is_set = option.field and getattr(config, option.field) != DEFAULTS[option.field]
            if is_set or option.module in sys.modules or option.kind in self._kinds:
                module, _, name = option.extension.partition(":")
                extension_class: type[Extension] = getattr(importlib.import_module(module), name)
                yield extension_class(config, lambda: self.plan_key.plan, self.pp_rank, self._session.watchdog)

    def agree(self, call: Call, suffix: str = "") -> None:
        """Check that all ranks of the pipeline make the same call. Collective over the ranks of the pipeline, unless
        the last check was of these very arguments (the same dict). If only some ranks come here with others,
        `Agreement` finds out, and raises on all ranks.

        Args:
            suffix: added to the name of the schedule in the comparison, such as ", in megapipe.warm_up".

        Raises:
            ValueError: ranks disagree, on all ranks.
        """
        if not isinstance(self._session, Session):
            return
        watchdog, agreement = self._session.watchdog, self._session.agreement
        arguments = self._current.arguments
        if agreement.agreed is arguments and not suffix:
            agreement.known_step = watchdog.progress.step
            return
        watchdog.timeout = call.config.timeout
        name = {"the schedule": self.plan_key.schedule.name + suffix}
        agreement.agree(arguments | name if suffix else arguments)

    def connect(self, call: Call) -> Channels | None:
        """Returns the channels of the pipeline; None for one rank. The first step that needs them opens them, which is
        collective over the pipeline."""
        if not isinstance(self._session, Session):
            return None
        has_headers = call.config.variable_seq_lengths or bool(self.found_shapes)
        placement, device = self.plan_key.schedule.placement, self.call_key.device
        return self._session.channels(placement, self.plan_key.num_chunks, device, has_headers, call.config)

    def prepare(self, call: Call) -> list[Extension]:
        """Called before `run`: check the call, agree with the other ranks, and build the pipeline if there is none yet.
        Collective over the ranks of the pipeline in the first step, and after a step with other arguments.

        Returns:
            The extensions of this step, for `run`.

        Raises:
            ValueError, TypeError: an option refuses the call, or ranks disagree. Then all ranks raise.
        """
        call.slices, call.stages = self.slices, self.stages
        if self._prepared.get(call.num_microbatches) is not self._current:
            self._select(call)
        extensions = self.extensions(call)
        self.agree(call)
        if self._current.pipeline is None:
            self._build(call)
        return extensions

    def run(self, call: Call, extensions: Sequence[Extension]) -> None:
        """Run one step. The results are put into the call. If it fails, `run_step` drops this runner."""
        first_steps = self._run_loops(call, extensions)
        if self._is_new and not call.is_void:
            self._is_new = False
            gradients_in_params = not any(extension.hides_gradients for extension in extensions)
            end_first_steps(first_steps, call, self.plan_key, self.found_shapes, gradients_in_params, self._session)
            self._update_specs(call)
        for extension in extensions:
            extension.end()

    def _run_loops(self, call: Call, extensions: Sequence[Extension]) -> list[FirstStep | None]:
        """Run the schedule's loops. Returns for each chunk what has observed its first step with this runner; None in
        later steps."""
        pipeline = self._current.pipeline
        assert pipeline is not None
        contexts = []
        for extension in extensions:
            contexts.append(extension.begin(call))
        stages = self.make_stages(call)
        sync = self._gradient_sync(call, extensions, stages)
        first_steps: list[FirstStep | None] = [None] * len(stages)
        if self._is_new:
            first_steps = make_first_steps(stages, call, self.found_shapes)
        for line in self._current.lines:
            line.reset()
        transport = None if self._channels is None else self._channels.transport
        monitor = Monitor(self._session.watchdog, transport)
        for extension in extensions:
            monitor = extension.monitor(monitor)
        arguments = checkpoint_arguments(self.plan_key, self.pp_rank, call)
        pipeline.begin_step(call, stages, first_steps, extensions, monitor, sync, arguments)
        with ExitStack() as around:
            if sync is not None:
                around.enter_context(sync)
            elif call.forward_only:
                around.enter_context(torch.no_grad())
            for context in contexts:
                if context is not None:
                    around.enter_context(context)
            results = self._current.loops(pipeline)
        if results is not call.results:
            raise ScheduleError(f"{self.plan_key.schedule.name} did not end with `return pipe.finish()`.")
        return first_steps

    def _build(self, call: Call) -> None:
        """Make the `Pipeline` that the schedule's loops call. Opens the channels if they are not open."""
        self._channels = channels = self.connect(call)
        lookahead = Lookahead(0)
        if channels is not None and call.config.overlap_p2p_comm:
            ahead = call.config.p2p_lookahead
            lookahead = channels.transport.lookahead if ahead is None else Lookahead(ahead)
        lines = {}
        if channels is not None and channels.transport.matches_by_order:
            buffered = channels.transport.buffered_bytes
            lines = lines_of(self.plan_key.traffic_around(self.pp_rank), self.pp_rank, call.forward_only, buffered)
        self._current.lines = list(lines.values())
        links = links_around(
            self.plan_key, self.pp_rank, self.specs, self.found_shapes, channels, lookahead, lines, call.forward_only
        )
        posted_ahead = self._posted_ahead(channels, lookahead, call.forward_only)
        self._current.pipeline = Pipeline(self.plan_key, self.pp_rank, links, call.forward_only, posted_ahead)

    def _posted_ahead(
        self, channels: Channels | None, lookahead: Lookahead, forward_only: bool
    ) -> Mapping[Action, Sequence[Action]]:
        """`Plan.posted_ahead` of this rank: before which action which large receives are posted. Empty if none is: for
        all transports but NCCL, without a lookahead, if all messages are small, and if a validation is run by the plan
        of a training step."""
        if channels is None or not channels.transport.matches_by_order or not lookahead.num_receives:
            return {}
        specs = [spec for received_and_sent in self.specs for specs in received_and_sent for spec in specs or ()]
        if all(spec.nbytes <= channels.transport.buffered_bytes for spec in specs):
            return {}
        plan = self.plan_key.plan
        return plan.posted_ahead[self.pp_rank] if plan.forward_only == forward_only else {}

    def _gradient_sync(
        self, call: Call, extensions: Sequence[Extension], stages: Sequence[Stage]
    ) -> GradientSync | None:
        """What calls the config's functions for gradients and parameters in this step, or what an option puts in its
        place; None if there is nothing to call."""
        config = call.config
        make: Callable[..., GradientSync] = GradientSync
        for extension in extensions:
            make = extension.gradient_sync(make)
        functions = (config.no_sync_func, config.grad_sync_func, config.param_sync_func)
        if make is GradientSync and (call.forward_only or functions == (None, None, None)):
            return None
        is_split = False  # whether the gradients of a chunk come in two actions, B and W
        if config.no_sync_func is not None and not call.forward_only:
            is_split = self.plan_key.plan.splits_backward or any(stage.can_overlap for stage in stages)
        return make(config, call.models, call.num_units, is_split, call.forward_only)

    def make_stages(self, call: Call) -> list[Stage]:
        """Make the stage of each chunk, for one step."""
        stages = []
        for chunk, (info, (_, sent)) in enumerate(zip(self.stages, self.specs)):
            found, have_headers = self._shapes_are_found[chunk], self._have_headers[chunk]
            stages.append(self._stage_type(info, chunk, call, sent, found, have_headers, self._delays_weights[chunk]))
        return stages

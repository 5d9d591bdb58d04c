"""A schedule on this rank, for all steps that are called alike.

What was checked, agreed on and found out is kept from step to step; a step resets counters. No model is held between
steps: stages, which hold them, are made for each.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from operator import attrgetter
from typing import Any, NamedTuple
from weakref import ref

import torch

from ..chunks import find_attribute
from ..config import DEFAULTS, OPTIONS, StepConfig
from ..p2p_communication import Communicator, Line, Lookahead
from ..plan import Action, Schedule, ScheduleError
from ..stages import Call, Extension, Stage, find_delayed
from .arguments import check_arguments, remote_ends, specs_of, to_agree_on
from .first_step import FirstStep, end_first_steps, first_steps
from .found_shapes import Specs, UndescribedMessages
from .grad_sync import GradientSync, check_replicas
from .links import lines_of, links_around
from .monitor import Monitor
from .pipeline import BeginAgain, Pipeline, checkpoint_arguments
from .plans import PlanKey
from .session import Alone, Session

PLAIN = {bool, int, float, str, type(None), torch.dtype}

MODULES = {option.module for option in OPTIONS if option.module}
"""Those that bring an option along where they are imported."""

_read_all = attrgetter(*DEFAULTS)


class Situation(NamedTuple):
    """All that a runner depends on."""

    schedule: Schedule
    forward_only: bool
    sizes: tuple[int | None, ...]
    """The number of microbatches, and what is said of the shapes of messages."""
    settings: tuple[Any, ...]
    """The values of all fields of the config, functions and other objects in outline."""
    chunks: tuple[Any, ...]
    """Which they are, the types of the modules in them, which may be exchanged or wrapped between steps, and of their
    first parameters, and what is imported that they may be made of."""
    device: torch.device


def situation_of(schedule: Schedule, call: Call) -> Situation:
    settings = [value if type(value) in PLAIN else _outline(value) for value in _read_all(call.config)]
    chunks: list[Any] = [MODULES & sys.modules.keys()]
    for model in call.models:
        parameter = next(model.parameters(), None)
        chunks += [ref(model), {*map(type, model.modules())}, None if parameter is None else parameter.dtype]
    has_own = call.adjust_tensor_shapes_fn is not None
    sizes = (call.num_microbatches, call.seq_length, call.micro_batch_size, call.decoder_seq_length, has_own)
    return Situation(schedule, call.forward_only, sizes, tuple(settings), tuple(chunks), call.device)


def _outline(value: Any) -> Any:
    """What of a value counts: of a function, which may hold a model, only that there is one."""
    if isinstance(value, Sequence):
        return tuple(one if type(one) in PLAIN else type(one) for one in value)
    return type(value)


class Runner:
    """A schedule on this rank in one situation.

    Attributes:
        key: of the plan that the schedule follows.
        specs: per stage the messages that it receives and sends, where known.
        undescribed: the messages that are known only since the first step, or not yet.

    Raises:
        ValueError, TypeError: for arguments that cannot be.
    """

    def __init__(self, situation: Situation, call: Call, session: Session | Alone) -> None:
        self.situation = situation
        config = call.config
        self._session = session
        self.pp_rank, pp_size = session.pp_rank, len(session.ranks)
        schedule = situation.schedule
        self.stages = schedule.stages(self.pp_rank, pp_size, len(call.models))
        check_arguments(call, self.stages)
        self._kinds: set[str] = set()
        schedule.check_units(call.num_microbatches, config.num_sequence_slices)
        for extension in self._extensions(config):
            call.slices = extension.slices(call) or call.slices
        self.slices = call.slices
        sizes = (pp_size, call.num_microbatches, len(self.stages))
        self.key = PlanKey(schedule, *sizes, config.settings, config.num_sequence_slices)
        if (config.max_in_flight, config.recompute, config.offload_activations) != (None, None, None):
            _ = self.key.plan  # raises where the schedule cannot keep to these
        self._kinds = self.key.kinds
        if not call.forward_only:
            self.key.check_settings()
            check_replicas(call.models, self.key)
        self._ends = [remote_ends(stage, schedule.placement, self.pp_rank, pp_size) for stage in self.stages]
        self._described = specs_of(call, self.stages, self._ends)
        self._asks_models = call.adjust_tensor_shapes_fn is not None or any(
            find_attribute(model, "infer_stage_inputs_from_pipeline_inputs") is not None for model in call.models
        )
        unknown = {} if config.variable_seq_lengths else dict(enumerate(self._ends))
        unknown = {n: of for n, of in unknown.items() if any(of) and self._described[n] == (None, None)}
        self.undescribed = UndescribedMessages(session.found_shapes, call, self.stages, unknown)
        self._delays = [config.delay_wgrad_compute and bool(find_delayed(model)) for model in call.models]
        self._loops = schedule.loops if call.forward_only else self.key.loops
        self._is_new = True
        self.specs: Specs = []
        self._communicator: Communicator | None = None
        self._lines: list[Line] = []
        self._describe(call)

    def _describe(self, call: Call) -> None:
        """Begin with the messages that are known by now."""
        specs = list(self._described)
        self.undescribed.fill_in(specs)
        if not self._is_new and specs == self.specs:
            return
        self.specs = specs
        self._is_found = [chunk in self.undescribed for chunk in range(len(specs))]
        self._headers = [self.undescribed.have_headers(chunk, sent) for chunk, (_, sent) in enumerate(specs)]
        self._to_agree_on = to_agree_on(self.key.schedule.name, call, self.stages, self.specs)
        self._to_agree_on |= self.undescribed.to_agree_on(self.specs)
        self._pipeline: Pipeline | None = None

    def fits(self, call: Call) -> bool:
        """Whether the messages of this call are those that the runner knows, where models compute their shapes."""
        if not self._asks_models:
            return True
        call.slices = self.slices
        return specs_of(call, self.stages, self._ends) == self._described

    def extensions(self, call: Call) -> list[Extension]:
        """Those of the options that are set and have something to do in this step."""
        call.stages = self.stages
        return [extension for extension in self._extensions(call.config) if extension.takes_part(call)]

    def _extensions(self, config: StepConfig) -> list[Extension]:
        """Those of the options that are set."""
        extensions = []
        for option in OPTIONS:
            is_set = option.field and getattr(config, option.field) != DEFAULTS[option.field]
            if is_set or option.module in sys.modules or option.kind in self._kinds:
                module, _, name = option.extension.partition(":")
                kind: type[Extension] = getattr(importlib.import_module(module), name)
                extensions.append(kind(config, lambda: self.key.plan, self.pp_rank, self._session.watchdog))
        return extensions

    def agree(self, call: Call, what: str = "") -> None:
        """Check that all ranks of the pipeline make the same call. Collective over the pipeline.

        Args:
            what: is done with the schedule.
        """
        if not isinstance(self._session, Session):
            return
        watchdog, agreement = self._session.watchdog, self._session.agreement
        if agreement.agreed is self._to_agree_on and not what:
            agreement.known_step = watchdog.progress.step
            return
        watchdog.timeout = call.config.timeout
        name = {"the schedule": self.key.schedule.name + what}
        agreement.agree(self._to_agree_on | name if what else self._to_agree_on)

    def connect(self, call: Call) -> Communicator | None:
        """The channels of the pipeline, opened where this is the first to need them. None for one rank."""
        if not isinstance(self._session, Session):
            return None
        has_headers = call.config.variable_seq_lengths or bool(self.undescribed)
        placement, device = self.key.schedule.placement, self.situation.device
        return self._session.communicator(placement, self.key.num_chunks, device, has_headers, call.config)

    def run(self, call: Call) -> None:
        """Run one step. The results are in the call."""
        call.slices = self.slices
        extensions = self.extensions(call)
        self.agree(call)
        if self._pipeline is None:
            self._pipeline = self._build(call)
        try:
            looks = self._run_loops(call, extensions, self._pipeline)
        except BeginAgain as begins:
            self._pipeline.drop(begins.num_sent)
            for extension in extensions:
                extension.again()
            call.results.clear()
            call.num_tokens.zero_()
            looks = self._run_loops(call, extensions, self._pipeline, again=True)
        if self._is_new:
            self._is_new = False
            has_gradients = not any(extension.has_gradients for extension in extensions)
            end_first_steps(looks, call, self.key, self.undescribed, has_gradients, self._session)
            self._describe(call)
        for extension in extensions:
            extension.end()

    def _run_loops(
        self, call: Call, extensions: Sequence[Extension], pipeline: Pipeline, again: bool = False
    ) -> list[FirstStep | None]:
        """Run the schedule. Returns what has looked at its first step."""
        for extension in extensions:
            extension.begin(call)
        stages = self.make_stages(call, extensions)
        sync = self._gradient_sync(call, extensions, stages)
        looks: list[FirstStep | None] = [None] * len(stages)
        if self._is_new:
            looks = first_steps(stages, call, self.undescribed)
        for line in self._lines:
            line.begin()
        transport = None if self._communicator is None else self._communicator.transport
        monitor = Monitor(self._session.watchdog, transport)
        for extension in extensions:
            monitor = extension.monitor(monitor)
        arguments = checkpoint_arguments(self.key, self.pp_rank, call)
        pipeline.begin_step(call, stages, looks, extensions, monitor, sync, arguments, again)
        with ExitStack() as around:
            if sync is not None:
                around.enter_context(sync)
            elif call.forward_only:
                around.enter_context(torch.no_grad())
            for extension in extensions:
                if (context := extension.step()) is not None:
                    around.enter_context(context)
            reports = self._loops(pipeline)
        if reports is not call.results:
            raise ScheduleError(f"{self.key.schedule.name} did not end with `return pipe.finish()`.")
        return looks

    def _build(self, call: Call) -> Pipeline:
        """The object that the schedule's loops drive, over channels that all ranks open together."""
        self._communicator = communicator = self.connect(call)
        lookahead = Lookahead(0)
        if communicator is not None and call.config.overlap_p2p_comm:
            ahead = call.config.p2p_lookahead
            lookahead = communicator.transport.lookahead if ahead is None else Lookahead(ahead)
        lines = {}
        if communicator is not None and communicator.transport.matches_by_order:
            buffered = communicator.transport.buffered_bytes
            lines = lines_of(self.key.plan, self.pp_rank, call.forward_only, buffered)
        self._lines = list(lines.values())
        ways = (communicator, lookahead, lines, call.forward_only)
        links = links_around(self.key, self.pp_rank, self.specs, self.undescribed, *ways)
        posted_ahead = self._posted_ahead(communicator, lookahead, call.forward_only)
        return Pipeline(self.key, self.pp_rank, links, call.forward_only, posted_ahead)

    def _posted_ahead(
        self, communicator: Communicator | None, lookahead: Lookahead, forward_only: bool
    ) -> Mapping[Action, Sequence[Action]]:
        if communicator is None or not communicator.transport.matches_by_order or not lookahead.messages:
            return {}
        specs = [spec for around in self.specs for side in around for spec in side or ()]
        if all(spec.nbytes <= communicator.transport.buffered_bytes for spec in specs):
            return {}
        plan = self.key.plan
        is_of_plan = plan.forward_only == forward_only  # not a validation by the plan of a training step
        return plan.posted_ahead[self.pp_rank] if is_of_plan else {}

    def _gradient_sync(
        self, call: Call, extensions: Sequence[Extension], stages: Sequence[Stage]
    ) -> GradientSync | None:
        config = call.config
        make: Callable[..., GradientSync] = GradientSync
        for extension in extensions:
            make = extension.gradient_sync(make)
        functions = (config.no_sync_func, config.grad_sync_func, config.param_sync_func)
        if make is GradientSync and (call.forward_only or functions == (None, None, None)):
            return None
        is_split = False
        if config.no_sync_func is not None and not call.forward_only:
            is_split = self.key.plan.splits_backward or any(stage.can_overlap for stage in stages)
        return make(config, call.models, call.num_units, is_split, call.forward_only)

    def make_stages(self, call: Call, extensions: Sequence[Extension]) -> list[Stage]:
        """One per chunk."""
        stages, kind = [], Stage
        for extension in extensions:
            kind = extension.stage_type(kind)
        for chunk, of_chunk in enumerate(zip(self.stages, self.specs, self._is_found, self._headers, self._delays)):
            info, (_, sent), *rest = of_chunk
            stages.append(kind(info, chunk, call, sent, *rest))
        return stages

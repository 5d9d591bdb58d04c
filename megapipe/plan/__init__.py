"""A schedule on paper: recorded, checked, simulated and saved, without tensors and without process groups."""

from .files import load_plan, parse_json, read_text
from .kinds import KINDS, Kind
from .making import make_plan
from .placement import Placement, StageInfo, loop, v_shape
from .plan import Plan, plan_of
from .planned import AnySchedule, find_schedule
from .recorder import ChannelName, Event
from .registry import Schedule, register, schedule_names
from .simulation import Costs, Simulation, Span, held_changes, play, simulate
from .verbs import Action, ScheduleError, Settings, Verbs, actions_of, unit_in_words
from .weight_placement import place_weights

__all__ = [
    "KINDS",
    "Action",
    "AnySchedule",
    "ChannelName",
    "Costs",
    "Event",
    "Kind",
    "Placement",
    "Plan",
    "Schedule",
    "ScheduleError",
    "Settings",
    "Simulation",
    "Span",
    "StageInfo",
    "Verbs",
    "actions_of",
    "find_schedule",
    "held_changes",
    "load_plan",
    "loop",
    "make_plan",
    "parse_json",
    "place_weights",
    "plan_of",
    "play",
    "read_text",
    "register",
    "schedule_names",
    "simulate",
    "unit_in_words",
    "v_shape",
]

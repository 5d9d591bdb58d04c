"""Python's garbage collector keeps out of steps."""

import contextlib
import gc
import resource
import weakref
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from tools.models import build, forward_step, run
from tools.ranks import freeze, on_ranks

import megapipe.runtime.step
from megapipe import PipelineError
from megapipe.runtime.garbage import Collector


@contextlib.contextmanager
def fresh_collector() -> Iterator[list[tuple[bool, int]]]:
    """As in a new process, but that every new object makes Python collect the youngest generation, and nothing makes it
    collect the others. Yields a list of what is collected: whether a forward was under way, and which generation."""
    collected: list[tuple[bool, int]] = []

    def on_collection(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            collected.append((Forward.is_under_way, info["generation"]))

    before = gc.get_threshold()
    thresholds = (1, 10**6, 10**6)
    gc.set_threshold(*thresholds)
    gc.callbacks.append(on_collection)
    try:
        with mock.patch.object(megapipe.runtime.step, "collector", Collector()):
            yield collected
        assert gc.get_threshold() == thresholds
        assert gc.isenabled()
    finally:
        gc.callbacks.remove(on_collection)
        gc.set_threshold(*before)
        gc.enable()


class Forward:
    is_under_way = False

    def __call__(self, data_iterator: Any, model: Any) -> Any:
        Forward.is_under_way = True
        objects = [[] for _ in range(3)]  # enough for a collection
        returned = forward_step(data_iterator, model)
        Forward.is_under_way = False
        return (*returned, objects)[:2]


def full_collections(collected: list[tuple[bool, int]]) -> int:
    return sum(generation == 2 for _, generation in collected)


@on_ranks(2)
def test_collections_happen_between_steps(rank: int) -> None:
    """In the first steps of a process one rank after the other stood still for a tenth of a second and more, to look
    for garbage among all that torch has imported."""
    chunks = build("1f1b", 2, 4, gc_interval=3)
    with fresh_collector() as collected:
        numbers = []
        for step in range(7):
            before = full_collections(collected)
            run("1f1b", chunks, 2, forward_step_func=Forward(), forward_only=step % 2 == 1)
            numbers.append(full_collections(collected) - before)
    assert not any(is_within for is_within, _ in collected)
    assert numbers == [1, 0, 1, 0, 0, 1, 0]
    assert len(collected) > 3  # Python's own, between the steps


@on_ranks(1)
def test_without_an_interval_python_collects_whenever_it_likes(rank: int) -> None:
    chunks = build("no_pipelining", 1, 2, gc_interval=None)
    with fresh_collector() as collected:
        run("no_pipelining", chunks, 2, forward_step_func=Forward())
    assert any(is_within for is_within, _ in collected)


@on_ranks(1)
def test_a_disabled_collector_stays_so(rank: int) -> None:
    chunks = build("no_pipelining", 1, 2, gc_interval=1)
    with fresh_collector() as collected:
        gc.disable()
        collected.clear()
        for _ in range(3):
            run("no_pipelining", chunks, 2)
            assert not gc.isenabled()
        assert not collected
        gc.enable()


@on_ranks(2)
def test_a_failed_step_gives_the_collector_back(rank: int) -> None:
    chunks = build("1f1b", 2, 4)
    with fresh_collector(), pytest.raises((ValueError, PipelineError)):
        run("1f1b", chunks, 2, data_iterator=iter([]))


def test_steps_of_several_pipelines() -> None:
    """They may overlap, in threads of their own. What is between the steps of one is within that of the other."""
    with fresh_collector() as collected:
        collector = Collector()
        one, other = collector.between_steps(1, [MODEL]), collector.between_steps(1, [MODEL])
        one.__enter__()
        collected.clear()
        other.__enter__()
        one.__exit__(None, None, None)
        assert not gc.isenabled()
        assert not collected
        other.__exit__(None, None, None)
        assert gc.isenabled()
        assert full_collections(collected) == 1


class Model:
    itself: Any


MODEL = Model()


def frozen_by_a_step(collector: Collector) -> bool:
    mine: list[object] = []
    with collector.between_steps(1, [MODEL]):
        pass
    return not any(one is mine for one in gc.get_objects())  # which lists nothing that is frozen


@on_ranks(1)
def test_the_first_step_freezes_what_is_there_unless_the_user_has(rank: int) -> None:
    assert gc.get_freeze_count()  # tests' ranks have frozen what they imported
    collector = Collector()
    with mock.patch.object(gc, "get_freeze_count", wraps=gc.get_freeze_count) as count:
        assert not frozen_by_a_step(collector)
        with collector.between_steps(1, [Model()]):
            pass
    assert count.call_count == 1, "it takes tens of ms"
    gc.unfreeze()
    collector = Collector()
    assert frozen_by_a_step(collector)
    gc.unfreeze()
    assert not frozen_by_a_step(collector)  # but once only
    freeze()


@on_ranks(1)
def test_a_model_that_is_gone_is_collected_before_the_next_one_runs(rank: int) -> None:
    """What the first step froze was never looked at again: a model of which a cycle of references was left kept its
    weights for good, and the next one had no room."""
    gc.unfreeze()
    collector, model = Collector(), Model()
    model.itself, gone = model, weakref.ref(model)
    for _ in range(2):
        with collector.between_steps(100, [model]):
            pass
    del model
    gc.collect()
    assert gone() is not None
    with collector.between_steps(100, [MODEL]):
        assert gone() is None
    freeze()


def is_of_a_step(thing: object) -> bool:
    """Other threads of the process, and what it imports meanwhile, may make cycles of their own."""
    modules = [str(getattr(one, "__module__", "")) for one in (thing, type(thing))]
    ours = ("megapipe.runtime", "megapipe.stages", "tools.models")
    return isinstance(thing, torch.Tensor) or any(name.startswith(ours) for name in modules)


@on_ranks(2)
def test_a_step_makes_no_cycles(rank: int) -> None:
    """Of what a step makes nothing needs the collector: everything goes when the last one lets go of it. With
    `config.recompute` a step's data stayed."""
    for schedule, has_headers in (("1f1b", True), ("zbv", False), ("dualpipev", True), ("zbv", None)):
        chunks = build(schedule, 2, 4, deferred=schedule != "1f1b", variable_seq_lengths=has_headers or False)
        for chunk in chunks:
            chunk.config.recompute = "all" if has_headers is None else None
        for _ in range(3):  # what is made once
            run(schedule, chunks, 4)
        gc.collect()
        gc.disable()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            run(schedule, chunks, 4)
            gc.collect()
            assert not [one for one in gc.garbage if is_of_a_step(one)], schedule
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()


@pytest.mark.soak
@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
@on_ranks(2)
def test_memory_stays_flat_over_a_thousand_steps(rank: int, schedule: str) -> None:
    """Also where the model makes garbage that only the collector frees: a tensor of 1 MB in each forward."""

    def step(data_iterator: Any, model: Any) -> Any:
        cycle: list[Any] = [torch.ones(2**18)]
        cycle.append(cycle)
        return forward_step(data_iterator, model)

    chunks = build(schedule, 2, 4, deferred=schedule == "zbv", gc_interval=10)
    for number in range(1000):
        run(schedule, chunks, 4, forward_step_func=step)
        if number == 200:
            memory, objects = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, len(gc.get_objects())
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 20 * 1024  # KB
    gc.collect()
    assert len(gc.get_objects()) - objects < 1000

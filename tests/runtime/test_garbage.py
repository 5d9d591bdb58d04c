"""Python's garbage collector keeps out of steps, and is otherwise left alone."""

import contextlib
import gc
import os
import resource
import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tools.models import build, forward_step, run
from tools.ranks import on_ranks

from megapipe import PipelineError
from megapipe.runtime.garbage import HeldBack, collection_held_back


@contextlib.contextmanager
def noting_collections() -> Iterator[list[tuple[bool, int]]]:
    """Every new object makes Python collect the youngest generation, and nothing makes it collect the others. Yields a
    list of what is collected: whether a forward was under way, and which generation."""
    collected: list[tuple[bool, int]] = []

    def on_collection(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            collected.append((Forward.is_under_way, info["generation"]))

    before = gc.get_threshold()
    thresholds = (1, 10**6, 10**6)
    gc.set_threshold(*thresholds)
    gc.callbacks.append(on_collection)
    try:
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


@on_ranks(2)
def test_python_collects_between_steps_alone(rank: int) -> None:
    """In the first steps of a process one rank after the other stood still for a tenth of a second and more, to look
    for garbage among all that torch has imported. Nor does a step have Python do so."""
    chunks = build("1f1b", 2, 4)
    with noting_collections() as collected:
        for step in range(4):
            run("1f1b", chunks, 2, forward_step_func=Forward(), forward_only=step % 2 == 1)
        with pytest.raises((ValueError, PipelineError)):  # a failed step gives the collector back
            run("1f1b", chunks, 2, data_iterator=iter([]))
    assert {is_within for is_within, _ in collected} == {False}
    assert max(generation for _, generation in collected) < 2


@on_ranks(1)
def test_a_disabled_collector_stays_so(rank: int) -> None:
    chunks = build("no_pipelining", 1, 2)
    with noting_collections() as collected:
        gc.disable()
        collected.clear()
        for _ in range(3):
            run("no_pipelining", chunks, 2)
            assert not gc.isenabled()
        assert not collected
        gc.enable()


def test_steps_of_several_pipelines() -> None:
    """They may overlap, in threads of their own. What is between the steps of one is within that of the other."""
    with noting_collections():
        held_back = HeldBack()
        for _ in range(2):
            held_back.__enter__()
            held_back.__enter__()
            held_back.__exit__()
            assert not gc.isenabled()
            held_back.__exit__()
            assert gc.isenabled()


@on_ranks(1)
def test_a_dropped_model_is_freed(rank: int) -> None:
    """The first step froze all objects that there were. A model of which a cycle of references was left, such as a hook
    that knows its model, then outlived `gc.collect()` with all its weights."""
    (chunk,) = build("no_pipelining", 1, 2)
    chunk.itself = [chunk]
    gone = weakref.ref(chunk)
    run("no_pipelining", [chunk], 2)
    del chunk
    end = time.monotonic() + 10
    while gone() is not None and time.monotonic() < end:
        gc.collect()  # another thread may hold it for a moment, or be within a collection, beside which none begins
    assert gone() is None


def test_a_forked_process_collects() -> None:
    """A worker that a step's data loader forks never comes to the end of that step."""
    for is_enabled in (True, False):
        if not is_enabled:
            gc.disable()
        try:
            with collection_held_back:
                child = os.fork()
                if not child:
                    os._exit(gc.isenabled())
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == is_enabled
        finally:
            gc.enable()


def is_of_a_step(thing: object) -> bool:
    """Other threads of the process, and what it imports meanwhile, may make cycles of their own."""
    modules = [str(getattr(one, "__module__", "")) for one in (thing, type(thing))]
    ours = ("megapipe.runtime", "megapipe.stages", "tools.models")
    return isinstance(thing, torch.Tensor) or any(name.startswith(ours) for name in modules)


@on_ranks(2)
def test_a_step_makes_no_cycles(rank: int) -> None:
    """Of what a step makes nothing needs the collector: everything goes when the last one lets go of it. With
    `config.recompute` a step's data stayed."""
    for schedule, has_headers in (("1f1b", True), ("dualpipev", False), ("zbv", None)):
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
    """Also where the model makes garbage that only the collector frees, a tensor of 1 MB in each forward. Python by
    itself lets a hundred steps of it pile up, whether it is held back within them or not."""

    def step(data_iterator: Any, model: Any) -> Any:
        cycle: list[Any] = [torch.ones(2**18)]
        cycle.append(cycle)
        return forward_step(data_iterator, model)

    chunks = build(schedule, 2, 4, deferred=schedule == "zbv")
    for number in range(1000):
        run(schedule, chunks, 4, forward_step_func=step)
        if number % 10 == 0:
            gc.collect(1)
        if number == 200:
            memory, objects = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, len(gc.get_objects())
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 20 * 1024  # KB
    gc.collect()
    assert len(gc.get_objects()) - objects < 1000

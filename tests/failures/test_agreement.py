"""Ranks that are called with different arguments."""

import datetime
import re
import threading
import time
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tools.failing import wait_for_failure
from tools.models import assert_same_gradients, build, reference, run
from tools.ranks import on_ranks, start_again
from torch.distributed import DistStoreError, HashStore, Store, TCPStore
from torch.distributed.distributed_c10d import _get_default_store

from megapipe import PipelineError
from megapipe.failures import TIMING, Agreement, Board, InterruptibleStore, Mailbox, Watchdog, helper_thread

PP = 4


class SlowConfig:
    """Takes longer to read than the watchdog takes to look, the first few times."""

    def __init__(self, config: object) -> None:
        self._config = config
        self._num_slow = 5

    def __getattr__(self, name: str) -> object:
        if name == "hidden_size" and self._num_slow > 0:
            self._num_slow -= 1
            time.sleep(4 * TIMING.tick)
        return getattr(self._config, name)


@on_ranks(2)
def test_the_watchdog_does_not_answer_before_the_arguments_are_known(rank: int) -> None:
    """Asked for its arguments by another rank, a watchdog published those of the step before, though the main thread
    was only about to look at the new ones. The other rank then saw a disagreement where there was none."""
    chunks = build("1f1b", 2, 4)
    run("1f1b", chunks, 2)
    if rank == 1:
        chunks[0].config = SlowConfig(chunks[0].config)
    run("1f1b", chunks, 3)


@on_ranks(3)
def test_a_rank_that_has_left_its_step_still_answers(rank: int) -> None:
    """Asked for its arguments in a step, a rank answered only as long as it was in that step. One that had left it
    before the question came was then reported as never having begun it, and the disagreement was not."""
    chunks = build("1f1b", 3, 6)
    store = _get_default_store()
    for _ in range(2):
        run("1f1b", chunks, 1, forward_only=True)
    if rank == 2:
        store.wait(["left"])

    def two_steps() -> None:
        run("1f1b", chunks, 2 if rank == 2 else 1, forward_only=True)
        store.set("left", "1")  # rank 0 has sent its only microbatch and is gone
        wait_for_failure()
        run("1f1b", chunks, 1, forward_only=True)  # it raises here

    with pytest.raises(ValueError, match="disagree on num_microbatches: 1 on ranks 0, 1; 2 on rank 2"):
        two_steps()


def watchdog_of(own: InterruptibleStore, board: Board) -> Watchdog:
    ranks = range(own.pp_size)
    return Watchdog(
        board, "of the test", ranks, own, abort=lambda: None, find_error=lambda: None, has_ended=lambda: False
    )


@on_ranks(3)
def test_exchanged_arguments_do_not_stay_in_the_store(rank: int) -> None:
    """Each exchange of arguments left its requests in the store, and what ranks had answered whose own arguments had
    stayed the same. Runs whose arguments change from step to step filled the store."""
    store = _get_default_store()
    own = InterruptibleStore(dist.PrefixStore("exchanges", store), rank, 3, check_failure=lambda: None)
    watching = watchdog_of(own, Board.current())
    agreement = Agreement(Mailbox(own, watching), watching)
    num_keys = []
    for step in range(12):
        with watching.step():
            agreement.agree({} if rank == 2 else {"the message from stage 0 to stage 1": str(step)})
        dist.barrier()
        num_keys.append(store.num_keys())
        dist.barrier()
    watching.close()
    assert num_keys[-1] <= num_keys[3] + 3


DISAGREEMENTS: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("1f1b", {}, {"num_microbatches": 8}, "num_microbatches: 4 on ranks 0, 1, 3; 8 on rank 2. Make them the same."),
    ("gpipe", {}, {}, "disagree on the schedule: 1f1b on ranks 0, 1, 3; gpipe on rank 2."),
    (
        "1f1b",
        {"pipeline_dtype": torch.bfloat16},
        {},
        "from stage 1 to stage 2: float32[5, 2, 16] on rank 1; bfloat16[5, 2, 16] on rank 2.",
    ),
]
"""The schedule, the settings and the arguments of rank 2, and what is said of them."""


@on_ranks(PP)
def test_ranks_that_disagree_at_the_first_step(rank: int) -> None:
    """Nothing has been computed, and they may go on."""
    for schedule, config, arguments, text in DISAGREEMENTS:
        odd, chunks = rank == 2, build("1f1b", PP, 4, pipeline_dtype=torch.float32)
        vars(chunks[0].config).update(config if odd else {})
        with pytest.raises(ValueError, match=re.escape(text)):
            run(schedule if odd else "1f1b", chunks, **{"num_microbatches": 4, **(arguments if odd else {})})
        chunks = build("1f1b", PP, 4)
        run("1f1b", chunks, 4)
        start_again()


@pytest.mark.parametrize(("wrong_ranks", "num_steps"), [([1], 0), ([1], 2), ([0, 1], 2)])
@on_ranks(2)
def test_a_mistake_before_anything_is_computed(rank: int, wrong_ranks: list[int], num_steps: int) -> None:
    """Where all ranks ask each other, none computes before it has heard of it, and the pipeline may be used again. A
    rank that has computed meanwhile has sent messages that nobody takes."""
    chunks = build("1f1b", 2, 4)
    for _ in range(num_steps):
        run("1f1b", chunks, 4)
    for _ in range(2):
        wrong = 0 if rank in wrong_ranks else 4
        with pytest.raises((ValueError, PipelineError), match="num_microbatches must be") as caught:
            run("1f1b", chunks, wrong)
        if "has ended" not in str(caught.value):
            assert (caught.type is ValueError) == (rank in wrong_ranks)
            assert rank in wrong_ranks or str(caught.value).startswith("rank 1 failed at the start of its step: Value")
    if num_steps and len(wrong_ranks) == 1:
        with pytest.raises(PipelineError, match=r"has ended with a failure .*num_microbatches must be"):
            run("1f1b", chunks, 4)
    else:
        for chunk in chunks:
            chunk.zero_grad()
        run("1f1b", chunks, 4)
        assert_same_gradients(chunks, reference(4, 4)[0])


@on_ranks(PP)
def test_ranks_that_disagree_later(rank: int) -> None:
    """Only the rank whose arguments changed knows that something changed."""
    chunks = build("1f1b", PP, 4)
    for _ in range(2):
        run("1f1b", chunks, 4)
    with pytest.raises(ValueError, match="disagree on num_microbatches: 4 on ranks 0, 2, 3; 5 on rank 1"):
        run("1f1b", chunks, 5 if rank == 1 else 4)
    with pytest.raises(PipelineError, match=r"has ended with a failure .*disagree.*start all processes again"):
        run("1f1b", chunks, 4)


@on_ranks(PP)
def test_pipeline_sizes_that_disagree(rank: int) -> None:
    with pytest.raises(ValueError, match=r"disagree.*rank 0: 2, None and 1, rank 1: 4, None and 1"):
        build("1f1b", 2 if rank == 0 else 4, 4)


class CountingStore:
    """Counts the requests to a store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.num_requests = 0

    def __getattr__(self, name: str) -> Any:
        self.num_requests += name != "has_extended_api"
        return getattr(self._store, name)


def test_the_texts_of_all_ranks_take_few_requests() -> None:
    """Each rank read the text of each other one by two requests: 2 p^2 in the first step of p ranks."""
    num_ranks = 64
    counting: Any = CountingStore(TCPStore("localhost", 0, is_master=True, wait_for_workers=False))
    watchdog: Any = SimpleNamespace(timeout=5.0, poll=lambda: None, check=lambda: None)
    boxes = [Mailbox(InterruptibleStore(counting, r, num_ranks, lambda: None), watchdog) for r in range(num_ranks)]
    for rank, box in enumerate(boxes):
        box.post("shape", str(rank))
    counting.num_requests = 0
    assert boxes[0].collect("shape") == [str(rank) for rank in range(num_ranks)]
    assert counting.num_requests == 2  # whether all are there, and what they say


@pytest.mark.parametrize("pp_size", [2, 8])
def test_the_requests_of_a_rank_do_not_grow_with_its_pipeline(pp_size: int) -> None:
    """In a first step each rank looked at the requests of each other, one by one, whenever one more had come. The store
    of a job of 8,192 ranks was busy for many seconds by that."""
    store: Any = CountingStore(HashStore())
    watchdogs: list[Watchdog] = []
    threads = []
    for rank in range(pp_size):
        own = InterruptibleStore(store, rank, pp_size, check_failure=lambda: None)
        board = Board(rank, pp_size, HashStore(), has_ended=lambda: False, begin=lambda task: None)
        board._store = own
        watchdogs.append(watchdog_of(own, board))
        watchdogs[-1].progress.step += 1
        agreement = Agreement(Mailbox(own, watchdogs[-1]), watchdogs[-1])
        threads.append(threading.Thread(target=agreement.agree, args=({"num_microbatches": "4"},)))
        threads[-1].start()
    for thread in threads:
        thread.join()
    assert all(watchdog._num_read == 0 for watchdog in watchdogs)  # nobody had to be told
    watchdogs[1].notify()
    before = store.num_requests
    watchdogs[0].poll()
    assert store.num_requests == before + 4  # for notifications, a failure, and the requests of all: two


def test_ranks_of_a_large_job_look_less_often() -> None:
    """All ranks that waited asked 20 times a second, at 8,192 ranks twice as often as the store can answer."""
    store: Any = CountingStore(HashStore())
    job = SimpleNamespace(group=SimpleNamespace(WORLD=SimpleNamespace(size=lambda: 8192)))
    with mock.patch.object(helper_thread, "dist", job):
        assert 8192 / helper_thread.interval(TIMING.tick) <= 20_000
        own = InterruptibleStore(store, 0, 8192, check_failure=lambda: None)
    with pytest.raises(DistStoreError):
        own.wait(["never"], datetime.timedelta(seconds=1))
    assert store.num_requests <= 13

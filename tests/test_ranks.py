"""A job that leaves something behind in its ranks fails, and names it."""

import os
import threading
from typing import Any

import pytest
import torch.distributed as dist
from tools import ranks as tools_ranks
from tools.ranks import RankError, RankPool, excuses_of_torch

KEPT: list[Any] = []


def leaves(rank: int, what: str) -> None:
    tools_ranks.ENDS_WITHIN = 0.5 if what else 20
    if what == "thread mine":
        threading.Thread(target=threading.Event().wait, name="mine", daemon=True).start()
    if what == "open file /etc/hosts":
        KEPT.append(os.open("/etc/hosts", os.O_RDONLY))
    if "gloo" in what:
        KEPT.extend(dist.new_group([0, 1]) for _ in range(12))


@pytest.mark.skipif(bool(excuses_of_torch()), reason="this torch leaves something behind itself")
def test_what_a_job_leaves_behind() -> None:
    pool = RankPool(2)
    try:
        for what in ("thread mine", "open file /etc/hosts", r"(thread \w*gloo_\w+|open file pipe)"):
            with pytest.raises(RankError, match=rf"leaves has left behind on rank 0: \d+ x {what}"):
                pool.run(2, leaves, what)
        pool.run(2, leaves, "")
    finally:
        pool.stop()

"""How processes end that have exchanged messages over NCCL: quietly, with any Python."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tools.device import needs_devices

pytestmark = needs_devices

PROGRAM = """
import atexit
import gc
import sys
import time
atexit.register(lambda: sys.modules["fakes.nccl_like"].complain())  # the first to be registered is called last
atexit.register(lambda: gc.get_freeze_count() and print("frozen", file=sys.stderr))
import torch
import torch.distributed as dist
from transports.test_devices import build, on_lazy_device, step

rank, store = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
chunks = build("1f1b", 2, "nccl")
with on_lazy_device(chunks) as lazy:
    step("1f1b", chunks, lazy.device.to_device)
    lazy.device.synchronize()
dist.barrier()
time.sleep(0.2)  # until the double's own threads have seen that all was received
if rank == 0:  # the other one ends without a word
    dist.destroy_process_group()
print("done")
"""


def test_a_process_ends_quietly(tmp_path: Path) -> None:
    """From Python 3.12 on no thread can be started while a process ends. Those that give communicators back were: each
    rank ended with a traceback, and gave nothing back. And what is frozen then is a leak to nanobind: 120 lines of them
    with torch 2.15 for CUDA."""
    path = os.pathsep.join([str(Path(__file__).parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(2)
    ]
    for rank in ranks:
        out, err = rank.communicate(timeout=240)
        assert (rank.returncode, out, err) == (0, "done\n", "")

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
import os
import sys
import time
atexit.register(lambda: sys.modules["fakes.nccl_like"].complain())  # the first to be registered is called last
atexit.register(lambda: gc.get_freeze_count() and print("frozen", file=sys.stderr))
import torch
import torch._dynamo  # a step imports it
import torch.distributed as dist
from transports.test_devices import build, on_lazy_device, step

torch.set_num_threads(1)
rank = int(os.fork() > 0)  # two ends of what has been imported once
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=2)
chunks = build("1f1b", 2, "nccl")
with on_lazy_device(chunks) as lazy:
    step("1f1b", chunks, lazy.device.to_device)
    lazy.device.synchronize()
dist.barrier()
time.sleep(0.2)  # until the double's own threads have seen that all was received
if rank == 0:  # the other one ends without a word
    dist.destroy_process_group()
else:
    assert os.wait()[1] == 0
print("done")
"""


def test_a_process_ends_quietly(tmp_path: Path) -> None:
    """From Python 3.12 on no thread can be started while a process ends. Those that give communicators back were: each
    rank ended with a traceback, and gave nothing back. And what is frozen then is a leak to nanobind: 120 lines of them
    with torch 2.15 for CUDA."""
    path = os.pathsep.join([str(Path(__file__).parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "store")]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "done\ndone\n", "")

"""The path of a step without options: 1f1b on two ranks, as a stranger steps through it.

The ceilings may be lowered; to raise one takes a reason in the commit.
"""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import megapipe

PACKAGE = str(Path(megapipe.__file__).parent)
CEILINGS = {"files": 27, "functions": 122, "calls": 324, "forward": 4, "send": 5, "recv": 6, "run_backward": 4}
"""Files and functions that a later step goes through, its calls, and the frames from the schedule to the caller's
function, to torch's sends and receives, and to autograd."""


def frames_below_the_loops(frame: FrameType | None) -> int | None:
    number = 0
    while frame is not None:
        if frame.f_code.co_filename.startswith(PACKAGE):
            if frame.f_code.co_name.startswith("forward_backward_"):
                return number
            number += 1
        frame = frame.f_back
    return None


def plain_step(rank: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    megapipe.parallel_state.initialize_model_parallel(2)
    stage = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    chunks = [megapipe.PipelineStage(stage, info) for info in megapipe.stages_for_rank("1f1b")]
    data = list(torch.randn(4, 2, 8))
    calls: Counter[CodeType] = Counter()
    depths: dict[str, int] = {}

    def note(what: str, frame: FrameType | None) -> None:
        if (depth := frames_below_the_loops(frame)) is not None:
            depths[what] = max(depth, depths.get(what, 0))

    def count(frame: FrameType, event: str, called: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            calls[frame.f_code] += 1
        name = getattr(called, "__name__", "") if event in ("c_call", "c_return") else ""  # Python 3.12 has the latter
        if name in ("send", "recv", "run_backward"):
            note(name, frame)

    def forward_step(batches: Any, chunk: nn.Module) -> tuple[Any, Any]:
        note("forward", sys._getframe(1))
        return chunk(next(batches)), lambda output: (loss := output.square().mean(), loss.detach())

    def step() -> None:
        megapipe.get_forward_backward_func("1f1b")(
            forward_step_func=forward_step, data_iterator=iter(data), model=chunks, num_microbatches=4
        )

    step()
    step()
    sys.setprofile(count)
    step()
    sys.setprofile(None)
    files = {code.co_filename for code in calls}
    found = {"files": len(files), "functions": len(calls), "calls": sum(calls.values()), **depths}
    if rank == 0:
        print(json.dumps(found))
    dist.destroy_process_group()


def test_a_plain_step_is_short(tmp_path: Path) -> None:
    """In processes of its own: what else a process has imported takes part in a step."""
    done = subprocess.run([sys.executable, __file__, str(tmp_path / "store")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])  # torch 2.9 tells of gloo's connections before
    hidden = (
        {"send", "recv"} if sys.version_info < (3, 11) else set()
    )  # no profiler is told of calls of pybind's methods
    assert found.keys() == CEILINGS.keys() - hidden
    assert {name: value for name, value in found.items() if value > CEILINGS[name]} == {}


if __name__ == "__main__":
    mp.start_processes(plain_step, sys.argv[1:], nprocs=2, start_method="fork")

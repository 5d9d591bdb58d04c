"""Kill -9 at random moments, and end with the weights of a run that was left alone.

    python tests/soak_restart.py --kills 50 --seed 1

Trains a tiny GPT (with dropout, so that random states count) under torchrun, which restarts all ranks from the last
checkpoint when one dies. A random rank is killed at a random moment: while it starts, trains or saves, the last most
often, since it saves at every step. At the end all weights and the optimizer's state must be, to the bit, those of a
run that nobody killed. What was written, and what the ranks said, is in --folder.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from megapipe.checkpoint.files import Reader, checkpoints_in, find_checkpoint

ROOT = Path(__file__).parent.parent
TINY = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --micro-batch-size 2 "
    "--global-batch-size 4 --dropout 0.1 --log-interval 1000000 --eval-interval 0 --lr-warmup-iters 2 "
    "--pipeline-model-parallel-size 2"
)
# Otherwise torchrun keeps one store for all restarts, and ranks that start anew may find the addresses of dead ones
# there (https://github.com/pytorch/pytorch/issues/135712).
FRESH_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
PATIENCE = 240  # seconds without a new checkpoint: then restarting does not work


def start(folder: Path, num_steps: int, options: str, max_restarts: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [
        "--max-restarts",
        str(max_restarts),
        "--monitor-interval",
        "0.1",
        str(ROOT / "examples/pretrain_gpt.py"),
    ]
    command += [*TINY.split(), *options.split(), "--data-path", str(ROOT / "LICENSE"), "--train-iters", str(num_steps)]
    command += ["--save", str(folder), "--load", str(folder), "--keep-last", "2"]
    with open(f"{folder}.log", "wb") as log:
        environment = {**os.environ, **FRESH_STORE, "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(command, stdout=log, stderr=log, env=environment)


def ranks_of(torchrun: subprocess.Popen[bytes]) -> list[int]:
    """The process ids of its workers."""
    children = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            after_name = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended meanwhile
            continue
        if int(after_name[1]) == torchrun.pid and after_name[0] != "Z":
            children.append(int(stat.parent.name))
    return sorted(children)


def last_step(folder: Path) -> int:
    return max(checkpoints_in(folder), default=0)


def wait_for(condition: Callable[[], bool], torchrun: subprocess.Popen[bytes], what: str) -> bool:
    """False where the run has ended."""
    since = time.monotonic()
    while not condition():
        if torchrun.poll() is not None:
            return False
        if time.monotonic() - since > PATIENCE:
            raise RuntimeError(f"{what} did not happen within {PATIENCE} s")
        time.sleep(0.01)
    return True


def kill_again_and_again(torchrun: subprocess.Popen[bytes], folder: Path, num_kills: int, chance: random.Random) -> int:
    """Returns how many were killed before the run was through."""
    for kill in range(1, num_kills + 1):
        # Mostly once it has gone on, so that there is always something new to be lost; every tenth time in its start.
        latest_moment = 5.0
        if kill % 10:
            latest_moment = 0.5
            if not wait_for(partial(has_gone_on, folder, last_step(folder)), torchrun, "a step"):
                return kill - 1
        time.sleep(chance.uniform(0, latest_moment))
        if not wait_for(lambda: len(ranks_of(torchrun)) == 2, torchrun, "a start of both ranks"):
            return kill - 1
        running = ranks_of(torchrun)
        victim = chance.choice(running)
        os.kill(victim, signal.SIGKILL)
        being_saved = [path.name for path in folder.glob("*.incomplete")]
        print(f"kill {kill}: process {victim} after step {last_step(folder)} {being_saved or ''}", flush=True)
        wait_for(lambda gone=set(running): not gone & set(ranks_of(torchrun)), torchrun, "the end of the other rank")
    return num_kills


def has_gone_on(folder: Path, step: int) -> bool:
    return last_step(folder) > step


def everything_in(folder: Path) -> tuple[int, dict[str, Tensor]]:
    """The step and all tensors of the model and the optimizer in the last checkpoint."""
    reader = Reader(find_checkpoint(folder))
    keys = [key for key in reader.contents if key.startswith(("model.", "optimizer."))]
    tensors = {k: torch.empty(reader.contents[k].size, dtype=reader.contents[k].properties.dtype) for k in keys}
    reader.read(tensors)
    return reader.read_value("run")["step"], tensors


def soak(folder: Path, num_kills: int, seed: int, num_steps: int, options: str) -> int:
    """Returns how many kills there were. Raises AssertionError where the weights differ."""
    undisturbed = start(folder / "undisturbed", num_steps, options, max_restarts=0)
    torchrun = start(folder / "killed", num_steps, f"{options} --save-interval 1", max_restarts=num_kills)
    try:
        num_killed = kill_again_and_again(torchrun, folder / "killed", num_kills, random.Random(seed))
        assert torchrun.wait() == 0, f"torchrun gave up: see {folder}/killed.log"
    finally:
        torchrun.terminate()
        torchrun.wait()
    assert undisturbed.wait() == 0, f"see {folder}/undisturbed.log"
    step, tensors = everything_in(folder / "killed")
    expected_step, expected = everything_in(folder / "undisturbed")
    assert step == expected_step == num_steps
    assert tensors.keys() == expected.keys()
    different = [key for key, tensor in expected.items() if not torch.equal(tensors[key], tensor)]
    assert not different, f"{len(different)} of {len(expected)} tensors differ, such as {different[0]}"
    return num_killed


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=None, help="of the moments and the ranks; default: by the clock")
    parser.add_argument("--steps", type=int, default=None, help="of training; default: 8 for each kill")
    parser.add_argument("--options", default="", help="more arguments for pretrain_gpt.py, such as --async-save")
    parser.add_argument("--folder", default=None, help="default: a temporary one")
    args = parser.parse_args()
    seed = time.time_ns() % 1_000_000 if args.seed is None else args.seed
    folder = Path(args.folder or tempfile.mkdtemp(prefix="soak_restart_"))
    folder.mkdir(parents=True, exist_ok=True)
    print(f"seed {seed}, folder {folder}", flush=True)
    started = time.monotonic()
    num_killed = soak(folder, args.kills, seed, args.steps or 8 * args.kills + 20, args.options)
    print(
        f"{num_killed} of {args.kills} kills in {time.monotonic() - started:.0f} s: weights and optimizer state are "
        "those of the undisturbed run, bit for bit"
    )

"""Break a run in every way, again and again, and end with the weights of a run that was left alone.

    python tests/soak_restart.py --faults 100 --seed 1

Trains a tiny GPT (with dropout, so that random states count) on two nodes: two torchruns on this machine,
which meet in a store that this script holds. A checkpoint is saved in the background after every other step.
Meanwhile, at random moments,

- a rank or all ranks of a node are killed, some again while they start, or a whole node is lost: its torchrun and its
  ranks;
- a rank or a node stands still for up to three seconds (SIGSTOP);
- all connections of a rank are cut;
- the disk is full (a small file system, where this user may mount one) until somebody has noticed.

After each fault the run must go on from a step that was whole before it. At the end all weights and the optimizer's
state must be, to the bit, those of a run that nobody disturbed. What was written, and what the ranks said, is in
--folder.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import random
import re
import signal
import socket
import stat
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import torch
from tools.saving import everything_in
from torch import Tensor
from torch.distributed import TCPStore

from megapipe.checkpoint.files import checkpoints_in

ROOT = Path(__file__).parent.parent
INTERVAL = 2  # steps between checkpoints
NUM_STEPS = 1_000_000  # for the learning rate: nobody waits for the last
TINY = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --micro-batch-size 2 "
    "--global-batch-size 4 --dropout 0.1 --log-interval 1 --eval-interval 0 --lr-warmup-iters 2 "
    f"--pipeline-model-parallel-size 2 --train-iters {NUM_STEPS}"
)
# Otherwise torchrun keeps one store for all restarts, and ranks that start anew may find the addresses of dead ones
# there (https://github.com/pytorch/pytorch/issues/135712).
ENVIRONMENT = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
PATIENCE = 600  # seconds without a step: then restarting does not work
SYS_PIDFD_GETFD = 438  # of Linux, on all processors


class Outcome(NamedTuple):
    """Times in seconds since the fault; None where the run was never interrupted."""

    kind: str
    found: float | None  # until another rank ended too, so that all could start anew
    back: float | None  # until the first new step
    num_lost: int  # steps


class Node:
    """One torchrun with its ranks."""

    def __init__(self, number: int, folder: Path, store: TCPStore, arguments: list[str]) -> None:
        self._log = folder / f"node_{number}.log"
        self._num_read = 0
        self._command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--max-restarts", "1000000"]
        self._command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{store.port}", "--rdzv-id", "soak"]
        self._command += ["--rdzv-conf", "is_host=0", "--local-addr", "127.0.0.1"]
        self._command += ["--monitor-interval", "0.1"]
        self._command += arguments
        self.start()

    def start(self) -> None:
        with open(self._log, "ab") as log:
            self.torchrun = subprocess.Popen(self._command, stdout=log, stderr=log, env={**os.environ, **ENVIRONMENT})

    def ranks(self) -> list[int]:
        """The process ids of its workers."""
        return children_of(self.torchrun.pid)

    def new_lines(self) -> list[str]:
        """What its ranks have said since the last call."""
        with open(self._log, "rb") as log:
            log.seek(self._num_read)
            whole = log.read().rpartition(b"\n")[0]
        self._num_read += len(whole) + bool(whole)
        return whole.decode(errors="replace").split("\n")

    def send(self, number: signal.Signals) -> None:
        for process in (self.torchrun.pid, *self.ranks()):
            kill(process, number)

    def lose(self) -> None:
        ranks = self.ranks()
        self.torchrun.kill()
        self.torchrun.wait()
        for rank in ranks:
            kill(rank, signal.SIGKILL)


class Soak:
    """A run on two nodes, and all that is done to it."""

    def __init__(self, folder: Path, seed: int, num_ranks: int, options: str) -> None:
        self.chance = random.Random(seed)
        self.disk = folder / "disk"
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        arguments = command(self.disk, num_ranks, f"--save-interval {INTERVAL} --async-save {options}")
        self.nodes = [Node(number, folder, self.store, arguments) for number in range(2)]
        self.step = 0  # the last that was made
        self.resumed: list[int] = []  # where the run went on, of each start
        self.num_lost: list[int] = []  # steps that were made before it and not since
        self._is_told_of_full_disk = False

    def read(self) -> None:
        for node in self.nodes:
            for line in node.new_lines():
                if match := re.match(r"iteration +(\d+)/", line):
                    self.step = int(match[1])
                elif match := re.match(r"going on from iteration (\d+)|nothing saved in", line):
                    self.resumed.append(int(match[1] or 0))
                    self.num_lost.append(self.step - self.resumed[-1])
                    self.step = self.resumed[-1]
                elif "No space left on device" in line:
                    self._is_told_of_full_disk = True

    def wait_for(self, condition: Callable[[], bool], what: str) -> float:
        """Returns how many seconds it took."""
        since = time.monotonic()
        while not condition():
            if any(node.torchrun.poll() is not None for node in self.nodes):
                raise RuntimeError("a torchrun has given up")
            if time.monotonic() - since > PATIENCE:
                raise RuntimeError(f"{what} did not happen within {PATIENCE} s")
            time.sleep(0.01)
            self.read()
        return time.monotonic() - since

    def wait_for_steps(self, num_steps: int) -> None:
        """From here, or from where the run starts anew meanwhile."""
        begun, num_starts = self.step, len(self.resumed)

        def has_gone_on() -> bool:
            return self.step >= (begun if len(self.resumed) == num_starts else self.resumed[-1]) + num_steps

        self.wait_for(has_gone_on, f"{num_steps} steps")

    def fault(self, kind: str) -> Outcome:
        """One fault, and what came of it. Returns when the run makes steps again."""
        node = self.chance.choice(self.nodes)
        self.wait_for(lambda: all(node.ranks() for node in self.nodes), "a start of all ranks")
        self.read()
        num_starts, whole = len(self.resumed), max(checkpoints_in(self.disk), default=0)
        others = {rank for other in self.nodes if other is not node for rank in other.ranks()}
        since = time.monotonic()
        FAULTS[kind](self, node)
        if kind not in PAUSES:
            self.wait_for(lambda: bool(others - set(self.all_ranks())), "the end of the other ranks")
        found = time.monotonic() - since
        if kind not in PAUSES:
            self.wait_for(lambda: len(self.resumed) > num_starts, "a new start")
        self.wait_for_steps(1)
        back = time.monotonic() - since
        if len(self.resumed) == num_starts:
            return Outcome(kind, None, None, 0)
        resumed = min(self.resumed[num_starts:])
        assert resumed >= whole, f"{kind}: step {whole} was whole, and the run went on from step {resumed}"
        return Outcome(kind, found, back, sum(self.num_lost[num_starts:]))

    def all_ranks(self) -> list[int]:
        return [rank for node in self.nodes for rank in node.ranks()]

    # The faults

    def kill_rank(self, node: Node) -> None:
        kill(self.chance.choice(node.ranks()), signal.SIGKILL)

    def kill_rank_that_starts(self, node: Node) -> None:
        gone = set(self.all_ranks())
        self.kill_rank(node)
        self.wait_for(lambda: not gone & set(self.all_ranks()) and bool(node.ranks()), "another start")
        time.sleep(self.chance.uniform(0, 5))
        self.wait_for(lambda: bool(node.ranks()), "another start")
        self.kill_rank(node)

    def kill_ranks(self, node: Node) -> None:
        for rank in node.ranks():
            kill(rank, signal.SIGKILL)

    def lose_node(self, node: Node) -> None:
        node.lose()
        time.sleep(self.chance.uniform(0, 1))
        node.start()

    def stop_rank(self, node: Node) -> None:
        rank = self.chance.choice(node.ranks())
        kill(rank, signal.SIGSTOP)
        time.sleep(self.chance.uniform(0, 3))
        kill(rank, signal.SIGCONT)

    def stop_node(self, node: Node) -> None:
        node.send(signal.SIGSTOP)
        time.sleep(self.chance.uniform(0, 3))
        node.send(signal.SIGCONT)

    def cut_links(self, node: Node) -> None:
        for process in node.ranks():
            shut_down_connections(process)

    def fill_disk(self, node: Node) -> None:
        self._is_told_of_full_disk = False
        filler = self.disk / "filler"
        with open(filler, "wb", buffering=0) as file, suppress(OSError):
            while file.write(bytes(4096)):
                pass
        self.wait_for(lambda: self._is_told_of_full_disk, "a word of the full disk")
        filler.unlink()


FAULTS: dict[str, Callable[[Soak, Node], None]] = {
    "rank killed": Soak.kill_rank,
    "rank killed, and again while it starts": Soak.kill_rank_that_starts,
    "ranks of a node killed": Soak.kill_ranks,
    "node lost": Soak.lose_node,
    "rank stopped": Soak.stop_rank,
    "node stopped": Soak.stop_node,
    "connections cut": Soak.cut_links,
    "disk full": Soak.fill_disk,
}
PAUSES = ("rank stopped", "node stopped")  # after which the run goes on as if nothing had been


def command(folder: Path, num_ranks: int, options: str) -> list[str]:
    """The end of torchrun's: the ranks of a node, and the script."""
    script = [str(ROOT / "examples/pretrain_gpt.py"), *TINY.split(), *options.split()]
    script += ["--data-path", str(ROOT / "LICENSE"), "--save", str(folder), "--load", str(folder), "--keep-last", "2"]
    return ["--nproc-per-node", str(num_ranks), *script]


def children_of(process: int) -> list[int]:
    """Those that have not ended."""
    children: list[int] = []
    for listed in Path(f"/proc/{process}/task").glob("*/children"):
        with suppress(OSError):  # the thread has ended meanwhile
            children += map(int, listed.read_text().split())
    return sorted(child for child in children if has_not_ended(child))


def has_not_ended(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def kill(process: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):  # it has ended meanwhile
        os.kill(process, number)


def shut_down_connections(process: int) -> None:
    """As if the other ends had gone: every TCP connection of a process."""
    libc = ctypes.CDLL(None, use_errno=True)
    handle = os.pidfd_open(process)
    for link in list(Path(f"/proc/{process}/fd").iterdir()):
        file = libc.syscall(SYS_PIDFD_GETFD, handle, int(link.name), 0)
        if file < 0:  # it is closed by now
            continue
        if not stat.S_ISSOCK(os.fstat(file).st_mode):
            os.close(file)
            continue
        with socket.socket(fileno=file) as connection, suppress(OSError):  # nothing is connected to it
            if connection.family in (socket.AF_INET, socket.AF_INET6):
                connection.shutdown(socket.SHUT_RDWR)
    os.close(handle)


@contextmanager
def small_disk(folder: Path) -> Iterator[bool]:
    """Whether this folder is a file system of 16 MB, which can be filled."""
    folder.mkdir()
    mounting = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "none", str(folder)], capture_output=True)
    try:
        yield mounting.returncode == 0
    finally:
        if mounting.returncode == 0:
            subprocess.run(["umount", "-l", str(folder)], check=True)


def undisturbed(folder: Path, step: int, num_ranks: int, options: str) -> dict[str, Tensor]:
    """The state after a step of a run that is left alone."""
    arguments = command(folder, 2 * num_ranks, f"--save-interval {step} {options}")
    with open(f"{folder}.log", "wb") as log:
        torchrun = subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", "--standalone", *arguments],
            stdout=log,
            stderr=log,
            env={**os.environ, **ENVIRONMENT},
        )
    try:
        while step not in checkpoints_in(folder):
            assert torchrun.poll() is None, f"see {folder}.log"
            time.sleep(0.05)
        return everything_in(checkpoints_in(folder)[step])
    finally:
        torchrun.terminate()
        torchrun.wait()


def soak(folder: Path, num_faults: int, seed: int, num_ranks: int, options: str) -> list[Outcome]:
    """Returns what came of each fault. Raises AssertionError where more was lost than steps."""
    outcomes = []
    with small_disk(folder / "disk") as can_be_filled:
        kinds = [kind for kind in FAULTS if can_be_filled or kind != "disk full"]
        if not can_be_filled:
            print("no file system can be mounted here: the disk is never full", flush=True)
        this = Soak(folder, seed, num_ranks, options)
        try:
            this.wait_for_steps(1)
            for number in range(1, num_faults + 1):
                kind = kinds[number - 1] if number <= len(kinds) else this.chance.choice(kinds)
                this.wait_for_steps(5)
                time.sleep(this.chance.uniform(0, 0.2))
                outcomes.append(this.fault(kind))
                print(f"fault {number}: {said(outcomes[-1], this)}", flush=True)
            step = INTERVAL * (this.step // INTERVAL + 1)
            this.wait_for(lambda: max(checkpoints_in(this.disk), default=0) >= step, "a last checkpoint")
        finally:
            for node in this.nodes:
                node.lose()
        step, newest = max(checkpoints_in(this.disk).items())  # the run would have removed older ones meanwhile
        tensors = everything_in(newest)
    print(f"{num_faults} faults are over, at step {step}: now the same without any", flush=True)
    expected = undisturbed(folder / "undisturbed", step, num_ranks, options)
    assert tensors.keys() == expected.keys()
    different = [key for key, tensor in expected.items() if not torch.equal(tensors[key], tensor)]
    assert not different, f"{len(different)} of {len(expected)} tensors differ, such as {different[0]}"
    return outcomes


def said(outcome: Outcome, this: Soak) -> str:
    if outcome.found is None:
        return f"{outcome.kind}, and nothing came of it"
    return (
        f"{outcome.kind}, found within {outcome.found:.1f} s; a new step, {this.step}, within {outcome.back:.1f} s; "
        f"{outcome.num_lost} steps lost"
    )


def table(outcomes: list[Outcome]) -> str:
    """As docs/reliability.md has it."""
    lines = ["| fault | times | found within (median, worst) | steps again within | steps lost at most |"]
    lines.append("|---|---|---|---|---|")
    for kind in FAULTS:
        own = [outcome for outcome in outcomes if outcome.kind == kind]
        restarts = [one for one in own if one.found is not None]
        if restarts:
            found, back = ([getattr(one, name) for one in restarts] for name in ("found", "back"))
            times = " | ".join(f"{statistics.median(t):.1f} s, {max(t):.1f} s" for t in (found, back))
            lines.append(f"| {kind} | {len(own)} | {times} | {max(one.num_lost for one in own)} |")
        elif own:
            lines.append(f"| {kind} | {len(own)} | no restart | | 0 |")
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--seed", type=int, default=None, help="of the kinds, moments and ranks; default: by the clock")
    parser.add_argument("--ranks", type=int, default=1, help="of each node")
    parser.add_argument("--options", default="", help="more arguments for pretrain_gpt.py")
    parser.add_argument("--folder", default=None, help="default: a temporary one")
    args = parser.parse_args()
    seed = time.time_ns() % 1_000_000 if args.seed is None else args.seed
    folder = Path(args.folder or tempfile.mkdtemp(prefix="soak_restart_"))
    folder.mkdir(parents=True, exist_ok=True)
    print(f"seed {seed}, folder {folder}", flush=True)
    started = time.monotonic()
    outcomes = soak(folder, args.faults, seed, args.ranks, args.options)
    print(
        f"{args.faults} faults in {time.monotonic() - started:.0f} s: weights and optimizer state are those of the "
        f"undisturbed run, bit for bit\n\n{table(outcomes)}"
    )

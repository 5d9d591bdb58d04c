"""Two nodes on one machine: the example over a network of its own, which is then slowed down, cut or left by a node.

    python tests/nodes.py                     # as root; all faults, into the table of docs/reliability.md
    python tests/nodes.py --only links        # some of them, printed only

A node is a network namespace with an address, joined to the other by a veth pair. Each runs torchrun with two ranks of
`examples/pretrain_gpt.py`: two replicas of a pipeline whose two stages are on different nodes. Where training goes on,
the weights and the optimizer's state at the end must be those of a run on one node, to the bit.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from soak_restart import ROOT, TINY
from tools.saving import everything_in

from megapipe.checkpoint.files import checkpoints_in

RANKS_PER_NODE = 2
NODES = {"megapipe-a": "10.77.0.1", "megapipe-b": "10.77.0.2"}
A, B = NODES
INTERFACE = "veth0"  # in each node
PORT = 29411
PATIENCE = 600  # seconds for a run or an event in it
DOCUMENT = ROOT / "docs/reliability.md"
MARKS = ("<!-- made by tests/nodes.py -->\n", "<!-- end -->\n")


def call(command: str, may_fail: bool = False) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command.split(), capture_output=True, text=True)
    if done.returncode and not may_fail:
        raise RuntimeError(f"{command}: {done.stderr.strip()}")
    return done


class Network:
    """Both nodes and the link between them."""

    def __enter__(self) -> Network:
        self.__exit__()  # of a run that was killed
        for node in NODES:
            call(f"ip netns add {node}")
        call(f"ip link add {INTERFACE} netns {A} type veth peer name {INTERFACE} netns {B}")
        for node, address in NODES.items():
            call(f"ip -n {node} addr add {address}/24 dev {INTERFACE}")
            call(f"ip -n {node} link set lo up")
            call(f"ip -n {node} link set {INTERFACE} up")
        return self

    def __exit__(self, *error: object) -> None:
        for node in NODES:
            if call(f"ip netns pids {node}", may_fail=True).returncode == 0:
                self.kill(node)
                call(f"ip netns del {node}")

    def kill(self, node: str) -> None:
        """All processes of a node at once, as where its power goes."""
        for pid in call(f"ip netns pids {node}").stdout.split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)

    def set_link(self, state: str) -> None:
        call(f"ip -n {B} link set {INTERFACE} {state}")

    def shape(self, discipline: str) -> bool:
        """Both ways. False where this kernel has no such discipline."""
        for node in NODES:
            if call(f"ip netns exec {node} tc qdisc replace dev {INTERFACE} root {discipline}", True).returncode:
                return False
        return True


class Run:
    """The example on both nodes.

    Args:
        folder: for checkpoints and the nodes' output.
        options: of the example.
    """

    def __init__(self, folder: Path, options: str, max_restarts: int = 0, nodes: tuple[str, ...] = (A, B)) -> None:
        self.folder = folder
        self.options = options
        self.max_restarts = max_restarts
        self.num_nodes = len(nodes)
        self.began = time.monotonic()
        self.torchruns = {node: self.start(node) for node in nodes}

    def start(self, node: str) -> subprocess.Popen[bytes]:
        """A node's torchrun. Interfaces and addresses are chosen by torch's own variables and options."""
        ranks = RANKS_PER_NODE * len(NODES) // self.num_nodes
        command = f"ip netns exec {node} {sys.executable} -m torch.distributed.run --nnodes {self.num_nodes} "
        command += f"--nproc-per-node {ranks} --rdzv-backend c10d --rdzv-endpoint {NODES[A]}:{PORT} --rdzv-id nodes "
        command += f"--rdzv-conf is_host={int(node == A)} --local-addr {NODES[node]} --monitor-interval 0.5 "
        command += f"--max-restarts {self.max_restarts} {ROOT}/examples/pretrain_gpt.py {TINY} {self.options} "
        command += f"--data-path {ROOT}/LICENSE --log-interval 1 --save {self.folder} --load {self.folder}"
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": INTERFACE}
        environment |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "PYTHONPATH": str(ROOT)}
        with open(self.log(node), "ab") as log:
            return subprocess.Popen(command.split(), stdout=log, stderr=log, env=environment)

    def log(self, node: str) -> Path:
        return Path(f"{self.folder}.{node}.log")

    def iteration(self) -> int:
        """The last one that was logged."""
        found = re.findall(r"iteration +(\d+)/", self.log(A).read_text())
        return int(found[-1]) if found else 0

    def wait_for(self, condition: Callable[[], bool], what: str) -> float:
        """Returns the seconds that it took."""
        since = time.monotonic()
        while not condition():
            if time.monotonic() > since + PATIENCE:
                raise RuntimeError(f"{what} did not happen within {PATIENCE} s: see {self.folder}.*.log")
            time.sleep(0.02)
        return time.monotonic() - since

    def wait_for_iteration(self, number: int) -> float:
        return self.wait_for(lambda: self.iteration() >= number, f"iteration {number}")

    def succeed(self) -> None:
        for node, torchrun in self.torchruns.items():
            assert torchrun.wait(PATIENCE) == 0, f"torchrun on {node} failed: see {self.log(node)}"


NUM_STEPS = 140
SHAPES = {
    "a slow link (256 kbit/s, by tbf)": "tbf rate 256kbit burst 4kb latency 2s",
    "50 ms of delay each way (netem)": "netem delay 50ms",
    "5% of packets lost (netem)": "netem loss 5%",
}
OPTIONS = f"--train-iters {NUM_STEPS} --save-interval 10 --keep-last 2"


class Row(NamedTuple):
    """Of the table."""

    fault: str
    found: str
    lost: str
    end: str


def same_weights(run: Run, reference: Path) -> str:
    """Raises AssertionError where they differ."""
    tensors, expected = (everything_in(checkpoints_in(saved)[NUM_STEPS]) for saved in (run.folder, reference))
    different = [key for key, tensor in expected.items() if not torch.equal(tensors[key], tensor)]
    assert not different, f"{len(different)} of {len(expected)} tensors differ, such as {different[0]}"
    return "trained on; the weights of one node, bit for bit"


def bad_links(network: Network, folder: Path, reference: Path) -> Iterator[Row]:
    """One run over links of all kinds, and one that is down for 5 s."""
    run = Run(folder / "links", OPTIONS)
    run.wait_for_iteration(20)
    paces: dict[str, float | None] = {}
    for number, (name, discipline) in enumerate({"none": "pfifo_fast", **SHAPES}.items()):
        has_discipline = network.shape(discipline)
        run.wait_for_iteration(20 + 20 * number)
        seconds = run.wait_for_iteration(40 + 20 * number)
        paces[name] = seconds / 20 if has_discipline else None
    network.shape("pfifo_fast")
    run.wait_for_iteration(105)
    network.set_link("down")
    time.sleep(5)
    network.set_link("up")
    began, up_at = run.iteration(), time.monotonic()
    run.wait_for_iteration(began + 2)
    waited = time.monotonic() - up_at
    run.succeed()
    end = same_weights(run, reference)
    usual = paces.pop("none")
    yield Row("none", "", "nothing", f"{1000 * (usual or 0):.0f} ms per step; {end}")
    for name, pace in paces.items():
        text = (
            "not tried: this kernel has no such discipline" if pace is None else f"{1000 * pace:.0f} ms per step; {end}"
        )
        yield Row(name, "", "nothing", text)
    yield Row("the link down for 5 s", "", f"5 s, and {waited:.1f} s until the next step", end)


def has_failed(run: Run, node: str) -> bool:
    return "PipelineError" in run.log(node).read_text()


def lost_node(network: Network, folder: Path, reference: Path) -> Iterator[Row]:
    """All processes of a node are killed, and another torchrun takes its place."""
    run = Run(folder / "returns", OPTIONS, max_restarts=2)
    run.wait_for_iteration(35)
    network.kill(B)
    reached = run.iteration()
    found = run.wait_for(partial(has_failed, run, A), "an error on the other node")
    run.torchruns[B] = run.start(B)
    at = run.log(A).stat().st_size
    again = run.wait_for(lambda: "going on from iteration" in run.log(A).read_text()[at:], "a new start")
    step = int(re.findall(r"going on from iteration (\d+)", run.log(A).read_text())[-1])
    run.succeed()
    end = same_weights(run, reference)
    lost = f"{reached - step} steps, those since the last save, and {again:.0f} s for the new start"
    yield Row(
        "all processes of a node killed, and its torchrun started again (`--max-restarts 2`)",
        f"{found:.1f} s",
        lost,
        end,
    )


def cut_node(network: Network, folder: Path, reference: Path) -> Iterator[Row]:
    """The link goes down and stays so: nobody's connection is closed."""
    run = Run(folder / "cut", OPTIONS)
    run.wait_for_iteration(20)
    network.set_link("down")
    since = time.monotonic()
    found, sentences = [], []
    for node in NODES:
        run.wait_for(partial(has_failed, run, node), f"an error on {node}")
        found.append(time.monotonic() - since)
        sentences.append(re.findall(r"PipelineError: (.*)", run.log(node).read_text())[0])
    run.wait_for(lambda: run.torchruns[A].poll() is not None, "the end of torchrun")
    ended = time.monotonic() - since
    yield Row(
        "the link down for good",
        f"{max(found):.0f} s",
        "the steps since the last save",
        f"with the store: *{sentences[0]}* torchrun ended there after {ended:.0f} s; without it: *{sentences[1]}*",
    )


FAULTS = {"links": bad_links, "a node lost": lost_node, "a node cut off": cut_node}


def document(rows: list[Row]) -> None:
    table = ["| fault | found within | lost | end |", "|---|---|---|---|"]
    table += [f"| {' | '.join(row)} |" for row in rows]
    before, _, rest = DOCUMENT.read_text().partition(MARKS[0])
    after = rest.partition(MARKS[1])[2]
    DOCUMENT.write_text(before + MARKS[0] + "\n".join(table) + "\n" + MARKS[1] + after)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", choices=FAULTS, help="these faults; printed, and not put into the table")
    args = parser.parse_args()
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("tc") is None:
        print("tests/nodes.py: skipped, since network namespaces take root, and ip and tc of iproute2.")
        return
    folder = Path(tempfile.mkdtemp(prefix="nodes_"))
    print(f"folder {folder}", flush=True)
    rows = []
    with Network():
        alone = Run(folder / "alone", OPTIONS, nodes=(A,))
        alone.succeed()
    for name, inject in FAULTS.items():
        if args.only in (None, name):
            with Network() as network:
                for row in inject(network, folder, alone.folder):
                    print(" | ".join(row), flush=True)
                    rows.append(row)
    if args.only is None:
        document(rows)
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()

"""What torch's store can take: the processor time of the process that holds it, per request, over many connections.

It bounds how often the ranks of a large job may look for failures. Wall time says little here, since server and clients
share the machine; the server's processor time is that of a large job.

python -m benchmarks.control_plane --connections 1024
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

from torch.distributed import TCPStore

from megapipe.failures import TIMING
from megapipe.failures.helper_thread import LOOKS_PER_SECOND

from .tables import FOLDER, save_table

RANKS = (1024, 8192)
NEIGHBOURS = [f"text {rank}" for rank in range(16)]
"""The texts of a pipeline of 16 ranks."""
REQUESTS: dict[str, Callable[[TCPStore], object]] = {
    "look for failures (add)": lambda store: store.add("notifications", 0),
    "write a text (set)": lambda store: store.set("text 0", "x" * 200),
    "are 16 texts there (check)": lambda store: store.check(NEIGHBOURS),
    "read 16 texts, one by one": lambda store: [store.get(name) for name in NEIGHBOURS],
    "read 16 texts at once": lambda store: store.multi_get(NEIGHBOURS),
}
HEADER = ["request", "server, us", *(f"{ranks} ranks once, s" for ranks in RANKS)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--connections", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5, help="requests of each kind per connection")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    args = parser.parse_args()
    questions, answers = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(answers,), daemon=True)
    server.start()
    port = questions.recv()
    stores = [TCPStore("localhost", port, wait_for_workers=False) for _ in range(args.connections)]
    for name in NEIGHBOURS:
        stores[0].set(name, "x" * 200)
    times = {name: processor_time(request, stores, args.rounds, questions) for name, request in REQUESTS.items()}
    rows = [[name, f"{1e6 * t:.1f}", *(f"{ranks * t:.3f}" for ranks in RANKS)] for name, t in times.items()]
    pause = max(TIMING.tick, max(RANKS) / LOOKS_PER_SECOND)
    share = 100 * max(RANKS) / pause * times["look for failures (add)"]
    notes = f"{max(RANKS)} ranks that look every {pause:.2g} s take {share:.0f} % of a core."
    save_table("control-plane", f"The store, {args.connections} connections", HEADER, rows, notes, args.folder)


def serve(connection: Connection) -> None:
    """Hold a store, and tell this process's processor time when asked."""
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    connection.send(store.port)
    with contextlib.suppress(EOFError):  # the benchmark has ended
        while True:
            connection.recv()
            connection.send(time.process_time())


def processor_time(
    request: Callable[[TCPStore], object], stores: list[TCPStore], num_rounds: int, server: Connection
) -> float:
    """Of the server, in seconds per request."""

    def now() -> float:
        server.send(None)
        return float(server.recv())

    begin = now()
    for _ in range(num_rounds):
        for store in stores:
            request(store)
    return (now() - begin) / (num_rounds * len(stores))


if __name__ == "__main__":
    main()

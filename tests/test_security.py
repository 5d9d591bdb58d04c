"""docs/security.md holds: what is unpickled where, and on which addresses a rank listens."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tools.models import build, run
from tools.ranks import on_ranks

import megapipe
from megapipe.process_groups import all_gather_json
from megapipe.runtime.sharing import _Described

PACKAGE = Path(megapipe.__file__).parent
PAGE = (Path(__file__).parents[1] / "docs" / "security.md").read_text()
RUNS_CODE = re.compile(
    r"(c?pickle|dill|marshal|shelve)\.\w+|torch\.(load|save)|(\w+\.)*(\w+_object|\w+_object_list)|eval|exec|.*Pickler"
)


def calls_that_can_run_code(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text())):
        called = node.func if isinstance(node, ast.Call) else None
        bases = node.bases if isinstance(node, ast.ClassDef) else []
        for name in map(_dotted, [called, *bases]):
            if RUNS_CODE.fullmatch(name) and not name.endswith("Error") and not name.startswith("ctypes."):
                yield name


def _dotted(node: ast.expr | None) -> str:
    """A name like `torch.load`; what is before its first name is left out."""
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def test_every_call_that_can_run_code_is_documented() -> None:
    found = {}
    for file in PACKAGE.rglob("*.py"):
        if calls := sorted(set(calls_that_can_run_code(file))):
            found[str(file.relative_to(PACKAGE))] = calls
    table = re.findall(r"^\| `(\S+\.py)` \| (.+?) \|", PAGE, flags=re.MULTILINE)
    assert {file: sorted(re.findall(r"`(.+?)`", calls)) for file, calls in table} == found


def test_the_search_finds_such_calls(tmp_path: Path) -> None:
    file = tmp_path / "some.py"
    file.write_text("import torch\ntorch.load(x)\ndist.all_gather_object(a, b)\nclass U(pickle.Unpickler): pass\n")
    assert sorted(calls_that_can_run_code(file)) == ["dist.all_gather_object", "pickle.Unpickler", "torch.load"]


def listening() -> set[str]:
    """The IPv4 addresses, in hexadecimal, and ports on which this process listens. Sockets of IPv6 have 32 digits."""
    descriptors = (f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd"))
    own = {os.readlink(path) for path in descriptors if os.path.islink(path)}
    rows = [row.split() for kind in ("tcp", "tcp6") for row in Path(f"/proc/self/net/{kind}").read_text().splitlines()]
    return {row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in own}


@pytest.mark.skipif(not Path("/proc/self/net/tcp").exists(), reason="only Linux tells which sockets listen")
@on_ranks(2)
def test_channels_listen_on_the_interface_that_was_asked_for(rank: int) -> None:
    before = listening()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        chunks = build("1f1b", 2, 4)
        run("1f1b", chunks, 4)
        opened = listening() - before
        assert opened
        assert {address.partition(":")[0] for address in opened} == {"0100007F"}  # 127.0.0.1
    finally:
        del os.environ["GLOO_SOCKET_IFNAME"]


@on_ranks(2)
def test_an_interface_that_does_not_exist_is_an_error(rank: int) -> None:
    chunks = build("1f1b", 2, 4)
    os.environ["GLOO_SOCKET_IFNAME"] = "none-such"
    try:
        with pytest.raises((RuntimeError, megapipe.PipelineError), match="none-such"):
            run("1f1b", chunks, 4)
    finally:
        del os.environ["GLOO_SOCKET_IFNAME"]


@on_ranks(3)
def test_values_of_all_ranks_are_gathered(rank: int) -> None:
    values: list[Any] = [None, ["a", 0.1, {"b": [True]}], "é" * 1000]
    assert all_gather_json(values[rank]) == values
    pair = dist.new_group([0, 2])
    if rank != 1:
        assert all_gather_json(rank, pair) == [0, 2]


@pytest.mark.parametrize("fields", [([1], "load", ["/etc/passwd"]), ([1], "none", [1])])
def test_a_report_that_names_a_function_is_refused(fields: tuple[list[int], str, list[object]]) -> None:
    with pytest.raises((TypeError, AttributeError)):
        _Described(*fields).build(torch.device("cpu"))

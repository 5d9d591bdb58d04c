"""What the package asks of torch.cuda and of ProcessGroupNCCL is there, by name and keyword: read from its code. Where
torch is made without CUDA (`.ci/run` installs one that is) only torch.cuda is looked at."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

PACKAGE = Path(__file__).parents[2] / "megapipe"
NCCL = getattr(dist, "ProcessGroupNCCL", None)
MISSING = object()
CALLED = re.compile(r"cuda|Cuda|NCCL")
OTHERS = re.compile(r"torch\.(?!cuda\b|get_device_module)")


def meant_by(node: ast.expr, names: dict[str, Any]) -> Any:
    """The object of torch's that an expression means; None where it means another."""
    if isinstance(node, ast.Call):
        called = meant_by(node.func, names)
        if called is torch.get_device_module:
            return torch.cuda
        is_made = isinstance(called, type) or called is MISSING
        return made(called) if is_made else torch.cuda.Stream if called == torch.cuda.current_stream else None
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if not isinstance(node, ast.Attribute):
        return None
    owner = meant_by(node.value, names)
    if owner is None:  # as `self.event` is named
        return names.get(node.attr) if isinstance(node.value, ast.Name) and node.attr == "event" else None
    return getattr(owner, node.attr, MISSING)


def made(kind: Any) -> Any:
    return kind() if NCCL is not None and kind is NCCL.Options else kind


def uses(path: Path) -> Iterator[tuple[str, bool]]:
    """What a file uses, and whether it is there."""
    text = path.read_text()
    if not CALLED.search(text) and "get_device_module" not in text:
        return
    given: dict[str, Any] = {"torch": torch}
    if "get_device_module" in text or "CudaEvents" in text:
        given |= {"event": torch.cuda.Event, "stream": torch.cuda.Stream}
    if NCCL is not None and path.parent.name == "transports":
        given |= {"dist": dist, "backend": NCCL}
    for scope in (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)):
        names = {**given}
        for node in ast.walk(scope):
            if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
                target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                is_pair = isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
                for one, value in zip(target.elts, node.value.elts) if is_pair else [(target, node.value)]:
                    if isinstance(one, ast.Name) and isinstance(value, ast.Call):
                        names[one.id] = meant_by(value, names) or names.get(one.id)
        for node in ast.walk(scope):
            where = f"{path.relative_to(PACKAGE)}:{getattr(node, 'lineno', 0)}: "
            if isinstance(node, ast.Attribute) and not OTHERS.match(ast.unparse(node)):
                owner = meant_by(node.value, names)
                if owner not in (None, MISSING, torch, dist):
                    yield where + ast.unparse(node), hasattr(owner, node.attr)
            elif isinstance(node, ast.Call):
                called = torch.cuda.Event if ast.unparse(node.func) == "CudaEvents" else meant_by(node.func, names)
                if CALLED.search(ast.unparse(node.func)) and called not in (None, MISSING):
                    known = signature(called)
                    yield from ((where + f"{one.arg}=", one.arg in known) for one in node.keywords if one.arg)


def signature(called: Any) -> str:
    """With the text of what is made in C++, whose signature says nothing."""
    function = called.__new__ if isinstance(called, type) else called
    return f"{inspect.signature(function)} {called.__init__.__doc__}"


def test_what_is_asked_of_cuda_is_there() -> None:
    found = [one for path in sorted(PACKAGE.rglob("*.py")) for one in uses(path)]
    assert not [what for what, is_there in found if not is_there]
    assert len(found) > 20
    if NCCL is not None:
        text = " ".join(what for what, _ in found)
        assert all(name in text for name in ("options.config.max_ctas", "backend.abort", "is_high_priority_stream="))

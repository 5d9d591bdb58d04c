"""What a chunk is made of: the only key of what is kept for it from step to step."""

import ast
import copy
import gc
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import megapipe
from megapipe import structure
from megapipe.structure import structure_of

PACKAGE = Path(megapipe.__file__).parent


def made() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))


def exchange(chunk: nn.Module, name: str, part: nn.Module) -> None:
    chunk.set_submodule(name, part)


CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "a module of the same type": lambda chunk: exchange(chunk, "0", nn.Linear(4, 4)),
    "a module of another type": lambda chunk: exchange(chunk, "1", nn.Identity()),
    "a module more": lambda chunk: chunk.append(nn.Tanh()),
    "a class": lambda chunk: setattr(chunk[1], "__class__", type("Other", (nn.Dropout,), {})),
    "a parameter": lambda chunk: setattr(chunk[0], "weight", nn.Parameter(torch.ones(4, 4))),
    "a parameter less": lambda chunk: setattr(chunk[0], "bias", None),
    "a tied parameter": lambda chunk: setattr(chunk[2][0], "weight", chunk[0].weight),
    "a parametrization": lambda chunk: parametrizations.weight_norm(chunk[0]),
    "a frozen parameter": lambda chunk: chunk[0].weight.requires_grad_(False),
    "a dtype": lambda chunk: chunk[2].double(),
    "evaluation of a part": lambda chunk: chunk[2].eval(),
    "a forward": lambda chunk: setattr(chunk[0], "forward", lambda x: x),
    "a hook before": lambda chunk: chunk[0].register_forward_pre_hook(lambda *_: None),
    "a hook behind": lambda chunk: chunk[0].register_forward_hook(lambda *_: None),
    "a hook before its backward": lambda chunk: chunk[0].register_full_backward_pre_hook(lambda *_: None),
    "a hook behind its backward": lambda chunk: chunk[0].register_full_backward_hook(lambda *_: None),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_makes_another_structure(change: str) -> None:
    chunk = made()
    before = structure_of(chunk)
    before.kept["found"] = True
    CHANGES[change](chunk)
    assert structure_of(chunk) is not before
    assert not structure_of(chunk).kept


def test_steps_change_nothing() -> None:
    """Where training itself made another structure in each step, all would be found out anew in each."""
    chunk = made()
    before = structure_of(chunk)
    optimizer = torch.optim.AdamW(chunk.parameters())
    for _ in range(3):
        chunk(torch.randn(3, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        chunk[2][1].running_mean = chunk[2][1].running_mean.clone()  # as forwards do that keep an average
        assert structure_of(chunk) is before


def test_a_change_that_is_taken_back() -> None:
    chunk = made()
    before = structure_of(chunk)
    assert structure_of(chunk.eval()) is not before
    assert structure_of(chunk.train()) is before


def test_copies_have_structures_of_their_own() -> None:
    chunk = made()
    assert structure_of(copy.deepcopy(chunk)) is not structure_of(chunk)


def test_what_is_gone_is_forgotten() -> None:
    """A structure is known by the numbers of its objects, which Python gives to others when they are gone."""
    chunk = made()
    structure_of(chunk)
    exchange(chunk, "0", nn.Linear(4, 4))
    gc.collect()
    known = len(structure._structures)
    structure_of(chunk)
    assert len(structure._structures) == known + 1
    del chunk
    gc.collect()
    assert len(structure._structures) == known


def test_only_so_many_are_kept() -> None:
    chunks = [nn.Linear(2, 2) for _ in range(structure.MOST_STRUCTURES + 8)]
    first = structure_of(chunks[0])
    for chunk in chunks:
        structure_of(chunk)
        assert structure_of(chunks[0]) is first  # the one used last
    assert len(structure._structures) == structure.MOST_STRUCTURES


# One place for what is kept

KEPT_BY_OTHER_KEYS = {
    "checkpoint/files.py: UNDER_WAY": "folders",
    "checkpoint/folder_lock.py: _held": "folders",
    "failures/helper_thread.py: _tasks": "functions, until they are taken out",
    "frameworks.py: ties": "names of packages",
    "graph/captured.py: _captured_classes": "types",
    "graph/compile.py: _compiled": "code",
    "integrations/transformers/boundaries.py: _classes": "types",
    "integrations/transformers/stage.py: _classes": "types",
    "plan/planned.py: _made": "plans",
    "plan/registry.py: _schedules": "names of schedules",
    "runtime/session.py: _sessions": "process groups",
}
"""Containers of modules of the package that functions fill, and what they are filled with."""


def memos_of(path: Path) -> Iterator[str]:
    text = path.read_text()
    tree = ast.parse(text)
    for node in ast.walk(tree) if re.search(r"\b(Weak\w+|id\()", text) else ():
        if isinstance(node, ast.Name) and node.id in ("WeakSet", "WeakKeyDictionary"):
            yield node.id
        is_id = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "id"
        if is_id and re.fullmatch(r"(\w*_)?(module|model|chunk|stage)", ast.unparse(node.args[0])):
            yield ast.unparse(node)
    empty = re.compile(r"(\{\}|\[\]|set\(\)|\w*(Dict|Dictionary|deque)\w*\(.*\))")
    for node in (one for one in tree.body if isinstance(one, (ast.Assign, ast.AnnAssign)) and one.value is not None):
        if empty.fullmatch(ast.unparse(node.value)):
            yield ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target)


def test_nothing_is_kept_for_a_chunk_elsewhere() -> None:
    """Each place that kept something for a module had a key of its own, which lacked something: a head that was
    exchanged, a stage that was unfrozen later, the rank behind. Nine of them were wrong without a word."""
    paths = [path for path in sorted(PACKAGE.rglob("*.py")) if path.name != "structure.py"]
    found = [f"{path.relative_to(PACKAGE).as_posix()}: {memo}" for path in paths for memo in memos_of(path)]
    found = [memo for memo in found if not memo.endswith(": __all__")]
    assert sorted({*found}) == sorted(KEPT_BY_OTHER_KEYS)

"""Plant mistakes into the package, one at a time, and say which test catches each: what the tests protect, counted.

    python tests/mutations.py --where before.json                      # 20 mended bugs put back, 40 mistakes drawn
    python tests/mutations.py --again before.json --where after.json   # the same, in a tree whose tests have changed

The package is changed in a copy, never here. Each mistake gets the tests of its room, then those of numbers, until one
fails. Lines of JSON are written as they come: a second run goes on where the first has ended. Last, the tests that have
caught something run without a mistake, since a test that fails anyhow catches nothing.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
from mutations_put_back import PUT_BACK
from mutations_selected import ALONE, EQUIVALENT, NUM_DRAWN, NUMBERS, ROOMS, UNPROTECTED

IMPORTED_ONCE = ["torch._dynamo", "torch.distributed.checkpoint"]  # by this process, of which all others are forks
FORK: Any = multiprocessing.get_context("fork")
ROOT = Path(__file__).parents[1]
FIRST_DRAWN = 21  # the number of the first mistake that is drawn
STOPPED = "in this time"
OTHER = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "is": "is not", "is not": "is"}
OTHER |= {"in": "not in", "not in": "in"}
SIGNS = {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!="}
SIGNS |= {ast.Is: "is", ast.IsNot: "is not", ast.In: "in", ast.NotIn: "not in"}
TEXTS = (ast.Raise, ast.Assert, ast.JoinedStr)  # what is said of errors, and what never happens
PASSED_OVER = ("if TYPE_CHECKING", "warn(", "warnings.warn(")


@dataclass(frozen=True)
class Mistake:
    """A piece of code in a function, and what takes its place. It is known by its syntax tree, so that it is found
    again where lines have moved. `which`: of several pieces that are alike in this function."""

    file: str
    function: str
    node: str
    which: int
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.file}, {self.function or 'top'}: {self.old} -> {self.new}" + f" ({self.which})" * bool(
            self.which
        )

    def plant(self, root: Path) -> Path | None:
        """Change the file, or another one that has such a function now. None where no file has the code any more."""
        for path in [root / self.file, *sorted((root / "megapipe").rglob("*.py"))]:
            source = path.read_text() if path.exists() else ""
            alike = [
                node
                for function, node in walk(ast.parse(source))
                if function == self.function and ast.dump(node) == self.node
            ]
            if len(alike) > self.which:
                path.write_text(replaced(source, alike[self.which], self.new))
                return path
        return None


@dataclass(frozen=True)
class Bug:
    """A bug that was mended, put back by its text."""

    story: str
    test: str
    file: str
    old: str
    new: str

    def __str__(self) -> str:
        return self.story

    def plant(self, root: Path) -> Path | None:
        path = root / self.file
        if not path.exists() or self.old not in path.read_text():
            return None
        path.write_text(path.read_text().replace(self.old, self.new, 1))
        return path


def walk(node: ast.AST, function: str = "") -> Iterator[tuple[str, ast.AST]]:
    """All code, each piece with the function that it is in: without annotations and texts of errors and warnings."""
    for field, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or field in ("annotation", "returns", "decorator_list"):
                continue
            if isinstance(child, TEXTS) or ast.unparse(child).startswith(PASSED_OVER):
                continue
            name = getattr(child, "name", "") if isinstance(child, (ast.FunctionDef, ast.ClassDef)) else ""
            inner = f"{function}.{name}".strip(".") if name else function
            yield inner, child
            yield from walk(child, inner)


def replaced(source: str, node: Any, new: str) -> str:
    lines = source.encode().splitlines(keepends=True)
    before = b"".join(lines[: node.lineno - 1]) + lines[node.lineno - 1][: node.col_offset]
    behind = lines[node.end_lineno - 1][node.end_col_offset :] + b"".join(lines[node.end_lineno :])
    return (before + new.encode() + behind).decode()


def changes_of(node: ast.AST) -> Iterator[tuple[str, ast.AST, str]]:
    """The kinds of mistakes that can be made at a piece of code, each with what is replaced and by what."""
    match node:
        case ast.Compare(left, [sign, *_], [right, *rest]) if not rest:
            yield "comparison", node, f"({ast.unparse(left)} {OTHER[SIGNS[type(sign)]]} {ast.unparse(right)})"
        case ast.Constant(bool(value)):
            yield "truth", node, str(not value)
        case ast.Constant(int(value)):
            yield "number", node, str(value + 1)
            yield "number", node, f"({value - 1})"
        case ast.BoolOp(sign, parts):
            word = " or " if isinstance(sign, ast.And) else " and "
            yield "and, or", node, "(" + word.join(f"({ast.unparse(part)})" for part in parts) + ")"
        case ast.If(test) | ast.IfExp(test):
            yield "condition", test, f"(not ({ast.unparse(test)}))"
        case ast.Expr(ast.Call()) | ast.AugAssign() | ast.Assign([ast.Attribute() | ast.Subscript()]):
            yield "statement", node, "pass"
        case ast.Return(value) if value is not None and ast.unparse(value) != "None":
            yield "return", node, "return None"


def draw(seed: int) -> Iterator[Mistake]:
    """At most one mistake of each file, in an order that the seed says: the file, then the kind, then the place."""
    chance = random.Random(seed)
    files = sorted(path.relative_to(ROOT) for path in (ROOT / "megapipe").rglob("*.py") if path.name[:2] != "__")
    files = [file for file in files if not str(file).startswith(UNPROTECTED)]
    for file in chance.sample(files, len(files)):
        kinds: dict[str, list[tuple[str, ast.AST, str]]] = {}
        code = list(walk(ast.parse((ROOT / file).read_text())))
        for function, piece in code:
            for kind, node, new in changes_of(piece):
                kinds.setdefault(kind, []).append((function, node, new))
        if not kinds:
            continue
        function, node, new = chance.choice(kinds[chance.choice(sorted(kinds))])
        alike = [other for where, other in code if where == function and ast.dump(other) == ast.dump(node)]
        yield Mistake(str(file), function, ast.dump(node), alike.index(node), ast.unparse(node), new)


def planted(seed: int) -> dict[int, Bug | Mistake]:
    """By number: bugs put back, then what is drawn. A drawn mistake that changes nothing keeps its number, and another
    one is drawn in its place behind all others."""
    bugs = {number: Bug(*texts) for number, texts in enumerate(PUT_BACK, 1)}
    drawn: list[Mistake] = []
    for mistake in draw(seed):
        if sum(str(one) not in EQUIVALENT for one in drawn) == NUM_DRAWN:
            break
        drawn.append(mistake)
    return {**bugs, **dict(enumerate(drawn, FIRST_DRAWN))}


def selected(one: Bug | Mistake) -> list[list[str]]:
    """The tests that are likely to catch it, those of its room, and those of numbers. Each of the three is a pytest of
    its own, since it reads all files that it is given before it begins."""
    inside = one.file.removeprefix("megapipe/").removesuffix(".py")
    named = [one.test] if isinstance(one, Bug) else []
    mirrored = [
        str(path.relative_to(ROOT)) for path in sorted((ROOT / "tests").rglob(f"test_{Path(one.file).stem}.py"))
    ]
    room = max((room for room in ROOMS if inside.startswith(room)), key=len)
    own = [*dict.fromkeys(named + mirrored + ROOMS[room])]
    others = [tests for tests in NUMBERS if tests not in own and not inside.startswith(ALONE)]
    likely = named or own[: max(2, len(mirrored))]
    return [tests for tests in (likely, [tests for tests in own if tests not in likely], others) if tests]


def first_failure(copy: Path, tests: list[str], patience: float) -> tuple[str | None, str]:
    """The first test that fails, and the last line of its error; None where none does, and why."""
    there = [test for test in tests if (copy / test.split("::")[0]).exists()]
    if not there:
        return None, "gone"
    with tempfile.TemporaryFile("w+") as out:
        run = FORK.Process(target=run_tests, args=(copy, there, out.fileno()))
        run.start()
        assert run.pid is not None
        try:
            run.join(patience)
            was_stopped = run.is_alive()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(run.pid, signal.SIGKILL)  # its ranks, too
            run.join()
        out.seek(0)
        lines = out.read().splitlines()
    if failures := [line for line in lines if line.startswith(("FAILED tests", "ERROR tests"))]:
        errors = [line[1:].strip() for line in lines if line.startswith("E  ") and line[1:].strip()]
        return failures[0].split(" ", 1)[1].split(" - ")[0], (errors or [""])[-1][:300]
    if run.exitcode not in (0, -signal.SIGKILL) and len(tests) > 1:  # one alone may be gone
        raise RuntimeError("\n".join([*lines[-20:], f"pytest ended with {run.exitcode} and no failed test"]))
    return None, STOPPED if was_stopped else ""


def run_tests(copy: Path, tests: list[str], out: int) -> None:
    """pytest, in a fork of this process, which has imported torch. The ranks of tests are forks of that one in turn: to
    start them anew takes longer than most tests."""
    os.setsid()
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.chdir(copy)
    os.environ["PYTHONPATH"] = str(copy)
    sys.path[:] = [str(copy), *(path for path in sys.path if not path.startswith(str(ROOT / "tests")))]
    context_of = multiprocessing.get_context
    FORK.set_forkserver_preload = lambda modules: None
    multiprocessing.get_context = lambda kind=None: FORK if kind == "forkserver" else context_of(kind)
    sys.exit(pytest.main(["-xq", "-n0", "--timeout=120", "-p", "no:cacheprovider", *tests]))


def try_one(copy: Path, one: Bug | Mistake, before: str | None, patience: float) -> dict[str, Any]:
    """Which test catches it, or what else is to be said of it."""
    begin = time.monotonic()
    path = one.plant(copy)
    if path is None:
        return {"gone": True}
    compiled = Path(importlib.util.cache_from_source(str(path)))  # in the same second: it is taken for what is compiled
    try:
        for tests in [[before]] * bool(before) + selected(one):
            compiled.unlink(missing_ok=True)
            test, why = first_failure(copy, tests, patience)
            if test is not None:
                break
        return {"caught_by": test, "why": why, "seconds": round(time.monotonic() - begin)}
    finally:
        shutil.copy(ROOT / path.relative_to(copy), path)
        compiled.unlink(missing_ok=True)


def read(path: Path | None) -> dict[int, dict[str, Any]]:
    lines = path.read_text().splitlines() if path is not None and path.exists() else []
    return {record["number"]: record for record in map(json.loads, lines)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=61, help="of the mistakes that are drawn")
    parser.add_argument("--only", type=lambda text: [*map(int, text.split(","))], help="numbers: 3,17")
    parser.add_argument("--patience", type=float, default=300, help="seconds for each pytest")
    parser.add_argument("--where", type=Path, default=Path("mutations.json"), help="the file of results")
    parser.add_argument("--again", type=Path, help="results of an earlier run, whose mistakes are planted again")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))
    earlier, done = read(options.again), read(options.where)
    mistakes: dict[int, Bug | Mistake] = planted(options.seed)
    if earlier:
        drawn = {number: Mistake(**record["mistake"]) for number, record in earlier.items() if "mistake" in record}
        mistakes = {number: drawn.get(number) or mistakes[number] for number in earlier}
    print(f"seed {options.seed}, {len(mistakes)} mistakes")
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    for name in IMPORTED_ONCE:
        importlib.import_module(name)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "megapipe"
        shutil.copytree(
            ROOT, copy, ignore=shutil.ignore_patterns(".git", ".venv*", "__pycache__", "checkpoints", "site")
        )
        for number in options.only or [number for number in mistakes if number not in done]:
            one = mistakes[number]
            print(f"{number:3} {one}", flush=True)
            if str(one) in EQUIVALENT:
                result: dict[str, Any] = {"equivalent": EQUIVALENT[str(one)]}
            else:
                result = try_one(copy, one, earlier.get(number, {}).get("caught_by"), options.patience)
            what = {"mistake": asdict(one)} if isinstance(one, Mistake) else {"story": one.story}
            done[number] = {"number": number, **what, **result}
            print(f"    {result}", flush=True)
            with options.where.open("a") as file:
                file.write(json.dumps(done[number]) + "\n")
        summarise(done, earlier)
        catching = sorted({record["caught_by"] for record in done.values() if record.get("caught_by")})
        while (failure := first_failure(copy, catching, 20 * options.patience))[0]:
            print(f"fails without a mistake, too: {failure}")
            catching.remove(failure[0])


def summarise(done: dict[int, dict[str, Any]], earlier: dict[int, dict[str, Any]]) -> None:
    caught = {number for number, record in done.items() if record.get("caught_by")}
    same = {number for number, record in done.items() if record.get("equivalent")}
    gone = {number for number, record in done.items() if record.get("gone")}
    left = done.keys() - caught - same - gone
    print(f"{len(caught)} caught, {len(left)} not; {len(same)} change nothing: {sorted(same)}; gone: {sorted(gone)}")
    for number in sorted(left):
        was = "caught before, not now" if earlier.get(number, {}).get("caught_by") else "not caught"
        print(f"{number:3} {was} {done[number]['why']}")


if __name__ == "__main__":
    main()

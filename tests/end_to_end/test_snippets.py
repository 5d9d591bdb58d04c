"""Every snippet of the README and of the pages runs, and what it shows is what comes out.

The Python blocks of a page run one after the other, in one namespace: on 4 ranks where the page counts them, on 2 with
a pipeline and a model that are half as long on all others. Blocks in HTML comments (`<!-- python`) run too: they are
what a reader has already. A page that links to the whole script of the ten steps continues it.
"""

from __future__ import annotations

import contextlib
import copy
import doctest
import io
import os
import re
import shlex
import warnings
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tools.ranks import RankPool

from megapipe.analysis import cli

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "examples/README.md", *sorted((ROOT / "docs").rglob("*.md"))]
CONTINUES = "ten_steps.md#the-whole-script"
README = ROOT / "README.md"  # test_readme.py runs its script
ON_FOUR = ("data_parallelism", "errors", "own_model", "from_megatron", "from_torch", "own_schedule", "ten_steps")

CHECKED = ("docs/index.md", "docs/tensor_parallel.md")
"""Pages whose first script other tests run, and see that it trains: test_readme.py and test_tensor_parallel.py."""

# Blocks, hidden or not. A block without a language directly behind one in Python is its output.
FENCE = re.compile(r"^(?:(<!-- python)|```(\w*))\n(.*?)^(?:-->|```)$", flags=re.MULTILINE | re.DOTALL)
OUTPUT = re.compile(r"\n\n```\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    language: str
    text: str
    line: int
    is_hidden: bool
    output: str | None


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text()
    blocks = []
    for found in FENCE.finditer(text):
        is_hidden, language = bool(found[1]), "python" if found[1] else found[2]
        output = OUTPUT.match(text, found.end())
        blocks.append(
            Block(language, found[3], text[: found.start(3)].count("\n"), is_hidden, output[1] if output else None)
        )
    return blocks


def snippets_of(page: Path) -> list[Block]:
    """The blocks that run one after the other: no whole scripts, no doctests, no definitions shown from the sources."""
    others = scripts_of(page) + doctests_of(page)
    sources = [block for block in blocks_of(page) if block.text.startswith("def F(pipe: Verbs")]  # see test_readme.py
    return [block for block in blocks_of(page) if block.language == "python" and block not in others + sources]


def scripts_of(page: Path) -> list[Block]:
    return [block for block in blocks_of(page) if "dist.destroy_process_group()" in block.text]


def doctests_of(page: Path) -> list[Block]:
    return [block for block in blocks_of(page) if block.text.startswith(">>>")]


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def pages_with(select: Callable[[Path], Any]) -> list[Any]:
    return [pytest.param(page, id=name(page)) for page in PAGES if select(page)]


def setup() -> Block:
    """The script of the ten steps, up to its loop."""
    (script,) = scripts_of(ROOT / "docs/tutorials/ten_steps.md")
    return script._replace(text=script.text.partition("\nfor step")[0])


def run_on_rank(rank: int, blocks: list[Block], page: str, folder: Path) -> list[str]:
    """What each block prints. The process group is the worker's."""
    import torch.distributed as dist

    import megapipe
    from megapipe.plan import registry

    names = {"__name__": "__main__", "shared_folder": folder}
    known = copy.copy(registry._schedules)
    outputs = []
    try:
        with warnings.catch_warnings(), in_folder(folder):
            warnings.simplefilter("ignore", megapipe.TrainingWarning)
            for block in blocks:
                text = re.sub(r"dist\.(init|destroy)_process_group\(.*\)", "pass", block.text)
                if dist.get_world_size() == 2:
                    text = text.replace("parallel_size=4", "parallel_size=2").replace("layers=8", "layers=4")
                printed = io.StringIO()
                with contextlib.redirect_stdout(printed):
                    exec(compile("\n" * block.line + text, page, "exec", dont_inherit=True), names)
                outputs.append(printed.getvalue())
    finally:
        registry._schedules.clear()
        registry._schedules.update(known)
    return outputs


@contextlib.contextmanager
def in_folder(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def without_names(text: str) -> str:
    """The sentence of a wait that ran out, whichever rank was first."""
    return re.sub(r"^rank \d waited", "a rank waited", text.rstrip())


@pytest.mark.parametrize("page", pages_with(snippets_of))
def test_snippets_run(ranks: RankPool, page: Path, tmp_path: Path) -> None:
    if page.stem == "from_megatron" and find_spec("megatron") is None:
        pytest.skip("make test installs megatron-core")
    blocks = snippets_of(page)
    before = [setup()] if CONTINUES in page.read_text() else []
    outputs = ranks.run(4 if page.stem in ON_FOUR else 2, run_on_rank, before + blocks, str(page), tmp_path)
    for number, block in enumerate(blocks, start=len(before)):
        if block.output is not None:
            printed = {without_names(output[number]) for output in outputs}
            assert without_names(block.output) in printed, f"the output of {name(page)}, line {block.line}"


def unchecked_scripts_of(page: Path) -> list[Block]:
    return scripts_of(page)[name(page) in CHECKED :]


@pytest.mark.parametrize("page", pages_with(unchecked_scripts_of))
def test_whole_scripts_run(ranks: RankPool, page: Path, tmp_path: Path) -> None:
    for script in unchecked_scripts_of(page):
        ranks.run(4, run_on_rank, [script], str(page), tmp_path)


@pytest.mark.parametrize("page", pages_with(doctests_of))
def test_prompts_answer_as_shown(page: Path) -> None:
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    text = "".join(block.text for block in doctests_of(page))
    test = doctest.DocTestParser().get_doctest(text, {}, name(page), str(page), 0)
    assert test.examples
    assert doctest.DocTestRunner(optionflags=flags).run(test).failed == 0


def commands() -> Iterator[Any]:
    """Commands in the text and in blocks, each on one line."""
    for page in [README, *PAGES]:
        shells = "".join(block.text for block in blocks_of(page) if not block.language).replace("\\\n", " ")
        lines = [line.removeprefix("$ ") for line in shells.splitlines()]
        in_text = re.findall(r"(?<!`)`([^`\n]+)`(?!`)", page.read_text())
        for command in (one for one in lines + in_text if re.match(r"(make|megapipe|torchrun) (?!$)", one)):
            yield pytest.param(command, id=f"{name(page)}: {command}")


@pytest.mark.parametrize("command", list(commands()))
def test_commands_exist(command: str) -> None:
    """Targets of make, options of megapipe, and files that torchrun starts, with their options."""
    words = shlex.split(command, comments=True)
    if words[0] == "make":
        targets = re.findall(r"^([a-z-]+(?: [a-z-]+)*):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
        assert words[1] in " ".join(targets).split()
    elif words[0] == "megapipe":
        with pytest.raises(SystemExit) if len(words) == 2 else contextlib.nullcontext():  # the help of a command
            cli._parser().parse_args([*words[1:], *["--help"][: len(words) == 2]])
    else:
        (script,) = (word for word in words if word.endswith(".py"))
        if "/" in script:
            text = "".join(path.read_text() for path in (ROOT / "examples").glob("*.py"))
            assert (ROOT / script).exists()
            options = set(re.findall(r"\"(--[a-z-]+)\"", text))
            options |= {f"--{field.replace('_', '-')}" for field in re.findall(r"\"(\w+)\": \(", text)}
            assert {word for word in words[words.index(script) :] if word.startswith("--")} <= options

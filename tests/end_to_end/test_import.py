"""What `import megapipe` and its names cost: torch, and little else. What the command costs: not even torch."""

import compileall
import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

from tools.measured import as_measured

import megapipe
from megapipe.analysis import Timeline
from megapipe.plan import make_plan

PACKAGE = Path(megapipe.__file__).parent
SCRIPT = """
import sys
sys.argv = ["bin/megapipe"]
import torch
import torch.distributed
before = set(sys.modules)
import megapipe
from megapipe import *
print(megapipe.__file__, PipelineStage.__name__, *sorted(set(sys.modules) - before))
from megapipe.checkpoint import Checkpointer
"""

COMMANDS = """
import sys
sys.argv = sys.argv[1:]
from megapipe.analysis.cli import main
sizes = ["--pp", "4", "--microbatches", "8"]
assert main(["show", "zbv", *sizes]) == 0
assert main(["compare", *sizes]) == 0
assert main(["show", "1f1b", *sizes, "--save", "plan.json"]) == 0
assert main(["show", "plan.json"]) == 0
assert main(["tune", "timeline.json"]) == 0
model = ["num_hidden_layers=4", "hidden_size=8", "num_attention_heads=2", "vocab_size=9"]
model += ["--memory", "1GB", "--flops", "1e9"]
assert main(["fit", *model, "--efficiency", "1", "--devices", "1", "--sequence", "8", "--batch", "2"]) == 0
assert main(["status", "localhost:1"]) == 2
assert main(["--help"]) == 0
print(*sorted(sys.modules))
"""

EXPENSIVE = (
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "torch._dynamo",
    "torch._inductor",
    "sympy",
    "numpy",
    "rich",
    "matplotlib",
    "megatron",
)


def test_a_package_without_sources(tmp_path: Path) -> None:
    """It raised a TypeError at the first name: sources were parsed for it. To a program called megapipe, `import
    megapipe` gave no name: it was taken for the command, which does without torch. Nothing expensive is imported."""
    compileall.compile_dir(PACKAGE, quiet=1)  # what is not compiled yet
    for source in PACKAGE.rglob("*.py"):
        compiled = (tmp_path / "megapipe" / source.relative_to(PACKAGE)).with_suffix(".pyc")
        compiled.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(importlib.util.cache_from_source(str(source)), compiled)
    command, environment = [sys.executable, "-c", SCRIPT], {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    file, stage, *modules = done.stdout.split()
    assert (file, stage) == (str(tmp_path / "megapipe" / "__init__.pyc"), "PipelineStage")
    assert "megapipe.runtime.step" in modules
    assert [name for name in modules if name.startswith(EXPENSIVE)] == []


def test_the_command_starts_without_torch(tmp_path: Path) -> None:
    """It took two seconds to draw a plan, nearly all of them to import torch."""
    Timeline("zbv", [as_measured(make_plan("zbv", 2, 4).simulate())]).save(tmp_path / "timeline.json")
    command = [sys.executable, "-c", COMMANDS, "bin/megapipe"]
    shown = subprocess.run(command, check=True, capture_output=True, text=True, cwd=tmp_path).stdout.splitlines()
    assert "megapipe.schedules" in shown[-1].split()
    assert [name for name in shown[-1].split() if name.startswith("torch")] == []


def test_the_module_starts_without_torch(tmp_path: Path) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "megapipe", "--version"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.startswith("megapipe ")
    assert "megapipe.analysis.cli" in done.stderr
    assert "torch" not in done.stderr

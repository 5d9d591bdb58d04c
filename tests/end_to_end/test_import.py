"""What `import megapipe` and its names cost: torch, and little else. What the command costs: not even torch."""

import subprocess
import sys
from pathlib import Path

from tools.measured import as_measured

from megapipe.analysis import Timeline
from megapipe.plan import make_plan

SCRIPT = """
import sys
import torch
import torch.distributed
before = set(sys.modules)
import megapipe
for name in megapipe.__all__:
    getattr(megapipe, name)
print(*sorted(set(sys.modules) - before))
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


def test_nothing_expensive_is_imported() -> None:
    modules = subprocess.run([sys.executable, "-c", SCRIPT], check=True, capture_output=True, text=True).stdout.split()
    assert "megapipe.runtime.step" in modules
    assert [name for name in modules if name.startswith(EXPENSIVE)] == []


def test_the_command_starts_without_torch(tmp_path: Path) -> None:
    """It took two seconds to draw a plan, nearly all of them to import torch."""
    Timeline("zbv", [as_measured(make_plan("zbv", 2, 4).simulate())]).save(tmp_path / "timeline.json")
    command = [sys.executable, "-c", COMMANDS, "bin/megapipe"]
    shown = subprocess.run(command, check=True, capture_output=True, text=True, cwd=tmp_path).stdout.splitlines()
    assert "megapipe.schedules" in shown[-1].split()
    assert [name for name in shown[-1].split() if name.startswith("torch")] == []


def test_a_program_called_megapipe_has_all_names() -> None:
    """`import megapipe` took it for the command, which does without torch, and gave it no name."""
    names = "import sys; sys.argv = ['bin/megapipe']; from megapipe import *; print(PipelineStage)"
    done = subprocess.run([sys.executable, "-c", names], check=True, capture_output=True, text=True)
    assert "PipelineStage" in done.stdout


def test_the_module_starts_without_torch(tmp_path: Path) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "megapipe", "--version"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.startswith("megapipe ")
    assert "megapipe.analysis.cli" in done.stderr
    assert "torch" not in done.stderr

"""What `import megapipe` costs: torch, and next to nothing else."""

import subprocess
import sys

SCRIPT = """
import sys
import torch
import torch.distributed
before = set(sys.modules)
import megapipe
print(*sorted(set(sys.modules) - before))
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

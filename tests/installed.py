"""An installed wheel is whole: README's script trains with it.

`make wheel` runs this where nothing else is installed.
"""

import importlib.metadata
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import megapipe

ROOT = Path(__file__).parents[1]


def run(*command: str) -> str:
    """What the command prints, from a folder in which no source of megapipe lies."""
    with tempfile.TemporaryDirectory() as folder:
        return subprocess.run(command, cwd=folder, check=True, stdout=subprocess.PIPE, text=True, timeout=300).stdout


def main() -> None:
    package = Path(megapipe.__file__).parent
    assert package != ROOT / "megapipe", f"{package} is the source, not an installation"
    assert (package / "py.typed").exists()
    assert importlib.metadata.version("megapipe") == megapipe.__version__
    command = str(Path(sys.executable).parent / "megapipe")
    assert "bubble" in run(command, "show", "zbv", "--pp", "4", "--microbatches", "8")

    blocks = re.findall(r"```python\n(.+?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    (script,) = (block for block in blocks if "init_process_group" in block)
    with tempfile.TemporaryDirectory() as folder:
        train = Path(folder, "train.py")
        train.write_text(script)
        printed = run(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4", str(train))
    losses = [float(line.split()[-1]) for line in printed.splitlines() if line.startswith("step")]
    assert losses[-1] < losses[0], printed
    print(f"megapipe {megapipe.__version__} in {package}: loss {losses[0]:.3f} -> {losses[-1]:.3f}")


if __name__ == "__main__":
    main()

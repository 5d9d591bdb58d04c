"""Tells whether torch can use a GPU here. Ends with 0 where it can, 2 where there is none, and otherwise 1 and why."""

from __future__ import annotations

import glob
import sys

import torch


def main() -> None:
    if torch.cuda.is_available():
        return
    if not glob.glob("/dev/nvidia[0-9]*"):
        sys.exit(2)
    made_for = f"made for CUDA {torch.version.cuda}" if torch.version.cuda else "made without CUDA"
    sys.exit(
        f"There is a GPU here, but torch {torch.__version__}, {made_for}, cannot use it. nvidia-smi shows up to which "
        "version of CUDA the driver goes. Install a torch made for that one, as pytorch.org says, into a Python of "
        "your own, and take that: SYSTEM_PYTHON=python3."
    )


if __name__ == "__main__":
    main()

"""Text, byte by byte. By default that of the Python standard library: real text, and already there."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

MAX_BYTES = 64 * 2**20


def read_text(path: str | None) -> Tensor:
    """The bytes of a file, or of all files of a folder with the ending .py, .txt or .md, one after the other."""
    root = Path(path) if path is not None else Path(sysconfig.get_paths()["stdlib"])
    if not root.exists():
        raise FileNotFoundError(f"--data-path {path}: there is no such file or folder.")
    files = [root] if root.is_file() else _text_files(root)
    text = bytearray()
    for file in files:
        if len(text) < MAX_BYTES:
            text += b"\n" * bool(text) + file.read_bytes()
    return torch.frombuffer(text[:MAX_BYTES], dtype=torch.uint8)


def _text_files(root: Path) -> list[Path]:
    skipped = {"site-packages", "__pycache__", "test", "tests", "idlelib"}
    files = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(set(subfolders) - skipped)
        files += [Path(folder, name) for name in sorted(names) if name.endswith((".py", ".txt", ".md"))]
    return files


class TextSamples:
    """Random pieces of a text. The last tenth is kept for validation.

    Which pieces a microbatch holds depends on the seed and on its number only, so every rank draws the same without
    asking, and a run may stop and go on anywhere.
    """

    def __init__(self, text: Tensor, seq_length: int, micro_batch_size: int, seed: int, device: torch.device) -> None:
        cut = len(text) * 9 // 10
        self._parts = {"train": text[:cut], "valid": text[cut:]}
        if min(len(part) for part in self._parts.values()) <= seq_length + 1:
            raise ValueError(
                f"a text of {len(text)} bytes is too short for --seq-length {seq_length}: give at least "
                f"{10 * (seq_length + 2)} bytes."
            )
        self._seq_length, self._micro_batch_size, self._seed, self._device = seq_length, micro_batch_size, seed, device

    def batches(self, split: str, first: int, num_microbatches: int, stride: int = 1) -> Iterator[dict[str, Tensor]]:
        """Microbatches from sample number `first` on, each `stride` microbatches after the one before."""
        size = self._micro_batch_size
        for start in range(first, first + num_microbatches * stride * size, stride * size):
            samples = [self._sample(split, number) for number in range(start, start + size)]
            window = torch.stack(samples, dim=1).long()  # [sequence + 1, batch]
            if self._device.type != "cpu":  # from pinned memory, so that the host need not wait for the device
                window = window.pin_memory().to(self._device, non_blocking=True)
            yield {"tokens": window[:-1], "labels": window[1:]}

    def _sample(self, split: str, number: int) -> Tensor:
        text = self._parts[split]
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + number * 2 + (split == "valid"))
        start = int(torch.randint(len(text) - self._seq_length - 1, (), generator=generator))
        return text[start : start + self._seq_length + 1]

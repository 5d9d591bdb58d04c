"""The script of docs/tutorials/lightning.md, against a plain loop."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning")

from pydoc_data.topics import topics

import safetensors.torch
import torch
import transformers
from torch.utils.data import DistributedSampler

import megapipe

ROOT = Path(__file__).parents[2]
SCRIPT = "\n".join(re.findall(r"```py\n(.*?)```", (ROOT / "docs/tutorials/lightning.md").read_text(), re.DOTALL))
TELLING = 'self.log("loss", loss, prog_bar=True)'


def run(folder: Path, num_ranks: int = 2, **changes: str) -> list[float]:
    """The losses that the first rank saw."""
    folder.mkdir(exist_ok=True)
    script = SCRIPT.replace("devices=2", f"devices={num_ranks}")
    for before, after in {TELLING: f"{TELLING}; print('loss of a step', loss.item(), flush=True)", **changes}.items():
        assert script.count(before) == 1, before
        script = script.replace(before, after)
    (folder / "train.py").write_text(script)
    own = {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]), "OMP_NUM_THREADS": "1"}
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    launcher += ["--local-ranks-filter", "0"]
    command = [sys.executable, *launcher, "train.py"]
    done = subprocess.run(command, cwd=folder, env={**os.environ, **own}, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    return [float(one) for one in re.findall(r"loss of a step ([\d.e-]+)", done.stdout)]


def losses_of_plain_loop(num_replicas: int) -> list[float]:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=256, num_hidden_layers=8, **sizes))
    text = "\n".join(topics.values()).encode()
    rows = torch.tensor([list(text[at : at + 32]) for at in range(0, 32 * 96, 32)])[16:]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    # Lightning's samplers shuffle what is trained on.
    samplers = [DistributedSampler(range(len(rows)), num_replicas, replica, seed=0) for replica in range(num_replicas)]
    numbers = [list(sampler) for sampler in samplers]
    for start in range(0, len(numbers[0]), 8):
        batch = torch.cat([rows[own[start : start + 8]] for own in numbers])
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        megapipe.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def weights_in(folder: Path) -> dict[str, Any]:
    return dict(safetensors.torch.load_file(folder / "model.safetensors"))


def test_a_run_and_one_that_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    """The second one under another schedule; the best checkpoint alone is kept, with its folders."""
    two = {"max_epochs=1": "max_epochs=2"}
    through = run(tmp_path / "through", **two)
    assert through[:10] == pytest.approx(losses_of_plain_loop(1), abs=2e-6)
    kept = {path.name for path in (tmp_path / "through" / "checkpoints").iterdir()}
    assert kept == {"step=20.ckpt", "step=20.ckpt.model", "step=20.ckpt.optimizer"}
    run(tmp_path / "begun")
    begun = tmp_path / "begun" / "checkpoints" / "step=10.ckpt"
    later = run(tmp_path / "later", **two, **{"ckpt_path=None": f"ckpt_path={str(begun)!r}", '"zbv"': '"1f1b"'})
    assert later == pytest.approx(through[10:], abs=1e-6)
    one, other = weights_in(tmp_path / "through" / "trained"), weights_in(tmp_path / "later" / "trained")
    assert all(torch.allclose(one[name], other[name], rtol=0, atol=1e-6) for name in one)


def test_replicas(tmp_path: Path) -> None:
    assert run(tmp_path, num_ranks=4) == pytest.approx(losses_of_plain_loop(2), abs=2e-6)

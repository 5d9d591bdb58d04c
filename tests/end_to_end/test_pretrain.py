"""The example: the losses it prints do not depend on how the model is cut."""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tools.pretraining import EXAMPLES, SMALL, pretrain
from tools.pretraining import text as text  # the fixture
from tools.ranks import EXCUSES, RankPool, on_ranks

import megapipe
from megapipe import parallel_state
from megapipe.analysis import load_timeline
from megapipe.checkpoint import read_position
from megapipe.plan import make_plan

MOE = "--num-experts 4 --num-layers 2"
MANY_EXPERTS = "--num-experts 8 --global-batch-size 16"
SLICED = ("seq1f1b", "seq_interleaved_1f1b", "seq_zb1p")  # whose models take slices: not those with experts
TRAINING = [name for name in megapipe.schedule_names() if name not in ("inference", "no_pipelining", *SLICED)]


@pytest.fixture(scope="module")
def in_one_process(ranks: RankPool, text: str) -> list[float]:
    """The losses of the model on one rank."""
    (losses,) = ranks.run(1, pretrain, 1, text)
    assert losses[-1] < losses[0] - 0.1
    return losses


@pytest.mark.parametrize(
    ("num_ranks", "pp_size", "options", "precision"),
    [
        (2, 2, "--schedule interleaved_1f1b --warm-up", 0),
        (3, 3, "--offload 1", 0),
        (2, 2, "--sequence-slices 2", 1e-6),  # attention rounds otherwise for slices
        (2, 1, "", 1e-5),  # replicas average their gradients: another order of a sum
        (2, 1, "--data-parallel-shard-size 2 --schedule zbv", 1e-5),
        (2, 2, "--bf16", 1e-2),  # the default on GPUs
    ],
)
def test_same_losses(
    ranks: RankPool,
    text: str,
    in_one_process: list[float],
    num_ranks: int,
    pp_size: int,
    options: str,
    precision: float,
) -> None:
    for losses in ranks.run(num_ranks, pretrain, pp_size, f"{text} {options}"):
        assert losses == pytest.approx(in_one_process, rel=precision, abs=0)
        assert (losses == in_one_process) or precision > 0
        assert "--bf16" not in options or losses != in_one_process


def test_same_losses_with_tied_embeddings_and_steps_validated_afterwards(ranks: RankPool, text: str) -> None:
    tied = f"{text} --tie-embeddings"
    (expected,) = ranks.run(1, pretrain, 1, tied)
    for losses in ranks.run(2, pretrain, 2, f"{tied} --post-validation --schedule zbv"):
        assert losses == expected


def test_experts_shared_out(ranks: RankPool, text: str, tmp_path: Path) -> None:
    """The same up to the order of sums, wherever the experts are; also where another pipeline goes on with them."""
    flat = f"{text} {MOE} --min-lr 4e-3"
    (expected,) = ranks.run(1, pretrain, 1, f"{flat} --train-iters 6")
    assert expected[-1] < expected[0] - 0.1
    shared = f"{flat} --expert-model-parallel-size 2"
    for losses in ranks.run(4, pretrain, 2, f"{shared} --schedule zb1p --train-iters 4 --save {tmp_path}"):
        assert losses == pytest.approx(expected[:4], rel=1e-4)
    (losses,) = ranks.run(1, pretrain, 1, f"{flat} --train-iters 6 --load {tmp_path}")
    assert losses == pytest.approx(expected[4:], rel=1e-4)


def test_captured_experts(ranks: RankPool, text: str, tmp_path: Path) -> None:
    """Stages whose sizes depend on values, as eager ones to the last bit: balanced by biases, which change between
    steps, and by an auxiliary loss. A checkpoint of theirs goes on eagerly."""
    options = f"{text} {MOE} --min-lr 4e-3 --moe-bias-update-rate 1e-2 --dropout 0.0 --num-layers 1"
    (expected,) = ranks.run(1, pretrain, 1, f"{options} --train-iters 4")
    (captured,) = ranks.run(1, pretrain, 1, f"{options} --save {tmp_path} --train-iters 2 --stage-backend graph")
    (resumed,) = ranks.run(1, pretrain, 1, f"{options} --load {tmp_path} --train-iters 4")
    assert captured + resumed == expected


@pytest.mark.soak
@pytest.mark.parametrize("schedule", ["1f1b", "zbv", "dualpipev", "combined_1f1b", "combined_zb1p"])
def test_captured_experts_under_schedules(ranks: RankPool, text: str, schedule: str) -> None:
    options = f"{text} {MANY_EXPERTS} --expert-model-parallel-size 2 --schedule {schedule}"
    if schedule.startswith("combined"):
        options += " --num-virtual-stages-per-pipeline-rank 2"
    expected = ranks.run(4, pretrain, 2, options)
    assert ranks.run(4, pretrain, 2, f"{options} --stage-backend graph") == expected


@pytest.mark.soak
@pytest.mark.parametrize("ep_size", [2, 4])
@pytest.mark.parametrize("schedule", TRAINING)
def test_experts_under_every_schedule(
    eight_ranks: RankPool, text: str, tmp_path: Path, schedule: str, ep_size: int
) -> None:
    """Eight experts and a shared one, no token dropped, balanced by biases, from data to a checkpoint and on."""
    options = f"{text} {MANY_EXPERTS} --min-lr 4e-3 --moe-aux-loss-coeff 0 --moe-bias-update-rate 1e-3"
    shared = f"{options} --expert-model-parallel-size {ep_size}"
    expected, *_ = eight_ranks.run(ep_size, pretrain, 1, f"{shared} --train-iters 4")
    cut = f"{shared} --schedule {schedule}"
    found, *_ = eight_ranks.run(2 * ep_size, pretrain, 2, f"{cut} --train-iters 2 --save {tmp_path}")
    assert found == pytest.approx(expected[:2], rel=1e-4)
    found, *_ = eight_ranks.run(2 * ep_size, pretrain, 2, f"{cut} --train-iters 4 --load {tmp_path}")
    assert found == pytest.approx(expected[2:], rel=1e-4)


def test_batch_sizes_that_do_not_fit(ranks: RankPool, text: str) -> None:
    def message(result: Any) -> str:
        assert isinstance(result, ValueError)
        return str(result)

    for result in ranks.run(2, pretrain, 2, f"{text} --global-batch-size 7", errors=True):
        assert "--global-batch-size 7 is no multiple of --micro-batch-size 2 times 1 replicas" in message(result)
    for result in ranks.run(2, pretrain, 2, f"{text} --data-parallel-shard-size 2", errors=True):
        assert "--data-parallel-shard-size 2 takes a multiple of 2 x 2 ranks, of which there are 2" in message(result)


def run_example(rank: int, arguments: str) -> None:
    """As torchrun does, but in the worker's process group."""
    sys.path.insert(0, str(EXAMPLES))
    import pretrain_gpt
    import running

    with (
        mock.patch.object(running, "setup", return_value=torch.device("cpu")),
        mock.patch.object(dist, "destroy_process_group"),
        mock.patch.dict(os.environ, RANK=str(rank)),
    ):
        running.run(pretrain_gpt.train, pretrain_gpt.parse_args([*SMALL.split(), *arguments.split()]))


def printed(rank: int, arguments: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as output:
        run_example(rank, arguments)
    return output.getvalue()


def interrupted(rank: int, arguments: str) -> Any:
    """The exit code where all ranks get ^C when the first line of an iteration is printed, as torchrun passes it on."""
    processes = [0] * dist.get_world_size()
    dist.all_gather_object(processes, os.getpid())
    processes.sort(key=os.getpid().__eq__)  # the own one last, since the signal ends this loop

    class Output(io.StringIO):
        def write(self, line: str) -> int:
            if line.startswith("iteration     1"):
                for process in processes:
                    os.kill(process, signal.SIGINT)
            return len(line)

    EXCUSES.append("a failure")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's job in the background ignores it
    with contextlib.redirect_stdout(Output()), pytest.raises(SystemExit) as exiting:
        run_example(rank, arguments)
    return exiting.value.code


def test_an_interrupt_ends_every_rank(ranks: RankPool, text: str) -> None:
    """Each rank printed a traceback of sixty lines at ^C."""
    options = f"{text} --pipeline-model-parallel-size 2 --train-iters 1000000"
    assert ranks.run(2, interrupted, options) == ["Interrupted.", 130]


def test_what_it_prints_and_writes(ranks: RankPool, text: str, tmp_path: Path) -> None:
    timeline_path = tmp_path / "timeline.json"
    options = f"--pipeline-model-parallel-size 2 --train-iters 2 --save {tmp_path} --record-timeline {timeline_path}"
    output, nothing = ranks.run(2, printed, f"{text} {options}")
    assert not nothing
    lines = output.splitlines()
    assert lines[0].startswith("4 layers of 16 on 2 ranks: 2 stages x 1 replicas, schedule 1f1b, 4 microbatches")
    assert "validation loss" in output
    assert re.fullmatch(r"loss .* tokens/s, at most \d+\.\d\d GiB a rank", lines[-3])
    part = r"-?[\d.]+% "
    parts = [
        f"{part}{name}"
        for name in ("the schedule's own", "uneven stages", "jitter", "waiting for communication", "host")
    ]
    assert re.fullmatch(rf"bubble {part}= " + r" \+ ".join(parts), lines[-1])
    assert lines[-2].startswith("saved")
    timeline = load_timeline(timeline_path)
    assert timeline is not None
    assert timeline.plan.actions == make_plan("1f1b", 2, 4).actions
    assert len(timeline.steps) == 2
    assert read_position(tmp_path).step == 2


@on_ranks(1)
def test_options_of_the_example(rank: int) -> None:
    """Sizes and intervals of 0 were divisions by zero, --eval-iters 0 only after a hundred steps. Under --schedule
    inference nothing was trained, and what had not been trained was saved."""
    sys.path.insert(0, str(EXAMPLES))
    import pretrain_gpt
    import running

    parallel_state.initialize_model_parallel()
    args = pretrain_gpt.parse_args(["--schedule", "inference", "--hidden-size", "16", "--num-layers", "1"])
    with pytest.raises(ValueError, match="--schedule inference runs forwards only"):
        pretrain_gpt.Trainer(args, torch.device("cpu"))
    args = pretrain_gpt.parse_args(["--num-attention-heads", "3", "--hidden-size", "16", "--num-layers", "1"])
    with pytest.raises(ValueError, match="hidden_size=16 cannot be shared out evenly among 3 attention heads"):
        pretrain_gpt.Trainer(args, torch.device("cpu"))
    for option in ("eval-iters", "log-interval", "save-interval", "micro-batch-size"):
        with pytest.raises(SystemExit):
            pretrain_gpt.parse_args([f"--{option}", "0"])
    for options, cpu, cuda in (([], False, True), (["--bf16"], True, True), (["--no-bf16"], False, False)):
        args = pretrain_gpt.parse_args(options)
        assert [pretrain_gpt.uses_bf16(args, torch.device(name)) for name in ("cpu", "cuda")] == [cpu, cuda]
    for option in ("--num-experts=4", "--stage-backend=graph"):
        with pytest.raises(SystemExit):
            pretrain_gpt.parse_args(["--sequence-slices", "2", option])
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="--device cuda needs a GPU"):
            running.setup("cuda")

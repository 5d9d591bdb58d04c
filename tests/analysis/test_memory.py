"""Bytes known before a run, beside those of the run."""

import functools
from typing import Any

import pytest
import torch
from tools.ranks import RankPool

import megapipe
from megapipe.analysis import TimelineRecorder, bytes_of_stages
from megapipe.analysis.command_options import Memory, parse_bytes
from megapipe.analysis.compare_command import front_of
from megapipe.analysis.text import bytes_in_words
from megapipe.plan import Plan, Settings, StageBytes, StageInfo, make_plan
from megapipe.timing import LiveStorages
from megapipe.weight_grad import convert

SIZE, ROWS, M, PP = 64, 256, 4, 3


class Layers(torch.nn.Module):
    def __init__(self, info: StageInfo, end: str) -> None:
        super().__init__()
        self.end = end
        self.layers = convert(
            torch.nn.Sequential(torch.nn.LayerNorm(SIZE), torch.nn.Linear(SIZE, SIZE), torch.nn.GELU())
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return getattr(self.layers(x), self.end)()


def make_stage(info: StageInfo, recompute: str | None = None, end: str = "contiguous") -> torch.nn.Module:
    return megapipe.PipelineStage(Layers(info, end), info, megapipe.PipelineConfig(recompute=recompute))


def forward_step(batches: Any, chunk: Any) -> Any:
    x = next(batches)
    return chunk(x), lambda output: (loss := (output.square() - x).mean(), {"loss": loss.detach()})


def test_a_stage_alone() -> None:
    """Without memory the same is found as with it: per layer three inputs are saved: its own, the product's and GELU's.
    The norm's statistics come to 1 / 32 of these."""
    microbatch = torch.randn(ROWS, SIZE)
    found, real = (bytes_of_stages(make_stage, 3, forward_step, microbatch, fake=fake) for fake in (True, False))
    assert found == real
    unit = ROWS * SIZE * 4
    weights = (2 * SIZE + SIZE * SIZE + SIZE) * 4
    assert isinstance(found.saved, list)
    assert found.saved[1] == pytest.approx(3 * unit + 2 * ROWS * 4)
    assert found.message == [unit, unit, 0]
    assert found.model == [4 * weights] * 3


def test_short_messages_once_more() -> None:
    """What stands for a missing gradient in messages of less than 64 numbers was kept as a fake tensor: the next call,
    and steps of the same process, mixed it with others."""

    def make_small(info: StageInfo) -> torch.nn.Module:
        return megapipe.PipelineStage(torch.nn.Linear(2, 2), info)

    with pytest.raises(ValueError, match="num_stages must be a whole number from 1 on, got 0"):
        bytes_of_stages(make_small, 0, forward_step, torch.randn(4, 2))
    for fake in (True, True, False):
        bytes_of_stages(make_small, 2, forward_step, torch.randn(4, 2), fake=fake)


def test_live_storages() -> None:
    """A view makes no storage, and what was there before does not count."""
    before = torch.zeros(100)
    with LiveStorages() as storages:
        before.add_(1)
        view = before[10:]
        made = view + 1
        assert storages.held == made.nbytes == 360
        other = made * 2
        del other
        assert (storages.peak, storages.held) == (720, 360)
        storages.restart()
        made.set_(before.untyped_storage()[:8])
        assert storages.held <= 8 + 360
    assert storages.peak >= 360


def measure(rank: int, name: str, recompute: str | None, end: str = "contiguous") -> list[int]:
    megapipe.parallel_state.initialize_model_parallel(PP)
    chunks = [make_stage(info, recompute, end) for info in megapipe.stages_for_rank(name)]
    chunks[0].config.record_timeline = recorder = TimelineRecorder(num_steps=1, memory=True)
    train = megapipe.get_forward_backward_func(name)
    data = torch.randn(M, ROWS, SIZE)
    for _ in range(2):  # the first one makes the gradients
        train(
            forward_step_func=forward_step, data_iterator=[iter(data) for _ in chunks], model=chunks, num_microbatches=M
        )
    return recorder.gather().peak_bytes


@pytest.mark.parametrize(("name", "recompute"), [("zb1p", "all"), ("zbv", None)])
def test_a_run_takes_the_bytes_of_its_plan(ranks: RankPool, name: str, recompute: str | None) -> None:
    """When a send is over, and its message is freed, depends on the moment: so some messages lie between the two."""
    settings = Settings(recompute=recompute is not None)
    plan = make_plan(name, PP, M, settings=settings)
    make = functools.partial(make_stage, recompute=recompute)
    stages = bytes_of_stages(make, PP * plan.num_chunks, forward_step, torch.randn(ROWS, SIZE))
    predicted = plan.simulate(memory=stages).memory or ()
    measured = ranks.run(PP, measure, name, recompute)[0]
    for rank, peak in zip(predicted, measured):
        assert 0 <= rank.peak - rank.model - peak + 0.02 * peak <= rank.parts["messages"] + 0.02 * peak


def test_a_rank_without_r_holds_its_output_once(ranks: RankPool) -> None:
    """Where the chunk's end saves its output, and so does the loss, an R makes a second one. The last rank of 1F1B has
    no R, and was counted as if it had one: 6 to 11 % too many."""
    plan = make_plan("1f1b", PP, M, settings=Settings(recompute=True))
    make = functools.partial(make_stage, recompute="all", end="tanh")
    last = (plan.simulate(memory=bytes_of_stages(make, PP, forward_step, torch.randn(ROWS, SIZE))).memory or ())[-1]
    assert last.peak - last.model == pytest.approx(ranks.run(PP, measure, "1f1b", "all", "tanh")[0][-1], rel=0.05)


# Beside each other


def test_sizes_in_words() -> None:
    for text, number in (("80GB", 80e9), ("1.5 GiB", 1.5 * 2**30), ("4096", 4096), ("64k", 64e3), ("2tb", 2e12)):
        assert parse_bytes(text) == number
    for text in ("80 apples", "GB", "", "1.2.3GB"):
        with pytest.raises(ValueError, match="is no size in bytes"):
            parse_bytes(text)
    assert [bytes_in_words(number) for number in (0, 999, 1e3, 35.34e9, 999.9e9)] == [
        "0 B",
        "999 B",
        "1 kB",
        "35.3 GB",
        "1 TB",
    ]


def test_what_beats_a_schedule() -> None:
    rows = [
        (plan, plan.simulate(1, 1, 0.9, p2p=0.05)) for plan in map(plan_of, ("zbv", "1f1b", "zb1p", "gpipe", "v_half"))
    ]
    names = [winner and winner.name for winner in front_of(rows, Memory())]
    assert names == [None, "zbv", "zbv", "1f1b" if rows[1][1].makespan <= rows[3][1].makespan else "zbv", None]
    same = [rows[0], rows[0]]
    assert front_of(same, Memory()) == [None, None]


def plan_of(name: str) -> Plan:
    return make_plan(name, 8, 16)


def test_a_limit_in_bytes() -> None:
    plan = plan_of("1f1b")
    simulation = plan.simulate(memory=StageBytes(saved=1e9, model=2e9))
    assert Memory(True, [10e9]).fits(simulation)
    assert not Memory(True, [9.9e9]).fits(simulation)
    assert Memory(False, [8]).fits(simulation)

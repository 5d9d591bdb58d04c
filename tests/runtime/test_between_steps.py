"""Changes between steps: what was found out in one of them must not outlive what it depends on."""

import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from tools.against import mean_square, normal, step, unlabelled, use_groups
from tools.models import build, run
from tools.ranks import on_ranks
from torch import Tensor, nn

import megapipe
from megapipe import PipelineConfig, PipelineError, PipelineStage, TiedWeights, stages_for_rank
from megapipe.runtime.pipeline import Pipeline
from megapipe.runtime.session import Session

M = 3


def data(num_microbatches: int = M) -> list[tuple[Tensor]]:
    return [(normal(2, 4, seed=number),) for number in range(num_microbatches)]


def train(schedule: str, chunks: Any, num_microbatches: int = M) -> list[Any]:
    return step(schedule, chunks, unlabelled(x for (x,) in data(num_microbatches)), mean_square)


def layer(index: int) -> nn.Module:
    torch.manual_seed(index)
    return nn.Linear(4, 4)


# Tied weights


@on_ranks(1)
def test_a_refused_call_leaves_the_gradients_of_tied_weights(rank: int) -> None:
    """The gradients of all copies but the first were zeroed before anything of the call was looked at. A step of the
    optimizer after a call that failed made the copies grow apart. tests/cases has calls that are refused."""
    chunks = build("zbv", 1, 4)
    TiedWeights(chunks, ["embedding.weight", "head.weight"]).sum_in_steps(chunks)
    run("zbv", chunks, M)
    parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
    before = [parameter.grad.clone() for parameter in parameters]
    with pytest.raises(ValueError, match="data_iterator ended at microbatch 0"):
        run("zbv", chunks, M, data_iterator=iter([]))
    assert all(torch.equal(parameter.grad, grad) for parameter, grad in zip(parameters, before))


# Tokens


@on_ranks(2)
def test_tokens_of_gradients_that_were_dropped(rank: int) -> None:
    """Whether earlier calls still count was guessed from gradients that are None: wrong for gradients that are zeroed,
    and on a last stage that trains nothing. A step is refused where gradients are gone and nothing has said so."""
    use_groups()
    (info,) = stages_for_rank("1f1b")
    chunk = PipelineStage(layer(info.index).requires_grad_(rank == 0), info)
    chunk.config.calculate_per_token_loss = True
    found: list[float] = []

    def call(*, is_last: bool) -> None:
        chunk.config.finalize_model_grads_func = (lambda _, num: found.append(num.item())) if is_last else None
        megapipe.get_forward_backward_func("1f1b")(
            forward_step_func=lambda batches, chunk: (
                chunk(*next(batches)),
                lambda output: (output.square().sum(), output.numel(), None),
            ),
            data_iterator=iter(data()),
            model=chunk,
            num_microbatches=M,
        )

    for sets_none in (True, False):
        call(is_last=False)
        chunk.zero_grad(sets_none)
        call(is_last=False)  # nobody asks for tokens
        megapipe.discard_gradients(chunk)
        call(is_last=True)
    assert found == [24.0 if rank == 1 else 0.0] * 2
    call(is_last=False)
    chunk.zero_grad(set_to_none=False)
    with pytest.raises((ValueError, PipelineError), match="were cleared without being finalized"):
        call(is_last=True)


# Placements and messages


def train_by_plans(rank: int, folder: Path, plans: list[str]) -> None:
    """A step of each, with the stages that this rank has had before."""
    use_groups()
    kept: dict[int, PipelineStage] = {}
    for number, text in enumerate(plans):
        (folder / str(rank)).mkdir(exist_ok=True)
        (path := folder / str(rank) / f"{number}.txt").write_text(text)
        infos = stages_for_rank(str(path))
        config = PipelineConfig(broadcast_reports=True)
        chunks = [kept.setdefault(info.index, PipelineStage(layer(info.index), info, config)) for info in infos]
        (report,) = train(str(path), chunks, 1)
        expected = nn.Sequential(*map(layer, range(infos[0].num_stages)))(*data(1)[0])
        assert torch.equal(torch.as_tensor(report), mean_square(expected))


@on_ranks(2)
def test_two_placements_that_are_neither_a_loop_nor_a_v(rank: int, tmp_path: Path) -> None:
    """Channels were kept by the name of the placement, and all such placements of plans have one name: the second plan
    got the channels of the first, and a KeyError."""
    train_by_plans(rank, tmp_path, ["1F0 2F0 2B0 1B0\n0F0 3F0 3B0 0B0\n", "1F0 3F0 3B0 1B0\n0F0 2F0 2B0 0B0\n"])


@on_ranks(3)
def test_a_new_peer_has_not_seen_the_messages(rank: int, tmp_path: Path) -> None:
    """Under the second plan stage 0 sends to another rank, where stage 1 is new. What it had sent to the first one was
    known at one end of the boundary only, so all later steps were refused."""
    orders = [(0, 1, 2), (0, 2, 1)]
    train_by_plans(rank, tmp_path, ["".join(f"{stage}F0 {stage}B0\n" for stage in order) for order in orders])


# Steps that are called alike


@on_ranks(1)
def test_two_threads(rank: int) -> None:
    """Pipelines of one rank shared what runs their steps: two threads at a time got each other's units."""
    use_groups()
    (info,) = stages_for_rank("1f1b")
    chunk = PipelineStage(layer(0), info)
    begun = threading.Barrier(2)
    wrong: list[Any] = []

    def evaluate(size: int) -> None:
        def forward_step(batches: Any, chunk: nn.Module) -> tuple[Tensor, Any]:
            begun.wait(20)  # each forward of one beside one of the other
            return chunk(next(batches)), lambda output: (output.sum(), output)

        try:
            outputs = megapipe.get_forward_backward_func("1f1b")(
                forward_step_func=forward_step,
                data_iterator=iter([torch.full((size, 4), float(n)) for n in range(M)]),
                model=chunk,
                num_microbatches=M,
                forward_only=True,
            )
            wrong.extend(output.shape for output in outputs if len(output) != size)
        except Exception as error:
            begun.abort()
            wrong.append(error)

    threads = [threading.Thread(target=evaluate, args=(size,)) for size in (2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@on_ranks(2)
def test_any_number_of_microbatches(rank: int) -> None:
    """A runner was for one number of microbatches, and eight were kept: where the number changed from step to step, as
    in post-training, each step was checked and built anew."""
    use_groups()
    chunks = [PipelineStage(layer(info.index), info) for info in stages_for_rank("zbv")]
    numbers = [3, 1, 2]
    for number in [3, *numbers]:  # what is found in the first step makes others of what it began with
        train("zbv", chunks, number)
    with mock.patch.object(Pipeline, "__init__", side_effect=AssertionError("built anew")):
        for number in reversed(numbers):
            train("zbv", chunks, number)
    session = Session.of(megapipe.parallel_state.get_pipeline_model_parallel_group())
    assert len(session.runners) == 1

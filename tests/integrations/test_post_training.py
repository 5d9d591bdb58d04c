"""What post-training is made of, against whole models in one process: examples/grpo.py and dpo_hf.py, a teacher as
docs/howto/distillation.md has it, and log-probabilities of tokens. Microbatches differ in length, and in number from
step to step."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tools.ranks import on_ranks

pytest.importorskip("transformers")

import torch
import torch.nn.functional as F
from tools import hf_models, megatron_models
from torch import Tensor

import megapipe
from megapipe.integrations.megatron import build_model_chunks, global_name
from megapipe.integrations.transformers import token_log_probs
from megapipe.training import log_probs_of

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import dpo_hf
import grpo

GROUP = 4
OPTIONS = {"lr": 1e-2, "clip_grad": 1e9, "lora_rank": None}


def logits_of(model: Any, inputs: dict[str, Any]) -> Tensor:
    output = model(**inputs)
    return getattr(output, "logits", output)  # type: ignore[no-any-return]


def log_probs(logits: Tensor, inputs: dict[str, Any]) -> Tensor:
    return log_probs_of(logits[:, :-1], inputs["input_ids"][:, 1:])


def known_log_probs(model: Any, inputs: dict[str, Any]) -> Tensor:
    with torch.no_grad():
        return log_probs(logits_of(model, inputs), inputs)


def drawn_answers(lengths: tuple[int, ...], seed: int) -> tuple[list[tuple[Tensor, int]], Tensor]:
    """Answers of these lengths behind prompts of 3 tokens, and their rewards."""
    generator = torch.Generator().manual_seed(seed)
    answers = [
        (torch.randint(3, megatron_models.VOCABULARY, (3 + length,), generator=generator), 3)
        for length in lengths
        for _ in range(GROUP)
    ]
    return answers, torch.randn(len(answers), generator=generator)


def settings(**changes: Any) -> Namespace:
    return Namespace(group_size=GROUP, updates=2, max_tokens=40, clip=0.2, beta=0.1, **OPTIONS, **changes)


def compare_updates(trainer: Any, model: Any, reference: Any, **options: Any) -> None:
    """Let both learn from some answers in two steps, the model in one process."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step, lengths in enumerate([(2, 5, 9), (20,)]):  # in the second step the policy is not the reference any more
        answers, rewards = drawn_answers(lengths, step)
        groups = rewards.view(-1, GROUP)
        advantages = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
        microbatches = grpo.pack_answers(answers, advantages.flatten(), 40)
        assert trainer.learn(answers, rewards) == len(microbatches) == (3, 4)[step]
        number = len(microbatches)
        share = number / sum(int(batch["counts"][:, 1:].sum()) for batch in microbatches)
        inputs = [{**trainer.inputs(batch), **options} for batch in microbatches]
        for batch, given in zip(microbatches, inputs):
            batch.update(policy=known_log_probs(model, given), reference=known_log_probs(reference, given))
        for _ in range(2):
            for batch, given in zip(microbatches, inputs):
                loss, _ = grpo.loss_func(batch, logits_of(model, given), 0.2, 0.1, share)
                (loss / number).backward()
            optimizer.step()
            optimizer.zero_grad()


def two_models(folder: Path) -> list[Any]:
    """A model and its reference, which are alike, and saved."""
    hf_models.save_on_first(hf_models.make_model("qwen2"), folder)
    hf_models.initialise(2)
    return [hf_models.make_model("qwen2").eval() for _ in range(2)]


@on_ranks(2)
def test_updates_of_grpo(rank: int, tmp_path: Path) -> None:
    model, reference = two_models(tmp_path / "model")
    trainer = grpo.Trainer(settings(schedule="zbv", model=tmp_path / "model"))
    compare_updates(trainer, model, reference, use_cache=False)
    hf_models.assert_saved(trainer.policy, model, tmp_path / "trained")


class OfMegatron(grpo.Trainer):
    """The example's trainer with two methods of its own: what it builds, and masks that tell packed answers apart."""

    def build(self) -> list[Any]:
        options = {"variable_seq_lengths": True, "moe_token_dispatcher_type": "alltoall"}
        provide = megatron_models.provider(megatron_models.megatron(2, 2, **options))
        return [chunk.eval() for chunk in build_model_chunks(provide, self.args.schedule)]

    def inputs(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        answer, order = (batch["position_ids"] == 0).cumsum(1), torch.arange(batch["position_ids"].shape[1])
        is_seen = (answer[:, :, None] == answer[:, None]) & (order[:, None] >= order)
        return {**super().inputs(batch), "attention_mask": ~is_seen[:, None]}


@on_ranks(2)
def test_updates_of_megatrons_chunks(rank: int) -> None:
    pytest.importorskip("megatron")
    make = megatron_models.provider(megatron_models.megatron(1))
    model, reference = make().eval(), make().eval()
    trainer = OfMegatron(settings(schedule="interleaved_1f1b"))
    compare_updates(trainer, model, reference)
    for chunk in trainer.policy:
        for name, parameter in chunk.named_parameters():
            assert torch.equal(parameter, model.get_parameter(global_name(chunk, name))), name


@on_ranks(2)
def test_preferences(rank: int, tmp_path: Path) -> None:
    model, reference = two_models(tmp_path)
    trainer = dpo_hf.Trainer(Namespace(model=tmp_path, schedule="zbv", beta=0.5, **OPTIONS))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(0)

    def answer(length: int) -> tuple[Tensor, Tensor]:
        tokens = torch.randint(3, hf_models.VOCABULARY, (length,), generator=generator)
        return tokens, torch.where(torch.arange(length) < 3, -100, tokens)

    for step in range(2):  # in the second the trained model is not the reference any more
        microbatches = [
            dpo_hf.collate([[answer(length + extra) for extra in (0, step + 1)] for length in lengths])
            for lengths in ((5, 9), (7, 4), (12, 6))
        ]
        losses = []
        for batch in microbatches:
            inputs = {"input_ids": batch["input_ids"], "use_cache": False}
            known = known_log_probs(reference, inputs)
            loss, _ = dpo_hf.loss_func({**batch, "reference": known}, logits_of(model, inputs), 0.5)
            (loss / len(microbatches)).backward()
            losses.append(loss.detach())
        hf_models.assert_same_losses(trainer.compare(microbatches), losses, trainer.policy)
        hf_models.assert_same_gradients(trainer.policy, model)
        trainer.update()
        optimizer.step()
        optimizer.zero_grad()


def distance(own: Tensor, teachers: Tensor) -> Tensor:
    found, wanted = (logits.float().log_softmax(-1) for logits in (own, teachers))
    return F.kl_div(found, wanted, reduction="batchmean", log_target=True)


def output(batches: Iterator[Tensor], chunk: Any) -> Any:
    return chunk(input_ids=next(batches)), None


@on_ranks(2)
def test_a_student_of_a_larger_teacher(rank: int, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"teacher": {"hidden_size": 64, "num_hidden_layers": 5}, "student": {}}
    models = {name: hf_models.make_model("qwen2", **own).eval() for name, own in sizes.items()}
    pipelines = {}
    for name, model in models.items():
        hf_models.save_on_first(model, tmp_path / name)
        pipelines[name] = [chunk.eval() for chunk in hf_models.load_chunks(tmp_path / name, "zbv")]
    student = pipelines["student"]
    for chunk in student:
        megapipe.weight_grad.convert(chunk)
    optimizer = megapipe.PipelinedOptimizer(student, lambda groups: torch.optim.AdamW(groups, lr=1e-2))
    whole = torch.optim.AdamW(models["student"].parameters(), lr=1e-2)
    for step in range(2):
        tokens = [batch["input_ids"] for batch in hf_models.batches(2, seed=step)]
        logits = hf_models.run("zbv", pipelines["teacher"], tokens, forward_step_func=output, forward_only=True)
        losses = []
        for number, ids in enumerate(tokens):
            with torch.no_grad():
                wanted = models["teacher"](ids).logits
            assert not logits or torch.equal(logits[number], wanted)
            loss = distance(models["student"](ids, use_cache=False).logits, wanted)
            (loss / len(tokens)).backward()
            losses.append(loss.detach())

        def forward_step(batches: Iterator[Any], chunk: Any, logits: list[Tensor] = logits) -> Any:
            number, ids = next(batches)
            return chunk(input_ids=ids), lambda own: ((loss := distance(own, logits[number])), {"loss": loss.detach()})

        reports = hf_models.run("zbv", student, list(enumerate(tokens)), forward_step_func=forward_step)
        hf_models.assert_same_losses(reports, losses, student)
        hf_models.assert_same_gradients(student, models["student"])
        for one in (optimizer, whole):
            one.step()
            one.zero_grad()


@on_ranks(2)
def test_log_probs_are_those_of_training_steps(rank: int, tmp_path: Path) -> None:
    """On every rank, of microbatches of several lengths, one of them padded; and training goes on as before."""
    model, chunks = hf_models.load_both("qwen2", tmp_path, "1f1b")
    generator = torch.Generator().manual_seed(0)
    tokens = [torch.randint(3, hf_models.VOCABULARY, (2, length), generator=generator) for length in (12, 5, 9)]
    inputs: list[dict[str, Any]] = [{"input_ids": one} for one in tokens]
    inputs[1]["attention_mask"] = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])
    found = token_log_probs(chunks, "1f1b", [{**one, "labels": one["input_ids"]} for one in inputs])

    expected = [log_probs(model(**one).logits, one) for one in inputs]
    assert all(torch.equal(one, want) for one, want in zip(found, expected, strict=True))

    def forward_step(batches: Iterator[Any], chunk: Any) -> Any:
        batch = next(batches)
        return chunk(**batch), lambda logits: ((of := log_probs(logits, batch)).sum(), of.detach())

    sizes = {"seq_length": None, "micro_batch_size": None, "forward_step_func": forward_step}
    chunks[0].config.variable_seq_lengths = True
    reports = hf_models.run("1f1b", chunks, inputs, **sizes)
    assert len(reports) == 3 * rank
    assert all(torch.equal(one, want) for one, want in zip(reports, found))
    for one in expected:
        (one.sum() / 3).backward()
    hf_models.assert_same_gradients(chunks, model)

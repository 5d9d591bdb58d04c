"""examples/finetune_hf.py and grpo.py with a model and a tokenizer made here: `make test-models`."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from tools.ranks import RankPool

pytest.importorskip("transformers")

import tokenizers
import transformers
from tools import hf_models

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import finetune_hf
import grpo
import hf_data

SMALL = (
    "--seq-length 32 --micro-batch-size 2 --global-batch-size 8 --lr 1e-2 --lr-warmup-iters 2 --log-interval 1 "
    "--eval-interval 4 --eval-fraction 0.05"
)
TEXT = Path(json.__file__).read_text()
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{{ eos_token }}"
    "{% endgeneration %}{% else %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With a model, its tokenizer, text.jsonl and chats.jsonl."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, special_tokens=["</s>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator([TEXT], trainer)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(tmp_path)
    hf_models.make_model("llama", vocab_size=len(fast)).save_pretrained(tmp_path)
    paragraphs = TEXT.split("\n\n")
    roles = ("user", "assistant")
    chats = [
        [{"role": role, "content": part} for role, part in zip(roles, two)] for two in itertools.pairwise(paragraphs)
    ]
    write_lines(tmp_path / "text.jsonl", [{"text": paragraph} for paragraph in paragraphs])
    write_lines(tmp_path / "chats.jsonl", [{"messages": chat} for chat in chats])
    return tmp_path


def write_lines(path: Path, rows: list[Any]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def finetune(rank: int, arguments: str) -> list[float]:
    return finetune_hf.train(finetune_hf.parse_args(arguments.split()), torch.device("cpu"))


def arguments_for(folder: Path, data: str, more: str) -> str:
    return f"--model {folder} --data {folder / data} {SMALL} {more}"


def into(folder: Path) -> str:
    return f"--save {folder / 'checkpoints'} --load {folder / 'checkpoints'}"


@pytest.mark.parametrize(
    ("data", "more"), [("text.jsonl", ""), ("chats.jsonl", ""), ("text.jsonl", "--padding --eval-fraction 0.2")]
)
def test_losses_fall_and_do_not_depend_on_the_arrangement(ranks: RankPool, folder: Path, data: str, more: str) -> None:
    more = f"{more} --train-iters 8 --prompts import --max-new-tokens 2"
    (expected,) = ranks.run(1, finetune, arguments_for(folder, data, more))
    assert expected[-1] < expected[0] - 0.3
    for num_ranks, options in [
        (2, "--schedule zbv --gradient-checkpointing"),
        (4, "--schedule 1f1b --pipeline-model-parallel-size 2"),
    ]:
        for losses in ranks.run(num_ranks, finetune, arguments_for(folder, data, f"{more} {options}")):
            assert losses == pytest.approx(expected, rel=1e-4)


def test_a_run_goes_on_under_another_schedule_and_is_loaded_by_transformers(ranks: RankPool, folder: Path) -> None:
    more = f"--epochs 0.5 {into(folder)} --save-interval 2 --output {folder / 'out'}"
    (expected,) = ranks.run(1, finetune, arguments_for(folder, "text.jsonl", "--epochs 0.5"))
    begun = arguments_for(folder, "text.jsonl", more + " --stop-after 4 --schedule zbv")
    ranks.run(2, finetune, begun)
    losses = ranks.run(2, finetune, arguments_for(folder, "text.jsonl", more + " --schedule 1f1b"))[0]
    assert losses == pytest.approx(expected[4:], rel=1e-4)
    assert transformers.AutoModelForCausalLM.from_pretrained(folder / "out").config.vocab_size == 300


def numbers_of(rank: int, arguments: str) -> list[int]:
    """The sequences that a run trains on, in their order."""
    found: list[int] = []

    class Recording(finetune_hf.Trainer):
        def share(self, numbers: list[int], sequences: Any) -> Any:
            found.extend(numbers if sequences is self.sequences else [])
            return super().share(numbers, sequences)

    with mock.patch.object(finetune_hf, "Trainer", Recording):
        finetune_hf.train(finetune_hf.parse_args(arguments.split()), torch.device("cpu"))
    return found


@pytest.mark.parametrize("size", [2, 16])
def test_a_run_goes_on_with_another_batch_size_where_it_was_in_the_data(
    ranks: RankPool, folder: Path, size: int
) -> None:
    """Steps were counted: smaller batches repeated data, and larger ones left some out."""
    more = f"{into(folder)} --micro-batch-size 2 --eval-interval 0"
    (first,) = ranks.run(1, numbers_of, arguments_for(folder, "text.jsonl", f"{more} --stop-after 3"))
    (rest,) = ranks.run(1, numbers_of, arguments_for(folder, "text.jsonl", f"{more} --global-batch-size {size}"))
    seen = {*first, *rest}
    assert len(first) == 24
    assert seen == set(range(max(seen) + 1))
    assert len(first + rest) < len(seen) + size  # the last batch is filled from the next epoch


@pytest.mark.parametrize("tag", ["{% generation %}", "{%- generation -%}", "{%-generation%}"])
def test_what_the_assistant_says_is_learnt_alone(folder: Path, tag: str) -> None:
    """{%- generation -%} was not seen, and what the user says was learnt as well."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE.replace("{% generation %}", tag)
    chat = [{"role": "user", "content": "hello there"}, {"role": "assistant", "content": "x = 1"}]
    learnt = [token for token, is_learnt in zip(*hf_data.tokenize({"messages": chat}, tokenizer)) if is_learnt]
    assert "".join(tokenizer.convert_ids_to_tokens(learnt)) == "ĠxĠ=Ġ1</s>"


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ('{"text": "a"}\n{"text": \n', r"line 2 of --data .* is no JSON \(.*\): '{\"text\": "),
        (
            '{"text": "a"}\n{"messages": []}\n',
            r"needs \"text\" or at least one of \"messages\", but one is {'messages': \[\]}",
        ),
        ("", r"--data .* is too short for two sequences"),
        ('{"text": 5}\n', r"but one is {'text': 5}"),
    ],
)
def test_data_that_cannot_be_read(ranks: RankPool, folder: Path, lines: str, message: str) -> None:
    """Of a broken line it was said that a value is expected, and of no messages that "messages" are needed."""
    (folder / "bad.jsonl").write_text(lines)
    for error in ranks.run(2, finetune, arguments_for(folder, "bad.jsonl", ""), errors=True):
        with pytest.raises(ValueError, match=message):
            raise error


def write(rank: int, arguments: str) -> list[str]:
    hf_models.initialise(2)
    return finetune_hf.Trainer(finetune_hf.parse_args(arguments.split()), torch.device("cpu")).write()


def test_prompts_go_on_as_the_whole_model_goes_on(ranks: RankPool, folder: Path) -> None:
    more = "--schedule zbv --temperature 0 --max-new-tokens 8 --prompts import x"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    wanted = []
    for text in ("import", "x"):
        tokens = tokenizer(f"{text}</s>", return_tensors="pt")["input_ids"]  # as the template has it
        written = model.generate(tokens, max_new_tokens=8, do_sample=False, eos_token_id=tokenizer.eos_token_id)
        wanted.append(tokenizer.decode(written[0, tokens.shape[1] :], skip_special_tokens=True))
    assert ranks.run(2, write, arguments_for(folder, "text.jsonl", more)) == [wanted] * 2


def test_adapters_in_bf16(ranks: RankPool, folder: Path) -> None:
    pytest.importorskip("peft")
    more = f"--train-iters 4 --schedule dualpipev --bf16 --lora-rank 4 --output {folder / 'out'}"
    for losses in ranks.run(2, finetune, arguments_for(folder, "chats.jsonl", more)):
        assert losses[-1] < losses[0]
    assert (folder / "out" / "adapter_model.safetensors").exists()
    assert not (folder / "out" / "model.safetensors").exists()


@pytest.mark.parametrize("more", ["--quantize nf4 --schedule zbv", "--quantize int8 --bf16"])
def test_adapters_on_quantised_weights(ranks: RankPool, folder: Path, more: str) -> None:
    """A run that was interrupted goes on where it was."""
    for package in ("peft", "torchao", "bitsandbytes"):
        pytest.importorskip(package)
    sizes = {"hidden_size": 64, "intermediate_size": 128}  # in a forward alone bitsandbytes takes no smaller ones
    hf_models.make_model("llama", vocab_size=300, **sizes).save_pretrained(folder)
    more = f"--lora-rank 4 --train-iters 6 {more}"
    expected = ranks.run(2, finetune, arguments_for(folder, "chats.jsonl", more))[0]
    assert expected[-1] < expected[0]
    ranks.run(2, finetune, arguments_for(folder, "chats.jsonl", f"{more} {into(folder)} --stop-after 3"))
    losses = ranks.run(2, finetune, arguments_for(folder, "chats.jsonl", f"{more} {into(folder)}"))[0]
    assert losses == expected[3:]


def reinforce(rank: int, arguments: str) -> list[float]:
    return grpo.train(grpo.parse_args(arguments.split()))


@pytest.mark.parametrize("more", ["--schedule zbv", "--schedule 1f1b --lora-rank 16 --lr 3e-2 --train-iters 20"])
def test_rewards_rise(ranks: RankPool, folder: Path, more: str) -> None:
    """What the model writes has more digits, also where only adapters are trained and the reference has none."""
    if "lora" in more:
        pytest.importorskip("peft")
    (folder / "prompts.txt").write_text("import json\ndef decode(\nThe number is\nx =\n")
    files = f"--model {folder} --prompts {folder / 'prompts.txt'} --output {folder / 'out'}"
    sizes = "--lr 3e-3 --train-iters 12 --max-new-tokens 12 --max-tokens 256"
    rewards = ranks.run(2, reinforce, f"{files} {sizes} {more}")[0]
    assert sum(rewards[-3:]) > 1.8 * sum(rewards[:3])

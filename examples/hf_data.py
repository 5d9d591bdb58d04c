"""Text and chats for examples/finetune_hf.py: lines of JSON, as sequences of equal length with what is to be learnt."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Sequences(NamedTuple):
    """Documents one after the other, or one in each, in sequences of equal length. Tensors are [sequences, length]."""

    tokens: Tensor
    positions: Tensor
    """Begin anew with each document and each sequence: by them the model tells documents apart."""
    labels: Tensor
    """The tokens, or -100 for what is not to be learnt."""

    def batch(self, numbers: list[int], device: torch.device) -> dict[str, Tensor]:
        names = ("input_ids", "position_ids", "labels")
        return {name: tensor[numbers].long().to(device) for name, tensor in zip(names, self)}

    def split(self, fraction: float, least: int) -> tuple[Sequences, Sequences]:
        """Those to train on, and the last ones, to evaluate with: at least so many."""
        last = max(least, round(len(self.tokens) * fraction)) if fraction else 0
        cut = max(0, len(self.tokens) - last)
        return Sequences(*(part[:cut] for part in self)), Sequences(*(part[cut:] for part in self))


def read_data(path: str, tokenizer: Any, seq_length: int, is_packed: bool) -> Sequences:
    tokens, labels = [], []
    for row in read_rows(path):
        found, learnt = map(torch.tensor, tokenize(row, tokenizer))
        tokens.append(found)
        labels.append(torch.where(learnt, found, -100))
        labels[-1][:1] = -100  # which would be predicted from the document before
    sequences = pack(tokens, labels, seq_length) if is_packed else pad(tokens, labels, seq_length, tokenizer)
    if len(sequences.tokens) < 2 or seq_length < 2:  # of one token none is predicted
        raise ValueError(f"--data {path} is too short for two sequences of {max(2, seq_length)} tokens.")
    return sequences


def pad(tokens: list[Tensor], labels: list[Tensor], seq_length: int, tokenizer: Any) -> Sequences:
    """One document in each sequence, cut off where it is longer, and left out where nothing is learnt up to there. What
    fills up the others comes last, where attention, which looks back only, does not see it."""
    is_learnt = [bool((one[:seq_length] != -100).any()) for one in labels]
    tokens, labels = (list(itertools.compress(parts, is_learnt)) for parts in (tokens, labels))
    fill = next(one for one in (tokenizer.pad_token_id, tokenizer.eos_token_id, 0) if one is not None)
    found = [torch.full((len(parts), seq_length), value) for parts, value in ((tokens, fill), (labels, -100))]
    for row, parts in enumerate(zip(tokens, labels)):
        for tensor, part in zip(found, parts):
            tensor[row, : len(part)] = part[:seq_length]
    return Sequences(found[0], torch.arange(seq_length).expand_as(found[0]), found[1])


def pack(tokens: list[Tensor], labels: list[Tensor], seq_length: int) -> Sequences:
    """Documents one after the other. What fills no sequence in the end is left out."""
    positions = [torch.arange(len(one)) for one in tokens]
    end = sum(map(len, tokens)) // seq_length * seq_length
    if not end:
        return Sequences(*torch.empty(3, 0, seq_length))
    found = Sequences(*(torch.cat(parts)[:end].view(-1, seq_length) for parts in (tokens, positions, labels)))
    # A document that goes on in the next sequence begins anew there.
    is_first = found.positions == 0
    is_first[:, 0] = True
    numbers = torch.arange(seq_length).expand_as(found.positions)
    starts = torch.where(is_first, numbers, 0).cummax(dim=1).values
    return found._replace(positions=numbers - starts)


def read_rows(path: str) -> list[dict[str, Any]]:
    """Of lines of JSON."""
    rows = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").split("\n"), 1):
        try:
            rows += [json.loads(line)] if line.strip() else []
        except ValueError as error:
            raise ValueError(f"line {number} of --data {path} is no JSON ({error}): {line[:60]!r}.") from None
    return rows


def tokenize(row: dict[str, Any], tokenizer: Any) -> tuple[list[int], list[bool]]:
    """The tokens, and for each whether it is to be learnt."""
    if row.get("messages"):
        # As transformers looks for it: without it, it has no marks.
        marks = re.search(r"\{%-?\s*generation\s*-?%\}", tokenizer.get_chat_template()) is not None
        found = tokenizer.apply_chat_template(
            row["messages"], return_dict=True, return_assistant_tokens_mask=marks, tokenize=True
        )
        tokens = found["input_ids"]
        learnt = [bool(one) for one in found["assistant_masks"]] if marks else [True] * len(tokens)
    elif isinstance(row.get("text"), str):
        tokens = tokenizer(row["text"])["input_ids"]
        if tokenizer.eos_token_id is not None and tokens[-1:] != [tokenizer.eos_token_id]:
            tokens = [*tokens, tokenizer.eos_token_id]
        learnt = [True] * len(tokens)
    else:
        raise ValueError(f'each line of the data needs "text" or at least one of "messages", but one is {row}.')
    return tokens, learnt

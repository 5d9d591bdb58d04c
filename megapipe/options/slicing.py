"""`config.num_sequence_slices`: stages that run sequences slice by slice.

To the rest of a step a slice is what a microbatch is: it has messages of its own. What differs is here: its layers have
the state of the slices before it (megapipe.slices), it reads the data of its whole microbatch, and its loss and report
are parts of the microbatch's.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from ..config import StepConfig
from ..plan import RECOMPUTE, Kind
from ..slices import CarriedState, SequenceSlice
from ..stages import ActionFunction, Call, Extension, Loss, Stage, UnitState, call_loss_func, divide_loss


class Slices(Extension):
    """Cuts sequences, and runs their slices."""

    def cut(self, call: Call) -> tuple[list[SequenceSlice], type[Stage]]:
        return sequence_slices(call.config, call.decoder_seq_length or call.seq_length), SlicedStage

    def takes_part(self, call: Call) -> bool:
        self._slices = call.slices
        return True

    def action(self, kind: Kind, stage: Stage, run: ActionFunction) -> ActionFunction:
        if kind is not RECOMPUTE:
            return run

        def replay(unit: UnitState) -> None:
            with unit.kept_by[SlicedStage].state.again(self._slices[unit.slice]):
                run(unit)

        return replay


def sequence_slices(config: StepConfig, seq_length: int | None) -> list[SequenceSlice]:
    """The slices of every sequence.

    Raises:
        ValueError: the sequence cannot be cut like that.
    """
    num_slices, lengths = config.num_sequence_slices, config.sequence_slice_lengths
    if seq_length is None:
        raise ValueError(f"num_sequence_slices={num_slices} takes seq_length, the length of what is cut: pass it.")
    num_shards = config.tensor_model_parallel_size if config.sequence_parallel else 1
    if lengths is None:
        base, extra = divmod(seq_length // num_shards, num_slices)
        lengths = [num_shards * (base + (index < extra)) for index in range(num_slices)]
    if sum(lengths) != seq_length or any(length == 0 or length % num_shards for length in lengths):
        of_shards = f", each a multiple of the {num_shards} tensor-parallel ranks" if num_shards > 1 else ""
        raise ValueError(
            f"a sequence of {seq_length} cannot be cut into {num_slices} slices of {list(lengths)}: choose a "
            f"seq_length, and sequence_slice_lengths of at least 1 that add up to it{of_shards}."
        )
    starts = itertools.accumulate([0, *lengths])
    return [SequenceSlice(k, num_slices, start, length) for k, (start, length) in enumerate(zip(starts, lengths))]


class Microbatch:
    """What a stage keeps for one microbatch while its slices run."""

    def __init__(self, needs_grad: bool) -> None:
        self.state = CarriedState(needs_grad)
        self.num_tokens: Tensor | None = None
        """The token count of all slices, if the loss has still to be divided by it."""


class SlicedStage(Stage):
    """Runs one chunk of the model on slices, in their order, and backward in the reverse order."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._microbatch = Microbatch(needs_grad=False)
        self._items = _SharedItems(self._data_iterator) if hasattr(self._data_iterator, "__next__") else None
        if self._items is not None:
            self._data_iterator = self._items

    def F(self, unit: UnitState, *extra: bool) -> None:
        this = self._call.slices[unit.slice]
        if this.index == 0:
            self._microbatch = Microbatch(needs_grad=not self._call.forward_only)
        unit.kept_by[SlicedStage] = self._microbatch
        if self._items is not None:
            self._items.begin(is_first=this.index == 0)
        with self._microbatch.state.forward(this):
            super().F(unit, *extra)
        if self.info.is_first and not self._microbatch.state.was_asked:
            raise ValueError(
                f"forward_step_func and the model have run slice {this.index} of {this.num_slices} without asking "
                "which it is, so each slice would compute the whole sequence: cut what they read by "
                "megapipe.slices.cut(tensor, dim), or set config.num_sequence_slices to 1."
            )
        if this.index == this.num_slices - 1:
            self._microbatch = Microbatch(needs_grad=False)  # what the slices kept now lives as long as they do

    def BW(self, unit: UnitState) -> None:
        with unit.kept_by[SlicedStage].state.backward(self._call.slices[unit.slice]):
            super().BW(unit)

    def roots(self, unit: UnitState) -> list[tuple[GradientEdge, Tensor]]:
        """The edges of `Stage.roots`, and those of kept tensors that later slices have sent gradients to."""
        num_tokens = unit.kept_by[SlicedStage].num_tokens
        if self._is_last and unit.output_grads and num_tokens is not None:
            tokens = torch.where(num_tokens > 0, num_tokens, 1).double()
            unit.output_grads = [(grad / tokens).to(grad.dtype) for grad in unit.output_grads]
        roots: list[tuple[GradientEdge, Tensor]] = unit.kept_by[SlicedStage].state.roots(unit.slice)
        return super().roots(unit) + roots

    def compute_loss(self, unit: UnitState, output: Any, loss_func: Any) -> Loss | None:
        """The slice's part. Tokens that divide the loss are those of all slices, so that is left to the backward."""
        called = call_loss_func(self._call, output, loss_func)
        self._add_report(unit, are_outputs=loss_func is None or self._call.collect_non_loss_data)
        if called is None:
            return None
        loss, num_tokens = called
        if num_tokens is not None and not self._call.config.calculate_per_token_loss:
            before = self._microbatch.num_tokens
            self._microbatch.num_tokens = (0 if before is None else before) + num_tokens.detach()  # a tensor of its own
            return Loss(loss / self._call.num_microbatches, 1.0)  # whose gradient is divided by tokens first
        return divide_loss(self._call, loss, num_tokens)

    def _add_report(self, unit: UnitState, are_outputs: bool) -> None:
        """Make one report of those of a microbatch's slices; of outputs, a list."""
        results = self._call.results
        if are_outputs:
            results.append([results.pop()])
        if unit.slice > 0:
            part = results.pop()
            results[-1] = results[-1] + part if are_outputs else _sum_of_reports(results[-1], part)


def _sum_of_reports(report: Any, part: Any) -> Any:
    """Tensors and numbers are added, also in dicts, lists and tuples; of anything else the last one counts."""
    if isinstance(part, dict) and isinstance(report, dict) and part.keys() == report.keys():
        return {name: _sum_of_reports(report[name], value) for name, value in part.items()}
    if type(part) in (list, tuple) and type(part) is type(report) and len(part) == len(report):
        return type(part)(map(_sum_of_reports, report, part))
    is_number = isinstance(part, (Tensor, int, float, complex)) and not isinstance(part, bool)
    return report + part if is_number and isinstance(report, (Tensor, int, float, complex)) else part


class _SharedItems(Iterator[Any]):
    """Each slice reads the items of its microbatch from the first on."""

    def __init__(self, iterator: Iterator[Any]) -> None:
        self._iterator = iterator
        self._items: list[Any] = []
        self._num_read = 0

    def begin(self, is_first: bool) -> None:
        """The next slice; with `is_first` that of another microbatch."""
        self._num_read = 0
        if is_first:
            self._items = []

    def __next__(self) -> Any:
        if self._num_read == len(self._items):
            self._items.append(next(self._iterator))
        self._num_read += 1
        return self._items[self._num_read - 1]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)

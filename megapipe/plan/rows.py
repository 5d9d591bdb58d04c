"""What a rank does, one row of small numbers: a large plan has millions of calls, too many for an object each.

An `Event` or `Action` is made where it is looked at.
"""

from __future__ import annotations

import operator
from abc import abstractmethod
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar, overload

import numpy as np

__all__ = ["LazySequence", "Row", "column"]

T = TypeVar("T", bound=tuple[Any, ...])


def column(typecode: str, values: np.ndarray[Any, Any]) -> array[Any]:
    """An array of Python's own, whose items are Python's numbers."""
    return array(typecode, values.astype(typecode).tobytes())


class LazySequence(Sequence[T]):
    """A sequence whose items are made anew each time. Equal to any other of equal items, as a list is to a list."""

    @abstractmethod
    def at(self, index: int) -> T:
        """The item at an index from 0 on."""

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: int | slice) -> T | list[T]:
        indices = range(len(self))[index]
        return self.at(indices) if isinstance(indices, int) else list(map(self.at, indices))

    def __iter__(self) -> Iterator[T]:
        return map(self.at, range(len(self)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, (list, LazySequence)):
            return NotImplemented
        return len(self) == len(other) and all(map(operator.eq, self, other))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(list(self))


class Row(LazySequence[T], Generic[T]):
    """Calls of verbs, or computations, in two columns of numbers.

    Attributes:
        words: the different things that are done, by their code: (verb, stage) or (stage, kind).
        codes: the code of each item.
        units: its unit: microbatch * num_slices + slice.
    """

    def __init__(
        self,
        make: Callable[..., T],
        words: Sequence[tuple[Any, Any]],
        codes: array[int],
        units: array[int],
        num_slices: int,
    ) -> None:
        self.make = make
        self.words = words
        self.codes = codes
        self.units = units
        self.num_slices = num_slices

    @classmethod
    def of(cls, items: Iterable[T], num_slices: int) -> Row[T]:
        """The row of these events or actions."""
        numbers: dict[tuple[Any, Any], int] = {}
        codes, units = array("H"), array("q")
        make: Any = tuple  # for a row of no items
        for item in items:
            make = type(item)
            first, second, microbatch, part = item
            codes.append(numbers.setdefault((first, second), len(numbers)))
            units.append(microbatch * num_slices + part)
        return cls(make, list(numbers), codes, units, num_slices)

    def first_of_words(self) -> list[T]:
        """Each word as an item of the first unit, for facts that all units share."""
        return [self.make(*word, 0, 0) for word in self.words]

    def look_up(self, facts: Sequence[Any], type_: type) -> np.ndarray[Any, Any]:
        """A fact of each item, from those of the words."""
        found: np.ndarray[Any, Any] = np.array(facts, type_)[np.asarray(self.codes)]
        return found

    def __len__(self) -> int:
        return len(self.codes)

    def at(self, index: int) -> T:
        return self.make(*self.words[self.codes[index]], *divmod(self.units[index], self.num_slices))

"""Where the bytes of a box of a tensor lie in its file: rows of the same length at equal distances."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod


@dataclass(frozen=True)
class Rows:
    """Elements that lie side by side, in the file within each row, in the box (C order) altogether."""

    start: int
    """The first one's place in the tensor."""
    count: int
    length: int
    """Of each row."""
    step: int
    """From one row's start to the next one's, in the tensor."""
    at: int
    """The first one's place in the box."""

    @property
    def numel(self) -> int:
        return self.count * self.length

    def cut(self, most: int) -> Iterator[Rows]:
        """The same in order, no part of more than ``most`` elements."""
        each = max(1, most // self.length)
        for row in range(0, self.count, each):
            count = min(each, self.count - row)
            start, at = self.start + row * self.step, self.at + row * self.length
            if count * self.length <= most:
                yield Rows(start, count, self.length, self.step, at)
                continue
            for begin in range(0, self.length, most):
                length = min(most, self.length - begin)
                yield Rows(start + begin, 1, length, length, at + begin)


def rows_of(offsets: Sequence[int], lengths: Sequence[int], shape: Sequence[int]) -> Iterator[Rows]:
    """The box at ``offsets`` with these ``lengths``, of a tensor of ``shape`` in C order."""
    if not prod(lengths):
        return
    strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    last = max((dim for dim in range(len(shape)) if lengths[dim] != shape[dim]), default=0)
    first = last - 1  # rows go on at the same distance over dimensions of which the box has all
    while first > 0 and lengths[first] == shape[first]:
        first -= 1
    first = max(0, first)
    length, count = prod(lengths[last:]), prod(lengths[first:last])
    step = strides[last - 1] if last else length
    begin = sum(offset * stride for offset, stride in zip(offsets, strides, strict=True))
    for number, outer in enumerate(product(*(range(n) for n in lengths[:first]))):
        skipped = sum(i * stride for i, stride in zip(outer, strides, strict=False))
        yield Rows(begin + skipped, count, length, step, number * count * length)

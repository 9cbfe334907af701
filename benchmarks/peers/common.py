"""Shared parts of the peers: layouts of their tokens, and imports with known defects repaired.

The ring-flash-attn and yunchang packages take a float32 work buffer for the gradient it is copied to
(``x.to(float32)`` of a float32 tensor is x), so that the next hop overwrites it, and round dq of their plain
rings to bfloat16. Their source lines are replaced on import, in this process. In bfloat16 the repaired lines
compute the same as the original ones, at the same cost.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType
from typing import Any

import torch

REPAIRS: Mapping[str, str] = {
    "_buffer.to(torch.float32)": "_buffer.to(torch.float32, copy=True)",
    "dq.to(torch.bfloat16)": "dq.to(q.dtype)",
}


def import_repaired(name: str, prefix: str) -> ModuleType:
    """Import a module; modules whose names begin with ``prefix`` are repaired.

    Raises:
        ImportError: the module cannot be imported.
    """
    finder = _Finder(prefix)
    sys.meta_path.insert(0, finder)
    try:
        with warnings.catch_warnings():  # of torch.jit.script and others; users cannot fix them
            warnings.simplefilter("ignore")
            return import_module(name)
    finally:
        sys.meta_path.remove(finder)


class _Finder(MetaPathFinder):
    def __init__(self, prefix: str) -> None:
        self._prefix = prefix

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if not fullname.startswith(self._prefix):
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.origin is not None:
            spec.loader = _Repaired(fullname, spec.origin)
        return spec


class _Repaired(SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        source = self.get_source(fullname) or ""
        for line, repaired in REPAIRS.items():
            source = source.replace(line, repaired)
        return compile(source, self.path, "exec", dont_inherit=True)


def of_documents(lengths: Sequence[int], ranks: int, rank: int, *, zigzag: bool) -> torch.Tensor:
    """Return a rank's share of every padded document, in one chunk or in two.

    Returns:
        int64 [L]: global positions; the sequence's length for padding.
    """
    parts = 2 * ranks if zigzag else ranks
    chunks = (rank, parts - 1 - rank) if zigzag else (rank,)
    tokens, start = sum(lengths), 0
    found: list[torch.Tensor] = []
    for length in lengths:
        size = -(-length // parts)
        inside = torch.cat([torch.arange(chunk * size, (chunk + 1) * size) for chunk in chunks])
        found.append(torch.where(inside < length, start + inside, tokens))
        start += length
    return torch.cat(found)


def striped(tokens: int, ranks: int, rank: int) -> torch.Tensor:
    """Return every ``ranks``-th token from token ``rank`` on; padding follows the sequence."""
    return torch.arange(rank, -(-tokens // ranks) * ranks, ranks)


def of_grid(tokens: int, ulysses: int, ring: int, rank: int) -> torch.Tensor:
    """Return zigzag chunks over the ring, split equally among neighbouring Ulysses ranks."""
    padded = -(-tokens // (2 * ring * ulysses)) * 2 * ring * ulysses
    ring_rank, ulysses_rank = divmod(rank, ulysses)
    own = of_documents([padded], ring, ring_rank, zigzag=ring > 1)
    return own.chunk(ulysses)[ulysses_rank]


def boundaries(lengths: Sequence[int]) -> torch.Tensor:
    """Return int32 [documents + 1]: the start of each document, and the end."""
    return torch.tensor([0, *lengths]).cumsum(0).int()

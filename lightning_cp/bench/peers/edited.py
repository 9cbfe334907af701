"""Importing a package with lines of its source replaced, in this process: for defects with a known repair.

The ring-flash-attn and yunchang packages take a float32 work buffer for the gradient it is copied to
(``x.to(float32)`` of a float32 tensor is x), so that the next hop overwrites it, and round dq of their plain
rings to bfloat16. In bfloat16 the repaired lines do what the original ones do, at the same cost.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType
from typing import Any

REPAIRS: Mapping[str, str] = {
    "_buffer.to(torch.float32)": "_buffer.to(torch.float32, copy=True)",
    "dq.to(torch.bfloat16)": "dq.to(q.dtype)",
}


def import_repaired(name: str, prefix: str) -> ModuleType:
    """Import a module; those whose names begin with ``prefix`` are repaired.

    Raises:
        ImportError: it cannot be imported.
    """
    finder = _Finder(prefix)
    sys.meta_path.insert(0, finder)
    try:
        with (
            warnings.catch_warnings()
        ):  # of torch.jit.script and others, about which users can do nothing
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

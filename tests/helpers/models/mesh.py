"""A mesh of one rank, for a swap without processes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

MESH: Any = SimpleNamespace(cp_size=1, cp_rank=0, sample_size=1)
"""One rank agrees with itself."""

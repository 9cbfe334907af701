"""flash-attn for the packages that call it: the real one on CUDA, a stand-in on CPU."""

from __future__ import annotations

import sys
from importlib.util import find_spec

from lightning_cp.bench.case import Case
from lightning_cp.bench.peers import stand_in


def without_kernel(case: Case) -> str | None:
    """Why there is no flash-attn for this case, or ``None``."""
    if case.device_type == "cpu" or find_spec("flash_attn") is not None:
        return None
    return f"needs flash-attn on {case.device_type}: pip install flash-attn"


def provide(case: Case) -> None:
    """Let packages import flash-attn, in this process; the real one does not compute on CPU."""
    if case.device_type == "cpu" and not isinstance(
        sys.modules.get("flash_attn"), stand_in.StandIn
    ):
        stand_in.install()

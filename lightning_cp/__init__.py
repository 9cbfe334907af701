"""Context parallelism for Lightning: train on sequences that do not fit one device.

>>> import lightning_cp
>>> trainer = lightning.pytorch.Trainer(strategy="ulysses_ring", devices=8)  # doctest: +SKIP

Names are loaded when they are first used, so that importing this package is cheap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_cp import _moved
from lightning_cp._autoload import register_when_loaded
from lightning_cp.utils.lazy import lazy

if TYPE_CHECKING:
    from lightning_cp.attention.api import context_parallel_attention as context_parallel_attention
    from lightning_cp.attention.checkpointing import keep_attention as keep_attention
    from lightning_cp.attention.spec import AttentionSpec as AttentionSpec
    from lightning_cp.callback import ContextParallelCallback as ContextParallelCallback
    from lightning_cp.layout import Documents as Documents
    from lightning_cp.layout import SequenceLayout as SequenceLayout
    from lightning_cp.memory.chunked_loss import linear_cross_entropy as linear_cross_entropy
    from lightning_cp.mesh import ContextParallelMesh as ContextParallelMesh
    from lightning_cp.mixin import ContextParallelMixin as ContextParallelMixin
    from lightning_cp.strategies.trainer import UlyssesRingStrategy as UlyssesRingStrategy
    from lightning_cp.throughput.callback import ThroughputCallback as ThroughputCallback

__version__ = "0.2.0"

_HOME = {
    "AttentionSpec": "lightning_cp.attention.spec",
    "ContextParallelCallback": "lightning_cp.callback",
    "ContextParallelMesh": "lightning_cp.mesh",
    "ContextParallelMixin": "lightning_cp.mixin",
    "Documents": "lightning_cp.layout",
    "SequenceLayout": "lightning_cp.layout",
    "ThroughputCallback": "lightning_cp.throughput.callback",
    "UlyssesRingStrategy": "lightning_cp.strategies.trainer",
    "context_parallel_attention": "lightning_cp.attention.api",
    "keep_attention": "lightning_cp.attention.checkpointing",
    "linear_cross_entropy": "lightning_cp.memory.chunked_loss",
}

__all__ = sorted(_HOME)  # pyright: ignore[reportUnsupportedDunderAll]

__getattr__, __dir__ = lazy(__name__, _HOME)

register_when_loaded()
_moved.install()

"""Tensor parallelism: the ranks of a ``tp`` group share each layer, before fsdp or hsdp wraps it."""

from lightning_cp.engines.tensor_parallel.apply import is_shared, share_layers
from lightning_cp.engines.tensor_parallel.styles import FusedColwiseLinear

__all__ = ["FusedColwiseLinear", "is_shared", "share_layers"]

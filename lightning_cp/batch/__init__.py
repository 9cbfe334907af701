"""Sharding of batches along the sequence, and unsharding of outputs."""

from lightning_cp.batch.documents import documents_of
from lightning_cp.batch.output import unshard_output
from lightning_cp.batch.read import WholeBatch, read_batch
from lightning_cp.batch.rules import KNOWN_DIMS, BatchRules
from lightning_cp.batch.sharder import (
    CountedBatch,
    ShardedBatch,
    add_positions_and_targets,
    shard_batch,
    valid_counts,
)

__all__ = [
    "KNOWN_DIMS",
    "BatchRules",
    "CountedBatch",
    "ShardedBatch",
    "WholeBatch",
    "add_positions_and_targets",
    "documents_of",
    "read_batch",
    "shard_batch",
    "unshard_output",
    "valid_counts",
]

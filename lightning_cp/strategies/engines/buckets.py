"""The sizes of DistributedDataParallel's buckets of gradients, and their averaging.

Annotations are evaluated here: DistributedDataParallel compares those of a hook with its own classes.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import GradBucket

from lightning_cp.comm.reduce import summed_later
from lightning_cp.strategies.engines.checks import PER_PARAMETER

_ONE_BYTE = 2.0**-20
"""In MiB: every parameter fills a bucket of that size."""


def bucket_options(bucket_cap_mb: float | str | None) -> dict[str, Any]:
    """DistributedDataParallel's arguments for ``bucket_cap_mb``."""
    if bucket_cap_mb is None:
        return {}
    return {"bucket_cap_mb": _ONE_BYTE if bucket_cap_mb == PER_PARAMETER else bucket_cap_mb}


def sum_then_divide(
    group: dist.ProcessGroup, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """A bucket's gradients, added over the ranks and then divided by their number.

    DistributedDataParallel by itself divides first, which rounds every rank's part.
    """
    size = group.size()
    return summed_later(bucket.buffer(), group).then(lambda done: done.value()[0].div_(size))

"""The order in which DistributedDataParallel adds gradients up, which decides how sums are rounded.

It puts parameters into buckets in the order in which they were registered, and after the first backward in
that in which gradients come; with four ranks and more, where a number lies in a bucket decides in which order
the ranks' parts are added. A run that goes on would begin with the first order once more, so it is given
the second one. Only PyTorch's private names tell and set it: where they are missing, nothing is done.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

Order = list[list[int]]
"""Of every bucket, in the order in which they are filled: places of its parameters among those reduced."""


def orders_of(modules: Iterable[nn.Module | None]) -> list[Order | None]:
    """The orders that the modules' next backwards use; all ranks call this, between steps."""
    return [_order_of(module) for module in modules]


def lay_out(modules: Sequence[nn.Module | None], orders: Sequence[Order | None]) -> None:
    """Have each module's next backward use the same; those whose parameters are others are left alone."""
    if len(modules) != len(orders):
        return
    for module, order in zip(modules, orders, strict=True):
        if isinstance(module, DistributedDataParallel) and order and _can(module):
            _lay_out(module, order)


def _order_of(module: nn.Module | None) -> Order | None:
    if not isinstance(module, DistributedDataParallel) or not _can(module):
        return None
    module.reducer._rebuild_buckets()  # as the next forward would
    said = module._get_ddp_logging_data().get("rebuilt_per_bucket_param_indices")
    if said:
        return [[int(place) for place in bucket.split()] for bucket in str(said).split(",")]
    places = {id(p): place for place, p in enumerate(module._build_params_for_reducer()[0])}
    buckets = module.reducer._get_zeros_like_grad_buckets()  # not yet said: a run of few steps
    return [[places[id(p)] for p in bucket.parameters()] for bucket in buckets]


def _can(module: DistributedDataParallel) -> bool:
    """True if the order changes at all, and this PyTorch has what is needed."""
    names = (
        "_ddp_init_helper",
        "_build_params_for_reducer",
        "_comm_hooks",
        "_remove_autograd_hooks",
    )
    known = all(hasattr(module, name) for name in names)
    return known and not module.find_unused_parameters and not module.static_graph


def _lay_out(module: Any, order: Order) -> None:
    parameters, sparse = module._build_params_for_reducer()
    if sorted(place for bucket in order for place in bucket) != list(range(len(parameters))):
        return
    names = module._build_debug_param_to_name_mapping(parameters)
    module._remove_autograd_hooks()
    with _assigned(order):
        module._ddp_init_helper(parameters, sparse, names, module.static_graph)
    for hook, state in module._comm_hooks:
        dist._register_comm_hook(module.reducer, state, hook)


@contextmanager
def _assigned(order: Order) -> Iterator[None]:
    """Have DistributedDataParallel take this order; it reverses what it is given."""
    own = dist._compute_bucket_assignment_by_size

    def assign(parameters: Any, limits: list[int], *rest: Any, **more: Any) -> Any:
        return [list(bucket) for bucket in reversed(order)], [limits[-1]] * len(order)

    dist._compute_bucket_assignment_by_size = assign  # type: ignore[assignment]
    try:
        yield
    finally:
        dist._compute_bucket_assignment_by_size = own  # type: ignore[assignment]

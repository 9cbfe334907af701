"""DistributedDataParallel's options: a user's communication hook, and bucket sizes.

A user's hook replaces our sum and division, since there can be only one. It must give the mean over all
ranks: where ranks share samples, each holds a part of one gradient, not a gradient of fewer samples.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch.distributed import GradBucket
from torch.nn.parallel import DistributedDataParallel

from lightning_cp.comm.reduce import prescale, start_all_reduce
from lightning_cp.config import GROUPS, StrategyConfig
from lightning_cp.engines.checks import PER_PARAMETER
from lightning_cp.errors import ConfigError, nearest_name

# The sizes of DistributedDataParallel's buckets of gradients, and their averaging.
#
# Annotations are evaluated here: DistributedDataParallel compares those of a hook with its own classes.


_ONE_BYTE = 2.0**-20
"""In MiB: each parameter fills a bucket of this size."""


def bucket_options(bucket_cap_mb: float | str | None) -> dict[str, Any]:
    """DistributedDataParallel's arguments for ``bucket_cap_mb``."""
    if bucket_cap_mb is None:
        return {}
    return {"bucket_cap_mb": _ONE_BYTE if bucket_cap_mb == PER_PARAMETER else bucket_cap_mb}


def sum_then_divide(
    group: dist.ProcessGroup, bucket: GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """The gradients of a bucket, summed over the ranks and then divided by their number.

    DistributedDataParallel by itself divides first, which rounds every rank's part.
    """
    divisor = prescale(bucket.buffer(), group.size())
    started = start_all_reduce(bucket.buffer(), group)
    return started.then(lambda done: done.value()[0].div_(divisor))


ARGUMENTS = ("ddp_comm_hook", "ddp_comm_state", "ddp_comm_wrapper")
"""Arguments of the hook, named as in Lightning's ``DDPStrategy`` of the Trainer. Fabric's twin takes them
too.
"""


@dataclass(frozen=True)
class CommHook:
    """The user's communication hook. Without one, gradients are summed and then divided."""

    hook: Callable[..., Any] | None = None
    state: object = None
    wrapper: Callable[..., Any] | None = None

    @classmethod
    def of(cls, arguments: Mapping[str, Any], cp_size: int | None) -> "CommHook":
        """The hook among a strategy's arguments.

        Args:
            arguments: the strategy's arguments.
            cp_size: ranks that share a sample; ``None`` if not known yet.

        Raises:
            ConfigError: a part of a hook without the hook, or one that leaves ranks with other gradients.
        """
        hook, state, wrapper = (arguments.get(name) for name in ARGUMENTS)
        given = [name for name in ARGUMENTS[1:] if arguments.get(name) is not None]
        if hook is None and given:
            raise ConfigError(
                f"{' and '.join(given)} without a ddp_comm_hook does nothing. Pass the hook too, or leave "
                f"{'them' if len(given) > 1 else 'it'} out."
            )
        if cp_size != 1:
            _check_mean(hook, state)
            if arguments.get("model_averaging_period") is not None:
                raise ConfigError(f"model_averaging_period: {_GROUPED}")
        return cls(hook, state, wrapper)

    def register(self, wrapped: DistributedDataParallel, group: dist.ProcessGroup) -> None:
        """Register the hook; ``group`` holds all ranks that train the model.

        Raises:
            ConfigError: what DistributedDataParallel or this device refuses, or a hook over fewer ranks.
        """
        if self.hook is None:
            wrapped.register_comm_hook(group, sum_then_divide)
            return
        _check_all_ranks(self.state, group)
        hook = self.hook if self.wrapper is None else self.wrapper(self.hook)
        try:
            wrapped.register_comm_hook(self.state, hook)
        except (TypeError, ValueError, KeyError, AttributeError) as refused:
            raise ConfigError(
                f"DistributedDataParallel refuses ddp_comm_hook={_name(hook)}: {refused} A hook is a "
                "function hook(state, bucket: GradBucket) that gives a torch.futures.Future of the averaged "
                "buffer; without one gradients are averaged exactly."
            ) from refused


def _check_mean(hook: Callable[..., Any] | None, state: object) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
    from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
        PostLocalSGDState,
        post_localSGD_hook,
    )

    if hook is noop_hook:
        raise ConfigError(
            "ddp_comm_hook=noop_hook leaves gradients on their ranks, so that each would train another "
            "model, on a part of its samples. Leave it out, or use a hook that gives the mean, such as "
            "fp16_compress_hook. With context_parallel_size=1 it is DistributedDataParallel's."
        )
    if hook is post_localSGD_hook or isinstance(state, PostLocalSGDState):
        raise ConfigError(f"ddp_comm_hook={_name(hook)}: {_GROUPED}")


def _check_all_ranks(state: object, group: dist.ProcessGroup) -> None:
    """Check the group that a hook has as its state, or in it; ``None`` is the world."""
    own = getattr(state, "process_group", state)
    if isinstance(own, dist.ProcessGroup) and own.size() != group.size():
        raise ConfigError(
            f"ddp_comm_state has a group of {own.size()} ranks, but {group.size()} train the model, and the "
            "gradients of all have to be averaged. Leave the group out: None is all of them."
        )


def _name(hook: object) -> str:
    return getattr(hook, "__qualname__", repr(hook))


_GROUPED = (
    "local SGD lets ranks step apart and averages their weights later, but ranks that share a sample hold "
    "parts of one gradient. Leave it out; accumulate_grad_batches reduces less often, and fp16_compress_hook "
    "sends half. With context_parallel_size=1 no sample is shared, and local SGD works."
)


# DistributedDataParallel's own options among a strategy's arguments.


def without_defaults(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options that differ from their defaults: LightningCLI passes every argument that it knows."""
    parameters = inspect.signature(DistributedDataParallel).parameters
    return {
        name: value
        for name, value in options.items()
        if name not in parameters or value is not parameters[name].default
    }


_OTHER_NAMES = {
    **dict.fromkeys(("cp", "cp_size", "context_parallel"), "context_parallel_size"),
    **dict.fromkeys(("tp", "tp_size", "tensor_parallel"), "tensor_parallel_size"),
    **dict.fromkeys(("dp", "dp_size"), "data_parallel_size"),
    **dict.fromkeys(("ring", "ring_degree"), "ring_size"),
    **dict.fromkeys(("ulysses", "ulysses_degree"), "ulysses_size"),
    **dict.fromkeys(("checkpointing", "gradient_checkpointing"), "activation_checkpointing"),
    **{"offload": "activation_offload", "engine": "data_parallel", "precision": "mixed_precision"},
}
"""Settings under the names of the planner and of other libraries."""


def check_known_options(options: Mapping[str, Any]) -> None:
    """Check that DistributedDataParallel takes these remaining arguments of the strategy.

    Raises:
        ConfigError: naming what it does not take and the nearest known names, before any process starts.
    """
    passed_on = _arguments(DistributedDataParallel) - {"module", "device_ids", "process_group"}
    unknown = sorted(set(options) - passed_on)
    if not unknown:
        return
    settings = [item.name for item in fields(StrategyConfig)]
    known = [*settings, *GROUPS, *sorted(passed_on | _arguments(DDPStrategy))]
    nearest = {
        name: near
        for name in unknown
        if (near := _OTHER_NAMES.get(name) or nearest_name(name, known))
    }
    hints = [f" Did you mean {near} instead of {name}?" for name, near in nearest.items()]
    if "precision" in unknown:
        hints.append(" precision= belongs to the Trainer or to Fabric.")
    if len(hints) < len(unknown):
        hints.append(
            f" Settings of this strategy: {', '.join(settings)}. Others are DDPStrategy's, such as "
            "find_unused_parameters."
        )
    raise ConfigError(f"unknown argument(s) {', '.join(unknown)}.{''.join(hints)}")


def _arguments(made: type) -> set[str]:
    return set(inspect.signature(made).parameters) - {"kwargs"}


def check_ddp_only(data_parallel: str, options: Mapping[str, Any], hook: Mapping[str, Any]) -> None:
    """Check that DistributedDataParallel's options are given only with the ``ddp`` engine.

    Args:
        data_parallel: the name of the engine.
        options: DistributedDataParallel's options.
        hook: the options of its communication hook.

    Raises:
        ConfigError: naming the options.
    """
    given = [*options, *(name for name, value in hook.items() if value is not None)]
    if data_parallel == "ddp" or not given:
        return
    why = {
        "find_unused_parameters": "it needs none: parameters without a gradient are found at every step",
        "static_graph": "it follows the graph of every step",
    }
    said = f" With {data_parallel!r} {why[given[0]]}." if given[0] in why else ""
    raise ConfigError(
        f"{', '.join(given)}: an option of data_parallel='ddp', got data_parallel={data_parallel!r}.{said} "
        f"Leave it out, or use data_parallel='ddp'."
    )

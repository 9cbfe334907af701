"""A user's communication hook: how DistributedDataParallel's gradients get from rank to rank.

It takes the place of our sum and division, of which there can be one. Where ranks share samples it has to
give the mean over all ranks: what one of them holds is a part of a gradient, not one of fewer samples.
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

from lightning_cp.comm.reduce import start_all_reduce
from lightning_cp.config import StrategyConfig, check_known_arguments
from lightning_cp.engines.checks import PER_PARAMETER
from lightning_cp.errors import ConfigError

# The sizes of DistributedDataParallel's buckets of gradients, and their averaging.
#
# Annotations are evaluated here: DistributedDataParallel compares those of a hook with its own classes.


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
    return start_all_reduce(bucket.buffer(), group).then(lambda done: done.value()[0].div_(size))


ARGUMENTS = ("ddp_comm_hook", "ddp_comm_state", "ddp_comm_wrapper")
"""As Lightning's ``DDPStrategy`` of the Trainer names them; Fabric's takes them too, if it is ours."""


@dataclass(frozen=True)
class CommHook:
    """The hook that was asked for, or none: then gradients are added and divided, exactly."""

    hook: Callable[..., Any] | None = None
    state: object = None
    wrapper: Callable[..., Any] | None = None

    @classmethod
    def of(cls, arguments: Mapping[str, Any], cp_size: int | None) -> "CommHook":
        """The one among a strategy's arguments.

        Args:
            arguments: the strategy's.
            cp_size: ranks that share a sample; ``None``: not known yet.

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
            _require_mean(hook, state)
            if arguments.get("model_averaging_period") is not None:
                raise ConfigError(f"model_averaging_period: {_APART}")
        return cls(hook, state, wrapper)

    def register(self, wrapped: DistributedDataParallel, group: dist.ProcessGroup) -> None:
        """Have gradients averaged by it; ``group`` are all ranks that train the model.

        Raises:
            ConfigError: what DistributedDataParallel or this device refuses, or a hook over fewer ranks.
        """
        if self.hook is None:
            wrapped.register_comm_hook(group, sum_then_divide)
            return
        _require_all_ranks(self.state, group)
        hook = self.hook if self.wrapper is None else self.wrapper(self.hook)
        try:
            wrapped.register_comm_hook(self.state, hook)
        except (TypeError, ValueError, KeyError, AttributeError) as refused:
            raise ConfigError(
                f"DistributedDataParallel refuses ddp_comm_hook={_name(hook)}: {refused} A hook is a "
                "function hook(state, bucket: GradBucket) that gives a torch.futures.Future of the averaged "
                "buffer; without one gradients are averaged exactly."
            ) from refused


def _require_mean(hook: Callable[..., Any] | None, state: object) -> None:
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
        raise ConfigError(f"ddp_comm_hook={_name(hook)}: {_APART}")


def _require_all_ranks(state: object, group: dist.ProcessGroup) -> None:
    """Hooks have their group as their state, or in it; ``None`` is the world."""
    own = getattr(state, "process_group", state)
    if isinstance(own, dist.ProcessGroup) and own.size() != group.size():
        raise ConfigError(
            f"ddp_comm_state has a group of {own.size()} ranks, but {group.size()} train the model, and the "
            "gradients of all have to be averaged. Leave the group out: None is all of them."
        )


def _name(hook: object) -> str:
    return getattr(hook, "__qualname__", repr(hook))


_APART = (
    "local SGD lets ranks step apart and averages their weights later, but ranks that share a sample hold "
    "parts of one gradient. Leave it out; accumulate_grad_batches reduces less often, and fp16_compress_hook "
    "sends half. With context_parallel_size=1 no sample is shared, and local SGD works."
)


# DistributedDataParallel's own options among a strategy's arguments.


def without_defaults(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that say something: LightningCLI passes every argument that it finds, at its default."""
    parameters = inspect.signature(DistributedDataParallel).parameters
    return {
        name: value
        for name, value in options.items()
        if name not in parameters or value is not parameters[name].default
    }


def require_known(options: Mapping[str, Any]) -> None:
    """Refuse what is left of the strategy's arguments unless DistributedDataParallel takes it.

    Raises:
        ConfigError: naming what it does not take, before any process starts.
    """
    known = _arguments(DistributedDataParallel) - {"module", "device_ids", "process_group"}
    check_known_arguments(
        sorted(set(options) - known),
        [item.name for item in fields(StrategyConfig)],
        sorted(known | _arguments(DDPStrategy)),
    )


def _arguments(made: type) -> set[str]:
    return set(inspect.signature(made).parameters) - {"kwargs"}


def require_ddp(data_parallel: str, options: Mapping[str, Any], hook: Mapping[str, Any]) -> None:
    """Refuse DistributedDataParallel's own options with another engine.

    Args:
        data_parallel: the engine.
        options: what was passed for DistributedDataParallel.
        hook: what was passed for its communication hook.

    Raises:
        ConfigError: naming them.
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

"""Initial values of models that were built on the meta device, once they are sharded.

One module after the other, in the order in which they were built, gets its own parameters whole, sets them
as it would have done, and keeps its rank's part. So one module's parameters is all that is ever whole, and
modules that draw random numbers in ``reset_parameters`` draw those of one process with the same seed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from lightning_cp.checkpoint.pretrained.allocate import materialize
from lightning_cp.checkpoint.pretrained.fresh import (
    Initialize,
    left_unset,
    own_on_meta,
    same_as_first,
    ways_to_set,
)
from lightning_cp.checkpoint.pretrained.whole import Whole
from lightning_cp.errors import ConfigError


def is_on_meta(module: nn.Module) -> bool:
    """True if any parameter or buffer has no values."""
    return any(x.is_meta for x in [*module.parameters(), *module.buffers()])


def is_sharded(module: nn.Module) -> bool:
    """True if a part of it was given to FSDP; by names, as none of it need be imported."""
    kinds = {kind.__name__ for part in module.modules() for kind in type(part).__mro__}
    return bool(kinds & {"FSDPModule", "FullyShardedDataParallel"})


def require_values(module: nn.Module, data_parallel: str) -> None:
    """Refuse a model on the meta device, where nothing gives it values, and one that is sharded already.

    Raises:
        ConfigError: naming what does.
    """
    if is_sharded(module):
        raise ConfigError(
            f"{type(module).__name__} is sharded already (by fully_shard or FSDP, or by an earlier run that "
            f"shards), and data_parallel={data_parallel!r} keeps it whole on every rank. Use "
            "data_parallel='fsdp' for this run too; or build it again, unsharded, and load a full "
            "checkpoint of it."
        )
    if is_on_meta(module):
        raise ConfigError(
            f"{type(module).__name__} is on the meta device, which data_parallel={data_parallel!r} cannot "
            "train. Build it on a real device, pass pretrained=, or use data_parallel='fsdp', which "
            "initialises each rank's part by itself."
        )


def initialise(
    model: nn.Module, device: torch.device, group: dist.ProcessGroup, *, offload: bool = False
) -> None:
    """Give everything on the meta device memory and values: those of the group's first rank.

    Args:
        model: sharded already.
        device: where it computes, and where values are drawn.
        group: ranks that train one model.
        offload: parameters live in host memory.

    Raises:
        ConfigError: a module that nothing initialises, or that leaves values out.
    """
    unset = own_on_meta(model)
    owners = [(name, m) for name, m in model.named_modules() if m in unset]
    ways = _ways(model, owners)
    materialize(model, torch.device("cpu") if offload else device, None)
    for _, module in owners:
        module._buffers.update(
            {k: x.to(device) for k, x in module._buffers.items() if x is not None}
        )
    done: set[int] = set()
    for name, module in owners:
        # tied: the first one's values are kept, and the others are drawn as in one process
        first = [x for x in unset[module] if id(getattr(module, x)) not in done]
        done.update(id(getattr(module, x)) for x in first)
        again = [x for x in unset[module] if x not in first]
        whole = Whole(module, first, name, again=again)
        with torch.no_grad():
            with whole.block(device):
                with whole.must_not_read(ConfigError):
                    left = left_unset(module, unset[module], ways[module], name)
                _require_set(name or type(module).__name__, left)
                values = whole.values()
            same_as_first([*values.values()], device, group)
            whole.keep(values)


def _ways(
    model: nn.Module, owners: Sequence[tuple[str, nn.Module]]
) -> dict[nn.Module, list[Initialize]]:
    ways = ways_to_set(model, (owner for _, owner in owners))
    for name, owner in owners:
        if not ways[owner]:
            raise ConfigError(
                f"{name or type(owner).__name__} ({type(owner).__name__}) was built on the meta device, and "
                "nothing says what its values are. Give it a method reset_parameters() that sets its own "
                "parameters and buffers, build it on a real device, or pass pretrained=."
            )
    return ways


def _require_set(name: str, left: Sequence[str]) -> None:
    if left:
        raise ConfigError(
            f"{name} left {', '.join(left)} without values when it was initialised. Have its "
            "reset_parameters() set all of its own parameters and buffers, or build it on a real device."
        )

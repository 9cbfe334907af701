"""The largest scores of each layer since the last step: of this rank, then of all."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist

from lightning_cp.comm.objects import World
from lightning_cp.errors import ConfigError, NonFiniteError
from lightning_cp.optim.qk_layers import Layer

SHOWN = 6
"""Names in a message."""


class Maxima:
    """Of query heads, by layer; the same layers on every rank."""

    def __init__(self, layers: Mapping[str, Layer]) -> None:
        self._layers = layers
        self._noted: dict[str, torch.Tensor] = {}
        self.heads: dict[str, int] = {}
        """Query heads of each layer, of all tensor-parallel ranks, as calls have told."""
        self._settled = False

    def note(
        self, layer: str, maxima: torch.Tensor, head_dim: int | None, tp_rank: int, tp_size: int
    ) -> None:
        """See ``QKClip.note``."""
        known = self._layers.get(layer)
        if known is None:
            raise ConfigError(f"QK-clip knows no layer {layer!r}. It has: {_listed(self._layers)}.")
        if maxima.dim() != 1 or not len(maxima):
            raise ConfigError(
                f"largest scores of {layer} are [heads], got a tensor of shape {list(maxima.shape)}: take "
                "the maximum over the batch and over tokens."
            )
        heads, first = _place(known, len(maxima), head_dim, tp_rank, tp_size)
        known.kv_heads(heads)  # they divide
        before = self.heads.setdefault(layer, heads)
        if before != heads:
            raise ConfigError(
                f"{layer} had {before} query heads in one call, and {heads} in another. "
                "Use one module for each number of heads."
            )
        found = self._noted.get(layer)
        if found is None:
            found = maxima.new_full((heads,), -torch.inf, dtype=torch.float32)
            self._noted[layer] = found
        own = found[first : first + len(maxima)]
        own.copy_(torch.maximum(own, maxima.detach().to(found)))

    def forget(self) -> None:
        """A step is over."""
        self._noted.clear()

    def of_all_ranks(self) -> dict[str, list[float]]:
        """The largest of every rank, in one message; then nothing is noted any more.

        Raises:
            ConfigError: no rank has noted anything of some layer.
            NonFiniteError: a score is NaN or infinite.
        """
        noted, self._noted = self._noted, {}
        self._settle()
        parts = [self._of_layer(noted, name) for name in self._layers]
        packed = torch.cat([x.to(_device(parts)) for x in parts])
        packed = torch.where(
            packed.isnan(), torch.inf, packed
        )  # a maximum may lose what is no number
        if World().size > 1:
            dist.all_reduce(packed, op=dist.ReduceOp.MAX)
        values, sizes = packed.tolist(), [len(x) for x in parts]
        found: dict[str, list[float]] = {}
        for name, size in zip(self._layers, sizes, strict=True):
            found[name], values = values[:size], values[size:]
        self._require(found)
        return found

    def _of_layer(self, noted: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
        found = noted.get(name)
        return torch.full((self.heads[name],), -torch.inf) if found is None else found

    def _settle(self) -> None:
        """Once: how many heads each layer has, also for ranks that have not seen it called."""
        if self._settled:
            return
        every = World().gather(self.heads)
        for told in every:
            for name, heads in told.items():
                if self.heads.setdefault(name, heads) != heads:
                    counts = sorted({of[name] for of in every if name in of})
                    raise ConfigError(
                        f"ranks have different numbers of heads in {name}: {counts}. "
                        "Build the same model on all ranks."
                    )
        missing = [name for name in self._layers if name not in self.heads]
        if missing:
            raise _nothing_of(missing)
        self._settled = True

    def _require(self, found: Mapping[str, list[float]]) -> None:
        missing = [name for name, values in found.items() if max(values) == -math.inf]
        if missing:
            raise _nothing_of(missing)
        bad = {
            name: [head for head, x in enumerate(values) if x == math.inf]
            for name, values in found.items()
        }
        told = [
            f"{name}: heads {', '.join(map(str, heads))}" for name, heads in bad.items() if heads
        ]
        if told:
            raise NonFiniteError(
                f"the largest attention scores are NaN or infinite ({_listed(told, '; ')}). Nothing was "
                "changed. Look for the first loss that is not finite; lower the learning rate, or tau."
            )


def _place(
    layer: Layer, count: int, head_dim: int | None, tp_rank: int, tp_size: int
) -> tuple[int, int]:
    """All query heads of a layer, and the first of those that a call had."""
    rows = layer.query[0].size
    heads = count if head_dim is None else rows // head_dim
    if head_dim is not None and rows % head_dim:
        heads = 0
    if heads and count * tp_size == heads:
        return heads, tp_rank * count
    if heads and count == heads:
        return heads, 0
    shared = f" of tensor-parallel rank {tp_rank} of {tp_size}" if tp_size > 1 else ""
    raise ConfigError(
        f"{layer.name}: a call{shared} had {count} query heads of {head_dim or 'unknown'} rows, and the "
        f"query projection has {rows} rows. QK-clip scales projections whose output is the queries of all "
        "heads, one after the other."
    )


def _nothing_of(layers: list[str]) -> ConfigError:
    return ConfigError(
        f"QK-clip has no largest scores of {_listed(layers)} since the last step ({len(layers)} layers), "
        "nothing was changed. They come from attention under one of this package's strategies, to which the "
        "optimizer was given (Trainer, or fabric.setup); report those of your own attention with "
        "QKClip.note(layer, maxima) (context_parallel_attention(..., return_max_logits=True) gives them); "
        "leave layers that take no part out with layers=."
    )


def _device(parts: list[torch.Tensor]) -> torch.device:
    """Where messages of the world travel from, or all is."""
    if World().size > 1 and dist.get_backend() == "gloo":
        return torch.device("cpu")
    found = next((x.device for x in parts if x.device.type != "cpu"), None)
    if found is None and World().size > 1 and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return found or torch.device("cpu")


def _listed(names: Iterable[str], between: str = ", ") -> str:
    every = list(names)
    return between.join(every[:SHOWN]) + f"{between}..." * (len(every) > SHOWN)

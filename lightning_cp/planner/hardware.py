"""``hardware.json``: what a machine reaches, as far as a planner needs to know it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar

from lightning_cp.errors import ConfigError
from lightning_cp.layout.cost import CostModel
from lightning_cp.planner.rates import ComputeRate, KernelRate, LinkRate, OverheadRate

SCHEMA = 1
"""Of the file. A reader refuses other numbers; fields may be added without a new one."""
ITEMSIZE = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Hardware:
    """What a machine reaches.

    Raises:
        ConfigError: a number that is not positive and finite, naming it.
    """

    device_type: str
    device_name: str
    devices: int
    """That were measured together, one process each."""
    devices_per_node: int
    memory_bytes: int
    """Of one device; on CPU an equal share of the node's."""
    torch_version: str
    backend: str
    """Of the process group: gloo or nccl."""
    kernels: tuple[KernelRate, ...] = ()
    links: tuple[LinkRate, ...] = ()
    """Empty where there was one device."""
    kernel_lengths: tuple[KernelRate, ...] = ()
    """Of the same kernels at every length that was measured."""
    compute: tuple[ComputeRate, ...] = ()
    overheads: tuple[OverheadRate, ...] = ()

    def __post_init__(self) -> None:
        for part in (self, *(part for name in PARTS for part in getattr(self, name))):
            for name, value in _numbers(part).items():
                if not math.isfinite(value) or value <= 0:
                    raise ConfigError(
                        f"hardware: {name} of {type(part).__name__} must be a positive number, got {value}. "
                        "Correct it in the file."
                    )

    def save(self, file: Path) -> None:
        """Write the JSON file."""
        file.write_text(json.dumps({"schema": SCHEMA, **asdict(self)}, indent=2) + "\n")

    @classmethod
    def load(cls, file: Path | str) -> Hardware:
        """Read the JSON file.

        Raises:
            ConfigError: no such file, or not one of this schema; names what is wrong.
        """
        given = _read(Path(file))
        schema = given.pop("schema", None)
        if schema != SCHEMA:
            raise ConfigError(
                f"{file} has schema {schema}, and this version reads {SCHEMA}. {_AGAIN}"
            )
        parts = {
            name: tuple(_made(kind, one, where) for one, where in _list(given, name, file))
            for name, kind in PARTS.items()
            if name in given or name in NEEDED
        }
        return _made(cls, {**given, **parts}, str(file))

    def kernel(self, dtype: str, head_dim: int, mask: str = "causal") -> KernelRate:
        """The fastest kernel that was measured.

        Raises:
            ConfigError: nothing was measured with that; names what was.
        """
        for rate in self.kernels:
            if (rate.dtype, rate.head_dim, rate.mask) == (dtype, head_dim, mask):
                return rate
        if not self.kernels:
            raise ConfigError(
                f"hardware: kernels of {self.device_name} is empty, so attention cannot be timed. {_AGAIN}"
            )
        there = "; ".join(f"{r.dtype}, head dim {r.head_dim}, {r.mask}" for r in self.kernels)
        raise ConfigError(
            f"no kernel was measured with {dtype}, head dim {head_dim}, {mask}. There is: "
            f"{there}. Measure it: python -m lightning_cp.bench dtype={dtype} head_dim={head_dim}"
        )

    def link(self, axis: str, collective: str, size: int | None = None) -> LinkRate:
        """A collective along an axis of some ranks; of the largest size that was measured by default.

        Raises:
            ConfigError: nothing was measured with that; names what was.
        """
        found = [r for r in self.links if (r.axis, r.collective) == (axis, collective)]
        fitting = [rate for rate in found if size in (None, rate.ranks)]
        if not fitting:
            there = ", ".join(f"{r.collective} along {r.axis} of {r.ranks}" for r in self.links)
            raise ConfigError(
                f"{collective} along {axis}{f' of {size} ranks' if size else ''} was not measured. There is: "
                f"{there or 'none, which needs two devices'}."
            )
        return max(fitting, key=lambda rate: rate.ranks)

    def cost_model(
        self, *, heads: int, kv_heads: int, head_dim: int, dtype: str, ring_size: int | None = None
    ) -> CostModel:
        """What this machine's ring costs a model, for ``choose_layout(..., cost=...)``.

        Args:
            heads: query heads of a Ulysses rank.
            kv_heads: key/value heads of it.
            head_dim: entries per head.
            dtype: of q, k and v.
            ring_size: of which ring; of the largest that was measured by default.

        Raises:
            ConfigError: that was not measured.
        """
        kernel, ring = self.kernel(dtype, head_dim), self.link("ring", "p2p", ring_size)
        return CostModel.of_machine(
            kernel.forward_tflops * 1e12,
            ring.gigabytes_per_second * 1e9,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            itemsize=ITEMSIZE[dtype],
            seconds_per_hop=ring.latency_seconds,
        )


T = TypeVar("T", KernelRate, LinkRate, ComputeRate, OverheadRate, Hardware)
PARTS: dict[str, type] = {
    "kernels": KernelRate,
    "links": LinkRate,
    "kernel_lengths": KernelRate,
    "compute": ComputeRate,
    "overheads": OverheadRate,
}
NEEDED = ("kernels", "links")
"""Lists that every file has; others came later."""
_AGAIN = "python -m lightning_cp.bench writes a new one."


def _read(file: Path) -> dict[str, Any]:
    try:
        given = json.loads(file.read_text())
    except OSError as error:
        raise ConfigError(f"{file} cannot be read ({error.strerror}). {_AGAIN}") from error
    except ValueError as error:
        raise ConfigError(f"{file} is no JSON ({error}). {_AGAIN}") from error
    if not isinstance(given, dict):
        raise ConfigError(f"{file} is a JSON {type(given).__name__}, not an object. {_AGAIN}")
    return given


def _list(given: Mapping[str, Any], name: str, file: Path | str) -> list[tuple[Any, str]]:
    """The objects of a list, each with its place for messages."""
    value = given.get(name)
    if not isinstance(value, list) or not all(isinstance(part, dict) for part in value):
        raise ConfigError(f"{file}: {name} must be a list of objects. {_AGAIN}")
    return [(part, f"{file}: {name}[{at}]") for at, part in enumerate(value)]


def _made(kind: type[T], given: Mapping[str, Any], where: str) -> T:
    """An object of its fields; others, of later versions, are left out."""
    number = (int, float)
    kinds = {"str": str, "int": int, "float": number, "float | None": (*number, NoneType)}
    values: dict[str, Any] = {}
    for field in fields(kind):
        if field.name not in given and field.default is not MISSING:
            continue  # a file of an earlier version
        value, wanted = given.get(field.name), kinds.get(str(field.type), tuple)
        if not isinstance(value, wanted) or isinstance(value, bool):  # type: ignore[arg-type]
            shown = "nothing" if field.name not in given else repr(value)
            raise ConfigError(f"{where}: {field.name} must be {field.type}, got {shown}. {_AGAIN}")
        values[field.name] = value
    return kind(**values)


def _numbers(part: object) -> dict[str, float]:
    return {name: value for name, value in vars(part).items() if isinstance(value, int | float)}

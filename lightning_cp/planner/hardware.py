"""``hardware.json``: the measured rates of a machine that the planner needs."""

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


@dataclass(frozen=True)
class KernelRate:
    """The fastest kernel for one dtype, head dim and mask, at its fastest sequence length."""

    kernel: str
    dtype: str
    head_dim: int
    mask: str
    """full, causal, window (an eighth of the sequence) or packed (log-normal documents)."""
    tokens: int
    forward_tflops: float
    """10^12 operations per second of one device, 4 x head dim for each visible pair and head."""
    backward_tflops: float
    """The same for backward, with 2.5 times as many operations."""


@dataclass(frozen=True)
class KernelCrossover:
    """The fastest kernel of a dtype, head dim and mask from a length on, forward and backward together.

    ``kernel="auto"`` reads them, from the file that ``LIGHTNING_CP_HARDWARE`` names.
    """

    dtype: str
    head_dim: int
    mask: str
    """As in :class:`KernelRate`."""
    tokens: int
    """The length of the measurement, up to the next entry's."""
    kernel: str


@dataclass(frozen=True)
class LinkRate:
    """Rate of one collective along one axis of the mesh."""

    axis: str
    """ring, ulysses or loss."""
    collective: str
    """p2p, all-gather, reduce-scatter; all-to-all; all-reduce."""
    ulysses_size: int
    ring_size: int
    gigabytes_per_second: float
    """10^9 bytes per second that a rank sends to others, at the fastest message size."""
    latency_seconds: float
    """Latency of the smallest message."""
    cpu_seconds_per_gigabyte: float | None = None
    """CPU-seconds of a rank per 10^9 bytes sent, with as many received; ``None``: not measured."""

    @property
    def ranks(self) -> int:
        """Ranks of the axis."""
        sizes = {"ulysses": self.ulysses_size, "ring": self.ring_size}
        return sizes.get(self.axis, self.ulysses_size * self.ring_size)


@dataclass(frozen=True)
class ComputeRate:
    """Rates of a device outside of attention, for one dtype. On CPU, of one core."""

    dtype: str
    product_tflops: float
    """10^12 operations per second of matrix products, forward and backward together."""
    layer_gigabytes_per_second: float
    """Norms, rotary positions, activations, residuals, in the bytes that the planner counts for them."""
    loss_gigabytes_per_second: float
    """Cross-entropy, likewise."""
    optimizer_gigabytes_per_second: float
    """AdamW step, likewise."""


@dataclass(frozen=True)
class OverheadRate:
    """Time of a step independent of its length, in one mode: Python, launches, smallest messages."""

    mode: str
    """alone, ulysses, ring or zigzag_llama3."""
    ranks: int
    """Ranks that share a sequence."""
    layer_seconds: float
    """Seconds of each layer, forward and backward."""
    step_seconds: float
    """Seconds of a step outside of layers."""
    call_seconds: float | None = None
    """Additional seconds of a layer per collective call, compared with one rank. ``None``: not measured."""


SCHEMA = 1
"""Version of the file. Readers refuse other numbers; new fields need no new number."""
ITEMSIZE = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Hardware:
    """Measured rates of a machine.

    Raises:
        ConfigError: a number that is not positive and finite, naming it.
    """

    device_type: str
    device_name: str
    devices: int
    """Devices that were measured together, one process each."""
    devices_per_node: int
    memory_bytes: int
    """Memory of one device; on CPU an equal share of the node's."""
    torch_version: str
    backend: str
    """Backend of the process group: gloo or nccl."""
    kernels: tuple[KernelRate, ...] = ()
    links: tuple[LinkRate, ...] = ()
    """Empty for a single device."""
    kernel_lengths: tuple[KernelRate, ...] = ()
    """Rates of the same kernels at every measured length."""
    compute: tuple[ComputeRate, ...] = ()
    overheads: tuple[OverheadRate, ...] = ()
    crossovers: tuple[KernelCrossover, ...] = ()
    network_cards: int | None = None
    """Network cards of a node; ``None``: one for each device."""

    def __post_init__(self) -> None:
        for part in (self, *(part for name in LISTS for part in getattr(self, name))):
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
            ConfigError: no such file, or not of this schema; names the problem.
        """
        given = _read(Path(file))
        schema = given.pop("schema", None)
        if schema != SCHEMA:
            raise ConfigError(
                f"{file} has schema {schema}, and this version reads {SCHEMA}. {_RERUN}"
            )
        parts = {
            name: tuple(_parse(kind, one, where) for one, where in _list(given, name, file))
            for name, kind in LISTS.items()
            if name in given or name in REQUIRED_LISTS
        }
        return _parse(cls, {**given, **parts}, str(file))

    def kernel(self, dtype: str, head_dim: int, mask: str = "causal") -> KernelRate:
        """Return the fastest measured kernel.

        Raises:
            ConfigError: no measurement for these arguments; lists the existing ones.
        """
        for rate in self.kernels:
            if (rate.dtype, rate.head_dim, rate.mask) == (dtype, head_dim, mask):
                return rate
        if not self.kernels:
            raise ConfigError(
                f"hardware: kernels of {self.device_name} is empty, so attention cannot be timed. {_RERUN}"
            )
        there = "; ".join(f"{r.dtype}, head dim {r.head_dim}, {r.mask}" for r in self.kernels)
        raise ConfigError(
            f"no kernel was measured with {dtype}, head dim {head_dim}, {mask}. There is: "
            f"{there}. Measure it: python -m lightning_cp.bench dtype={dtype} head_dim={head_dim}"
        )

    def link(self, axis: str, collective: str, size: int | None = None) -> LinkRate:
        """Return the rate of a collective along an axis; by default of the largest measured size.

        Raises:
            ConfigError: no measurement for these arguments; lists the existing ones.
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
        """Return the cost model of this machine's ring, for ``choose_layout(..., cost=...)``.

        Args:
            heads: query heads of a Ulysses rank.
            kv_heads: key/value heads of a Ulysses rank.
            head_dim: entries per head.
            dtype: of q, k and v.
            ring_size: size of the ring; by default the largest measured one.

        Raises:
            ConfigError: no measurement for these arguments.
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


T = TypeVar("T", KernelRate, KernelCrossover, LinkRate, ComputeRate, OverheadRate, Hardware)
LISTS: dict[str, type] = {
    "kernels": KernelRate,
    "links": LinkRate,
    "kernel_lengths": KernelRate,
    "compute": ComputeRate,
    "overheads": OverheadRate,
    "crossovers": KernelCrossover,
}
REQUIRED_LISTS = ("kernels", "links")
"""Lists that every file has; later versions added the others."""
_RERUN = "python -m lightning_cp.bench writes a new one."


def _read(file: Path) -> dict[str, Any]:
    try:
        given = json.loads(file.read_text())
    except OSError as error:
        raise ConfigError(f"{file} cannot be read ({error.strerror}). {_RERUN}") from error
    except ValueError as error:
        raise ConfigError(f"{file} is not valid JSON ({error}). {_RERUN}") from error
    if not isinstance(given, dict):
        raise ConfigError(f"{file} is a JSON {type(given).__name__}, not an object. {_RERUN}")
    return given


def _list(given: Mapping[str, Any], name: str, file: Path | str) -> list[tuple[Any, str]]:
    """Return the objects of a list, each with its place for messages."""
    value = given.get(name)
    if not isinstance(value, list) or not all(isinstance(part, dict) for part in value):
        raise ConfigError(f"{file}: {name} must be a list of objects. {_RERUN}")
    return [(part, f"{file}: {name}[{at}]") for at, part in enumerate(value)]


def _parse(kind: type[T], given: Mapping[str, Any], where: str) -> T:
    """Make an object from its fields; ignores unknown fields of later versions."""
    number = (int, float)
    kinds = {
        "str": str,
        "int": int,
        "float": number,
        "int | None": (int, NoneType),
        "float | None": (*number, NoneType),
    }
    values: dict[str, Any] = {}
    for field in fields(kind):
        if field.name not in given and field.default is not MISSING:
            continue  # a file of an earlier version
        value, wanted = given.get(field.name), kinds.get(str(field.type), tuple)
        if not isinstance(value, wanted) or isinstance(value, bool):  # type: ignore[arg-type]
            shown = "nothing" if field.name not in given else repr(value)
            raise ConfigError(f"{where}: {field.name} must be {field.type}, got {shown}. {_RERUN}")
        values[field.name] = value
    return kind(**values)


def _numbers(part: object) -> dict[str, float]:
    return {name: value for name, value in vars(part).items() if isinstance(value, int | float)}

"""The settings of a run, resolved for this machine and checked."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch

from lightning_cp.bench.methods import AttentionCase
from lightning_cp.bench.processes import TorchrunRank
from lightning_cp.errors import ConfigError

SUITES = ("kernels", "links", "modes", "compute", "overheads")
SINGLE_DEVICE_SUITES = ("kernels", "compute", "overheads")
"""The suites that one device can run."""
MASKS = ("full", "causal", "window", "packed")
DTYPES = {str(x).removeprefix("torch."): x for x in (torch.float32, torch.bfloat16, torch.float16)}
DTYPES["float64"] = torch.float64
KIB = 1 << 10
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "cpu": {
        "tokens": (1024, 2048),
        "heads": 8,
        "kv_heads": 8,
        "head_dim": 64,
        "dtype": "float32",
        "message_bytes": (64 * KIB, 1024 * KIB, 16 * 1024 * KIB),
        "repeats": 3,
    },
    "cuda": {
        "tokens": (8192, 32768, 65536),
        "heads": 32,
        "kv_heads": 8,
        "head_dim": 128,
        "dtype": "bfloat16",
        "message_bytes": (64 * KIB, 1024 * KIB, 16 * 1024 * KIB, 256 * 1024 * KIB),
        "repeats": 10,
    },
}
"""The values of ``auto``, by device type."""


@dataclass(frozen=True)
class BenchSettings:
    """The resolved settings of ``configs/bench/bench.yaml``."""

    suites: tuple[str, ...]
    device_type: str
    devices: int
    tokens: tuple[int, ...]
    """In ascending order."""
    heads: int
    kv_heads: int
    head_dims: tuple[int, ...]
    dtypes: tuple[str, ...]
    documents: int
    masks: tuple[str, ...]
    kernel: str
    modes: tuple[str, ...]
    """Names; empty for all."""
    message_bytes: tuple[int, ...]
    repeats: int
    warm_up: int
    seconds_per_run: float

    @classmethod
    def of(cls, config: Mapping[str, Any], own: TorchrunRank | None = None) -> BenchSettings:
        """Resolve ``auto`` and check each setting separately.

        Args:
            config: see ``configs/bench/bench.yaml``.
            own: the place of this process if torchrun started it.

        Raises:
            ConfigError: an unknown value, or more devices than the machine has.
        """
        device_type = _device_type(config["device"])
        given = {
            **config,
            **{k: v for k, v in DEFAULTS[device_type].items() if config[k] == "auto"},
        }
        devices = _devices(given["devices"], device_type, own)
        auto = SUITES if devices > 1 else SINGLE_DEVICE_SUITES
        documents = _integer("documents", given["documents"], 0)
        masks = _names("masks", given["masks"], MASKS, MASKS if documents else MASKS[:-1])
        if "packed" in masks and not documents:
            raise ConfigError("masks=[packed] needs documents, and documents=0. Give documents=16.")
        return cls(
            suites=_names("suites", given["suites"], SUITES, auto),
            device_type=device_type,
            devices=devices,
            tokens=tuple(sorted(_integers("tokens", given["tokens"]))),
            heads=_integer("heads", given["heads"]),
            kv_heads=_integer("kv_heads", given["kv_heads"]),
            head_dims=_integers("head_dim", given["head_dim"]),
            dtypes=_names("dtype", given["dtype"], tuple(DTYPES), ()),
            documents=documents,
            masks=masks,
            kernel=str(given["kernel"]),
            modes=() if given["modes"] == "auto" else tuple(map(str, _many(given["modes"]))),
            message_bytes=_integers("message_bytes", given["message_bytes"]),
            repeats=_integer("repeats", given["repeats"]),
            warm_up=_integer("warm_up", given["warm_up"], 0),
            seconds_per_run=_positive("seconds_per_run", given["seconds_per_run"]),
        )

    def cases(self, ranks: int) -> list[AttentionCase]:
        """Return one dense causal sequence per dtype, head dim and length, shortest first."""
        every = product(self.dtypes, self.head_dims, self.tokens)
        return [
            AttentionCase(
                tokens,
                ranks,
                heads=self.heads,
                kv_heads=self.kv_heads,
                head_dim=head_dim,
                dtype=DTYPES[dtype],
                device_type=self.device_type,
            )
            for dtype, head_dim, tokens in every
        ]

    def masked(self, case: AttentionCase, mask: str) -> AttentionCase:
        """Return the case with one of ``MASKS``; a window reaches an eighth of the sequence back."""
        if mask == "packed":
            return replace(case, packed=self.documents)
        if mask == "window":
            return replace(case, window=(max(case.tokens // 8, 1), 0))
        return replace(case, causal=mask == "causal")


def _device_type(asked: str) -> str:
    there = torch.cuda.is_available()
    if asked == "auto":
        return "cuda" if there else "cpu"
    if asked not in DEFAULTS:
        raise ConfigError(
            f"device must be auto, cpu or cuda, got {asked!r}. "
            "auto takes CUDA where there is a GPU."
        )
    if asked == "cuda" and not there:
        raise ConfigError("device=cuda, but PyTorch finds no CUDA device here. device=cpu works.")
    return asked


def _devices(asked: object, device_type: str, own: TorchrunRank | None) -> int:
    """Return the number of processes that measure together."""
    here = torch.cuda.device_count() if device_type == "cuda" else None
    if own is not None:
        if asked not in ("auto", own.count):
            raise ConfigError(
                f"devices={asked}, but torchrun has started {own.count} processes, and these measure. Leave "
                "devices out, or start as many."
            )
        if here is not None and own.local_rank >= here:
            raise ConfigError(
                f"torchrun has started process {own.local_rank} on a node with {here} GPUs: start as many as "
                f"there are, --nproc-per-node={here}."
            )
        return own.count
    if asked == "auto":
        return here or _power_of_two(cores())
    devices = _integer("devices", asked)
    if here is not None and devices > here:
        raise ConfigError(
            f"devices={devices}, but this machine has {here} GPUs. At most devices={here} works; more nodes "
            "take part with torchrun."
        )
    return devices


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _power_of_two(number: int) -> int:
    """Return processes for a number of cores: a power of two, which divides heads and lengths, at least 2."""
    return min(max(1 << (number.bit_length() - 1), 2), 8)


def _many(value: object) -> list[object]:
    """Return a value or values as a list."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        return [value]
    return list(value)


def _names(
    name: str, value: object, known: tuple[str, ...], auto: tuple[str, ...]
) -> tuple[str, ...]:
    if value == "auto":
        return auto
    given = tuple(map(str, _many(value)))
    unknown = [each for each in given if each not in known]
    if unknown or not given:
        raise ConfigError(
            f"{name}={_shown(given)} names {', '.join(unknown) or 'nothing'}. Known: {', '.join(known)}."
        )
    return tuple(dict.fromkeys(given))


def _integers(name: str, value: object) -> tuple[int, ...]:
    given = tuple(_integer(name, each) for each in _many(value))
    if not given:
        raise ConfigError(f"{name} is an empty list: name one or more, or {name}=auto.")
    return tuple(dict.fromkeys(given))


def _integer(name: str, value: object, least: int = 1) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        auto = ", or auto" if least else ""  # what may be 0 says what it is
        raise ConfigError(
            f"{name} must be an integer of at least {least}{auto}; got {value!r}. "
            f"Give one on the command line: {name}=1."
        )
    return value


def _positive(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ConfigError(
            f"{name} must be a number above 0, got {value!r}. "
            f"Give one on the command line: {name}=1.0."
        )
    return float(value)


def _shown(names: Iterable[str]) -> str:
    return f"[{','.join(names)}]"

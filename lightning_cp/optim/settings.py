"""Muon's settings and their checks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from lightning_cp.errors import ConfigError
from lightning_cp.optim.newton_schulz import COEFFICIENTS, EPS, STEPS

# Checks of single settings.


def check_numbers(values: Mapping[str, Any], fits: Callable[[float], bool], wanted: str) -> None:
    """Check that settings are finite numbers in range.

    Args:
        values: settings by name.
        fits: True for a number in range.
        wanted: the range in words, such as ``above 0``.

    Raises:
        ConfigError: naming the first setting that fails.
    """
    for name, x in values.items():
        if not is_number(x) or not fits(x):
            raise ConfigError(
                f"{name} is a number {wanted}, got {x!r}. Leave it out for the default."
            )


def check_known(name: str, value: object, known: tuple[str, ...]) -> None:
    """Check that a setting is one of the known values.

    Raises:
        ConfigError: naming the known values.
    """
    if value not in known:
        raise ConfigError(f"{name}={value!r} is unknown. Known: {', '.join(known)}.")


def is_number(x: object) -> bool:
    """True for a finite number that is not a bool."""
    return isinstance(x, (int, float)) and not isinstance(x, bool) and math.isfinite(x)


ADJUSTMENTS = ("match_rms_adamw", "original")
IMPLEMENTATIONS = ("owner", "reference")
MIB = 1 << 20
DTYPES = (torch.bfloat16, torch.float32, torch.float64)
"""Dtypes in which gradients of any size are finite, which excludes float16."""
MOST_STEPS = 99
"""The limit of torch.optim.Muon."""


@dataclass(frozen=True)
class MuonSettings:
    """Arguments of :class:`lightning_cp.optim.Muon`, described there."""

    lr: float = 2e-3
    weight_decay: float = 0.1
    momentum: float = 0.95
    nesterov: bool = True
    ns_steps: int = STEPS
    ns_coefficients: tuple[float, float, float] = COEFFICIENTS
    eps: float = EPS
    ns_dtype: torch.dtype | str = torch.bfloat16
    adjust_lr_fn: str = "match_rms_adamw"
    adamw_lr: float | None = None
    adamw_weight_decay: float | None = None
    betas: tuple[float, float] = (0.9, 0.95)
    adamw_eps: float = 1e-8
    impl: str = "owner"
    chunk_mib: float = 256
    check_finite: bool = True

    def checked(self) -> MuonSettings:
        """The same settings, with a dtype, and defaults taken from those of matrices.

        Raises:
            ConfigError: naming the setting, its value and valid values.
        """
        check_numbers(
            {"lr": self.lr, "weight_decay": self.weight_decay}, lambda x: x >= 0, "at least 0"
        )
        optional = {"adamw_lr": self.adamw_lr, "adamw_weight_decay": self.adamw_weight_decay}
        given = {name: x for name, x in optional.items() if x is not None}
        check_numbers(given, lambda x: x >= 0, "at least 0, or None for that of matrices")
        shares = {"momentum": self.momentum}
        pair = _numbers("betas", self.betas, 2)
        shares |= {f"betas[{at}]": x for at, x in enumerate(pair)}
        check_numbers(shares, lambda x: 0 <= x < 1, "at least 0 and below 1")
        positive = {"eps": self.eps, "adamw_eps": self.adamw_eps, "chunk_mib": self.chunk_mib}
        check_numbers(positive, lambda x: x > 0, "above 0")
        if type(self.ns_steps) is not int or not 1 <= self.ns_steps <= MOST_STEPS:
            raise ConfigError(
                f"ns_steps is a whole number from 1 to {MOST_STEPS}, got {self.ns_steps!r}; 5 is usual."
            )
        coefficients = _numbers("ns_coefficients", self.ns_coefficients, 3)
        check_known("adjust_lr_fn", self.adjust_lr_fn, ADJUSTMENTS)
        check_known("impl", self.impl, IMPLEMENTATIONS)
        dtype = _dtype(self.ns_dtype)
        if self.impl == "reference" and dtype != torch.bfloat16:
            raise ConfigError(
                f"impl='reference' is torch.optim.Muon, which computes in bfloat16, got ns_dtype={dtype}. "
                "Leave ns_dtype, or use impl='owner'."
            )
        return replace(
            self,
            ns_dtype=dtype,
            ns_coefficients=coefficients,
            betas=pair,
            adamw_lr=self.lr if self.adamw_lr is None else self.adamw_lr,
            adamw_weight_decay=(
                self.weight_decay if self.adamw_weight_decay is None else self.adamw_weight_decay
            ),
        )

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which matrices are orthogonalised."""
        return _dtype(self.ns_dtype)

    @property
    def chunk_bytes(self) -> int:
        """The limit in bytes of whole matrices that an owner holds in a round."""
        return int(self.chunk_mib * MIB)

    @property
    def matrix_group(self) -> dict[str, Any]:
        """Settings of the group of matrices, named as in torch.optim.Muon."""
        names = ("lr", "weight_decay", "momentum", "nesterov", "ns_coefficients", "eps")
        names += ("ns_steps", "adjust_lr_fn")
        return {"kind": "muon", **{name: getattr(self, name) for name in names}}

    @property
    def adamw_group(self) -> dict[str, Any]:
        """Settings of the group of all other parameters, named as in torch.optim.AdamW."""
        rate, decay = self.adamw_lr, self.adamw_weight_decay
        given = {"lr": rate, "weight_decay": decay, "betas": self.betas, "eps": self.adamw_eps}
        return {"kind": "adamw", **given}


def _numbers(name: str, values: Any, many: int) -> Any:
    found = tuple(values) if isinstance(values, (list, tuple)) else ()
    if len(found) != many or not all(map(is_number, found)):
        raise ConfigError(f"{name} are {many} numbers, got {values!r}. Give them as a tuple.")
    return found


def _dtype(given: torch.dtype | str) -> torch.dtype:
    dtype = getattr(torch, given, None) if isinstance(given, str) else given
    if dtype not in DTYPES:
        raise ConfigError(
            f"ns_dtype={given!r} is no dtype to compute in. Use bfloat16 (usual), float32 or float64."
        )
    return dtype

"""The kernel protocol: attention of a list of tiles on one device, its capabilities, and selection.

Shapes: ``q_BLHD`` [batch, queries, heads, head dim]; ``k_BLKD``, ``v_BLKD`` [batch, keys, K/V
heads, head dim], heads a multiple of K/V heads; ``out_BLHD`` like q; ``lse_BHL`` [batch, heads,
queries], natural logarithm, float32 (float64 for float64 inputs), -inf where a query saw no key.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from lightning_cp.errors import ConfigError
from lightning_cp.kernels.merge import Accumulator
from lightning_cp.layout.tiles import Mask, Tile


@dataclass(frozen=True)
class Scores:
    """How scores are made from q and k: ``softmax_scale * q.k`` under ``mask``."""

    softmax_scale: float
    mask: Mask


@dataclass(frozen=True)
class Request:
    """What a call asks of a kernel."""

    device_type: str
    dtype: torch.dtype
    head_dim: int
    masks: frozenset[str]
    """Mask kinds of the tiles: full, causal, band."""
    needs: frozenset[str] = frozenset()
    """Score features beyond scale: softcap, alibi, sinks, dropout."""


@dataclass(frozen=True)
class Capabilities:
    """What a kernel declares that it can do, exactly."""

    device_types: frozenset[str] | None
    """``None``: wherever PyTorch runs."""
    dtypes: frozenset[torch.dtype]
    masks: frozenset[str]
    max_head_dim: int | None = None
    head_dim_multiple: int = 1
    features: frozenset[str] = frozenset()

    def refusal(self, request: Request) -> str | None:
        """Why the request is not covered, or ``None`` if it is."""
        if self.device_types is not None and request.device_type not in self.device_types:
            return f"runs on {_names(self.device_types)}, not {request.device_type}"
        if request.dtype not in self.dtypes:
            return f"takes {_names(map(str, self.dtypes))}, not {request.dtype}"
        if self.max_head_dim is not None and request.head_dim > self.max_head_dim:
            return f"takes head dims up to {self.max_head_dim}, not {request.head_dim}"
        if request.head_dim % self.head_dim_multiple:
            return f"takes head dims divisible by {self.head_dim_multiple}, not {request.head_dim}"
        if missing := request.masks - self.masks:
            return f"has no {_names(missing)} mask"
        if missing := request.needs - self.features:
            return f"has no {_names(missing)}"
        return None


class Kernel(Protocol):
    """Block attention on one device. Implementations never communicate."""

    @property
    def name(self) -> str:
        """The name users select it by."""
        ...

    @property
    def capabilities(self) -> Capabilities:
        """What it can do; a request outside of it is refused before any call."""
        ...

    def forward(
        self,
        q_BLHD: torch.Tensor,
        k_BLKD: torch.Tensor,
        v_BLKD: torch.Tensor,
        tiles: Sequence[Tile],
        scores: Scores,
        state: Accumulator,
    ) -> None:
        """Attend within each tile and merge the results into ``state``."""
        ...

    def backward(
        self,
        dout_BLHD: torch.Tensor,
        q_BLHD: torch.Tensor,
        k_BLKD: torch.Tensor,
        v_BLKD: torch.Tensor,
        out_BLHD: torch.Tensor,
        lse_BHL: torch.Tensor,
        tiles: Sequence[Tile],
        scores: Scores,
        dq_BLHD: torch.Tensor,
        dk_BLKD: torch.Tensor,
        dv_BLKD: torch.Tensor,
    ) -> None:
        """Add each tile's gradients to ``dq, dk, dv``, given the *merged* out and lse.

        ``out_BLHD`` has q's dtype; the gradients are float32 (float64 for float64 inputs).
        """
        ...


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that outputs, log-sum-exps and gradients are summed in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def kernels() -> dict[str, Kernel]:
    """Every kernel by name, fastest first."""
    from lightning_cp.kernels.aten import AtenCpuFlash, AtenCudaCudnn, AtenCudaFlash
    from lightning_cp.kernels.reference import ReferenceKernel

    found: tuple[Kernel, ...] = (
        AtenCudaFlash(),
        AtenCudaCudnn(),
        AtenCpuFlash(),
        ReferenceKernel(),
    )
    return {kernel.name: kernel for kernel in found}


ALIASES = {"aten": ("aten_cuda_flash", "aten_cuda_cudnn", "aten_cpu_flash")}
"""Names that stand for several kernels, tried in order."""


def select_kernel(name: str, request: Request) -> Kernel:
    """The first kernel among those that ``name`` stands for whose capabilities cover the request.

    Args:
        name: a kernel's name, ``aten`` for PyTorch's own operators, or ``auto`` for any.
        request: what is asked of it.

    Raises:
        ConfigError: an unknown name, or no kernel covers the request; says why for each.
    """
    every = kernels()
    if name != "auto" and name not in every and name not in ALIASES:
        known = ", ".join(["auto", *ALIASES, *every])
        raise ConfigError(f"unknown kernel {name!r}. Known: {known}.")
    names = tuple(every) if name == "auto" else ALIASES.get(name, (name,))
    refusals: list[str] = []
    for candidate in names:
        reason = every[candidate].capabilities.refusal(request)
        if reason is None:
            return every[candidate]
        refusals.append(f"{candidate} {reason}")
    raise ConfigError(
        f"no kernel can do what kernel={name!r} was asked: device {request.device_type}, "
        f"{request.dtype}, head dim {request.head_dim}, masks {_names(request.masks)}"
        + (f", {_names(request.needs)}" if request.needs else "")
        + f". Passed over: {'; '.join(refusals)}."
    )


def _names(values: Iterable[object]) -> str:
    return ", ".join(sorted(str(value) for value in values))

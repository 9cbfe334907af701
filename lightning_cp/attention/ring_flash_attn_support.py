"""Delegation to the ring-flash-attn package, for the calls that it computes exactly.

It also accepts calls that it computes wrongly (version 0.1.8): it applies a window to each hop separately, so
that outputs are wrong or NaN; in float32 its work buffer becomes the gradient of q; its plain ring rounds dq
to bfloat16 for all inputs; dropout masks differ between the ranks. Such calls are refused here.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType
from typing import Any, NoReturn

import numpy as np
import torch

from lightning_cp.attention.spec import AttentionSpec
from lightning_cp.errors import ConfigError
from lightning_cp.layout import SequenceLayout

DEVICE_TYPES = frozenset({"cuda"})
KERNELS = ("auto", "flash_attn", "flash_attn_2")
_NAME = "exchange='ring_flash_attn'"
DELEGATED_KERNELS = f"{_NAME}: that package computes attention, with its own kernels"
_ALIAS = "_lightning_cp_ring_flash_attn"
_MISSING = f"{_NAME} needs the packages ring-flash-attn and flash-attn. Install both"


@dataclass(frozen=True)
class Delegate:
    """The package's functions for one call: ``forward(group, q, k, v, ...)`` and ``backward``."""

    forward: Callable[..., Any]
    backward: Callable[..., Any]


def delegate(
    q_BLHD: torch.Tensor,
    v_BLKD: torch.Tensor,
    layout: SequenceLayout,
    spec: AttentionSpec,
    kernel: str,
    *,
    max_logits: bool = False,
) -> Delegate:
    """Return the package's functions for this call.

    Raises:
        ConfigError: the package does not compute the call exactly, or is missing.
    """
    check_supported(q_BLHD, v_BLKD, layout, spec, kernel, max_logits=max_logits)
    plain, zigzag = _modules()
    if _is_zigzag(layout, spec):
        return Delegate(
            zigzag.zigzag_ring_flash_attn_forward, zigzag.zigzag_ring_flash_attn_backward
        )
    return Delegate(plain.ring_flash_attn_forward, plain.ring_flash_attn_backward)


def check_supported(
    q_BLHD: torch.Tensor,
    v_BLKD: torch.Tensor,
    layout: SequenceLayout,
    spec: AttentionSpec,
    kernel: str,
    *,
    max_logits: bool = False,
) -> None:
    """Check that the package computes the call exactly.

    Raises:
        ConfigError: it does not; names the obstacle and the fix.
    """
    if kernel not in KERNELS:
        _raise_unsupported(f"kernel={kernel!r}", "it has its own kernel, flash-attn 2")
    _check_tensors(q_BLHD, v_BLKD, layout, spec)
    _check_scores(spec, max_logits)
    _check_layout(layout, spec)


def _check_tensors(
    q_BLHD: torch.Tensor, v_BLKD: torch.Tensor, layout: SequenceLayout, spec: AttentionSpec
) -> None:
    dtype, head_dim = q_BLHD.dtype, q_BLHD.shape[3]
    if dtype not in (torch.bfloat16, torch.float16):
        _raise_unsupported(
            f"{dtype}", "it takes bfloat16 and float16; its float32 gradients are wrong"
        )
    if dtype == torch.float16 and not _is_zigzag(layout, spec):
        _raise_unsupported(
            "torch.float16 but for causal attention in layout='zigzag'",
            "its plain ring rounds dq to bfloat16",
        )
    if head_dim > 256 or head_dim % 8:
        _raise_unsupported(f"head dim {head_dim}", "it takes multiples of 8 up to 256")
    if v_BLKD.shape[3] != head_dim:
        _raise_unsupported(
            f"head dim {v_BLKD.shape[3]} of v with {head_dim} of q and k", "it takes equal ones"
        )
    if q_BLHD.device.type not in DEVICE_TYPES:
        _raise_unsupported(f"device {q_BLHD.device.type}", "its kernel runs on cuda")


def _check_scores(spec: AttentionSpec, max_logits: bool) -> None:
    if spec.window != (-1, -1):
        _raise_unsupported(f"window={spec.window}", "it applies the window to each hop by itself")
    features = sorted(spec.needs if spec.sinks is None else spec.needs | {"sinks"})
    if features:
        _raise_unsupported(", ".join(features), "it has no such scores")
    if max_logits:
        _raise_unsupported("return_max_logits=True", "it does not return them")


def _check_layout(layout: SequenceLayout, spec: AttentionSpec) -> None:
    if layout.ring_size == 1:
        _raise_unsupported(
            "ring_size=1", "there is no ring to delegate, and its backward sends to itself"
        )
    if spec.causal and layout.kind not in ("zigzag", "contiguous"):
        _raise_unsupported(f"layout={layout.kind!r}", "its causal rings are zigzag and contiguous")
    if layout.padded_len != layout.seq_len:
        _raise_unsupported(
            f"a sequence of {layout.seq_len} tokens, padded to {layout.padded_len}",
            f"it attends to padding; lengths that divide by {layout.divisor} work",
        )
    whole = np.array([[0, layout.seq_len]])
    documents = layout.documents
    if documents is not None and any(not np.array_equal(row, whole) for row in documents.rows):
        _raise_unsupported(
            "packed documents or padded rows",
            "it needs each document to divide by twice the ring size; rows of one document work",
        )


def _is_zigzag(layout: SequenceLayout, spec: AttentionSpec) -> bool:
    """Return True for its zigzag ring, which is causal; without causality the order of keys is irrelevant."""
    return spec.causal and layout.kind == "zigzag"


def _raise_unsupported(asked: str, why: str) -> NoReturn:
    raise ConfigError(
        f"{_NAME} cannot do {asked}: {why}. Use exchange='ring', which is exact there."
    )


@lru_cache(maxsize=1)
def _modules() -> tuple[ModuleType, ModuleType]:
    """Import its plain and its zigzag ring.

    Under an alias, without its ``__init__``, which imports an adapter for transformers that fails with most
    versions.
    """
    spec = importlib.util.find_spec("ring_flash_attn")
    if spec is None or spec.submodule_search_locations is None:
        raise ConfigError(f"{_MISSING}.")
    package = ModuleType(_ALIAS)
    package.__path__ = list(spec.submodule_search_locations)
    sys.modules[_ALIAS] = package
    names = ("ring_flash_attn", "zigzag_ring_flash_attn")
    try:
        with warnings.catch_warnings():  # from its torch.jit.script, which users cannot fix
            warnings.simplefilter("ignore", DeprecationWarning)
            warnings.simplefilter("ignore", FutureWarning)  # likewise, from torch 2.14 on
            plain, zigzag = (importlib.import_module(f"{_ALIAS}.{name}") for name in names)
    except (ImportError, OSError) as error:  # flash-attn is missing, or built for another torch
        raise ConfigError(f"{_MISSING} ({error}).") from error
    return plain, zigzag

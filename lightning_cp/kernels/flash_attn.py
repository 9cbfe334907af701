"""The flash-attn packages: version 2, and version 3 for Hopper (``flash_attn_interface``).

Each is imported when it is first asked for, and passed over with the reason where it cannot be. They
align masks at the bottom right, share K/V heads by themselves, and return lse [B, H, L] or [H, T]:
+inf (2) or -inf (3) for a query without keys. Their ALiBi is aligned at the bottom right too, which
is another bias than ours on all but square tiles, so it is not declared.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType
from typing import Any

import torch
from typing_extensions import override

from lightning_cp.kernels.call_per_tile import Gradients
from lightning_cp.kernels.call_varlen import CallVarlen, FlashCall
from lightning_cp.kernels.devices import before_ampere, unfit_gpu
from lightning_cp.kernels.operators import Operator
from lightning_cp.kernels.protocol import QKV, Capabilities, Merged, Scores

_SCORES = ("softmax_scale", "causal", "window_size_left", "window_size_right", "softcap")
_SEQUENCES = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
_FORWARD = ("q", "k", "v", *_SCORES)
_BACKWARD = ("dout", *_FORWARD, "out", "softmax_lse", "dq", "dk", "dv", "deterministic")


@dataclass(frozen=True)
class Library:
    """What a package computes with; version 3 takes dense and packed tensors in one function."""

    forward: Operator
    backward: Operator
    forward_packed: Operator
    backward_packed: Operator


class _FlashAttn(CallVarlen):
    """What both versions share."""

    load: Callable[[], Library | str]
    """The package, or why it cannot be used."""
    unfit: Callable[[], str | None]
    """Why this machine's GPU cannot run it, or ``None``."""

    @property
    def capabilities(self) -> Capabilities:  # pyright: ignore[reportIncompatibleVariableOverride]
        """What both versions do; whether the package and the GPU are there is asked last."""
        return Capabilities(
            device_types=frozenset({"cuda"}),
            dtypes=frozenset({torch.bfloat16, torch.float16}),
            masks=frozenset({"full", "causal", "band"}),
            max_head_dim=256,
            head_dim_multiple=8,
            one_width=True,
            features=frozenset({"softcap"}),
            obstacle=self._obstacle,
        )

    def _obstacle(self) -> str | None:
        library = self.load()
        return library if isinstance(library, str) else self.unfit()

    @property
    def library(self) -> Library:
        """The package's functions, which :meth:`capabilities` has found."""
        library = self.load()
        assert isinstance(library, Library), library
        return library

    @override
    def run_forward(
        self, inputs: QKV, call: FlashCall, scores: Scores
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One call."""
        packed = call.cu_seqlens is not None
        function = self.library.forward_packed if packed else self.library.forward
        results = function(**inputs._asdict(), **self.arguments(call, scores))
        # Up to 2.6 the inputs are returned too: out, q, k, v, padded out, lse, dropout mask, state.
        return results[0], results[5 if len(results) == 8 else 1]

    @override
    def run_backward(
        self, merged: Merged, inputs: QKV, call: FlashCall, scores: Scores
    ) -> Gradients:
        """One call, into buffers of the inputs' dtype."""
        packed = call.cu_seqlens is not None
        function = self.library.backward_packed if packed else self.library.backward
        dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in inputs)
        function(
            **inputs._asdict(),
            dout=merged.dout,
            out=merged.out,
            softmax_lse=merged.lse,
            dq=dq,
            dk=dk,
            dv=dv,
            deterministic=torch.are_deterministic_algorithms_enabled(),
            **self.arguments(call, scores),
        )
        return dq, dk, dv

    def arguments(self, call: FlashCall, scores: Scores) -> dict[str, Any]:
        """Those that forward and backward share."""
        shared: dict[str, Any] = {
            "softmax_scale": scores.softmax_scale,
            "causal": call.mask.causal,
            "window_size_left": call.mask.left,
            "window_size_right": call.mask.right,
            "softcap": scores.softcap,
        }
        if call.cu_seqlens is not None:
            values = (*call.cu_seqlens, call.max_q, call.max_k)
            shared |= dict(zip(_SEQUENCES, values, strict=True))
        return shared


@lru_cache(maxsize=1)
def load_2() -> Library | str:
    """flash-attn 2.6 or later, or why it cannot be used."""
    module = _import("flash_attn.flash_attn_interface", "flash-attn", "pip install flash-attn")
    if isinstance(module, str):
        return module
    dense, packed = "_flash_attn_{}", "_flash_attn_varlen_{}"
    forward, backward = (*_FORWARD, "dropout_p"), (*_BACKWARD, "dropout_p")
    try:
        return Library(
            Operator(getattr(module, dense.format("forward")), forward),
            Operator(getattr(module, dense.format("backward")), backward),
            Operator(getattr(module, packed.format("forward")), (*forward, *_SEQUENCES)),
            Operator(getattr(module, packed.format("backward")), (*backward, *_SEQUENCES)),
        )
    except (AttributeError, TypeError) as error:
        return f"flash-attn {_version('flash_attn')} is not supported, 2.6 to 2.8 are: {error}"


@lru_cache(maxsize=1)
def load_3() -> Library | str:
    """flash-attn 3, or why it cannot be used."""
    name, source = "flash-attn 3", "install it from the hopper folder of flash-attention"
    module = _import("flash_attn_interface", name, source)
    if isinstance(module, str):
        return module
    try:
        forward = Operator(module._flash_attn_forward, (*_FORWARD, *_SEQUENCES))
        backward = Operator(module._flash_attn_backward, (*_BACKWARD, *_SEQUENCES))
    except (AttributeError, TypeError) as error:
        return f"this version of flash-attn 3 is not supported: {error}"
    return Library(forward, backward, forward, backward)


class FlashAttn2(_FlashAttn):
    """flash-attn 2.6 to 2.8, on GPUs of compute capability 8.0 and later."""

    name = "flash_attn_2"

    @staticmethod
    def load() -> Library | str:
        return load_2()

    @staticmethod
    def unfit() -> str | None:
        return before_ampere("flash-attn 2")

    @override
    def arguments(self, call: FlashCall, scores: Scores) -> dict[str, Any]:
        """Those that forward and backward share; dropout is refused elsewhere."""
        return {**super().arguments(call, scores), "dropout_p": 0.0}


class FlashAttn3(_FlashAttn):
    """flash-attn 3, on GPUs of compute capability 9."""

    name = "flash_attn_3"

    @staticmethod
    def load() -> Library | str:
        return load_3()

    @staticmethod
    def unfit() -> str | None:
        return unfit_gpu("flash-attn 3", "9.0", lambda got: got[0] == 9)

    @override
    def arguments(self, call: FlashCall, scores: Scores) -> dict[str, Any]:
        """Those that forward and backward share; no sequences is how dense tensors are given."""
        return {**dict.fromkeys(_SEQUENCES), **super().arguments(call, scores)}


def _import(name: str, package: str, install: str) -> ModuleType | str:
    """The module, or why there is none."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name == name.partition(".")[0]:
            return f"{package} is not installed: {install}"
        return f"{package} cannot be imported: {error}"
    except (ImportError, OSError, RuntimeError) as error:  # built for another torch or CUDA
        return f"{package} cannot be imported: {error}"


def _version(package: str) -> str:
    return getattr(importlib.import_module(package), "__version__", "of unknown version")

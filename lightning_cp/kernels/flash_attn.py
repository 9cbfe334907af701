"""The flash-attn packages: version 2, and version 3 for Hopper (``flash_attn_interface``).

Each is imported at its first use; if that fails, kernel selection skips it with the reason. They align masks
at the bottom right, support grouped K/V heads, and return lse [B, H, L] or [H, T]: +inf (2) or -inf (3) for a
query without keys. Their ALiBi is aligned at the bottom right too, which differs from this package's on all
but square tiles, so it is not declared.

Versions reorder, split and add arguments. So functions are inspected once and called by argument name; a
missing argument, or an unknown required one, makes the version unsupported.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType
from typing import Any

import torch
from typing_extensions import override

from lightning_cp.kernels.devices import gpu_obstacle, pre_ampere_obstacle
from lightning_cp.kernels.per_tile import Gradients
from lightning_cp.kernels.protocol import QKV, Capabilities, Output, Scores
from lightning_cp.kernels.varlen import FlashCall, VarlenKernel

ARGUMENT_ALIASES: Mapping[str, str] = {"is_causal": "causal"}
"""Names of arguments in some versions -> this module's names."""

_UNUSED_ARGUMENTS = (
    *("alibi_slopes", "out", "out_", "k_new", "v_new", "qv", "cu_seqlens_k_new"),
    *("seqused_q", "seqused_k", "sequed_q", "sequed_k", "page_table", "kv_batch_idx", "leftpad_k"),
    "block_table",
    *("rotary_cos", "rotary_sin", "seqlens_rotary", "q_descale", "k_descale", "v_descale"),
)
NEUTRAL_VALUES: Mapping[str, object] = {"return_softmax": False, **dict.fromkeys(_UNUSED_ARGUMENTS)}
"""Arguments that some versions require, with values that have no effect."""

WINDOW_SIDES = ("window_size_left", "window_size_right")


class LibraryFunction:
    """A function of another library, called with the arguments ``wanted``.

    Raises:
        TypeError: the function lacks one of them, or requires an unknown one; the message names it.
    """

    def __init__(self, function: Callable[..., Any], wanted: Iterable[str]) -> None:
        # A torch custom operator hides its signature; the function that it wraps has it.
        parameters = inspect.signature(getattr(function, "_init_fn", function)).parameters
        self._function = function
        self._pairs_window = "window_size" in parameters
        self._names = {ARGUMENT_ALIASES.get(name, name): name for name in parameters}
        known = {*self._names, *(WINDOW_SIDES if self._pairs_window else ())}
        if missing := sorted(set(wanted) - known):
            raise TypeError(f"has no argument {', '.join(missing)}")
        demanded = {
            ARGUMENT_ALIASES.get(x.name, x.name)
            for x in parameters.values()
            if x.default is x.empty and x.kind in (x.POSITIONAL_OR_KEYWORD, x.KEYWORD_ONLY)
        }
        extra = demanded - set(wanted) - {"window_size"}
        if unknown := sorted(extra - NEUTRAL_VALUES.keys()):
            raise TypeError(f"demands the unknown argument {', '.join(unknown)}")
        self._neutral = {self._names[name]: NEUTRAL_VALUES[name] for name in extra}

    def __call__(self, **arguments: object) -> Any:
        """Call the function with the wanted arguments."""
        if self._pairs_window:
            arguments["window_size"] = tuple(arguments.pop(side) for side in WINDOW_SIDES)
        renamed = {self._names[name]: value for name, value in arguments.items()}
        return self._function(**self._neutral, **renamed)


_SCORES = ("softmax_scale", "causal", "window_size_left", "window_size_right", "softcap")
_SEQUENCES = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
_FORWARD = ("q", "k", "v", *_SCORES)
_BACKWARD = ("dout", *_FORWARD, "out", "softmax_lse", "dq", "dk", "dv", "deterministic")


@dataclass(frozen=True)
class Library:
    """Functions of a package; in version 3 dense and packed tensors share one function."""

    forward: LibraryFunction
    backward: LibraryFunction
    forward_packed: LibraryFunction
    backward_packed: LibraryFunction


class _FlashAttn(VarlenKernel):
    """Base of both versions."""

    load: Callable[[], Library | str]
    """Import the package; returns the reason if it cannot be used."""
    device_obstacle: Callable[[], str | None]
    """Return the reason why this machine's GPU cannot run the package, or ``None``."""

    @property
    def capabilities(self) -> Capabilities:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Capabilities of both versions; package and GPU are checked last."""
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
        return library if isinstance(library, str) else self.device_obstacle()

    @property
    def library(self) -> Library:
        """The package's functions; ``capabilities`` has imported it."""
        library = self.load()
        assert isinstance(library, Library), library
        return library

    @override
    def run_forward(
        self, inputs: QKV, call: FlashCall, scores: Scores
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Call the operator, dense or packed."""
        packed = call.cu_seqlens is not None
        function = self.library.forward_packed if packed else self.library.forward
        results = function(**inputs._asdict(), **self.arguments(call, scores))
        # Up to 2.6 the results include inputs: out, q, k, v, padded out, lse, dropout mask, state.
        return results[0], results[5 if len(results) == 8 else 1]

    @override
    def run_backward(
        self, merged: Output, inputs: QKV, call: FlashCall, scores: Scores
    ) -> Gradients:
        """Call the operator, with output buffers in the inputs' dtype."""
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
        """Return the arguments that forward and backward share."""
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
def load_flash_attn_2() -> Library | str:
    """Import flash-attn 2.6 or later; return the reason if it cannot be used."""
    module = _import("flash_attn.flash_attn_interface", "flash-attn", "pip install flash-attn")
    if isinstance(module, str):
        return module
    dense, packed = "_flash_attn_{}", "_flash_attn_varlen_{}"
    forward, backward = (*_FORWARD, "dropout_p"), (*_BACKWARD, "dropout_p")
    try:
        return Library(
            LibraryFunction(getattr(module, dense.format("forward")), forward),
            LibraryFunction(getattr(module, dense.format("backward")), backward),
            LibraryFunction(getattr(module, packed.format("forward")), (*forward, *_SEQUENCES)),
            LibraryFunction(getattr(module, packed.format("backward")), (*backward, *_SEQUENCES)),
        )
    except (AttributeError, TypeError) as error:
        return f"flash-attn {_version('flash_attn')} is not supported, 2.6 to 2.8 are: {error}"


@lru_cache(maxsize=1)
def load_flash_attn_3() -> Library | str:
    """Import flash-attn 3; return the reason if it cannot be used."""
    name, source = "flash-attn 3", "install it from the hopper folder of flash-attention"
    module = _import("flash_attn_interface", name, source)
    if isinstance(module, str):
        return module
    try:
        forward = LibraryFunction(module._flash_attn_forward, (*_FORWARD, *_SEQUENCES))
        backward = LibraryFunction(module._flash_attn_backward, (*_BACKWARD, *_SEQUENCES))
    except (AttributeError, TypeError) as error:
        return f"this version of flash-attn 3 is not supported: {error}"
    return Library(forward, backward, forward, backward)


class FlashAttn2(_FlashAttn):
    """flash-attn 2.6 to 2.8, on GPUs of compute capability 8.0 and later."""

    name = "flash_attn_2"

    @staticmethod
    def load() -> Library | str:
        return load_flash_attn_2()

    @staticmethod
    def device_obstacle() -> str | None:
        return pre_ampere_obstacle("flash-attn 2")

    @override
    def arguments(self, call: FlashCall, scores: Scores) -> dict[str, Any]:
        """Return the arguments that forward and backward share; dropout is refused elsewhere."""
        return {**super().arguments(call, scores), "dropout_p": 0.0}


class FlashAttn3(_FlashAttn):
    """flash-attn 3, on GPUs of compute capability 9."""

    name = "flash_attn_3"

    @staticmethod
    def load() -> Library | str:
        return load_flash_attn_3()

    @staticmethod
    def device_obstacle() -> str | None:
        return gpu_obstacle("flash-attn 3", "9.0", lambda got: got[0] == 9)

    @override
    def arguments(self, call: FlashCall, scores: Scores) -> dict[str, Any]:
        """Return the arguments that forward and backward share; dense tensors have no sequences."""
        return {**dict.fromkeys(_SEQUENCES), **super().arguments(call, scores)}


def _import(name: str, package: str, install: str) -> ModuleType | str:
    """Import a module; return the reason if it cannot be imported."""
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

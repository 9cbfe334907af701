"""Selection of kernels: the list of all, and the choice for a request."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from lightning_cp.errors import ConfigError, advise_choice
from lightning_cp.kernels.aten import AtenCpuFlash, AtenCudaCudnn, AtenCudaFlash
from lightning_cp.kernels.auto import Order, Platform, Tiles, auto_order
from lightning_cp.kernels.flash_attn import FlashAttn2, FlashAttn3
from lightning_cp.kernels.protocol import QKV as QKV
from lightning_cp.kernels.protocol import Capabilities as Capabilities
from lightning_cp.kernels.protocol import Kernel as Kernel
from lightning_cp.kernels.protocol import Output as Output
from lightning_cp.kernels.protocol import Request as Request
from lightning_cp.kernels.protocol import Scores as Scores
from lightning_cp.kernels.protocol import accumulate_dtype as accumulate_dtype
from lightning_cp.kernels.protocol import join_sorted
from lightning_cp.kernels.reference import ReferenceKernel
from lightning_cp.kernels.triton.launch import TritonFA2


def kernels() -> dict[str, Kernel]:
    """Return every kernel by name, in the order of ``auto`` where nothing better is known."""
    every: tuple[Kernel, ...] = (
        FlashAttn3(),
        AtenCudaFlash(),
        FlashAttn2(),
        AtenCudaCudnn(),
        TritonFA2(),
        AtenCpuFlash(),
        ReferenceKernel(),
    )
    return {kernel.name: kernel for kernel in every}


ALIASES: dict[str, tuple[str, ...]] = {
    "aten": ("aten_cuda_flash", "aten_cuda_cudnn", "aten_cpu_flash"),
    "flash_attn": ("flash_attn_3", "flash_attn_2"),
}
"""Names for several kernels, tried in order."""


def select_kernel(
    name: str, request: Request, tiles: Tiles | None = None, platform: Platform | None = None
) -> Kernel:
    """Return the first kernel of ``name`` whose capabilities cover the request.

    Args:
        name: a kernel's name, ``aten`` for PyTorch's own operators, ``flash_attn`` for the packages of
            that name, or ``auto`` for any.
        request: the requirements of the call.
        tiles: the call's tiles, on which the order of ``auto`` depends.
        platform: this process; by default as it is.

    Raises:
        ConfigError: an unknown name, or no kernel covers the request; gives the reason for each.
    """
    every = kernels()
    refusals: list[str] = []
    for candidate in _candidates(name, every, request, tiles, platform).names:
        reason = _refusal(name, every[candidate], request)
        if reason is None:
            return every[candidate]
        refusals.append(f"{candidate} {reason}")
    able = [each for each, kernel in every.items() if _refusal("auto", kernel, request) is None]
    raise ConfigError(
        f"no kernel can do what kernel={name!r} was asked: {_request_text(request)}. "
        f"Passed over: {'; '.join(refusals)}. "
        + (
            f"Others can: kernel='auto', or {' or '.join(able)}."
            if able
            else "No other can either."
        )
    )


@lru_cache(maxsize=64)
def has_feature(name: str, feature: str) -> bool:
    """Return True if some kernel of ``name`` has a feature, on any device and with any other limits.

    Raises:
        ConfigError: an unknown name.
    """
    every = kernels()
    _check_name(name, every)
    named = every if name == "auto" else ALIASES.get(name, (name,))
    return any(feature in every[each].capabilities.features for each in named)


def explain_kernels(
    name: str, request: Request, tiles: Tiles | None = None, platform: Platform | None = None
) -> str:
    """Explain the choice of :func:`select_kernel` for a request: one line per kernel, in order.

    Raises:
        ConfigError: an unknown name.
    """
    every = kernels()
    candidates, why = _candidates(name, every, request, tiles, platform)
    listed = (*candidates, *(each for each in every if each not in candidates))
    reasons = {each: _refusal(name, every[each], request) for each in listed}
    chosen = next((each for each in candidates if reasons[each] is None), None)
    lines = [f"kernel={name!r} for {_request_text(request)}: {chosen or 'none can do it'}"]
    for each, reason in reasons.items():
        if each == chosen:
            verdict = f"chosen: {why}" if why else "chosen"
        elif each not in candidates:
            verdict = f"not among kernel={name!r}" + (f"; {reason}" if reason else "")
        else:
            verdict = reason or f"could do it, but {chosen} comes first"
        lines.append(f"  {each}: {verdict}")
    return "\n".join(lines)


def _candidates(
    name: str,
    every: Mapping[str, Kernel],
    request: Request,
    tiles: Tiles | None,
    platform: Platform | None,
) -> Order:
    """Return the kernels of a name, in order."""
    _check_name(name, every)
    if name != "auto":
        return Order(ALIASES.get(name, (name,)))
    return auto_order(request, tiles, platform or Platform.of_calls_on(request.device_type))


def _check_name(name: str, every: Mapping[str, Kernel]) -> None:
    """Check the name of a kernel.

    Raises:
        ConfigError: an unknown name.
    """
    if name != "auto" and name not in every and name not in ALIASES:
        known = ", ".join(["auto", *ALIASES, *every])
        advice = advise_choice(name, [*ALIASES, *every])
        raise ConfigError(f"unknown kernel {name!r}. Known: {known}. {advice}")


def _refusal(name: str, kernel: Kernel, request: Request) -> str | None:
    """Return the reason why ``name`` skips a kernel, or ``None`` if it does not."""
    reason = kernel.capabilities.refusal(request)
    if reason is None and name == "auto":
        device = request.device_type
        if device in kernel.capabilities.only_by_name:
            return f"is for tests on {device}, and only chosen by kernel={kernel.name!r}"
    return reason


def _request_text(request: Request) -> str:
    return (
        f"device {request.device_type}, {request.dtype}, head dim {_head_dims_text(request)}, "
        f"masks {join_sorted(request.masks)}"
        + (f", {join_sorted(request.needs)}" if request.needs else "")
        + (", packed" if request.packed else "")
    )


def _head_dims_text(request: Request) -> str:
    dim, of_values = request.dims
    return str(dim) if dim == of_values else f"{dim} of q and k, {of_values} of v"

"""The selection of ways to share a sequence, and the checks of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec

from lightning_cp.bench.kernels import check_heads
from lightning_cp.bench.methods import (
    AttentionCase,
    AttentionMethod,
    ContextParallelMethod,
    context_parallel_methods,
)
from lightning_cp.bench.settings import BenchSettings
from lightning_cp.errors import ConfigError


def check_devices(settings: BenchSettings) -> None:
    """Check that there is more than one device.

    Raises:
        ConfigError: there is one.
    """
    if settings.devices == 1:
        raise ConfigError(
            "links and modes are about devices that work together, and there is one. Take "
            "suites=[kernels,compute,overheads], or more devices."
        )


def check(settings: BenchSettings) -> None:
    """Check that a selected way can share each case, before any process starts.

    Raises:
        ConfigError: lengths that do not divide, unknown names, or no way that can share a case.
    """
    cases = settings.cases(settings.devices)
    for case in cases:
        check_case(case)
    case, *_ = cases
    obstacles = {way.name: way.obstacle(case) for way in chosen_methods(settings, case)}
    if all(obstacles.values()):
        told = "; ".join(f"{name}: {why}" for name, why in obstacles.items())
        raise ConfigError(f"none of the modes can share the sequence. {told}.")


def check_case(case: AttentionCase) -> None:
    """Check that a case can be shared evenly, whatever the way.

    Raises:
        ConfigError: heads that do not fit, or a length that does not divide; the message says what works.
    """
    check_heads(case.heads, case.kv_heads)
    chunks = 2 * case.ranks
    below = case.tokens // chunks * chunks
    if below < case.tokens:
        near = f"{below} or {below + chunks}" if below else str(chunks)
        raise ConfigError(
            f"tokens={case.tokens} does not divide into 2 chunks for each of {case.ranks} ranks, and padding "
            f"would be measured along. {near} works."
        )


def chosen_methods(settings: BenchSettings, case: AttentionCase) -> list[AttentionMethod]:
    """Return the ways that ``settings.modes`` names; by default ours and those of installed packages.

    Ours have the layout of the case, and include it in their names for packed documents.

    Raises:
        ConfigError: an unknown name.
    """
    ours = [
        replace(way, kernel=settings.kernel) for way in context_parallel_methods(settings.devices)
    ]
    every: list[AttentionMethod] = [*ours, *_peers(case)]
    for name in settings.modes:
        if not any(name in _names_of(way) for way in every):
            raise ConfigError(_unknown(name, settings.devices, every))
    chosen = [way for way in every if not settings.modes or _names_of(way) & set(settings.modes)]
    return [
        way.with_layout_of(case) if isinstance(way, ContextParallelMethod) else way
        for way in chosen
    ]


def _peers(case: AttentionCase) -> list[AttentionMethod]:
    """Return the installed other implementations; only a checkout can measure them, not the wheel."""
    if not _has_peers():
        return []
    return import_module("benchmarks.peers.registry").peer_ways(case)


def _has_peers() -> bool:
    return find_spec("benchmarks") is not None and find_spec("benchmarks.peers") is not None


_ELSEWHERE = " Other implementations are measured in a checkout of this project."


def _unknown(name: str, ranks: int, every: Sequence[AttentionMethod]) -> str:
    families = ", ".join(sorted({"ours", *map(_family, every)}))
    whole = "; ".join(way.name for way in every)
    more = " hybrid needs 4 devices." if name == "hybrid" and ranks < 4 else ""
    return (
        f"modes names {name}, but on {ranks} ranks there are {families}, or by their whole names {whole}."
        f"{more}{'' if _has_peers() else _ELSEWHERE}"
    )


def _family(way: AttentionMethod) -> str:
    words = way.name.split()
    return words[-1] if isinstance(way, ContextParallelMethod) and words[-1] == "ring" else words[0]


def _names_of(way: AttentionMethod) -> set[str]:
    """Return the names that select a way: its full name; for ours each word of it, for others the package."""
    words = way.name.split()
    if not isinstance(way, ContextParallelMethod):
        return {way.name, *words[:1]}
    return {way.name, replace(way, layout="balanced").name, "ours", *words}

"""Which ways to share a sequence are measured, and what of it makes no sense."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lightning_cp.bench.case import Case
from lightning_cp.bench.kernels import check_heads
from lightning_cp.bench.peers import peer_ways
from lightning_cp.bench.settings import Settings
from lightning_cp.bench.ways import Ours, Way, our_ways
from lightning_cp.errors import ConfigError


def check_devices(settings: Settings) -> None:
    """Refuse one device.

    Raises:
        ConfigError: that.
    """
    if settings.devices == 1:
        raise ConfigError(
            "links and modes are about devices that work together, and there is one. Take "
            "suites=[kernels,compute,overheads], or more devices."
        )


def check(settings: Settings) -> None:
    """Refuse what no way can share, before any process is started.

    Raises:
        ConfigError: lengths that do not divide, names that no way has, or none that can share it.
    """
    cases = settings.cases(settings.devices)
    for case in cases:
        check_case(case)
    case, *_ = cases
    obstacles = {way.name: way.obstacle(case) for way in chosen_ways(settings, case)}
    if all(obstacles.values()):
        told = "; ".join(f"{name}: {why}" for name, why in obstacles.items())
        raise ConfigError(f"none of the modes can share the sequence. {told}.")


def check_case(case: Case) -> None:
    """Refuse a case that cannot be shared evenly, whatever the way.

    Raises:
        ConfigError: heads that do not fit, or a length that does not divide; says what would.
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


def chosen_ways(settings: Settings, case: Case) -> list[Way]:
    """The ways that ``settings.modes`` names; if it is empty ours, and those of others that are installed.

    Ours have the layout of the case, and their names say it for packed documents.

    Raises:
        ConfigError: a name that no way has.
    """
    ours = [replace(way, kernel=settings.kernel) for way in our_ways(settings.devices)]
    every: list[Way] = [*ours, *peer_ways(case)]
    for name in settings.modes:
        if not any(name in _names_of(way) for way in every):
            raise ConfigError(_unknown(name, settings.devices, every))
    chosen = [way for way in every if not settings.modes or _names_of(way) & set(settings.modes)]
    return [way.dealt(case) if isinstance(way, Ours) else way for way in chosen]


def _unknown(name: str, ranks: int, every: Sequence[Way]) -> str:
    families = ", ".join(sorted({"ours", *map(_family, every)}))
    whole = "; ".join(way.name for way in every)
    more = " hybrid needs 4 devices." if name == "hybrid" and ranks < 4 else ""
    return (
        f"modes names {name}, but on {ranks} ranks there are {families}, or by their whole names {whole}."
        f"{more}"
    )


def _family(way: Way) -> str:
    words = way.name.split()
    return words[-1] if isinstance(way, Ours) and words[-1] == "ring" else words[0]


def _names_of(way: Way) -> set[str]:
    """What a way is called: its name; ours by each word of it too, others by the first, their package."""
    words = way.name.split()
    if not isinstance(way, Ours):
        return {way.name, *words[:1]}
    return {way.name, replace(way, layout="balanced").name, "ours", *words}

"""Before anything is changed: gradients are finite, and all ranks have them of the same parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from lightning_cp.comm.objects import World
from lightning_cp.comm.outcome import summed_over_world
from lightning_cp.comm.vote import hashed
from lightning_cp.errors import ConfigError, NonFiniteError

SHOWN = 4
"""Names in a message."""


def require_agreed(
    gradients: Mapping[str, torch.Tensor],
    whole: Sequence[torch.Tensor] = (),
    *,
    shared: bool,
    device_type: str,
    check_finite: bool,
) -> None:
    """Refuse a step that would spoil parameters, or in which ranks would wait for each other for ever.

    Args:
        gradients: what this rank holds of each, by parameter.
        whole: parameters whose values are the same on all ranks, if that is to be seen too.
        shared: other ranks take part; all of the world come here.
        device_type: where messages travel from.
        check_finite: whether values are looked at.

    Raises:
        NonFiniteError: on every rank, naming the parameters whose gradients are not finite.
        ConfigError: on every rank, naming the parameters that only some have gradients of; or ranks that hold
            whole parameters hold other values.
    """
    bad = _not_finite(gradients) if check_finite else []
    if not shared:
        if bad:
            raise NonFiniteError(_refusal({0: bad}))
        return
    world = World()
    # Adds up to 0 over ranks with the same names, and hardly ever over others.
    values = [float(x.sum(dtype=torch.float64)) for x in whole]
    ballot = (hashed((tuple(gradients), values)) >> 24) * (1 if world.rank else 1 - world.size)
    failed, ballots = summed_over_world([int(bool(bad)), ballot], device_type)
    if not failed and not ballots:
        return
    every = world.gather((bad, sorted(gradients)))
    found = {rank: names for rank, (names, _) in enumerate(every) if names}
    if found:
        raise NonFiniteError(_refusal(found))
    everywhere = set(every[0][1]).intersection(*(names for _, names in every))
    if all(set(names) == everywhere for _, names in every):
        raise ConfigError(
            "parameters that are no DTensors have other values on other ranks, so these do not train one "
            "model. Muon takes them for copies, as with ddp; broadcast them from one rank first."
        )
    lacking = {rank: sorted(set(names) - everywhere) for rank, (_, names) in enumerate(every)}
    raise ConfigError(
        "ranks have gradients of different parameters, so Muon would wait for ever. Only there: "
        f"{_listed(lacking)}. Let all parameters take part on every rank, or freeze them on all."
    )


def _not_finite(gradients: Mapping[str, torch.Tensor]) -> list[str]:
    some = {name: x for name, x in gradients.items() if x.numel()}
    if not some:
        return []
    # The largest of each: NaN and inf stay what they are, and nothing is squared.
    largest = torch._foreach_norm(list(some.values()), float("inf"))
    finite = torch.stack([x.to(torch.float64).isfinite() for x in largest])
    if bool(finite.all()):
        return []
    return [name for name, good in zip(some, finite.tolist(), strict=True) if not good]


def _refusal(found: Mapping[int, list[str]]) -> str:
    return (
        f"gradients are NaN or infinite: {_listed(found)}. Nothing was changed. Look for the first loss that "
        "is not finite; lower the learning rate, or clip gradients."
    )


def _listed(found: Mapping[int, list[str]]) -> str:
    return "; ".join(
        f"rank {rank}: {', '.join(names[:SHOWN])}{', ...' * (len(names) > SHOWN)}"
        for rank, names in found.items()
        if names
    )

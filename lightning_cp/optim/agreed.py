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
    problems: Sequence[str] = (),
    *,
    shared: bool,
    device_type: str,
    check_finite: bool,
) -> None:
    """Refuse a step that would spoil parameters, or in which ranks would wait for each other for ever.

    Args:
        gradients: what this rank holds of each, by parameter.
        whole: parameters whose values are the same on all ranks, if that is to be seen too.
        problems: what this rank cannot use.
        shared: other ranks take part; all of the world come here.
        device_type: where messages travel from.
        check_finite: whether values are looked at.

    Raises:
        NonFiniteError: on every rank, naming the parameters whose gradients are not finite.
        ConfigError: on every rank, naming the parameters that only some have gradients of; or ranks that hold
            whole parameters hold other values.
    """
    bad = _not_finite(gradients) if check_finite and not problems else []
    if not shared:
        _refuse({0: list(problems)}, {0: bad})
        return
    world = World()
    # Adds up to 0 over ranks with the same names, and hardly ever over others.
    values = [float(x.sum(dtype=torch.float64)) for x in whole]
    ballot = (hashed((tuple(gradients), values)) >> 24) * (1 if world.rank else 1 - world.size)
    failed, ballots = summed_over_world([int(bool(bad or problems)), ballot], device_type)
    if not failed and not ballots:
        return
    every = dict(enumerate(world.gather((list(problems), bad, sorted(gradients)))))
    _refuse(*({rank: of[at] for rank, of in every.items()} for at in (0, 1)))
    named = {rank: names for rank, (_, _, names) in every.items()}
    everywhere = set(named[0]).intersection(*named.values())
    if all(set(names) == everywhere for names in named.values()):
        raise ConfigError(
            "parameters that are no DTensors have other values on other ranks, so these do not train one "
            "model. Muon takes them for copies, as with ddp; broadcast them from one rank first."
        )
    lacking = {rank: sorted(set(names) - everywhere) for rank, names in named.items()}
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


def _refuse(problems: Mapping[int, list[str]], bad: Mapping[int, list[str]]) -> None:
    """Of each rank: what it cannot use, and parameters whose gradients are not finite."""
    if any(problems.values()):
        raise ConfigError(
            f"gradients that cannot be used: {_listed(problems)}. Nothing was changed."
        )
    if any(bad.values()):
        raise NonFiniteError(
            f"gradients are NaN or infinite: {_listed(bad)}. Nothing was changed. Look for the first loss "
            "that is not finite; lower the learning rate, or clip gradients."
        )


def _listed(found: Mapping[int, list[str]]) -> str:
    return "; ".join(
        f"rank {rank}: {', '.join(names[:SHOWN])}{', ...' * (len(names) > SHOWN)}"
        for rank, names in found.items()
        if names
    )

"""Sizes of the mesh, of what was asked for and of the ranks and heads that there are."""

from __future__ import annotations

from torch import nn

from lightning_cp.errors import ConfigError, UndeclaredError
from lightning_cp.mesh import Factors, factorise
from lightning_cp.models.swap import num_heads_of
from lightning_cp.strategies.arguments.settings import GATHERING_MODE, Settings


def explicit_size(settings: Settings) -> int | None:
    """The context-parallel size that was given, if it was.

    Raises:
        ConfigError: two sizes that contradict each other.
    """
    ulysses, ring = settings.ulysses_size, settings.ring_size
    given = settings.context_parallel_size
    if ulysses is not None and ring is not None:
        if given not in ("auto", ulysses * ring):
            raise ConfigError(
                f"context_parallel_size={given} contradicts ulysses_size={ulysses} x ring_size={ring} = "
                f"{ulysses * ring}. Leave one of them out."
            )
        return ulysses * ring
    return None if given == "auto" else int(given)


def context_size(settings: Settings, world_size: int) -> int:
    """Ranks that share a sample, of ``world_size`` ranks.

    Raises:
        ConfigError: the sizes do not multiply to the world size.
    """
    wanted = explicit_size(settings)
    data = settings.data_parallel_size
    others = data * settings.tensor_parallel_size
    if wanted is None:
        if world_size % others:
            raise ConfigError(_does_not_divide(settings, world_size))
        return world_size // others
    if wanted * others != world_size:
        shown = [f"data_parallel_size={data}"]
        for name in ("context_parallel_size", "ring_size", "ulysses_size"):
            value = getattr(settings, name)
            shown += [f"{name}={value}"] if value not in (None, "auto") else []
        inner = wanted * settings.tensor_parallel_size
        if settings.tensor_parallel_size > 1:
            shown.append(f"tensor_parallel_size={settings.tensor_parallel_size}")
        rest, left = divmod(world_size, inner)
        fix = (
            f"data_parallel_size={rest}"
            if not left
            else (f"{inner} devices, or a multiple of it with data_parallel_size=<that multiple>")
        )
        raise ConfigError(
            f"the mesh sizes must multiply to the world size {world_size}, got "
            f"{' x '.join(shown)}, which is {wanted * others} ranks. What would work: {fix}."
        )
    return wanted


def known_heads(
    settings: Settings, cp_size: int, model: nn.Module | None, declared: int | None
) -> int | None:
    """Query heads of a tensor-parallel rank; ``None`` if nobody tells.

    They are as set, or as the model declares them, or as its modules tell. A split that does not depend
    on the heads is checked against them here, so that setup refuses what the first attention call would.

    Args:
        settings: the user's.
        cp_size: ranks that share a sample.
        model: where the number is looked for; ``None`` before there is one.
        declared: what the model's mixin says.

    Raises:
        ConfigError: the heads do not divide, or the split needs their number and no module tells.
    """
    heads = settings.num_heads or declared
    if cp_size == 1:
        return heads
    if heads is None and model is not None:
        try:
            heads = num_heads_of(model)
        except UndeclaredError as unknown:
            if settings.needs_heads:
                ranks = cp_size * settings.data_parallel_size
                *others, last = unknown.questions
                without = (
                    "A model without attention cannot share a sequence: pass context_parallel_size=1 and "
                    f"data_parallel_size={ranks}; ranks then have different samples, as with ddp."
                )
                raise UndeclaredError([*others, f"{last} {without}"], unknown.arguments) from None
    heads = _of_tensor_parallel_rank(settings, heads)
    if heads is not None and not settings.needs_heads:
        split(settings, cp_size, heads, None)
    return heads


def split(
    settings: Settings, cp_size: int, num_heads: int | None, ranks_per_node: int | None
) -> Factors:
    """The split of ``cp_size`` into Ulysses and ring.

    Raises:
        ConfigError: a split that the sizes or the heads do not allow.
    """
    if settings.ulysses_size is not None or settings.ring_size is not None:
        ulysses = settings.ulysses_size or cp_size // (settings.ring_size or 1)
        factors = Factors(ulysses, settings.ring_size or cp_size // ulysses, "as set")
    elif settings.mode == "ulysses":
        factors = Factors(cp_size, 1, "mode=ulysses")
    elif settings.mode in ("ring", GATHERING_MODE):
        factors = Factors(1, cp_size, f"mode={settings.mode}")
    else:
        assert num_heads is not None
        limit = (
            ranks_per_node
            if settings.mode == "auto"
            else min(ranks_per_node or cp_size, cp_size // 2)
        )
        factors = factorise(cp_size, num_heads, max(1, limit) if limit else None)
    _require_split(settings, factors, cp_size, num_heads)
    return factors


def _require_split(settings: Settings, factors: Factors, cp_size: int, heads: int | None) -> None:
    """Refuse a split of ``cp_size`` ranks that the mode or the heads do not allow.

    Raises:
        ConfigError: naming sizes that work.
    """
    if factors.ulysses_size * factors.ring_size != cp_size:
        name = "ring_size" if settings.ulysses_size is None else "ulysses_size"
        works = [n for n in divisors(cp_size) if name == "ring_size" or not (heads or 0) % n]
        raise ConfigError(
            f"{name}={getattr(settings, name)} does not divide the {cp_size} context-parallel ranks. With "
            f"{cp_size} ranks, {name} can be {listed(works)}."
        )
    other = {"ulysses": factors.ring_size, "ring": factors.ulysses_size}.get(settings.mode, 1)
    if other != 1:
        raise ConfigError(
            f"mode={settings.mode!r} uses one axis only, but ulysses_size={settings.ulysses_size} and "
            f"ring_size={settings.ring_size} split {cp_size} ranks into ulysses {factors.ulysses_size} x "
            f"ring {factors.ring_size}. Leave the sizes out, or use mode='hybrid' or 'auto'."
        )
    if settings.mode == "hybrid" and 1 in (factors.ulysses_size, factors.ring_size) and cp_size > 1:
        raise ConfigError(
            f"mode='hybrid' cannot split {cp_size} ranks into two axes larger than 1"
            + (f" with {heads} heads" if heads else "")
            + ". Use mode='auto', 'ulysses' or 'ring', or set ulysses_size and ring_size."
        )
    if settings.mode == GATHERING_MODE and factors.ring_size == 1 < cp_size:
        raise ConfigError(
            f"mode={GATHERING_MODE!r} gathers keys over the ring axis, but "
            f"ulysses_size={factors.ulysses_size} leaves a ring of 1 of {cp_size} ranks. Use a smaller "
            "ulysses_size, or mode='ulysses'."
        )
    if settings.exchange == "ring_flash_attn" and factors.ring_size == 1 < cp_size:
        raise ConfigError(
            f"exchange='ring_flash_attn' needs a ring, but Ulysses takes all {cp_size} ranks. Use "
            "mode='ring', or a smaller ulysses_size."
        )
    if heads is not None and heads % factors.ulysses_size:
        works = [n for n in divisors(cp_size) if heads % n == 0]
        tensor = settings.tensor_parallel_size
        left = f" that tensor_parallel_size={tensor} leaves to a rank" if tensor > 1 else ""
        raise ConfigError(
            f"ulysses_size={factors.ulysses_size} does not divide the model's {heads} attention heads{left}. "
            f"With {cp_size} ranks, ulysses_size can be {listed(works)} and the ring the rest; mode='auto' "
            "chooses. If the attention to be shared has other heads than that, pass num_heads=."
        )


def _does_not_divide(settings: Settings, world_size: int) -> str:
    """The message where data and tensor parallelism leave no whole number of context-parallel ranks."""
    data, tensor = settings.data_parallel_size, settings.tensor_parallel_size
    if tensor == 1 or world_size % tensor:
        name, value = ("data", data) if tensor == 1 else ("tensor", tensor)
        return (
            f"{name}_parallel_size={value} does not divide the world size {world_size}. With {world_size} "
            f"ranks, {name}_parallel_size can be {listed(divisors(world_size))}."
        )
    return (
        f"data_parallel_size={data} x tensor_parallel_size={tensor} does not divide the world size "
        f"{world_size}. With {world_size} ranks and tensor_parallel_size={tensor}, data_parallel_size can be "
        f"{listed(divisors(world_size // tensor))}."
    )


def _of_tensor_parallel_rank(settings: Settings, heads: int | None) -> int | None:
    """The query heads that are left to a rank by tensor parallelism.

    Raises:
        ConfigError: they do not divide.
    """
    size = settings.tensor_parallel_size
    if heads is not None and heads % size:
        raise ConfigError(
            f"tensor_parallel_size={size} does not divide the model's {heads} attention heads. With {heads} "
            f"heads, tensor_parallel_size can be {listed(divisors(heads))}."
        )
    return None if heads is None else heads // size


def divisors(number: int) -> list[int]:
    """All of them, in order."""
    return [n for n in range(1, number + 1) if number % n == 0]


def listed(numbers: list[int]) -> str:
    """``1, 2 or 4``."""
    *others, last = map(str, numbers)
    return f"{', '.join(others)} or {last}" if others else last

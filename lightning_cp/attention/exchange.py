"""Exchange: how keys reach the queries over the ring axis."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_cp.errors import ConfigError
from lightning_cp.layout.gathered import EXECUTIONS

EXCHANGES = ("ring", "all_gather", "ring_flash_attn")

GATHER = (
    "Use exchange='all_gather' (mode='zigzag_llama3' of the strategies), or leave the setting out."
)


@dataclass(frozen=True)
class Exchange:
    """The way of keys to the queries over the ring axis, and of attention to gathered keys.

    Args:
        name: ``ring`` sends the keys that somebody needs from rank to rank, hop by hop; ``all_gather``
            gathers all of them once; ``ring_flash_attn`` leaves the ring to the package of that name.
        forward: of ``all_gather``: ``two_kernel`` (one kernel call per chunk of queries, least memory) or
            ``fused`` (one call, with copies of the keys that several chunks see).
        backward: likewise.
        kv_heads_per_gather: of ``all_gather``: K/V heads gathered at a time, which bounds its memory;
            ``None`` gathers all heads at once.

    Raises:
        ConfigError: a value that does not exist, or that the exchange has no use for.
    """

    name: str = "ring"
    forward: str = "two_kernel"
    backward: str = "two_kernel"
    kv_heads_per_gather: int | None = 1

    def __post_init__(self) -> None:
        _check("exchange", self.name, EXCHANGES)
        _check("forward_execution", self.forward, EXECUTIONS)
        _check("backward_execution", self.backward, EXECUTIONS)
        heads = self.kv_heads_per_gather
        if heads is not None and (type(heads) is not int or heads < 1):
            raise ConfigError(
                f"kv_heads_per_gather must be an integer of at least 1, or None for all heads at once, "
                f"got {heads!r}. "
                "1 takes the least memory."
            )
        self._refuse_what_does_nothing()

    def _refuse_what_does_nothing(self) -> None:
        if self.name == "all_gather":
            return
        for name in ("forward", "backward"):
            if getattr(self, name) != "two_kernel":
                raise ConfigError(
                    f"{name}_execution={getattr(self, name)!r} says how gathered keys are attended to, but "
                    f"exchange={self.name!r} gathers none. {GATHER}"
                )
        if self.kv_heads_per_gather != 1:
            raise ConfigError(
                f"kv_heads_per_gather={self.kv_heads_per_gather} says how many K/V heads are gathered at a "
                f"time, but exchange={self.name!r} gathers none. {GATHER}"
            )


def _check(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(
            f"{name} must be one of {', '.join(allowed)}, got {value!r}. Choose one of these names."
        )

"""Attention modules that count their heads are told how many are left to a rank."""

from __future__ import annotations

from typing import Any

from lightning_cp.strategies.engines.tensor_parallel import names as known
from lightning_cp.strategies.engines.tensor_parallel.blocks import Attention


def leave_local_heads(attention: Attention, size: int) -> None:
    """Divide the counts of heads in a module's attributes; one that infers them from shapes has none."""
    module: Any = attention.module
    counts: dict[str, int] = dict.fromkeys(known.KV_HEADS, attention.kv_heads)
    counts |= dict.fromkeys(known.QUERY_HEADS, attention.query_heads)
    for name, count in counts.items():
        if vars(module).get(name) == count and type(vars(module)[name]) is int:
            setattr(module, name, count // size)
    if len(attention.ways_in) == 1 and hasattr(module, "config"):  # where it finds where keys begin
        module.config = LocalConfig(
            module.config,
            num_attention_heads=attention.query_heads // size,
            num_key_value_heads=attention.kv_heads // size,
        )


class LocalConfig:
    """A config seen by one rank's part of a module; all but the counts is the model's own."""

    def __init__(self, config: Any, **counts: int) -> None:
        self.__dict__.update(counts)
        self.__dict__["_config"] = config

    def __getattr__(self, name: str) -> Any:
        if name == "_config":  # a copy that is being made
            raise AttributeError(name)
        return getattr(self._config, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._config, name, value)

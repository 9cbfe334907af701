"""A decoder as a planner sees it: names and shapes of its parameters, and what a token goes through."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Parameter:
    """One parameter of a module."""

    name: str
    """As in a checkpoint; of a layer's, from the layer on."""
    shape: Shape
    tp_dim: int | None = None
    """The dimension that tensor-parallel ranks share; ``None``: each has all of it."""

    @property
    def numel(self) -> int:
        """Entries."""
        return math.prod(self.shape)

    def is_shared(self, tp_size: int) -> bool:
        """True if so many tensor-parallel ranks share it: parts are equal, or there are none."""
        return tp_size > 1 and self.tp_dim is not None and self.shape[self.tp_dim] % tp_size == 0

    def local_shape(self, tp_size: int) -> Shape:
        """Of a tensor-parallel rank's part."""
        if not self.is_shared(tp_size):
            return self.shape
        return tuple(n // tp_size if dim == self.tp_dim else n for dim, n in enumerate(self.shape))


@dataclass(frozen=True)
class Layer:
    """A block: attention, and an MLP or experts."""

    parameters: tuple[Parameter, ...]
    window: int | None = None
    """Keys that a query sees, itself included; ``None``: all before it."""


@dataclass(frozen=True, eq=False)
class Model:
    """A decoder whose layers are alike but for their windows. It equals itself only: hashing is quick."""

    name: str
    family: str
    """``model_type`` of Hugging Face."""
    features: int
    inner: int
    """Features within an MLP, or within an expert."""
    heads: int
    kv_heads: int
    head_dim: int
    """Of queries and keys."""
    vocabulary: int
    before: tuple[Parameter, ...]
    layers: tuple[Layer, ...]
    after: tuple[Parameter, ...]
    tied: bool = False
    """The embedding is the head too."""
    experts: int = 0
    experts_per_token: int = 0
    shares_layers: bool = True
    """Whether tensor-parallel ranks may share its layers, by the automatic plan."""
    positions: int | None = None
    """That its config names; ``None``: it names none."""
    assumed: str = ""
    """What the planner could not know of the family, in words; nothing where it does."""
    other_value_dim: int | None = None
    """Head dim of values where it is not that of keys."""

    @property
    def value_dim(self) -> int:
        """Head dim of values."""
        return self.head_dim if self.other_value_dim is None else self.other_value_dim

    @property
    def flops_per_pair(self) -> int:
        """Of a visible pair and head, forward and backward: six for each entry of a key, and of a value."""
        return 6 * (self.head_dim + self.value_dim)

    @property
    def parameters(self) -> Iterator[Parameter]:
        """All of them, with whole names, in order of use."""
        yield from self.before
        for at, layer in enumerate(self.layers):
            for one in layer.parameters:
                yield Parameter(f"model.layers.{at}.{one.name}", one.shape, one.tp_dim)
        yield from self.after

    @cached_property
    def num_parameters(self) -> int:
        """Each counted once."""
        return sum(one.numel for one in self.parameters)

    @cached_property
    def windows(self) -> dict[int | None, int]:
        """How many layers have each window."""
        return dict(Counter(layer.window for layer in self.layers))

    @property
    def tp_sizes(self) -> tuple[int, ...]:
        """Tensor-parallel sizes that its heads allow."""
        if not self.shares_layers:
            return (1,)
        common = math.gcd(self.heads, self.kv_heads)
        return tuple(n for n in range(1, common + 1) if common % n == 0)

    @property
    def layer_products(self) -> int:
        """Parameters of a layer that multiply each token; of experts, those that a token goes through."""
        total = 0
        for one in self.layers[0].parameters:
            if len(one.shape) == 2:
                total += one.numel
            elif len(one.shape) == 3:  # experts: [E, out, in]
                total += one.numel // self.experts * self.experts_per_token
        return total

    @property
    def head_products(self) -> int:
        """Parameters of the layer that makes logits."""
        return self.vocabulary * self.features

    @property
    def flops_per_token(self) -> int:
        """Outside of attention, forward and backward: 6 for each parameter that multiplies a token."""
        return 6 * (len(self.layers) * self.layer_products + self.head_products)

"""Tensors without values, which stand in for those whose values are not at hand.

What sets one of a module's values often writes its others as well: ``_init_weights`` draws a weight before it
sets the buffer beside it. A blank lets itself be written, draws no random numbers for it, and takes no
memory, however large it says that it is. Unlike a tensor on the meta device it is where the others are, so
that ``torch.arange(n, device=self.weight.device)`` means what it says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils import _pytree as tree


class Blank(torch.Tensor):
    """Shape, dtype and device of a tensor; a write changes nothing, a read raises a ``RuntimeError``."""

    is_meta: Any = True
    """There is nothing to sample, as PyTorch's ``trunc_normal_`` asks, which else looks at what it drew."""
    __torch_function__: ClassVar[Any] = torch._C._disabled_torch_function_impl
    _meta: torch.Tensor
    _name: str

    @staticmethod
    def __new__(cls, meta: torch.Tensor, device: torch.device, name: str) -> Blank:
        made: Any = torch.Tensor._make_wrapper_subclass(
            cls,
            meta.shape,
            strides=meta.stride(),
            storage_offset=meta.storage_offset(),
            dtype=meta.dtype,
            device=device,
        )
        made._meta, made._name = meta, name
        return made

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"Blank({self._name}, shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_dispatch__(
        cls,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Do what needs no values."""
        given = kwargs or {}
        first = next(x for x in tree.tree_leaves((args, given)) if isinstance(x, Blank))
        if func.is_view:
            found = func(*_each(_shape_of, args), **_each(_shape_of, given))
            return _each(lambda x: Blank(x, first.device, first._name), found)
        if _is_new(func):
            return func(*_each(_any_like, args), **_each(_any_like, given))
        written = list(_written(func, args, given))
        if not written or not all(isinstance(x, Blank) for x in written):
            raise RuntimeError(f"{first._name} has no values then, and {func} reads them")
        returned = len(func._schema.returns)
        return None if not returned else written[0] if returned == 1 else tuple(written)


def blank_like(x: torch.Tensor, device: torch.device, name: str) -> torch.Tensor:
    """As large as all of ``x``, and a parameter if it is one."""
    made: torch.Tensor = Blank(torch.empty(x.shape, dtype=x.dtype, device="meta"), device, name)
    return nn.Parameter(made, x.requires_grad) if isinstance(x, nn.Parameter) else made


def _each(change: Callable[[torch.Tensor], torch.Tensor], x: Any) -> Any:
    return tree.tree_map_only(torch.Tensor, change, x)


def _shape_of(x: torch.Tensor) -> torch.Tensor:
    return x._meta if isinstance(x, Blank) else x


def _any_like(x: torch.Tensor) -> torch.Tensor:
    """One number in the place of all, for what looks at shape, dtype and device only."""
    if not isinstance(x, Blank):
        return x
    return torch.empty((), dtype=x.dtype, device=x.device).expand(x.shape)


def _is_new(func: Any) -> bool:
    """True if it makes another tensor, of other values: ``zeros_like``, ``new_empty``."""
    name: str = func._schema.name.removeprefix("aten::")
    return name.endswith("_like") or name.startswith("new_")


def _written(func: Any, args: Sequence[Any], given: Mapping[str, Any]) -> Iterator[Any]:
    for at, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[at] if at < len(args) else given.get(argument.name)
            yield from value if isinstance(value, list) else [value]

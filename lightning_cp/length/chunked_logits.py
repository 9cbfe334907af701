"""Logits that are never made: what a model does to them is noted, and their cross-entropy made in chunks.

They look like the tensor ``[..., vocabulary]`` (``shape``, ``dtype``, ``device``), and are what a model's
head returns while its loss is chunked. What treats each number by itself (a change of dtype, a cap, a
factor) is noted, rows may be flattened, and ``torch.nn.functional.cross_entropy`` computes the loss from
the hidden states, with the weight that the head had. Anything else would need the logits, and is refused
by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
import torch.nn.functional as F

from lightning_cp.errors import ConfigError
from lightning_cp.length.cross_entropy import changed_cross_entropy, compute_dtype

Function = Callable[..., Any]
_parse_to: Function = torch._C._nn._parse_to  # type: ignore[attr-defined]

_DTYPES = {name: getattr(torch, name) for name in ("float", "double", "bfloat16", "half")}
_ONE_BY_ONE = {*_DTYPES, "to", "type_as", "contiguous", "tanh"}
"""Methods that treat each number by itself."""
_BY_A_NUMBER = {
    *("mul", "multiply", "div", "divide", "true_divide", "add", "sub"),
    *("__mul__", "__rmul__", "__truediv__", "__add__", "__radd__", "__sub__"),
}
_OF_ROWS = {"view", "reshape", "flatten"}
_ABOUT = {"size", "dim", "numel", "is_floating_point", "element_size", "ndimension"}
_ATTRIBUTES = {"shape", "dtype", "ndim", "itemsize"}


class Head:
    """What the logits of one call of a head would be made of; forgotten when its model returns."""

    def __init__(
        self,
        hidden_BLC: torch.Tensor,
        weight_VC: torch.Tensor,
        bias_V: torch.Tensor | None,
        chunk_tokens: int,
    ) -> None:
        self.tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None] | None
        self.tensors = hidden_BLC, weight_VC, bias_V
        self.chunk_tokens = chunk_tokens
        self.device = hidden_BLC.device
        self.needs_gradient = torch.is_grad_enabled() and any(
            x is not None and x.requires_grad for x in self.tensors
        )

    def logits(self) -> ChunkedLogits:
        """As the head would return them."""
        assert self.tensors is not None
        hidden, weight, _ = self.tensors
        shape = (*hidden.shape[:-1], weight.shape[0])
        return ChunkedLogits(
            self, torch.empty(shape, dtype=compute_dtype(hidden, weight), device="meta")
        )


class ChunkedLogits:
    """Not a tensor, so that whatever has not thought of it cannot use it as one."""

    def __init__(
        self, head: Head, like: torch.Tensor, noted: tuple[Function, ...] = (), *, same: bool = True
    ) -> None:
        self._head = head
        self._like = like
        """Without memory; whatever is done to these logits is done to it first."""
        self._noted = noted
        self._same = same
        """What was noted changes no loss: losses are made of float32 at least in any case."""

    @property
    def device(self) -> torch.device:
        """Of the hidden states."""
        return self._head.device

    @property
    def requires_grad(self) -> bool:
        """True if backward will come through the head."""
        return self._head.needs_gradient

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # a protocol that objects have or not
            raise AttributeError(name)
        if name in _ATTRIBUTES | _ABOUT:
            return getattr(self._like, name)
        if name not in _ONE_BY_ONE | _BY_A_NUMBER | _OF_ROWS:
            refuse(name)
        return lambda *args, **kwargs: self._call(name, args, kwargs)

    @classmethod
    def __torch_function__(
        cls, func: Function, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        own = args[0] if args else kwargs.pop("input", None)
        if not isinstance(own, ChunkedLogits):
            refuse(getattr(func, "__name__", str(func)))
        if func is F.cross_entropy:
            return own._cross_entropy(args[1:], kwargs)
        name = getattr(func, "__name__", "")
        if name not in _ONE_BY_ONE | _BY_A_NUMBER | _OF_ROWS:
            refuse(name or str(func))
        return own._call(name, args[1:], kwargs)

    def _call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ChunkedLogits:
        if name in _OF_ROWS:
            return self._flattened(name, args, kwargs)
        if name in ("to", "type_as") or name in _DTYPES:
            return self._cast(_DTYPES.get(name) or self._dtype_of(name, args, kwargs))
        if name == "contiguous":
            return self
        if name in _BY_A_NUMBER:
            numbers = all(type(x) in (int, float) for x in (*args, *kwargs.values()))
            if not numbers or not args:
                refuse(f"{name} with another tensor")

        def note(z: torch.Tensor) -> torch.Tensor:
            return getattr(z, name)(*args, **kwargs)

        return ChunkedLogits(self._head, note(self._like), (*self._noted, note), same=False)

    def _cast(self, dtype: torch.dtype) -> ChunkedLogits:
        """Float32 is float32 at least: what models ask for before their loss takes nothing from float64."""

        def note(z: torch.Tensor) -> torch.Tensor:
            wide = dtype == torch.float32
            return z.to(torch.promote_types(z.dtype, dtype) if wide else dtype)

        same = self._same and dtype in (self._like.dtype, torch.float32)
        return ChunkedLogits(self._head, self._like.to(dtype), (*self._noted, note), same=same)

    def _flattened(self, name: str, args: Any, kwargs: Any) -> ChunkedLogits:
        like = getattr(self._like, name)(*args, **kwargs)
        if like.shape[-1:] != self._like.shape[-1:]:
            refuse(f"{name} to {list(like.shape)}")
        return ChunkedLogits(self._head, like, self._noted, same=self._same)

    def _dtype_of(self, name: str, args: Any, kwargs: Any) -> torch.dtype:
        """What ``to`` and ``type_as`` change; to another device nothing can be moved that does not exist."""
        if args and isinstance(args[0], (torch.Tensor, ChunkedLogits)):
            device, dtype = args[0].device, args[0].dtype
        else:
            device, dtype, *_ = _parse_to(*args, **kwargs)
        here = self.device
        if device is not None and torch.device(device) != here:
            other = torch.device(device)
            if other.type != here.type or other.index is not None:
                refuse(f"{name} another device ({device})")
        return self._like.dtype if dtype is None else dtype

    def _cross_entropy(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        names = ("target", "weight", "size_average", "ignore_index", "reduce", "reduction")
        given = {**dict(zip((*names, "label_smoothing"), args, strict=False)), **kwargs}
        target = given.pop("target", None)
        if given.pop("label_smoothing", 0.0) != 0.0:
            refuse("cross_entropy with label_smoothing=")
        for name in ("weight", "size_average", "reduce"):
            if given.pop(name, None) is not None:
                refuse(f"cross_entropy with {name}=")
        shape = self._like.shape
        if not isinstance(target, torch.Tensor) or target.shape != shape[:1] or len(shape) != 2:
            refuse("cross_entropy of other than logits [N, V] and N targets")
        if self._head.tensors is None:
            refuse("cross_entropy after the model has returned", _LATE)
        hidden, weight, bias = self._head.tensors
        return changed_cross_entropy(
            *(hidden.flatten(0, -2), weight, bias, target, self._change()),
            ignore_index=given.get("ignore_index", -100),
            reduction=given.get("reduction") or "mean",
            chunk_tokens=self._head.chunk_tokens,
        )

    def _change(self) -> Function | None:
        """All that was noted, for a chunk of logits [n, V]; ``None`` if it changes no loss."""
        return None if self._same else lambda z: _all(self._noted, z)

    def __mul__(self, other: Any) -> ChunkedLogits:
        return self._call("__mul__", (other,), {})

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> ChunkedLogits:
        return self._call("__truediv__", (other,), {})

    def __add__(self, other: Any) -> ChunkedLogits:
        return self._call("__add__", (other,), {})

    __radd__ = __add__

    def __sub__(self, other: Any) -> ChunkedLogits:
        return self._call("__sub__", (other,), {})

    def __len__(self) -> int:
        return len(self._like)

    def __repr__(self) -> str:
        return f"ChunkedLogits(shape={tuple(self.shape)}, dtype={self.dtype}, never made)"

    __hash__ = object.__hash__


def _all(noted: Iterable[Function], z: torch.Tensor) -> torch.Tensor:
    for function in noted:
        z = function(z)
    return z


_INSTEAD = (
    "The model computes its loss of labels=, and nothing else of its logits. To use them, call the "
    "model without labels (they are whole then), or leave chunked_loss away; for a loss of your own "
    "call lightning_cp.linear_cross_entropy with hidden states and the head's weight."
)
_LATE = (
    "The loss is computed within the model's forward, where weights are whole: pass labels= to the "
    "model, or call lightning_cp.linear_cross_entropy."
)


def refuse(what: str, instead: str = _INSTEAD) -> NoReturn:
    """Somebody needs the logits.

    Raises:
        ConfigError: always.
    """
    raise ConfigError(
        f"chunked_loss= computes the loss without ever making the logits, but they were asked for: {what}. "
        f"{instead}"
    )


def _refusing(name: str) -> Function:
    return lambda *args: refuse(name)


for _name in (
    *(
        "__getitem__",
        "__setitem__",
        "__iter__",
        "__array__",
        "__reduce_ex__",
        "__float__",
        "__bool__",
    ),
    *("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__neg__", "__abs__", "__pow__"),
    *("__rsub__", "__rtruediv__", "__matmul__", "__imul__", "__itruediv__", "__iadd__", "__isub__"),
):  # Python looks these up on the class, past ``__getattr__``
    setattr(ChunkedLogits, _name, _refusing(_name))

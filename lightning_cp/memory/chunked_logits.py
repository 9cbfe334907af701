"""Lazy logits of a Hugging Face model: its loss is computed in chunks, without ever making the logits.

While a step is active, the head of a model that is called with ``labels=`` returns ``ChunkedLogits``, which
look like the tensor ``[..., vocabulary]`` (``shape``, ``dtype``, ``device``). Elementwise operations (a
change of dtype, a cap, a factor) are recorded, rows may be flattened, and
``torch.nn.functional.cross_entropy``, called by transformers' loss function or the model, computes the loss
from the hidden states and the head's weight. Any other operation would need the logits, and is refused by
name. Called without labels, or outside of a step, the model makes its logits as usual.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import nn

from lightning_cp.errors import ConfigError
from lightning_cp.memory.chunked_loss import changed_cross_entropy, compute_dtype
from lightning_cp.models.hf.forward import arguments_by_name
from lightning_cp.models.hf.positions import parameters_of
from lightning_cp.utils.patching import PatchSet, add_hook
from lightning_cp.utils.tracing import exclude_from_compile

Function = Callable[..., Any]
_parse_to: Function = torch._C._nn._parse_to  # type: ignore[attr-defined]

_DTYPES = {name: getattr(torch, name) for name in ("float", "double", "bfloat16", "half")}
_ONE_BY_ONE = {*_DTYPES, "to", "type_as", "contiguous", "tanh"}
"""Elementwise methods."""
_BY_A_NUMBER = {
    *("mul", "multiply", "div", "divide", "true_divide", "add", "sub"),
    *("__mul__", "__rmul__", "__truediv__", "__add__", "__radd__", "__sub__"),
}
_OF_ROWS = {"view", "reshape", "flatten"}
_ABOUT = {"size", "dim", "numel", "is_floating_point", "element_size", "ndimension"}
_ATTRIBUTES = {"shape", "dtype", "ndim", "itemsize"}


class HeadCall:
    """Inputs of one call of a head, which make its logits; deleted when the model returns."""

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
        """Return lazy logits in place of the head's result."""
        assert self.tensors is not None
        hidden, weight, _ = self.tensors
        shape = (*hidden.shape[:-1], weight.shape[0])
        return ChunkedLogits(
            self, torch.empty(shape, dtype=compute_dtype(hidden, weight), device="meta")
        )


class ChunkedLogits:
    """Lazy logits; not a tensor, so that code which does not support them fails."""

    def __init__(
        self,
        head: HeadCall,
        like: torch.Tensor,
        noted: tuple[Function, ...] = (),
        *,
        same: bool = True,
    ) -> None:
        self._head = head
        self._like = like
        """Meta tensor of the same shape; each operation runs on it first."""
        self._noted = noted
        self._same = same
        """The recorded operations do not change the loss, which uses float32 at least in any case."""

    @property
    def device(self) -> torch.device:
        """Device of the hidden states."""
        return self._head.device

    @property
    def requires_grad(self) -> bool:
        """True if the head needs a gradient."""
        return self._head.needs_gradient

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # a protocol, whose absence callers test for
            raise AttributeError(name)
        if name in _ATTRIBUTES | _ABOUT:
            return getattr(self._like, name)
        if name not in _ONE_BY_ONE | _BY_A_NUMBER | _OF_ROWS:
            raise_needs_logits(name)
        return lambda *args, **kwargs: self._call(name, args, kwargs)

    @classmethod
    def __torch_function__(
        cls, func: Function, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        own = args[0] if args else kwargs.pop("input", None)
        if not isinstance(own, ChunkedLogits):
            raise_needs_logits(getattr(func, "__name__", str(func)))
        if func is F.cross_entropy:
            return own._cross_entropy(args[1:], kwargs)
        name = getattr(func, "__name__", "")
        if name not in _ONE_BY_ONE | _BY_A_NUMBER | _OF_ROWS:
            raise_needs_logits(name or str(func))
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
                raise_needs_logits(f"{name} with another tensor")

        def note(z: torch.Tensor) -> torch.Tensor:
            return getattr(z, name)(*args, **kwargs)

        return ChunkedLogits(self._head, note(self._like), (*self._noted, note), same=False)

    def _cast(self, dtype: torch.dtype) -> ChunkedLogits:
        """Record a cast; to float32 means at least float32, so that float64 keeps its precision."""

        def note(z: torch.Tensor) -> torch.Tensor:
            wide = dtype == torch.float32
            return z.to(torch.promote_types(z.dtype, dtype) if wide else dtype)

        same = self._same and dtype in (self._like.dtype, torch.float32)
        return ChunkedLogits(self._head, self._like.to(dtype), (*self._noted, note), same=same)

    def _flattened(self, name: str, args: Any, kwargs: Any) -> ChunkedLogits:
        like = getattr(self._like, name)(*args, **kwargs)
        if like.shape[-1:] != self._like.shape[-1:]:
            raise_needs_logits(f"{name} to {list(like.shape)}")
        return ChunkedLogits(self._head, like, self._noted, same=self._same)

    def _dtype_of(self, name: str, args: Any, kwargs: Any) -> torch.dtype:
        """Return the dtype that ``to`` or ``type_as`` requests; another device is refused."""
        if args and isinstance(args[0], (torch.Tensor, ChunkedLogits)):
            device, dtype = args[0].device, args[0].dtype
        else:
            device, dtype, *_ = _parse_to(*args, **kwargs)
        here = self.device
        if device is not None and torch.device(device) != here:
            other = torch.device(device)
            if other.type != here.type or other.index is not None:
                raise_needs_logits(f"{name} another device ({device})")
        return self._like.dtype if dtype is None else dtype

    def _cross_entropy(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        names = ("target", "weight", "size_average", "ignore_index", "reduce", "reduction")
        given = {**dict(zip((*names, "label_smoothing"), args, strict=False)), **kwargs}
        target = given.pop("target", None)
        if given.pop("label_smoothing", 0.0) != 0.0:
            raise_needs_logits("cross_entropy with label_smoothing=")
        for name in ("weight", "size_average", "reduce"):
            if given.pop(name, None) is not None:
                raise_needs_logits(f"cross_entropy with {name}=")
        shape = self._like.shape
        if not isinstance(target, torch.Tensor) or target.shape != shape[:1] or len(shape) != 2:
            raise_needs_logits("cross_entropy of other than logits [N, V] and N targets")
        if self._head.tensors is None:
            raise_needs_logits("cross_entropy after the model has returned", _LATE)
        hidden, weight, bias = self._head.tensors
        return changed_cross_entropy(
            *(hidden.flatten(0, -2), weight, bias, target, self._change()),
            ignore_index=given.get("ignore_index", -100),
            reduction=given.get("reduction") or "mean",
            chunk_tokens=self._head.chunk_tokens,
        )

    def _change(self) -> Function | None:
        """Return the recorded operations for a chunk of logits [n, V]; ``None`` if they change no loss."""
        return None if self._same else lambda z: _apply_all(self._noted, z)

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


def _apply_all(noted: Iterable[Function], z: torch.Tensor) -> torch.Tensor:
    for function in noted:
        z = function(z)
    return z


_INSTEAD = (
    "The model computes its loss of labels=, and nothing else of its logits. To use them, call the "
    "model without labels (they are whole then), or remove chunked_loss=; for your own loss "
    "call lightning_cp.linear_cross_entropy with hidden states and the head's weight."
)
_LATE = (
    "The loss is computed within the model's forward, where weights are whole: pass labels= to the "
    "model, or call lightning_cp.linear_cross_entropy."
)


def raise_needs_logits(what: str, instead: str = _INSTEAD) -> NoReturn:
    """Raise for an operation that needs the logits.

    Raises:
        ConfigError: always.
    """
    raise ConfigError(
        f"chunked_loss= computes the loss without ever making the logits, but they were asked for: {what}. "
        f"{instead}"
    )


def _refusing(name: str) -> Function:
    return lambda *args: raise_needs_logits(name)


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


_UNCHUNKED: list[HeadCall] = []
"""Marker, in place of a call's head inputs, of a call that makes its logits."""


def chunk_heads(models: Sequence[Any], chunk_tokens: int) -> list[ChunkedHead]:
    """Return the heads of all models that have one and take labels; ``enter`` of each begins a step.

    Args:
        models: Hugging Face models, none inside another.
        chunk_tokens: number of tokens whose logits exist at once.

    Raises:
        ConfigError: no model has a head, or a head is not a plain ``nn.Linear``.
    """
    found = [
        (model, head)
        for model in models
        if "labels" in parameters_of(model) and (head := _head_of(model)) is not None
    ]
    if not found:
        names = ", ".join(type(model).__name__ for model in models) or "no Hugging Face model"
        raise ConfigError(
            f"chunked_loss={chunk_tokens} computes the loss of a Hugging Face language model behind its "
            "head, but there is none that has a head (get_output_embeddings()) and takes labels: "
            f"{names}. In your own module call lightning_cp.linear_cross_entropy in the step, and "
            "remove chunked_loss=."
        )
    return [ChunkedHead(model, head, chunk_tokens) for model, head in found]


def _head_of(model: Any) -> nn.Module | None:
    """Return the layer that makes logits, which must be a plain one, or ``None``.

    Raises:
        ConfigError: it is another kind of layer.
    """
    try:
        head = model.get_output_embeddings()
    except (AttributeError, NotImplementedError):  # transformers' errors for models without a head
        return None
    if head is not None and (type(head) is not nn.Linear or "forward" in vars(head)):
        raise ConfigError(
            f"chunked_loss: the head of {type(model).__name__} is a {type(head).__name__}, and only a plain "
            "nn.Linear is known to compute weight times hidden states plus bias (LoRA, quantised and "
            "parametrised layers do something else). Leave the head out of it, or remove chunked_loss=."
        )
    return head


class ChunkedHead:
    """Head of one model, replaced from ``enter`` until the call of the function that it returns."""

    def __init__(self, model: Any, head: nn.Module, chunk_tokens: int) -> None:
        self._model = model
        self._head = head
        self._chunk_tokens = chunk_tokens
        self._calls: list[list[HeadCall]] = []
        """Head inputs of each nested call of the model in progress."""
        self._made_whole = False
        """A call with gradients had no labels."""

    def enter(self) -> Callable[[], None]:
        """Replace the head's forward; return the undo function."""
        before, after = exclude_from_compile(self._before), exclude_from_compile(self._after)
        model = self._model
        patches = PatchSet()
        patches.add(self._forget)
        patches.add(add_hook(model.register_forward_pre_hook, before, with_kwargs=True))
        patches.add(add_hook(model.register_forward_hook, after, always_call=True))
        patches.put_method(self._head, "forward", exclude_from_compile(self._forward))
        return patches.undo

    def report(self) -> str | None:
        """Return the message that logits were made anyway, or ``None``."""
        if not self._made_whole:
            return None
        return (
            f"chunked_loss: {type(self._model).__name__} was called without labels=, so its logits were made "
            "whole. Pass labels= to the model, or compute the loss by lightning_cp.linear_cross_entropy."
        )

    def _forward(self, hidden: torch.Tensor) -> ChunkedLogits | torch.Tensor:
        head: Any = self._head
        if not self._calls or self._calls[-1] is _UNCHUNKED:
            return F.linear(hidden, head.weight, head.bias)
        _check_plain(head)
        noted = HeadCall(hidden, head.weight, head.bias, self._chunk_tokens)
        self._calls[-1].append(noted)
        return noted.logits()

    def _before(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if model is not self._model:  # a copy of it
            return
        labelled = (
            arguments_by_name(parameters_of(model), args, kwargs)[1].get("labels") is not None
        )
        self._calls.append([] if labelled else _UNCHUNKED)
        self._made_whole |= not labelled and torch.is_grad_enabled()

    def _after(self, model: Any, args: Any, output: Any) -> None:
        if model is self._model and self._calls:
            for head in self._calls.pop():
                head.tensors = None  # a reference to the logits must not keep the tensors

    def _forget(self) -> None:
        while self._calls:
            for head in self._calls.pop():
                head.tensors = None


def _check_plain(head: nn.Module) -> None:
    """Check that no engine has changed the head since ``chunk_heads``.

    Raises:
        ConfigError: it was wrapped by itself, or replaced by another layer.
    """
    if type(head) is nn.Linear:
        return
    raise ConfigError(
        f"chunked_loss: the head became a {type(head).__name__}, whose weight is whole within its own "
        "forward only, while the loss is computed after it. Leave the head out of wrap_modules: it "
        "then belongs to the model itself."
    )

"""Replacements of PyTorch's dropout and random functions, which draw per token while a step is active.

``F.dropout`` and its variants look their operator up in ``torch._VF`` at each call, compiled or not, and
methods of tensors are looked up in ``torch.Tensor``: replacements there work in any import style.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import nn

from lightning_cp.randomness import counter
from lightning_cp.randomness.token_draws import (
    TokenDims,
    current_draws,
    draw_seed,
    dropout_mask,
    token_words,
)
from lightning_cp.utils.patching import (
    ChainedPatch,
    PatchSet,
    ReplacedFunction,
    without_garbage_collection,
)
from lightning_cp.utils.tracing import is_traced

_SAMPLES: dict[str, Callable[..., torch.Tensor]] = {
    "uniform_": counter.uniform,
    "normal_": counter.normal,
    "log_normal_": counter.log_normal,
    "cauchy_": counter.cauchy,
    "exponential_": counter.exponential,
    "geometric_": counter.geometric,
    "bernoulli_": counter.bernoulli,
    "random_": counter.integers,
}
"""Samplers of the methods that fill a tensor."""

_NAMES = {"from": "low", "to": "high"}
"""Arguments of tensor methods that the samplers name otherwise."""

_OURS = ("low", "high", "size", "generator", "requires_grad", "out", "names")
"""Arguments of random functions that are not passed to ``torch.empty``."""


def _place(x: torch.Tensor, *, activation: bool = False) -> TokenDims | None:
    """Return the token dims of a plain tensor in the active step, or ``None``."""
    draws = current_draws()
    if draws is None or type(x) not in (torch.Tensor, nn.Parameter) or x.is_meta:
        return None
    return draws.token_dims(x.shape, activation=activation, parameter=isinstance(x, nn.Parameter))


def _dropout(name: str, original: Any) -> Callable[..., torch.Tensor]:
    """Return PyTorch's dropout of that name, per token where its input runs along the tokens."""
    feature, alpha, in_place = "feature" in name, "alpha" in name, name.endswith("_")

    def drops_per_token(x: torch.Tensor) -> bool:
        place = _place(x, activation=True)
        if place is None or not feature or place.token is None:
            return place is not None
        return place.token < 2  # otherwise it drops whole features, of all tokens

    @wraps(original)
    def dropout(input: torch.Tensor, p: float, train: bool) -> torch.Tensor:
        if _dropout_off:
            return input
        if not train or not 0 < p < 1:
            return original(input, p, train)
        if is_traced(input):
            taken = torch.ops.lightning_cp.token_drops(input, draw_seed(input.device), p, feature)
        elif drops_per_token(input):
            taken = dropout_mask(input, draw_seed(input.device), p, feature)
        else:
            return original(input, p, train)
        return (_drop_alpha if alpha else _drop)(input, taken, p, in_place)

    return dropout


def _drop(x: torch.Tensor, taken: torch.Tensor, p: float, in_place: bool) -> torch.Tensor:
    left = x.masked_fill_(taken, 0) if in_place else x.masked_fill(taken, 0)
    return left.mul_(1 / (1 - p))


def _drop_alpha(x: torch.Tensor, taken: torch.Tensor, p: float, in_place: bool) -> torch.Tensor:
    """Alpha dropout, which preserves mean and variance (Klambauer et al. 2017, arXiv 1706.02515)."""
    alpha = 1.7580993408473766
    a = 1 / math.sqrt((alpha * alpha * p + 1) * (1 - p))
    left = x.masked_fill_(taken, -alpha) if in_place else x.masked_fill(taken, -alpha)
    return left.mul_(a).add_(alpha * a * p)


def _fill(name: str, original: Any) -> Callable[..., torch.Tensor]:
    sample = _SAMPLES[name]

    @wraps(original)
    def fill(self: torch.Tensor, *args: Any, generator: Any = None, **kwargs: Any) -> torch.Tensor:
        if is_traced(self):
            drawn = torch.ops.lightning_cp.token_words(self, draw_seed(self.device, generator))
        elif _place(self) is not None:
            drawn = token_words(self, draw_seed(self.device, generator))
        else:
            return original(self, *args, generator=generator, **kwargs)
        named = {_NAMES.get(key, key): value for key, value in kwargs.items()}
        return self.copy_(sample(drawn, self.dtype, *args, **named))

    return fill


def _is_along(shape: Any, kwargs: dict[str, Any]) -> bool:
    """True if the requested tensor runs along the step's tokens; compiled code decides at run time."""
    if kwargs.get("out") is not None or kwargs.get("names") is not None:
        return False
    if torch.compiler.is_compiling():
        return True
    draws = current_draws()
    return draws is not None and draws.token_dims(tuple(shape)) is not None


def _factory(name: str, original: Any) -> Callable[..., torch.Tensor]:
    """Return torch.rand or randn as an empty tensor that is filled."""
    fill = {"rand": "uniform_", "randn": "normal_"}[name]

    @wraps(original)
    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        one = len(args) == 1 and isinstance(args[0], (tuple, list))
        size = kwargs["size"] if "size" in kwargs else args[0] if one else args
        if not _is_along(size, kwargs):
            return original(*args, **kwargs)
        return _filled(torch.empty, (size,), fill, (), {**kwargs, "size": None})

    return make


def _like(name: str, original: Any) -> Callable[..., torch.Tensor]:
    """Return torch.rand_like, randn_like or randint_like."""
    fill = {"rand_like": "uniform_", "randn_like": "normal_", "randint_like": "random_"}[name]

    @wraps(original)
    def make(input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not is_traced(input) and _place(input) is None:
            return original(input, *args, **kwargs)
        bounds = _bounds(args, kwargs) if fill == "random_" else args
        return _filled(torch.empty_like, (input,), fill, bounds, kwargs)

    return make


def _integers(name: str, original: Any) -> Callable[..., torch.Tensor]:
    """Return torch.randint."""

    @wraps(original)
    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        size = kwargs["size"] if "size" in kwargs else args[-1]
        if not _is_along(size, kwargs):
            return original(*args, **kwargs)
        given = {"dtype": torch.int64, **kwargs, "size": None}
        bounds = _bounds(args if "size" in kwargs else args[:-1], kwargs)
        return _filled(torch.empty, (size,), "random_", bounds, given)

    return make


def _bounds(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, int]:
    """Return low and high of arguments (high) or (low, high), by position or by name."""
    *low, high = (*args, *[kwargs[name] for name in ("low", "high") if name in kwargs])
    return (low[0] if low else 0), high


def _filled(
    empty: Any, given: tuple[Any, ...], fill: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> torch.Tensor:
    others = {name: value for name, value in kwargs.items() if name not in _OURS}
    x = getattr(empty(*given, **others), fill)(*args, generator=kwargs.get("generator"))
    return x.requires_grad_() if kwargs.get("requires_grad") else x


def _bernoulli(name: str, original: Any) -> Callable[..., torch.Tensor]:
    @wraps(original)
    def bernoulli(input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("out") is not None or not (is_traced(input) or _place(input)):
            return original(input, *args, **kwargs)
        p = args[0] if args else kwargs.get("p")
        filled = torch.empty_like(input, requires_grad=False)
        return filled.bernoulli_(
            input.detach() if p is None else p, generator=kwargs.get("generator")
        )

    return bernoulli


def _normal(name: str, original: Any) -> Callable[..., torch.Tensor]:
    """Return torch.normal(mean, std), where either is a tensor."""

    @wraps(original)
    def normal(*args: Any, **kwargs: Any) -> torch.Tensor:
        mean, std = (*args, *[kwargs[x] for x in ("mean", "std") if x in kwargs], 1.0)[:2]
        tensors = [x.detach() for x in (mean, std) if isinstance(x, torch.Tensor)]
        shapes = [x.shape for x in tensors]
        if not tensors or not _is_along(torch.broadcast_shapes(*shapes), kwargs):
            return original(*args, **kwargs)
        empty = torch.empty_like(tensors[0] + tensors[-1])
        return (empty.normal_(generator=kwargs.get("generator")) * std + mean).detach()

    return normal


def _multinomial(name: str, original: Any) -> Callable[..., torch.Tensor]:
    """Return torch.multinomial: a race of exponential clocks, as on a GPU, or a search in cumulative sums."""

    @wraps(original)
    def multinomial(
        input: torch.Tensor, num_samples: int, replacement: bool = False, **kwargs: Any
    ) -> torch.Tensor:
        if kwargs.get("out") is not None or not (is_traced(input) or _place(input)):
            return original(input, num_samples, replacement, **kwargs)
        weights, generator = input.detach(), kwargs.get("generator")
        if not replacement or num_samples == 1:
            clocks = torch.empty_like(weights).exponential_(generator=generator)
            return (weights / clocks).topk(num_samples, -1).indices
        sums = weights.double().cumsum(-1)
        drawn = sums.new_empty(*weights.shape[:-1], num_samples).uniform_(generator=generator)
        return torch.searchsorted(sums, drawn * sums[..., -1:], right=True)

    return multinomial


_OF_WARNINGS = {
    "_standard_gamma": ("Gamma, Chi2 or StudentT of torch.distributions", "torch.rand"),
    "_sample_dirichlet": ("Beta or Dirichlet of torch.distributions", "torch.rand"),
    "native_dropout": ("torch.native_dropout", "torch.nn.functional.dropout"),
}
"""Callers of a function that warns, and replacements, where the function's name says neither."""


def _warning_wrapper(name: str, original: Any) -> Callable[..., Any]:
    """Return a function that draws the same on all ranks, with a warning where that is wrong."""

    @wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        draws = None if torch.compiler.is_compiling() else current_draws()
        shape = getattr(args[0], "shape", args[:1]) if args else ()
        trains = "rrelu" not in name or (kwargs.get("training") or True in args[3:])
        if draws is not None and trains and draws.token_dims(tuple(shape)) is not None:
            what, instead = _OF_WARNINGS.get(name, (f"torch.{name}", "torch.rand"))
            draws.warn_once(
                f"{what} of shape {tuple(shape)} draws the same on all ranks that share a sample, as if "
                f"their tokens were the same. Use {instead}, whose numbers are of each token."
            )
        return original(*args, **kwargs)

    return call


Wrap = Callable[[str, Any], Callable[..., Any]]

_VF_NAMES = [
    f"{kind}dropout{end}"
    for kind in ("", "alpha_", "feature_", "feature_alpha_")
    for end in ("", "_")
]
_TORCH: dict[str, Wrap] = {
    **dict.fromkeys(_VF_NAMES, _dropout),
    **dict.fromkeys(("rand", "randn"), _factory),
    **dict.fromkeys(("rand_like", "randn_like", "randint_like"), _like),
    **{"randint": _integers, "bernoulli": _bernoulli, "normal": _normal},
    "multinomial": _multinomial,
    **dict.fromkeys(("poisson", "binomial", "rrelu", "rrelu_", "randperm"), _warning_wrapper),
    **dict.fromkeys(_OF_WARNINGS, _warning_wrapper),
}
_TENSOR: dict[str, Wrap] = {
    **dict.fromkeys(_SAMPLES, _fill),
    **{"bernoulli": _bernoulli, "multinomial": _multinomial},
}

_users: list[object] = []
_patches = PatchSet()


@without_garbage_collection()
def patch_random_functions() -> Callable[[], None]:
    """Replace PyTorch's random functions; return the function that ends that.

    They stay replaced between steps, since compiled code does not look them up again.
    """
    if not _users:
        _replace()
    me = object()
    _users.append(me)

    @without_garbage_collection()
    def end() -> None:
        if me in _users:
            _users.remove(me)
            if not _users:
                _patches.undo()

    return end


_dropout_off: list[None] = []


@contextmanager
def without_dropout() -> Iterator[None]:
    """Disable dropout within the block, also in recomputation by backward, on any thread."""
    _dropout_off.append(None)
    try:
        yield
    finally:
        _dropout_off.pop()


def _replace() -> None:
    originals = {name: getattr(torch, name) for name in _TORCH}
    _patches.put_functions(
        [
            ReplacedFunction(torch, name, _TORCH[name](name, original), ChainedPatch(original))
            for name, original in originals.items()
        ]
    )
    places = [(torch._VF, dict.fromkeys(_VF_NAMES, _dropout)), (torch.Tensor, _TENSOR)]
    for home, wraps_of in places:
        for name, wrap in wraps_of.items():
            _patches.put_value(home, name, wrap(name, getattr(home, name)))

"""Random numbers of a step: independent per token, and equal for a row on all ranks that hold it.

Ranks that share a sample have the same random state, so they drop the same layers and add the same noise
levels. Drawn from that state, the numbers of their tokens would be the same, too. While a step is active,
dropout and PyTorch's random functions therefore look at the requested shape. Along the rank's tokens, one
seed is drawn from the usual generator, and each number is a function of (seed, row, global position,
feature): any number of ranks, with any layout, draws the numbers of one rank. Other shapes are drawn as
usual. Every call takes one seed, whatever its size, so the ranks' generators stay equal, and a checkpoint
that restores the generators for its recomputation restores the seeds.
"""

from __future__ import annotations

import logging
import math
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.checkpoint import get_device_states, set_device_states

from lightning_cp.errors import ConfigError
from lightning_cp.layout import SequenceLayout
from lightning_cp.randomness import counter
from lightning_cp.utils.tensors import to_device

_log = logging.getLogger("lightning_cp")

_WITHIN = "within `with strategy.draw_per({!r}):`, which ContextParallelMixin has as self.draw_per"

Per = Literal["token", "row"]
"""Unit of independent random numbers: a token, or a row of the batch."""


@dataclass(frozen=True)
class StepTokens:
    """The tokens of a step that a rank holds."""

    positions: torch.Tensor
    """int64 [L]: global positions."""
    rows: int
    data: tuple[int, int] = (0, 1)
    """Rank and size of data parallelism, which select the rows among all."""
    cp_rank: int = 0

    @classmethod
    def of(
        cls, layout: SequenceLayout, cp_rank: int, rows: int, data: tuple[int, int] = (0, 1)
    ) -> StepTokens:
        """Return the tokens of one rank."""
        return cls(layout.positions(cp_rank), rows, data, cp_rank)


@dataclass(frozen=True)
class TokenDims:
    """Dimensions of rows and tokens in a shape, or both in the first dimension."""

    row: int | None
    token: int | None
    """``None``: rows and tokens are one dimension, the first."""


SOME_TOKENS = TokenDims(-1, -1)
"""Token dims of a shape with an unknown subset of the rank's tokens."""


def find_token_dims(
    shape: Sequence[int], rows: int, tokens: int, *, not_last: bool = False
) -> TokenDims | None:
    """Find rows and tokens in a shape; ``None``: it does not run along the tokens.

    Args:
        shape: of the random numbers.
        rows: of the batch.
        tokens: of a row, on this rank.
        not_last: the last dimension holds features, even if it is as long.
    """
    size: tuple[int, ...] = tuple(shape)
    if len(size) == 0 or size == (rows,):
        return None
    if len(size) > 1 and size[1] == tokens and (len(size) > 2 or not not_last):
        return TokenDims(0, 1)
    if size[0] == rows * tokens:
        return TokenDims(None, None)
    if len(size) == 2 and size[0] == rows:
        return None
    if size[0] == tokens and len(size) > 2 and size[1] in (rows, 1):
        return TokenDims(1, 0)
    for dim in range(2, len(size)):
        if size[dim] == tokens and not (not_last and dim == len(size) - 1):
            return TokenDims(0, dim)
    return TokenDims(None, 0) if size[0] == tokens else None


class TokenDraws:
    """Random numbers of one model's steps, from ``begin`` to ``end``.

    Args:
        model: shapes of its parameters are not taken for those of tokens.
        is_local: true while a local module is being called.
    """

    def __init__(self, model: nn.Module, is_local: Callable[[], bool] = lambda: False) -> None:
        self._shapes = {tuple(p.shape) for p in model.parameters() if not is_lazy(p)}
        self._widths = {size for shape in self._shapes for size in shape}
        self._is_local = is_local
        self._tokens: StepTokens | None = None
        self._tile = slice(None)
        self._positions: dict[torch.device, torch.Tensor] = {}
        self._thread = 0
        self._per: list[Per] = []
        self._off = 0
        self._shared: tuple[frozenset[int], int] = frozenset(), 0
        self._warned: set[str] = set()
        self._requests: list[str] | None = []

    def begin(self, tokens: StepTokens) -> None:
        """Begin a step on these tokens; end the previous one."""
        if self._tokens is not None:
            self.end()
        self._tokens, self._thread = tokens, threading.get_ident()
        _active.append(weakref.ref(self))

    def pop_calls(self) -> list[str]:
        """Remove and return the recorded draws, one text per call: the shape, or "tokens"."""
        asked = self._requests or []
        self._requests = None if self._requests is None else []
        return asked

    def stop_recording(self) -> None:
        """Stop recording draws, after the first warning about a difference between ranks."""
        self._requests = None

    def end(self) -> None:
        """End the step: everything is drawn as usual."""
        self._tokens, self._per, self._off, self._shared = None, [], 0, (frozenset(), 0)
        self._tile, self._positions = slice(None), {}
        _active[:] = [ref for ref in _active if ref() not in (self, None)]

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Draw everything as usual within the block."""
        self._off += 1
        try:
            yield
        finally:
            self._off = max(0, self._off - 1)

    @contextmanager
    def per(self, what: Per) -> Iterator[None]:
        """Set the unit of random numbers within the block, for any shape."""
        self._per.append(what)
        try:
            yield
        finally:
            if self._per:
                self._per.pop()

    @contextmanager
    def tile(self, at: slice) -> Iterator[None]:
        """Restrict the rank's tokens to a slice within the block."""
        self._tile = at
        try:
            yield
        finally:
            self._tile = slice(None)

    def share_features(self, widths: frozenset[int] = frozenset(), rank: int = 0) -> None:
        """Declare feature counts that are one tensor-parallel rank's share, from here on; default: none."""
        self._shared = widths | self._shared[0] if widths else widths, rank

    def first_feature(self, count: int) -> int:
        """Return the global index of a call's first feature."""
        widths, rank = self._shared
        return rank * count if count in widths else 0

    def _local(self, device: torch.device) -> torch.Tensor:
        """Return int64 [L]: positions of the current tokens."""
        assert self._tokens is not None
        if device not in self._positions:  # copied once, and not for every call
            self._positions[device] = to_device(self._tokens.positions, device)
        return self._positions[device][self._tile]

    @property
    def applies(self) -> bool:
        """True if the current call belongs to the step, and not to a data-loading thread, for example."""
        if self._tokens is None or self._off:
            return False
        own = threading.get_ident() == self._thread
        # Autograd's threads, which recompute, were not started by Python.
        return own or isinstance(threading.current_thread(), threading._DummyThread)

    def token_dims(
        self, shape: Sequence[int], *, activation: bool = False, parameter: bool = False
    ) -> TokenDims | None:
        """Return the dims of the step's tokens in a shape; ``None``: ranks draw the same.

        Args:
            shape: of the random numbers.
            activation: they are for a layer's output. A last dimension as long as a side of a parameter is
                then taken for features, while other random numbers may be [rows, tokens].
            parameter: they are for a parameter.
        """
        found = self._find(shape, activation=activation, parameter=parameter)
        if self._requests is not None:
            self._requests.append(str(tuple(shape)) if found is None else "tokens")
        return found

    def _find(self, shape: Sequence[int], *, activation: bool, parameter: bool) -> TokenDims | None:
        assert self._tokens is not None
        asked = self._per[-1] if self._per else None
        if parameter or asked == "row":
            return None
        rows, count = self._tokens.rows, len(self._tokens.positions[self._tile])
        wide = count in self._widths and asked is None and (activation or len(shape) > 2)
        found = find_token_dims(shape, rows, count, not_last=wide)
        if asked == "token":
            return found or SOME_TOKENS
        if found is None:
            self._warn_of_part(tuple(shape), rows, count)
            return SOME_TOKENS if activation and self._is_of_some(tuple(shape)) else None
        if activation or tuple(shape) not in self._shapes or tuple(shape) == (rows, count):
            return found
        self.warn_once(
            f"random numbers of shape {tuple(shape)} are taken for those of a parameter of that shape, and "
            f"are the same on all ranks that share a sample; they could be of this rank's {count} tokens, "
            f"too. Draw them {_WITHIN.format('token')} (or 'row')."
        )
        return None

    def _warn_of_part(self, shape: tuple[int, ...], rows: int, count: int) -> None:
        """Warn of a shape with rows and fewer tokens: a chunk of them, or all but the last."""
        if self._is_local() or len(shape) < 2 or shape[0] != rows or shape in self._shapes:
            return
        if shape[1] == count - 1 or (len(shape) > 2 and 1 < shape[1] < count):
            self.warn_once(
                f"random numbers or dropout of shape {shape} are the same on all ranks that share a sample. "
                f"If they are for some of this rank's {count} tokens of a row, draw them "
                f"{_WITHIN.format('token')} (else 'row')."
            )

    def _is_of_some(self, shape: tuple[int, ...]) -> bool:
        """True for a layer's output without tokens or rows, such as an expert's tokens."""
        assert self._tokens is not None
        ones = (1, self._tokens.rows)
        if self._is_local() or not shape or shape[0] in ones:
            return False
        if len(shape) > 2 and shape[1] in ones:
            return False
        self.warn_once(
            f"dropout of a tensor of shape {shape}, which has neither this rank's "
            f"{len(self._tokens.positions)} tokens nor rows of the batch, is drawn for this rank alone, as "
            "for some of its tokens. Where all ranks that share a sample hold the same, call it "
            f"{_WITHIN.format('row')}."
        )
        return True

    def warn_once(self, line: str) -> None:
        """Log a warning once, on the first rank."""
        assert self._tokens is not None
        if line not in self._warned and self._tokens.cp_rank == 0 and self._tokens.data[0] == 0:
            _log.warning(line)
        self._warned.add(line)

    def keys(self, seed: torch.Tensor, place: TokenDims, shape: Sequence[int]) -> torch.Tensor:
        """Return keys, int64 [rows, L], of the tokens; for ``SOME_TOKENS``, of the first dimension."""
        assert self._tokens is not None
        rank, size = self._tokens.data
        if place == SOME_TOKENS:
            alone = torch.full((1,), -1 - self._tokens.cp_rank * size - rank, device=seed.device)
            return counter.token_keys(seed, alone, _first_indices(shape, seed.device))
        count = self._tokens.rows if place.token is None else 1
        count = count if place.row is None else shape[place.row]
        rows = torch.arange(count, device=seed.device) * size + rank
        return counter.token_keys(seed, rows, self._local(seed.device))


def describe_difference(asked: Sequence[Sequence[str]]) -> str | None:
    """Return the warning about ranks that share a sample and drew different shapes; ``None`` if none did.

    Args:
        asked: the draws of each rank, by ``TokenDraws.pop_calls``.
    """
    calls = enumerate(zip_longest(*asked, fillvalue="nothing"), 1)
    apart = next(((at, call) for at, call in calls if len(set(call)) > 1), None)
    if apart is None:
        return None
    of_ranks = ", ".join(f"rank {rank} for {shape}" for rank, shape in enumerate(apart[1]))
    return (
        "ranks that share a sample drew different random numbers: with call "
        f"{apart[0]} of a step, {of_ranks}. From there on their generators are apart, so that "
        "numbers of rows (noise levels, layers to drop) differ between them, which is silently "
        "wrong. Make the same calls on all of them, and draw numbers of some of a rank's tokens, "
        f"such as those that a mask selects, {_WITHIN.format('token')}."
    )


_active: list[weakref.ref[TokenDraws]] = []
"""Draws of the active steps, the latest last; weak, as a global must not keep a model alive."""


def _last_active() -> TokenDraws | None:
    while _active and _active[-1]() is None:
        _active.pop()
    return _active[-1]() if _active else None


def current_draws() -> TokenDraws | None:
    """Return the draws of the step that the current call belongs to, or ``None``."""
    draws = _last_active()
    return draws if draws is not None and draws.applies else None


def share_features(widths: frozenset[int] = frozenset(), rank: int = 0) -> None:
    """Declare, for the rest of the step, feature counts that are one tensor-parallel rank's share."""
    if not torch.compiler.is_compiling() and (draws := current_draws()) is not None:
        draws.share_features(widths, rank)


class TileDraws:
    """Random numbers of a call that runs tile by tile: each token gets those of a single call."""

    def __init__(self, x: torch.Tensor) -> None:
        self._x = x
        self._start: Any = None

    @contextmanager
    def tile(self, at: slice) -> Iterator[None]:
        """Restrict tokens to the slice ``at`` within the block; every tile draws the first one's seeds."""
        draws = current_draws()
        if draws is None:
            yield
            return
        if self._start is None:
            self._start = torch.get_rng_state(), *get_device_states(self._x)
        else:
            own, devices, states = self._start
            torch.set_rng_state(own)
            set_device_states(devices, states, device_type=self._x.device.type)
        with draws.tile(at):
            yield


def draw_seed(device: torch.device, generator: torch.Generator | None = None) -> torch.Tensor:
    """Draw int64 [] from the generator that would have drawn the numbers, on that generator's device."""
    at = device if generator is None else generator.device
    seed = _ORIGINAL["randint"](2**62, (), dtype=torch.int64, device=at, generator=generator)
    return seed.to(device)


_ORIGINAL = {"randint": torch.randint}
"""PyTorch's own function, in a container: a module global would be replaced."""


def _arrange(x_RLF: torch.Tensor, place: TokenDims | None, shape: Sequence[int]) -> torch.Tensor:
    """Rearrange [R, L, F] to a shape with rows and tokens at their dims."""
    if place in (None, SOME_TOKENS) or place.token is None:
        return x_RLF.reshape(tuple(shape))
    dims = [place.token] if place.row is None else [place.row, place.token]
    dims += [dim for dim in range(len(shape)) if dim not in dims]
    x = x_RLF[0] if place.row is None else x_RLF
    x = x.reshape([shape[dim] for dim in dims])
    return x.permute([dims.index(dim) for dim in range(len(shape))])


def _draw(
    make: Callable[[torch.Tensor, int, int], torch.Tensor],
    seed: torch.Tensor,
    shape: Sequence[int],
    *,
    activation: bool,
) -> torch.Tensor:
    """Return the result of ``make`` (of keys [R, L], a number of features, the first one) in a shape."""
    draws, count = current_draws(), math.prod(shape)
    place = None if draws is None else draws.token_dims(shape, activation=activation)
    if draws is not None and place is not None:
        keys = draws.keys(seed, place, shape)
    else:  # numbers that are equal on all ranks, in compiled code
        keys = counter.token_keys(seed, seed.new_zeros(1), _first_indices(shape, seed.device))
    features = count // keys.numel() if count else 0
    first = 0 if draws is None else draws.first_feature(features)
    return _arrange(make(keys, features, first), place, shape).contiguous()


def _first_indices(shape: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.arange(shape[0] if shape else 1, device=device)


def dropout_mask(x: torch.Tensor, seed: torch.Tensor, p: float, feature: bool) -> torch.Tensor:
    """Return bool, in the shape of ``x``: entries to drop; [N, C, 1, ...] where whole features drop."""
    shape = (*x.shape[:2], *[1] * (x.dim() - 2)) if feature else x.shape

    def make(keys: torch.Tensor, count: int, first: int) -> torch.Tensor:
        return counter.bernoulli_mask(keys, count, p, first)

    return _draw(make, seed, shape, activation=True)


def token_words(x: torch.Tensor, seed: torch.Tensor) -> torch.Tensor:
    """Return int64, in the shape of ``x``: 64 random bits each."""
    return _draw(counter.words, seed, x.shape, activation=False)


# Compiled code calls operators: its graph has one node for each, independent of the batch's layout.
_library = torch.library.Library("lightning_cp", "DEF")
_library.define("token_drops(Tensor x, Tensor seed, float p, bool feature) -> Tensor")
_library.define("token_words(Tensor x, Tensor seed) -> Tensor")
_library.impl("token_drops", dropout_mask, "CompositeExplicitAutograd")
_library.impl("token_words", token_words, "CompositeExplicitAutograd")


def _drops_on_meta(x: torch.Tensor, seed: torch.Tensor, p: float, feature: bool) -> torch.Tensor:
    shape = (*x.shape[:2], *[1] * (x.dim() - 2)) if feature else x.shape
    return x.new_empty(shape, dtype=torch.bool)


def _words_on_meta(x: torch.Tensor, seed: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape, dtype=torch.int64)


_library.impl("token_drops", _drops_on_meta, "Meta")
_library.impl("token_words", _words_on_meta, "Meta")


def without_token_draws() -> AbstractContextManager[None]:
    """A block that draws everything as usual: for an optimizer, or while reading the next batch."""
    draws = _last_active()
    return nullcontext() if draws is None else draws.disabled()


def draw_per(what: Per) -> AbstractContextManager[None]:
    """A block in which ``what`` is the unit of random numbers, for any shape.

    Raises:
        ConfigError: neither ``token`` nor ``row``.
    """
    if what not in ("token", "row"):
        raise ConfigError(
            f"draw_per is 'token' or 'row', got {what!r}. Numbers of tokens differ between ranks that share "
            "a sample, numbers of rows are equal on them."
        )
    draws = _last_active()
    return nullcontext() if draws is None else draws.per(what)

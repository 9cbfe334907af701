"""Random numbers of a step: ranks together draw what one rank draws of whole rows, whatever the layout.

A rank is played by one process: the same generator, and the tokens that it would hold.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import combinations
from types import BuiltinFunctionType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Categorical, Normal
from torch.utils.checkpoint import checkpoint

from lightning_cp.errors import ConfigError
from lightning_cp.layout import Documents, SequenceLayout
from lightning_cp.randomness.functions import patch_random_functions
from lightning_cp.randomness.token_draws import (
    StepTokens,
    TokenDims,
    TokenDraws,
    draw_per,
    find_token_dims,
    without_token_draws,
)

ROWS, LENGTH, WIDTH = 3, 37, 8
MODEL = nn.Linear(WIDTH, 2 * WIDTH)
Draw = Callable[[torch.Tensor], torch.Tensor]

LAYOUTS = {
    "contiguous": SequenceLayout(LENGTH, 2, 1, "contiguous"),
    "zigzag": SequenceLayout(LENGTH, 3, 1, "zigzag"),
    "ulysses": SequenceLayout(LENGTH, 1, 2, "contiguous"),
    "hybrid": SequenceLayout(LENGTH, 2, 2, "zigzag"),
    "balanced": SequenceLayout(
        LENGTH, 2, 1, "balanced", Documents.from_cu_seqlens([0, 9, 30, LENGTH])
    ),
}
WHOLE = SequenceLayout(LENGTH, 1, 1, "contiguous")


@contextmanager
def step(
    layout: SequenceLayout, rank: int = 0, *, data: tuple[int, int] = (0, 1), model: Any = MODEL
) -> Iterator[TokenDraws]:
    """A rank's step, from the same random state."""
    draws = TokenDraws(model)
    draws.begin(StepTokens.of(layout, rank, ROWS, data))
    try:
        with torch.random.fork_rng([]):
            torch.manual_seed(5)
            yield draws
    finally:
        draws.end()


@pytest.fixture(autouse=True, scope="module")
def followed() -> Iterator[None]:
    """PyTorch's functions are replaced, as they are in a run."""
    end = patch_random_functions()
    yield
    end()
    assert "uniform_" not in vars(torch.Tensor)
    assert "dropout" not in vars(torch._VF)
    assert all(isinstance(x, BuiltinFunctionType) for x in (torch.rand, torch.dropout))


def hidden(length: int) -> torch.Tensor:
    return torch.ones(ROWS, length, WIDTH, dtype=torch.float64)


def together(draw: Draw, layout: SequenceLayout, *shape_of: int) -> torch.Tensor:
    """What all ranks of a layout draw for [B, L, ...], put together; all are as far with their generator."""
    parts, ends = [], []
    for rank in range(layout.cp_size):
        with step(layout, rank):
            parts.append(draw(hidden(layout.local_len)))
            ends.append(torch.rand(()))
    assert len(set(map(float, ends))) == 1
    return layout.unshard(parts, dim=1)


def gumbel(x: torch.Tensor) -> torch.Tensor:
    return F.gumbel_softmax(x, hard=True)


def in_place(name: str, *args: Any, **options: Any) -> Draw:
    return lambda x: getattr(torch.empty_like(x), name)(*args, **options)


def seq_first(x: torch.Tensor) -> torch.Tensor:
    return F.dropout(x.transpose(0, 1), 0.4).transpose(0, 1)


def flat(x: torch.Tensor) -> torch.Tensor:
    return F.dropout(x.flatten(0, 1), 0.4).unflatten(0, x.shape[:2])


def of_heads(x: torch.Tensor) -> torch.Tensor:
    return F.dropout(x.unflatten(2, (2, 4)).transpose(1, 2), 0.4).transpose(1, 2).flatten(2)


def channels(x: torch.Tensor) -> torch.Tensor:
    return F.dropout(x.transpose(1, 2), 0.4).transpose(1, 2)


def whole_tokens(x: torch.Tensor) -> torch.Tensor:
    return F.dropout1d(x, 0.4)


def twice(x: torch.Tensor) -> torch.Tensor:
    return F.dropout(F.dropout(x, 0.3), 0.3)


DRAWS: dict[str, Draw] = {
    "dropout": lambda x: F.dropout(x, 0.4),
    "dropout, twice": twice,
    "dropout_": lambda x: F.dropout(x.clone(), 0.4, inplace=True),
    "nn.Dropout": nn.Dropout(0.4),
    "torch.dropout": lambda x: torch.dropout(x, 0.4, True),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.4, True),
    "alpha_dropout_": lambda x: F.alpha_dropout(x.clone(), 0.4, True, True),
    "dropout [L, B, D]": seq_first,
    "dropout [B L, D]": flat,
    "dropout [B, H, L, D]": of_heads,
    "dropout [B, D, L]": channels,
    "dropout1d of tokens": whole_tokens,
    "feature_alpha_dropout of tokens": lambda x: F.feature_alpha_dropout(x, 0.4, True),
    "dropout2d of tokens": lambda x: F.dropout2d(x[..., None], 0.4)[..., 0],
    "rand_like": lambda x: torch.rand_like(x),
    "randn_like": lambda x: torch.randn_like(x, dtype=torch.float32),
    "randint_like": lambda x: torch.randint_like(x, 3, 9),
    "rand": lambda x: torch.rand(x.shape),
    "rand, sizes": lambda x: torch.rand(*x.shape[:2], dtype=torch.float32),
    "randn": lambda x: torch.randn(size=x.shape[:2]),
    "randint": lambda x: torch.randint(2, 50, x.shape[:2]),
    "randint, named": lambda x: torch.randint(high=50, size=tuple(x.shape[:2])),
    "bernoulli": lambda x: torch.bernoulli(x * 0.3),
    "x.bernoulli": lambda x: x.bernoulli(0.3),
    "normal": lambda x: torch.normal(x, 2.0),
    "multinomial": lambda x: torch.multinomial(x.flatten(0, 1), 3).unflatten(0, x.shape[:2]),
    "multinomial, replaced": lambda x: torch.multinomial(x.flatten(0, 1), 9, True).unflatten(
        0, x.shape[:2]
    ),
    "gumbel_softmax": gumbel,
    "uniform_": in_place("uniform_", -1, 1),
    "uniform_, named": in_place("uniform_", to=5, **{"from": 2}),
    "normal_": in_place("normal_", std=3.0),
    "exponential_": in_place("exponential_", 2.0),
    "bernoulli_": in_place("bernoulli_", 0.3),
    "log_normal_": in_place("log_normal_"),
    "cauchy_": in_place("cauchy_"),
    "geometric_": in_place("geometric_", 0.3),
    "random_": in_place("random_", 3, 9),
    "Normal": lambda x: Normal(x, 2.0).rsample(),
    "Categorical": lambda x: Categorical(logits=x).sample(),
}


@pytest.mark.parametrize("name", list(DRAWS))
def test_ranks_draw_together_what_one_draws(name: str) -> None:
    draw = DRAWS[name]
    want = together(draw, WHOLE)
    assert want.double().std() > 0.1
    for layout in LAYOUTS.values():
        got = together(draw, layout)
        assert torch.equal(got, want)
    first, second = want[:, : LENGTH // 2], want[:, LENGTH // 2 :]
    assert not torch.equal(first, second[:, : first.shape[1]])  # tokens differ
    assert not torch.equal(want[0], want[1])  # and rows


@pytest.mark.parametrize("name", list(DRAWS))
def test_what_is_drawn_is_distributed_as_pytorch_draws_it(name: str) -> None:
    torch.manual_seed(1)
    draw, layout = DRAWS[name], SequenceLayout(4000, 2, 1)
    with step(layout):
        ours = draw(hidden(layout.local_len)).double()
    theirs = draw(hidden(layout.local_len)).double()
    assert ours.shape == theirs.shape
    if "cauchy" in name:  # which has no mean
        ours, theirs = ours.atan(), theirs.atan()
    if "log_normal" in name:
        ours, theirs = ours.log(), theirs.log()
    independent = ours[..., 0].numel() if "tokens" in name else ours.numel()
    error = float(theirs.std()) * (2 / independent) ** 0.5
    assert abs(float(ours.mean() - theirs.mean())) < 5 * error
    assert float(ours.std()) == pytest.approx(float(theirs.std()), rel=0.08)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtype_does_not_matter_to_masks(dtype: torch.dtype) -> None:
    with step(WHOLE):
        want = F.dropout(hidden(LENGTH), 0.4) == 0
    with step(WHOLE):
        assert torch.equal(F.dropout(hidden(LENGTH).to(dtype), 0.4) == 0, want)


def test_in_memory_of_any_order() -> None:
    with step(WHOLE):
        want = F.dropout(hidden(LENGTH), 0.4)
    for dims in ((1, 0, 2), (2, 1, 0), (0, 2, 1)):
        x = hidden(LENGTH).permute(dims).contiguous().permute([dims.index(d) for d in range(3)])
        with step(WHOLE):
            assert torch.equal(F.dropout(x, 0.4), want)


PER_ROW: dict[str, Callable[[], torch.Tensor]] = {
    "layers to drop": lambda: torch.rand(()),
    "noise levels": lambda: torch.rand(ROWS),
    "paths to drop": lambda: torch.ones(ROWS, 1, 1).bernoulli_(0.5),
    "masks of pooled vectors": lambda: F.dropout(torch.ones(ROWS, 50), 0.5),
    "channels of whole rows": lambda: F.dropout1d(torch.ones(ROWS, 50, 19), 0.5)[..., 0],
    "other sequences": lambda: F.dropout(torch.ones(ROWS, 11, 50), 0.5),
    "numbers": lambda: torch.randint(0, 9, (7,)),
    "parameters": lambda: F.dropout(nn.Parameter(torch.ones(19, 23)), 0.5),
}


@pytest.mark.parametrize("name", list(PER_ROW))
def test_what_has_no_tokens_is_drawn_as_ever(name: str) -> None:
    """From the usual generator, so the same on all ranks, and what one process draws."""
    torch.manual_seed(5)
    want = PER_ROW[name]()
    for rank in range(2):
        with step(LAYOUTS["contiguous"], rank):
            assert torch.equal(PER_ROW[name](), want)


def test_outside_of_a_step_and_for_others_all_is_as_ever() -> None:
    def draws() -> torch.Tensor:
        return torch.rand(ROWS, 19)

    torch.manual_seed(5)
    want = draws()
    with step(LAYOUTS["contiguous"]), without_token_draws():
        assert torch.equal(draws(), want)
    found: list[torch.Tensor] = []
    with step(LAYOUTS["contiguous"]):
        thread = threading.Thread(target=lambda: found.append(draws()))
        thread.start()
        thread.join()
    assert torch.equal(found[0], want)
    torch.manual_seed(5)
    assert torch.equal(draws(), want)


def test_in_evaluation_and_without_dropout_nothing_is_drawn() -> None:
    with step(WHOLE):
        state = torch.get_rng_state()
        x = hidden(LENGTH)
        assert F.dropout(x, 0.4, training=False) is x
        assert torch.equal(F.dropout(x, 0.0), x)
        assert not F.dropout(x, 1.0).any()
        assert torch.equal(torch.get_rng_state(), state)


def test_a_generator_that_is_given_is_used() -> None:
    def draw(seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        with step(LAYOUTS["contiguous"]):
            state = torch.get_rng_state()
            made = torch.rand(ROWS, 19, generator=generator)
            assert torch.equal(torch.get_rng_state(), state)
            assert not torch.equal(made, torch.rand(ROWS, 19, generator=generator))
        return made

    assert torch.equal(draw(1), draw(1))
    assert not torch.equal(draw(1), draw(2))


def test_data_ranks_have_rows_of_one_batch() -> None:
    """Of two data ranks with equal generators, each draws other rows: one process's of both batches."""

    parts = []
    for rank in range(2):
        with step(WHOLE, data=(rank, 2)):
            parts.append(F.dropout(hidden(LENGTH), 0.4))
    assert not torch.equal(*parts)
    draws = TokenDraws(MODEL)
    draws.begin(StepTokens.of(WHOLE, 0, 2 * ROWS))
    torch.manual_seed(5)
    both = F.dropout(torch.ones(2 * ROWS, LENGTH, WIDTH, dtype=torch.float64), 0.4)
    draws.end()
    assert torch.equal(both, torch.stack(parts, 1).flatten(0, 1))


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recomputation_draws_the_same(reentrant: bool) -> None:
    masks: list[torch.Tensor] = []

    def block(x: torch.Tensor) -> torch.Tensor:
        made = F.dropout(x * 2, 0.4) + torch.rand_like(x)
        masks.append(made.detach())
        return made.sin()

    with step(LAYOUTS["zigzag"]):
        x = hidden(LAYOUTS["zigzag"].local_len).requires_grad_()
        checkpoint(block, x, use_reentrant=reentrant).sum().backward()  # type: ignore[union-attr]
    assert len(masks) == 2
    assert torch.equal(*masks)


def test_gradients_pass_what_was_kept() -> None:
    for name in ("dropout", "dropout_", "alpha_dropout", "alpha_dropout_"):
        with step(WHOLE):
            x = hidden(LENGTH).requires_grad_()
            out = DRAWS[name](x)
            out.sum().backward()
        assert x.grad is not None
        kept = out.detach() != out.detach().min()
        values = x.grad.unique()
        assert torch.equal(x.grad != 0, kept)
        assert len(values) == 2


def test_shapes() -> None:
    """[rows, tokens] are found in any order; what else is as long is left out."""
    rows, tokens = 2, 16
    places = {
        (16,): TokenDims(None, 0),
        (32,): TokenDims(None, None),
        (2,): None,
        (): None,
        (2, 16): TokenDims(0, 1),
        (1, 16): TokenDims(0, 1),
        (4, 16): TokenDims(0, 1),
        (32, 5): TokenDims(None, None),
        (2, 5): None,
        (16, 5): TokenDims(None, 0),
        (2, 16, 5): TokenDims(0, 1),
        (8, 16, 5): TokenDims(0, 1),
        (2, 16, 16): TokenDims(0, 1),
        (16, 2, 5): TokenDims(1, 0),
        (2, 4, 16, 5): TokenDims(0, 2),
        (2, 5, 16): TokenDims(0, 2),
        (32, 1, 5): TokenDims(None, None),
        (2, 5, 7): None,
        (5, 7): None,
    }
    assert {shape: find_token_dims(shape, rows, tokens) for shape in places} == places
    assert find_token_dims((2, 16), rows, tokens, not_last=True) is None
    assert find_token_dims((2, 5, 16), rows, tokens, not_last=True) is None
    assert find_token_dims((2, 16, 16), rows, tokens, not_last=True) == TokenDims(0, 1)
    assert find_token_dims((1, 4), 1, 4) == TokenDims(0, 1)
    assert find_token_dims((4, 4), 4, 4) == TokenDims(0, 1)
    assert find_token_dims((4,), 4, 4) is None


def test_features_as_many_as_tokens_are_features() -> None:
    """A pooled vector [rows, D] with D = L, as some parameter has it: dropout is the same on all ranks."""
    layout = LAYOUTS["contiguous"]
    model = nn.Linear(layout.local_len, 3)

    def masks(shape: tuple[int, ...], per: Any = None) -> list[torch.Tensor]:
        found = []
        for rank in range(2):
            with step(layout, rank, model=model):
                if per is None:
                    found.append(F.dropout(torch.ones(shape), 0.5))
                else:
                    with draw_per(per):
                        found.append(F.dropout(torch.ones(shape), 0.5))
        return found

    pooled, tokens = (ROWS, layout.local_len), (ROWS, layout.local_len, layout.local_len)
    assert torch.equal(*masks(pooled))
    assert not torch.equal(*masks(pooled, "token"))
    assert not torch.equal(*masks(tokens))
    assert torch.equal(*masks(tokens, "row"))


def test_random_numbers_of_a_parameters_shape_are_the_parameters(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Noise on weights must not differ between ranks; it is said once, and can be said otherwise."""
    layout = LAYOUTS["contiguous"]
    model = nn.Linear(WIDTH, layout.local_len)
    shape = tuple(model.weight.shape)
    found: dict[str, list[torch.Tensor]] = {"row": [], "token": []}
    with caplog.at_level(logging.WARNING, "lightning_cp"):
        for rank in range(2):
            with step(layout, rank, model=model):
                found["row"] += [torch.randn(shape) + 0 * torch.randn(shape)]
                with draw_per("token"):
                    found["token"] += [torch.randn(shape)]
    assert torch.equal(*found["row"])
    assert not torch.equal(*found["token"])
    (said,) = caplog.messages
    assert "draw_per('token')" in said


def test_some_tokens_are_drawn_for_a_rank_alone(caplog: pytest.LogCaptureFixture) -> None:
    """An expert's tokens, as many as its router says: unequal on ranks, whose generators stay together."""
    layout = LAYOUTS["contiguous"]
    found, ends = [], []
    with caplog.at_level(logging.WARNING, "lightning_cp"):
        for at in range(4):
            with step(layout, at // 2, data=(at % 2, 2)):
                found.append(F.dropout(torch.ones(11 + at, WIDTH), 0.5)[:11])
                ends.append(torch.rand(()))
    assert not any(torch.equal(one, other) for one, other in combinations(found, 2))
    assert len(set(map(float, ends))) == 1
    (said,) = caplog.messages
    assert "draw_per('row')" in said
    refused = pytest.raises(ConfigError, match="'token' or 'row'")
    with step(layout), refused, draw_per("tokens"):  # type: ignore[arg-type]
        pass


def test_a_rank_without_any_of_the_tokens_takes_a_seed_too() -> None:
    """An expert may have none on some rank; all generators go on together."""
    ends = []
    for count in (0, 5):
        with step(LAYOUTS["contiguous"]):
            assert F.dropout(torch.ones(count, WIDTH), 0.5).shape == (count, WIDTH)
            assert F.dropout(torch.ones(ROWS, 19, count), 0.5).shape == (ROWS, 19, count)
            ends.append(float(torch.rand(())))
    assert ends[0] == ends[1]


def test_what_cannot_be_drawn_per_token_is_said(caplog: pytest.LogCaptureFixture) -> None:
    layout = LAYOUTS["contiguous"]
    with step(layout), caplog.at_level(logging.WARNING, "lightning_cp"):
        torch.poisson(hidden(layout.local_len))
        torch.randperm(layout.local_len)
        F.rrelu(hidden(layout.local_len), training=True)
        F.rrelu(hidden(layout.local_len), training=False)
        torch.randperm(4)
        torch.native_dropout(hidden(layout.local_len), 0.5, True)
        ones = torch.ones(ROWS, layout.local_len)
        torch.distributions.Gamma(ones, 1.0).sample()
        torch.distributions.Beta(ones, ones).sample()
        torch.distributions.Gamma(torch.ones(ROWS), 1.0).sample()  # a noise level of each row
    assert [message.split()[0] for message in caplog.messages] == [
        "torch.poisson",
        "torch.randperm",
        "torch.rrelu",
        "torch.native_dropout",
        "Gamma,",
        "Beta",
    ]


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: [F.dropout(part, 0.5) for part in x.split(2, 1)],
        lambda x: F.dropout(x[:, :-1], 0.5),
        lambda x: F.dropout(x[:, :18].reshape(ROWS, -1, 2, WIDTH), 0.5),
        lambda x: torch.randn_like(x[:, 1:3]),
        lambda x: torch.rand(ROWS, x.shape[1] - 1),
    ],
    ids=["chunks", "all but the last", "blocks", "some", "targets"],
)
def test_a_part_of_each_row_s_tokens_is_asked_about(
    draw: Callable[[torch.Tensor], object], caplog: pytest.LogCaptureFixture
) -> None:
    """It may be latents that are the same on all ranks, or tokens of this rank."""
    layout = LAYOUTS["contiguous"]
    x = torch.ones(ROWS, layout.local_len, WIDTH)
    with step(layout), caplog.at_level(logging.WARNING, "lightning_cp"):
        draw(x)
        for what in ("token", "row"):
            with draw_per(what):  # type: ignore[arg-type]
                draw(x)
        F.dropout(torch.ones(ROWS, 1, WIDTH), 0.5)
        F.dropout(torch.ones(ROWS, WIDTH), 0.5)
        torch.rand(ROWS, 1, 1)
    (said,) = caplog.messages
    assert "draw_per('token')" in said
    assert f"some of this rank's {layout.local_len} tokens" in said


def test_a_model_is_not_kept_alive_by_a_step_that_never_ended() -> None:
    draws = TokenDraws(MODEL)
    draws.begin(StepTokens.of(WHOLE, 0, ROWS))
    del draws
    torch.manual_seed(5)
    drawn = torch.rand(ROWS, LENGTH)
    torch.manual_seed(5)
    plain = torch.rand(ROWS * LENGTH + 1)[:-1]  # a shape that is nothing's
    assert torch.equal(plain.view(ROWS, LENGTH), drawn)

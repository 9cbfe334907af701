"""Random numbers by counter: the published generator, and the statistics of what is made of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lightning_cp.randomness import counter

MASK = 2**64 - 1
GAMMA = 0x9E3779B97F4A7C15


def splitmix64(z: int) -> int:
    """The finaliser in Python's integers, as published."""
    z &= MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def keys(rows: int = 64, tokens: int = 64, seed: int = 12345) -> torch.Tensor:
    return counter.token_keys(torch.tensor(seed), torch.arange(rows), torch.arange(tokens))


def test_known_words_of_splitmix64() -> None:
    """The first words after seed 1234567, from the test vectors that go around with the algorithm."""
    first = torch.tensor([[1234567 + counter.GAMMA]])
    got = [int(x) & MASK for x in counter.words(first, 3).flatten()]
    assert got == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_every_word_is_a_function_of_seed_row_position_and_feature() -> None:
    made = counter.words(
        counter.token_keys(torch.tensor(7), torch.tensor([3, 10**9]), torch.tensor([0, 5, 2**40])),
        3,
    )
    for r, row in enumerate((3, 10**9)):
        for at, position in enumerate((0, 5, 2**40)):
            key = splitmix64(splitmix64(7 + row * GAMMA) + position * GAMMA)
            want = [splitmix64(key + feature * GAMMA) for feature in range(3)]
            assert [int(x) & MASK for x in made[r, at]] == want


def test_parts_are_those_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Features from any one on, and any number of words at once."""
    k = keys(3, 50)
    words, happens = counter.words(k, 9), counter.bernoulli_mask(k, 9, 0.3)
    monkeypatch.setitem(counter._AT_ONCE, "cpu", 7)
    assert torch.equal(counter.words(k, 4, first=3), words[..., 3:7])
    assert torch.equal(counter.bernoulli_mask(k, 9, 0.3), happens)
    for first in (1, 2, 5):
        assert torch.equal(
            counter.bernoulli_mask(k, 4, 0.3, first=first), happens[..., first : first + 4]
        )


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9, 2**-24])
def test_rate_and_independence(p: float) -> None:
    """Rates over all, of each feature, row and position; pairs of neighbours in all three directions."""
    x = counter.bernoulli_mask(keys(), 256, p).double() - p
    deviation = math.sqrt(p * (1 - p))

    def normalised(total: torch.Tensor, count: int) -> float:
        return float(total.abs().max() / (deviation * math.sqrt(count)))

    assert normalised(x.sum(), x.numel()) < 4.5
    if p < 1e-3:
        return  # too few to say more
    for dims in ((0, 1), (0, 2), (1, 2)):
        assert normalised(x.sum(dims), x.numel() // x.sum(dims).numel()) < 6
    for dim in range(3):
        for shift in (1, 2, 3, 16):
            pairs = (x * x.roll(shift, dim)).sum() / (deviation**2 * math.sqrt(x.numel()))
            assert abs(float(pairs)) < 4.5, (dim, shift)


def test_each_bit_moves_half_of_all_bits() -> None:
    """Of the seed, the row, the position and the feature: avalanche."""
    seeds = torch.arange(512)

    def made(seed: torch.Tensor, row: int, position: int, feature: int) -> torch.Tensor:
        rows, positions = torch.tensor([row]), torch.tensor([position])
        each = [counter.token_keys(x, rows, positions) for x in seed]
        return counter.words(torch.cat(each), 1, first=feature).flatten()

    base = made(seeds, 5, 77, 9)
    for bit in (0, 1, 7, 13):
        others = {
            "seed": made(seeds ^ (1 << bit), 5, 77, 9),
            "row": made(seeds, 5 ^ (1 << bit), 77, 9),
            "position": made(seeds, 5, 77 ^ (1 << bit), 9),
            "feature": made(seeds, 5, 77, 9 ^ (1 << bit)),
        }
        for name, other in others.items():
            changed = torch.stack([((base ^ other) >> at) & 1 for at in range(64)]).double().mean(1)
            assert abs(float(changed.mean()) - 0.5) < 0.015, (name, bit)
            assert float((changed - 0.5).abs().max()) < 0.12, (name, bit)


def ks(x: torch.Tensor, cdf: Callable[[torch.Tensor], torch.Tensor]) -> float:
    """Kolmogorov and Smirnov's distance, in units in which 1.63 is exceeded once in a hundred times."""
    values = cdf(x.double().flatten().sort().values)
    grid = torch.arange(1, values.numel() + 1, dtype=torch.float64) / values.numel()
    return float((values - grid).abs().max() * math.sqrt(values.numel()))


CONTINUOUS: dict[str, tuple[Any, Callable[[torch.Tensor], torch.Tensor]]] = {
    "uniform": ((counter.uniform, (-1.0, 3.0)), lambda x: (x + 1) / 4),
    "normal": ((counter.normal, (2.0, 0.5)), lambda x: torch.special.ndtr((x - 2) / 0.5)),
    "log_normal": ((counter.log_normal, (0.0, 1.0)), lambda x: torch.special.ndtr(x.log())),
    "cauchy": ((counter.cauchy, (1.0, 2.0)), lambda x: ((x - 1) / 2).atan() / math.pi + 0.5),
    "exponential": ((counter.exponential, (3.0,)), lambda x: 1 - (-3 * x).exp()),
}


@pytest.mark.parametrize("name", list(CONTINUOUS))
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_distributions(name: str, dtype: torch.dtype) -> None:
    (sample, args), cdf = CONTINUOUS[name]
    x = sample(counter.words(keys(), 16), dtype, *args)
    assert x.dtype == dtype
    assert ks(x, cdf) < 1.95


def test_numbers_that_are_whole() -> None:
    words = counter.words(keys(), 16)
    die = counter.integers(words, torch.int64, 1, 7)
    assert set(die.unique().tolist()) == set(range(1, 7))
    shares = torch.stack([(die == face).double().mean() for face in range(1, 7)])
    assert float((shares - 1 / 6).abs().max()) < 0.008
    assert float(counter.integers(words, torch.int64, 4).max()) == 3
    coins = counter.integers(words, torch.bool)
    assert abs(float(coins.double().mean()) - 0.5) < 0.01
    trials = counter.geometric(words, torch.float64, 0.25)
    assert float(trials.min()) == 1
    assert abs(float(trials.mean()) - 4) < 0.08
    chances = torch.linspace(0, 1, 16)
    rates = counter.bernoulli(words, torch.float64, chances).mean((0, 1))
    torch.testing.assert_close(rates, chances.double(), atol=0.04, rtol=0)
    assert rates[0] == 0
    assert rates[-1] == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_uniform_numbers_stay_below_their_bound(dtype: torch.dtype) -> None:
    highest = torch.tensor([-1])  # all bits are set
    assert float(counter.uniform(highest, dtype)) < 1
    assert float(counter.exponential(highest, dtype)) >= 0
    assert math.isfinite(float(counter.normal(torch.tensor([0]), dtype)))

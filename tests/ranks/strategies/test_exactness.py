"""Context parallelism changes nothing: losses, gradient norms, weights, validation and predictions.

Compared with a plain Lightning Trainer in one process (and plain DDP on two) over 20 steps, with
targets spread unevenly, ranks without any target, and a length that does not divide.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import product
from typing import Any

import pytest
import torch

from tests.helpers.pool import run_ranks
from tests.helpers.strategies.runs import Result, Run, execute

Sizes = dict[str, Any]


def sizes(ulysses: int, ring: int, data: int = 1) -> Any:
    """Strategy arguments, hashable."""
    return tuple({"ulysses_size": ulysses, "ring_size": ring, "data_parallel_size": data}.items())


EIGHT_HEADS = [(2, 1), (1, 2), (4, 1), (1, 4), (2, 2)]
NINE_HEADS = [(3, 1), (3, 2)]
LAYOUTS = [*(((8, 2), *at) for at in EIGHT_HEADS), *(((9, 3), *at) for at in NINE_HEADS)]
LONG = [((8, 2), 1, 2), ((8, 2), 4, 1), ((9, 3), 3, 1)]
MODELS = {"plain-float64": 1e-10, "hf-float64": 1e-6, "hf-float32": 1e-5}


def mostly_plain(*sizes: tuple[Any, ...], also: tuple[Any, ...] = ()) -> list[Any]:
    """(model, *sizes) of a test. The quick suite chooses of the plain model and Hugging Face's on ``also``.

    What float32 adds to the same model in float64 is rounding: for the long suite, as are ways to divide
    between those of the quick one (``LONG``).
    """
    return [
        pytest.param(model, *size, marks=[] if quick else [pytest.mark.nightly])
        for model, size in product(MODELS, sizes)
        for quick in [
            (model == "plain-float64" and size not in LONG)
            or (model == "hf-float64" and size in also)
        ]
    ]


@lru_cache(maxsize=32)
def baseline(run: Run, world_size: int = 1) -> Result:
    """The plain run that others are compared with."""
    return run_ranks(world_size, execute, run, timeout=120)[0]


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    """Largest difference relative to the largest value."""
    assert got.shape == want.shape
    return float((got - want).abs().max() / want.abs().max())


def compare(results: list[Result], want: Result, tolerance: float) -> None:
    """Every rank has the same losses, gradient norms, predictions and weights."""
    worst = worst_error(results, want)
    print(f"worst relative error {worst:.1e} (tolerance {tolerance:.0e})")
    assert worst <= tolerance, worst


def worst_error(results: list[Result], want: Result) -> float:
    """The worst relative error of anything on any rank; NaN if anything is."""
    errors: list[float] = []
    for result in results:
        for name in ("losses", "grad_norms"):
            got, wanted = (torch.tensor(getattr(x, name)).double() for x in (result, want))
            errors.append(float(((got - wanted).abs() / wanted.abs()).max()))
        errors.append(abs(result.val_loss - want.val_loss) / abs(want.val_loss))
        assert len(result.predictions) == len(want.predictions)
        for got, wanted in zip(result.predictions, want.predictions, strict=True):
            errors.append(relative(got, wanted))
        for name, weight in want.weights.items():
            errors.append(relative(result.weights[name], weight))
    return float(torch.tensor(errors).max())  # Python's max would pass NaN over


def test_nan_anywhere_would_fail() -> None:
    one, nan = torch.ones(3), torch.tensor([1.0, float("nan"), 1.0])
    want = Result([1.0, 2.0], [1.0, 2.0], {"w": one}, 1.0, [one])
    assert worst_error([want], want) == 0.0
    for change in (
        {"losses": [1.0, float("nan")]},
        {"grad_norms": [float("nan"), 2.0]},
        {"weights": {"w": nan}},
        {"val_loss": float("nan")},
        {"predictions": [nan]},
    ):
        with pytest.raises(AssertionError):
            compare([want, replace(want, **change)], want, 1e-2)  # type: ignore[arg-type]


@pytest.mark.quick("plain-float64-heads0-2-1")
@pytest.mark.parametrize(
    ("model", "heads", "ulysses", "ring"),
    mostly_plain(*LAYOUTS, also=(((8, 2), 2, 1), ((8, 2), 1, 2), ((8, 2), 2, 2), ((9, 3), 3, 2))),
)
def test_twenty_steps_equal_one_process(
    model: str, heads: tuple[int, int], ulysses: int, ring: int
) -> None:
    kind, dtype = model.split("-")
    run = Run(model=kind, dtype=dtype, heads=heads, clip=1.0)
    want = baseline(run)
    results = run_ranks(
        ulysses * ring, execute, replace(run, strategy=sizes(ulysses, ring)), timeout=120
    )
    assert len(want.losses) == 20
    assert any(result.empty_ranks for result in results)
    compare(results, want, MODELS[model])


EXCHANGED: list[Sizes] = [
    {"exchange": "rotation", "ring_size": 4, "ulysses_size": 1},
    {
        "exchange": "rotation",
        "ring_size": 2,
        "ulysses_size": 2,
        "activation_checkpointing": "keep_attention",
    },
    {"mode": "zigzag_llama3"},
    {"mode": "zigzag_llama3", "forward_execution": "fused", "kv_heads_per_gather": None},
    {"mode": "zigzag_llama3", "ulysses_size": 2, "backward_execution": "fused"},
    {"exchange": "all_gather", "ulysses_size": 2, "ring_size": 2, "layout": "contiguous"},
]


@pytest.mark.nightly
@pytest.mark.parametrize(
    "packed", [pytest.param(False, marks=pytest.mark.nightly), True], ids=["dense", "packed"]
)
@pytest.mark.parametrize("settings", EXCHANGED, ids=str)
def test_other_exchanges_equal_one_process(settings: Sizes, packed: bool) -> None:
    run = Run(packed=packed, clip=1.0)
    results = run_ranks(4, execute, replace(run, strategy=tuple(settings.items())), timeout=120)
    compare(results, baseline(run), 1e-10)


@pytest.mark.quick("plain-float64-1-2")
@pytest.mark.parametrize(("model", "ulysses", "ring"), mostly_plain((2, 2), (1, 2)))
def test_accumulation_and_clipping_equal_one_process(model: str, ulysses: int, ring: int) -> None:
    kind, dtype = model.split("-")
    run = Run(model=kind, dtype=dtype, accumulate=3, clip=0.3)
    results = run_ranks(
        ulysses * ring, execute, replace(run, strategy=sizes(ulysses, ring)), timeout=120
    )
    want = baseline(run)
    assert len(want.grad_norms) == 20
    assert max(want.grad_norms) > 0.3
    compare(results, want, MODELS[model])


@pytest.mark.nightly
@pytest.mark.parametrize(("model", "ulysses", "ring"), mostly_plain((2, 1), (1, 2), also=((2, 1),)))
def test_data_parallel_equals_plain_ddp(model: str, ulysses: int, ring: int) -> None:
    kind, dtype = model.split("-")
    run = Run(strategy="ddp", model=kind, dtype=dtype, sampler=True)
    want = run_ranks(2, execute, run, timeout=120)
    results = run_ranks(4, execute, replace(run, strategy=sizes(ulysses, ring, 2)), timeout=120)
    # Ranks 0 and 1 share the first sample, 2 and 3 the second: as DDP's ranks 0 and 1.
    for data_rank in range(2):
        compare(results[2 * data_rank : 2 * data_rank + 2], want[data_rank], MODELS[model])


@pytest.mark.quick("plain-float64-1-2")
@pytest.mark.parametrize(
    ("model", "ulysses", "ring"),
    mostly_plain((2, 1), (1, 2), (2, 2), (1, 4), also=((1, 2), (2, 2))),
)
def test_packed_documents_equal_one_process(model: str, ulysses: int, ring: int) -> None:
    kind, dtype = model.split("-")
    run = Run(model=kind, dtype=dtype, packed=True, clip=1.0)
    want = baseline(run)
    results = run_ranks(
        ulysses * ring, execute, replace(run, strategy=sizes(ulysses, ring)), timeout=120
    )
    compare(results, want, MODELS[model])


def test_documents_that_see_each_other_would_fail() -> None:
    run = Run(packed=True, steps=4)
    with pytest.raises(AssertionError):
        compare([baseline(replace(run, packed=False))], baseline(run), 1e-2)


@pytest.mark.nightly
@pytest.mark.parametrize(("ulysses", "ring"), [(2, 2), (1, 4), (4, 1)])
def test_bfloat16_mixed_rounds_as_one_process_does(ulysses: int, ring: int) -> None:
    """Additions come in another order; what that does is of the size of one process's own rounding."""
    run = Run(dtype="float32", precision="bf16-mixed", steps=8)
    exact = baseline(replace(run, precision=None))
    rounding = worst_error([baseline(run)], exact)
    assert 1e-4 < rounding < 1e-2, "bfloat16 was in use"
    results = run_ranks(4, execute, replace(run, strategy=sizes(ulysses, ring)), timeout=120)
    assert worst_error(results, exact) > 1e-4, "bfloat16 was in use"
    compare(results, exact, 2 * rounding)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "strategy",
    [
        sizes(2, 2),
        pytest.param(sizes(1, 4), marks=pytest.mark.nightly),
        pytest.param(sizes(4, 1), marks=pytest.mark.nightly),
    ],
)
def test_4093_tokens(strategy: Any) -> None:
    run = Run(seq_len=4093, rows=1, steps=2)
    compare(
        run_ranks(4, execute, replace(run, strategy=strategy), timeout=200), baseline(run), 1e-10
    )


@pytest.mark.nightly
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("model", MODELS)
def test_4093_tokens_for_twenty_steps(model: str) -> None:
    kind, dtype = model.split("-")
    run = Run(model=kind, dtype=dtype, seq_len=4093, rows=1, accumulate=3, clip=0.3)
    results = run_ranks(4, execute, replace(run, strategy=sizes(2, 2)), timeout=600)
    compare(results, run_ranks(1, execute, run, timeout=600)[0], MODELS[model])


@pytest.mark.nightly
def test_a_mean_of_local_means_would_fail() -> None:
    """The tolerance bites: without the loss scale the very first gradient norms differ."""
    run = Run(steps=4)
    results = run_ranks(4, unscaled, replace(run, strategy=sizes(2, 2)), timeout=120)
    with pytest.raises(AssertionError):
        compare(results, baseline(run), 1e-2)


def unscaled(rank: int, world_size: int, run: Run) -> Result:
    """A run whose loss is not weighted by targets."""
    from lightning_cp.loss.weighting import StepLoss

    run = replace(run, strategy=(*run.strategy, ("parity_check", "off")))  # type: ignore[misc]
    original = StepLoss.scale
    StepLoss.scale = lambda self, loss, optimizers, automatic: torch.nan_to_num(loss)  # type: ignore[method-assign]
    try:
        return execute(rank, world_size, run)
    finally:
        StepLoss.scale = original  # type: ignore[method-assign]

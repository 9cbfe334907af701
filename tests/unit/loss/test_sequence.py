"""Sums, means and tokens of whole sequences on one rank: against loops over rows and documents."""

from __future__ import annotations

import pytest
import torch

from lightning_cp.errors import ConfigError, ShapeError
from lightning_cp.layout import Documents, SequenceLayout
from lightning_cp.loss.sequence import SequenceTokens

ROWS, LENGTH = 3, 11


def intervals(kind: str) -> tuple[Documents | None, list[tuple[int, int, int]]]:
    """The documents of a batch, and (row, start, end) of each sequence."""
    if kind == "rows":
        return None, [(row, 0, LENGTH) for row in range(ROWS)]
    if kind == "padded":
        starts, ends = [0, 3, 5], [11, 11, 8]
        mask = torch.zeros(ROWS, LENGTH, dtype=torch.int64)
        for row in range(ROWS):
            mask[row, starts[row] : ends[row]] = 1
        return Documents.from_padding_mask(mask), list(zip(range(ROWS), starts, ends, strict=True))
    cu = torch.tensor([[0, 4, 11, 11], [0, 1, 2, 11], [0, 11, 11, 11]])
    spans = [(0, 0, 4), (0, 4, 11), (1, 0, 1), (1, 1, 2), (1, 2, 11), (2, 0, 11)]
    return Documents.from_cu_seqlens(cu), spans


KINDS = pytest.mark.parametrize("kind", ["rows", "padded", "packed"])


def tokens_of(kind: str, mask: torch.Tensor | None = None) -> SequenceTokens:
    return SequenceTokens.of(SequenceLayout(LENGTH, documents=intervals(kind)[0]), 0, ROWS, mask)


def values(*more: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, LENGTH, *more, dtype=torch.float64, generator=generator)
    return x.requires_grad_()


@KINDS
@pytest.mark.parametrize("more", [(), (2, 3)])
def test_sums_and_means_equal_loops(kind: str, more: tuple[int, ...]) -> None:
    spans, x = intervals(kind)[1], values(*more)
    tokens = tokens_of(kind)
    want = torch.stack([x[row, start:end].sum(0) for row, start, end in spans])
    torch.testing.assert_close(tokens.sum(x).over(None), want)
    sizes = torch.tensor([end - start for _, start, end in spans]).view(-1, *[1] * len(more))
    torch.testing.assert_close(tokens.mean(x).over(None), want / sizes)


@KINDS
def test_masks_and_weights_of_tokens(kind: str) -> None:
    spans, x = intervals(kind)[1], values(2)
    weights = torch.rand(ROWS, LENGTH, dtype=torch.float64).masked_fill(
        torch.rand(ROWS, LENGTH) < 0.4, 0
    )
    for mask in (weights, weights > 0):
        product = (x * mask[..., None]).detach()
        want = torch.stack([product[row, start:end].sum(0) for row, start, end in spans])
        sums = torch.stack([mask[row, start:end].sum() for row, start, end in spans])
        torch.testing.assert_close(tokens_of(kind).sum(x, mask).over(None), want)
        means = want / torch.where(sums == 0, 1, sums)[:, None]
        torch.testing.assert_close(tokens_of(kind).mean(x, mask).over(None), means)


@KINDS
def test_values_that_do_not_count_may_be_nan(kind: str) -> None:
    spans, x = intervals(kind)[1], values()
    counts = torch.zeros(ROWS, LENGTH, dtype=torch.bool)
    for row, start, _ in spans:
        counts[row, start] = True
    bad = torch.where(counts, x, torch.nan)
    bad.retain_grad()
    tokens_of(kind).sum(bad, counts).over(None).sum().backward()
    assert bad.grad is not None
    assert torch.equal(bad.grad, counts.double())


@KINDS
def test_a_token_of_each(kind: str) -> None:
    spans, x = intervals(kind)[1], values(2)
    last = torch.stack([x[row, end - 1] for row, _, end in spans])
    first = torch.stack([x[row, start] for row, start, _ in spans])
    assert torch.equal(tokens_of(kind).pick(x, -1).over(None), last)
    assert torch.equal(tokens_of(kind).pick(x, 0).over(None), first)
    some = [(end - start) // 2 for _, start, end in spans]
    want = torch.stack(
        [x[row, start + at] for (row, start, _), at in zip(spans, some, strict=True)]
    )
    got = tokens_of(kind).pick(x, torch.tensor(some)).over(None)
    assert torch.equal(got, want)
    got.sum().backward()
    assert x.grad is not None
    assert int(x.grad.count_nonzero()) == 2 * len(spans)


def test_a_mask_that_documents_do_not_know() -> None:
    """A model that reads no masks has one document; its padding still has no place."""
    mask = torch.ones(ROWS, LENGTH, dtype=torch.int64)
    mask[0, :4], mask[1, 6:], mask[2, ::2] = 0, 0, 0
    tokens, x = tokens_of("rows", mask), values()
    assert tokens.lengths == (7, 6, 5)
    torch.testing.assert_close(tokens.sum(x).over(None), (x * mask).sum(1))
    want = torch.stack([x[row][mask[row] != 0][2] for row in range(ROWS)])
    assert torch.equal(tokens.pick(x, 2).over(None), want)
    assert torch.equal(tokens.pick(x, -1).over(None), x[[0, 1, 2], [10, 5, 9]])


@pytest.mark.parametrize("kind", ["padded", "packed"])
def test_gradients(kind: str) -> None:
    tokens, x = tokens_of(kind), values(2)
    mask = torch.rand(ROWS, LENGTH) < 0.7

    def every(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (
            tokens.sum(x, mask).over(None),
            tokens.mean(x, mask).over(None),
            tokens.pick(x, -1).over(None),
        )

    assert torch.autograd.gradcheck(every, (x,))


@pytest.mark.parametrize("kind", ["padded", "packed"])
def test_gradients_of_learned_weights(kind: str) -> None:
    """Also where a weight is exactly 0, and not of padding."""
    tokens, x = tokens_of(kind), values(2)
    learned = torch.rand(ROWS, LENGTH, dtype=torch.float64) + 0.2
    learned[:, 4::3] = 0
    learned.requires_grad_()

    def every(x: torch.Tensor, learned: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tokens.sum(x, learned).over(None), tokens.mean(x, learned).over(None)

    assert torch.autograd.gradcheck(every, (x, learned))
    is_padding = tokens.owner < 0
    with torch.no_grad():
        x[is_padding] = learned[is_padding] = torch.nan
    grads = torch.autograd.grad(torch.cat(every(x, learned)).sum(), (x, learned))
    assert all(grad.isfinite().all() for grad in grads)
    fixed = torch.autograd.grad(torch.cat(every(x, learned.detach())).sum(), x)[0]
    torch.testing.assert_close(fixed, grads[0])


def test_narrow_sums_are_accumulated_in_float32() -> None:
    x = torch.full((1, 4096), 1.0, dtype=torch.bfloat16)
    tokens = SequenceTokens.whole(1, 4096)
    assert tokens.sum(x).over(None).item() == 4096
    assert tokens.mean(x, torch.ones_like(x)).over(None).item() == 1


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64])
@KINDS
def test_sums_of_whole_numbers_are_torch_s(kind: str, dtype: torch.dtype) -> None:
    """A count of a mask, by which a loss is divided: not true or false, and nothing overflows."""
    spans, tokens = intervals(kind)[1], tokens_of(kind)
    x = (values().detach() > -1) * (1 if dtype is torch.bool else 200)
    x = x.to(dtype)
    want = torch.stack([x[row, start:end].sum() for row, start, end in spans])
    for got in (tokens.sum(x), tokens.sum(x, torch.ones_like(x, dtype=torch.bool))):
        assert got.over(None).dtype is torch.int64
        assert torch.equal(got.over(None), want)
    sizes = torch.tensor([end - start for _, start, end in spans])
    torch.testing.assert_close(tokens.mean(x).over(None), want / sizes)
    torch.testing.assert_close(tokens.mean(x, x).over(None), want * int(x.max()) / want)
    large = x.to(dtype) if dtype is torch.bool else (x.long() + 2**40).to(dtype)
    assert torch.equal(
        tokens.pick(large, 0).over(None),
        torch.stack([large[row, start] for row, start, _ in spans]),
    )


@pytest.mark.parametrize("index", [11, -2, [0, 0, 99]])
def test_places_that_no_sequence_has(index: object) -> None:
    with pytest.raises(ConfigError, match=r"is not a token of row \d, which has 11"):
        tokens_of("rows").pick(values(), index).over(None)  # type: ignore[arg-type]


def test_a_place_in_padding() -> None:
    with pytest.raises(ConfigError, match="is not a token of row 1, which has 8 without padding"):
        tokens_of("padded").pick(values(), 8).over(None)


def test_an_empty_row() -> None:
    mask = torch.ones(2, 4, dtype=torch.int64)
    mask[1] = 0
    tokens = SequenceTokens.of(SequenceLayout(4), 0, 2, mask)
    x = torch.ones(2, 4)
    assert tokens.sum(x).over(None).tolist() == [4, 0]
    assert tokens.mean(x).over(None).tolist() == [1, 0]
    with pytest.raises(ConfigError, match=r"finds no token in row 1: .* mask"):
        tokens.pick(x, -1).over(None)


def test_shapes_that_do_not_fit() -> None:
    tokens, x = tokens_of("rows"), values()
    with pytest.raises(ShapeError, match=r"\[3, 11, ...\] in this step, got \(3, 10\)"):
        tokens.sum(x[:, :-1]).over(None)
    with pytest.raises(ShapeError, match=r"mask takes .* got \(3, 10\)"):
        tokens.sum(x, torch.ones(3, 10)).over(None)
    with pytest.raises(ShapeError, match="one value for each token"):
        tokens.mean(x, torch.ones(3, 11, 2)).over(None)
    with pytest.raises(ShapeError, match="one index for each row, of which there are 3, got 2"):
        tokens.pick(x, [0, 1]).over(None)

"""The oracle against PyTorch's own attention, against loops, and its verdict on vacuous tests."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from tests.helpers import oracle

LENGTH = 12
DOCUMENTS = [[(0, 5), (5, 11)], [(2, 12)]]


Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def inputs(kv_heads: int = 2, dtype: torch.dtype = torch.float64) -> Tensors:
    """q, k, v and the gradient of out."""
    torch.manual_seed(0)
    q, dout = torch.randn(2, 2, LENGTH, 4, 8, dtype=torch.float64).to(dtype)
    k, v = torch.randn(2, 2, LENGTH, kv_heads, 8, dtype=torch.float64).to(dtype)
    return q, k, v, dout


def sees(i: int, j: int, causal: bool, window: tuple[int, int], row: oracle.Intervals) -> bool:
    together = any(start <= i < end and start <= j < end for start, end in row)
    in_window = (window[0] < 0 or i - j <= window[0]) and (window[1] < 0 or j - i <= window[1])
    return together and in_window and (not causal or j <= i)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [(-1, -1), (3, -1), (-1, 2), (2, 0), (0, 0)])
def test_visible_pairs(causal: bool, window: tuple[int, int]) -> None:
    found = oracle.visible_pairs(LENGTH, causal=causal, window=window, documents=DOCUMENTS)
    for row, intervals in enumerate(DOCUMENTS):
        for i in range(LENGTH):
            for j in range(LENGTH):
                assert found[row, i, j] == sees(i, j, causal, window, intervals)


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_agrees_with_pytorch(kv_heads: int, causal: bool, scale: float | None) -> None:
    q, k, v, dout = inputs(kv_heads)
    found = oracle.attention(q, k, v, dout, causal=causal, softmax_scale=scale)
    a, b, c = (x.transpose(1, 2).requires_grad_() for x in (q, k, v))
    out = F.scaled_dot_product_attention(a, b, c, is_causal=causal, scale=scale, enable_gqa=True)
    dq, dk, dv = torch.autograd.grad(out, (a, b, c), dout.transpose(1, 2))
    for name, expected in {"out": out, "dq": dq, "dk": dk, "dv": dv}.items():
        error = oracle.max_error(getattr(found, name), expected.transpose(1, 2))
        assert error < 1e-13, name


def test_lse_and_gradients_by_their_formulas() -> None:
    """dv = p' dout; ds = p (dp - sum(p dp)); dq = ds k; dk = ds' q, over documents and a window."""
    q, k, v, dout = inputs(kv_heads=4)
    found = oracle.attention(
        q, k, v, dout, causal=True, window=(3, -1), documents=DOCUMENTS, softmax_scale=0.5
    )
    visible = oracle.visible_pairs(LENGTH, causal=True, window=(3, -1), documents=DOCUMENTS)
    for row in range(2):
        for head in range(4):
            qs, ks, vs, ds = (x[row, :, head] for x in (q, k, v, dout))
            e = torch.exp(0.5 * qs @ ks.T) * visible[row]
            total = e.sum(1, keepdim=True)
            p = torch.where(total > 0, e / total, 0.0)
            dp = ds @ vs.T
            dscore = 0.5 * p * (dp - (p * dp).sum(1, keepdim=True))
            assert oracle.max_error(found.lse[row, head], total[:, 0].log()) < 1e-13
            assert oracle.max_error(found.out[row, :, head], p @ vs) < 1e-13
            assert oracle.max_error(found.dv[row, :, head], p.T @ ds) < 1e-13
            assert oracle.max_error(found.dq[row, :, head], dscore @ ks) < 1e-13
            assert oracle.max_error(found.dk[row, :, head], dscore.T @ qs) < 1e-13


SLOPES = 0.3 * torch.cos(torch.arange(8, dtype=torch.float64)).view(2, 4)
SINKS = torch.tensor([0.5, -1.0, 2.0, 3.0], dtype=torch.float64)


def test_slopes_and_sinks_agree_with_pytorch() -> None:
    """With a bias for each pair; a sink is one more key whose K and V are 0 and whose bias is the sink."""
    q, k, v, dout = inputs(kv_heads=4)
    how = oracle.Scores(alibi_slopes=SLOPES, sinks=SINKS, max_logits=True)
    found = oracle.attention(q, k, v, dout, causal=True, softmax_scale=0.3, how=how)
    a, b, c = (x.transpose(1, 2).requires_grad_() for x in (q, k, v))
    sinks = SINKS.clone().requires_grad_()
    distance = (torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)[None]).abs()
    bias = (-SLOPES[..., None, None] * distance).masked_fill(
        torch.ones(LENGTH, LENGTH).triu(1).bool(), -math.inf
    )
    column = sinks.view(1, 4, 1, 1).expand(2, 4, LENGTH, 1)
    keys, values = (F.pad(x, (0, 0, 0, 1)) for x in (b, c))
    out = F.scaled_dot_product_attention(a, keys, values, torch.cat([bias, column], -1), scale=0.3)
    dq, dk, dv, ds = torch.autograd.grad(out, (a, b, c, sinks), dout.transpose(1, 2))
    for name, expected in {"out": out, "dq": dq, "dk": dk, "dv": dv}.items():
        assert oracle.max_error(getattr(found, name), expected.transpose(1, 2)) < 1e-13, name
    assert oracle.max_error(found.dsinks, ds) < 1e-13  # type: ignore[arg-type]
    scores = 0.3 * a @ b.mT + bias
    assert oracle.max_error(found.max_logits, scores.amax(-1)) < 1e-13  # type: ignore[arg-type]
    whole = torch.cat([scores, column], -1).logsumexp(-1)
    assert oracle.max_error(found.lse, whole) < 1e-13


def test_a_cap_and_its_gradients_by_their_formulas() -> None:
    """A cap comes before the slopes; ds goes through its derivative, 1 / cosh(s / cap)^2."""
    q, k, v, dout = inputs(kv_heads=4)
    how = oracle.Scores(softcap=0.7, alibi_slopes=SLOPES[0])
    found = oracle.attention(q, k, v, dout, causal=False, softmax_scale=0.5, how=how)
    distance = (torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)[None]).abs()
    for row in range(2):
        for head in range(4):
            qs, ks, vs, ds = (x[row, :, head] for x in (q, k, v, dout))
            scaled = 0.5 * qs @ ks.T
            p = torch.softmax(0.7 * torch.tanh(scaled / 0.7) - SLOPES[0, head] * distance, dim=1)
            dp = ds @ vs.T
            dscore = 0.5 * p * (dp - (p * dp).sum(1, keepdim=True)) / torch.cosh(scaled / 0.7) ** 2
            assert oracle.max_error(found.out[row, :, head], p @ vs) < 1e-13
            assert oracle.max_error(found.dq[row, :, head], dscore @ ks) < 1e-13
            assert oracle.max_error(found.dk[row, :, head], dscore.T @ qs) < 1e-13


def test_a_query_without_keys_gives_nothing() -> None:
    q, k, v, dout = inputs()
    how = oracle.Scores(sinks=SINKS, max_logits=True)
    found = oracle.attention(q, k, v, dout, causal=True, documents=DOCUMENTS, how=how)
    for name, tensor in found.items():
        assert not tensor.isnan().any(), name
    assert (found.lse[0, :, 11] == -math.inf).all()
    assert (found.lse[1, :, :2] == -math.inf).all()
    for gradient in (found.out, found.dq, found.dk, found.dv):
        assert (gradient[0, 11] == 0).all()
        assert (gradient[1, :2] == 0).all()


def test_low_precision_inputs_are_widened_first() -> None:
    low = inputs(dtype=torch.bfloat16)
    found = oracle.attention(*low, causal=True)
    q, k, v, dout = (x.double() for x in low)
    wide = oracle.attention(q, k, v, dout, causal=True)
    for name, tensor in found.items():
        assert torch.equal(tensor, getattr(wide, name))


def halves() -> list[torch.Tensor]:
    return list(torch.arange(LENGTH + 2).split((LENGTH + 2) // 2))  # two padded positions


def test_void_outputs_fail_a_real_tolerance() -> None:
    tensors = inputs()
    expected = oracle.attention(*tensors, causal=True)
    voids = oracle.void_outputs(*tensors, halves(), causal=True)
    assert list(voids) == ["zero", "local"]
    oracle.assert_not_vacuous(expected, voids, 1e-3)
    oracle.assert_not_vacuous(expected, voids, dict.fromkeys(dict(expected.items()), 1e-3))


def test_local_output_is_what_a_rank_sees_alone() -> None:
    q, k, v, dout = inputs()
    local = oracle.void_outputs(q, k, v, dout, halves(), causal=True)["local"]
    alone = oracle.attention(q[:, 7:], k[:, 7:], v[:, 7:], dout[:, 7:], causal=True)
    assert oracle.max_error(local.out[:, 7:], alone.out) < 1e-14
    assert oracle.max_error(local.dk[:, 7:], alone.dk) < 1e-14


def test_a_cell_that_needs_no_communication_is_vacuous() -> None:
    tensors, documents = inputs(), [[(0, 7), (7, 12)]]
    expected = oracle.attention(*tensors, causal=True, documents=documents)
    voids = oracle.void_outputs(*tensors, halves(), causal=True, documents=documents)
    with pytest.raises(AssertionError, match="the local output has an error of 0 in out"):
        oracle.assert_not_vacuous(expected, voids, 1e-11)


def test_a_wide_tolerance_is_vacuous() -> None:
    tensors = inputs()
    expected = oracle.attention(*tensors, causal=True)
    voids = oracle.void_outputs(*tensors, halves()[:1], causal=True)
    assert list(voids) == ["zero"]
    with pytest.raises(AssertionError, match=r"the zero output .* the tolerance 10 accepts"):
        oracle.assert_not_vacuous(expected, voids, 10.0)


def test_max_error_of_what_is_not_a_number() -> None:
    inf, nan = torch.tensor([-math.inf, 1.0]), torch.tensor([math.nan, 1.0])
    assert oracle.max_error(inf, inf) == 0.0
    assert oracle.max_error(nan, inf) == math.inf
    assert oracle.max_error(nan, nan) == math.inf
    assert oracle.max_error(torch.zeros(2), inf) == math.inf

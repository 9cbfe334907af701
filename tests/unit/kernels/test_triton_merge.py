"""The Triton kernel that merges partial results, beside the operators that merge on CPU and float64."""

from __future__ import annotations

import pytest
import torch

from lightning_cp.kernels.merge import Accumulator, merge
from lightning_cp.kernels.triton import launch
from lightning_cp.kernels.triton import merge as triton_merge
from lightning_cp.kernels.triton.merge import TOKENS, launch_merge, merge_on_gpu
from tests.helpers.kernels.devices import DEVICES

NAN, NONE = torch.nan, -torch.inf
Partial = tuple[torch.Tensor, torch.Tensor]

LOG_SUMS = [
    (0.5, 1.5),
    (NONE, 2.0),
    (2.0, NONE),
    (NONE, NONE),
    (1e4, -1e4),
    (-1e4, 1e4),
    (700.0, 700.5),
    (-3.0, NAN),
    (NAN, NONE),
    (0.0, 0.0),
]
"""Of the old part and the new one."""


def parts(
    device: str, dtype: torch.dtype = torch.float32, dim: int = 24
) -> tuple[Partial, Partial]:
    """Two parts of two rows with more tokens than a program has; tokens without keys have 0."""
    generator = torch.Generator().manual_seed(0)
    count = TOKENS + 9
    made = []
    for side in range(2):
        lse = torch.randn(2, 3, count, generator=generator)
        for at, pair in enumerate(LOG_SUMS):
            lse[at % 2, at % 3, 3 * at] = pair[side]
        out = torch.randn(2, count, 3, dim, generator=generator)
        out[(lse == NONE).transpose(1, 2)] = 0.0
        made.append((out.to(dtype if side else torch.float32).to(device), lse.to(device)))
    return made[0], made[1]


def wanted(old: Partial, new: Partial) -> Partial:
    """In float64, by the operators."""
    out, lse = (x.double().cpu() for x in old)
    merge(out, lse, *(x.double().cpu() for x in new))
    return out, lse


def check(found: Partial, want: Partial) -> None:
    for x, y in zip(found, want, strict=True):
        torch.testing.assert_close(x.double().cpu(), y, rtol=1e-6, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("dim", [16, 24])
def test_equals_the_operators(dim: int, dtype: torch.dtype, device: str) -> None:
    old, new = parts(device, dtype, dim)
    want = wanted(old, new)
    launch_merge(*old, *new)
    check(old, want)
    assert int(want[1].isnan().sum()) == 2
    assert int((want[1] == NONE).sum()) == 1


@pytest.mark.parametrize("device", DEVICES)
def test_a_side_without_keys_changes_no_bit(device: str) -> None:
    (old_out, old_lse), (new_out, new_lse) = parts(device)
    old, new = (
        (old_out, old_lse.nan_to_num(neginf=NONE)),
        (new_out, new_lse.nan_to_num(neginf=NONE)),
    )
    before = [x.clone() for x in old]
    launch_merge(*old, torch.zeros_like(old[0]), torch.full_like(old[1], NONE))
    out, lse = torch.zeros_like(new[0]), torch.full_like(new[1], NONE)
    launch_merge(out, lse, *new)
    for found, want in zip((*old, out, lse), (*before, *new), strict=True):
        assert torch.equal(found, want)


@pytest.mark.parametrize("device", DEVICES)
def test_slices_of_any_strides(device: str) -> None:
    """Rows and queries of the accumulator, stored token first; the parts lie in packed memory."""
    old, new = parts(device)
    want = wanted((old[0][1:, 5:40], old[1][1:, :, 5:40]), (new[0][1:, :35], new[1][1:, :, 2:37]))
    out = old[0].transpose(0, 1).contiguous().transpose(0, 1)
    lse = old[1].transpose(1, 2).contiguous().transpose(1, 2)
    around = out.clone(), lse.clone()
    launch_merge(*(out[1:, 5:40], lse[1:, :, 5:40]), *(new[0][1:, :35], new[1][1:, :, 2:37]))
    check((out[1:, 5:40], lse[1:, :, 5:40]), want)
    out[1:, 5:40], lse[1:, :, 5:40] = around[0][1:, 5:40], around[1][1:, :, 5:40]
    assert torch.equal(out, around[0])
    assert torch.equal(lse.nan_to_num(9.0), around[1].nan_to_num(9.0))


@pytest.mark.parametrize("device", DEVICES)
def test_scattered_tokens(device: str) -> None:
    old, new = parts(device)
    rows = torch.tensor([0, 1] * 17, device=device)
    positions = torch.arange(34, device=device).flip(0) + 3
    packed = new[0][rows, positions].unsqueeze(0), new[1][rows, :, positions].T.unsqueeze(0)
    want = tuple(x.clone() for x in old)
    of_old = want[0][rows, positions].unsqueeze(0), want[1][rows, :, positions].T.unsqueeze(0)
    merged = wanted(of_old, packed)
    launch_merge(*old, *packed, at=(rows, positions))
    check((old[0][rows, positions], old[1][rows, :, positions].T), (merged[0][0], merged[1][0]))
    for now, before in zip(old, want, strict=True):
        untouched = torch.ones(2, old[0].shape[1], dtype=torch.bool, device=device)
        untouched[rows, positions] = False
        axis = (now, before) if now.dim() == 4 else (now.transpose(1, 2), before.transpose(1, 2))
        assert torch.equal(*(x[untouched].nan_to_num(9.0) for x in axis))


@pytest.mark.skipif(not launch.is_installed(), reason="needs Triton")
def test_other_tensors_are_left_to_the_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_merge, "launch_merge", lambda *_: launched.append(True))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    launched: list[bool] = []
    out, lse = torch.zeros(1, 4, 2, 8), torch.zeros(1, 2, 4)
    assert merge_on_gpu(out, lse, out.half(), lse)
    assert not merge_on_gpu(out.double(), lse, out, lse)
    assert not merge_on_gpu(out.transpose(2, 3), lse, out, lse)
    monkeypatch.setattr(triton_merge, "is_installed", lambda: False)
    assert not merge_on_gpu(out, lse, out, lse)
    assert launched == [True]


def test_an_accumulator_on_a_gpu_merges_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole results, parts and scattered ones, by the pretence that the tensors are on a GPU."""
    calls: list[object] = []

    def take(out: torch.Tensor, *others: torch.Tensor, at: object = None) -> bool:
        calls.append(at)
        return True

    monkeypatch.setattr("lightning_cp.kernels.merge._merge_by_triton", take)
    (out, lse), new = parts("cpu")
    state = Accumulator(out, torch.float32)
    state.add(-1, 0, out, lse)
    state.add(-1, 0, *new)
    state.add(1, 2, new[0][1:, :3], new[1][1:, :, :3])
    rows = positions = torch.zeros(1, dtype=torch.int64)
    state.add_at(rows, positions, new[0][0, :1], new[1][0, :, :1])
    assert calls == [None, None, (rows, positions)]
    assert state.result(torch.float32)[0] is out

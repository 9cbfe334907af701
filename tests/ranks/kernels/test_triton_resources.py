"""Spills, tensor cores and memory of our Triton kernels on three kinds of GPU, without one.

The bounds in ``triton_bounds.json`` are what the table of block sizes was chosen for: they may only fall.
"""

from __future__ import annotations

import json

import pytest

from lightning_cp.kernels.triton.blocks import BlockConfigs
from lightning_cp.kernels.triton.launch import is_installed
from tests.helpers.kernels.triton_resources import BOUNDS, check_bounds, check_memory, compiled

pytestmark = pytest.mark.skipif(not is_installed(), reason="needs Triton")
TARGETS, HEAD_DIMS = (80, 90, 100), (64, 128, 256)


@pytest.mark.nightly
@pytest.mark.parametrize("heads", ["group", "one"])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("capability", TARGETS)
def test_within_bounds(capability: int, head_dim: int, heads: str) -> None:
    taken = compiled(capability, "bfloat16", head_dim, head_dim, scores="plain", heads=heads)
    assert taken.keys() == {"forward", "backward_queries", "backward_keys"}
    check_memory(capability, taken)
    check_bounds(capability, head_dim, taken)


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("capability", TARGETS)
def test_the_merge_spills_nothing(capability: int, head_dim: int, dtype: str) -> None:
    taken = compiled(capability, dtype, head_dim, head_dim, scores="plain", kernels="merge_results")
    check_memory(capability, taken)
    assert taken["merge_results"]["stores"] == 0


def test_a_kernel_of_each_kind_quickly() -> None:
    """One of the cells above and the merge, which has no products."""
    taken = compiled(90, "bfloat16", 128, 128, scores="plain", kernels="forward,merge_results")
    check_memory(90, taken)
    assert taken.pop("merge_results")["stores"] == 0
    check_bounds(90, 128, taken)
    with pytest.raises(AssertionError, match="has no wgmma"):
        check_bounds(90, 128, {"forward": {**taken["forward"], "wgmma": 0}})
    with pytest.raises(AssertionError, match="spills 1 registers"):
        check_bounds(90, 128, {"forward": {**taken["forward"], "stores": 1}})


def test_bounds_are_those_that_were_promised() -> None:
    """No spills of forward and dq, and at most 8 of dk and dv, for the usual head dims; wgmma on Hopper."""
    bounds = json.loads(BOUNDS.read_text())
    assert bounds.keys() == set(map(str, TARGETS))
    for target, by_dim in bounds.items():
        assert by_dim.keys() == set(map(str, HEAD_DIMS))
        for head_dim, kernels in by_dim.items():
            assert len(kernels) == len(BlockConfigs._fields)
            if target == "90":
                assert {kind for _, kind in kernels.values()} == {"wgmma"}
            if target in ("80", "90") and head_dim in ("64", "128"):
                assert kernels["forward"][0] == kernels["backward_queries"][0] == 0
                assert kernels["backward_keys"][0] <= 8

"""Our Triton kernels with every score feature pass Triton's compiler, without a GPU, and fit each kind."""

from __future__ import annotations

import pytest

from lightning_cp.kernels.triton.launch import is_installed
from tests.helpers.kernels.triton_resources import check_memory, compiled


@pytest.mark.skipif(not is_installed(), reason="needs Triton")
@pytest.mark.parametrize(
    ("capability", "dtype", "head_dim", "value_dim"),
    [
        (80, "float16", 96, 96),
        (80, "float32", 64, 64),
        (90, "bfloat16", 128, 128),
        (90, "bfloat16", 256, 256),
        (80, "bfloat16", 192, 128),
        (90, "bfloat16", 192, 128),
        (80, "float32", 64, 128),
    ],
)
def test_compiles(capability: int, dtype: str, head_dim: int, value_dim: int) -> None:
    taken = compiled(capability, dtype, head_dim, value_dim)
    assert taken.keys() == {"forward", "backward_queries", "backward_keys"}
    check_memory(capability, taken)

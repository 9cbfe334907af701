"""An embedding of which each rank has its own tokens."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from lightning_cp.engines.tensor_parallel import styles
from tests.helpers.pool import run_ranks

VOCABULARY = 6


def shared(world_size: int) -> tuple[nn.Module, torch.Tensor]:
    """A layer, and its whole weight."""
    torch.manual_seed(0)
    layer = nn.Embedding(VOCABULARY, 3, dtype=torch.float64)
    weight = layer.weight.detach().clone()
    mesh = init_device_mesh("cpu", (world_size,))
    return parallelize_module(layer, mesh, styles.VocabularyEmbedding()), weight


def look_up(rank: int, world_size: int) -> None:
    layer, weight = shared(world_size)
    tokens = torch.arange(VOCABULARY).flip(0)
    assert torch.equal(layer(tokens), weight[tokens])
    for strange in (VOCABULARY, -1):
        with pytest.raises(IndexError, match="a token is out of bounds of the vocabulary of 6"):
            layer(torch.tensor([0, strange]))


def test_a_token_that_no_rank_has_is_an_error() -> None:
    run_ranks(2, look_up)


def look_up_on_a_device(rank: int, world_size: int) -> list[bool]:
    """As where nothing looks at tokens before."""
    layer, _ = shared(world_size)
    look = styles._out_of_bounds
    styles._out_of_bounds = lambda tokens, vocabulary: (tokens < 0) | (tokens >= vocabulary)
    try:
        out = layer(torch.tensor([5, 6, -1, 0]))
    finally:
        styles._out_of_bounds = look
    return out.isnan().all(-1).tolist()


def test_elsewhere_it_becomes_nan() -> None:
    assert run_ranks(2, look_up_on_a_device) == [[False, True, True, False]] * 2

"""Logits of a sharded vocabulary: losses and gradients are those of whole rows, whatever is done."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from lightning_cp.comm.vocab_parallel import (
    ShardedLogits,
    sharded_cross_entropy,
    token_losses,
    whole_logits,
)
from lightning_cp.errors import ConfigError
from tests.helpers.pool import run_ranks

VOCABULARY, SHAPE = 12, (2, 5, 12)
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

STAYS_SHARDED: dict[str, Loss] = {
    "flattened": lambda z, y: F.cross_entropy(z.flatten(0, 1), y.flatten()),
    "viewed": lambda z, y: F.cross_entropy(z.view(-1, VOCABULARY), y.view(-1)),
    "by its size": lambda z, y: F.cross_entropy(z.reshape(-1, z.size(-1)), y.view(-1)),
    "by its shape": lambda z, y: F.cross_entropy(z.view(-1, z.shape[2]), y.view(-1)),
    "summed": lambda z, y: F.cross_entropy(z.flatten(0, 1), y.flatten(), reduction="sum"),
    "of each token": lambda z, y: (
        F.cross_entropy(z.flatten(0, 1), y.flatten(), reduction="none").square().sum()
    ),
    "smoothed": lambda z, y: F.cross_entropy(z.flatten(0, 1), y.flatten(), label_smoothing=0.1),
    "another ignored": lambda z, y: F.cross_entropy(
        z.flatten(0, 1), y.clamp(3).flatten(), ignore_index=3
    ),
    "capped": lambda z, y: F.cross_entropy(
        (torch.tanh(z / 3) * 3).view(-1, VOCABULARY), y.view(-1)
    ),
    "by names": lambda z, y: F.cross_entropy(
        input=torch.mul(input=torch.tanh(input=z), other=2).view(-1, VOCABULARY), target=y.view(-1)
    ),
    "large": lambda z, y: F.cross_entropy((z * 700).view(-1, VOCABULARY), y.view(-1)),
}
IS_GATHERED: dict[str, Loss] = {
    "by class": lambda z, y: F.cross_entropy(z.transpose(1, 2), y),
    "weighted": lambda z, y: F.cross_entropy(
        z.flatten(0, 1), y.flatten(), weight=torch.arange(1.0, 13.0).to(z.dtype)
    ),
    "probabilities": lambda z, y: F.cross_entropy(z, torch.full_like(z, 1 / VOCABULARY)),
    "by hand": lambda z, y: -z.log_softmax(-1).gather(-1, y.clamp(0)[..., None]).mean(),
    "of z": lambda z, y: (
        F.cross_entropy(z.flatten(0, 1), y.flatten()) + 0.1 * torch.logsumexp(z, -1).square().mean()
    ),
    "a column": lambda z, y: z[..., 7].sum() + z.max(),
    "with another": lambda z, y: (torch.ones(VOCABULARY, dtype=z.dtype) * z).square().sum(),
    "by its name": lambda z, y: torch.softmax(input=z, dim=-1).square().sum(),
    "by a name that is not the first": lambda z, y: (
        torch.where(condition=y.ge(0)[..., None], input=z, other=torch.zeros_like(z)).square().sum()
    ),
    "by the name of a tensor after the first": lambda z, y: (
        torch.where(y.ge(0)[..., None], input=z, other=torch.zeros((), dtype=z.dtype))
        .square()
        .sum()
    ),
    "stacked": lambda z, y: torch.stack([z, z.sigmoid()]).square().sum(),
}


def changed(change: Callable[[torch.Tensor], object]) -> Loss:
    """Cross-entropy of logits that were changed in place."""

    def loss(z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        change(z)
        return F.cross_entropy(z.view(-1, VOCABULARY), y.view(-1))

    return loss


def assign(z: torch.Tensor) -> None:
    z[..., 5:] = -100


def divide_rows(z: torch.Tensor) -> None:
    z[0] /= 3


def divide_a_view_of_rows(z: torch.Tensor) -> None:
    z.view(-1, VOCABULARY)[2:7] /= 3


def fill_two_views(z: torch.Tensor) -> None:
    z[..., 7:].fill_(-3)
    z[0].mul_(2)


IS_CHANGED: dict[str, Loss] = {
    "assigned": changed(assign),
    "divided": changed(lambda z: z.div_(3)),
    "masked": changed(lambda z: z.masked_fill_(torch.arange(VOCABULARY) > 4, -100)),
    "across the vocabulary": changed(lambda z: z.cumsum_(-1)),
    "by itself": changed(lambda z: z.mul_(z.sigmoid())),
    "by an option": changed(lambda z: F.leaky_relu(z, 0.1, inplace=True)),
    "some rows": changed(divide_rows),
    "some rows of a view": changed(divide_a_view_of_rows),
    "a view of them": changed(fill_two_views),
}
"""Where all of them were changed in place, or some."""


def compare(rank: int, world_size: int, name: str) -> tuple[float, float, int]:
    """Errors of a loss and of its gradient, and how many rows were gathered for it."""
    loss = {**STAYS_SHARDED, **IS_GATHERED, **IS_CHANGED}[name]
    torch.manual_seed(0)
    values = torch.randn(SHAPE, dtype=torch.float64)
    target = torch.randint(0, VOCABULARY, SHAPE[:2])
    target[0, :2] = -100
    whole = values.clone().requires_grad_()
    want = loss(whole * 1, target)
    want.backward()
    local = values.chunk(world_size, -1)[rank].clone().requires_grad_()
    logits = ShardedLogits.of(local * 1, dist.group.WORLD)  # type: ignore[arg-type]
    assert logits.shape == SHAPE
    assert logits.numel() == values.numel()
    gathered: list[int] = []
    gather = dist.all_gather
    dist.all_gather = lambda *args, **kwargs: (gathered.append(1), gather(*args, **kwargs))[1]  # type: ignore[assignment]
    try:
        got = loss(logits, target)
    finally:
        dist.all_gather = gather
    got.backward()
    assert type(got) is torch.Tensor
    assert whole.grad is not None
    assert local.grad is not None
    error = (local.grad - whole.grad.chunk(world_size, -1)[rank]).abs().max()
    return abs(float(got.detach() - want.detach())), float(error), len(gathered)


@pytest.mark.quick(
    "by its size-2",
    "viewed-2",
    "large-2",
    "by its shape-4",
    "smoothed-4",
    "of each token-4",
    "summed-2",
    "by names-2",
    "another ignored-2",
    "flattened-2",
    "capped-4",
)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", STAYS_SHARDED)
def test_cross_entropy_of_parts(name: str, ranks: int) -> None:
    for loss, gradient, gathered in run_ranks(ranks, compare, name):
        assert loss <= 1e-12
        assert gradient <= 1e-13
        assert not gathered


@pytest.mark.parametrize("name", [*IS_GATHERED, *IS_CHANGED])
def test_anything_else_is_given_whole_rows(name: str) -> None:
    for loss, gradient, gathered in run_ranks(2, compare, name):
        assert loss <= 1e-12
        assert gradient <= 1e-13
        assert gathered


def look_at(rank: int, world_size: int) -> None:
    local = torch.arange(6.0).view(1, 6)[:, 3 * rank : 3 * rank + 3]
    logits = ShardedLogits.of(local, dist.group.WORLD)  # type: ignore[arg-type]
    want = torch.arange(6.0).view(1, 6)
    assert torch.equal(whole_logits(logits), want)
    assert logits.tolist() == want.tolist()
    assert torch.equal(pickle.loads(pickle.dumps(logits)), want)
    assert torch.equal(copy.deepcopy(logits), want)
    assert torch.equal(logits.detach().cpu(), want)
    assert logits.to(torch.float64).shape == (1, 6)
    assert len(logits) == 1
    if rank == 0:  # alone
        assert "shape=(1, 6)" in repr(logits)
        assert f"{logits.shape} {logits.dtype} {logits.device}"


def test_they_look_whole() -> None:
    run_ranks(2, look_at)


def change(rank: int, world_size: int) -> None:
    with torch.inference_mode():
        whole = torch.arange(6.0).view(1, 6)
        logits = ShardedLogits.of(whole[:, 3 * rank : 3 * rank + 3].clone(), dist.group.WORLD)  # type: ignore[arg-type]
        assert logits.mul_(2) is logits
        torch.add(logits, 1, out=logits)
        assert torch.tanh(logits, out=torch.empty(1, 6)).shape == (1, 6)
        logits[:, 4] = 0
        logits.data[:, 2] = 7
        assert logits.tolist() == [[1, 3, 7, 7, 0, 11]]
    logits = ShardedLogits.of(torch.zeros(1, 3), dist.group.WORLD)  # type: ignore[arg-type]
    column = logits[:, 1]
    logits.view(1, 6).mul_(2)
    column.add_(1)
    with pytest.raises(ConfigError, match="changed in place through two views"):
        logits.sum()


def test_they_are_changed_in_place_outside_of_training_too() -> None:
    run_ranks(2, change)


def miss(rank: int, world_size: int) -> None:
    with pytest.raises(IndexError, match="out of bounds of the vocabulary of 6"):
        sharded_cross_entropy(torch.zeros(1, 3), torch.tensor([6]), dist.group.WORLD)  # type: ignore[arg-type]


def test_a_target_outside_of_the_vocabulary() -> None:
    run_ranks(2, miss)


def miss_on_a_device(rank: int, world_size: int) -> list[bool]:
    """As where nothing looks at targets before: 6 tokens, two targets that no rank has."""
    target = torch.tensor([5, 6, -1, -100])
    losses = token_losses(torch.zeros(4, 3), target, target != -100, 0.1, dist.group.WORLD)  # type: ignore[arg-type]
    return losses.isnan().tolist()


def test_a_target_that_no_rank_has_spoils_the_loss_of_its_token() -> None:
    assert run_ranks(2, miss_on_a_device) == [[False, True, True, False]] * 2


def nothing_counts(rank: int, world_size: int) -> None:
    local = torch.zeros(2, 3, requires_grad=True)
    loss = sharded_cross_entropy(local, torch.full((2,), -100), dist.group.WORLD)  # type: ignore[arg-type]
    assert loss.isnan()  # as in one process
    loss.backward()
    assert local.grad is not None
    assert not local.grad.any()


def test_no_targets_at_all() -> None:
    run_ranks(2, nothing_counts)

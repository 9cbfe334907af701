"""What the strategy makes of the world it finds: nodes, and another number of processes than asked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from typing_extensions import override

from lightning_cp.errors import ConfigError
from tests.helpers.pool import expect_on_every_rank, run_ranks
from tests.helpers.pool.environment import PoolEnvironment
from tests.helpers.strategies.small import RING, Settings, Small, loader, trainer_of


class Nodes(PoolEnvironment):
    """Two ranks on each node."""

    @override
    def local_rank(self) -> int:
        return dist.get_rank() % 2

    @override
    def node_rank(self) -> int:
        return dist.get_rank() // 2


class Claims(PoolEnvironment):
    """Says that there are as many processes as the Trainer wants."""

    _claimed = 1

    @override
    def world_size(self) -> int:
        return self._claimed

    @override
    def set_world_size(self, size: int) -> None:
        self._claimed = size


def fit(
    rank: int, world_size: int, devices: int, environment: type[PoolEnvironment], nodes: int = 1
) -> tuple[int, int]:
    trainer = trainer_of(devices, {}, num_nodes=nodes, plugins=[environment()])
    trainer.fit(Small(), loader(2))
    strategy: Any = trainer.strategy
    return strategy.mesh.ulysses_size, strategy.mesh.ring_size


@pytest.mark.nightly
def test_auto_keeps_ulysses_within_a_node() -> None:
    """Four heads on four ranks: Ulysses over all of them on one node, over the pairs on two."""
    assert run_ranks(4, fit, 4, PoolEnvironment) == [(4, 1)] * 4
    assert run_ranks(4, fit, 2, Nodes, 2) == [(2, 2)] * 4


def test_a_group_of_another_size_than_the_trainers() -> None:
    match = "the Trainer wants 3 processes, but torch.distributed was initialised with 2"
    expect_on_every_rank(2, fit, 3, Claims, error=ConfigError, match=match)


class Swapped(PoolEnvironment):
    """Says that every rank is the other one."""

    @override
    def global_rank(self) -> int:
        return 1 - dist.get_rank()

    @override
    def set_global_rank(self, rank: int) -> None:
        return


def test_a_group_in_which_this_is_another_rank() -> None:
    match = "this process is rank [01], but torch.distributed was initialised as rank [01] before"
    expect_on_every_rank(2, fit, 2, Swapped, error=ConfigError, match=match)


# -- the order of samples -----------------------------------------------------------------------------


def order(rank: int, world_size: int, settings: Settings | None, shuffle: bool) -> list[list[int]]:
    """First tokens of the samples of two epochs, with a Trainer that is left to choose samplers."""
    seen: list[int] = []

    class Watching(Small):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            strategy: Any = self.trainer.strategy
            ids = batch["input_ids"]
            whole = ids if settings is None else strategy.unshard(ids)
            seen.extend(whole[:, 0].tolist())
            return super().training_step(batch, batch_idx)

    if settings is not None:
        settings = {**settings, "parity_check": "off"}  # whose steps would be seen as well
    module = Watching()
    torch.manual_seed(3 + rank)  # ranks draw different numbers; the first one's count
    trainer = trainer_of(world_size, settings, use_distributed_sampler=True, max_epochs=2)
    trainer.fit(module, loader(12, shuffle=shuffle))
    return [seen[: len(seen) // 2], seen[len(seen) // 2 :]]


@pytest.mark.nightly
@pytest.mark.parametrize("shuffle", [False, True])
def test_samples_come_in_the_order_of_one_process(shuffle: bool) -> None:
    (want,) = run_ranks(1, order, None, shuffle)
    assert (want[0] != want[1]) == shuffle
    assert run_ranks(2, order, RING, shuffle) == [want] * 2

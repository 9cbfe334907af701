"""Communication hooks of a user's own: right gradients with those that average, a refusal of the others.

Annotations are evaluated here: DistributedDataParallel compares those of a hook with its own classes.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    fp16_compress_hook,
)
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState

from lightning_cp import UlyssesRingStrategy
from lightning_cp.errors import ConfigError
from lightning_cp.fabric import UlyssesRingStrategy as FabricStrategy
from tests.helpers.pool import expect_on_every_rank, run_ranks
from tests.helpers.strategies.small import RING, Small, close, loader, trainer_of, weights
from tests.ranks.strategies.test_fabric import Loop


class Counting:
    """A hook that remembers its calls, and may do what no hook should."""

    def __init__(self, factor: float = 1.0) -> None:
        self.calls, self.factor = 0, factor
        self.__name__ = self.__qualname__ = "counting"

    def __call__(
        self, state: object, bucket: dist.GradBucket
    ) -> torch.futures.Future[torch.Tensor]:
        self.calls += 1
        group: Any = state
        return allreduce_hook(group, bucket).then(lambda done: done.value() * self.factor)


class Thawing(Small):
    """Wrapped anew in the middle."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.model.embed.requires_grad_(batch_idx >= 2)


def by_trainer(rank: int, world_size: int, hook: Any, wrapper: Any = None) -> torch.Tensor:
    settings = None if hook is None else {**RING, "ddp_comm_hook": hook}
    if wrapper is not None and settings is not None:
        settings["ddp_comm_wrapper"] = wrapper
    module = Thawing()
    trainer_of(world_size, settings, accumulate_grad_batches=2).fit(module, loader(12))
    assert hook is None or hook.calls, "the hook was not used"
    return weights(module)


def doubled(hook: Any) -> Any:
    """A wrapper."""

    def wrapped(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        return hook(state, bucket).then(lambda done: 2 * done.value())

    return wrapped


def by_fabric(rank: int, world_size: int, hook: Any) -> torch.Tensor:
    loop = Loop(world_size, None if hook is None else {**RING, "ddp_comm_hook": hook})
    batches = loop.batches(8, use_distributed_sampler=False)
    loop.train(loop.shard(batch) for batch in batches)
    loop.end()
    assert hook is None or hook.calls, "the hook was not used"
    return torch.cat([p.detach().flatten() for p in loop.model.parameters()])


@pytest.mark.quick("by_fabric")
@pytest.mark.parametrize("driver", [by_trainer, by_fabric])
def test_a_hook_that_averages_gives_the_gradients_of_one_process(driver: Any) -> None:
    want = run_ranks(1, driver, None)[0]
    for got in run_ranks(2, driver, Counting()):
        close(got, want)


@pytest.mark.nightly
def test_the_hook_and_its_wrapper_are_what_averages() -> None:
    want = run_ranks(1, by_trainer, None)[0]
    for got in run_ranks(2, by_trainer, Counting(0.5), doubled):
        close(got, want)
    halved = run_ranks(2, by_trainer, Counting(0.5))[0]
    assert not torch.allclose(halved, want), "a hook that halves gradients changed nothing"


@pytest.mark.parametrize("strategy", [UlyssesRingStrategy, FabricStrategy])
@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"ddp_comm_hook": noop_hook}, "noop_hook leaves gradients on their ranks.*fp16_compress"),
        (
            {"ddp_comm_hook": print, "ddp_comm_state": PostLocalSGDState(None, None, 1)},
            "ddp_comm_hook=print: local SGD lets ranks step apart.*accumulate_grad_batches",
        ),
        ({"model_averaging_period": 4}, "model_averaging_period: local SGD lets ranks step apart"),
        ({"ddp_comm_state": object()}, "ddp_comm_state without a ddp_comm_hook does nothing"),
        (
            {"ddp_comm_state": object(), "ddp_comm_wrapper": print},
            "ddp_comm_state and ddp_comm_wrapper without .* leave them out",
        ),
        (
            {"data_parallel": "fsdp", "ddp_comm_wrapper": print},
            "ddp_comm_wrapper: an option of data_parallel='ddp', got data_parallel='fsdp'",
        ),
    ],
)
def test_hooks_that_do_not_average_are_refused(
    strategy: Any, settings: dict[str, Any], match: str
) -> None:
    with pytest.raises(ConfigError, match=match):
        strategy(**settings)


def not_a_hook(rank: int, world_size: int) -> None:
    settings = {**RING, "ddp_comm_hook": lambda state: None}
    trainer_of(world_size, settings).fit(Small(), loader(2))


def of_itself(rank: int, world_size: int) -> None:
    groups = [dist.new_group([each]) for each in range(world_size)]
    settings = {**RING, "ddp_comm_hook": fp16_compress_hook, "ddp_comm_state": groups[rank]}
    trainer_of(world_size, settings).fit(Small(), loader(2))


def test_what_shows_at_setup_is_refused_on_every_rank() -> None:
    match = r"refuses ddp_comm_hook=.*hook\(state, bucket: GradBucket\)"
    expect_on_every_rank(2, not_a_hook, error=ConfigError, match=match)
    match = "ddp_comm_state has a group of 1 ranks, but 2 train the model"
    expect_on_every_rank(2, of_itself, error=ConfigError, match=match)

"""Offload to the host: copies beside computation, a block ahead, on a device that is only pretended."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from lightning_cp.attention.checkpointing import current_stash
from lightning_cp.memory.activations import HostMemory, RecomputedBlocks
from tests.helpers.pretended.streams import EarlyError, StreamedDevice, Streams, WeakMemory

BLOCKS, ROWS, WIDTH = 4, 5, 8
SIZE = ROWS * WIDTH * 8
BEFORE, AFTER = 1.0, 2.0
"""Seconds of a block until its stored result is there, and after; each of its tensors travels for one."""
COMPUTE = BEFORE + AFTER


class Block(nn.Module):
    """A product, and a result that is stored as attention's is."""

    def __init__(self, streams: Streams | None, results: list[WeakMemory]) -> None:
        super().__init__()
        self.product = nn.Linear(WIDTH, WIDTH)
        self.streams, self.results = streams, results
        self.present: list[int] = []
        """Fetched tensors on the device, at each run."""
        self.stored: list[int] = []
        """Results of blocks that forward has made and that are there, at each run."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.streams is not None:
            self.streams.compute(BEFORE)
            self.present.append(self.streams.num_fetched)
            self.stored.append(sum(one.is_alive for one in self.results))
        made = x.detach().sin()
        stash = current_stash()
        if stash is not None and stash.replaying:
            (made,) = stash.replay()
        elif stash is not None:
            stash.record(made)
            self.results.append(WeakMemory(made))
        if self.streams is not None:
            self.streams.compute(AFTER)
        return (self.product(x) * made).tanh() + x


class Model(nn.Module):
    """Blocks one after the other; some may run twice."""

    def __init__(self, streams: Streams | None, order: tuple[int, ...]) -> None:
        super().__init__()
        torch.manual_seed(3)
        results: list[WeakMemory] = []
        self.own_blocks = [Block(streams, results) for _ in range(BLOCKS)]
        self.blocks = nn.ModuleList(self.own_blocks)
        self.order = order
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for at in self.order:
            x = self.blocks[at](x)
        return x

    @property
    def gradients(self) -> list[torch.Tensor]:
        """Of all parameters, on the CPU."""
        return [p.grad.cpu() for p in self.parameters() if p.grad is not None]


@contextmanager
def offloading(
    *, keeps: bool = True, order: tuple[int, ...] = (*range(BLOCKS),)
) -> Iterator[tuple[Model, Streams, Callable[[int], torch.Tensor]]]:
    """A model in a step on a device with streams, and inputs by their number."""
    with StreamedDevice(0).with_streams(SIZE) as streams:
        model = Model(streams, order).to("cuda")
        undo = RecomputedBlocks([*model.blocks], keeps, HostMemory()).enter()
        yield model, streams, lambda number: inputs(number).to("cuda").requires_grad_()
        undo()
        gc.collect()
        assert streams.num_fetched == 0, "nothing of a step stays on the device"


def inputs(number: int) -> torch.Tensor:
    return torch.randn(
        ROWS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(number)
    )


def plain(
    step: Callable[[Model, Callable[[int], torch.Tensor]], None], **how: Any
) -> list[torch.Tensor]:
    """Gradients of a step on the CPU, without recomputation."""
    model = Model(None, how.get("order", (*range(BLOCKS),)))
    step(model, lambda number: inputs(number).requires_grad_())
    return model.gradients


def once(model: Model, make: Callable[[int], torch.Tensor]) -> None:
    model(make(0)).sum().backward()


def two_forwards(model: Model, make: Callable[[int], torch.Tensor]) -> None:
    (model(make(0)) * model(make(1))).sum().backward()


def in_turn(model: Model, make: Callable[[int], torch.Tensor]) -> None:
    first, second = model(make(0)), model(make(1))
    first.sum().backward()
    second.sum().backward()


def in_reverse(model: Model, make: Callable[[int], torch.Tensor]) -> None:
    first, second = model(make(0)), model(make(1))
    second.sum().backward()
    first.sum().backward()


def partly(model: Model, make: Callable[[int], torch.Tensor]) -> None:
    """A backward that ends in the middle, one of all, and one of the same graph again."""
    x = make(0)
    middle = model.blocks[1](model.blocks[0](x))
    out = model.blocks[3](model.blocks[2](middle))
    last = [*model.blocks[2].parameters()]
    for parameter, gradient in zip(
        last, torch.autograd.grad(out.sum(), last, retain_graph=True), strict=True
    ):
        parameter.grad = gradient
    out.sum().backward(retain_graph=True)
    out.sum().backward()


STEPS = [once, two_forwards, in_turn, in_reverse, partly]


@pytest.mark.quick("*-once-keep_attention", "in_reverse-twice-blocks")
@pytest.mark.parametrize("keeps", [True, False], ids=["keep_attention", "blocks"])
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 1, 1, 2, 0, 3)], ids=["once", "twice"])
@pytest.mark.parametrize("step", STEPS)
def test_gradients_are_those_without_offload(
    step: Any, order: tuple[int, ...], keeps: bool
) -> None:
    if step is partly and len(order) > BLOCKS:
        pytest.skip("names its blocks")
    want = plain(step, order=order)
    with offloading(keeps=keeps, order=order) as (model, _, make):
        step(model, make)
        got = model.gradients
    assert len(got) == 2 * BLOCKS
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("step", STEPS)
def test_the_device_has_at_most_one_block_ahead(step: Any) -> None:
    with offloading() as (model, _, make):
        step(model, make)
        present = [one.present for one in model.own_blocks]
    # At a recomputation: this block's input, its result that was not replayed yet, and the two of the next.
    assert max(max(of_block) for of_block in present) == 4
    assert present[0][-1] in (2, 4), "before the first block is nothing, or the other forward"


def test_backward_waits_for_the_input_of_the_last_block_alone() -> None:
    with offloading() as (model, streams, make):
        out = model(make(0)).sum()
        assert streams.computing.clock == BLOCKS * COMPUTE, (
            "copies of forward take less than a block"
        )
        out.backward()
        took = streams.computing.clock - BLOCKS * COMPUTE
    assert took == BLOCKS * COMPUTE + 1, "nothing is computed while that one arrives"


def test_a_slow_link_makes_the_computing_stream_wait_but_not_the_host() -> None:
    with offloading() as (model, streams, make):
        x = make(0)
        streams.bytes_per_second = SIZE / 5
        streams.waits.clear()
        out = model(x).sum()
        assert streams.computing.clock == BLOCKS * 10, "two tensors of a block"
        out.backward()
        assert streams.waits == []


def test_what_forward_has_stored_leaves_the_device() -> None:
    """While a block computes, nothing of the blocks before it is there, and at the loss nothing at all."""
    with offloading() as (model, _, make):
        out = model(make(0))
        stored = [block.stored for block in model.own_blocks]
        assert stored == [[0]] * BLOCKS
        assert not any(one.is_alive for one in model.own_blocks[0].results)
        assert len(model.own_blocks[0].results) == BLOCKS
        out.sum().backward()


def test_what_came_for_nothing_leaves_with_the_backward() -> None:
    with offloading() as (model, streams, make):
        middle = model.blocks[1](model.blocks[0](make(0)))
        out = model.blocks[3](model.blocks[2](middle)).sum()
        torch.autograd.grad(out, [*model.blocks[2].parameters()])
        assert len(streams.fetched) == 6, "those of three blocks, of which backward needs two"
        assert streams.num_fetched == 0


def test_an_exception_leaves_nothing() -> None:
    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
            raise ValueError("in backward")

    want = plain(once)
    with offloading() as (model, streams, make):
        x = make(0)
        for block in model.blocks[:2]:
            x = block(x)
        x = Failing.apply(x)
        for block in model.blocks[2:]:
            x = block(x)
        with pytest.raises(ValueError, match="in backward"):
            x.sum().backward()
        del x
        model.zero_grad()
        once(model, make)
        assert streams.num_fetched == 0, "also before the step ends"
        torch.testing.assert_close(model.gradients, want, rtol=1e-12, atol=1e-12)


def test_a_forward_that_fails_leaves_nothing() -> None:
    with offloading() as (model, _, make):
        with pytest.raises(RuntimeError, match="shapes"):
            model(make(0)[:, :3])
        once(model, make)


class TestHarness:
    """What the pretended streams punish."""

    def test_memory_that_is_freed_early(self) -> None:
        with StreamedDevice(0).with_streams(SIZE) as streams:
            beside, host = torch.cuda.Stream(), inputs(0).pin_memory()
            x = torch.empty_like(host, device="cuda")
            beside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(beside):
                x.copy_(host, non_blocking=True)
            done: Any = beside.record_event()
            assert bool(torch.isnan(x.cpu()).all()), "nothing has arrived that nobody waits for"
            del x
            with pytest.raises(EarlyError, match="freed"):
                streams.computing.wait_event(done)

    def test_a_copy_that_does_not_wait(self) -> None:
        with StreamedDevice(0).with_streams(SIZE):
            beside, x = torch.cuda.Stream(), inputs(0).to("cuda") * 2
            host = torch.empty_like(x, device="cpu", pin_memory=True)
            with torch.cuda.stream(beside), pytest.raises(EarlyError, match="in use"):
                host.copy_(x, non_blocking=True)

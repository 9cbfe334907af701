"""The profile view at work: with the Trainer and with Fabric, on the standing ranks."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.autograd.profiler as profiler
from torch.utils.checkpoint import checkpoint

from lightning_cp.attention.checkpointing import keep_attention
from lightning_cp.errors import ConfigError, RankFailure
from lightning_cp.layout import HeadSplit, Mask, SequenceLayout, schedule
from lightning_cp.layout.cost import Traffic, attention_traffic
from lightning_cp.utils.tracing import PREFIX
from tests.helpers.attention.wire import Wire
from tests.helpers.pool import expect_on_every_rank, run_ranks
from tests.helpers.strategies.kinds import KINDS
from tests.helpers.strategies.logs import Told
from tests.helpers.strategies.small import (
    HYBRID,
    LENGTH,
    RING,
    Batch,
    Settings,
    loader,
    trainer_of,
    weights,
)
from tests.ranks.strategies.test_fabric import Loop

ROWS, HEADS, KV_HEADS, HEAD_DIM = 2, 4, 2, 8
"""Of the small model; it has one attention call."""
ROUNDED = 1e-7
"""Seconds: moments are large numbers of microseconds."""


class Found(NamedTuple):
    """What one rank knows after a run."""

    weights: torch.Tensor
    files: list[str]
    """Names in the folder of the step."""
    summary: dict[str, Any]
    seconds: dict[str, float]
    """By name, of this rank's own trace."""
    counts: Counter[str]
    """Likewise."""


def seen(folder: Path, rank: int, model: Any) -> Found:
    """What was written; the trace is read as plain JSON."""
    seconds: dict[str, float] = {}
    counts: Counter[str] = Counter()
    events = json.loads((folder / f"rank-{rank}.trace.json").read_text())["traceEvents"]
    begin = next(e["ts"] + e["dur"] for e in events if e["name"] == f"{PREFIX}step begins")
    for event in events:
        if event["name"].startswith(PREFIX) and event["ts"] >= begin:
            name = event["name"].removeprefix(PREFIX)
            counts[name] += 1
            seconds[name] = seconds.get(name, 0.0) + event["dur"] * 1e-6
    summary = json.loads((folder / "profile.json").read_text())
    files = sorted(path.name for path in folder.iterdir())
    return Found(weights(model), files, summary, seconds, counts)


def fit(rank: int, world_size: int, kind: str) -> tuple[Found, torch.Tensor, list[str]]:
    """Two windows of two batches, of which the second is recorded; and the same without a profile."""
    options: dict[str, Any] = {"accumulate_grad_batches": 2, "default_root_dir": "runs"}
    settings = {**RING, "parity_check": "off"}  # counts what is sent
    module, plain = KINDS[kind](), KINDS[kind]()
    with Told() as told:
        trainer_of(world_size, {**settings, "profile": [2, 9]}, **options).fit(module, loader(8))
    trainer_of(world_size, RING, **options).fit(plain, loader(8))
    assert not profiler._is_profiler_enabled
    return seen(Path("runs/profile/step-2"), rank, module), weights(plain), told


def traffic(ring: int, ulysses: int, cp_rank: int) -> tuple[Traffic, Traffic]:
    """Of one attention call of the small model."""
    layout = SequenceLayout(LENGTH, ring, ulysses, "zigzag")
    plan = schedule(layout, None, Mask(causal=True))
    split = HeadSplit(HEADS, KV_HEADS, ulysses)
    return attention_traffic(
        *(plan, split, cp_rank), batch=ROWS, head_dim=HEAD_DIM, itemsize=8, accumulate_itemsize=8
    )


def busy_hops(ring: int, ring_rank: int, ulysses: int = 1) -> list[int]:
    """Hops at which this rank computes."""
    layout = SequenceLayout(LENGTH, ring, ulysses, "zigzag")
    plan = schedule(layout, None, Mask(causal=True))
    return [hop.index for hop in plan.rank(ring_rank).hops if hop.tiles]


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["small", "checkpointed"])
def test_a_step_of_the_trainer(kind: str) -> None:
    """Ranges are those of the schedule, figures those of the traces, and weights those without a profile."""
    results = run_ranks(2, fit, kind)
    forwards = 4 if kind == "checkpointed" else 2  # of the two batches; recomputed, or not
    for rank, (found, plain, told) in enumerate(results):
        assert torch.equal(found.weights, plain)
        traces = ["rank-0.trace.json", "rank-1.trace.json"]
        assert found.files == ["profile.json", "profile.md", "profile.png", *traces]
        for hop in busy_hops(2, rank):
            assert found.counts[f"hop {hop} compute"] == forwards + 2
        assert found.counts["hop 1 keys post"] == found.counts["hop 1 keys wait"] == forwards + 2
        assert found.counts["hop 1 gradients wait"] == 2
        assert found.counts["shard batch"] == 2
        own = found.summary["ranks"][rank]
        assert (found.summary["step"], own["rank"]) == (2, rank)
        check_seconds(own, found)
        forward, backward = traffic(2, 1, rank)
        assert (own["attention_calls"], own["attention_calls_backward"]) == (forwards, 2)
        plan = schedule(SequenceLayout(LENGTH, 2, 1, "zigzag"), None, Mask(causal=True))
        assert own["visible_pairs"] == (forwards + 2) * ROWS * plan.work[rank]
        sent = forwards * forward.total_bytes + 2 * backward.total_bytes
        assert own["sent"]["total_bytes"] == sent
        missed = "profile=[9] was not recorded: training ended after 2 steps."
        assert told.count(missed) == int(not rank)


def check_seconds(own: dict[str, Any], found: Found) -> None:
    """What the summary says of a rank, from the ranges of its trace."""
    merge = found.seconds.get("merge", 0.0)
    compute = sum(s for name, s in found.seconds.items() if name.endswith("compute")) - merge
    waits = sum(s for name, s in found.seconds.items() if name.endswith(" wait"))
    assert own["seconds"]["merge"] == pytest.approx(merge, abs=ROUNDED)
    assert own["seconds"]["compute"] == pytest.approx(compute, abs=ROUNDED)
    copies = found.seconds["copies"]
    assert own["seconds"]["copies"] == pytest.approx(copies, abs=ROUNDED)
    total = own["communication"]["total"]
    assert total["exposed"] == pytest.approx(waits, abs=ROUNDED)
    assert 0 < total["exposed"] <= total["in_flight"] < own["seconds"]["step"]
    assert total["overlap"] == pytest.approx(1 - total["exposed"] / total["in_flight"])
    assert own["kernel_calls"] >= own["tiles"] > 0


def loop(
    rank: int, world_size: int, settings: Settings, broken: int | None
) -> tuple[list[str], list[dict[str, Any]]]:
    """What is told of a loop of Fabric, and found, with something in the way of one rank's trace."""
    if broken == rank:
        Path(f"profile/step-1/rank-{rank}.trace.json/in the way").mkdir(parents=True)
    with Told() as told:
        run_loop(world_size, settings)
    return told, json.loads(Path("profile/step-1/profile.json").read_text())["ranks"]


def run_loop(world_size: int, settings: Settings) -> Loop:
    user = Loop(world_size, settings)
    for batch in user.batches(4):
        loss = user.loss(user.shard(batch))
        user.fabric.backward(loss)
        user.optimizer.step()
        user.optimizer.zero_grad()
    return user


def hybrid(rank: int, world_size: int) -> tuple[Found, torch.Tensor]:
    user = run_loop(world_size, {**HYBRID, "profile": 2})
    plain = run_loop(world_size, HYBRID)
    return seen(Path("profile/step-2"), rank, user.model), weights(plain.model)  # type: ignore[arg-type]


@pytest.mark.nightly
def test_a_step_of_fabric() -> None:
    results = run_ranks(4, hybrid)
    for rank, (found, plain) in enumerate(results):
        assert torch.equal(found.weights, plain)
        assert len(found.files) == 4 + 3
        forward, backward = traffic(2, 2, rank)
        exchanges = forward.all_to_all_calls + backward.all_to_all_calls
        assert found.counts["all-to-all post"] == found.counts["all-to-all wait"] == exchanges > 0
        for hop in busy_hops(2, rank // 2, ulysses=2):
            assert found.counts[f"hop {hop} compute"] == 2
        own = found.summary["ranks"][rank]
        check_seconds(own, found)
        assert own["communication"]["all-to-all"]["count"] == exchanges
        assert own["sent"]["total_bytes"] == forward.total_bytes + backward.total_bytes


@pytest.mark.nightly
def test_a_rank_that_cannot_write_is_told_and_training_goes_on() -> None:
    (told, ranks), _ = run_ranks(2, loop, {**RING, "profile": 1}, 1)
    (line,) = [line for line in told if "profile" in line]
    assert line.startswith("profile of step 1: the trace of rank 1 could not be written: ")
    assert [rank["kernel_calls"] > 0 for rank in ranks] == [True, True]
    assert [rank["trace"] for rank in ranks] == ["rank-0.trace.json", None]


class Kept(KINDS["checkpointed"]):  # type: ignore[misc]
    """Recomputes its blocks, but not attention."""

    def logits(self, batch: Batch) -> torch.Tensor:
        x: Any = self.model.embed(batch["input_ids"])
        for block in self.model.blocks:
            kept: dict[str, Any] = {"use_reentrant": False, "context_fn": keep_attention}
            x = checkpoint(block, x, batch["position_ids"], **kept)
        return self.model.head(self.model.norm(x))


def fit_on_the_wire(rank: int, world_size: int, module: type[Any]) -> tuple[int, int]:
    """Bytes of attention that left this rank, and those that the profile tells."""
    with Wire(rank % 2) as wire:
        trainer_of(world_size, {**HYBRID, "profile": 1, "parity_check": "off"}).fit(
            module(), loader(2)
        )
    counted = sum(m.sent for m in wire.messages if m.op in ("alltoall_base_", "send"))
    summary = json.loads(Path("profile/step-1/profile.json").read_text())
    return counted, summary["ranks"][rank]["sent"]["total_bytes"]


@pytest.mark.nightly
@pytest.mark.parametrize("module", [KINDS["reentrant"], Kept])
def test_bytes_are_those_on_the_wire(module: type[Any]) -> None:
    for counted, told in run_ranks(4, fit_on_the_wire, module):
        assert counted == told > 0


class Fails(KINDS["small"]):  # type: ignore[misc]
    """In the middle of a step."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        raise ArithmeticError("enough")


def fit_and_fail(rank: int, world_size: int) -> tuple[bool, bool]:
    """Whether somebody still profiles, and whether anything was written."""
    with pytest.raises(ArithmeticError):
        trainer_of(world_size, {**RING, "profile": 1}).fit(Fails(), loader(2))
    return profiler._is_profiler_enabled, Path("profile").exists()


@pytest.mark.nightly
def test_a_step_that_fails_is_abandoned() -> None:
    assert run_ranks(2, fit_and_fail) == [(False, False)] * 2


def fit_alone(rank: int, world_size: int) -> list[str]:
    with Told() as told:
        trainer_of(world_size, {"profile": 1}).fit(KINDS["small"](), loader(2))
    return told


def fit_with_lightnings_profiler(rank: int, world_size: int) -> None:
    trainer = trainer_of(world_size, {**RING, "profile": 2}, profiler="pytorch")
    theirs: Any = getattr(trainer, "profiler", None)
    try:
        trainer.fit(KINDS["small"](), loader(2))
    finally:
        theirs.profiler = None  # unused, it raises where it is deleted


def test_the_trainers_pytorch_profiler_is_refused_before_a_step() -> None:
    """It begins in the middle of a step, where it would raise without a word of profile=."""
    match = (
        r"profile=2 records steps with torch\.profiler, and so does the Trainer's PyTorchProfiler"
    )
    expect_on_every_rank(2, fit_with_lightnings_profiler, error=ConfigError, match=match)


def test_one_rank_has_nothing_to_show() -> None:
    (told,) = run_ranks(1, fit_alone)
    (line,) = [line for line in told if "profile" in line]
    assert line.startswith("profile=1 records nothing: no sample is shared between ranks")


def profiled_twice(rank: int, world_size: int) -> None:
    """Another profiler is on, on the second rank."""
    theirs = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    if rank:
        theirs.start()
    try:
        loop(rank, world_size, {**RING, "profile": 1}, None)
    except RankFailure as error:
        assert not profiler._is_profiler_enabled, "left on"
        raise ConfigError(str(error)) from error
    finally:
        if rank:
            theirs.stop()


def test_another_profiler_is_refused_on_every_rank() -> None:
    match = r"profile=1 records this step with torch\.profiler, but another profiler is on already"
    expect_on_every_rank(2, profiled_twice, error=ConfigError, match=match)

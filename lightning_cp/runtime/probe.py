"""Probe steps: steps of a check, between the steps of a run, which do not change the run."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from lightning_cp.batch import BatchRules, ShardedBatch, documents_of, read_batch, shard_batch
from lightning_cp.batch.sharder import batch_position_info
from lightning_cp.batch.step_state import PositionInfo, StepState
from lightning_cp.errors import ConfigError, ShapeError
from lightning_cp.layout import Mask, SequenceLayout
from lightning_cp.mesh import ContextParallelMesh, SingleRankMesh
from lightning_cp.models.handle import RankContext, SwapHandle
from lightning_cp.randomness.token_draws import StepTokens
from lightning_cp.runtime.runtime import ContextParallelRuntime

PLAINEST = "reference"
"""The kernel of a whole batch on one rank: the simplest one, not the kernel of the run."""


@contextmanager
def probe_step(runtime: ContextParallelRuntime) -> Generator[None]:
    """A block for a step that is not a step of the run: nothing is counted, recorded or printed."""
    listeners, runtime.listeners[:] = list(runtime.listeners), []
    try:
        with runtime.use_records(runtime.records.for_probe()):
            yield
    finally:
        runtime.listeners[:] = listeners
        if runtime.binding.draws is not None:
            runtime.binding.draws.pop_calls()


@contextmanager
def single_rank_step(runtime: ContextParallelRuntime, batch: Any) -> Generator[bool]:
    """A block for a probe step on the whole batch, on this rank alone: as one process computes it.

    ``cu_seqlens`` and ``segment_ids`` declare documents to this package; a model in one process reads
    neither. Its attention is then intercepted here too, and computed within the declared documents.

    Yields:
        True if the block isolates documents that the model alone would not isolate.
    """
    binding = runtime.binding
    assert binding.handle is not None
    declared = _unread_documents(batch, binding.rules, binding.layout_rule.mask)
    with probe_step(runtime), runtime.as_one_process(), _draws_of_whole_batch(runtime, batch):
        runtime.step.whole_batch = batch
        if declared is None:
            yield False
            return
        state = binding.state_of(*declared, cp_rank=0)
        state.weighted = True  # by 1: it has all targets
        runtime.step.adopt_state(state)
        with _attend_locally(binding.handle, state):
            yield True


@contextmanager
def use_mesh(runtime: ContextParallelRuntime, mesh: ContextParallelMesh) -> Generator[None]:
    """A block whose attention uses other process groups of the same ranks."""
    try:
        with runtime.meshes.use(mesh):
            runtime.binding.swap_again()
            yield
    finally:
        runtime.binding.swap_again()


@contextmanager
def use_layout(runtime: ContextParallelRuntime, kind: str) -> Generator[None]:
    """A block in which batches get another layout."""
    binding = runtime.binding
    before, binding.layout_rule = binding.layout_rule, replace(binding.layout_rule, kind=kind)
    try:
        yield
    finally:
        binding.layout_rule = before


def _unread_documents(
    batch: Any, rules: BatchRules, mask: Mask
) -> tuple[ShardedBatch, PositionInfo] | None:
    """Return the whole batch if its model alone would not isolate its documents, else ``None``.

    transformers reads only documents of positions that restart, for causal models.
    """
    try:
        whole = read_batch(batch, rules, needs_labels=False)
        documents = documents_of(whole, rules)
    except (ConfigError, ShapeError):
        return None  # refused when it is sharded
    layout = SequenceLayout(whole.seq_len, 1, 1, "contiguous", documents, mask)
    positions = batch_position_info(whole, layout)
    reads_them = rules.reads_masks and mask.causal and positions.restart
    if reads_them or not positions.packed:
        return None
    return shard_batch(whole, layout, 0, rules), positions


@contextmanager
def _attend_locally(handle: SwapHandle, state: StepState) -> Generator[None]:
    """Intercept attention of a whole batch on this rank alone."""
    before = handle.ranks
    handle.ranks = RankContext(SingleRankMesh(before.mesh.device_type), PLAINEST)
    try:
        handle.activate(state)
        yield
    finally:
        handle.deactivate()
        handle.ranks = before


@contextmanager
def _draws_of_whole_batch(runtime: ContextParallelRuntime, batch: Any) -> Generator[None]:
    """Let tokens of a whole batch draw the random numbers of its parts."""
    draws, mesh = runtime.binding.draws, runtime.mesh
    if draws is not None:
        with suppress(ConfigError, ShapeError):  # refused when it is sharded
            whole = runtime.binding.read(batch)
            layout = SequenceLayout(whole.seq_len, 1, 1, "contiguous")
            draws.begin(StepTokens.of(layout, 0, whole.rows, (mesh.data_rank, mesh.data_size)))
    try:
        yield
    finally:
        if draws is not None:
            draws.end()

"""Sharding of a whole batch: read it, agree on it with the other ranks, return this rank's part."""

from __future__ import annotations

import logging
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, cast

import torch
import torch.distributed as dist

from lightning_cp import error_display
from lightning_cp.batch.documents import DeclaredDocuments, documents_of, padding_mask_of
from lightning_cp.batch.read import WholeBatch, read_batch
from lightning_cp.batch.rules import (
    KNOWN_DIMS,
    PAD_VALUES,
    POSITIONS,
    TARGETS,
    BatchRules,
    TrackedBatch,
)
from lightning_cp.batch.step_state import PositionInfo, position_info
from lightning_cp.comm.consensus import (
    all_equal_sum,
    check_gathered,
    gather_facts,
    gather_objects,
    start_checksum,
)
from lightning_cp.errors import BatchMismatchError, ConfigError, ShapeError
from lightning_cp.layout import (
    CostModel,
    Documents,
    LayoutChoice,
    Mask,
    SequenceLayout,
    explain_layout,
)
from lightning_cp.layout.auto import DEFAULT_COST
from lightning_cp.layout.axes import Flat
from lightning_cp.layout.sequence import CAUSAL, LayoutKind
from lightning_cp.mesh import ContextParallelMesh
from lightning_cp.randomness.token_draws import TokenDraws, describe_difference
from lightning_cp.utils.containers import ROOT, map_tensors, memory_of, tensors_of
from lightning_cp.utils.labels import IGNORED_LABEL
from lightning_cp.utils.tensors import start_to_host, to_device


@dataclass
class ShardedBatch:
    """Shard of a batch for one rank, with facts of the whole batch that the step and the loss need."""

    batch: Any
    layout: SequenceLayout
    position_ids: torch.Tensor
    positions_given: bool
    """The dataset made the positions."""
    labels: torch.Tensor | None
    aligned_labels: torch.Tensor | None
    valid: tuple[int, ...]
    """Targets (tokens, if there are no labels) of every context-parallel rank."""
    rows: int = 1
    """Rows of the whole batch."""
    padding_mask: torch.Tensor | None = None
    """[B, S], mask of the whole batch, if it has one: 0 for padding."""

    @property
    def positions_ignored(self) -> bool:
        """True if the step is known not to have read positions: from a dict, or a batch without any."""
        if isinstance(self.batch, TrackedBatch):
            return not self.batch.positions_read
        return not self.positions_given and not isinstance(self.batch, MutableMapping)


def shard_batch(
    whole: WholeBatch,
    layout: SequenceLayout,
    cp_rank: int,
    rules: BatchRules,
    valid: tuple[int, ...] | None = None,
    device: torch.device | None = None,
) -> ShardedBatch:
    """Return this rank's shard of a batch: pure indexing, no communication.

    Global ``position_ids`` (0 where padded), and aligned labels as ``shift_labels`` where the model shifts,
    are added to a dict that lacks them. ``valid`` is the result of ``valid_counts``, if already known. The
    shard is put on ``device``, and by default stays where the batch is.
    """

    tensors: dict[str, torch.Tensor] = {}

    def visit(name: str, x: torch.Tensor) -> torch.Tensor:
        if name in whole.dims:
            pad = _pad_value(name, rules)
            x = layout.shard(x, cp_rank, dim=whole.dims[name], pad_value=pad)
        tensors[name] = to_device(x, device)
        return tensors[name]

    local = map_tensors(whole.batch, visit)
    aligned = whole.aligned_labels
    aligned_local = None
    is_in_batch = aligned is whole.tensors.get(rules.label_key)
    if aligned is not None and is_in_batch and _pad_value(rules.label_key, rules) == IGNORED_LABEL:
        aligned_local = tensors[rules.label_key]
    elif aligned is not None:
        aligned = whole.own[rules.label_key] if is_in_batch else aligned  # with its graph
        aligned_local = layout.shard(aligned, cp_rank, dim=whole.label_dim, pad_value=IGNORED_LABEL)
        aligned_local = to_device(aligned_local, tensors[rules.label_key].device)
    positions = whole.positions_in(tensors)
    given = positions is not None
    if positions is None:
        positions = layout.positions(cp_rank)
        positions = positions.masked_fill(positions >= layout.seq_len, 0)
        positions = to_device(positions, tensors[next(iter(whole.dims))].device)
        positions = positions.expand(whole.rows, -1)
    if type(whole.batch) is dict and POSITIONS not in local:
        local = TrackedBatch(local)
    if isinstance(local, MutableMapping):
        added = {POSITIONS: positions}
        if rules.labels == "shift" and aligned_local is not None:
            added[TARGETS] = aligned_local
        for name in (
            added.keys() - local.keys()
        ):  # outputs of Hugging Face models have no setdefault
            local[name] = added[name]
    return ShardedBatch(
        local,
        layout,
        positions,
        given,
        tensors.get(rules.label_key),
        aligned_local,
        valid_counts(whole, layout, rules.labels) if valid is None else valid,
        whole.rows,
        padding_mask_of(whole.own),
    )


def _pad_value(name: str, rules: BatchRules) -> int:
    only_labels = name == rules.label_key and name not in (*KNOWN_DIMS, ROOT)
    return PAD_VALUES.get(name, IGNORED_LABEL if only_labels else 0)


def add_positions_and_targets(batch: Any, rules: BatchRules, *, positions: bool = True) -> Any:
    """Return a batch that no other rank shares, with the positions and targets that a shard of it would get.

    Args:
        batch: the whole batch.
        rules: rules for reading it.
        positions: add positions as well, not only targets.

    Returns:
        ``batch`` itself if it has them, is not a dict, or its sequence is not known: one process may read it
        in ways that several cannot.
    """
    result = batch
    if not isinstance(batch, MutableMapping):
        return batch
    added: dict[str, torch.Tensor] = {}
    whole = read_if_known(batch, rules.without_targets)
    if whole is not None and positions and POSITIONS not in batch:
        device = dict(tensors_of(batch))[next(iter(whole.dims))].device
        added[POSITIONS] = torch.arange(whole.seq_len, device=device).expand(whole.rows, -1)
    shifted = (
        read_if_known(batch, rules) if rules.labels == "shift" and TARGETS not in batch else None
    )
    if shifted is not None and shifted.aligned_labels is not None:
        added[TARGETS] = shifted.aligned_labels
    if added:
        result = map_tensors(batch, lambda name, x: x)
    for name, x in added.items():  # outputs of Hugging Face models have no update
        result[name] = x
    return result


def read_if_known(batch: Any, rules: BatchRules) -> WholeBatch | None:
    """Return the content of a whole batch; ``None`` if its sequence is not known."""
    try:
        return read_batch(batch, rules, needs_labels=False)
    except (ConfigError, ShapeError):
        return None


def valid_counts(
    whole: WholeBatch, layout: SequenceLayout, labels: str = "auto"
) -> tuple[int, ...]:
    """Return the targets of every context-parallel rank; tokens, if the batch has no labels.

    With ``labels="none"`` each rank counts 1: losses of whole sequences are equal on all of them.
    """
    if labels == "none":
        return (1,) * layout.cp_size
    if whole.aligned_labels is None:
        per_token = torch.full((whole.seq_len,), whole.rows, dtype=torch.int64)
    else:
        valid = (whole.aligned_labels != IGNORED_LABEL).movedim(whole.label_dim, -1)
        per_token = valid.flatten(0, -2).sum(0).cpu() if valid.dim() > 1 else valid.long().cpu()
    return layout.count_by_rank(per_token)


_MASK_KEY = "what tokens are counted by"
"""Key of the mask among copies to the host."""


@dataclass(eq=False)
class CountedBatch:
    """Counts of a whole batch: its rows, its documents, and the tokens that are not padding.

    It holds small copies on the host. Copies from a GPU are asynchronous, so that no step waits: test
    ``is_ready`` before reading, or synchronise.
    """

    rows: int
    seq_len: int
    known: Documents | None = None
    """Documents of the layout, if there is one."""
    declared: DeclaredDocuments = field(default_factory=DeclaredDocuments)
    """Declarations without a layout: copies on the host."""
    mask: torch.Tensor | None = None
    """[B, S], 0 for padding, if the batch has one: a copy on the host."""
    event: torch.cuda.Event | None = None

    @classmethod
    def of_whole(cls, whole: WholeBatch, rules: BatchRules) -> CountedBatch:
        """Make the counts of a batch that was not sharded."""
        told = dict(DeclaredDocuments.of(whole, rules).found)
        return cls._on_host(whole.rows, whole.seq_len, None, told, padding_mask_of(whole.tensors))

    @classmethod
    def of_shard(cls, part: ShardedBatch, rules: BatchRules) -> CountedBatch:
        """Make the counts of the whole batch of which ``part`` is this rank's shard."""
        mask = None if rules.reads_masks else part.padding_mask  # otherwise it is in the documents
        layout = part.layout
        return cls._on_host(part.rows, layout.seq_len, layout.documents, {}, mask)

    @classmethod
    def _on_host(
        cls,
        rows: int,
        seq_len: int,
        known: Documents | None,
        told: Mapping[str, torch.Tensor],
        mask: torch.Tensor | None,
    ) -> CountedBatch:
        copies, event = start_to_host({**told, **({} if mask is None else {_MASK_KEY: mask})})
        mask = copies.pop(_MASK_KEY, None)
        return cls(rows, seq_len, known, DeclaredDocuments(copies), mask, event)

    @property
    def is_ready(self) -> bool:
        """True if the copies are complete."""
        return self.event is None or self.event.query()

    @cached_property
    def documents(self) -> Documents:
        """Documents of attention; one over the whole sequence if the batch declares none."""
        found = self.known
        if found is None:
            found = self.declared.documents(self.seq_len, self.rows if self.rows > 1 else None)
        return Documents.single(self.seq_len) if found is None else found

    @cached_property
    def tokens(self) -> int:
        """Number of tokens that are not padding: by the mask [B, S] of the batch, or covered by documents."""
        if self.mask is not None:
            return int((self.mask != 0).sum()) * (self.rows // self.mask.shape[0])
        covered = sum(int((row[:, 1] - row[:, 0]).sum()) for row in self.documents.rows)
        return covered * (self.rows if self.documents.num_rows == 1 else 1)


_EMPTY = 2**24
"""Base of the number that carries targets and ranks without targets: more than the second can be (all ranks x
those that share a sample)."""

_log = logging.getLogger("lightning_cp")


@dataclass(frozen=True)
class LayoutRule:
    """Rule for the layout of batches, from facts known before the run.

    It uses no results of earlier steps, so that a resumed run repeats its choices.
    """

    kind: str = "auto"
    """``auto``, or a kind of layout."""
    mask: Mask = CAUSAL
    """Expected mask of the model's attention."""
    cost: CostModel = DEFAULT_COST


def layout_of(
    whole: WholeBatch, rules: BatchRules, rule: LayoutRule, mesh: ContextParallelMesh
) -> LayoutChoice:
    """Return the layout of a batch, from its length, the mesh and its documents.

    Raises:
        ShapeError: sequences that are too short, or (padding=False) do not divide.
    """
    sizes = (whole.seq_len, mesh.ring_size, mesh.ulysses_size)
    documents = documents_of(whole, rules)
    if rule.kind == "auto":
        choice = explain_layout(*sizes, documents, rule.mask, cost=rule.cost, padding=rules.padding)
    else:
        kind = cast(LayoutKind, rule.kind)
        choice = LayoutChoice(SequenceLayout(*sizes, kind, documents, rule.mask), "as set")
    if not rules.padding:
        choice.layout.check_unpadded()
    return choice


@dataclass(frozen=True)
class Sharding:
    """Shard of a batch that the ranks have agreed on."""

    part: ShardedBatch
    positions: PositionInfo
    """Facts of the whole batch, which ranks must not derive from their own tokens."""
    some_rank_empty: bool
    """Some rank of the ``loss`` group has no targets (in training; of the cp group elsewhere)."""
    targets: int
    """Targets of all data ranks in training; of this one elsewhere."""
    trains: bool
    """The step trains: ranks with other samples take it together."""
    choice: LayoutChoice | None = None
    """Choice of the layout with its reason, if the kind is ``auto``."""
    without_labels: bool = False
    """``labels="none"``: the loss is one of whole sequences, or declares its targets."""


def shard_batch_checked(
    batch: Any,
    rules: BatchRules,
    rule: LayoutRule,
    mesh: ContextParallelMesh,
    *,
    training: bool,
    together: bool,
    before: ShardedBatch | None = None,
    draws: TokenDraws | None = None,
    device: torch.device | None = None,
) -> Sharding:
    """Return this rank's part of a batch that every rank of its cp group holds whole.

    First the ranks agree that it is the same batch, so that an error on one rank is an error on all.
    Tensor-parallel ranks get the same part of a batch, and agree as well.

    Args:
        batch: the whole batch.
        rules: rules for reading it.
        rule: rule for its layout.
        mesh: the process groups.
        training: labels are needed, and their number in all data ranks.
        together: ranks with other samples take part in the agreement, as in training.
        before: the last shard, which must not be sharded again.
        draws: random numbers of the previous steps, which ranks that share a sample must have drawn alike.
        device: where the shard is put; by default it stays where the batch is. A batch on the host is read
            there, and no step waits for the device; one on the device costs one wait.

    Raises:
        ConfigError: a batch that cannot be read.
        ShapeError: sequences that are too short, unequal, sharded already, or (padding=False) do not divide.
        BatchMismatchError: ranks of a cp group hold different batches.
        RankFailure: another rank's batch was refused.
    """
    error: Exception | None = None
    facts: dict[str, Any] = {}
    whole: WholeBatch | None = None
    choice: LayoutChoice | None = None
    valid: tuple[int, ...] = ()
    try:
        whole = read_batch(batch, rules, needs_labels=training, on_host=True)
        _check_not_sharded(whole, before)
        choice = layout_of(whole, rules, rule, mesh)
        valid = valid_counts(whole, choice.layout, rules.labels)
        facts = _facts(whole, choice.layout, valid)
    except Exception as refused:  # any: a rank that raised alone would leave the others waiting
        error = refused
    targets, empty = _agree_on_batch(facts, error, mesh, draws, together=together)
    if not training and whole is not None:
        targets, empty = facts["targets"], facts["ranks without targets"]
    assert whole is not None
    assert choice is not None
    layout = choice.layout
    if not facts["targets"]:
        error_display.warn(
            "a batch has no valid label at all: a mean over its labels adds nothing."
        )
    part = shard_batch(whole, layout, mesh.cp_rank, rules, valid, device)
    told = choice if rule.kind == "auto" else None
    facts_of_positions = batch_position_info(whole, layout)
    is_unlabelled = rules.labels == "none"
    return Sharding(part, facts_of_positions, empty > 0, targets, training, told, is_unlabelled)


def already_sharded(tensors: Mapping[str, torch.Tensor], before: ShardedBatch | None) -> list[str]:
    """Return the names of a batch's tensors that share memory with the shard made ``before``."""
    if before is None or before.layout.cp_size == 1:
        return []
    local_len = before.layout.local_len
    shards = {memory_of(x) for _, x in tensors_of(before.batch) if local_len in x.shape}
    return [name for name, x in tensors.items() if memory_of(x) in shards]


def _check_not_sharded(whole: WholeBatch, before: ShardedBatch | None) -> None:
    again = [name for name in already_sharded(whole.own, before) if name in whole.dims]
    if again:
        assert before is not None
        raise ShapeError(
            f"{again[0]!r} was sharded already: expected the whole sequence of {before.layout.seq_len} "
            f"tokens, got this rank's {whole.seq_len}. Shard a batch once: by shard_dataloaders=True or by "
            "strategy.shard_batch(batch), and keep the whole batch if it is needed again."
        )


def batch_position_info(whole: WholeBatch, layout: SequenceLayout) -> PositionInfo:
    """Return facts of the positions of a whole batch."""
    return position_info(whole.positions_in(whole.tensors), layout)


def _agree_on_batch(
    facts: dict[str, Any],
    error: Exception | None,
    mesh: ContextParallelMesh,
    draws: TokenDraws | None,
    *,
    together: bool,
) -> tuple[int, int]:
    """Return the targets of all ranks that take part, and the number of ranks without any. Collective.

    In training all ranks agree: their gradients are averaged, so all must know of ranks without targets. The
    same holds where parameters are sharded over data ranks. Elsewhere only a cp group agrees: data ranks may
    have different numbers of batches.
    """
    size, of = mesh.data_size if together else 1, mesh.sample_size
    group = mesh.control_group(Flat.LOSS if together else Flat.CP)
    part = mesh.data_rank if together else 0
    dissents = error is not None
    number = 0 if error else _EMPTY * facts["targets"] + facts["ranks without targets"]
    asked = [] if draws is None else draws.pop_calls()

    def total_with(asked: list[str]) -> int | None:
        own = (tuple(facts.items()), asked)
        return all_equal_sum(
            "batch", group, dissents=dissents, number=number, of=(part, of), own=own
        )

    total = total_with(asked)
    if total is None:
        groups = [range(at * of, (at + 1) * of) for at in range(size)]
        every = gather_facts(facts, group, what="batch", error=error)
        check_gathered(every, group, what="batch", within=groups)
        if draws is not None:
            _warn_draws_differ(asked, group, groups, draws)
        total = total_with([])
    if total is None:
        raise BatchMismatchError(
            "the ranks disagree about the batch, but the facts that they compared are equal. Please report "
            "this, with the shapes of the batch of every rank."
        )
    return total // _EMPTY // of, total % _EMPTY


def _warn_draws_differ(
    asked: list[str], group: dist.ProcessGroup, groups: Sequence[range], draws: TokenDraws
) -> None:
    """Warn once, on the first rank of the first group whose ranks drew different random numbers."""
    every = gather_objects(asked, group)
    said = ((ranks[0], describe_difference([every[rank] for rank in ranks])) for ranks in groups)
    first, line = next(((rank, line) for rank, line in said if line), (0, None))
    if line:
        draws.stop_recording()
        if group.rank() == first:
            _log.warning(line)


def _facts(whole: WholeBatch, layout: SequenceLayout, valid: tuple[int, ...]) -> dict[str, Any]:
    """Return the facts that ranks which share a sample must agree on."""
    tensors, sums = whole.tensors.items(), whole.sums
    return {
        "sequence length": whole.seq_len,
        "ranks without targets": valid.count(0),
        "targets": sum(valid),
        "documents": layout.documents.checksum if layout.documents else 0,
        "layout": layout.checksum,
        **{f"{name} (shape and dtype)": f"{tuple(x.shape)} {x.dtype}" for name, x in tensors},
        **{
            f"{name} (values)": sums[name] if name in sums else int(start_checksum(x))
            for name, x in tensors
        },
    }

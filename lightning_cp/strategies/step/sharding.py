"""From a whole batch to a rank's part: read it, agree with the other ranks, shard it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn

from lightning_cp import console
from lightning_cp.batch import (
    BatchRules,
    ShardedBatch,
    WholeBatch,
    read_batch,
    shard_batch,
    valid_counts,
)
from lightning_cp.comm.agreement import find_difference, gathered_lists
from lightning_cp.comm.checksum import checksum, fingerprint
from lightning_cp.comm.vote import tally
from lightning_cp.containers import memory_of, tensors_of
from lightning_cp.errors import BatchMismatchError, ShapeError, UndeclaredError
from lightning_cp.layout import LayoutChoice, SequenceLayout
from lightning_cp.mesh import ContextParallelMesh, Flat
from lightning_cp.models.facts import PositionFacts, position_facts
from lightning_cp.models.hf import label_alignment
from lightning_cp.models.swap import hf_models
from lightning_cp.models.token_draws import TokenDraws, difference
from lightning_cp.strategies.step.layouts import LayoutRule, layout_of

_log = logging.getLogger("lightning_cp")


@dataclass(frozen=True)
class Sharding:
    """A batch that the ranks have agreed on."""

    part: ShardedBatch
    positions: PositionFacts
    """Of the whole batch: what ranks must not find out from their own tokens."""
    some_rank_empty: bool
    """Some rank of the ``loss`` group has no targets (in training; of the cp group elsewhere)."""
    targets: int
    """Of all data ranks in training; of this one elsewhere."""
    trains: bool
    """Ranks with other samples take the same step together."""
    choice: LayoutChoice | None = None
    """Why it has its layout, if nobody asked for one."""


def shard_agreed(
    batch: Any,
    rules: BatchRules,
    rule: LayoutRule,
    mesh: ContextParallelMesh,
    *,
    training: bool,
    together: bool,
    before: ShardedBatch | None = None,
    draws: TokenDraws | None = None,
) -> Sharding:
    """This rank's part of a batch that every rank of its cp group holds whole.

    Before anything else the ranks agree that it is the same batch, so that an error on one rank is
    an error on all. Tensor-parallel ranks are given one part of one batch, and agree as well.

    Args:
        batch: the whole batch.
        rules: how it is read.
        rule: which layout it gets.
        mesh: the process groups.
        training: labels are needed, and their number in all data ranks.
        together: ranks with other samples take part in the agreement, as they do in training.
        before: what was sharded last, which must not be sharded again.
        draws: random numbers of the steps before this one, for which ranks that share a sample must have
            asked alike.

    Raises:
        ConfigError: a batch that cannot be read.
        ShapeError: sequences that are too short, unequal, sharded already, or (padding=False) do not divide.
        BatchMismatchError: ranks of a cp group hold different batches.
        RankFailure: another rank's batch was refused.
    """
    error: Exception | None = None
    facts: dict[str, int] = {}
    whole: WholeBatch | None = None
    choice: LayoutChoice | None = None
    valid: tuple[int, ...] = ()
    try:
        whole = read_batch(batch, rules, needs_labels=training)
        _refuse_sharded(whole, before)
        choice = layout_of(whole, rules, rule, mesh)
        valid = valid_counts(whole, choice.layout)
        facts = _facts(whole, choice.layout, valid)
    except Exception as refused:  # any: a rank that raised alone would leave the others waiting
        error = refused
    texts = _texts(whole) if whole is not None else {}
    targets, empty = _agree_on_batch(facts, texts, error, mesh, draws, together=together)
    if not training and whole is not None:
        targets, empty = facts["targets"], facts["ranks without targets"]
    assert whole is not None
    assert choice is not None
    layout = choice.layout
    if not facts["targets"]:
        console.warn("a batch has no valid label at all: it adds nothing.")
    part = shard_batch(whole, layout, mesh.cp_rank, rules, valid)
    told = choice if rule.kind == "auto" else None
    facts_of_positions = position_facts_of(whole, layout)
    return Sharding(part, facts_of_positions, empty > 0, targets, training, told)


def shared_with(batch: Any, before: ShardedBatch | None) -> list[str]:
    """Names of tensors in ``batch`` that are, as far as can be seen, shards made ``before``; or views."""
    if before is None or before.layout.cp_size == 1:
        return []
    local_len = before.layout.local_len
    shards = {memory_of(x) for _, x in tensors_of(before.batch) if local_len in x.shape}
    return [name for name, x in tensors_of(batch) if memory_of(x) in shards]


def _refuse_sharded(whole: WholeBatch, before: ShardedBatch | None) -> None:
    again = [name for name in shared_with(whole.batch, before) if name in whole.dims]
    if again:
        assert before is not None
        raise ShapeError(
            f"{again[0]!r} was sharded already: expected the whole sequence of {before.layout.seq_len} "
            f"tokens, got this rank's {whole.seq_len}. Shard a batch once: by shard_dataloaders=True or by "
            "strategy.shard_batch(batch), and keep the whole batch if it is needed again."
        )


def position_facts_of(whole: WholeBatch, layout: SequenceLayout) -> PositionFacts:
    """Facts of the positions of a whole batch, if it brings any."""
    return position_facts(whole.positions_in(dict(tensors_of(whole.batch))), layout)


def label_kind(model: nn.Module, declared: str, *, required: bool) -> str:
    """The way labels are read: ``shift``, ``aligned`` or ``ignore``.

    Raises:
        UndeclaredError: labels matter, and nothing says whether they are shifted.
    """
    if declared in ("aligned", "shift"):
        return declared
    kinds = {label_alignment(root) for root in hf_models(model)}
    if len(kinds) == 1 and None not in kinds:
        return str(kinds.pop())
    if not required:
        return "ignore"
    names = [
        type(part).__name__ for part in (model if isinstance(model, nn.ModuleList) else [model])
    ]
    question = (
        f"it is not known how {', '.join(names)} reads its labels. A step that shifts them itself "
        "(logits[:, :-1], labels[:, 1:]) is silently wrong at every seam between ranks. Shift them in the "
        "dataset (labels[i] is the target of token i) and declare labels='aligned'; or leave the dataset as "
        "it is, declare labels='shift', and compute the loss of all logits with batch['shift_labels'], which "
        "is there where ranks share a sequence. There must be one label per token, -100 where there is no "
        "target; a label per sequence cannot be weighted."
    )
    raise UndeclaredError([question], {"labels": "aligned"})


def _agree_on_batch(
    facts: dict[str, int],
    texts: dict[str, str],
    error: Exception | None,
    mesh: ContextParallelMesh,
    draws: TokenDraws | None,
    *,
    together: bool,
) -> tuple[int, int]:
    """Targets of all ranks that take part, and how many ranks have none.

    In training all ranks agree: their gradients are averaged, so all must know of ranks without targets. So
    they do where parameters are sharded over data ranks. Elsewhere only a cp group does: data ranks may have
    different numbers of batches.
    """
    size, of = mesh.data_size if together else 1, mesh.sample_size
    group = mesh.control_group(Flat.LOSS if together else Flat.CP)
    part = mesh.data_rank if together else 0
    dissents = error is not None
    number = 0 if error else _EMPTY * facts["targets"] + facts["ranks without targets"]
    asked = [] if draws is None else draws.take_asked()

    def total_with(asked: list[str]) -> int | None:
        own = (tuple(facts.items()), asked)
        return tally("batch", group, dissents=dissents, number=number, of=(part, of), own=own)

    total = total_with(asked)
    if total is None:
        groups = [range(at * of, (at + 1) * of) for at in range(size)]
        find_difference(facts, group, what="batch", within=groups, error=error, texts=texts)
        if draws is not None:
            _say_draws_differ(asked, group, groups, draws)
        total = total_with([])
    if total is None:
        raise BatchMismatchError(
            "batch: the ranks' votes differ, and nothing that they said does. Please report it, with the "
            "shapes of the batch of every rank."
        )
    return total // _EMPTY // of, total % _EMPTY


def _say_draws_differ(
    asked: list[str], group: dist.ProcessGroup, groups: Sequence[range], draws: TokenDraws
) -> None:
    """Warn on the first rank of the first of some groups whose ranks drew different random numbers; once."""
    every = gathered_lists(asked, group)
    said = ((ranks[0], difference([every[rank] for rank in ranks])) for ranks in groups)
    first, line = next(((rank, line) for rank, line in said if line), (0, None))
    if line:
        draws.look_no_more()
        if group.rank() == first:
            _log.warning(line)


_EMPTY = 2**24
"""Ranks without targets and targets travel as one number: more than all ranks x those that share a sample."""


def _facts(whole: WholeBatch, layout: SequenceLayout, valid: tuple[int, ...]) -> dict[str, int]:
    """The facts that ranks which share a sample must agree on."""
    facts = {
        "sequence length": whole.seq_len,
        "ranks without targets": sum(1 for count in valid if not count),
        "targets": sum(valid),
        "documents": layout.documents.checksum if layout.documents else 0,
        "layout": layout.checksum,
    }
    tensors = list(tensors_of(whole.batch))
    for name, text in _texts(whole).items():
        facts[name] = fingerprint(text)
    for name, x in tensors[:15]:
        facts[f"{name} (values)"] = checksum(x)
    facts["further tensors"] = fingerprint([(name, checksum(x)) for name, x in tensors[15:]])
    return facts


def _texts(whole: WholeBatch) -> dict[str, str]:
    """The texts shown in place of checksums."""
    tensors = list(tensors_of(whole.batch))[:15]
    return {f"{name} (shape and dtype)": f"{tuple(x.shape)} {x.dtype}" for name, x in tensors}

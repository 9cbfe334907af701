"""Sharding a batch along the sequence, and putting outputs together again.

Rules, in order: a declared key has the dimension that was declared (``None``: it is replicated); keys
that Hugging Face models use are known; a tensor that is neither, but has a dimension as long as the
sequence, is refused, because a guess would be silently wrong; the rest is replicated.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import torch

from lightning_cp.containers import ROOT, is_container, map_tensors, tensors_of
from lightning_cp.errors import ConfigError, ShapeError
from lightning_cp.layout import Documents, SequenceLayout
from lightning_cp.mesh import ContextParallelMesh

IGNORE = -100
"""The label of a token that has no target, as in torch's cross-entropy."""

KNOWN_DIMS: dict[str, int] = {
    "input_ids": 1,
    "labels": 1,
    "shift_labels": 1,
    "attention_mask": 1,
    "token_type_ids": 1,
    "position_ids": -1,
    "inputs_embeds": 1,
    "segment_ids": 1,
    "logits": 1,
    "last_hidden_state": 1,
    "hidden_states": 1,
}
"""Sequence dimensions of the names that Hugging Face models use."""

PAD_VALUES = {"labels": IGNORE, "shift_labels": IGNORE, "segment_ids": -1}


@dataclass(frozen=True)
class BatchRules:
    """How the batches of one run are read.

    Args:
        sequence_dims: dotted name of a tensor -> its sequence dimension, ``None`` to replicate it.
        label_key: dotted name of the labels.
        labels: ``shift`` (a token's target is the next token's label), ``aligned`` (already shifted) or
            ``ignore`` (the step needs none).
        padding: pad sequences that do not divide.
        reads_masks: the model reads padding masks and restarting positions (Hugging Face models do), so
            documents are taken from them.
    """

    sequence_dims: Mapping[str, int | None] = field(default_factory=dict)
    label_key: str = "labels"
    labels: str = "ignore"
    padding: bool = True
    reads_masks: bool = False


@dataclass
class ShardedBatch:
    """One rank's part of a batch, and what the step and the loss need to know of the whole."""

    batch: Any
    layout: SequenceLayout
    position_ids: torch.Tensor
    labels: torch.Tensor | None
    aligned_labels: torch.Tensor | None
    valid: tuple[int, ...]
    """Targets (tokens, if there are no labels) of every context-parallel rank."""


@dataclass(frozen=True)
class WholeBatch:
    """What was found in a batch before it is sharded."""

    batch: Any
    dims: dict[str, int]
    """Sequence dimension of every tensor that is sharded."""
    seq_len: int
    rows: int
    aligned_labels: torch.Tensor | None
    label_dim: int = 1
    """Sequence dimension of the labels."""


def read_batch(batch: Any, rules: BatchRules, *, needs_labels: bool) -> WholeBatch:
    """Find the sequence in a batch; moves and changes nothing.

    Raises:
        ConfigError: an unknown container, an undeclared sequence dimension, or a key that is missing.
        ShapeError: sequences of different lengths.
    """
    if not isinstance(batch, torch.Tensor) and not is_container(batch):
        raise ConfigError(
            f"cannot shard a batch of type {type(batch).__name__}. What works: tensors in dicts, "
            "tuples, lists, "
            "named tuples and dataclasses; or override ContextParallelCallback.shard_batch."
        )
    tensors = dict(tensors_of(batch))
    dims = _sequence_dims(tensors, rules)
    lengths = {name: tensors[name].size(dim) for name, dim in dims.items()}
    if len(set(lengths.values())) > 1:
        raise ShapeError(f"the sequences of a batch must have one length, got {lengths}.")
    seq_len = next(iter(lengths.values()))
    _refuse_undeclared(tensors, dims, rules, seq_len)
    if rules.label_key not in tensors and needs_labels:
        raise ConfigError(
            f"training needs the labels of the batch to weight the loss of each rank, but there is no key "
            f"{rules.label_key!r} among {sorted(tensors)}. Add it, or name it with the mixin's "
            "context_parallel_label_key."
        )
    rows = next((tensors[name].size(0) for name, dim in dims.items() if dim != 0), 1)
    aligned = _aligned_labels(tensors, dims, rules)
    return WholeBatch(batch, dims, seq_len, rows, aligned, dims.get(rules.label_key, 1))


def _aligned_labels(
    tensors: Mapping[str, torch.Tensor], dims: Mapping[str, int], rules: BatchRules
) -> torch.Tensor | None:
    labels = tensors.get(rules.label_key)
    if labels is None or rules.labels == "ignore":
        return None
    shape, dim = tuple(labels.shape), dims.get(rules.label_key)
    if dim is None:
        raise ConfigError(
            f"the labels {rules.label_key!r} of shape {shape} do not run along the sequence, but the loss of "
            "a rank is weighted by the targets among its tokens. What works: one label per token, -100 "
            "where there is no target."
        )
    if rules.labels == "aligned":
        return labels
    if labels.dim() != 2 or dim != 1:
        raise ConfigError(
            f"Hugging Face models shift [batch, tokens] labels, but {rules.label_key!r} is of another kind: "
            f"got {shape} with the sequence in dimension {dim}."
        )
    return shift(labels)


def shift(labels: torch.Tensor) -> torch.Tensor:
    """The target of each token [B, S]: the label of the next one, and none for the last."""
    return torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORE)


def documents_of(whole: WholeBatch, rules: BatchRules) -> Documents | None:
    """The documents that a batch declares, or ``None``: one document.

    ``cu_seqlens`` (one packed row) and ``segment_ids`` are taken always; a padding mask and restarting
    positions only if the model itself reads them.

    Raises:
        ConfigError: a dense attention mask, or targets on the padding behind a row.
        ShapeError: boundaries that do not describe this batch.
    """
    tensors = dict(tensors_of(whole.batch))
    if "cu_seqlens" in tensors:
        return Documents.from_cu_seqlens(tensors["cu_seqlens"].flatten(), whole.seq_len)
    if "segment_ids" in tensors:
        return Documents.from_segment_ids(tensors["segment_ids"])
    if not rules.reads_masks:
        return None
    mask, positions = tensors.get("attention_mask"), tensors.get("position_ids")
    if mask is not None and mask.dim() != 2:
        raise ConfigError(
            f"an attention_mask of shape {tuple(mask.shape)} cannot be sharded: what can be expressed is a "
            "2-D padding mask, packed documents (restarting position_ids, cu_seqlens or segment_ids), "
            "causality and sliding windows."
        )
    if mask is not None and not bool(mask.all()):
        _refuse_padded_targets(mask, whole.aligned_labels)
        return Documents.from_padding_mask(mask)
    if mask is None and positions is not None and positions.dim() == 2:
        return Documents.from_position_ids(positions)
    return None


def _refuse_padded_targets(mask: torch.Tensor, aligned: torch.Tensor | None) -> None:
    """In one process padding behind a row sees the row, and its loss counts; here it sees nothing.

    Padding before a row sees nothing in one process either, so that the target which shifting puts on
    the last of it is no error.
    """
    if aligned is None or aligned.shape != mask.shape:
        return
    behind = (mask == 0) & (mask.cumsum(1) > 0)
    count = int((behind & (aligned != IGNORE)).sum())
    if count:
        raise ConfigError(
            f"{count} target(s) of this batch stand on padding (attention_mask 0 behind a row's tokens), "
            "which is not computed under context parallelism. Set the labels of padding to -100."
        )


def shard_batch(
    whole: WholeBatch, layout: SequenceLayout, cp_rank: int, rules: BatchRules
) -> ShardedBatch:
    """This rank's part of a batch: pure indexing, no communication.

    Global ``position_ids`` go along (0 where padded), and aligned labels as ``shift_labels`` where the
    model shifts; both are added to a dict that lacks them.
    """

    def visit(name: str, x: torch.Tensor) -> torch.Tensor:
        if name not in whole.dims:
            return x
        only_labels = name == rules.label_key and name not in (*KNOWN_DIMS, ROOT)
        pad = PAD_VALUES.get(name, IGNORE if only_labels else 0)
        return layout.shard(x, cp_rank, dim=whole.dims[name], pad_value=pad)

    local = map_tensors(whole.batch, visit)
    tensors = dict(tensors_of(local))
    aligned = whole.aligned_labels
    aligned_local = None
    if aligned is not None:
        aligned_local = layout.shard(aligned, cp_rank, dim=whole.label_dim, pad_value=IGNORE)
    positions = tensors.get("position_ids")
    if positions is None:
        device = tensors[next(iter(whole.dims))].device
        global_positions = layout.positions(cp_rank).to(device)
        positions = global_positions.masked_fill(global_positions >= layout.seq_len, 0)
        positions = positions.expand(whole.rows, -1)
    if isinstance(local, MutableMapping):
        local.setdefault("position_ids", positions)
        if rules.labels == "shift" and aligned_local is not None:
            local.setdefault("shift_labels", aligned_local)
    return ShardedBatch(
        local,
        layout,
        positions,
        tensors.get(rules.label_key),
        aligned_local,
        valid_counts(whole, layout),
    )


def valid_counts(whole: WholeBatch, layout: SequenceLayout) -> tuple[int, ...]:
    """Targets of every context-parallel rank; tokens, if the batch has no labels."""
    if whole.aligned_labels is None:
        per_token = torch.full((whole.seq_len,), whole.rows, dtype=torch.int64)
    else:
        valid = (whole.aligned_labels != IGNORE).movedim(whole.label_dim, -1)
        per_token = valid.flatten(0, -2).sum(0).cpu() if valid.dim() > 1 else valid.long().cpu()
    return tuple(int(layout.shard(per_token, rank, dim=0).sum()) for rank in range(layout.cp_size))


def unshard_output(
    output: Any, mesh: ContextParallelMesh, layout: SequenceLayout, dims: Mapping[str, int | None]
) -> Any:
    """What a predict step returned, in original order and length, on every rank.

    A tensor is unsharded along its declared dimension, along a known one, or along dimension 1 if that
    is as long as the local sequence; everything else is left as it is.

    Raises:
        ConfigError: another dimension is as long as the local sequence, and nothing was declared.
    """

    def visit(name: str, x: torch.Tensor) -> torch.Tensor:
        dim = _output_dim(name, x, layout, dims)
        return x if dim is None else mesh.unshard(x, layout, dim=dim)

    if not isinstance(output, torch.Tensor) and not is_container(output):
        return output
    return map_tensors(output, visit)


def _output_dim(
    name: str, x: torch.Tensor, layout: SequenceLayout, dims: Mapping[str, int | None]
) -> int | None:
    if name in dims:
        return dims[name]
    if x.dim() > 1 and x.size(1) == layout.local_len:
        return 1
    if layout.local_len in x.shape:
        raise ConfigError(
            f"predict_step returned {name!r} of shape {tuple(x.shape)}, which has a dimension as long as the "
            f"local sequence ({layout.local_len}), but not dimension 1. Declare it with the mixin: "
            f"context_parallel_output_dims = {{{name!r}: <dim, or None to leave it>}}."
        )
    return None


def _sequence_dims(tensors: Mapping[str, torch.Tensor], rules: BatchRules) -> dict[str, int]:
    missing = [name for name in rules.sequence_dims if name not in tensors]
    if missing:
        raise ConfigError(
            f"sequence_dims names {', '.join(map(repr, missing))}, but the batch has {sorted(tensors)}."
        )
    dims: dict[str, int] = {}
    for name, x in tensors.items():
        dim = rules.sequence_dims.get(name, KNOWN_DIMS.get(name))
        if name not in rules.sequence_dims and name == "attention_mask" and x.dim() != 2:
            continue  # refused, with what can be expressed, when the documents are read
        if dim is None:
            continue
        if not -x.dim() <= dim < x.dim():
            raise ShapeError(f"{name!r} has sequence dim {dim}, but its shape is {tuple(x.shape)}.")
        dims[name] = dim % x.dim()
    if not dims:
        raise ConfigError(
            f"no tensor of the batch is known to run along the sequence; it has {sorted(tensors)}. Declare "
            "them: sequence_dims={'<name>': <dim>}, with names like '0' for tuples and 'a.b' for nested ones."
        )
    return dims


def _refuse_undeclared(
    tensors: Mapping[str, torch.Tensor], dims: Mapping[str, int], rules: BatchRules, seq_len: int
) -> None:
    for name, x in tensors.items():
        if name in dims or name in rules.sequence_dims or name in ("cu_seqlens", "attention_mask"):
            continue
        if seq_len in x.shape:
            raise ConfigError(
                f"{name!r} of shape {tuple(x.shape)} has a dimension as long as the sequence "
                f"({seq_len}), but it "
                f"is not declared. Say sequence_dims={{{name!r}: {list(x.shape).index(seq_len)}}} "
                "to shard it, "
                f"or sequence_dims={{{name!r}: None}} to give every rank all of it."
            )

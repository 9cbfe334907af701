"""Reader of a whole batch: its sequence and its labels; it moves and changes nothing.

Rules, in order: a declared key has the declared dimension (``None``: it is replicated); keys that Hugging
Face models use are known; any other tensor with a dimension as long as the sequence is refused, because a
guess would be silently wrong; the rest is replicated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from lightning_cp.batch.declarations import (
    EXPRESSIBLE,
    MASK,
    SEGMENTS,
    check_forms,
    last_part,
)
from lightning_cp.batch.rules import KNOWN_DIMS, BatchRules
from lightning_cp.batch.tracked_batch import POSITIONS
from lightning_cp.batch.undeclared import check_any_known, check_declared
from lightning_cp.errors import ConfigError, ShapeError
from lightning_cp.utils.containers import is_container, nodes_of
from lightning_cp.utils.labels import shift


@dataclass(frozen=True)
class WholeBatch:
    """Content of a batch before it is sharded."""

    batch: Any
    tensors: dict[str, torch.Tensor]
    """Tensors of the batch by dotted name."""
    dims: dict[str, int]
    """Sequence dimension of every tensor that is sharded."""
    seq_len: int
    rows: int
    aligned_labels: torch.Tensor | None
    label_dim: int = 1
    """Sequence dimension of the labels."""

    @cached_property
    def position_name(self) -> str | None:
        """Name of the batch's sharded positions, at the top level or the only nested one."""
        found = [name for name in self.dims if last_part(name) == POSITIONS]
        if POSITIONS in found:
            return POSITIONS
        return found[0] if len(found) == 1 else None

    def positions_in(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        """Return the positions among tensors of this batch or its shard, [..., rows, tokens], or ``None``."""
        name = self.position_name
        if name is None:
            return None
        x = tensors[name]
        x = x if self.dims[name] == x.dim() - 1 else x.movedim(self.dims[name], -1)
        return x[None] if x.dim() == 1 else x


def read_batch(batch: Any, rules: BatchRules, *, needs_labels: bool) -> WholeBatch:
    """Find the sequence and the labels in a batch.

    Raises:
        ConfigError: an unknown container, an undeclared sequence dimension, or a key that is missing.
        ShapeError: sequences of different lengths.
    """
    if not isinstance(batch, torch.Tensor) and not is_container(batch):
        raise ConfigError(
            f"cannot shard a batch of type {type(batch).__name__}. What works: tensors in dicts, "
            "tuples, lists, named tuples and dataclasses; or override "
            "ContextParallelCallback.shard_batch."
        )
    nodes = nodes_of(batch)
    check_forms(nodes, rules)
    tensors = {name: x for name, x in nodes if isinstance(x, torch.Tensor)}
    dims = _sequence_dims(tensors, rules)
    check_any_known(tensors, dims, rules, needs_labels=needs_labels)
    lengths = {name: tensors[name].size(dim) for name, dim in dims.items()}
    if len(set(lengths.values())) > 1:
        raise ShapeError(
            f"the sequences of a batch must have one length, got {lengths} of shapes "
            f"{ {name: tuple(tensors[name].shape) for name in dims} }. {_why_lengths(lengths)}"
        )
    seq_len, rows = next(iter(lengths.values())), _rows(tensors, dims)
    check_declared(tensors, dims, rules, seq_len=seq_len, rows=rows, needs_labels=needs_labels)
    aligned = _aligned_labels(tensors, dims, rules)
    label_dim = dims.get(rules.label_key, 1)
    return WholeBatch(batch, tensors, dims, seq_len, rows, aligned, label_dim)


def _rows(tensors: Mapping[str, torch.Tensor], dims: Mapping[str, int]) -> int:
    """Return the number of rows; 1 if no tensor shows it.

    Masks, segments and positions come last: they may have one line for all rows, or several for each.
    """
    behind = {name: x for name, x in tensors.items() if dims.get(name)}
    for name, x in behind.items():
        if last_part(name) not in (POSITIONS, MASK, *SEGMENTS):
            return x.size(0)
    return max((x.size(-2) for x in behind.values()), default=1)


def _why_lengths(lengths: Mapping[str, int]) -> str:
    others = {length for name, length in lengths.items() if name != POSITIONS}
    if len(others) == 1 and POSITIONS in lengths:
        (whole,) = others
        return (
            f"Give {POSITIONS} of the whole sequence, 0 to {whole - 1} (or restarting with each document): "
            "the strategy shards them along with the tokens."
        )
    return (
        "Batches of several loaders can be joined to one: pad them to one length and concatenate their "
        "rows in on_after_batch_transfer."
    )


def _aligned_labels(
    tensors: Mapping[str, torch.Tensor], dims: Mapping[str, int], rules: BatchRules
) -> torch.Tensor | None:
    labels = tensors.get(rules.label_key)
    if labels is None or rules.labels == "ignore":
        return None
    _check_single_labels(dims, rules)
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
            f"got {shape} with the sequence in dimension {dim}. Shift such labels in the dataset, and pass "
            "labels='aligned'."
        )
    return shift(labels)


def _check_single_labels(dims: Mapping[str, int], rules: BatchRules) -> None:
    """Check that the batch has one tensor of labels: a rank's loss has one weight, its share of targets."""
    last = rules.label_key.rpartition(".")[2]
    found = [name for name in dims if name.rpartition(".")[2] == last]
    if len(found) > 1 and not last.isdigit():
        raise ConfigError(
            f"the batch has several labels, {', '.join(map(repr, found))}, but the loss of a step is "
            f"weighted by one, label_key={rules.label_key!r}. What works: one loader per step, or one "
            "batch from several loaders: pad them to one length and concatenate their rows in "
            "on_after_batch_transfer, so that the loss is the mean over the targets of both. Labels that "
            "the loss does not use may be given another name."
        )


def _sequence_dims(tensors: Mapping[str, torch.Tensor], rules: BatchRules) -> dict[str, int]:
    missing = [name for name in rules.sequence_dims if name not in tensors]
    if missing:
        raise ConfigError(
            f"sequence_dims names {', '.join(map(repr, missing))}, but the batch has {sorted(tensors)}. "
            "Name its tensors as the batch does, or leave out those that it lacks."
        )
    dims: dict[str, int] = {}
    for name, x in tensors.items():
        dim = rules.sequence_dims.get(name, KNOWN_DIMS.get(name))
        if name not in rules.sequence_dims and name == MASK and x.dim() != 2:
            raise ConfigError(
                f"an attention_mask of shape {tuple(x.shape)} cannot be sharded. {EXPRESSIBLE}"
            )
        if dim is None:
            continue
        if not -x.dim() <= dim < x.dim():
            one_a_row = (
                labels_per_row(tensors, rules.label_key) if name == rules.label_key else None
            )
            raise ShapeError(
                one_a_row
                or f"{name!r} has sequence dim {dim}, but its shape is {tuple(x.shape)}. "
                f"{_suggestion(name, x)}"
            )
        dims[name] = dim % x.dim()
    return dims


def _suggestion(name: str, x: torch.Tensor) -> str:
    """Return the suggestion of a declaration that fits."""
    dims = " or ".join(map(str, range(x.dim())))
    own = f"sequence_dims={{{name!r}: <the dimension of its tokens, {dims}>}}, or " if dims else ""
    return f"Say {own}sequence_dims={{{name!r}: None}} to give every rank all of it."


def labels_per_row(tensors: Mapping[str, torch.Tensor], label_key: str) -> str | None:
    """Return the message about labels per row, beside a tensor with a sequence, or ``None``."""
    labels = tensors.get(label_key)
    if labels is None or labels.dim() != 1:
        return None
    rows = labels.shape[0]
    if not any(x.dim() > 1 and x.shape[0] == rows for x in tensors.values()):
        return None
    return (
        f"{label_key!r} of shape {tuple(labels.shape)} has a label for each row, which is not supported yet "
        "where ranks share a sequence: there must be one for each token, -100 where there is no target. Pass "
        "context_parallel_size=1 and data_parallel_size=<number of ranks>, which shares no sample. Or give "
        "the labels of rows another name, and compute the loss from self.unshard(output); a batch then "
        f"needs a {label_key!r} of any number but -100 for each token."
    )

"""Reader of a whole batch: its sequence and its labels; it changes nothing.

Rules, in order: a declared key has the declared dimension (``None``: it is replicated); keys that Hugging
Face models use are known; any other tensor with a dimension as long as the sequence is refused, because a
guess would be silently wrong; the rest is replicated.

Documents are declared by ``cu_seqlens`` (and flash-attention's names of it) and ``segment_ids`` (or
``seq_idx``), padding by ``attention_mask``, positions by ``position_ids``. These count at any depth of a
batch; a nested tensor of another sequence is ignored if ``sequence_dims`` declares it ``None``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from lightning_cp.batch.rules import KNOWN_DIMS, POSITIONS, BatchRules
from lightning_cp.comm.consensus import start_checksum
from lightning_cp.errors import ConfigError, ShapeError, UndeclaredError
from lightning_cp.utils.containers import is_container, nodes_of, tensors_of
from lightning_cp.utils.labels import shift
from lightning_cp.utils.tensors import start_to_host

MASK = "attention_mask"
SEGMENTS = ("segment_ids", "seq_idx")
_BOUNDARIES = ("cu_seqlens", "cu_seq_lens")
"""Prefixes of the names: flash-attention's end in ``_q``, ``_k`` or ``_kv``."""

EXPRESSIBLE = (
    "What can be expressed: a 2-D padding mask, packed documents (restarting position_ids, cu_seqlens or "
    "segment_ids), causality and sliding windows."
)


def last_part(name: str) -> str:
    """Return the last part of a dotted name."""
    return name.rpartition(".")[2]


def has_boundaries(name: str) -> bool:
    """True if a tensor of this dotted name holds the boundaries of documents."""
    return name.rpartition(".")[2].startswith(_BOUNDARIES)


def check_forms(nodes: Iterable[tuple[str, Any]], rules: BatchRules) -> None:
    """Check that values under known names are ordinary (strided) tensors.

    Args:
        nodes: everything inside a batch, as from ``nodes_of``.
        rules: for reading it.

    Raises:
        ConfigError: naming the value and its kind.
    """
    for name, value in nodes:
        if value is None or rules.sequence_dims.get(name, 0) is None:
            continue
        if isinstance(value, torch.Tensor):
            if value.is_nested or value.layout is not torch.strided:
                _check_unknown(name, value, rules)
        elif last_part(name) == MASK and rules.reads_masks:
            raise ConfigError(f"{name!r} is {_kind(value)}, which cannot be sharded. {EXPRESSIBLE}")
        elif has_boundaries(name) or (
            last_part(name) in (POSITIONS, *SEGMENTS) and not any(tensors_of(value))
        ):
            raise ConfigError(
                f"{name!r} must be one tensor, got {_kind(value)}. Make a tensor of it in the dataset or the "
                "collate function; rows of cu_seqlens with fewer documents repeat their last entry."
            )


def _check_unknown(name: str, x: torch.Tensor, rules: BatchRules) -> None:
    """Refuse a tensor that is not strided under a known name."""
    if last_part(name) in KNOWN_DIMS or name in rules.sequence_dims or has_boundaries(name):
        raise ConfigError(
            f"{name!r} is {_kind(x)}, which cannot be sharded. Give an ordinary (strided) tensor: rows "
            "padded to one length, or packed into one row."
        )


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        layout = str(value.layout).removeprefix("torch.")
        return "a nested tensor" if value.is_nested else f"a tensor of layout {layout}"
    inside = ", ".join(sorted({_of_type(item) for _, item in nodes_of(value)[1:]}))
    return f"a {type(value).__name__}{f' of {inside}' if inside else ''}"


def _of_type(item: Any) -> str:
    if isinstance(item, torch.Tensor):
        ordinary = not item.is_nested and item.layout is torch.strided
        return f"tensors {tuple(item.shape)}" if ordinary else "tensors"
    return type(item).__name__


@dataclass(frozen=True)
class WholeBatch:
    """Content of a batch before it is sharded."""

    batch: Any
    own: dict[str, torch.Tensor]
    """Tensors of the batch by dotted name."""
    tensors: dict[str, torch.Tensor]
    """The same, with copies on the host where ``read_batch`` made some."""
    dims: dict[str, int]
    """Sequence dimension of every tensor that is sharded."""
    seq_len: int
    rows: int
    aligned_labels: torch.Tensor | None
    label_dim: int = 1
    """Sequence dimension of the labels."""
    sums: Mapping[str, int] = field(default_factory=dict[str, int])
    """Checksums that are known."""

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


def read_from_device(
    tensors: Mapping[str, torch.Tensor], rules: BatchRules
) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
    """Return host copies of tensors on a GPU whose values are read, and checksums of the others.

    Labels, documents, padding and positions are read. The host waits once.
    """
    there = {name: x for name, x in tensors.items() if x.is_cuda}
    if not there:
        return {}, {}
    strided = {n: x for n, x in there.items() if x.layout is torch.strided and not x.is_nested}
    sums = {name: start_checksum(x) for name, x in strided.items() if not _is_read(name, rules)}
    copies, event = start_to_host({**strided, **sums})
    if event is not None:
        event.synchronize()
    found = {name: int(copies.pop(name)) for name in sums}
    return copies, found


def _is_read(name: str, rules: BatchRules) -> bool:
    last = last_part(name)
    if rules.sequence_dims.get(name, 0) is None:
        return False
    if name == rules.label_key and rules.labels not in ("ignore", "none"):
        return True
    return (
        has_boundaries(name)
        or last in (POSITIONS, *SEGMENTS)
        or (last == MASK and rules.reads_masks)
    )


def read_batch(
    batch: Any,
    rules: BatchRules,
    *,
    needs_labels: bool,
    on_host: bool = False,
) -> WholeBatch:
    """Find the sequence and the labels in a batch.

    Args:
        batch: the whole batch.
        rules: rules for reading it.
        needs_labels: a batch without labels is refused.
        on_host: values of a batch on a GPU are read from copies, as ``read_from_device`` makes them.

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
    own = {name: x for name, x in nodes if isinstance(x, torch.Tensor)}
    copies, sums = read_from_device(own, rules) if on_host else ({}, {})
    tensors = own | copies
    dims = _sequence_dims(tensors, rules)
    check_any_known(tensors, dims, rules, needs_labels=needs_labels)
    lengths = {name: tensors[name].size(dim) for name, dim in dims.items()}
    if len(set(lengths.values())) > 1:
        shapes = {name: tuple(tensors[name].shape) for name in dims}
        raise ShapeError(
            f"the sequences of a batch must have one length, got {lengths} of shapes {shapes}. "
            + _why_lengths(lengths, rules.label_key)
        )
    seq_len, rows = next(iter(lengths.values())), _rows(tensors, dims)
    check_declared(tensors, dims, rules, seq_len=seq_len, rows=rows, needs_labels=needs_labels)
    aligned = _aligned_labels(tensors, dims, rules)
    label_dim = dims.get(rules.label_key, 1)
    return WholeBatch(batch, own, tensors, dims, seq_len, rows, aligned, label_dim, sums)


def _rows(tensors: Mapping[str, torch.Tensor], dims: Mapping[str, int]) -> int:
    """Return the number of rows; 1 if no tensor shows it.

    Masks, segments and positions come last: they may have one line for all rows, or several for each.
    """
    behind = {name: x for name, x in tensors.items() if dims.get(name)}
    for name, x in behind.items():
        if last_part(name) not in (POSITIONS, MASK, *SEGMENTS):
            return x.size(0)
    return max((x.size(-2) for x in behind.values()), default=1)


def _why_lengths(lengths: Mapping[str, int], label_key: str) -> str:
    others = {length for name, length in lengths.items() if name != POSITIONS}
    if len(others) == 1 and POSITIONS in lengths:
        (whole,) = others
        return (
            f"Give {POSITIONS} of the whole sequence, 0 to {whole - 1} (or restarting with each document): "
            "the strategy shards them along with the tokens."
        )
    tokens = {length for name, length in lengths.items() if name != label_key}
    if len(tokens) == 1 and label_key in lengths:
        return (
            f"Give {label_key} one entry for each token, -100 where there is no target: with labels='shift' "
            "the strategy shifts them, with labels='aligned' entry i is the target of token i."
        )
    return (
        "Batches of several loaders can be joined to one: pad them to one length and concatenate their "
        "rows in on_after_batch_transfer."
    )


def _aligned_labels(
    tensors: Mapping[str, torch.Tensor], dims: Mapping[str, int], rules: BatchRules
) -> torch.Tensor | None:
    labels = tensors.get(rules.label_key)
    if labels is None or rules.labels in ("ignore", "none"):
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
        if name == rules.label_key and rules.labels == "none":  # of rows
            dim = rules.sequence_dims.get(name)
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
        f"{label_key!r} of shape {tuple(labels.shape)} has a label for each row, but labels of tokens are "
        "expected: one for each token, -100 where there is no target. Say labels='none' if the loss is one "
        "of whole rows, and compute it from self.sequence_pick(values, -1), sequence_mean or sequence_sum. "
        "Or share no sample: context_parallel_size=1 and data_parallel_size=<number of ranks>."
    )


Tensors = Mapping[str, torch.Tensor]

Questions = tuple[list[str], dict[str, object]]
"""Questions about missing declarations, and the arguments that may answer them."""


def check_any_known(
    tensors: Tensors, dims: Mapping[str, int], rules: BatchRules, *, needs_labels: bool
) -> None:
    """Check that some tensor of the batch is known to run along the sequence.

    Raises:
        UndeclaredError: none is; suggests dimensions.
    """
    if dims:
        return
    seen = _likely_dims(tensors)
    question = (
        "no tensor of the batch is known to run along the sequence; it has "
        f"{sorted(tensors) or 'no tensors'}. {_what_to_declare(tensors)}"
    )
    arguments: dict[str, object] = {"sequence_dims": seen} if seen else {}
    asked: Questions = _ask_for_labels(tensors, seen, rules) if needs_labels else ([], {})
    raise UndeclaredError([question, *asked[0]], arguments | asked[1])


def check_declared(
    tensors: Tensors,
    dims: Mapping[str, int],
    rules: BatchRules,
    *,
    seq_len: int,
    rows: int,
    needs_labels: bool,
) -> None:
    """Check that all tensors which may run along the sequence are declared, and that labels exist.

    Raises:
        UndeclaredError: with all missing declarations.
    """
    questions: list[str] = []
    asked: dict[str, int | None] = {}
    for name, x in tensors.items():
        if name in dims or name in rules.sequence_dims or has_boundaries(name):
            continue
        if name == rules.label_key and rules.labels == "none" and x.shape[1:2] == (seq_len,):
            raise ConfigError(
                f"labels='none' says that the batch has no labels of tokens, but {name!r} of shape "
                f"{tuple(x.shape)} runs along the sequence. For a mean over labelled tokens say "
                "labels='aligned' or 'shift'; labels of rows may be [rows] or [rows, classes]; give other "
                "values of tokens another name and declare their dimension in sequence_dims."
            )
        if seq_len in x.shape:
            asked[name] = list(x.shape).index(seq_len)
            questions.append(
                f"{name!r} of shape {tuple(x.shape)} has a dimension as long as the sequence "
                f"({seq_len}), but it is not declared. Say "
                f"sequence_dims={{{name!r}: {asked[name]}}} to shard it, or "
                f"sequence_dims={{{name!r}: None}} to give every rank all of it."
            )
        elif (near := _near_dim(x, seq_len, rows)) is not None:
            asked[name] = None
            fit = "pad" if x.shape[near] < seq_len else "cut"
            questions.append(
                f"{name!r} of shape {tuple(x.shape)} has a dimension nearly as long as the sequence "
                f"({seq_len}), but it is not declared. If it has a value for each token, {fit} it to "
                f"{seq_len} and say sequence_dims={{{name!r}: {near}}}; if not, "
                f"sequence_dims={{{name!r}: None}} gives every rank all of it."
            )
    arguments: dict[str, object] = {"sequence_dims": asked} if asked else {}
    of_labels: Questions = ([], {})
    if needs_labels:
        of_labels = _ask_for_labels(tensors, {**dims, **asked}, rules)
    questions += of_labels[0]
    if questions:
        raise UndeclaredError(questions, arguments | of_labels[1])


def _ask_for_labels(
    tensors: Tensors, dims: Mapping[str, int | None], rules: BatchRules
) -> Questions:
    """Return the question about missing labels, and the tensor that they may be."""
    if rules.label_key in tensors or rules.labels == "none":
        return [], {}
    question = (
        "training needs the labels of the batch to weight the loss of each rank, but there is no key "
        f"{rules.label_key!r} among {sorted(tensors)}. Add it, or name it: label_key='<name>' "
        "('1' for the second of a tuple). If the loss is one of whole sequences (a reward, a class, a pair "
        "of answers), say labels='none' and compute it from self.sequence_sum(values) and its kin."
    )
    likely = _likely_labels(tensors, dims)
    return [question], {} if likely is None else {"label_key": likely}


def _near_dim(x: torch.Tensor, seq_len: int, rows: int) -> int | None:
    """Return the dimension that is one shorter or longer than the sequence (shifted in the dataset)."""
    for dim, size in enumerate(x.shape):
        if abs(size - seq_len) == 1 and (dim, size) != (0, rows):
            return dim
    return None


def _likely_dims(tensors: Tensors) -> dict[str, int | None]:
    """Return dimension 1 (or 0) of the tensors that share the most common length there."""
    at = {name: min(1, x.dim() - 1) for name, x in tensors.items() if x.dim()}
    several = {name: dim for name, dim in at.items() if tensors[name].dim() > 1} or at
    lengths = Counter(tensors[name].size(dim) for name, dim in several.items())
    if not lengths:
        return {}
    most = max(lengths, key=lambda length: (lengths[length], length))
    return {name: dim for name, dim in several.items() if tensors[name].size(dim) == most}


def _likely_labels(tensors: Tensors, dims: Mapping[str, int | None]) -> str | None:
    """Return the integers along the sequence that are named like labels, or the last of several unnamed."""
    whole = [
        name
        for name, dim in dims.items()
        if dim is not None and not tensors[name].is_floating_point()
    ]
    for name in whole:
        if any(word in last_part(name).lower() for word in ("label", "target")):
            return name
    unnamed = [name for name in whole if last_part(name).isdigit()]
    return unnamed[-1] if len(unnamed) > 1 else None


def _what_to_declare(names: Iterable[str]) -> str:
    """Return the advice on declarations; nested names are never known: a mask may belong to any input."""
    nested = {name: KNOWN_DIMS.get(last_part(name)) for name in names if "." in name}
    known = {name: dim for name, dim in nested.items() if dim is not None}
    labels = [name for name in known if name.endswith(".labels")]
    if len(labels) > 1:
        return (
            f"It has several labels, {', '.join(map(repr, labels))}, but a step has one loss. Batches of "
            "several loaders can be joined to one: concatenate their rows in on_after_batch_transfer."
        )
    if known:
        key = f" and label_key={labels[0]!r}" if labels else ""
        return f"Declare what is nested: sequence_dims={known}{key}."
    return (
        "Declare them: sequence_dims={'<name>': <dim>}, with names like '0' for tuples and 'a.b' for nested "
        "ones."
    )

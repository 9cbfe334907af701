"""Checks for tensors of a batch that need a declaration: one error asks for all, with suggestions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

import torch

from lightning_cp.batch.declarations import has_boundaries, last_part
from lightning_cp.batch.rules import KNOWN_DIMS, BatchRules
from lightning_cp.errors import UndeclaredError

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
    if rules.label_key in tensors:
        return [], {}
    question = (
        "training needs the labels of the batch to weight the loss of each rank, but there is no key "
        f"{rules.label_key!r} among {sorted(tensors)}. Add it, or name it: label_key='<name>' "
        "('1' for the second of a tuple). A loss of whole sequences (a reward, a pair of answers) needs a "
        "value for each token as well, any number but -100; compute it from self.unshard(output)."
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

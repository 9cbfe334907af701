"""Documents that a batch declares: all declarations are read, and must agree."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from lightning_cp.batch.read import (
    MASK,
    SEGMENTS,
    WholeBatch,
    has_boundaries,
    last_part,
)
from lightning_cp.batch.rules import POSITIONS, BatchRules
from lightning_cp.errors import ConfigError, ShapeError
from lightning_cp.layout import Documents
from lightning_cp.layout.documents import text_positions
from lightning_cp.utils.labels import IGNORED_LABEL


@dataclass(frozen=True)
class DeclaredDocuments:
    """Tensors that declare documents in a batch, by dotted name; their last dimension is the sequence."""

    found: Mapping[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])

    @classmethod
    def of(cls, whole: WholeBatch, rules: BatchRules) -> DeclaredDocuments:
        """Find ``cu_seqlens`` and ``segment_ids``; masks and positions if the model reads them."""
        names = (*SEGMENTS, MASK, POSITIONS) if rules.reads_masks else SEGMENTS
        found: dict[str, torch.Tensor] = {}
        for name, x in whole.tensors.items():
            if has_boundaries(name) and name not in rules.sequence_dims:
                found[name] = x
            elif name in whole.dims and last_part(name) in names:
                found[name] = x.movedim(whole.dims[name], -1)
        return cls(found)

    def named(self, *names: str) -> dict[str, torch.Tensor]:
        """Return the tensors whose own name is among ``names``."""
        return {name: x for name, x in self.found.items() if last_part(name) in names}

    def documents(self, seq_len: int, rows: int | None) -> Documents | None:
        """Return the declared documents, or ``None``: one document.

        Args:
            seq_len: of the whole sequence.
            rows: of the batch, if known.

        Raises:
            ConfigError: declarations that contradict each other.
            ShapeError: one that does not describe this batch.
        """
        if not self.found:
            return None
        said: dict[str, Documents] = {}
        for name, x in self.found.items():
            if has_boundaries(name):
                said[name] = _read(name, x, rows, lambda x: Documents.from_cu_seqlens(x, seq_len))
            elif last_part(name) in SEGMENTS:
                said[name] = _read(name, x, rows, Documents.from_segment_ids)
        packed = _merge(said)
        padded = _merge(
            {
                name: _read(name, x, rows, Documents.from_padding_mask)
                for name, x in self.named(MASK).items()
                if not bool((x == 1).all())
            }
        )
        if packed is not None:
            if not self.named(MASK):
                self._check_positions(packed, next(iter(said)), rows)
            return packed if padded is None else _within(packed, padded)
        if self.named(MASK):
            return padded
        return _merge(self._of_positions(rows))

    def _of_positions(self, rows: int | None) -> dict[str, Documents]:
        said: dict[str, Documents] = {}
        for name, x in self.named(POSITIONS).items():
            text = _text_positions(name, x, rows)
            if text is not None:
                said[name] = _read(name, text, rows, Documents.from_position_ids)
            elif _restart_at_same_tokens(x):
                raise ConfigError(
                    f"{name!r} of shape {tuple(x.shape)} restart, but a model takes rows with such positions "
                    "for one document. For packed documents put the text's positions in front, [4, rows, "
                    "tokens], or cu_seqlens or segment_ids into the batch."
                )
        return said

    def _check_positions(self, packed: Documents, name: str, rows: int | None) -> None:
        for own, x in self.named(POSITIONS).items():
            text = _text_positions(own, x, rows)
            if text is not None and _restart_elsewhere(text, packed):
                raise ConfigError(
                    f"{own!r} of shape {tuple(x.shape)} restart elsewhere than documents begin by {name!r}: "
                    "one process would isolate other documents than ranks do. Have them say the same, or "
                    "take one of them out of the batch."
                )


def documents_of(whole: WholeBatch, rules: BatchRules) -> Documents | None:
    """Return the documents that a batch declares, or ``None``: one document.

    Raises:
        ConfigError: declarations that contradict each other, or targets on the padding behind a row.
        ShapeError: a declaration that does not describe this batch.
    """
    declared = DeclaredDocuments.of(whole, rules)
    rows = whole.rows if any(whole.dims.values()) else None
    found = declared.documents(whole.seq_len, rows)
    if found is not None and not found.is_dense:
        for mask in declared.named(MASK).values():
            _check_no_padded_targets(mask, whole)
    return found


def padding_mask_of(tensors: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    """Return a batch's mask [B, S], 0 for padding, even if the model does not read it."""
    mask = tensors.get(MASK)
    return mask if mask is not None and mask.dim() == 2 else None


def _read(
    name: str, x: torch.Tensor, rows: int | None, read: Callable[[torch.Tensor], Documents]
) -> Documents:
    """Read one declaration; an error names it and its shape."""
    shape = tuple(x.shape)
    try:
        found = read(x)
    except ShapeError as error:
        raise ShapeError(f"{name!r} of shape {shape} is not understood: {error}") from None
    if rows is not None and found.num_rows not in (1, rows):
        raise ShapeError(
            f"{name!r} of shape {shape} describes {found.num_rows} rows, but the batch has {rows}. Give one "
            "line for each row, or one for all."
        )
    return found


def _merge(said: Mapping[str, Documents]) -> Documents | None:
    """Check that declarations agree and return one, if possible one with a line for each row."""
    if not said:
        return None
    name, found = max(said.items(), key=lambda item: item[1].num_rows)
    for other, documents in said.items():
        alike = documents.shared and found.shared and _same_rows(documents, found)
        if documents != found and not alike:
            raise ConfigError(
                f"{name!r} and {other!r} declare different documents. Have them say the same, or take one of "
                "them out of the batch."
            )
    return found


def _same_rows(a: Documents, b: Documents) -> bool:
    return bool(np.array_equal(a.rows[0], b.rows[0]))


def _within(packed: Documents, padded: Documents) -> Documents:
    """Return the documents without padding."""
    count = max(packed.num_rows, padded.num_rows)
    rows = [
        _clip(packed.rows[row % packed.num_rows], padded.rows[row % padded.num_rows])
        for row in range(count)
    ]
    return Documents(rows, packed.seq_len)


def _clip(documents: Any, kept: Any) -> Any:
    """Clip intervals to the one that a mask keeps, if any."""
    start, end = kept[0] if len(kept) else (0, 0)
    cut = np.clip(documents, start, end)
    return cut[cut[:, 1] > cut[:, 0]]


def _text_positions(name: str, positions: torch.Tensor, rows: int | None) -> torch.Tensor | None:
    """Return the text positions, which show documents, or ``None`` for positions of another kind.

    Raises:
        ShapeError: a shape that no model takes.
    """
    of_rows = positions.dim() < 3 or rows is None or positions.shape[1] in (1, rows)
    if positions.dim() > 3 or not of_rows:
        raise ShapeError(
            f"{name!r} of shape {tuple(positions.shape)} are of no known form. What is known, for {rows} "
            "rows: [rows, tokens], [tokens], and [3 or 4, rows, tokens] of models for images."
        )
    return text_positions(positions)


def _restart_at_same_tokens(positions: torch.Tensor) -> bool:
    """True if all positions [..., rows, S] of some token restart at 0, and count on from there."""
    zero = (positions == 0).flatten(0, -3).all(0)
    return bool((~zero[:, :-2] & zero[:, 1:-1] & ~zero[:, 2:]).any())


def _restart_elsewhere(positions: torch.Tensor, packed: Documents) -> bool:
    """True if positions [rows, S] restart, and at other places than where documents begin.

    Positions without a restart declare nothing. A restart that does not count on is padding.
    """
    step = np.diff(positions.detach().cpu().numpy(), axis=-1)
    restarts = (step[:, :-1] < 0) & (step[:, 1:] == 1)
    if not restarts.any():
        return False
    for index in range(max(len(step), packed.num_rows)):
        row = index % len(step)
        starts = packed.rows[index % packed.num_rows][1:, 0]
        at = np.flatnonzero(restarts[row]) + 1
        if not np.isin(at, starts).all() or (step[row, starts - 1] == 1).any():
            return True
    return False


def _check_no_padded_targets(mask: torch.Tensor, whole: WholeBatch) -> None:
    """Check that no target stands on padding behind a row.

    In one process that padding sees the row, and its loss counts; here it sees nothing. Padding before a row
    sees nothing in one process either, so the target that shifting puts on its last token is accepted.
    """
    if whole.aligned_labels is None:
        return
    targets = (whole.aligned_labels != IGNORED_LABEL).movedim(whole.label_dim, -1)
    behind = (mask == 0) & (mask.cumsum(-1) > 0)
    if targets.dim() > 2:  # several per token
        targets = targets.flatten(1, -2).any(1)
    count = int((behind & targets).sum())
    if count:
        raise ConfigError(
            f"{count} target(s) of this batch stand on padding (attention_mask 0 behind a row's tokens), "
            "which is not computed under context parallelism. Set the labels of padding to -100."
        )

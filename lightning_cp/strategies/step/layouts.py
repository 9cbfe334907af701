"""The layout of a batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from lightning_cp.batch import BatchRules, WholeBatch, documents_of
from lightning_cp.layout import CostModel, LayoutChoice, Mask, SequenceLayout, explain_layout
from lightning_cp.layout.choose import DEFAULT_COST
from lightning_cp.layout.sequence import CAUSAL, LayoutKind
from lightning_cp.mesh import ContextParallelMesh


@dataclass(frozen=True)
class LayoutRule:
    """The choice of a layout for batches: by what is known before the run, and the batch itself.

    Nothing that earlier steps have shown goes in, so that a run that resumes repeats what it did.
    """

    kind: str = "auto"
    """``auto``, or a kind of layout."""
    mask: Mask = CAUSAL
    """What the model's attention is expected to ask for."""
    cost: CostModel = DEFAULT_COST


def layout_of(
    whole: WholeBatch, rules: BatchRules, rule: LayoutRule, mesh: ContextParallelMesh
) -> LayoutChoice:
    """The layout of a batch: its length, the mesh, and its documents.

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
        choice.layout.require_unpadded()
    return choice

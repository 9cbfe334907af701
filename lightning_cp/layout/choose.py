"""``layout="auto"``: which layout a batch gets, and why.

Two cases need no arithmetic: one causal document (zigzag is exactly even), and one document that everybody
sees (contiguous is, in one message per hop). For windows, packed and padded rows the layout with the least
predicted cost is taken: even compute is worth nothing if the keys that it wakes take longer to travel.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from lightning_cp.layout.balance import useful_counts
from lightning_cp.layout.cost import CostModel
from lightning_cp.layout.documents import Documents
from lightning_cp.layout.mask import Mask
from lightning_cp.layout.sequence import CAUSAL, SequenceLayout
from lightning_cp.layout.tiles import Schedule

DEFAULT_COST = CostModel()


@dataclass(frozen=True)
class Prediction:
    """The cost that is expected of one layout."""

    layout: SequenceLayout
    ideal: int
    """Pairs of each rank if all had equally many."""
    compute: int
    """Pairs of the busiest rank."""
    cost: int | None
    """Of the slowest rank, with what it waits for; ``None``: computing alone takes longer than the choice."""

    @property
    def busiest(self) -> str:
        """Pairs of the busiest rank; 1 is even."""
        return f"{self.compute / max(self.ideal, 1):.2f}"

    def beside(self, least: int) -> str:
        """How much longer it takes than ``least``, the cost of what was chosen."""
        cost, bound = (self.compute, "at least ") if self.cost is None else (self.cost, "")
        return f"{name_of(self.layout)} {bound}{_longer(cost, least)} ({self.busiest})"


@dataclass(frozen=True)
class LayoutChoice:
    """A layout, and why it was taken."""

    layout: SequenceLayout
    reason: str
    predictions: tuple[Prediction, ...] = ()

    def __str__(self) -> str:
        said = f"layout {name_of(self.layout)}: {self.reason}"
        chosen = [found for found in self.predictions if found.layout == self.layout]
        if not chosen or chosen[0].cost is None:
            return said
        others = [x.beside(chosen[0].cost) for x in self.predictions if x is not chosen[0]]
        busiest = f"compute of the busiest rank {chosen[0].busiest}, 1 being even"
        return f"{said} ({busiest}){'; others: ' * bool(others)}{', '.join(others)}"


def _longer(cost: int, least: int) -> str:
    """Readable whatever the two are of: a short sequence's is waiting, many times its compute."""
    if cost == least:
        return "as long"
    percent = 100 * (cost - least) / max(least, 1)
    if percent < 0.1:
        return "under 0.1% longer"
    if percent >= 1000:
        return f"{cost / max(least, 1):,.0f} times as long"
    return f"{percent:.{0 if percent >= 10 else 1}f}% longer"


def name_of(layout: SequenceLayout) -> str:
    """The kind; how many chunks, if they are dealt."""
    if layout.kind != "balanced":
        return layout.kind
    return f"balanced with {layout.chunks_per_rank} chunks a rank"


def choose_layout(
    seq_len: int,
    ring_size: int = 1,
    ulysses_size: int = 1,
    documents: Documents | None = None,
    mask: Mask = CAUSAL,
    *,
    cost: CostModel = DEFAULT_COST,
    padding: bool = True,
) -> SequenceLayout:
    """The layout that ``layout="auto"`` gives a batch; the arguments are those of ``explain_layout``."""
    return explain_layout(
        seq_len, ring_size, ulysses_size, documents, mask, cost=cost, padding=padding
    ).layout


@lru_cache(maxsize=128)
def explain_layout(
    seq_len: int,
    ring_size: int = 1,
    ulysses_size: int = 1,
    documents: Documents | None = None,
    mask: Mask = CAUSAL,
    *,
    cost: CostModel = DEFAULT_COST,
    padding: bool = True,
) -> LayoutChoice:
    """Choose a layout, and say why. The same on every rank, without communication.

    Args:
        seq_len: tokens of the sequence.
        ring_size: ranks that K/V travel around.
        ulysses_size: ranks that trade sequence for heads.
        documents: of the batch; ``None`` is one document.
        mask: what the model's attention calls are expected to ask for. Another one is as exact, and slower.
        cost: how dear communication is.
        padding: layouts that pad are allowed.

    Raises:
        ConfigError: sizes below 1.
        ShapeError: too short a sequence, or documents of another length.
    """
    sizes = (seq_len, ring_size, ulysses_size)
    contiguous = SequenceLayout(*sizes, "contiguous", documents, mask)
    zigzag = SequenceLayout(*sizes, "zigzag", documents, mask)
    if ring_size == 1:
        return LayoutChoice(contiguous, "one ring rank")
    documents = documents or Documents.single(seq_len)
    if documents.is_dense and mask.left >= seq_len - 1:
        if mask.right == 0 and (padding or zigzag.padded_len == seq_len):
            return LayoutChoice(zigzag, "one causal document")
        if mask.right >= seq_len - 1:
            return LayoutChoice(contiguous, "one document that every query sees")
    dealt = [
        SequenceLayout(*sizes, "balanced", contiguous.documents, mask, count)
        for count in _counts(SequenceLayout(*sizes, "balanced", documents, mask))
    ]
    found = [x for x in (contiguous, zigzag, *dealt) if padding or x.padded_len == seq_len]
    if not found:
        return LayoutChoice(contiguous, "least to pad")
    return _cheapest(found, documents, mask, cost)


def _counts(balanced: SequenceLayout) -> tuple[int, ...]:
    """Chunks a rank worth a prediction: one is contiguous, and more than reach the bound gain nothing."""
    counts = useful_counts(balanced.seq_len, balanced.ring_size)
    return tuple(count for count in counts if 1 < count <= balanced.chunks_per_rank)


def _cheapest(
    found: list[SequenceLayout], documents: Documents, mask: Mask, cost: CostModel
) -> LayoutChoice:
    """The least predicted cost; of equals the first. Predicts only what computing does not rule out."""
    plans = [Schedule(layout, documents, mask) for layout in found]
    compute = [max(plan.work) for plan in plans]
    costs: dict[int, int] = {}
    for index in sorted(range(len(found)), key=lambda at: compute[at]):
        if not costs or compute[index] <= min(costs.values()):
            costs[index] = cost.cost(plans[index])
    best = min(sorted(costs), key=lambda at: costs[at])
    ideal = sum(plans[0].work) // len(plans[0].work)
    predictions = tuple(
        Prediction(layout, ideal, compute[at], costs.get(at)) for at, layout in enumerate(found)
    )
    return LayoutChoice(found[best], "the least predicted time", predictions)

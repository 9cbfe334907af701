"""Mistakes in layouts, documents and schedules: who holds, sees, computes and sends what."""

from __future__ import annotations

from tests.nightly.mutants.mutant import Mutant
from tests.nightly.mutants.selections import COVER, DESCRIPTIONS, layout

COLUMNS = "lightning_cp/layout/tile_arrays.py"
DOCUMENTS = "lightning_cp/layout/documents.py"
TILES = "lightning_cp/layout/tiles.py"
GATHERED = "lightning_cp/layout/exchange.py"
BALANCE = "lightning_cp/layout/balance.py"
NEAR = "lightning_cp/layout/balance.py"

LAYOUT_MUTANTS = (
    Mutant(
        "zigzag off by one",
        "lightning_cp/layout/sequence.py",
        "last = 2 * ring_size - 1",
        "last = 2 * ring_size - 2",
        (layout("sequence.py::test_every_token_is_on_exactly_one_rank"),),
        "A chunk is trained on twice and another one never.",
    ),
    Mutant(
        "wrong position offset",
        COLUMNS,
        "delta=q_from - k_from,",
        "delta=q_first - k_first,",
        (COVER,),
        "A trimmed tile has its diagonal elsewhere.",
    ),
    Mutant(
        "a trimmed tile one query short",
        COLUMNS,
        "np.minimum(q_end, k_end + left)",
        "np.minimum(q_end, k_end + left - 1)",
        (COVER,),
        "The last query of a window loses a key at a tile's edge only.",
    ),
    Mutant(
        "a key one token ahead of a window is seen",
        COLUMNS,
        "ahead = k_to - 1 - q_from <= right",
        "ahead = k_to - 1 - q_from <= right + 1",
        (COVER,),
        "A tile that ends one key behind its window is called full; causal tiles are right.",
    ),
    Mutant(
        "a document one token too long",
        COLUMNS,
        "np.minimum(start[owner] + length[owner], intervals[document, 1])",
        "np.minimum(start[owner] + length[owner], intervals[document, 1] + 1)",
        (COVER,),
        "Each document sees the first token of the next one.",
    ),
    Mutant(
        "distances of joined tiles",
        "lightning_cp/layout/mask.py",
        "return not self.uses_distance and self.window == (-1, -1)",
        "return self.window == (-1, -1)",
        (layout("tiles.py::test_joining_needs_scores_without_distance"),),
        "ALiBi measures the distance in local places once zigzag's tiles are joined.",
    ),
    Mutant(
        "cu_seqlens off by one",
        DOCUMENTS,
        "pairs = np.stack([cu[:-1], cu[1:]], axis=1)",
        "pairs = np.stack([cu[:-1], cu[1:] - 1], axis=1)",
        (DESCRIPTIONS,),
        "The last token of every document becomes padding.",
    ),
    Mutant(
        "documents begin where positions end",
        DOCUMENTS,
        "np.flatnonzero(np.diff(row) != 1) + 1]",
        "np.flatnonzero(np.diff(row) != 1)]",
        (DESCRIPTIONS,),
        "The last token of every document belongs to the next one.",
    ),
    Mutant(
        "padding mask ignored",
        DOCUMENTS,
        "rows.append(edges.reshape(-1, 2).astype(np.int64))",
        "rows.append(np.array([[0, row.size]], dtype=np.int64))",
        (layout("documents.py::test_padding_left_and_right"),),
        "Left padding is attended to: it is causal's past.",
    ),
    Mutant(
        "all rows have the first row's documents",
        DOCUMENTS,
        "return self._distinct == 1",
        "return True",
        (COVER,),
        "Right in every test with a batch of one.",
    ),
    Mutant(
        "keys for the wrong rank",
        TILES,
        "send = needed[dest] if index else ()",
        "send = needed[source] if index else ()",
        (layout("exchange.py::test_hops_pair_up"),),
        "Symmetric for dense rows; with documents ranks wait for other sizes, or take other keys.",
    ),
    Mutant(
        "received keys where their owner has them",
        TILES,
        "shift = np.cumsum(sizes) - sizes - starts",
        "shift = np.zeros_like(starts)",
        (layout("exchange.py::test_packed_tiles_point_at_the_same_keys"),),
        "Tiles read the keys of other positions once only some ranges travel.",
    ),
    Mutant(
        "shift of fused tiles",
        GATHERED,
        "shifts = [sum(lengths[:index]) for index in range(len(lengths))]",
        "shifts = [sum(lengths[:index]) - bool(index) for index in range(len(lengths))]",
        (layout("gathered.py::test_calls_cover_each_visible_pair_once[fused]"),),
        "The late chunk sees every key but one, and one of another slice.",
    ),
    Mutant(
        "rank order taken for sequence order",
        GATHERED,
        "order = np.argsort(starts)",
        "order = np.arange(starts.size)",
        (layout("gathered.py::test_rank_order_laid_end_to_end_is_the_sequence"),),
        "Right for contiguous shards, wrong for zigzag.",
    ),
    Mutant(
        "a chunk dealt twice",
        BALANCE,
        "owner[give], owner[take] = owner[take], busiest",
        "owner[give] = owner[take]",
        (layout("balance.py::test_every_rank_gets_the_same_number_of_chunks"),),
        "Ranks hold different numbers of tokens.",
    ),
    Mutant(
        "areas of one row only",
        BALANCE,
        "    for intervals in rows:",
        "    for intervals in rows[:1]:",
        (layout("balance.py::test_packed_rows_are_even[32768-4-40-3-causal]"),),
        "Exact, and as slow as without balancing.",
    ),
    Mutant(
        "keys of a document's first chunk counted as sent",
        NEAR,
        "return needed - int(self.behind[opening[own]].sum())",
        "return needed",
        (layout("balance.py::test_keys_needed_are_those_of_the_schedule[8-0]"),),
        "Deals are compared by keys that nobody sends.",
    ),
    Mutant(
        "a document's rank is never full",
        NEAR,
        "if room[rank] and loads[rank] + weight <= most]",
        "if room[rank]]",
        (layout("balance.py::test_documents_are_kept_together"),),
        "Long documents make their ranks too busy, so that the deal is seldom taken.",
    ),
    Mutant(
        "documents kept together at any price",
        BALANCE,
        "return near if even and chunk_documents.keys_needed(near) < needed else owner",
        "return near",
        (layout("balance.py::test_never_more_keys_for_it"),),
        "More keys travel than without, or a rank has too much work.",
    ),
    Mutant(
        "padding counted as work",
        BALANCE,
        "queries = np.clip(cuts - starts[inside], 0, lengths[inside])",
        "queries = np.maximum(cuts - starts[inside], 0)",
        (layout("balance.py::test_areas_are_counted_pairs"),),
        "Rows that end in padding are dealt unevenly.",
    ),
)

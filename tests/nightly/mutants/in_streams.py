"""Mistakes in the order of a ring, in its time, in rotations, and in what the planner makes of them."""

from __future__ import annotations

from tests.nightly.mutants.mutant import Mutant
from tests.nightly.mutants.selections import layout, modes, planner, streams

RING = "lightning_cp/attention/ring.py"
STREAMS = "lightning_cp/layout/streams.py"
NODES = "lightning_cp/layout/nodes.py"
ROTATION = modes("rotation 3 zigzag")
ORDER = streams("ranks_follow_the_order_and_none_waits_for_ever[ring-zigzag-3-2]")
SLOW = streams("one_slow_rank_holds_up_those_that_it_sends_to")
COST = streams("cost_is_the_longest_path_through_what_the_code_does")

STREAM_MUTANTS = (
    Mutant(
        "gradients awaited at once",
        RING,
        "        self._pending = (transfer, hop)\n\n    def finish",
        "        self._pending = (transfer, hop)\n        self._receive(self._own)\n\n    def finish",
        (ORDER,),
        "Results are right, and nothing is computed while gradients travel.",
    ),
    Mutant(
        "a rotation of each rank's own keys",
        RING,
        "sent = keys if self._plan.rotates else self._own",
        "sent = self._own",
        (ROTATION,),
        "Every hop brings the neighbour's keys again.",
    ),
    Mutant(
        "sums of a rotation stay where they arrive",
        RING,
        "self._receive(gradients if self._plan.rotates else self._own)",
        "self._receive(self._own)",
        (ROTATION,),
        "A rank's keys get the gradients of other keys.",
    ),
    Mutant(
        "a rotation the other way round for gradients",
        RING,
        "(hop.dest, hop.source) if self._plan.rotates else (hop.source, hop.dest)",
        "(hop.source, hop.dest)",
        (streams("ranks_follow_the_order_and_none_waits_for_ever[rotation-zigzag-3-2]"),),
        "Sums of gradients and keys go apart.",
    ),
    Mutant(
        "the last gradients are hidden",
        STREAMS,
        "    if backward and hops > 1:",
        "    if backward and hops > 99:",
        (COST,),
        "The planner promises more overlap than there is.",
    ),
    Mutant(
        "a transfer begins without its receiver",
        STREAMS,
        "np.maximum(begins, begins[dest]) + sending",
        "begins + sending",
        (SLOW,),
        "Uneven hops look as good as even ones.",
    ),
    Mutant(
        "each transfer on a stream of its own",
        STREAMS,
        "begins = np.maximum(now, free)",
        "begins = now",
        (COST,),
        "Keys and gradients would travel at once.",
    ),
    Mutant(
        "cards that only send",
        NODES,
        "np.maximum(_sums(source, entries), _sums(target, entries))",
        "_sums(source, entries)",
        (layout("nodes.py::test_cards_carry_what_their_devices_send_to_other_nodes"),),
        "A node that receives from several others looks idle.",
    ),
    Mutant(
        "pinned memory as large as its tensors",
        "lightning_cp/planner/memory.py",
        "1 << (size * step.tokens - 1).bit_length()",
        "size * step.tokens",
        (planner("communicators.py::test_pinned_blocks_are_powers_of_two"),),
        "A host runs out of memory at half of what was planned.",
    ),
    Mutant(
        "a rotation with as many peers as a ring",
        "lightning_cp/planner/communicators.py",
        'most = 1 if choice.exchange == "rotation" else mesh.ring - 1',
        "most = mesh.ring - 1",
        (planner("communicators.py::test_connections_by_hand"),),
        "Buffers of connections that nobody makes are counted.",
    ),
)

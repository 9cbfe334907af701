"""Mistakes in how tensors travel: ring, Ulysses and all-gather, forward and backward."""

from __future__ import annotations

from tests.nightly.mutants.mutant import Mutant
from tests.nightly.mutants.selections import late, modes, moved, sends

RING = "lightning_cp/attention/ring.py"
GATHER = "lightning_cp/attention/all_gather.py"
ULYSSES = "lightning_cp/attention/ulysses.py"
KEYS = "lightning_cp/attention/keys.py"
COMM_RING = "lightning_cp/comm/transfer.py"
COMM_GATHER = "lightning_cp/comm/all_gather.py"
ALL_TO_ALL = "lightning_cp/comm/all_to_all.py"

SHARDS = "tests/ranks/comm/test_transfers.py::test_shards_are_sent_from_dense_memory_that_lives"
COLLECTIVES = "tests/ranks/comm/test_collectives.py::test"
RING_2 = modes("ring 2 zigzag")
GATHER_2 = modes("gather 2 zigzag two_kernel/two_kernel 1")

EXCHANGE_MUTANTS = (
    Mutant(
        "keys and values swapped",
        KEYS,
        "return kv[..., :key_dim], kv[..., key_dim:]",
        "return kv[..., -key_dim:], kv[..., :-key_dim]",
        (modes("ulysses 2"),),
        "Shapes are equal, and a model learns something anyway.",
    ),
    Mutant(
        "last hop skipped",
        RING,
        "    if tiles:\n        k, v = kernel_keys(",
        "    if tiles and hop.index + 1 < len(plan.hops):\n        k, v = kernel_keys(",
        (modes("ring 3 zigzag"),),
        "Queries miss the keys of one rank: a slightly worse model.",
    ),
    Mutant(
        "gradients of keys stay abroad",
        RING,
        "gradients.add(start, part)",
        "gradients.add(start, torch.zeros_like(part))",
        (RING_2,),
        "The loss is right; keys learn from local queries only.",
    ),
    Mutant(
        "gradients overwritten while they are sent",
        RING,
        "        self._pending = (transfer, hop)",
        "        self._pending = (transfer, hop)\n        _ = sent is None or sent.mul_(0.0)",
        (moved("ring 3 zigzag-torch.float64"),),
        "A buffer that is used again before its transfer has ended; seldom seen.",
    ),
    Mutant(
        "keys used before they arrived",
        COMM_RING,
        "            wait_for(*self.works)",
        "            pass",
        (late("ring 2 zigzag"),),
        "On one node the data is nearly always there; a slow link makes a model of whatever memory held.",
    ),
    Mutant(
        "heads used before they arrived",
        ALL_TO_ALL,
        "                wait_for(self._work)",
        "                pass",
        (late("ulysses 2"),),
        "Likewise, over Ulysses.",
    ),
    Mutant(
        "gathered keys used before they arrived",
        COMM_GATHER,
        "                wait_for(self._work)",
        "                pass",
        (late("gather 2 zigzag two_kernel/two_kernel 1"),),
        "Likewise, with an all-gather.",
    ),
    Mutant(
        "gradients scattered from memory that is used again",
        COMM_GATHER,
        "    return PendingShards(total, whole, work, name=",
        "    whole.zero_()\n    return PendingShards(total, whole, work, name=",
        (
            "tests/ranks/attention/test_late_delivery.py::test_a_reduce_scatter_of_nccl_is_waited_for_too",
        ),
        "A branch that gloo does not take; with NCCL the zeros may travel.",
    ),
    Mutant(
        "heads overwritten while they are sent",
        ALL_TO_ALL,
        "    return AllToAll(received, send, work, lambda whole: _section_views(whole, sections, rank))",
        "    send.zero_()\n"
        "    return AllToAll(received, send, work, lambda whole: _section_views(whole, sections, rank))",
        (late("ulysses 2"),),
        "A buffer that is used again before its all-to-all has ended.",
    ),
    Mutant(
        "send buffer given up",
        COMM_RING,
        "return Transfer(received, send, works)",
        "return Transfer(received, None, works)",
        ("tests/ranks/comm/test_transfers.py::test_a_send_buffer_lives_until_it_was_waited_for",),
        "The allocator hands the memory out while it is being sent.",
    ),
    Mutant(
        "send buffer of an all-to-all given up",
        ALL_TO_ALL,
        "return AllToAll(received, send, work, lambda whole: _section_views(whole, sections, rank))",
        "return AllToAll(received, None, work, lambda whole: _section_views(whole, sections, rank))",
        (
            "tests/ranks/comm/test_transfers.py::test_the_buffer_of_an_all_to_all_lives_until_it_was_waited_for",
        ),
        "Likewise, over Ulysses.",
    ),
    Mutant(
        "values sent in the place of keys",
        ALL_TO_ALL,
        "for place, x_BLHD in zip(places, xs, strict=True):",
        "for place, x_BLHD in zip(places, xs[::-1], strict=True):",
        ("tests/ranks/comm/test_collectives.py::test_one_message_brings_what_several_bring",),
        "Shapes are equal, and only a message of several tensors shows it.",
    ),
    Mutant(
        "group of the wrong axis",
        RING,
        "group = self._plan.mesh.group(Axis.RING)",
        "group = self._plan.mesh.group(Axis.ULYSSES)",
        (modes("hybrid 2x2 zigzag"),),
        "With equal sizes keys go to ranks with other heads, and nothing complains.",
    ),
    Mutant(
        "gradients travel in the dtype of the inputs",
        KEYS,
        "self.dtype, self.device = dtype, ",
        "self.dtype, self.device = keys.tensors[0].dtype, ",
        ("tests/ranks/attention/test_rounding.py::test_gradients_travel_rounded[ring 4 zigzag]",),
        "Sums on their way are rounded at every hop.",
    ),
    Mutant(
        "gradients that came as they are not put into the message",
        "lightning_cp/kernels/merge.py",
        "            memory.copy_(self._sum)",
        "            pass",
        (RING_2,),
        "What travels is whatever the memory held; right where several tiles add up in it.",
    ),
    Mutant(
        "what forward saved is kept through backward",
        "lightning_cp/attention/function.py",
        "        ctx.maybe_clear_saved_tensors()\n",
        "",
        (
            "tests/unit/attention/test_memory.py::test_what_forward_saved_is_gone_while_gradients_travel",
        ),
        "Right, with the memory of q, K, V and out more.",
    ),
    Mutant(
        "shared gradients rounded before they are summed",
        ULYSSES,
        "if not plan.heads.shares_kv or dtype == wide:",
        "if True:",
        (sends("ulysses 2"),),
        "K/V heads that ranks share are rounded once per rank.",
    ),
    Mutant(
        "gradients of shared heads overwritten",
        ALL_TO_ALL,
        "own[..., :shared, :] += came[..., :shared, :]",
        "own[..., :shared, :] = came[..., :shared, :]",
        (
            "tests/ranks/comm/test_collectives.py::test_heads_are_scattered_and_gathered_by_adjoints",
        ),
        "With fewer K/V heads than ranks only one rank's queries teach them.",
    ),
    Mutant(
        "heads of a slice sent as they lie",
        COMM_GATHER,
        "gather(received, own, group=group, async_op=True)",
        "gather(received, parts[0], group=group, async_op=True)",
        (f"{SHARDS}[all_gather]",),
        "gloo copies them by itself, NCCL takes dense memory only.",
    ),
    Mutant(
        "send buffer of a reduce-scatter given up",
        COMM_GATHER,
        "return PendingShards(received, sent, work, finish",
        "return PendingShards(received, received, work, finish",
        (f"{SHARDS}[reduce_scatter]",),
        "The allocator hands the gradients' memory out while they are being sent.",
    ),
    Mutant(
        "gradients scattered in sequence order",
        COMM_GATHER,
        "_copy_to_rank_order(x, order, [(0, len(x), whole)])",
        "whole.copy_(x)",
        (f"{COLLECTIVES}_what_lies_apart_travels_in_rank_order[scatter_as_with_nccl]",),
        "With NCCL alone keys get gradients of other positions; no test on gloo comes by.",
    ),
    Mutant(
        "own shard put in order from its first key",
        COMM_GATHER,
        "place[low - first : high - first] = x",
        "place[: high - low] = x",
        (f"{COLLECTIVES}_what_lies_apart_travels_in_rank_order[scatter_in_another_order]",),
        "Right while each place takes one range; in zigzag the late half lands on the early one.",
    ),
    Mutant(
        "gradients of overlapping slices overwritten",
        GATHER,
        "part += copy  # slices overlap",
        "part.copy_(copy)  # slices overlap",
        (modes("gather 2 zigzag fused/fused 2"),),
        "Keys that both chunks see learn from the late one only.",
    ),
    Mutant(
        "wrong head block gathered",
        GATHER,
        "keys.of_heads(*block.kv) for block in blocks",
        "keys.of_heads(0, block.kv[1] - block.kv[0]) for block in blocks",
        (GATHER_2,),
        "All heads attend to the first heads' keys; right when gathered at once.",
    ),
    Mutant(
        "gradients go home in sequence order",
        GATHER,
        "self._group, order=self._order)",
        "self._group)",
        (GATHER_2,),
        "The forward is right; keys get gradients of other positions.",
    ),
    Mutant(
        "own gradients only",
        COMM_GATHER,
        "        total += shard\n",
        "        total += 0 * shard\n",
        (GATHER_2,),
        "Keys learn from the queries of one rank.",
    ),
    Mutant(
        "slopes of the first Ulysses rank",
        "lightning_cp/attention/plan.py",
        "scores = every.of_heads(*heads.q_range(mesh.ulysses_rank))",
        "scores = every.of_heads(*heads.q_range(0))",
        (modes("ulysses 2", "reference"),),
        "Heads of other ranks get the biases of the first heads.",
    ),
    Mutant(
        "sinks of the first Ulysses rank",
        "lightning_cp/attention/plan.py",
        "first, last = self.heads.q_range(self.ulysses_rank)",
        "first, last = self.heads.q_range(0)",
        (modes("ulysses 2"),),
        "Likewise.",
    ),
    Mutant(
        "sink gradient dropped",
        "lightning_cp/attention/function.py",
        "dsinks = sink_gradients(*for_sinks, plan.heads, plan.ulysses_rank)",
        "dsinks = torch.zeros_like(plan.sinks)",
        (RING_2,),
        "Sinks never learn.",
    ),
    Mutant(
        "agreement after data has moved",
        "lightning_cp/attention/api.py",
        "    _agree_on_call(mesh, facts, error)",
        "    if plan is not None:\n"
        "        attend(q_BLHD, k_BLKD, v_BLKD, plan)\n"
        "    _agree_on_call(mesh, facts, error)",
        (
            "tests/ranks/attention/test_agreement.py::"
            "test_a_different_call_is_named_on_every_rank[kernel-ring 2 zigzag]",
        ),
        "Ranks that disagree exchange garbage, or wait for each other, before they could tell.",
    ),
    Mutant(
        "kept results replayed from the first layer",
        "lightning_cp/attention/checkpointing.py",
        "self._next += 1",
        "self._next += 0",
        (
            "tests/ranks/attention/test_keep.py::"
            "test_every_way_gives_the_same_bits[ring 2 zigzag-reference-2-1]",
        ),
        "With checkpointing every layer's gradients come from the first layer's attention.",
    ),
    Mutant(
        "windows delegated to ring-flash-attn",
        "lightning_cp/attention/ring_flash_attn_support.py",
        "if spec.window != (-1, -1):",
        "if len(spec.window) != 2:",
        ("tests/ranks/attention/test_ring_flash_attn.py::test_refused_by_name[window]",),
        "It applies the window to each hop by itself: other tokens are seen, or NaN.",
    ),
    Mutant(
        "a message of keys sent again for other ranges",
        "lightning_cp/attention/ring.py",
        "if self._message is None or self._message[0] != ranges:",
        "if self._message is None:",
        (
            "tests/ranks/attention/test_traffic.py::test_equal_ranges_of_keys_are_packed_once_in_each_pass",
        ),
        "Ranks of a causal ring attend to the keys that another rank asked for.",
    ),
    Mutant(
        "keys of each hop packed anew",
        "lightning_cp/attention/ring.py",
        "            self._message = (ranges, keys.message(ranges))\n        return self._message[1]",
        "            self._message = None\n        return keys.message(ranges)",
        (
            "tests/ranks/attention/test_traffic.py::test_equal_ranges_of_keys_are_packed_once_in_each_pass",
        ),
        "A copy of a rank's keys and values for each hop, where one would do.",
    ),
    Mutant(
        "gradients of keys always travel in the compute dtype",
        "lightning_cp/attention/ring.py",
        "q_TBHD.dtype if is_narrow else dq.dtype",
        "q_TBHD.dtype",
        (
            "tests/ranks/attention/test_traffic.py::test_sends_what_the_schedule_says[ring 2 zigzag]",
        ),
        "bfloat16 gradients of keys are rounded at each hop although nobody asked for it.",
    ),
    Mutant(
        "gradients of keys never travel in the compute dtype",
        "lightning_cp/attention/ring.py",
        "q_TBHD.dtype if is_narrow else dq.dtype",
        "dq.dtype",
        (
            "tests/ranks/attention/test_traffic.py::test_gradients_of_keys_travel_in_the_compute_dtype",
        ),
        'key_gradients="compute" sends twice the bytes that the planner says.',
    ),
)

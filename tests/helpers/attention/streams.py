"""The attention code's own posts, waits and computes, of every rank of a mesh, without a process for any.

The code runs as one rank after the other, on tensors of a few numbers: transfers are noted and not sent, and
the kernel computes nothing. ``Graph`` puts the ranks' programs together by NCCL's rule: a communicator's
transfers run on one stream in the order of their posts; a post waits for what was computed before it; a wait
holds computing back; a transfer between two ranks begins when both have come to it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from graphlib import TopologicalSorter
from typing import Any, Literal, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist

from lightning_cp.attention.function import ContextParallelAttention
from lightning_cp.attention.plan import AttentionPlan
from lightning_cp.kernels.protocol import Scores
from lightning_cp.layout import HeadSplit, Schedule, Tile, gathered_schedule
from lightning_cp.layout.axes import Axis
from lightning_cp.layout.exchange import Exchange, ring_hops
from lightning_cp.layout.streams import GRADIENTS, gather_order, ring_order

NARROW, WIDE = torch.bfloat16, torch.float32
"""Dtypes of the inputs, and of the gradients that travel."""
Sizes = tuple[tuple[int, int], ...]
"""(rank of the group, entries of a message), by rank."""


class Event(NamedTuple):
    """One thing that a rank does."""

    what: Literal["post", "wait", "compute"]
    number: int
    """Of the post that it is or waits for; of a compute, how many came before it."""
    axis: Axis | None = None
    sends: Sizes = ()
    receives: Sizes = ()
    tiles: tuple[Tile, ...] = ()
    dtype: torch.dtype | None = None
    """Of a transfer over the ring: gradients are wide."""

    def without_sizes(self) -> Event:
        """The event, of Ulysses without messages."""
        if self.axis is not Axis.ULYSSES:
            return self
        return self._replace(sends=(), receives=(), dtype=None)


Program = list[Event]


@dataclass(frozen=True)
class Place:
    """A rank's place in a mesh, as much of it as attention asks for; its groups are the axes."""

    ring_size: int
    ulysses_size: int
    rank: int

    @property
    def ring_rank(self) -> int:
        return self.rank // self.ulysses_size

    @property
    def ulysses_rank(self) -> int:
        return self.rank % self.ulysses_size

    def group(self, axis: Axis) -> Group:
        if axis is Axis.RING:
            return Group(axis, self.ring_size, self.ring_rank)
        return Group(axis, self.ulysses_size, self.ulysses_rank)

    def global_rank(self, axis: Axis, peer: int) -> int:
        """The rank of the mesh that is ``peer`` in this rank's group."""
        if axis is Axis.RING:
            return peer * self.ulysses_size + self.ulysses_rank
        return self.ring_rank * self.ulysses_size + peer


class Group(NamedTuple):
    """A process group of nobody."""

    axis: Axis
    ranks: int
    own: int

    def size(self) -> int:
        return self.ranks

    def rank(self) -> int:
        return self.own


class _P2POp(NamedTuple):
    op: Any
    tensor: torch.Tensor
    group: Group
    group_peer: int


class _Work(NamedTuple):
    wait: Callable[[], None]


@dataclass
class Recorder:
    """Notes what a rank does; also the kernel of its plan."""

    program: Program = field(default_factory=list)
    name: str = "recorder"
    _counts: dict[str, int] = field(default_factory=dict)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Replace PyTorch's transfers in the block."""
        gathers = ("all_gather_into_tensor", "all_gather_single")
        scatters = ("reduce_scatter_tensor", "reduce_scatter_single")
        calls: dict[str, Any] = {
            "P2POp": _P2POp,
            "batch_isend_irecv": self._point_to_point,
            "all_to_all_single": self._all_to_all,
            **dict.fromkeys(gathers, self._collective),
            **dict.fromkeys(scatters, self._collective),
            "get_backend": lambda _: "nccl",
        }
        with ExitStack() as stack:
            for name, call in calls.items():
                if hasattr(dist, name):
                    stack.enter_context(mock.patch.object(dist, name, call))
            yield

    def end(self) -> Program:
        """The program so far; the next one begins."""
        ended, self.program = self.program, []
        self._counts.clear()
        return ended

    def forward(self, inputs: Any, tiles: Sequence[Tile], *_: Any) -> None:
        """Note a call of the kernel."""
        self.program.append(Event("compute", self._next("compute"), tiles=tuple(tiles)))

    def backward(self, merged: Any, inputs: Any, tiles: Sequence[Tile], *_: Any) -> None:
        """Likewise."""
        self.forward(inputs, tiles)

    def _next(self, what: str) -> int:
        self._counts[what] = self._counts.get(what, -1) + 1
        return self._counts[what]

    def _post(self, axis: Axis, sends: Sizes, receives: Sizes, dtype: torch.dtype) -> Any:
        number = self._next("post")
        self.program.append(Event("post", number, axis, sends, receives, dtype=dtype))
        wait = Event("wait", number, axis, dtype=dtype)
        return _Work(partial(self.program.append, wait))

    def _point_to_point(self, ops: list[_P2POp]) -> list[Any]:
        assert all(op.tensor.numel() for op in ops), "an empty message"
        sends, receives = (
            tuple((op.group_peer, op.tensor.numel()) for op in ops if op.op is kind)
            for kind in (dist.isend, dist.irecv)
        )
        return [self._post(ops[0].group.axis, sends, receives, ops[0].tensor.dtype)]

    def _all_to_all(
        self,
        into: torch.Tensor,
        sent: torch.Tensor,
        output_split_sizes: list[int],
        input_split_sizes: list[int],
        group: Group,
        async_op: bool,
    ) -> Any:
        assert async_op
        assert (into.shape[0], sent.shape[0]) == (sum(output_split_sizes), sum(input_split_sizes))
        sends, receives = _others(group, input_split_sizes), _others(group, output_split_sizes)
        return self._post(group.axis, sends, receives, sent.dtype)

    def _collective(
        self, into: torch.Tensor, sent: torch.Tensor, group: Group, async_op: bool
    ) -> Any:
        """All-gather, or reduce-scatter: every rank sends a shard to every other one."""
        assert async_op
        shard = min(into.numel(), sent.numel())
        each = _others(group, [shard] * group.ranks)
        return self._post(group.axis, each, each, sent.dtype)


def _others(group: Group, sizes: Sequence[int]) -> Sizes:
    return tuple((rank, size) for rank, size in enumerate(sizes) if rank != group.own)


def record(
    plan: Schedule,
    heads: tuple[int, int],
    exchange: Exchange,
    ranks: Sequence[int] | None = None,
) -> list[tuple[Program, Program]]:
    """What each rank does in forward and in backward of an attention call with head dims of 1."""
    layout = plan.layout
    split = HeadSplit(*heads, layout.ulysses_size)
    batch, local = plan.documents.num_rows, layout.local_len
    found: list[tuple[Program, Program]] = []
    for rank in range(layout.cp_size) if ranks is None else ranks:
        place, recorder = Place(layout.ring_size, layout.ulysses_size, rank), Recorder()
        scores = Scores(1.0, plan.mask)
        call: Any = AttentionPlan(place, split, plan, scores, recorder, exchange)  # type: ignore[arg-type]
        q, k, v = (
            torch.zeros(batch, local, n, 1, dtype=NARROW, requires_grad=True)
            for n in (heads[0], heads[1], heads[1])
        )
        with recorder.watching():
            out: Any = ContextParallelAttention.apply(q, k, v, None, call, None)
            forward = recorder.end()
            torch.autograd.grad(out[0], (q, k, v), torch.zeros_like(out[0]))
        found.append((forward, recorder.end()))
    return found


Node = tuple[int, int, str]
"""(rank, place in its program, ``begin`` or ``end``)."""


@dataclass
class Graph:
    """All ranks' events, and what each of them comes after.

    Args:
        programs: of every rank of the mesh.
        places: of these ranks.
        seconds: of a compute, by its rank and event.
        flow: of a transfer, by sender, receiver, post and entries.
    """

    programs: Sequence[Program]
    places: Sequence[Place]
    seconds: Callable[[int, Event], int] = lambda rank, event: 1
    flow: Callable[[int, int, Event, int], int] = lambda source, dest, event, entries: 1
    before: dict[Node, list[tuple[Node, int]]] = field(default_factory=lambda: defaultdict(list))

    def __post_init__(self) -> None:
        for rank, program in enumerate(self.programs):
            self._add(rank, program)
        self._match()

    def _add(self, rank: int, program: Program) -> None:
        """Add one rank's streams."""
        streams: dict[Axis | None, Node] = {}
        posts: dict[int, Node] = {}
        for at, event in enumerate(program):
            begin, end = (rank, at, "begin"), (rank, at, "end")
            stream = event.axis if event.what == "post" else None
            self.before[begin] += [
                (last, 0) for last in (streams.get(stream), streams.get(None)) if last
            ]
            self.before[end].append(
                (begin, self.seconds(rank, event) if event.what == "compute" else 0)
            )
            if event.what == "wait":
                self.before[begin].append((posts.pop(event.number), 0))
            if event.what == "post":
                posts[event.number] = end
            streams[stream] = end
        assert not posts, f"rank {rank} never waits for {sorted(posts)}"

    def _match(self) -> None:
        """Let transfers begin when both ranks have come to them: two ranks' messages match in their order."""
        sent, received = self._messages("sends"), self._messages("receives")
        assert set(sent) == set(received), set(sent) ^ set(received)
        for (_, source, dest), posts in sent.items():
            awaited = received[_, source, dest]
            assert [size for _, size in posts] == [size for _, size in awaited], (source, dest)
            for (one, size), (other, _) in zip(posts, awaited, strict=True):
                event = self.programs[source][one[1]]
                seconds = self.flow(source, dest, event, size)
                for end in (one, other):
                    ended = (*end[:2], "end")
                    self.before[ended] += [(begin, seconds) for begin in (one, other)]

    def _messages(self, kind: str) -> dict[tuple[Axis, int, int], list[tuple[Node, int]]]:
        """(begin of the post, entries) of all messages, by axis, sender and receiver, in order."""
        found: dict[tuple[Axis, int, int], list[tuple[Node, int]]] = defaultdict(list)
        for rank, (program, place) in enumerate(zip(self.programs, self.places, strict=True)):
            for at, event in enumerate(program):
                for peer, size in getattr(event, kind):
                    assert event.axis is not None
                    other = place.global_rank(event.axis, peer)
                    ends = (rank, other) if kind == "sends" else (other, rank)
                    found[event.axis, *ends].append(((rank, at, "begin"), size))
        return found

    def order(self) -> list[Node]:
        """All events after those that they come after.

        Raises:
            graphlib.CycleError: ranks wait for each other for ever.
        """
        before = {node: [one for one, _ in ones] for node, ones in self.before.items()}
        return list(TopologicalSorter(before).static_order())

    def finish(self) -> int:
        """When the last event ends."""
        times: dict[Node, int] = {}
        for node in self.order():
            times[node] = max((times[one] + more for one, more in self.before[node]), default=0)
        return max(times.values(), default=0)


def places(plan: Schedule) -> list[Place]:
    """Every rank's place."""
    layout = plan.layout
    return [Place(layout.ring_size, layout.ulysses_size, rank) for rank in range(layout.cp_size)]


def expected(
    plan: Schedule, place: Place, heads: HeadSplit, exchange: Exchange, *, backward: bool
) -> list[Event]:
    """What a rank does in one pass by the package's orders and schedule; Ulysses' messages without sizes."""
    if exchange.name == "all_gather":
        inside = _gather(plan, place, heads, exchange, backward=backward)
    else:
        inside = _ring(plan, place, heads, exchange, backward=backward)
    if place.ulysses_size == 1:
        return _numbered(inside)
    sent = (
        1 if backward or place.ring_size == 1 else 2
    )  # a ring's keys travel apart from the queries
    home = 2 if backward and heads.shares_kv else 1  # sums of shared heads are wide
    return _numbered([*_ulysses(sent), *inside, *_ulysses(home)])


def _ulysses(messages: int) -> list[Event]:
    """All messages are posted, then awaited; what is computed meanwhile would be a compute between them."""
    return [
        Event(what, number, Axis.ULYSSES) for what in ("post", "wait") for number in range(messages)
    ]


def _numbered(events: list[Event]) -> list[Event]:
    """Number posts, and computes, in their order; waits by their posts."""
    numbers: dict[tuple[Axis | None, int], int] = {}
    found: list[Event] = []
    counts = {"post": 0, "compute": 0}
    for event in events:
        if event.what == "wait":
            number = numbers.pop((event.axis, event.number))
        else:
            number = counts[event.what]
            counts[event.what] += 1
            if event.what == "post":
                numbers[event.axis, event.number] = number
        found.append(event._replace(number=number))
    return found


def _ring(
    plan: Schedule, place: Place, heads: HeadSplit, exchange: Exchange, *, backward: bool
) -> list[Event]:
    hops, found = ring_hops(plan, place.ring_rank, exchange.name), list[Event]()
    per_key = 2 * heads.num_local_kv(place.ulysses_rank) * plan.documents.num_rows
    for what, load, index in ring_order(len(hops), backward=backward):
        hop = hops[index]
        if what == "compute":
            if hop.tiles:
                tiles = hop.packed_tiles if index else hop.tiles
                found.append(Event("compute", 0, tiles=tiles))
            continue
        sends = ((hop.dest, hop.num_sent * per_key),) if hop.send else ()
        receives = ((hop.source, hop.num_received * per_key),) if hop.recv else ()
        if load == GRADIENTS and exchange.name == "ring":  # back to where the keys came from
            sends, receives = receives, sends
        if sends or receives:
            number = 2 * index + (load == GRADIENTS)
            messages = (sends, receives) if what == "post" else ((), ())
            found.append(
                Event(
                    what, number, Axis.RING, *messages, dtype=WIDE if load == GRADIENTS else NARROW
                )
            )
    return found


def _gather(
    plan: Schedule, place: Place, heads: HeadSplit, exchange: Exchange, *, backward: bool
) -> list[Event]:
    blocks = heads.blocks(place.ulysses_rank, exchange.kv_heads_per_gather)
    gathered, found = gathered_schedule(plan, place.ring_rank), list[Event]()
    calls = gathered.calls(exchange.backward if backward else exchange.forward)
    for what, load, index in gather_order(len(blocks), backward=backward):
        if what == "compute":
            found += [Event("compute", 0, tiles=call.tiles) for call in calls]
        elif place.ring_size > 1:
            first, last = blocks[index].kv
            shard = plan.layout.ring_len * plan.documents.num_rows * 2 * (last - first)
            each = tuple((r, shard) for r in range(place.ring_size) if r != place.ring_rank)
            messages = (each, each) if what == "post" else ((), ())
            number, dtype = 2 * index + (load == GRADIENTS), WIDE if load == GRADIENTS else NARROW
            found.append(Event(what, number, Axis.RING, *messages, dtype=dtype))
    return found

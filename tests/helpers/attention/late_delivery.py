"""Delivery as late as NCCL allows, over gloo: data is there after the wait, and not before.

What is posted is NaN until it was waited for, so that a kernel which reads it early shows; what is sent is
compared with itself at the wait, so that a buffer which is used again early shows. Nothing may be left
unwaited. Collectives of torch.distributed that block are left as they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

GATHERS = ("all_gather_into_tensor", "all_gather_single")  # the name of torch 2.10, and a later one
SCATTERS = ("reduce_scatter_tensor", "reduce_scatter_single")


class LateDeliveryError(AssertionError):
    """A buffer was used, or left, in a way that NCCL punishes with wrong data."""


class LateDelivery:
    """Delays what is posted in a block of one rank."""

    def __init__(self) -> None:
        self.posts: Counter[str] = Counter()
        """Messages that were posted, by the function that posts them."""
        self._under_way: list[_Late] = []

    @contextmanager
    def delaying(self) -> Iterator[LateDelivery]:
        """Patch torch.distributed.

        Raises:
            LateDeliveryError: a message was never waited for.
        """
        posts: dict[str, Callable[..., Any]] = {
            "batch_isend_irecv": self._transfers,
            "all_to_all_single": self._collective,
            "broadcast": self._broadcast,
            **{name: self._collective for name in (*GATHERS, *SCATTERS) if hasattr(dist, name)},
        }
        with ExitStack() as stack:
            for name, post in posts.items():
                late = _bound(post, name, getattr(dist, name))
                stack.enter_context(mock.patch.object(dist, name, late))
            yield self
        if self._under_way:
            names = sorted(late.name for late in self._under_way)
            for late in self._under_way:
                late.end()  # gloo would leave its next messages waiting for these
            raise LateDeliveryError(f"never waited for: {', '.join(names)}")

    def _transfers(self, name: str, own: Callable[..., Any], ops: list[dist.P2POp]) -> list[Any]:
        comes: list[tuple[torch.Tensor, torch.Tensor]] = []
        sent: list[torch.Tensor] = []
        posted: list[dist.P2POp] = []
        for op in ops:
            tensor = op.tensor
            if op.op is dist.irecv:
                tensor = torch.empty_like(op.tensor)
                comes.append((op.tensor, tensor))
            else:
                sent.append(op.tensor)
            posted.append(dist.P2POp(op.op, tensor, group=op.group, group_peer=op.group_peer))
        works = own(posted)
        return [self._late(name, works, comes, sent)]

    def _collective(
        self,
        name: str,
        own: Callable[..., Any],
        into: torch.Tensor,
        of: torch.Tensor,
        *how: Any,
        async_op: bool = False,
        **more: Any,
    ) -> Any:
        if not async_op:
            return own(into, of, *how, **more)
        arrives, leaves = torch.empty_like(into), of.clone()
        work = own(arrives, leaves, *how, **more, async_op=True)
        late = self._late(name, [work], [(into, arrives)], [of])
        if _is_part(of, into):  # a rank that gathers sends from its place in the result
            of.copy_(leaves)
        return late

    def _broadcast(
        self, name: str, own: Callable[..., Any], x: torch.Tensor, *how: Any, **more: Any
    ) -> Any:
        if not more.get("async_op"):
            return own(x, *how, **more)
        group = more["group"]
        sends = group.rank() == more["group_src"]
        moved = x.clone()
        work = own(moved, *how, **more)
        return self._late(name, [work], [] if sends else [(x, moved)], [x] if sends else [])

    def _late(
        self,
        name: str,
        works: Sequence[Any],
        comes: Sequence[tuple[torch.Tensor, torch.Tensor]],
        sent: Sequence[torch.Tensor],
    ) -> _Late:
        late = _Late(name, works, comes, sent, self._under_way)
        self._under_way.append(late)
        self.posts[name] += 1
        return late


@contextmanager
def nccl_branches() -> Iterator[None]:
    """A block in which groups say that they are of NCCL: code takes the branches that it has for it."""
    with mock.patch.object(dist, "get_backend", return_value=dist.Backend.NCCL):
        yield


class _Late:
    """The work of a message: brings it when it is waited for.

    Args:
        name: the function that posted it.
        works: of the real message.
        comes: buffers of the caller, and what arrives for them.
        sent: buffers of the caller that are being sent.
        under_way: a list of works, which this one leaves at its wait.
    """

    def __init__(
        self,
        name: str,
        works: Sequence[Any],
        comes: Sequence[tuple[torch.Tensor, torch.Tensor]],
        sent: Sequence[torch.Tensor],
        under_way: list[_Late],
    ) -> None:
        self.name = name
        self._works, self._comes = works, comes
        self._sent = [(x, _bits(x).clone()) for x in sent]
        self._under_way = under_way
        for into, _ in comes:
            _spoil(into)

    def end(self) -> None:
        """Wait for the real message."""
        for work in self._works:
            work.wait()

    def wait(self) -> bool:
        """Wait for the message, and bring it.

        Raises:
            LateDeliveryError: what is sent is another than at the post.
        """
        self.end()
        self._under_way.remove(self)
        if not all(torch.equal(_bits(x), before) for x, before in self._sent):
            raise LateDeliveryError(f"{self.name}: what was sent changed before it was waited for")
        for into, came in self._comes:
            into.copy_(came)
        self._works, self._comes, self._sent = [], [], []
        return True


def _bound(post: Callable[..., Any], name: str, own: Callable[..., Any]) -> Callable[..., Any]:
    def late(*args: Any, **kwargs: Any) -> Any:
        return post(name, own, *args, **kwargs)

    return late


def _spoil(x: torch.Tensor) -> None:
    x.fill_(torch.nan if x.is_floating_point() else torch.iinfo(x.dtype).max)


def _bits(x: torch.Tensor) -> torch.Tensor:
    """Bytes, as NaN is not equal to itself."""
    return x.detach().contiguous().view(-1).view(torch.uint8)


def _is_part(x: torch.Tensor, of: torch.Tensor) -> bool:
    start = of.data_ptr()
    return x.numel() > 0 and start <= x.data_ptr() < start + of.nbytes

"""Warnings of logged means that are NaN on some ranks only; no step waits for the device because of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from lightning_cp.loss.weighting import Shares, read_shares
from lightning_cp.utils.tensors import start_to_host, to_list


@dataclass(frozen=True)
class _Flags:
    """Flags of a mean, on their way to the host."""

    name: str
    where: str
    shares: Shares
    """Weight of each rank, on the host, or on the way there."""
    flags: torch.Tensor
    """bool [1 + ranks]: ranks have different values, and which of them have NaN."""
    event: torch.cuda.Event | None
    """Of their arrival."""

    @property
    def has_arrived(self) -> bool:
        """True if reading does not wait."""
        return self.event is None or self.event.query()

    def read(self) -> list[bool]:
        """Return the ranks with NaN that count; waits until the flags have arrived."""
        if self.event is not None and not self.has_arrived:
            self.event.synchronize()
        differs, *nan = to_list(self.flags)
        shares = read_shares(self.shares)
        return [differs and x and y > 0 for x, y in zip(nan, shares, strict=True)]


class NanWarnings:
    """Warnings of NaN on some ranks: these probably averaged over nothing.

    Args:
        warn: shows a warning to the user.
        warned: names that the user was warned of, which grows.
    """

    def __init__(self, warn: Callable[[str], None], warned: set[str]) -> None:
        self._warn, self._warned = warn, warned
        self._unread: deque[_Flags] = deque()

    def start(self, means: Sequence[tuple[str, str, torch.Tensor]], shares: Shares) -> None:
        """Start to copy the flags of means to the host; warn of those that are there.

        Args:
            means: name, hook and flags of each, bool [1 + ranks]: values differ, and which are NaN.
            shares: weight of each rank.
        """
        unknown = [mean for mean in means if mean[0] not in self._warned]
        flags = {str(at): x for at, (_, _, x) in enumerate(unknown)}
        on_device = {"shares": shares} if unknown and isinstance(shares, torch.Tensor) else {}
        copies, event = start_to_host({**flags, **on_device})
        on_host = copies.get("shares", shares)
        for at, (name, where, _) in enumerate(unknown):
            self._unread.append(_Flags(name, where, on_host, copies[str(at)], event))
        self.read(wait=False)

    def read(self, *, wait: bool) -> None:
        """Warn by the flags that have arrived; with ``wait`` by all of them."""
        while self._unread and (wait or self._unread[0].has_arrived):
            flags = self._unread.popleft()
            self.warn_of(flags.name, flags.where, flags.read())

    def warn_of(self, name: str, where: str, nan: Sequence[bool]) -> None:
        """Warn once of a name that is NaN on some ranks."""
        if any(nan) and name not in self._warned:
            self._warned.add(name)
            ranks = ", ".join(str(rank) for rank, held in enumerate(nan) if held)
            self._warn(_NAN.format(name=name, where=where, ranks=ranks))


_NAN = (
    "self.log({name!r}, ...) in {where} got NaN from rank {ranks} of those that share a sample, and a number "
    "from the others, so it shows NaN. Likely causes: a mean over no elements on that rank (0 / 0), or an "
    "overflow. Compute such a mean by self.sequence_mean(values of tokens, mask) of ContextParallelMixin, or "
    "from self.unshard(values of tokens), or log it with self.cp_log({name!r}, total, count)."
)

"""A watch: begun by all ranks together, told of errors, and ended when the run does."""

from __future__ import annotations

import os
import secrets
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType

import torch.distributed as dist

from lightning_cp.comm.agreement import gathered_lists
from lightning_cp.comm.objects import told
from lightning_cp.errors import ConfigError
from lightning_cp.faults import ending, signs
from lightning_cp.faults.hub import Hub
from lightning_cp.faults.member import Member
from lightning_cp.faults.notes import OWN, TOLD, Card, Note
from lightning_cp.faults.position import STEPS, Place, Position, Slot
from lightning_cp.faults.verdict import PATIENCE
from lightning_cp.faults.watcher import GRACE, Watcher

SWITCH = "LIGHTNING_CP_WATCH"
"""``0`` switches the watch off, for a debugger; on every rank."""
CONNECTING = 20.0
"""Seconds in which a rank must have reached the first one's watcher."""
LOOPBACK = "127.0.0.1"


class Watch:
    """One rank's part.

    Args:
        position: where this rank is, kept up to date by whoever trains.
        step_timeout: seconds within a step without any progress; ``None``: nobody watches at all.
        first_step_timeout: the same for the first step and all that is outside of steps; ``None``: no limit.
    """

    def __init__(
        self,
        position: Position,
        step_timeout: float | None = 120.0,
        first_step_timeout: float | None = 600.0,
    ) -> None:
        self.position = position
        self._step_timeout, self._first = step_timeout, first_step_timeout
        self._watcher: Watcher | None = None
        self._noted = False  # the error itself would keep alive whoever has raised it
        self._shows: Callable[[], None] | None = None
        self._slots: list[Slot] = []

    @property
    def is_on(self) -> bool:
        """It has begun, and not ended."""
        return self._watcher is not None and self._watcher.is_alive()

    @property
    def failed(self) -> bool:
        """This rank has raised an error since it began."""
        return self._noted

    def start(self, name: str, address: str) -> None:
        """Begin, on all ranks together, unless it is on or not wanted.

        Args:
            name: of this rank, as in ``rank 2 (cp_rank 1 of 4, data_rank 0)``.
            address: where rank 0's machine is to be found by other machines.

        Raises:
            ConfigError: on every rank: rank 0's watcher cannot be reached by some.
        """
        wanted = self._step_timeout is not None and os.environ.get(SWITCH) != "0"
        if self.is_on or not wanted or dist.get_world_size() == 1:
            return
        self._noted, self._shows = False, None
        self.position.restart()
        world, rank = dist.group.WORLD, dist.get_rank()
        assert world is not None
        token = secrets.token_bytes(16)
        own = self._make_slot(token)
        path = own.path if own is not None else ""
        card = Card(rank, name, _machine(), os.getpid(), path, ending.output())
        found = gathered_lists([(card, token)], world)
        cards, tokens = map(list, zip(*(pair for (pair,) in found), strict=True))
        slots = self._open_slots(cards, tokens, own)
        try:
            link = _connected(cards, address, world)
        except ConfigError:
            self._let_go(slots)
            raise
        what = (rank, cards, self.position, slots, self._limit, tokens[0].hex())
        self._watcher = Hub(*what, listener=link) if rank == 0 else Member(*what, hub=link)
        self._watcher.start()
        signs.count(self.position)

    def note(self, error: BaseException) -> None:
        """This rank's main thread has an error, and will show it.

        If it looks as if another rank had failed before, this waits for that one's word, which ends the
        process; it returns if there is none, or if it is this one that failed.
        """
        if not self.is_on or self._noted or isinstance(error, SystemExit):
            return  # who exits, maybe with all others, says so when it ends
        assert self._watcher is not None
        self._noted = True
        note = Note.of_error(error, self.position.place)
        if note.is_shown:
            self._shows = self._watcher.show  # the watch may have stopped until then
        self._watcher.note(note)
        if note.kind not in (OWN, TOLD):
            self._watcher.wait(PATIENCE + 2.0)
            if not self._watcher.is_named:
                self._watcher.join(GRACE + 2.0)

    def shows(self) -> None:
        """The error that was noted ends the program: the others need not wait any more."""
        if self._shows is not None:
            self._shows()

    def hear(self, seconds: float) -> None:
        """Wait for word of another rank's failure, which ends this process; return if there is none."""
        if self.is_on:
            assert self._watcher is not None
            if self._watcher.wait(seconds):
                self._watcher.join(GRACE + 2.0)

    def stop(self) -> None:
        """End in good order; after an error only once all ranks have one."""
        watcher, self._watcher = self._watcher, None
        if watcher is None:
            return
        signs.ignore(self.position)
        if not self._noted:
            watcher.leave()
        if watcher is not threading.current_thread():  # garbage may be collected by that one
            watcher.join(0.2 if self._noted else 1.0)
        self.position.connect(None)
        if not watcher.is_alive():
            self._let_go()

    def _let_go(self, named: Mapping[int, Slot] = MappingProxyType({})) -> None:
        """Close all positions, and remove the files that still have a name."""
        self.position.connect(None)
        for slot in named.values():
            slot.unlink()
        while self._slots:
            self._slots.pop().close()

    def _limit(self, place: Place, is_first: bool) -> float | None:
        """Seconds without progress that are allowed there."""
        usual = place.phase in STEPS and not is_first
        return self._step_timeout if usual else self._first

    def _make_slot(self, token: bytes) -> Slot | None:
        try:
            own = Slot(token=token)
        except OSError:  # no room: the last beat has to do
            return None
        self._slots.append(own)
        self.position.connect(own)
        return own

    def _open_slots(
        self, cards: list[Card], tokens: list[bytes], own: Slot | None
    ) -> dict[int, Slot]:
        """Positions of the ranks of this machine."""
        mine = cards[dist.get_rank()]
        slots = {} if own is None else {mine.rank: own}
        for card, token in zip(cards, tokens, strict=True):
            if card.rank != mine.rank and card.machine == mine.machine and card.path:
                with suppress(OSError):
                    slots[card.rank] = Slot(card.path, token)
                    self._slots.append(slots[card.rank])
        return slots


def _connected(cards: list[Card], address: str, world: dist.ProcessGroup) -> socket.socket:
    """Rank 0's listener, or another rank's connection to it; collective.

    Raises:
        ConfigError: on every rank: some rank could not connect.
    """
    rank, first = dist.get_rank(), cards[0].machine
    local = all(card.machine == first for card in cards)
    found = _listen(LOOPBACK if local else "") if rank == 0 else None
    port = gathered_lists([found.getsockname()[1] if found is not None else 0], world)[0][0]
    host, refused = LOOPBACK if cards[rank].machine == first else address, ""
    if rank:
        try:
            found = socket.create_connection((host, port), CONNECTING)
        except OSError as error:
            refused = f"{cards[rank].name} cannot reach {host} port {port} ({told(error)})"
    failed = [said for (said,) in gathered_lists([refused], world) if said]
    if failed:
        if found is not None:
            found.close()
        raise ConfigError(
            f"{failed[0]}{f', nor can {len(failed) - 1} more ranks' * (len(failed) > 1)}, where rank 0 hears "
            "how the others are. The port is a new one each time, as those of PyTorch's own groups: let the "
            "nodes connect to each other on all of them, or do without the watch: step_timeout=None."
        )
    assert found is not None
    return found


def _machine() -> str:
    """A text that is equal for processes that can see each other's files and signal each other."""
    found = [socket.gethostname()]
    for path in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid"):
        with suppress(OSError):
            place = Path(path)
            found.append(str(place.readlink()) if "ns" in path else place.read_text().strip())
    return " ".join(found)


def _listen(address: str) -> socket.socket:
    """A socket for rank 0's watcher; for several machines on all interfaces, as PyTorch's own store."""
    if address or not socket.has_dualstack_ipv6():
        return socket.create_server((address, 0), backlog=1024)
    return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)

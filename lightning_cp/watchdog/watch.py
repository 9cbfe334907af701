"""A watch: begun by all ranks together, told of errors, and ended when the run does."""

from __future__ import annotations

import atexit
import gc
import os
import secrets
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch.distributed as dist
from lightning.fabric.strategies.launchers.subprocess_script import _launch_process_observer

from lightning_cp import error_display as console
from lightning_cp.comm.consensus import error_summary, gather_lists
from lightning_cp.config import StrategyConfig, resolve_cp_size
from lightning_cp.errors import ConfigError
from lightning_cp.watchdog import attribution as ending
from lightning_cp.watchdog import phase as signs
from lightning_cp.watchdog.attribution import PATIENCE
from lightning_cp.watchdog.client import Member
from lightning_cp.watchdog.messages import OWN, TOLD, Card, Note
from lightning_cp.watchdog.phase import STEPS, PhasePosition, Position, Slot
from lightning_cp.watchdog.server import Hub
from lightning_cp.watchdog.thread import GRACE, Watcher

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
        found = gather_lists([(card, token)], world)
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

    def _limit(self, place: PhasePosition, is_first: bool) -> float | None:
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
    port = gather_lists([found.getsockname()[1] if found is not None else 0], world)[0][0]
    host, refused = LOOPBACK if cards[rank].machine == first else address, ""
    if rank:
        try:
            found = socket.create_connection((host, port), CONNECTING)
        except OSError as error:
            refused = f"{cards[rank].name} cannot reach {host} port {port} ({error_summary(error)})"
    failed = [said for (said,) in gather_lists([refused], world) if said]
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


# SIGTERM that comes because another rank was lost: whoever has started the ranks ends the others at once.
#
# torchrun's agent and PyTorch's ``spawn`` do, maybe before the others have said which rank it was, and
# where.


SOON = 2.0
"""Seconds in which a lost rank is heard of: its connection has closed already."""


class LastWords:
    """A handler that ends the process, as SIGTERM does by default, once it has had time to say why.

    Args:
        watch: says it, and ends the process by itself, if another rank was lost.
    """

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def begin(self) -> None:
        """From here on, unless the program handles SIGTERM in a way of its own."""
        in_main = threading.current_thread() is threading.main_thread()  # no other one may
        if in_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self)

    def end(self) -> None:
        """As before, unless somebody has set another handler since."""
        in_main = threading.current_thread() is threading.main_thread()
        if in_main and signal.getsignal(signal.SIGTERM) is self:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def __call__(self, number: int, frame: Any) -> None:
        self._watch.hear(SOON)
        self.end()
        os.kill(os.getpid(), signal.SIGTERM)


# A run's watch, from the moment there is a process group until the strategy ends.


class RunWatch(Watch):
    """Knows, besides, of processes that Lightning has started, and of errors that nobody catches."""

    _launcher: Any = None
    _last_words: LastWords | None = None
    _began = False

    def begin(
        self, settings: StrategyConfig, address: str, launcher: Any, *, handles_sigterm: bool
    ) -> None:
        """On all ranks together.

        Args:
            settings: tell which ranks share samples.
            address: rank 0's machine.
            launcher: Lightning's; its observer would end everything with SIGKILL once one process is gone,
                before anybody can say which.
            handles_sigterm: somebody else does, and goes on (the Trainer).
        """
        self.start(name_of(dist.get_rank(), dist.get_world_size(), settings), address)
        if not self.is_on or self._began:
            return
        self._began = True
        console.add_listener(self._hears)
        if not handles_sigterm:
            self._last_words = LastWords(self)
            self._last_words.begin()
        if procs := _processes(launcher):
            self._launcher, launcher.procs = launcher, list(procs)
            procs.clear()  # the observer has this list, and ends

    def note(self, error: BaseException) -> None:
        """As any watch's; and this process, if it ends now, does so without delay.

        The others wait until it has, and where thousands of modules are loaded, the collections of garbage
        with which Python ends take seconds on a busy machine. What is frozen is left out of them.
        """
        super().note(error)
        if self.failed:
            atexit.unregister(gc.freeze)
            atexit.register(gc.freeze)

    def stop(self) -> None:
        """The strategy ends; Lightning watches its processes again, unless Python ends as well."""
        super().stop()
        if not self.failed:
            console.remove_listener(self._hears)
        if self._last_words is not None:
            self._last_words.end()
        launcher, self._launcher, self._last_words, self._began = self._launcher, None, None, False
        goes_on = threading.main_thread().is_alive()  # not in what atexit calls
        if launcher is not None and not self.failed and launcher.procs and goes_on:
            _launch_process_observer(launcher.procs)

    def _hears(self, error: BaseException) -> None:
        """Of an error that ends the program, as with Fabric nobody else tells of it."""
        self.note(error)
        self.shows()


def name_of(rank: int, world_size: int, settings: StrategyConfig) -> str:
    """``rank 2 (cp_rank 1 of 4, data_rank 0)``."""
    tp, cp_size = settings.tensor_parallel_size, resolve_cp_size(settings, world_size)
    sample, cp_rank = divmod(rank // tp, cp_size)
    of_tp = f", tp_rank {rank % tp}" if tp > 1 else ""
    return f"rank {rank} (cp_rank {cp_rank} of {cp_size}, data_rank {sample}{of_tp})"


def _processes(launcher: Any) -> list[Any]:
    """The processes that it has started by running the program again; the list itself."""
    procs = getattr(launcher, "procs", [])
    return procs if all(isinstance(process, subprocess.Popen) for process in procs) else []

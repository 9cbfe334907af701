"""The watch of one rank: all ranks start it together, errors are reported to it, it stops with the run."""

from __future__ import annotations

import atexit
import gc
import os
import secrets
import signal
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.strategies.launchers.subprocess_script import _launch_process_observer

from lightning_cp import error_display
from lightning_cp.comm.consensus import World, error_summary
from lightning_cp.config import STEP_SECONDS, StrategyConfig, resolve_cp_size
from lightning_cp.errors import ConfigError
from lightning_cp.utils.signals import may_handle_signals
from lightning_cp.utils.subprocess import take_processes
from lightning_cp.watchdog import attribution as ending
from lightning_cp.watchdog import phase as signs
from lightning_cp.watchdog.attribution import PATIENCE
from lightning_cp.watchdog.device import device_queue
from lightning_cp.watchdog.messages import COMMON, OWN, Note, RankIdentity
from lightning_cp.watchdog.phase import STEPS, PhasePosition, Position, Slot
from lightning_cp.watchdog.thread import GRACE, Hub, Member, Watcher

SWITCH = "LIGHTNING_CP_WATCH"
"""Environment variable: ``0`` on every rank switches the watch off, for a debugger."""
CONNECT_TIMEOUT = 20.0
"""Seconds in which a rank must connect to rank 0's watcher."""
LOOPBACK = "127.0.0.1"
CPU = torch.device("cpu")


def seconds_of_step(
    step_timeout: float | str | None, first: float | None, device: torch.device
) -> float | None:
    """Return the seconds that ``step_timeout`` means on a device, at most those of the first step."""
    if not isinstance(step_timeout, str):
        return step_timeout
    seconds = STEP_SECONDS.get(device.type, STEP_SECONDS["cpu"])
    return seconds if first is None else min(seconds, first)


class Watch:
    """One rank's watch: starts and stops the watcher, and reports errors to it.

    Args:
        position: this rank's position, kept up to date by the training loop.
        step_timeout: seconds within a step without any progress; ``auto``: those of the device; ``None``: no
            watch at all.
        first_step_timeout: the same for the first step and outside of steps; ``None``: no limit.
    """

    def __init__(
        self,
        position: Position,
        step_timeout: float | str | None = StrategyConfig.step_timeout,
        first_step_timeout: float | None = StrategyConfig.first_step_timeout,
    ) -> None:
        self.position = position
        self.device = CPU
        """The device that this rank computes on."""
        self._step_timeout, self._first = step_timeout, first_step_timeout
        self._watcher: Watcher | None = None
        self._noted = False  # the error itself would keep objects that raised it alive
        self._shows: Callable[[], None] | None = None
        self._slots: list[Slot] = []

    @property
    def is_on(self) -> bool:
        """True while the watch runs."""
        return self._watcher is not None and self._watcher.is_alive()

    @property
    def failed(self) -> bool:
        """True if this rank has reported an error since the watch began."""
        return self._noted

    def start(self, name: str, address: str) -> None:
        """Start the watch, on all ranks together; does nothing if it runs already or is switched off.

        Args:
            name: this rank's name, as in ``rank 2 (cp_rank 1 of 4, data_rank 0)``.
            address: rank 0's machine, as other machines reach it.

        Raises:
            ConfigError: on every rank: some rank cannot reach rank 0's watcher.
        """
        wanted = self._step_timeout is not None and os.environ.get(SWITCH) != "0"
        if self.is_on or not wanted or dist.get_world_size() == 1:
            return
        self._noted, self._shows = False, None
        self.position.restart()
        self.position.device = device_queue(self.device)
        rank = dist.get_rank()
        token = secrets.token_bytes(16)
        own = self._make_slot(token)
        path = own.path if own is not None else ""
        identity = RankIdentity(rank, name, _machine(), os.getpid(), path, ending.stderr_identity())
        identities, tokens = map(list, zip(*World().gather((identity, token)), strict=True))
        slots = self._open_slots(identities, tokens, own)
        try:
            link = _connected(identities, address)
        except ConfigError:
            self._close_slots(slots)
            raise
        what = (rank, identities, self.position, slots, self._limit, tokens[0].hex())
        self._watcher = Hub(*what, listener=link) if rank == 0 else Member(*what, hub=link)
        self._watcher.start()
        signs.count(self.position)

    def note(self, error: BaseException) -> None:
        """Report an error of this rank's main thread, which it is about to show.

        If the error looks like the consequence of another rank's failure, wait for the verdict, which ends
        the process. Returns if there is none, or if this rank is the one that failed.
        """
        if not self.is_on or self._noted or isinstance(error, SystemExit):
            return  # reported when the process ends, maybe with all others
        assert self._watcher is not None
        self._noted = True
        note = Note.of_error(error, self.position.place)
        if note.is_shown:
            self._shows = self._watcher.show  # the watch may have stopped by then
        self._watcher.note(note)
        if note.kind not in (OWN, COMMON):
            self._watcher.wait(PATIENCE + 2.0)
            if not self._watcher.is_named:
                self._watcher.join(GRACE + 2.0)

    def shows(self) -> None:
        """Report that the noted error ends the program, so that other ranks stop waiting for it."""
        if self._shows is not None:
            self._shows()

    def wait_for_verdict(self, seconds: float) -> None:
        """Wait for the verdict on another rank, which ends this process; return if there is none."""
        if self.is_on:
            assert self._watcher is not None
            if self._watcher.wait(seconds):
                self._watcher.join(GRACE + 2.0)

    def stop(self) -> None:
        """Stop in good order; after an error, only once all ranks have one."""
        watcher, self._watcher = self._watcher, None
        if watcher is None:
            return
        signs.ignore(self.position)
        self.position.device = None
        if not self._noted:
            watcher.leave()
        if watcher is not threading.current_thread():  # may be run by garbage collection
            watcher.join(0.2 if self._noted else 1.0)
        self.position.connect(None)
        if not watcher.is_alive():
            self._close_slots()

    def _close_slots(self, named: Mapping[int, Slot] = MappingProxyType({})) -> None:
        """Close all positions, and unlink the named ones."""
        self.position.connect(None)
        for slot in named.values():
            slot.unlink()
        while self._slots:
            self._slots.pop().close()

    def _limit(self, place: PhasePosition, is_first: bool) -> float | None:
        """Return the seconds without progress that are allowed in this place."""
        usual = place.phase in STEPS and not is_first
        return (
            seconds_of_step(self._step_timeout, self._first, self.device) if usual else self._first
        )

    def _make_slot(self, token: bytes) -> Slot | None:
        try:
            own = Slot(token=token)
        except OSError:  # no room: the last heartbeat serves
            return None
        self._slots.append(own)
        self.position.connect(own)
        return own

    def _open_slots(
        self, identities: list[RankIdentity], tokens: list[bytes], own: Slot | None
    ) -> dict[int, Slot]:
        """Open the positions of this machine's ranks."""
        mine = identities[dist.get_rank()]
        slots = {} if own is None else {mine.rank: own}
        for identity, token in zip(identities, tokens, strict=True):
            if identity.rank != mine.rank and identity.machine == mine.machine and identity.path:
                with suppress(OSError):
                    slots[identity.rank] = Slot(identity.path, token)
                    self._slots.append(slots[identity.rank])
        return slots


def _connected(identities: list[RankIdentity], address: str) -> socket.socket:
    """Return rank 0's listener, or another rank's connection to it; collective.

    Raises:
        ConfigError: on every rank: some rank could not connect.
    """
    world, first = World(), identities[0].machine
    rank = world.rank
    local = all(identity.machine == first for identity in identities)
    found = _listen(LOOPBACK if local else "") if rank == 0 else None
    port = world.gather(found.getsockname()[1] if found is not None else 0)[0]
    host, refused = LOOPBACK if identities[rank].machine == first else address, ""
    if rank:
        try:
            found = socket.create_connection((host, port), CONNECT_TIMEOUT)
        except OSError as error:
            refused = (
                f"{identities[rank].name} cannot reach {host} port {port} ({error_summary(error)})"
            )
    failed = [said for said in world.gather(refused) if said]
    if failed:
        if found is not None:
            found.close()
        raise ConfigError(
            f"{failed[0]}{f', nor can {len(failed) - 1} more ranks' * (len(failed) > 1)}, "
            "where rank 0's watch listens. The port is random, like those of PyTorch's process groups. "
            "Open all ports between the nodes, or switch the watch off with step_timeout=None."
        )
    assert found is not None
    return found


def _machine() -> str:
    """Return a text that is equal for processes that see each other's files and can signal each other."""
    found = [socket.gethostname()]
    for path in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid"):
        with suppress(OSError):
            place = Path(path)
            found.append(str(place.readlink()) if "ns" in path else place.read_text().strip())
    return " ".join(found)


def _listen(address: str) -> socket.socket:
    """Return a listening socket for rank 0's watcher; with several machines on all interfaces, like
    PyTorch's store."""
    if address or not socket.has_dualstack_ipv6():
        return socket.create_server((address, 0), backlog=1024)
    return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)


# SIGTERM as a consequence of a lost rank: torchrun's agent and PyTorch's ``spawn`` end the other ranks at
# once, perhaps before these have said which rank was lost, and where.


LOSS_SECONDS = 2.0
"""Seconds in which the loss of a rank becomes known: its connection has closed already."""


class SigtermHandler:
    """A SIGTERM handler that gives the watch time to report a lost rank, then ends the process as by
    default.

    Args:
        watch: names a lost rank and ends the process by itself.
    """

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def begin(self) -> None:
        """Install the handler, unless the program has one."""
        if may_handle_signals() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self)

    def end(self) -> None:
        """Restore the default handler, unless another one was set since."""
        if may_handle_signals() and signal.getsignal(signal.SIGTERM) is self:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def __call__(self, number: int, frame: Any) -> None:
        self._watch.wait_for_verdict(LOSS_SECONDS)
        self.end()
        os.kill(os.getpid(), signal.SIGTERM)


# The watch of a run: from the first process group to the end of the strategy.


class RunWatch(Watch):
    """A watch that also handles Lightning's child processes and uncaught errors."""

    _launcher: Any = None
    _sigterm_handler: SigtermHandler | None = None
    _began = False

    def begin(
        self,
        settings: StrategyConfig,
        address: str,
        launcher: Any,
        *,
        handles_sigterm: bool,
        device: torch.device = CPU,
    ) -> None:
        """Start the watch and the handlers, on all ranks together.

        Args:
            settings: define which ranks share samples.
            address: rank 0's machine.
            launcher: Lightning's; its observer would end everything with SIGKILL once one process is gone,
                before a rank can name it.
            handles_sigterm: another handler is installed and continues (the Trainer's).
            device: the device that this rank computes on.
        """
        self.device = device
        self.start(name_of(dist.get_rank(), dist.get_world_size(), settings), address)
        if not self.is_on or self._began:
            return
        self._began = True
        error_display.add_listener(self._report_uncaught)
        if not handles_sigterm:
            self._sigterm_handler = SigtermHandler(self)
            self._sigterm_handler.begin()
        if processes := take_processes(launcher):  # the observer ends
            self._launcher, launcher.procs = launcher, processes

    def note(self, error: BaseException) -> None:
        """Report an error, and let the process end without a last garbage collection.

        The other ranks wait for that end. Where thousands of modules are loaded, Python's final
        collections take seconds on a busy machine; frozen objects are left out of them.
        """
        super().note(error)
        if self.failed:
            atexit.unregister(gc.freeze)
            atexit.register(gc.freeze)

    def stop(self) -> None:
        """Stop the watch and restore Lightning's process observer, unless Python is ending."""
        super().stop()
        if not self.failed:
            error_display.remove_listener(self._report_uncaught)
        if self._sigterm_handler is not None:
            self._sigterm_handler.end()
        launcher, self._launcher, self._sigterm_handler, self._began = (
            self._launcher,
            None,
            None,
            False,
        )
        goes_on = threading.main_thread().is_alive()  # not in what atexit calls
        if launcher is not None and not self.failed and launcher.procs and goes_on:
            _launch_process_observer(launcher.procs)

    def _report_uncaught(self, error: BaseException) -> None:
        """Report an uncaught error; under Fabric this is the only report."""
        self.note(error)
        self.shows()


def name_of(rank: int, world_size: int, settings: StrategyConfig) -> str:
    """Return the name of a rank, as in ``rank 2 (cp_rank 1 of 4, data_rank 0)``."""
    tp, cp_size = settings.tensor_parallel_size, resolve_cp_size(settings, world_size)
    sample, cp_rank = divmod(rank // tp, cp_size)
    of_tp = f", tp_rank {rank % tp}" if tp > 1 else ""
    return f"rank {rank} (cp_rank {cp_rank} of {cp_size}, data_rank {sample}{of_tp})"

"""SIGTERM, and what a cluster sends before it: all ranks stop at the same step, having saved it.

Python runs a handler between any two instructions, so the handler only makes a note: a save is something
that all ranks do together, and a signal may reach one of them. The note travels with the vote that ranks have
before every optimizer step (``finite``), so all of them learn at the same step that one was sent a signal,
and stop when that step's batch has ended, as ``ModelCheckpoint`` saves then. They exit with 143, the shell's
number for SIGTERM.

Lightning's own handler has a broadcast in it, which the ranks that were sent no signal never join.

With Fabric the loop is the user's, and asks for itself: ``strategy.should_stop``.
"""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import threading
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_cp.checkpoint.atomic import display_path
from lightning_cp.checkpoint.store import is_store
from lightning_cp.consistency.finite import FiniteGuard
from lightning_cp.watchdog.watch import LastWords

STATUS = 128 + signal.SIGTERM
REQUEUE = 2**32
"""What a wish to be queued again counts for, so that the sum over ranks tells it from one to stop."""
PATIENCE = 30.0
"""Seconds that the process which started the others waits for their end."""


class Sent:
    """The signals that this process was sent."""

    def __init__(self) -> None:
        self._wish = 0

    def stop(self, *_: Any) -> None:
        """A handler: stop at the next step."""
        self._wish |= 1

    def requeue(self, *_: Any) -> None:
        """A handler: stop there, and be queued again."""
        self._wish |= REQUEUE

    def wish(self) -> int:
        """The number to tell the others."""
        return self._wish


def noting_sigterm(owner: object) -> Sent:
    """While ``owner`` lives SIGTERM makes a note; what the program itself has it do, if anything, follows."""
    sent, own = Sent(), signal.getsignal(signal.SIGTERM)
    own = signal.SIG_DFL if isinstance(own, LastWords) else own

    def note(number: int, frame: Any) -> None:
        sent.stop()
        if callable(own):
            own(number, frame)

    if threading.current_thread() is threading.main_thread():  # no other one may
        signal.signal(signal.SIGTERM, note)
        weakref.finalize(owner, _give_back, note, own).atexit = False
    return sent


def _give_back(note: Any, own: Any) -> None:
    """The handler that was there before, unless somebody has set another one since."""
    in_main = threading.current_thread() is threading.main_thread()
    if in_main and signal.getsignal(signal.SIGTERM) is note:
        signal.signal(signal.SIGTERM, own or signal.SIG_DFL)  # None: of a library in C


def listen(trainer: Trainer, guard: FiniteGuard) -> None:
    """Have the Trainer's handlers make a note while it fits; called before it registers them.

    Args:
        trainer: its connector of signals is replaced.
        guard: asks every rank before each step.
    """
    listen_no_more(trainer)
    sent = Sent() if trainer.state.fn == TrainerFn.FITTING else None
    trainer._signal_connector = StepSignals(trainer, sent)
    guard.wish = None if sent is None else sent.wish
    if sent is None:
        return
    callbacks: list[Any] = trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
    callbacks.append(StopAtStep(guard))  # the last one: the others have seen the step


def listen_no_more(trainer: Any) -> None:
    """Leave the end of steps alone again; the old list may be on its way through the callbacks' hooks."""
    trainer.callbacks = [each for each in trainer.callbacks if not isinstance(each, StopAtStep)]


class StepSignals(_SignalConnector):
    """Lightning's connector of signals, with handlers that only make a note.

    ``received_sigterm`` is true from the signal on, on the rank that was sent it, and on all ranks once they
    stop. Lightning's loops read False: they would stop this rank alone, within an accumulation window.

    Args:
        trainer: whose signals they are.
        sent: where notes are made; ``None`` where nothing can be lost: then SIGTERM ends the run at once.
    """

    def __init__(self, trainer: Trainer, sent: Sent | None) -> None:
        self._sent, self._received = sent, False
        super().__init__(trainer)

    @property
    def received_sigterm(self) -> bool:  # type: ignore[override]
        """True if this rank was sent SIGTERM, for everybody but Lightning's loops."""
        reader = sys._getframe(2).f_globals.get("__name__", "")  # past Trainer.received_sigterm
        return self._received and not reader.startswith(_LOOPS)

    @received_sigterm.setter
    def received_sigterm(self, received: bool) -> None:
        self._received = received
        if received and self._sent is not None:  # by a program that wants all ranks to stop
            self._sent.stop()

    def _sigterm_notifier_fn(self, signum: Any, _: Any) -> None:
        self._received = True
        if self._sent is None:
            raise SIGTERMException(STATUS)
        self._sent.stop()

    def _slurm_sigusr_handler_fn(self, signum: Any, _: Any) -> None:
        if self._sent is not None:
            self._sent.requeue()


_LOOPS = "lightning.pytorch.loops."


class StopAtStep(Callback):
    """Ends a run with the step that some rank wished to be the last one.

    Args:
        guard: knows what all ranks have wished for.
    """

    def __init__(self, guard: FiniteGuard) -> None:
        self._guard = guard

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any
    ) -> None:
        """Save and stop, on every rank.

        Raises:
            SIGTERMException: with the exit code of a process that SIGTERM has ended.
        """
        wishes, self._guard.wishes = self._guard.wishes, 0
        if not wishes:
            return
        trainer._signal_connector.received_sigterm |= wishes % REQUEUE > 0
        name = save_for_queue(trainer) if _is_queued(trainer) else save_last(trainer)
        again = wishes >= REQUEUE and trainer.is_global_zero and queue_again()
        _wait_at_exit(trainer)
        rank_zero_info(
            f"stopped by a signal after step {trainer.global_step}, saved as {name}"
            f"{', and the job is queued again' if again else ''}"
        )
        raise SIGTERMException(STATUS)


def _is_queued(trainer: Trainer) -> bool:
    environment = trainer._accelerator_connector.cluster_environment
    return isinstance(environment, SLURMEnvironment) and environment.auto_requeue


def save_last(trainer: Trainer) -> str:
    """Update the first ModelCheckpoint's ``last.ckpt``, or save to one where the Trainer writes; its path."""
    first = next((x for x in trainer.checkpoint_callbacks if isinstance(x, ModelCheckpoint)), None)
    if first is None:
        path = os.path.join(trainer.default_root_dir, "last.ckpt")  # noqa: PTH118 - may be a URL
        trainer.save_checkpoint(path, weights_only=False)
    else:
        chosen, first.save_last = first.save_last, True  # also where it is a link to an older one
        try:
            first._save_last_checkpoint(trainer, first._monitor_candidates(trainer))
        finally:
            first.save_last = chosen
        path = first.last_model_path
    _wait_for_saves(trainer)
    return display_path(Path(path))


def save_for_queue(trainer: Trainer) -> str:
    """Save to where Lightning looks when a job of SLURM begins again; its name.

    Lightning takes the file with the highest number, and reads one out of any name with ``ckpt_`` in it: that
    of a save which was killed as well. So files are written in a folder of their own.
    """
    path = trainer._checkpoint_connector.hpc_save_path(trainer.default_root_dir)
    path = trainer.strategy.broadcast(str(path))
    final = Path(path)
    if is_store(path):
        trainer.save_checkpoint(path, weights_only=False)
        _wait_for_saves(trainer)
        return final.name
    saved = final.parent / ".requeue" / final.name
    trainer.save_checkpoint(saved, weights_only=False)
    _wait_for_saves(trainer)
    if trainer.is_global_zero:
        saved.replace(final)
        with suppress(OSError):  # what a save that was killed has left is no harm there
            saved.parent.rmdir()
    trainer.strategy.barrier()
    return final.name


def _wait_for_saves(trainer: Trainer) -> None:
    strategy: Any = trainer.strategy
    strategy.wait_for_saves()


def queue_again() -> bool:
    """Have SLURM begin this job anew, as it will once its nodes are given back; whether it has agreed."""
    job = os.environ["SLURM_JOB_ID"]
    if "SLURM_ARRAY_JOB_ID" in os.environ:
        job = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    try:
        status = subprocess.call(["scontrol", "requeue", job])  # noqa: S603, S607 - SLURM's own
        said = f"status {status}"
    except OSError as error:
        status, said = 1, str(error)
    if status:
        rank_zero_warn(f"scontrol requeue {job} failed ({said}): submit the job again by hand")
    return not status


def _wait_at_exit(trainer: Trainer) -> None:
    """The other ranks end by themselves, with 143 too, which Lightning would take for a failure."""
    processes: list[Any] = getattr(trainer.strategy.launcher, "procs", [])
    started = [process for process in processes if isinstance(process, subprocess.Popen)]
    if started:
        processes.clear()
        atexit.register(_wait, started)


def _wait(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.wait(PATIENCE)

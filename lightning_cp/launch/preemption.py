"""Preemption (SIGTERM and the cluster's earlier signals): all ranks stop after the same step, which is
saved.

Python runs a handler between any two instructions, and a signal may reach one rank only, while a save is
collective. So the handler only sets a flag. The flag is added to the vote that ranks hold before every
optimizer step (``consistency.step_vote``). All ranks learn of it at the same step and stop when that step's
batch has ended, where ``ModelCheckpoint`` saves. They exit with 143, the shell's status for SIGTERM.

Lightning's own handler calls a broadcast, which ranks without a signal never join.

Under Fabric the loop is the user's and asks ``strategy.should_stop``.
"""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
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
from lightning_cp.consistency.step_vote import StepVote
from lightning_cp.utils.patching import PatchSet
from lightning_cp.utils.signals import may_handle_signals, restore_handler
from lightning_cp.utils.subprocess import take_processes
from lightning_cp.watchdog.watch import SigtermHandler

STATUS = 128 + signal.SIGTERM
REQUEUE = 2**32
"""Vote for a stop with requeue; the sum over ranks distinguishes it from plain stops."""
PATIENCE = 30.0
"""Seconds that the launching process waits for the other ranks to end."""


class ReceivedSignals:
    """The signals that this process received."""

    def __init__(self) -> None:
        self._vote = 0

    def stop(self, *_: Any) -> None:
        """Request a stop at the next step; a signal handler."""
        self._vote |= 1

    def requeue(self, *_: Any) -> None:
        """Request a stop and a requeue of the job; a signal handler."""
        self._vote |= REQUEUE

    def wish(self) -> int:
        """Return this rank's part of the vote."""
        return self._vote


def record_sigterm(owner: object) -> ReceivedSignals:
    """While ``owner`` lives, record SIGTERM, then call the program's own handler, if any."""
    sent, own = ReceivedSignals(), signal.getsignal(signal.SIGTERM)
    own = signal.SIG_DFL if isinstance(own, SigtermHandler) else own

    def note(number: int, frame: Any) -> None:
        sent.stop()
        if callable(own):
            own(number, frame)

    if may_handle_signals():
        signal.signal(signal.SIGTERM, note)
        weakref.finalize(owner, _restore_handler, note, own).atexit = False
    return sent


def _restore_handler(note: Any, own: Any) -> None:
    """Restore the previous handler, unless another one was set since."""
    if may_handle_signals() and signal.getsignal(signal.SIGTERM) is note:
        restore_handler(signal.SIGTERM, own)


def replace_signal_handlers(trainer: Trainer, vote: StepVote, patches: PatchSet) -> None:
    """Replace the Trainer's signal handlers during a fit; call it before the Trainer registers them.

    Args:
        trainer: the Trainer, whose signal connector is replaced.
        vote: of all ranks, before each step.
        patches: of the run.
    """
    remove_stop_callback(trainer)
    sent = ReceivedSignals() if trainer.state.fn == TrainerFn.FITTING else None
    trainer._signal_connector = StepSignals(trainer, sent)
    vote.wish = None if sent is None else sent.wish
    if sent is None:
        return
    loop: Any = trainer.fit_loop.epoch_loop
    if hasattr(loop, _BROADCAST):
        # Before each batch; the vote says the same without a wait for the device.
        patches.put_method(loop, _BROADCAST, lambda: None)
    callbacks: list[Any] = trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
    callbacks.append(StopAtStep(vote))  # last in the list: the other callbacks have seen the step


def remove_stop_callback(trainer: Any) -> None:
    """Remove the callback; a new list is set, since Lightning may be iterating over the old one."""
    trainer.callbacks = [each for each in trainer.callbacks if not isinstance(each, StopAtStep)]


class StepSignals(_SignalConnector):
    """Lightning's signal connector, with handlers that only set flags.

    ``received_sigterm`` is true on the rank that received the signal, and on all ranks once they stop.
    Lightning's loops read False: they would stop this rank alone, within an accumulation window.

    Args:
        trainer: the Trainer that owns the connector.
        sent: records the signals; ``None``: nothing can be lost, SIGTERM ends the run at once.
    """

    def __init__(self, trainer: Trainer, sent: ReceivedSignals | None) -> None:
        self._sent, self._received = sent, False
        super().__init__(trainer)

    @property
    def received_sigterm(self) -> bool:  # type: ignore[override]
        """True if this rank received SIGTERM, for all readers but Lightning's loops."""
        reader = sys._getframe(2).f_globals.get("__name__", "")  # past Trainer.received_sigterm
        return self._received and not reader.startswith(_LOOPS)

    @received_sigterm.setter
    def received_sigterm(self, received: bool) -> None:
        self._received = received
        if received and self._sent is not None:  # set by a program that wants all ranks to stop
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
_BROADCAST = "_broadcast_sigterm_tensor"


class StopAtStep(Callback):
    """A callback that ends the run after the step at which some rank requested it.

    Args:
        vote: of all ranks, before each step.
    """

    def __init__(self, vote: StepVote) -> None:
        self._vote = vote

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any
    ) -> None:
        """Save and stop, on every rank.

        Raises:
            SIGTERMException: with the exit code of a process that SIGTERM has ended.
        """
        wishes, self._vote.wishes = self._vote.wishes, 0
        if not wishes:
            return
        trainer._signal_connector.received_sigterm |= wishes % REQUEUE > 0
        name = save_for_queue(trainer) if _is_queued(trainer) else save_last(trainer)
        again = wishes >= REQUEUE and trainer.is_global_zero and requeue_job()
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
    """Update the first ModelCheckpoint's ``last.ckpt``, or save to the Trainer's folder; return the
    path."""
    first = next((x for x in trainer.checkpoint_callbacks if isinstance(x, ModelCheckpoint)), None)
    if first is None:
        path = os.path.join(trainer.default_root_dir, "last.ckpt")  # noqa: PTH118 - may be a URL
        trainer.save_checkpoint(path, weights_only=False)
    else:
        chosen, first.save_last = first.save_last, True  # also if it is a link to an older one
        try:
            first._save_last_checkpoint(trainer, first._monitor_candidates(trainer))
        finally:
            first.save_last = chosen
        path = first.last_model_path
    _wait_for_saves(trainer)
    return display_path(Path(path))


def save_for_queue(trainer: Trainer) -> str:
    """Save the file from which Lightning resumes a requeued SLURM job; return its name.

    Lightning reads the highest number among all files with ``ckpt_`` in their names, also of a save that
    was killed. So files are written in a separate folder and then moved.
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
        with suppress(OSError):  # leftovers of a killed save do no harm there
            saved.parent.rmdir()
    trainer.strategy.barrier()
    return final.name


def _wait_for_saves(trainer: Trainer) -> None:
    strategy: Any = trainer.strategy
    strategy.wait_for_saves()


def requeue_job() -> bool:
    """Ask SLURM to requeue this job, which restarts once its nodes are free; return whether SLURM
    agreed."""
    job = os.environ["SLURM_JOB_ID"]
    if "SLURM_ARRAY_JOB_ID" in os.environ:
        job = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    try:
        status = subprocess.call(["scontrol", "requeue", job])  # noqa: S603, S607 - SLURM's own
        said = f"status {status}"
    except OSError as error:
        status, said = 1, str(error)
    if status:
        rank_zero_warn(f"scontrol requeue {job} failed ({said}). Submit the job again by hand")
    return not status


def _wait_at_exit(trainer: Trainer) -> None:
    """Wait for the other ranks at exit: they also end with 143, which Lightning would treat as a
    failure."""
    if processes := take_processes(trainer.strategy.launcher):
        atexit.register(_wait, processes)


def _wait(processes: list[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.wait(PATIENCE)

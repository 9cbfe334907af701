"""Ranks that Lightning starts: it is said before, and errors of workers are shown by who started them."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from lightning.fabric.strategies.launchers.multiprocessing import (
    _MultiProcessingLauncher as FabricLauncher,
)
from lightning.fabric.strategies.launchers.subprocess_script import (
    _SubprocessScriptLauncher as FabricSubprocesses,
)
from lightning.fabric.utilities.rank_zero import rank_zero_info
from lightning.pytorch.strategies.launchers.multiprocessing import (
    _MultiProcessingLauncher as TrainerLauncher,
)
from lightning.pytorch.strategies.launchers.subprocess_script import (
    _SubprocessScriptLauncher as TrainerSubprocesses,
)
from lightning.pytorch.trainer.states import TrainerFn
from torch.multiprocessing.spawn import ProcessException, ProcessExitedException

from lightning_cp import console
from lightning_cp.errors import LightningCPError, RankFailure
from lightning_cp.faults.ending import FOLDER
from lightning_cp.strategies.launch.results import Packing, receiving, sending_whole, unpacked
from lightning_cp.strategies.loaders.draws import random_state, restore
from lightning_cp.strategies.watch.signals import STATUS

INTERRUPTED = 130
"""The status of a worker that SIGINT has ended, as a shell's."""
ERROR = ".error"
"""The name of a file with a rank's error ends so."""
LET_OTHERS_END = 1.0
"""Seconds by which a rank that only repeats another one's error ends later than that one."""


class _Reporting:
    """Shows what the workers found out, and not what the first one to end happened to say."""

    _strategy: Any

    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        parent: Any = super()
        with tempfile.TemporaryDirectory(prefix="lightning_cp-verdicts-") as folder:
            os.environ[FOLDER] = folder
            passed: list[int] = []
            _say_start(self._strategy.num_processes)
            try:
                with _passing_sigterm_on(passed):
                    return parent.launch(_Noting(function, self._strategy), *args, **kwargs)
            except ProcessException as error:
                _raise_own(Path(folder))
                verdict = _said(Path(folder))
                if verdict is None and _was_stopped(error, passed):
                    raise SystemExit(STATUS) from None
                if verdict is None and _ended_with(error, INTERRUPTED):
                    raise KeyboardInterrupt from None
                if verdict is None or _same_end(verdict, str(error)):
                    raise
                line, _, details = verdict.partition("\n")
                raise RankFailure(line) from _cause(details)
            finally:
                os.environ.pop(FOLDER, None)

    def _wrapping_function(self, *args: Any, **kwargs: Any) -> None:
        """Run a worker; PyTorch would take one that was interrupted for done."""
        parent: Any = super()
        try:
            parent._wrapping_function(*args, **kwargs)
        except KeyboardInterrupt:
            raise SystemExit(INTERRUPTED) from None


@contextmanager
def _passing_sigterm_on(passed: list[int]) -> Iterator[None]:
    """SIGTERM to this process reaches the workers that it starts, which stop together; notes what came."""
    before = set(multiprocessing.active_children())

    def pass_on(number: int, frame: Any) -> None:
        passed.append(number)
        for worker in set(multiprocessing.active_children()) - before:
            worker.terminate()

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    own = signal.signal(signal.SIGTERM, pass_on)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, own or signal.SIG_DFL)  # None: of a library in C


class ReportingTrainerLauncher(_Reporting, TrainerLauncher):
    """The Trainer's."""

    def launch(
        self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any
    ) -> Any:
        """As Lightning's; after an error this process, which has trained nothing, saves nothing."""
        try:
            return super().launch(function, *args, trainer=trainer, **kwargs)
        except BaseException:
            if trainer is not None:
                self._strategy.save_no_more(trainer)
            raise

    def _collect_rank_zero_results(self, trainer: Any, results: Any) -> Any:
        """As Lightning's, with the whole of what a fit has spread over ranks. Collective."""
        if trainer.state.fn != TrainerFn.FITTING:  # Lightning sends no weights back
            return super()._collect_rank_zero_results(trainer, results)
        with sending_whole(trainer.lightning_module, keeps=self._strategy.local_rank == 0):
            return super()._collect_rank_zero_results(trainer, results)

    def _recover_results_in_main_process(self, worker_output: Any, trainer: Any) -> None:
        with receiving(trainer.lightning_module):
            super()._recover_results_in_main_process(worker_output, trainer)


class ReportingFabricLauncher(_Reporting, FabricLauncher):
    """Fabric's."""

    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """As Lightning's; what the function returns may hold tensors."""
        with tempfile.TemporaryDirectory(prefix="lightning_cp-result-") as folder:
            result = Path(folder, "result")
            super().launch(Packing(function, self._strategy, result), *args, **kwargs)
            return unpacked(result)


class _Announcing:
    """Says that it runs the program again, once for each other rank."""

    num_processes: int

    def _call_children_scripts(self) -> None:
        parent: Any = super()
        _say_start(self.num_processes)
        os.environ[console.RANKS_HERE] = str(self.num_processes)
        try:
            parent._call_children_scripts()
        finally:
            del os.environ[console.RANKS_HERE]  # the program may start other ranks later


class AnnouncingTrainerLauncher(_Announcing, TrainerSubprocesses):
    """The Trainer's."""


class AnnouncingFabricLauncher(_Announcing, FabricSubprocesses):
    """Fabric's."""


def _say_start(count: int) -> None:
    if count > 1:
        rank_zero_info(f"starting {count} ranks on this machine: this may take a minute")


def reporting(launcher: Any) -> Any:
    """The launcher, or one of this file in place of Lightning's own."""
    workers = {TrainerLauncher: ReportingTrainerLauncher, FabricLauncher: ReportingFabricLauncher}
    if kind := workers.get(type(launcher)):
        return kind(launcher._strategy, launcher._start_method)
    programs = {
        TrainerSubprocesses: AnnouncingTrainerLauncher,
        FabricSubprocesses: AnnouncingFabricLauncher,
    }
    if kind := programs.get(type(launcher)):
        return kind(launcher.cluster_environment, launcher.num_processes, launcher.num_nodes)
    return launcher


class _Noting:
    """The function that a worker runs, from the program's random state; its errors are noted first of all.

    Python seeds ``random`` again in every process that is forked, and orders of samples would differ.
    """

    def __init__(self, function: Callable[..., Any], strategy: Any) -> None:
        self._function, self._strategy = function, strategy
        self._random = random_state()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        restore(self._random)
        self._strategy.tell_rank()
        try:
            return self._function(*args, **kwargs)
        except BaseException as error:
            self._strategy._core.watch.note(error)
            if isinstance(error, LightningCPError) and error.is_own:
                _leave_error(error, self._strategy.global_rank)
            elif isinstance(error, RankFailure):
                time.sleep(LET_OTHERS_END)
            raise


def _leave_error(error: LightningCPError, rank: int) -> None:
    """For the process that has started this one, which raises it; what cannot be pickled it has as a text."""
    text = "".join(traceback.format_exception(error))
    kept = (error, text, console.user_frames(error))
    with suppress(Exception):  # of any kind: objects of the user's may be in it
        part = Path(os.environ[FOLDER], f"{rank}.part")
        part.write_bytes(pickle.dumps(kept))
        part.rename(part.with_suffix(ERROR))


def _raise_own(folder: Path) -> None:
    """Raise the error of ours that the first rank has left, if there is one, with its traceback as the cause.

    Raises:
        LightningCPError: of the type and with the arguments that it had there.
    """
    for path in sorted(folder.glob(f"*{ERROR}"), key=lambda path: int(path.stem)):
        error, text, frames = pickle.loads(path.read_bytes())  # noqa: S301 - a worker of ours wrote it
        raise error from console.RankTraceback(f"\n{text}", frames)


def _was_stopped(error: ProcessException, passed: list[int]) -> bool:
    """True if the workers ended because of SIGTERM, to this process or to one of them."""
    ended = isinstance(error, ProcessExitedException)
    return ended and (bool(passed) or error.exit_code == STATUS)


def _ended_with(error: ProcessException, status: int) -> bool:
    return isinstance(error, ProcessExitedException) and error.exit_code == status


def _said(folder: Path) -> str | None:
    """The text of the first worker that ended because of another one."""
    found = [path for path in folder.iterdir() if not path.suffix]
    first = min(found, key=lambda path: path.stat().st_mtime_ns, default=None)
    return None if first is None else first.read_text(encoding="utf-8", errors="replace").rstrip()


def _cause(details: str) -> console.RankTraceback | None:
    return console.RankTraceback(f"\n{details}", f"{details.rstrip()}\n") if details else None


def _same_end(verdict: str, text: str) -> bool:
    """True if the error that the parent has is the one that the others speak of."""
    return "\n" in verdict and verdict.splitlines()[-1] == text.rstrip().splitlines()[-1]

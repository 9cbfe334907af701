"""Results of worker processes for the program that started them: whole tensors, also of sharded ones."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.strategies.launchers.multiprocessing import (
    _MultiProcessingLauncher as FabricLauncher,
)
from lightning.fabric.strategies.launchers.subprocess_script import (
    _SubprocessScriptLauncher as FabricSubprocesses,
)
from lightning.fabric.utilities import move_data_to_device
from lightning.fabric.utilities.apply_func import apply_to_collection
from lightning.fabric.utilities.rank_zero import rank_zero_info, rank_zero_only
from lightning.pytorch.strategies.launchers.multiprocessing import (
    _MultiProcessingLauncher as TrainerLauncher,
)
from lightning.pytorch.strategies.launchers.subprocess_script import (
    _SubprocessScriptLauncher as TrainerSubprocesses,
)
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.spawn import ProcessException, ProcessExitedException

from lightning_cp import error_display
from lightning_cp.errors import ConfigError, LightningCPError, RankFailure
from lightning_cp.launch.preemption import STATUS
from lightning_cp.loaders.rng import random_state, restore
from lightning_cp.utils.dtensor import is_on_meta
from lightning_cp.utils.patching import PatchSet
from lightning_cp.utils.signals import signal_handler
from lightning_cp.watchdog.attribution import FOLDER

State = dict[str, Any]
_STATE = "state"
_CPU = torch.device("cpu")


@contextmanager
def send_full_state(module: nn.Module, *, keeps: bool) -> Iterator[None]:
    """Context in which ``state_dict()`` returns what is sent back, on the ranks that send. Collective."""
    with PatchSet() as patches:
        patches.replace(
            module, "state_dict", lambda own: lambda: _state_to_send(module, own(), keeps=keeps)
        )
        yield


@contextmanager
def receive_state(module: nn.Module) -> Iterator[None]:
    """Context in which ``load_state_dict()`` accepts what was sent."""
    with PatchSet() as patches:
        patches.replace(
            module,
            "load_state_dict",
            lambda own: lambda sent, strict: _copy_received(module, own, sent),
        )
        yield


def _state_to_send(module: nn.Module, state: State, *, keeps: bool) -> State:
    """Return a module's state and non-persistent buffers, tied weights once; empty on ranks that do not
    send."""
    from lightning_cp.checkpoint.full import gather
    from lightning_cp.checkpoint.tree import make_plain

    first = _first_names(module, state)
    made = make_plain({_STATE: {**dict(module.named_buffers()), **state}}, may_lack=[_STATE])
    once = {name: x for name, x in made.tree[_STATE].items() if first.get(name, name) == name}
    gathered = gather(once, keeps=keeps)
    if not keeps:
        return {}
    if made.unwritable:
        names = [name.removeprefix(f"{_STATE}.") for name in made.unwritable[:3]]
        rank_zero_only(error_display.warn)(
            f"{', '.join(names)} of the module is not returned from the workers: only tensors, "
            "numbers, strings and plain containers are. Save a checkpoint to keep it."
        )
    return {_STATE: gathered.whole(once), "notes": made.notes, "tied": first}


def _first_names(module: nn.Module, state: State) -> dict[str, str]:
    """Return the first name of each parameter in a state; the same on all ranks."""
    first: dict[int, str] = {}
    named = module.named_parameters(remove_duplicate=False)
    return {name: first.setdefault(id(x), name) for name, x in named if name in state}


def _copy_received(module: nn.Module, load: Callable[..., Any], sent: State) -> Any:
    """Copy what was sent into the module, whose dtypes and devices stay."""
    from lightning_cp.checkpoint.pretrained.initial_values import materialize
    from lightning_cp.checkpoint.tree import restore_types

    state = restore_types({_STATE: sent[_STATE]}, sent["notes"])[_STATE]
    state |= {name: state[first] for name, first in sent["tied"].items() if first in state}
    if is_on_meta(module):
        materialize(module, _CPU, None)
    beside = dict(module.named_buffers())
    for name in module.state_dict():
        beside.pop(name, None)
    for name in beside.keys() & state.keys():
        path, _, own = name.rpartition(".")
        setattr(module.get_submodule(path), own, state.pop(name).to(beside[name], copy=True))
    loaded = load(state, strict=False)
    _warn_of_lost(getattr(loaded, "unexpected_keys", []))
    return loaded


def _warn_of_lost(names: list[str]) -> None:
    if names:
        rank_zero_only(error_display.warn)(
            f"workers trained {', '.join(names[:3])}{', ...' * (len(names) > 3)}, which the module of this "
            "process lacks, so the values were not returned. Create them in __init__ instead of "
            "configure_model or setup, or save a checkpoint."
        )


class PackedFunction:
    """The function that a worker of Fabric runs: the first rank's result goes into a file.

    Sent as tensors, it would be memory shared by both processes, and the worker has ended by then.
    """

    def __init__(self, function: Callable[..., Any], strategy: Any, file: Path) -> None:
        self._function, self._strategy, self._file = function, strategy, file

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        result = self._function(*args, **kwargs)
        if self._strategy.local_rank:
            return
        apply_to_collection(result, (torch.Tensor, nn.Module), _check_whole)
        with self._file.open("wb") as file:
            pickle.dump(move_data_to_device(result, "cpu"), file)


def unpacked(file: Path) -> Any:
    """Read the result that a worker wrote; the folder belongs to this user alone."""
    with file.open("rb") as packed:
        return pickle.load(packed)  # noqa: S301


def _check_whole(x: torch.Tensor | nn.Module) -> None:
    tensors = x.state_dict().values() if isinstance(x, nn.Module) else [x]
    if any(isinstance(each, DTensor) for each in tensors):
        raise ConfigError(
            "the function given to fabric.launch returns sharded tensors, of which this rank has one part. "
            "Return lightning_cp.checkpoint.whole(x) of each, called on every rank, or save them with "
            "fabric.save(path, state)."
        )


# Ranks that Lightning starts: announced before, and their errors shown by the process that started them.


INTERRUPTED = 130
"""Exit status of a worker that SIGINT ended, as a shell reports it."""
ERROR = ".error"
"""Suffix of a file with a rank's error."""
REPEATED_ERROR_DELAY = 1.0
"""Seconds by which a rank that only repeats another one's error ends later than that one."""


class _ReportingLauncher:
    """Starts workers and raises the original error, not that of the worker that happened to end first."""

    _strategy: Any

    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        parent: Any = super()
        with tempfile.TemporaryDirectory(prefix="lightning_cp-verdicts-") as folder:
            os.environ[FOLDER] = folder
            passed: list[int] = []
            _announce_start(self._strategy.num_processes)
            try:
                with _forward_sigterm(passed):
                    return parent.launch(_WorkerFunction(function, self._strategy), *args, **kwargs)
            except ProcessException as error:
                _raise_written_error(Path(folder))
                verdict = _read_verdict(Path(folder))
                if verdict is None and _was_stopped(error, passed):
                    raise SystemExit(STATUS) from None
                if verdict is None and _ended_with(error, INTERRUPTED):
                    raise KeyboardInterrupt from None
                if verdict is None or _is_same_error(verdict, str(error)):
                    raise
                line, _, details = verdict.partition("\n")
                raise RankFailure(line) from _cause(details)
            finally:
                os.environ.pop(FOLDER, None)

    def _wrapping_function(self, *args: Any, **kwargs: Any) -> None:
        """Run a worker; without this, PyTorch would count an interrupted one as done."""
        parent: Any = super()
        try:
            parent._wrapping_function(*args, **kwargs)
        except KeyboardInterrupt:
            raise SystemExit(INTERRUPTED) from None


@contextmanager
def _forward_sigterm(passed: list[int]) -> Iterator[None]:
    """Context in which SIGTERM is passed on to the workers, which stop together; ``passed`` records it."""
    before = set(multiprocessing.active_children())

    def forward_signal(number: int, frame: Any) -> None:
        passed.append(number)
        for worker in set(multiprocessing.active_children()) - before:
            worker.terminate()

    with signal_handler(forward_signal, signal.SIGTERM):
        yield


class ReportingTrainerLauncher(_ReportingLauncher, TrainerLauncher):
    """Lightning's multiprocessing launcher of the Trainer, with results and errors of this file."""

    def launch(
        self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any
    ) -> Any:
        """Launch as Lightning does; after an error this process saves nothing, as it has trained
        nothing."""
        try:
            return super().launch(function, *args, trainer=trainer, **kwargs)
        except BaseException:
            if trainer is not None:
                self._strategy.disable_saves(trainer)
            raise

    def _collect_rank_zero_results(self, trainer: Any, results: Any) -> Any:
        """Collect as Lightning does, with sharded state made whole. Collective."""
        if trainer.state.fn != TrainerFn.FITTING:  # Lightning sends no weights back
            return super()._collect_rank_zero_results(trainer, results)
        with send_full_state(trainer.lightning_module, keeps=self._strategy.local_rank == 0):
            return super()._collect_rank_zero_results(trainer, results)

    def _recover_results_in_main_process(self, worker_output: Any, trainer: Any) -> None:
        with receive_state(trainer.lightning_module):
            super()._recover_results_in_main_process(worker_output, trainer)


class ReportingFabricLauncher(_ReportingLauncher, FabricLauncher):
    """Lightning's multiprocessing launcher of Fabric, with results and errors of this file."""

    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Launch as Lightning does; the function may return tensors."""
        with tempfile.TemporaryDirectory(prefix="lightning_cp-result-") as folder:
            result = Path(folder, "result")
            super().launch(PackedFunction(function, self._strategy, result), *args, **kwargs)
            return unpacked(result)


class _AnnouncingLauncher:
    """Announces that it runs the program again, once for each other rank."""

    num_processes: int

    def _call_children_scripts(self) -> None:
        parent: Any = super()
        _announce_start(self.num_processes)
        os.environ[error_display.RANKS_HERE] = str(self.num_processes)
        try:
            parent._call_children_scripts()
        finally:
            del os.environ[error_display.RANKS_HERE]  # the program may start other ranks later


class AnnouncingTrainerLauncher(_AnnouncingLauncher, TrainerSubprocesses):
    """Lightning's subprocess launcher of the Trainer, which announces itself."""


class AnnouncingFabricLauncher(_AnnouncingLauncher, FabricSubprocesses):
    """Lightning's subprocess launcher of Fabric, which announces itself."""


def _announce_start(count: int) -> None:
    if count > 1:
        rank_zero_info(f"starting {count} ranks on this machine: this may take a minute")


def reporting_launcher(launcher: Any) -> Any:
    """Return the launcher, or this file's class in place of Lightning's."""
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


class _WorkerFunction:
    """The function that a worker runs: sets the program's random state, and records an error first of all.

    Python seeds ``random`` again in every forked process, so orders of samples would differ.
    """

    def __init__(self, function: Callable[..., Any], strategy: Any) -> None:
        self._function, self._strategy = function, strategy
        self._random = random_state()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        restore(self._random)
        # After a fork PyTorch makes its pool of threads anew at the first use, and two threads at once would
        # end the process ("Invalid thread pool!").
        torch.set_num_threads(torch.get_num_threads())
        self._strategy.set_worker_rank()
        try:
            return self._function(*args, **kwargs)
        except BaseException as error:
            self._strategy.runtime.watch.note(error)
            if isinstance(error, LightningCPError) and error.is_own:
                _write_error(error, self._strategy.global_rank)
            elif isinstance(error, RankFailure):
                time.sleep(REPEATED_ERROR_DELAY)
            raise


def _write_error(error: LightningCPError, rank: int) -> None:
    """Write the error for the parent process, which raises it; as text if it cannot be pickled."""
    text = "".join(traceback.format_exception(error))
    kept = (error, text, error_display.user_frames(error))
    with suppress(Exception):  # any error: it may hold objects of the user's
        part = Path(os.environ[FOLDER], f"{rank}.part")
        part.write_bytes(pickle.dumps(kept))
        part.rename(part.with_suffix(ERROR))


def _raise_written_error(folder: Path) -> None:
    """Raise the error of this package that the first rank wrote, if any, with its traceback as the cause.

    Raises:
        LightningCPError: with its original type and arguments.
    """
    for path in sorted(folder.glob(f"*{ERROR}"), key=lambda path: int(path.stem)):
        error, text, frames = pickle.loads(path.read_bytes())  # noqa: S301 - a worker of ours wrote it
        raise error from error_display.RankTraceback(f"\n{text}", frames)


def _was_stopped(error: ProcessException, passed: list[int]) -> bool:
    """True if the workers ended because of SIGTERM, to this process or to one of them."""
    ended = isinstance(error, ProcessExitedException)
    return ended and (bool(passed) or error.exit_code == STATUS)


def _ended_with(error: ProcessException, status: int) -> bool:
    return isinstance(error, ProcessExitedException) and error.exit_code == status


def _read_verdict(folder: Path) -> str | None:
    """Return the verdict of the first worker that ended because of another one."""
    found = [path for path in folder.iterdir() if not path.suffix]
    first = min(found, key=lambda path: path.stat().st_mtime_ns, default=None)
    return None if first is None else first.read_text(encoding="utf-8", errors="replace").rstrip()


def _cause(details: str) -> error_display.RankTraceback | None:
    return error_display.RankTraceback(f"\n{details}", f"{details.rstrip()}\n") if details else None


def _is_same_error(verdict: str, text: str) -> bool:
    """True if the parent's error and the workers' verdict are about the same rank."""
    return "\n" in verdict and verdict.splitlines()[-1] == text.rstrip().splitlines()[-1]

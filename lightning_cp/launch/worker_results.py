"""Results of workers for the program that has started them: whole tensors, also where theirs are parts."""

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

from lightning_cp import error_display as console
from lightning_cp.checkpoint.full import gather
from lightning_cp.checkpoint.pretrained.initial_values import materialize
from lightning_cp.checkpoint.pretrained.meta_init import is_on_meta
from lightning_cp.checkpoint.tree import make_plain, restore_types
from lightning_cp.errors import ConfigError, LightningCPError, RankFailure
from lightning_cp.launch.preemption import STATUS
from lightning_cp.loaders.rng import random_state, restore
from lightning_cp.utils.patching import PatchSet
from lightning_cp.watchdog.attribution import FOLDER

State = dict[str, Any]
_STATE = "state"
_CPU = torch.device("cpu")


@contextmanager
def sending_whole(module: nn.Module, *, keeps: bool) -> Iterator[None]:
    """``state_dict()`` is what is sent back, on the ranks that send it. Collective."""
    replaced = PatchSet()
    replaced.replace(module, "state_dict", lambda own: lambda: _sent(module, own(), keeps=keeps))
    try:
        yield
    finally:
        replaced.undo()


@contextmanager
def receiving(module: nn.Module) -> Iterator[None]:
    """``load_state_dict()`` takes what was sent."""
    replaced = PatchSet()
    replaced.replace(
        module, "load_state_dict", lambda own: lambda sent, strict: _receive(module, own, sent)
    )
    try:
        yield
    finally:
        replaced.undo()


def _sent(module: nn.Module, state: State, *, keeps: bool) -> State:
    """A module's state and its other buffers, tied weights once; on ranks that do not keep it, nothing."""
    first = _first_names(module, state)
    made = make_plain({_STATE: {**dict(module.named_buffers()), **state}}, may_lack=[_STATE])
    once = {name: x for name, x in made.tree[_STATE].items() if first.get(name, name) == name}
    gathered = gather(once, keeps=keeps)
    if not keeps:
        return {}
    if made.left_out:
        names = [name.removeprefix(f"{_STATE}.") for name in made.left_out[:3]]
        rank_zero_only(console.warn)(
            f"{', '.join(names)} of the module does not come back to the program that has "
            "started the workers: what is sent are tensors, numbers, strings and plain containers."
        )
    return {_STATE: gathered.whole(once), "notes": made.notes, "tied": first}


def _first_names(module: nn.Module, state: State) -> dict[str, str]:
    """Of each parameter's names in a state the first; the same on all ranks."""
    first: dict[int, str] = {}
    named = module.named_parameters(remove_duplicate=False)
    return {name: first.setdefault(id(x), name) for name, x in named if name in state}


def _receive(module: nn.Module, load: Callable[..., Any], sent: State) -> Any:
    """Copy what was sent into the module, whose dtypes and devices stay."""
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
    _say_what_is_lost(getattr(loaded, "unexpected_keys", []))
    return loaded


def _say_what_is_lost(names: list[str]) -> None:
    if names:
        rank_zero_only(console.warn)(
            f"workers have trained {', '.join(names[:3])}{', ...' * (len(names) > 3)}, which the module of "
            "the program that has started them has not, so that did not come back. Build it in __init__ and "
            "not in configure_model or setup, or save a checkpoint."
        )


class Packing:
    """The function that a worker of Fabric runs: the first rank's result goes into a file.

    Tensors themselves would be sent as memory that both processes share, and the worker has ended by then.
    """

    def __init__(self, function: Callable[..., Any], strategy: Any, file: Path) -> None:
        self._function, self._strategy, self._file = function, strategy, file

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        result = self._function(*args, **kwargs)
        if self._strategy.local_rank:
            return
        apply_to_collection(result, (torch.Tensor, nn.Module), _require_whole)
        with self._file.open("wb") as file:
            pickle.dump(move_data_to_device(result, "cpu"), file)


def unpacked(file: Path) -> Any:
    """The result that ``Packing`` in a worker of this program has put there, a folder of its user alone."""
    with file.open("rb") as packed:
        return pickle.load(packed)  # noqa: S301


def _require_whole(x: torch.Tensor | nn.Module) -> None:
    tensors = x.state_dict().values() if isinstance(x, nn.Module) else [x]
    if any(isinstance(each, DTensor) for each in tensors):
        raise ConfigError(
            "the function that fabric.launch has run returns tensors that are spread over ranks, and this "
            "rank has its part alone. Let it return lightning_cp.checkpoint.whole(x) of each, called on "
            "every rank, or save them with fabric.save(path, state)."
        )


# Ranks that Lightning starts: it is said before, and errors of workers are shown by who started them.


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
            self._strategy.runtime.watch.note(error)
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

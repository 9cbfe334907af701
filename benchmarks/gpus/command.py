"""The command: ranks that make checks one after the other, and the report.

Ranks are processes that are started here, so that a line may kill or hang them; of the processes that
torchrun has started, the first one starts them, and the others end at once.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import NoReturn

import torch

from benchmarks.gpu_check import FAILED, MISSING, NO_GPU, facts_of, missing_packages
from benchmarks.gpu_sections import Check
from benchmarks.gpus import attention, communication, faults, training
from benchmarks.gpus.line import Line, Place
from lightning_cp.bench.processes import (
    VARIABLES,
    TorchrunRank,
    on_torchrun_ranks,
    torchrun_rank,
)
from lightning_cp.errors import ConfigError
from lightning_cp.kernels.devices import has_nvidia_gpu
from lightning_cp.utils.command_help import argument_parser
from tests.helpers.launch.start import environment, torchrun_variables

PACKAGES = ("pytest", "lightning", "torchmetrics", "transformers")
LINE_SECONDS = {"cuda": 180.0, "cpu": 240.0}
"""Most seconds of one line, by device type: starting and compiling included."""
GRACE = 3.0
"""Seconds for other ranks to say what happened to them once one has failed."""


def lines(count: int) -> list[Line]:
    """All lines, in order."""
    return [
        *attention.lines(count),
        *training.lines(count),
        *communication.lines(count),
        *faults.lines(),
    ]


@dataclass(frozen=True)
class Verdict:
    """What became of a line."""

    line: str
    passed: bool
    what: str
    seconds: float

    def __str__(self) -> str:
        return f"{'passed' if self.passed else 'FAILED'}  {self.line}: {self.what} ({self.seconds:.1f} s)"


class Report:
    """The verdicts so far, printed and written as they come: ``gpus.md`` and ``gpus.json``."""

    def __init__(self, folder: Path, facts: dict[str, str]) -> None:
        self.folder, self.facts = folder, facts
        self.verdicts: list[Verdict] = []
        print("\n".join(f"{name}: {value}" for name, value in facts.items()), flush=True)

    def add(self, verdict: Verdict) -> None:
        """Print a verdict, and write all."""
        self.verdicts.append(verdict)
        print(verdict, flush=True)
        head = ["# GPUs", "", *(f"- {name}: {value}" for name, value in self.facts.items()), ""]
        text = [f"- {each}" for each in self.verdicts]
        (self.folder / "gpus.md").write_text("\n".join([*head, *text]) + "\n")
        content = {"facts": self.facts, "lines": [asdict(each) for each in self.verdicts]}
        (self.folder / "gpus.json").write_text(json.dumps(content, indent=1) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Check and report; returns the exit status."""
    try:
        own = torchrun_rank()
    except ConfigError as error:
        print(error, file=sys.stderr)
        return FAILED
    if own is not None and own.rank > 0:
        return 0  # the first one starts ranks of its own
    _forget_torchrun()
    given = _parser().parse_args(arguments)
    if lacking := missing_packages([Check("all lines", "", 0, _no_section, PACKAGES)]):
        print("\n".join(lacking[:2]), file=sys.stderr)
        return MISSING
    rehearses = given.rehearse or not has_nvidia_gpu()
    count = own.count if own is not None else given.devices or _devices(rehearses)
    if not 2 <= count <= 8 or not (rehearses or count <= torch.cuda.device_count()):
        print(_COUNT.format(count, torch.cuda.device_count()), file=sys.stderr)
        return NO_GPU
    chosen = _chosen(lines(count), given.only, short=given.short)
    if given.list:
        print("\n".join(line.name for line in chosen))
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(FAILED))  # ranks are ended on the way out
    given.folder.mkdir(parents=True, exist_ok=True)
    place = Place("cpu" if rehearses else "cuda", count, given.folder.absolute())
    facts = {**facts_of(place.device_type), "ranks": str(count)}
    del facts["extent"]  # of a check of one GPU
    report = Report(given.folder, facts)
    began = time.monotonic()
    for verdict in verdicts(chosen, place):
        report.add(verdict)
    failed = sum(not each.passed for each in report.verdicts)
    print(
        f"\n{len(report.verdicts) - failed} of {len(report.verdicts)} lines passed in "
        f"{time.monotonic() - began:.0f} s; written to {given.folder}/gpus.md and gpus.json"
    )
    return FAILED if failed else 0


def _forget_torchrun() -> None:
    """Remove what torchrun told this process, which would tell its ranks to meet at torchrun's store."""
    for name in [*VARIABLES, *os.environ]:
        if name in VARIABLES or name.startswith(("TORCHELASTIC", "GROUP_", "ROLE_", "LOCAL_WORLD")):
            os.environ.pop(name, None)


def _no_section(*_: object) -> NoReturn:
    raise NotImplementedError


def _devices(rehearses: bool) -> int:
    return 2 if rehearses else torch.cuda.device_count()


def _parser() -> argparse.ArgumentParser:
    parser = argument_parser(__doc__)
    add = parser.add_argument
    add("--rehearse", action="store_true", help="on CPU, in small; so it is without a GPU")
    add("--short", action="store_true", help="a line of each kind")
    add("--devices", type=int, help="ranks, where torchrun does not say it")
    add("--only", metavar="TEXT", help="lines whose names have this text")
    add("--folder", type=Path, default=Path("outputs") / "gpus", help="of the report")
    add("--list", action="store_true", help="name the lines and end")
    return parser


def _chosen(every: Sequence[Line], only: str | None, *, short: bool) -> list[Line]:
    found = [line for line in every if line.is_short or not short]
    if only is not None:
        found = [line for line in found if only in line.name]
        if not found:
            raise SystemExit(f"no line has {only!r} in its name. --list names the lines.")
    return found


def verdicts(chosen: Sequence[Line], place: Place, source: str = __name__) -> Iterator[Verdict]:
    """Yield the verdict of each line; a line that fails costs new ranks for those after it.

    Args:
        chosen: the lines.
        place: where they run.
        source: the module whose ``lines`` has them.
    """
    together = [line for line in chosen if line.on_ranks]
    while together:
        done = 0
        with Ranks(place, together, source) as ranks:
            for line in together:
                verdict = ranks.verdict(line)
                done += 1
                yield verdict
                if not verdict.passed:
                    break
        together = together[done:]
    for line in chosen:
        if not line.on_ranks:
            yield _alone(line, place)


def _alone(line: Line, place: Place) -> Verdict:
    """Run a line that starts its own ranks."""
    began = time.monotonic()
    try:
        passed, what = True, line.run(place)
    except Exception as error:  # any: the other lines are wanted too
        passed, what = False, _in_words(error)
    return Verdict(line.name, passed, what, time.monotonic() - began)


def _in_words(error: BaseException) -> str:
    said = " ".join(str(error).split())[:400]
    return f"{type(error).__name__}: {said}"


class Ranks:
    """Processes that make lines together; the block ends them.

    Args:
        place: their devices and number.
        together: the lines, which they begin one after the other.
        source: the module whose ``lines`` has them.
    """

    def __init__(self, place: Place, together: Sequence[Line], source: str = __name__) -> None:
        self._place, self._lines, self._source = place, list(together), source
        self._processes: list[subprocess.Popen[bytes]] = []
        self._index = 0

    def __enter__(self) -> Ranks:
        self._answers = self._place.folder / f"ranks-{time.monotonic_ns()}"
        self._answers.mkdir()
        (self._answers / "lines.json").write_text(json.dumps([line.name for line in self._lines]))
        command = [sys.executable, "-m", "benchmarks.gpus.command_rank", str(self._answers)]
        command += [self._place.device_type, str(self._place.folder), self._source]
        for rank, own in enumerate(torchrun_variables(self._place.count)):
            with (self._answers / f"output-{rank}").open("wb") as output:
                self._processes.append(
                    subprocess.Popen(  # noqa: S603
                        command,
                        env=environment(**own),
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for file in self._answers.iterdir():
            file.unlink()
        self._answers.rmdir()

    def verdict(self, line: Line) -> Verdict:
        """Wait until all ranks have answered, one has failed, or the time is up."""
        began, index = time.monotonic(), self._index
        self._index += 1
        end, limit = began + LINE_SECONDS[self._place.device_type], ""
        while True:
            answers = self._read(index)
            failed = [each for each in answers.values() if not each["passed"]]
            gone = [
                rank
                for rank, process in enumerate(self._processes)
                if process.poll() is not None and rank not in answers
            ]
            if len(answers) == self._place.count or limit:
                break
            if failed or gone:
                end = min(end, time.monotonic() + GRACE)
            if time.monotonic() >= end:
                limit = "no answer in time"
            time.sleep(0.05)
        seconds = time.monotonic() - began
        if not limit and not failed:
            return Verdict(line.name, True, str(answers[0]["what"]), seconds)
        told = [
            f"rank {rank}: {each['what']}" for rank, each in answers.items() if not each["passed"]
        ]
        told += [f"rank {rank} ended: {self._last_line(rank)}" for rank in gone]
        if not told:
            silent = sorted(set(range(self._place.count)) - answers.keys())
            told = [f"{limit} from ranks {silent}: {self._last_line(silent[0])}"]
        self._log(line)
        return Verdict(line.name, False, "; ".join(told), seconds)

    def _log(self, line: Line) -> None:
        """Append the ends of what ranks printed to ``gpus.log``."""
        with (self._place.folder / "gpus.log").open("a") as log:
            for rank in range(self._place.count):
                text = (self._answers / f"output-{rank}").read_text(errors="replace")
                log.write(f"===== {line.name}, rank {rank}\n{text[-6000:]}\n")

    def _read(self, index: int) -> dict[int, dict[str, object]]:
        found: dict[int, dict[str, object]] = {}
        for rank in range(self._place.count):
            file = self._answers / f"answer-{index}-{rank}"
            if file.exists():
                found[rank] = json.loads(file.read_text())
        return found

    def _last_line(self, rank: int) -> str:
        text = (self._answers / f"output-{rank}").read_text(errors="replace").strip()
        return text.splitlines()[-1][:300] if text else "it said nothing"


def run_rank(answers: Path, device_type: str, folder: Path, source: str) -> None:
    """Make the lines of ``lines.json`` as one rank; end at the first that fails here."""
    own = torchrun_rank()
    assert own is not None
    place = Place(device_type, own.count, folder)
    known: list[Line] = import_module(source).lines(own.count)
    on_torchrun_ranks(own, _make_lines, answers, own, place, known, device_type=device_type)


def _make_lines(answers: Path, own: TorchrunRank, place: Place, every: Sequence[Line]) -> None:
    known = {line.name: line for line in every}
    for index, name in enumerate(json.loads((answers / "lines.json").read_text())):
        passed = True
        try:
            with _fresh_state():
                what = known[name].run(place)
        except Exception as error:  # any: it is the line's verdict
            traceback.print_exc()
            passed, what = False, _in_words(error)
        file = answers / f"answer-{index}-{own.rank}"
        written = file.with_suffix(".part")
        written.write_text(json.dumps({"passed": passed, "what": what}))
        written.rename(file)
        if not passed:
            sys.stdout.flush()
            os._exit(1)  # others may never come to the end of their line


@contextmanager
def _fresh_state() -> Iterator[None]:
    """A block that begins with the same seed, and leaves PyTorch's default dtype as it was."""
    before = torch.get_default_dtype()
    torch.manual_seed(0)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


_COUNT = (
    "the lines are for 2 to 8 ranks, each with a GPU of its own, and there are {} ranks and {} GPUs. Start "
    "torchrun --nproc-per-node 2 -m lightning_cp.bench.gpus, or rehearse on CPU: --rehearse --devices 2."
)

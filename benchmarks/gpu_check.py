"""All tests and measurements that need an NVIDIA GPU, in one command.

    make gpu-check                                  # or: python -m benchmarks.gpu_check
    make gpu-check ARGS="--part 1/3"                # one of three parts, each of at most 9 minutes
    make gpu-check ARGS="--only kernels,replay-dense"
    make gpu-check ARGS="--full"                    # longer sequences, every candidate of the sweep

Run from the repository. ``--list`` names the sections. Each section runs in a separate process with a time
limit, so that a kernel that breaks the device breaks one section. After each section the report is written:
``report.md`` to read, with a verdict for each section, and ``report.json`` to compute with. The launch table
of a sweep is beside them. A later run in the same folder on the same device, versions and code skips the
sections that passed (``--again`` repeats them). No network is needed.

The exit status is 0 if all sections asked for have passed, 1 if not, 2 without a GPU, and 3 if a package is
missing. ``--device cpu`` rehearses the measurements, in small, with the kernels that run there.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, is_dataclass
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_sections import CHECKS, Check, Result, sizes_of
from lightning_cp.kernels.devices import has_nvidia_gpu
from lightning_cp.utils.command_help import argument_parser


@dataclass
class Section:
    """A section of the report."""

    name: str
    title: str
    table: str = ""
    rows: list[Any] = field(default_factory=list)
    failure: str | None = None
    seconds: float = 0.0
    headline: str = ""

    @property
    def verdict(self) -> str:
        """One line: passed or FAILED, and the figure or the failure."""
        if self.failure is None:
            return f"passed: {self.headline or f'{len(self.rows)} rows'}"
        return f"FAILED: {self.failure.strip().splitlines()[-1][:300]}"

    @classmethod
    def of(cls, name: str, title: str, make: Callable[[], tuple[Any, ...]]) -> Section:
        """Return the section of ``make``'s rows and table; a failure becomes part of the report."""
        began = time.monotonic()
        try:
            rows, text, headline = Result(*make())
        except Exception:  # any: the other sections are wanted too
            seconds = time.monotonic() - began
            return cls(name, title, failure=traceback.format_exc(), seconds=seconds)
        missing = [f"{row!r}" for row in rows if getattr(row, "failed", False)]
        shown = [asdict(row) if is_dataclass(row) else row for row in rows]  # type: ignore[arg-type]
        seconds = time.monotonic() - began
        return cls(name, title, text, shown, "\n".join(missing) or None, seconds, headline)

    def write(self, path: Path) -> None:
        """Write the section as JSON."""
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")


@dataclass
class GpuReport:
    """The report on one device with one set of versions and one state of the code, stored in a folder."""

    folder: Path
    facts: dict[str, str]
    sections: dict[str, Section] = field(default_factory=dict)

    @classmethod
    def open(cls, folder: Path, facts: dict[str, str]) -> GpuReport:
        """Load the folder's report if its facts except the date are the same; else return an empty one."""
        report = cls(folder, facts)
        path = folder / "report.json"
        if not path.exists():
            return report
        known = json.loads(path.read_text())
        if {**known["facts"], "date": ""} == {**facts, "date": ""}:
            sections = [Section(**each) for each in known["sections"]]
            report.sections = {section.name: section for section in sections}
        else:
            path.rename(folder / "report.before.json")
        return report

    def has_passed(self, name: str) -> bool:
        """True if the section ran and nothing failed in it."""
        return name in self.sections and self.sections[name].failure is None

    def add(self, section: Section) -> None:
        """Add a section, and write ``report.md`` and ``report.json``."""
        self.sections[section.name] = section
        lines = ["# GPU check", "", *(f"- {name}: {value}" for name, value in self.facts.items())]
        lines += ["", *(f"- **{each.name}** {each.verdict}" for each in self.sections.values())]
        for each in self.sections.values():
            lines += ["", f"## {each.title}", "", f"{each.seconds:.0f} s", "", each.table]
            if each.failure is not None:
                lines += ["FAILED", "", "```", each.failure.strip(), "```"]
        (self.folder / "report.md").write_text("\n".join(lines) + "\n")
        content = {
            "facts": self.facts,
            "sections": [asdict(each) for each in self.sections.values()],
        }
        (self.folder / "report.json").write_text(json.dumps(content, indent=1) + "\n")


def facts_of(device_type: str, *, full: bool = False) -> dict[str, str]:
    """Return the device, the versions, the code and the extent that figures depend on."""
    facts = {
        "extent": "full" if full else "as in parts",
        "date": datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %z"),
        "device": "CPU, a rehearsal: these figures say nothing of a GPU",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "code": _code(),
    }
    if device_type == "cuda":
        properties = torch.cuda.get_device_properties(0)
        facts["device"] = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
        facts["driver"] = _driver()
        facts["CUDA"] = str(torch.version.cuda)
        facts["flash-attn"] = _version("flash-attn")
    return facts


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _code() -> str:
    """Return a digest of the code, so that figures of other code are not reused."""
    digest = hashlib.sha256()
    root = Path(__file__).parents[1]
    files = [*root.glob("benchmarks/**/*.py"), *root.glob("lightning_cp/**/*.py")]
    for path in sorted(files):
        digest.update(path.relative_to(root).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def _driver() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        told = subprocess.run(query, capture_output=True, text=True, check=True)  # noqa: S603
        return told.stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "unknown: nvidia-smi does not tell"


FAILED, NO_GPU, MISSING = 1, 2, 3
"""Exit statuses."""
PART_MINUTES = 9.0
"""Time limit of one part."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Test, measure and report; returns the exit status."""
    given = _parser().parse_args(arguments)
    if given.run:
        return _run_here(given.run, given.device, given.folder, full=given.full)
    checks = [check for check in CHECKS if given.device in check.devices]
    if given.list:
        print(
            "\n".join(
                f"{check.name:16} {check.minutes:4.1f} min  {check.title}" for check in checks
            )
        )
        return 0
    if given.device == "cuda" and not has_nvidia_gpu():
        print(_NO_GPU, file=sys.stderr)
        return NO_GPU
    checks = _selected_checks(checks, given.only, given.part)
    if lines := missing_packages(checks):
        print("\n".join(lines), file=sys.stderr)
        return MISSING
    given.folder.mkdir(parents=True, exist_ok=True)
    report = GpuReport.open(given.folder, facts_of(given.device, full=given.full))
    print("\n".join(f"{name}: {value}" for name, value in report.facts.items()), flush=True)
    end = time.monotonic() + 60 * PART_MINUTES if given.part else None
    for check in checks:
        if report.has_passed(check.name) and not given.again:
            print(f"\n## {check.title}\n\nhas passed already (--again repeats it)", flush=True)
            continue
        report.add(_run_in_process(check, given.device, given.folder, end, full=given.full))
    print("\n" + "\n".join(f"{each.name}: {each.verdict}" for each in report.sections.values()))
    print(f"\nwritten to {given.folder}/report.md and report.json", flush=True)
    return 0 if all(report.has_passed(check.name) for check in checks) else FAILED


def _parser() -> argparse.ArgumentParser:
    parser = argument_parser(__doc__)
    add = parser.add_argument
    add("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: rehearse in small")
    add("--folder", type=Path, default=Path("outputs") / "gpu-check", help="of the report")
    add("--list", action="store_true", help="name the sections and end")
    add("--only", metavar="NAME,NAME", help="these sections alone")
    add("--part", metavar="I/N", help=f"the I-th of N parts, at most {PART_MINUTES:.0f} minutes")
    add("--full", action="store_true", help="longer sequences, and every candidate of the sweep")
    add("--again", action="store_true", help="repeat sections that have passed")
    add("--run", help=argparse.SUPPRESS)  # one section, in this process
    return parser


def _selected_checks(checks: list[Check], only: str | None, part: str | None) -> list[Check]:
    """Return the sections that the arguments name; exit if a name or part is invalid."""
    if only is not None:
        names, known = only.split(","), {check.name: check for check in checks}
        if unknown := [name for name in names if name not in known]:
            raise SystemExit(
                f"gpu-check has no section {', '.join(unknown)}. The sections are {', '.join(known)}."
            )
        checks = [known[name] for name in names]
    if part is None:
        return checks
    index, _, count = part.partition("/")
    if not (index.isdigit() and count.isdigit() and 1 <= int(index) <= int(count)):
        raise SystemExit(f"--part {part} names no part. Write --part 1/3, 2/3 and 3/3.")
    return parts(checks, int(count))[int(index) - 1]


def parts(checks: Sequence[Check], count: int) -> list[list[Check]]:
    """Distribute the sections over ``count`` parts of about equal minutes, the longest first."""
    dealt: list[list[Check]] = [[] for _ in range(count)]
    for check in sorted(checks, key=lambda check: -check.minutes):
        min(dealt, key=lambda part: sum(each.minutes for each in part)).append(check)
    return [sorted(part, key=checks.index) for part in dealt]


def missing_packages(checks: Sequence[Check]) -> list[str]:
    """Return a message on packages that the sections need and this Python lacks; empty if none."""
    lacking: dict[str, list[str]] = {}
    for check in checks:
        for package in check.packages:
            if find_spec(package) is None:
                lacking.setdefault(package.replace("_", "-"), []).append(check.name)
    if not lacking:
        return []
    able = [
        check.name for check in checks if not any(check.name in names for names in lacking.values())
    ]
    return [
        f"gpu-check needs {', '.join(lacking)}, which this Python ({sys.executable}) does not have.",
        f"Install: {sys.executable} -m pip install {' '.join(lacking)}",
        *(f"  {package} is needed by {', '.join(names)}" for package, names in lacking.items()),
        *([f"Without it: --only {','.join(able)}"] if able else []),
    ]


def _run_in_process(
    check: Check, device: str, folder: Path, end: float | None, *, full: bool = False
) -> Section:
    """Run a section in a separate process, and read its result."""
    print(f"\n## {check.title}\n", flush=True)
    left = None if end is None else end - time.monotonic()
    if left is not None and left < 60 * min(check.minutes, 0.5):
        return Section(check.name, check.title, failure="not begun: the part's time was used up")
    path = folder / f"{check.name}.section.json"
    path.unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks.gpu_check"]
    command += ["--run", check.name, "--device", device, "--folder", str(folder)]
    command += ["--full"] if full else []
    interprets = device == "cpu" and check.name.startswith("launch-")
    environment = {**os.environ, "TRITON_INTERPRET": "1"} if interprets else None
    failure = _wait(command, left, environment)
    if not path.exists():
        return Section(check.name, check.title, failure=failure)
    section = Section(**json.loads(path.read_text()))
    path.unlink()
    return section


def _wait(
    command: Sequence[str], limit: float | None, environment: Mapping[str, str] | None = None
) -> str:
    """Run a command and its children until it ends or its time is used up; return which of both in words."""
    process = subprocess.Popen(command, start_new_session=True, env=environment)  # noqa: S603
    try:
        status = process.wait(limit)
        return f"the section's process ended with status {status} and left no result"
    except subprocess.TimeoutExpired:
        return f"cut after {limit:.0f} s, when the part's time was used up"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _run_here(name: str, device: str, folder: Path, *, full: bool) -> int:
    """Run one section in this process and write its result."""
    check = next(check for check in CHECKS if check.name == name)
    sizes = sizes_of(device, full=full)
    section = Section.of(name, check.title, lambda: check.run(sizes, folder))
    print(section.failure or section.table, f"\n{section.verdict}", sep="\n", flush=True)
    section.write(folder / f"{name}.section.json")
    return 0


_NO_GPU = (
    "gpu-check needs an NVIDIA GPU that PyTorch can use, and this machine has none "
    "(torch.cuda.is_available() is false, or this PyTorch is built for AMD's). "
    "--device cpu rehearses the measurements."
)

if __name__ == "__main__":
    sys.exit(main())

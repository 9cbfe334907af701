"""The report of a GPU check: its sections, what its figures depend on, and the files."""

from __future__ import annotations

import hashlib
import json
import platform
import subprocess
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, is_dataclass
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch


@dataclass
class Section:
    """A part of the report."""

    name: str
    title: str
    table: str = ""
    rows: list[Any] = field(default_factory=list)
    failure: str | None = None
    seconds: float = 0.0

    @classmethod
    def of(cls, name: str, title: str, make: Callable[[], tuple[list[Any], str]]) -> Section:
        """What ``make`` returns (rows and their table); a failure becomes part of the report."""
        began = time.monotonic()
        try:
            rows, text = make()
        except Exception:  # any: the other sections are wanted too
            seconds = time.monotonic() - began
            return cls(name, title, failure=traceback.format_exc(), seconds=seconds)
        missing = [f"{row!r}" for row in rows if getattr(row, "failed", False)]
        shown = [asdict(row) if is_dataclass(row) else row for row in rows]  # type: ignore[arg-type]
        seconds = time.monotonic() - began
        return cls(name, title, text, shown, "\n".join(missing) or None, seconds)

    def write(self, path: Path) -> None:
        """As JSON."""
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")


@dataclass
class GpuReport:
    """What is known of one device, with one set of versions and one state of the code; kept in a folder."""

    folder: Path
    facts: dict[str, str]
    sections: dict[str, Section] = field(default_factory=dict)

    @classmethod
    def open(cls, folder: Path, facts: dict[str, str]) -> GpuReport:
        """The report that lies in the folder, if its facts but the date are the same; else an empty one."""
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
        """Take a section in, and write ``report.md`` and ``report.json``."""
        self.sections[section.name] = section
        lines = ["# GPU check", "", *(f"- {name}: {value}" for name, value in self.facts.items())]
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


def facts_of(device_type: str) -> dict[str, str]:
    """What figures depend on."""
    facts = {
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
    """A digest of the package's files, so that figures of other code are not kept."""
    digest = hashlib.sha256()
    root = Path(__file__).parents[1]
    for path in sorted(root.rglob("*.py")):
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

"""The report of a GPU check: its sections, what its figures depend on, and the files."""

from __future__ import annotations

import json
import platform
import subprocess
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch


@dataclass
class Section:
    """A part of the report."""

    title: str
    table: str = ""
    rows: list[Any] = field(default_factory=list)
    failure: str | None = None

    @classmethod
    def of(cls, title: str, make: Callable[[], tuple[list[Any], str]]) -> Section:
        """What ``make`` returns (rows and their table); a failure becomes part of the report."""
        print(f"\n## {title}\n", flush=True)
        try:
            rows, text = make()
        except Exception:  # any: the other sections are wanted too
            failed = traceback.format_exc()
            print(failed, flush=True)
            return cls(title, failure=failed)
        print(text, flush=True)
        told = [
            f"{row.kernel}, {row.tokens} tokens: {row.obstacle}" for row in rows if _failed(row)
        ]
        shown = [asdict(row) if is_dataclass(row) else row for row in rows]  # type: ignore[arg-type]
        return cls(title, text, shown, "\n".join(told) or None)


def _failed(row: Any) -> bool:
    """Whether a figure is missing that should be there; what a kernel cannot do is none."""
    return getattr(row, "failed", False)


def facts_of(device_type: str) -> dict[str, str]:
    """What figures depend on."""
    facts = {
        "date": datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %z"),
        "device": "CPU, a rehearsal: these figures say nothing of a GPU",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version("triton"),
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


def _driver() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        told = subprocess.run(query, capture_output=True, text=True, check=True)  # noqa: S603
        return told.stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "unknown: nvidia-smi does not tell"


def write_report(folder: Path, facts: dict[str, str], sections: Sequence[Section]) -> None:
    """``report.md`` to read, and ``report.json`` to compute with."""
    lines = ["# GPU check", "", *(f"- {name}: {value}" for name, value in facts.items())]
    for section in sections:
        lines += ["", f"## {section.title}", "", section.table]
        if section.failure is not None:
            lines += ["FAILED", "", "```", section.failure.strip(), "```"]
    (folder / "report.md").write_text("\n".join(lines) + "\n")
    content = {"facts": facts, "sections": [asdict(section) for section in sections]}
    (folder / "report.json").write_text(json.dumps(content, indent=1) + "\n")

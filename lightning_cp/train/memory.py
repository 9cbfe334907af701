"""The most memory that this process has held."""

from __future__ import annotations

import re
import resource
import sys
from pathlib import Path

import torch

STATUS = Path("/proc/self/status")


def peak_memory_mib(device: torch.device) -> float:
    """MiB at most so far: of tensors on a GPU, of the whole process where the device is the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    if STATUS.is_file() and (found := re.search(r"VmHWM:\s+(\d+) kB", STATUS.read_text())):
        return int(found[1]) / 2**10
    # Not on Linux, where it starts from the peak of the process that started this one.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)

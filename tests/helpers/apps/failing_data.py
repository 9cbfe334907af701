"""Data modules of the main job that fail on one rank, named by ``data._target_`` on the command line."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch

from lightning_cp.apps.data import ByteDataModule, PackedBytes, python_stdlib


class Failing(PackedBytes):
    """Fails from its second sequence on."""

    kind = ""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        sample = super().__getitem__(index)
        if index == 0:
            return sample
        if self.kind == "refused":
            return {"tokens": sample["input_ids"]}
        raise RuntimeError("the disk is gone")


def failing_on(rank: int, kind: str, **settings: Any) -> ByteDataModule:
    """The usual text; on one rank something is wrong with it: ``refused`` or ``raises``."""
    data = python_stdlib(**settings)
    if int(os.environ.get("LOCAL_RANK", 0)) == rank:
        data.validation.__class__ = Failing
        data.validation.kind = kind  # type: ignore[attr-defined]
    return data


class Killing(PackedBytes):
    """Kills its process with the sequence that is read as the ``at``-th, unless that has happened before."""

    at = 0
    mark = Path()

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.at -= 1
        if not self.at and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def killed_once(rank: int, at: int, mark: str, **settings: Any) -> ByteDataModule:
    """The usual text; one rank is killed once, in training, and leaves a mark."""
    data = python_stdlib(**settings)
    if int(os.environ.get("LOCAL_RANK", 0)) == rank:
        data.training.__class__ = Killing
        data.training.at, data.training.mark = at, Path(mark)  # type: ignore[attr-defined]
    return data

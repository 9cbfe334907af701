"""Data modules of the main job that fail on one rank, named by ``data._target_`` on the command line."""

from __future__ import annotations

import os
from typing import Any

import torch

from lightning_cp.data import PackedBytes, python_stdlib
from lightning_cp.data.module import ByteDataModule


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

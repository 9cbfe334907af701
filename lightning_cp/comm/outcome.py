"""The outcome of work that every rank did alone: it went well on all, or failed on some."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn

import torch
import torch.distributed as dist

from lightning_cp.comm.objects import told_by_name
from lightning_cp.errors import RankFailure


def share_outcome(error: Exception | None, device_type: str, *, what: str) -> None:
    """Raise on every rank if one of them has an error; all ranks of the world come here.

    Args:
        error: this rank's, if there is one.
        device_type: where the default group's backend takes tensors.
        what: what the ranks did, for the message.

    Raises:
        Exception: ``error``.
        RankFailure: another rank has one; carries its text.
    """
    texts = outcome_texts(error, device_type)
    if any(texts):
        _refuse(error, dict(enumerate(texts)), f"{what} ended on all ranks")


def raise_reported(error: Exception | None, group: dist.ProcessGroup) -> NoReturn:
    """Raise on every rank of the group, once all of them know that some rank has an error.

    Raises:
        RankFailure: another rank has one; carries its text. The rank itself raises its own.
    """
    texts = [""] * group.size()
    dist.all_gather_object(texts, "" if error is None else told_by_name(error), group=group)
    by_rank = {dist.get_global_rank(group, at): text for at, text in enumerate(texts)}
    _refuse(error, by_rank, "stopped before any data moved")


def _refuse(error: Exception | None, texts: Mapping[int, str], what: str) -> NoReturn:
    """This rank's own error, or what the others said of theirs."""
    if error is not None:
        raise error
    shown = "; ".join(f"rank {rank} raised {text}" for rank, text in texts.items() if text)
    raise RankFailure(f"{what}, because {shown}")


def outcome_texts(error: Exception | None, device_type: str) -> list[str]:
    """Every rank's error as text, empty if it has none; one small sum if none has."""
    own = "" if error is None else told_by_name(error)
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [own]
    failed = torch.tensor([int(error is not None)], device=device_type)
    dist.all_reduce(failed)
    if not int(failed):
        return [""] * dist.get_world_size()
    texts = [""] * dist.get_world_size()
    dist.all_gather_object(texts, own)
    return texts


def summed_over_world(values: list[int], device_type: str) -> list[int]:
    """Sums of integers over all ranks."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return values
    numbers = torch.tensor(values, dtype=torch.int64, device=device_type)
    dist.all_reduce(numbers)
    return [int(x) for x in numbers.tolist()]

"""Whether something that every rank did alone went well on all of them."""

from __future__ import annotations

import torch
import torch.distributed as dist

from lightning_cp.comm.objects import told
from lightning_cp.errors import RankFailure, without_home


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
    if error is not None:
        raise error
    if any(texts):
        shown = "; ".join(f"rank {rank} raised {text}" for rank, text in enumerate(texts) if text)
        raise RankFailure(f"{what} ended on all ranks, because {shown}")


def outcome_texts(error: Exception | None, device_type: str) -> list[str]:
    """Every rank's error as text, empty if it has none; one small sum if none has."""
    own = "" if error is None else _text(error)
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [own]
    failed = torch.tensor([int(error is not None)], device=device_type)
    dist.all_reduce(failed)
    if not int(failed):
        return [""] * dist.get_world_size()
    texts = [""] * dist.get_world_size()
    dist.all_gather_object(texts, own)
    return texts


def _text(error: Exception) -> str:
    """Without the paths of this machine, which an error of the system has."""
    said = told(error) if isinstance(error, OSError) and error.errno is not None else str(error)
    return without_home(f"{type(error).__name__}: {said}")


def summed_over_world(values: list[int], device_type: str) -> list[int]:
    """Sums of integers over all ranks."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return values
    numbers = torch.tensor(values, dtype=torch.int64, device=device_type)
    dist.all_reduce(numbers)
    return [int(x) for x in numbers.tolist()]

"""A comparison of a checkpoint and a run: names, shapes and dtypes, before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from lightning_cp.errors import CheckpointError


def require_same(
    got: Mapping[str, torch.Tensor],
    want: Mapping[str, torch.Tensor],
    *,
    what: str,
    strict: bool = True,
) -> None:
    """Refuse tensors that do not fit, naming the first.

    Args:
        got: the checkpoint's, by name; ``Stored`` ones will do.
        want: the run's.
        what: whose they are, for the message.
        strict: names must be the same too.

    Raises:
        CheckpointError: a name, shape or dtype differs.
    """
    missing = [name for name in want if name not in got]
    unexpected = [name for name in got if name not in want]
    if strict and (missing or unexpected):
        raise CheckpointError(
            f"the checkpoint is of another {what}: {_listed(missing, 'it has no')}"
            f"{' and ' if missing and unexpected else ''}{_listed(unexpected, 'this run has no')}. "
            "Nothing was "
            "loaded. What would work: the model that was saved, or strict=False for what both have."
        )
    for name, tensor in want.items():
        if name not in got:
            continue
        if tuple(got[name].shape) != tuple(tensor.shape):
            raise CheckpointError(
                f"{name} has shape {list(got[name].shape)} in the checkpoint and {list(tensor.shape)} in "
                f"this {what}. Nothing was loaded."
            )
        if got[name].dtype != tensor.dtype:
            raise CheckpointError(
                f"{name} is {_short(got[name].dtype)} in the checkpoint and {_short(tensor.dtype)} in this "
                f"{what}. Nothing was loaded. Train in the dtype of the checkpoint, or convert the weights "
                "and save them."
            )


def _listed(names: list[str], verb: str) -> str:
    if not names:
        return ""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{verb} {', '.join(names[:3])}{more}"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

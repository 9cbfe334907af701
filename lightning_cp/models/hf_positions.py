"""Models that do not count positions 0, 1, 2, ... when they are given none."""

from __future__ import annotations

from typing import Any

from lightning_cp.errors import ConfigError
from lightning_cp.models.handle import SwapHandle


def own_positions(model: Any) -> str:
    """The module that counts positions in its own way, as "RobertaEmbeddings"; empty if there is none."""
    for module in model.modules():
        name = type(module).__name__
        if hasattr(module, "create_position_ids_from_input_ids") or name in _FROM_MASK:
            return name
    return ""


_FROM_MASK = {"OPTLearnedPositionalEmbedding"}
"""Classes that count the tokens that are not padding, so that positions begin at 0 behind left padding."""


def check_positions(handle: SwapHandle, name: str) -> None:
    """Refuse global positions 0, 1, 2, ... where one process would have counted otherwise.

    Raises:
        ConfigError: the batch brings no positions of its own, and they would be others than here.
    """
    state = handle.state
    if state is None or not name:
        return
    layout = state.layout
    rows = layout.documents.rows if layout.documents is not None else ()
    if name in _FROM_MASK and all(not row.size or row[0, 0] == 0 for row in rows):
        return
    here = layout.positions(handle.mesh.cp_rank)
    real = here < layout.seq_len
    if bool((state.position_ids.cpu() == here)[..., real].all()):
        raise ConfigError(
            f"{name} does not count positions from 0 on (it looks at padding, or begins behind the padding "
            "index), which a rank cannot do from its own tokens. Put the position_ids that it would make "
            "into the batch (in the dataset or on_after_batch_transfer), for the whole sequence."
        )

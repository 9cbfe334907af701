"""Requirements of a call on its kernel."""

from __future__ import annotations

import pytest
import torch

from lightning_cp.attention.plan import make_request
from lightning_cp.attention.spec import AttentionSpec
from lightning_cp.layout import Documents, SequenceLayout


@pytest.mark.parametrize(
    ("documents", "packed"),
    [
        (None, False),
        (Documents.single(16), False),
        (Documents.from_cu_seqlens([0, 7, 16]), True),
        (Documents.from_padding_mask(torch.tensor([[1] * 16, [1] * 16])), False),
        (Documents.from_padding_mask(torch.tensor([[1] * 16, [1] * 9 + [0] * 7])), True),
    ],
    ids=["none", "one", "two", "full rows", "padded row"],
)
def test_rows_of_several_documents_are_packed(documents: Documents | None, packed: bool) -> None:
    layout, x = SequenceLayout(16, documents=documents), torch.zeros(2, 16, 4, 8)
    assert make_request(x, x, layout, AttentionSpec()).packed is packed

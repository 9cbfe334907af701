"""Forms in which a batch declares documents, padding and positions: understood, or refused by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from lightning_cp.batch import BatchRules, documents_of, read_batch, shard_batch
from lightning_cp.errors import ConfigError, ShapeError
from lightning_cp.layout import SequenceLayout

ROWS, LENGTH = 2, 29
ONE, TWO, CUT = [[0, LENGTH]], [[0, 10], [10, LENGTH]], [[0, 10], [10, 25]]
"""Documents: one, two, and two behind which 4 tokens are padding."""
PAD = [[0, 25]]

IDS = torch.randint(1, 99, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
PLAIN = torch.arange(LENGTH)
PACKED = torch.cat([torch.arange(10), torch.arange(LENGTH - 10)])
SEGMENTS = torch.tensor([4] * 10 + [7] * (LENGTH - 10))
CU = torch.tensor([0, 10, LENGTH], dtype=torch.int32)
MASK = (torch.arange(LENGTH) < 25).long()
IMAGE = torch.cat([torch.arange(8), torch.full((12,), 8), torch.arange(9, 18)])
"""Positions of one axis: 12 tokens of an image stand at one of them."""


def rows(x: torch.Tensor, *front: int) -> torch.Tensor:
    """The same for all rows (and what stands in front of these)."""
    return x.expand(*front, ROWS, LENGTH)


@dataclass(frozen=True)
class Form:
    """What a batch has besides its tokens, and what is made of it: documents of every row, or an error."""

    given: dict[str, Any]
    want: Any
    """Documents of the rows; ``None``: nothing was said; or a message."""
    hf: bool = True
    """The model is one of Hugging Face's, which reads masks and positions."""
    dims: dict[str, int | None] | None = None


UNDERSTOOD = {
    # documents
    "cu_seqlens [documents + 1]": Form({"cu_seqlens": CU}, TWO),
    "cu_seqlens, int64": Form({"cu_seqlens": CU.long()}, TWO),
    "cu_seqlens [1, documents + 1]": Form({"cu_seqlens": CU[None]}, TWO),
    "cu_seqlens [rows, documents + 1]": Form({"cu_seqlens": torch.stack([CU, CU])}, TWO),
    "cu_seqlens of a plain module": Form({"cu_seqlens": CU}, TWO, hf=False),
    "flash-attention's names": Form({"cu_seq_lens_q": CU, "cu_seq_lens_k": CU}, TWO),
    "flash-attention's other names": Form({"cu_seqlens_q": CU, "cu_seqlens_k": CU}, TWO),
    "a flattening collator": Form(
        {
            "position_ids": rows(PACKED),
            "cu_seq_lens_q": CU,
            "cu_seq_lens_k": CU,
            "max_length_q": 19,
            "max_length_k": 19,
            "seq_idx": rows(SEGMENTS),
        },
        TWO,
    ),
    "nested cu_seqlens": Form({"packing": {"cu_seqlens": CU}}, TWO),
    "cu_seqlens in a list of dicts": Form({"packing": [{"cu_seqlens": CU}]}, TWO),
    "cu_seqlens of another sequence": Form(
        {"image": {"cu_seqlens": torch.tensor([0, 4, 8])}}, None, dims={"image.cu_seqlens": None}
    ),
    "segment_ids [rows, S]": Form({"segment_ids": rows(SEGMENTS)}, TWO),
    "segment_ids [1, S], before the tokens": Form({"segment_ids": SEGMENTS[None]}, TWO),
    "segment_ids [S]": Form({"segment_ids": SEGMENTS}, TWO),
    "segment_ids, int32": Form({"segment_ids": rows(SEGMENTS).int()}, TWO, hf=False),
    "seq_idx": Form({"seq_idx": rows(SEGMENTS)}, TWO),
    "sequence first": Form(
        {"segment_ids": rows(SEGMENTS).t(), "position_ids": rows(PACKED).t()},
        TWO,
        dims={"segment_ids": 0, "position_ids": 0},
    ),
    "nested segment_ids": Form(
        {"packing": {"segment_ids": rows(SEGMENTS)}}, TWO, dims={"packing.segment_ids": 1}
    ),
    "two declarations that agree": Form({"cu_seqlens": CU, "segment_ids": rows(SEGMENTS)}, TWO),
    "packed and padded": Form({"segment_ids": rows(SEGMENTS), "attention_mask": rows(MASK)}, CUT),
    "nothing": Form({"cu_seqlens": None, "attention_mask": None, "position_ids": None}, None),
    # padding
    "mask, int64": Form({"attention_mask": rows(MASK)}, PAD),
    "mask, bool": Form({"attention_mask": rows(MASK).bool()}, PAD),
    "mask, float": Form({"attention_mask": rows(MASK).float()}, PAD),
    "mask [1, S]": Form({"attention_mask": MASK[None]}, PAD),
    "mask of ones": Form({"attention_mask": rows(torch.ones_like(MASK))}, None),
    "mask, sequence first": Form(
        {"attention_mask": rows(MASK).t()}, PAD, dims={"attention_mask": 0}
    ),
    "nested mask": Form(
        {"text": {"attention_mask": rows(MASK)}}, PAD, dims={"text.attention_mask": 1}
    ),
    "mask of a plain module": Form({"attention_mask": rows(MASK)}, None, hf=False),
    "dense mask that every rank gets": Form(
        {"attention_mask": torch.ones(ROWS, 1, LENGTH, LENGTH)},
        None,
        hf=False,
        dims={"attention_mask": None},
    ),
    # positions
    "positions [rows, S]": Form({"position_ids": rows(PACKED)}, TWO),
    "positions [1, S]": Form({"position_ids": PACKED[None]}, TWO),
    "positions [S]": Form({"position_ids": PACKED}, TWO),
    "positions, int32": Form({"position_ids": rows(PACKED).int()}, TWO),
    "positions that run on": Form({"position_ids": rows(PLAIN)}, ONE),
    "text's positions in front, packed": Form({"position_ids": rows(PACKED, 4)}, TWO),
    "text's positions in front, an image": Form(
        {"position_ids": torch.stack([rows(PLAIN), *rows(IMAGE, 3)])}, ONE
    ),
    "text's positions alone": Form({"position_ids": rows(PACKED, 1)}, TWO),
    "three axes of an image": Form({"position_ids": rows(IMAGE, 3)}, None),
    "three axes, and segment_ids": Form(
        {"position_ids": rows(PACKED, 3), "segment_ids": rows(SEGMENTS)}, TWO
    ),
    "three axes behind left padding": Form(
        {"position_ids": rows(PACKED, 3), "attention_mask": rows((PLAIN >= 10).long())},
        [[10, LENGTH]],
    ),
    "nested positions": Form(
        {"text": {"position_ids": rows(PACKED)}}, TWO, dims={"text.position_ids": 1}
    ),
    "positions that run on over documents": Form(
        {"position_ids": rows(PLAIN), "cu_seqlens": CU}, TWO
    ),
    "positions of a plain module": Form({"position_ids": rows(PACKED)}, None, hf=False),
}


@pytest.mark.parametrize("name", UNDERSTOOD)
def test_forms_that_are_understood(name: str) -> None:
    form = UNDERSTOOD[name]
    whole, rules = read(form)
    found = documents_of(whole, rules)
    if form.want is None:
        assert found is None
        return
    assert found is not None
    assert all(row.tolist() == form.want for row in found.rows)
    assert found.num_rows in (1, ROWS)
    layout = SequenceLayout(LENGTH, 2, 1, documents=found)
    part = shard_batch(whole, layout, 1, rules)
    assert part.position_ids.shape[-2:] in ((ROWS, layout.local_len), (1, layout.local_len))


def read(form: Form) -> Any:
    rules = BatchRules(sequence_dims=form.dims or {}, labels="shift", reads_masks=form.hf)
    # What is declared stands in front, where it may be taken for the rows of the batch.
    return read_batch({**form.given, "input_ids": IDS}, rules, needs_labels=False), rules


REFUSED = {
    # documents
    "a list": Form(
        {"cu_seqlens": [0, 10, LENGTH]}, r"'cu_seqlens' must be one tensor, got a list of int"
    ),
    "tensors of several rows": Form(
        {"cu_seqlens": [CU, CU[:2]]}, r"one tensor, got a list of tensors \(2,\), tensors \(3,\)"
    ),
    "an array": Form({"cu_seqlens": CU.numpy()}, r"'cu_seqlens' must be one tensor, got a ndarray"),
    "boundaries of all rows": Form(
        {"cu_seqlens": torch.tensor([0, LENGTH, 2 * LENGTH])},
        r"'cu_seqlens' of shape \(3,\) is not understood.*must end at the sequence length 29, got 58",
    ),
    "boundaries without the end": Form(
        {"cu_seqlens": CU[:-1]}, r"of shape \(2,\).*must end at.*29, got 10"
    ),
    "boundaries that are lengths": Form({"cu_seqlens": CU.diff()}, "must start at 0, got 10"),
    "boundaries, float": Form(
        {"cu_seqlens": CU.float()}, "'cu_seqlens' of shape.*must hold integers"
    ),
    "boundaries of three rows": Form(
        {"cu_seqlens": torch.stack([CU, CU, CU + 0])}, r"of shape \(3, 3\) describes 3 rows.*has 2"
    ),
    "boundaries of another rank": Form(
        {"cu_seqlens": CU.expand(1, 2, 3)}, r"1 dimension\(s\), got.*\(1, 2, 3\)"
    ),
    "nested boundaries of another sequence": Form(
        {"image": {"cu_seqlens": torch.tensor([0, 4, 8])}}, "'image.cu_seqlens' of shape.*end at"
    ),
    "padded boundaries": Form(
        {"cu_seqlens": CU, "cu_seqlens_padded": torch.tensor([0, 12, LENGTH])},
        "'cu_seqlens' and 'cu_seqlens_padded' declare different documents",
    ),
    "boundaries of keys": Form(
        {"cu_seq_lens_q": CU, "cu_seq_lens_k": torch.tensor([0, 9, LENGTH])},
        "declare different documents",
    ),
    "segments and boundaries": Form(
        {"cu_seqlens": torch.tensor([0, 9, LENGTH]), "segment_ids": rows(SEGMENTS)},
        "'segment_ids' and 'cu_seqlens' declare different documents",
    ),
    "segments, float": Form(
        {"segment_ids": rows(SEGMENTS).float()}, "'segment_ids' of.*must hold integers"
    ),
    "segments [rows, 1, S]": Form(
        {"segment_ids": rows(SEGMENTS)[:, None]}, r"got shape \(2, 1, 29\)"
    ),
    "segments, a list": Form(
        {"segment_ids": [[1] * LENGTH] * ROWS}, "'segment_ids' must be one tensor, got a list"
    ),
    "segments that come back": Form({"segment_ids": rows(PLAIN % 2)}, "one contiguous run"),
    "restarts within a document": Form(
        {"position_ids": rows(PLAIN % 10), "cu_seqlens": CU},
        r"'position_ids' of shape \(2, 29\) restart elsewhere than documents begin by 'cu_seqlens'",
    ),
    "documents without a restart": Form(
        {"position_ids": rows(PACKED), "cu_seqlens": torch.tensor([0, 10, 20, LENGTH])},
        "restart elsewhere than documents begin",
    ),
    # padding
    "mask [S]": Form(
        {"attention_mask": MASK}, r"attention_mask of shape \(29,\) cannot be sharded"
    ),
    "mask [rows, S, S]": Form(
        {"attention_mask": torch.ones(ROWS, LENGTH, LENGTH)}, r"\(2, 29, 29\) cannot"
    ),
    "dense mask of a plain module": Form(
        {"attention_mask": torch.ones(ROWS, 1, LENGTH, LENGTH)},
        r"\(2, 1, 29, 29\) cannot",
        hf=False,
    ),
    "mask of numbered documents": Form(
        {"attention_mask": rows(SEGMENTS)},
        r"'attention_mask' of shape \(2, 29\).*got 4.*are segment_ids",
    ),
    "additive mask": Form(
        {"attention_mask": torch.where(MASK.bool(), 0.0, -1e4).expand(ROWS, -1)}, "additive"
    ),
    "mask with holes": Form({"attention_mask": rows(PLAIN % 2)}, "zeros at the left or right end"),
    "mask of three rows": Form(
        {"attention_mask": MASK.expand(3, -1)}, r"\(3, 29\) describes 3 rows.*has 2"
    ),
    "masks of kinds of layers": Form(
        {"attention_mask": {"full_attention": torch.ones(ROWS, 1, LENGTH, LENGTH)}},
        r"'attention_mask' is a dict of tensors \(2, 1, 29, 29\), which cannot be sharded",
    ),
    "an object": Form({"attention_mask": object()}, "'attention_mask' is a object, which cannot"),
    "a sparse mask": Form(
        {"attention_mask": rows(MASK).to_sparse()}, "a tensor of layout sparse_coo"
    ),
    # positions
    "three axes that restart": Form(
        {"position_ids": rows(PACKED, 3)}, r"shape \(3, 2, 29\) restart.*\[4, rows"
    ),
    "two axes that restart": Form({"position_ids": rows(PACKED, 2)}, r"shape \(2, 2, 29\) restart"),
    "axes behind rows": Form(
        {"position_ids": IMAGE.expand(5, 3, LENGTH)}, r"\(5, 3, 29\) are of no known form"
    ),
    "axes last": Form(
        {"position_ids": rows(IMAGE, 3).permute(1, 2, 0)},
        r"one length.*'position_ids': \(2, 29, 3\)",
    ),
    "four dimensions": Form(
        {"position_ids": rows(PACKED, 1, 4)}, r"\(1, 4, 2, 29\) are of no known form"
    ),
    "positions, float": Form(
        {"position_ids": rows(PACKED).float()}, "'position_ids' of.*must hold integers"
    ),
    "positions, a list": Form(
        {"position_ids": [PACKED.tolist()]}, "'position_ids' must be one tensor, got a list"
    ),
    "positions, an array": Form({"position_ids": np.arange(LENGTH)}, "got a ndarray"),
    "nested tensors": Form(
        {"position_ids": torch.nested.nested_tensor([PLAIN[:9], PLAIN[:8]], layout=torch.jagged)},
        "'position_ids' is a nested tensor",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_forms_that_are_refused(name: str) -> None:
    form = REFUSED[name]
    with pytest.raises((ConfigError, ShapeError), match=form.want):
        documents_of(*read(form))

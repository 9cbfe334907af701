"""Batches: what runs along the sequence, what each rank gets, what the loss must know, and documents."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_cp.batch import (
    BatchRules,
    ShardedBatch,
    WholeBatch,
    documents_of,
    read_batch,
    shard_batch,
    unshard_output,
    valid_counts,
)
from lightning_cp.errors import ConfigError, ShapeError
from lightning_cp.layout import Documents, SequenceLayout
from lightning_cp.utils.containers import tensors_of
from lightning_cp.utils.labels import IGNORED_LABEL, shift
from tests.helpers.layout.cases import layouts

SIZES = [(1, 2), (2, 1), (2, 2), (4, 1), (3, 2), (1, 3)]
"""(ring, ulysses)."""

ROWS, LENGTH = 2, 29  # divides by none of the sizes


class Tokens(NamedTuple):
    """A named tuple of the names that Hugging Face models use."""

    input_ids: torch.Tensor
    labels: torch.Tensor


@dataclass(frozen=True)
class Record:
    """A frozen dataclass with a tensor that has no sequence."""

    input_ids: torch.Tensor
    labels: torch.Tensor
    temperature: torch.Tensor


def ids(seed: int = 0, rows: int = ROWS, length: int = LENGTH) -> torch.Tensor:
    """Token ids [rows, length], none of them 0."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, 99, (rows, length), generator=generator)


def targets(seed: int = 1) -> torch.Tensor:
    """Labels [rows, length] of which some have no target."""
    labels = ids(seed)
    return labels.masked_fill(labels % 3 == 0, IGNORED_LABEL)


def shards_of(
    batch: Any, rules: BatchRules, ring: int, ulysses: int, **options: Any
) -> tuple[WholeBatch, SequenceLayout, list[ShardedBatch]]:
    """The batch of every rank."""
    whole = read_batch(batch, rules, needs_labels=False)
    layout = SequenceLayout(whole.seq_len, ring, ulysses, **options)
    ranks = range(layout.cp_size)
    return whole, layout, [shard_batch(whole, layout, rank, rules) for rank in ranks]


# -- every rank's shard put together is the whole ---------------------------------------------------


@pytest.mark.parametrize(("ring", "ulysses"), SIZES)
@pytest.mark.parametrize("kind", ["zigzag", "contiguous", "balanced"])
def test_all_shards_together_are_the_whole_batch(ring: int, ulysses: int, kind: str) -> None:
    batch = {
        "input_ids": ids(),
        "labels": targets(),
        "attention_mask": torch.ones(ROWS, LENGTH, dtype=torch.long),
        "inputs_embeds": torch.randn(ROWS, LENGTH, 3),
        "segment_ids": ids(2) // 50,
        "position_ids": torch.arange(LENGTH).expand(3, ROWS, LENGTH),
        "features": torch.randn(LENGTH, 4),
        "image": torch.randn(ROWS, 3, 5, 5),
        "flag": torch.tensor(True),
        "note": "n",
    }
    rules = BatchRules(sequence_dims={"features": 0}, labels="shift")
    whole, layout, parts = shards_of(batch, rules, ring, ulysses, kind=kind)
    assert whole.dims == {
        "input_ids": 1, "labels": 1, "attention_mask": 1, "inputs_embeds": 1,
        "segment_ids": 1, "position_ids": 2, "features": 0,
    }  # fmt: skip
    padded = {"labels": IGNORED_LABEL, "shift_labels": IGNORED_LABEL, "segment_ids": -1}
    wanted = {**batch, "shift_labels": shift(batch["labels"])}
    for name, x in tensors_of(parts[0].batch):
        dim = {**whole.dims, "shift_labels": 1}.get(name)
        if dim is None:
            assert all(part.batch[name] is batch[name] for part in parts), name
            continue
        shards = [part.batch[name] for part in parts]
        assert torch.equal(layout.unshard(shards, dim=dim), wanted[name]), name
        for rank, shard in enumerate(shards):
            assert shard.dtype == x.dtype
            outside = (layout.positions(rank) >= LENGTH).nonzero().flatten()
            rest = shard.index_select(dim, outside)
            assert torch.equal(rest, torch.full_like(rest, padded.get(name, 0))), name
    assert set(parts[0].batch) == {*batch, "shift_labels"}


@pytest.mark.parametrize(("ring", "ulysses"), SIZES)
def test_labels_are_shifted_before_the_sequence_is_cut(ring: int, ulysses: int) -> None:
    labels = targets()
    _, layout, parts = shards_of(
        {"input_ids": ids(), "labels": labels}, BatchRules(labels="shift"), ring, ulysses
    )
    for rank, part in enumerate(parts):
        assert part.aligned_labels is not None
        assert part.batch["shift_labels"] is part.aligned_labels
        assert part.labels is part.batch["labels"]
        for local, token in enumerate(layout.positions(rank).tolist()):
            for row in range(ROWS):
                inside = token + 1 < LENGTH
                want = int(labels[row, token + 1]) if inside else IGNORED_LABEL
                assert part.aligned_labels[row, local] == want


def test_aligned_labels_stay_where_they_are() -> None:
    batch = {"input_ids": ids(), "labels": targets()}
    whole, _layout, parts = shards_of(batch, BatchRules(labels="aligned"), 2, 2)
    assert whole.aligned_labels is batch["labels"]
    assert all("shift_labels" not in part.batch for part in parts)
    assert all(torch.equal(part.batch["labels"], part.aligned_labels) for part in parts)  # type: ignore[arg-type]


def test_shift_labels_of_the_dataset_win() -> None:
    own = torch.full((ROWS, LENGTH), 5)
    batch = {"input_ids": ids(), "labels": targets(), "shift_labels": own}
    _, layout, parts = shards_of(batch, BatchRules(labels="shift"), 2, 1)
    assert torch.equal(layout.unshard([p.batch["shift_labels"] for p in parts]), own)


@pytest.mark.parametrize(("ring", "ulysses"), SIZES)
def test_positions_are_global_and_0_where_padded(ring: int, ulysses: int) -> None:
    _, layout, parts = shards_of({"input_ids": ids()}, BatchRules(), ring, ulysses)
    for rank, part in enumerate(parts):
        positions = layout.positions(rank)
        want = torch.where(positions < LENGTH, positions, 0).expand(ROWS, -1)
        assert torch.equal(part.position_ids, want)
        assert part.batch["position_ids"] is part.position_ids
        assert part.position_ids.dtype == torch.int64


def test_positions_of_the_dataset_are_used() -> None:
    positions = (torch.arange(LENGTH) % 7).expand(ROWS, -1)
    batch = {"input_ids": ids(), "position_ids": positions}
    _, layout, parts = shards_of(batch, BatchRules(), 2, 2)
    assert all(part.batch["position_ids"] is part.position_ids for part in parts)
    assert torch.equal(layout.unshard([part.position_ids for part in parts]), positions)


@pytest.mark.parametrize("kind", ["cut", "too long"])
def test_positions_of_a_part_are_refused(kind: str) -> None:
    """A rank's own ones, or one too many: the message says which are wanted."""
    positions = torch.arange(LENGTH // 2 if kind == "cut" else LENGTH + 1).expand(ROWS, -1)
    match = f"Give position_ids of the whole sequence, 0 to {LENGTH - 1} "
    with pytest.raises(ShapeError, match=match):
        read_batch(
            {"input_ids": ids(), "position_ids": positions}, BatchRules(), needs_labels=False
        )


@pytest.mark.nightly
@given(layouts(), st.integers(0, 2**32), st.booleans())
def test_positions_travel_with_their_tokens(layout: SequenceLayout, seed: int, own: bool) -> None:
    """Whatever a token is called and wherever it goes, its own position is beside it."""
    length, generator = layout.seq_len, torch.Generator().manual_seed(seed)
    tokens = torch.stack([torch.randperm(length, generator=generator) for _ in range(ROWS)])
    batch = {"input_ids": tokens} | ({"position_ids": (tokens * 7) % 11} if own else {})
    whole = read_batch(batch, BatchRules(), needs_labels=False)
    at = tokens.argsort(1)  # where a token is, by its name
    seen = torch.zeros_like(tokens)
    for rank in range(layout.cp_size):
        part = shard_batch(whole, layout, rank, BatchRules())
        real = layout.positions(rank) < length
        local, positions = part.batch["input_ids"][:, real], part.position_ids[:, real]
        assert torch.equal(positions, (local * 7) % 11 if own else at.gather(1, local))
        assert not part.position_ids[:, ~real].any()
        seen.scatter_add_(1, local, torch.ones_like(local))
    assert bool((seen == 1).all())


# -- containers and names ---------------------------------------------------------------------------


def test_a_tuple_is_declared_by_index() -> None:
    rules = BatchRules(sequence_dims={"0": 1, "1": 1}, label_key="1", labels="aligned")
    batch = (ids(), targets(), torch.tensor([1.0, 2.0]))
    whole, layout, parts = shards_of(batch, rules, 2, 2)
    assert whole.aligned_labels is batch[1]
    assert all(isinstance(part.batch, tuple) for part in parts)
    assert torch.equal(layout.unshard([part.batch[0] for part in parts]), batch[0])
    assert torch.equal(layout.unshard([part.batch[1] for part in parts]), batch[1])
    last = max(range(4), key=lambda rank: int(layout.positions(rank).max()))
    assert parts[last].batch[0][0, -1] == 0
    assert parts[last].batch[1][0, -1] == IGNORED_LABEL  # a label of any name


def test_named_tuples_and_dataclasses_are_known_by_field() -> None:
    for batch in (Tokens(ids(), targets()), Record(ids(), targets(), torch.ones(ROWS))):
        whole, layout, parts = shards_of(batch, BatchRules(labels="shift"), 2, 2)
        assert set(whole.dims) == {"input_ids", "labels"}
        assert all(type(part.batch) is type(batch) for part in parts)
        for name in ("input_ids", "labels"):
            shards = [getattr(part.batch, name) for part in parts]
            assert torch.equal(layout.unshard(shards), getattr(batch, name))
        assert (
            parts[0].aligned_labels is not None
        )  # kept beside a container that has no room for it


def test_nested_names_are_dotted() -> None:
    batch = {
        "text": {"ids": ids(), "y": [targets()]},
        "extra": Record(ids(3), ids(4), ids(5)[:, 0]),
    }
    rules = BatchRules(
        sequence_dims={
            "text.ids": 1, "text.y.0": 1, "extra.input_ids": None, "extra.labels": None
        },
        label_key="text.y.0",
        labels="aligned",
    )  # fmt: skip
    whole, layout, parts = shards_of(batch, rules, 2, 1)
    assert whole.aligned_labels is batch["text"]["y"][0]  # type: ignore[index]
    assert torch.equal(layout.unshard([p.batch["text"]["ids"] for p in parts]), ids())
    assert all(p.batch["extra"].input_ids is batch["extra"].input_ids for p in parts)  # type: ignore[union-attr]


def test_a_bare_tensor_is_called_batch() -> None:
    rules = BatchRules(sequence_dims={"batch": -2})
    x = torch.randn(ROWS, LENGTH, 4)
    whole, layout, parts = shards_of(x, rules, 2, 2)
    assert whole.dims == {"batch": 1}
    assert torch.equal(layout.unshard([part.batch for part in parts]), x)


def test_one_tensor_as_input_and_as_labels_is_padded_as_input() -> None:
    for batch, key in ((ids(), "batch"), ({"input_ids": ids()}, "input_ids")):
        rules = BatchRules(sequence_dims={key: 1}, label_key=key, labels="shift")
        _, layout, parts = shards_of(batch, rules, 2, 2)
        for part in parts:
            local = part.batch if key == "batch" else part.batch[key]
            assert int(local.min()) >= 0, "an id of -100 cannot be embedded"
            assert part.labels is local
        shifted = layout.unshard([part.aligned_labels for part in parts])  # type: ignore[misc]
        assert torch.equal(shifted, shift(ids()))
        assert sum(parts[0].valid) == ROWS * (LENGTH - 1)


def test_nothing_changes_in_place() -> None:
    batch: dict[str, Any] = {"input_ids": ids(), "inner": [targets()], "labels": targets()}
    rules = BatchRules(sequence_dims={"inner.0": 1}, labels="shift")
    copy = {"input_ids": ids(), "inner": targets(), "labels": targets()}
    whole, _layout, parts = shards_of(batch, rules, 2, 2)
    parts[0].batch["input_ids"].fill_(77)
    parts[0].batch["labels"].fill_(77)
    assert list(batch) == ["input_ids", "inner", "labels"]
    assert torch.equal(batch["input_ids"], copy["input_ids"])
    assert torch.equal(batch["labels"], copy["labels"])
    assert torch.equal(batch["inner"][0], copy["inner"])
    assert whole.batch is batch


def test_a_declared_dimension_wins_over_a_known_one() -> None:
    batch = {
        "input_ids": ids().t().contiguous(),
        "labels": targets(),
        "logits": torch.ones(ROWS, 3),
    }
    rules = BatchRules(sequence_dims={"input_ids": 0, "logits": None})
    whole = read_batch(batch, rules, needs_labels=True)
    assert whole.dims == {"input_ids": 0, "labels": 1}


# -- tensors without rows, and labels elsewhere -----------------------------------------------------


def test_a_sequence_without_rows() -> None:
    batch = {"tokens": ids()[0], "y": targets()[0]}
    rules = BatchRules(sequence_dims={"tokens": 0, "y": 0}, label_key="y", labels="aligned")
    _, layout, parts = shards_of(batch, rules, 2, 2)
    assert torch.equal(layout.unshard([p.batch["tokens"] for p in parts], dim=0), batch["tokens"])
    for rank, part in enumerate(parts):
        assert part.aligned_labels is not None
        assert part.valid[rank] == int((part.batch["y"] != IGNORED_LABEL).sum())
        assert part.batch["position_ids"].shape == (1, layout.local_len)


def test_sequence_first() -> None:
    batch = {"tokens": ids().t(), "y": targets().t()}
    rules = BatchRules(sequence_dims={"tokens": 0, "y": 0}, label_key="y", labels="aligned")
    _, layout, parts = shards_of(batch, rules, 2, 2)
    for rank, part in enumerate(parts):
        assert part.valid[rank] == int((part.batch["y"] != IGNORED_LABEL).sum())
        assert part.batch["position_ids"].shape == (1, layout.local_len)


def test_several_targets_per_token() -> None:
    batch = {"input_ids": ids(), "labels": torch.stack([targets(1), targets(2)], dim=2)}
    _, _layout, parts = shards_of(batch, BatchRules(labels="aligned"), 2, 2)
    for rank, part in enumerate(parts):
        assert part.valid[rank] == int((part.batch["labels"] != IGNORED_LABEL).sum())


def test_labels_that_do_not_run_along_the_sequence() -> None:
    batch = {"input_ids": ids(), "labels": torch.tensor([1, 0])}
    rules = BatchRules(sequence_dims={"labels": None}, labels="aligned")
    with pytest.raises(ConfigError, match=r"'labels' of shape \(2,\).*along the sequence"):
        read_batch(batch, rules, needs_labels=True)


def test_a_label_for_each_row() -> None:
    batch = {"input_ids": ids(), "labels": torch.tensor([1, 0])}
    match = r"'labels' of shape \(2,\) has a label for each row, .* one for each token.*labels='none'.*size=1"
    with pytest.raises(ShapeError, match=match):
        read_batch(batch, BatchRules(labels="shift"), needs_labels=True)


def test_labels_to_shift_need_rows() -> None:
    batch = {"input_ids": ids()[0], "labels": ids()[0]}
    rules = BatchRules(sequence_dims={"input_ids": 0, "labels": 0}, labels="shift")
    with pytest.raises(ConfigError, match=r"\[batch, tokens\] labels.*got \(29,\)"):
        read_batch(batch, rules, needs_labels=True)


# -- counts of targets ------------------------------------------------------------------------------


@pytest.mark.nightly
@given(
    st.sampled_from(SIZES),
    st.integers(12, 40),
    st.sampled_from(["shift", "aligned", "ignore"]),
    st.floats(0, 1),
    st.integers(0, 2**16),
    st.sampled_from(["zigzag", "contiguous", "balanced"]),
)
def test_counts_of_targets_equal_brute_force(
    size: tuple[int, int], length: int, labels: str, density: float, seed: int, kind: Any
) -> None:
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 9, (ROWS, length), generator=generator)
    y[torch.rand(ROWS, length, generator=generator) > density] = IGNORED_LABEL
    batch = {"input_ids": ids(length=length), "labels": y}
    rules = BatchRules(labels=labels)
    whole = read_batch(batch, rules, needs_labels=True)
    layout = SequenceLayout(length, *size, kind=kind)
    want: list[int] = []
    for rank in range(layout.cp_size):
        count = 0
        for token in layout.positions(rank).tolist():
            for row in range(ROWS):
                at = token + (labels == "shift")
                if labels == "ignore":
                    count += token < length
                elif at < length:
                    count += int(y[row, at]) != IGNORED_LABEL
        want.append(count)
    assert valid_counts(whole, layout) == tuple(want)
    assert shard_batch(whole, layout, 0, rules).valid == tuple(want)


# -- documents --------------------------------------------------------------------------------------


def documents(batch: Any, *, reads_masks: bool, **rules: Any) -> Documents | None:
    given = BatchRules(reads_masks=reads_masks, **rules)
    return documents_of(read_batch(batch, given, needs_labels=False), given)


@pytest.mark.parametrize("reads_masks", [True, False])
def test_cu_seqlens_and_segment_ids_are_taken_always(reads_masks: bool) -> None:
    want = Documents.from_cu_seqlens([0, 10, 11, LENGTH])
    cu_seqlens = torch.tensor([[0, 10, 11, LENGTH]], dtype=torch.int32)  # as a loader stacks it
    one = {"input_ids": ids(rows=1), "cu_seqlens": cu_seqlens}
    assert documents(one, reads_masks=reads_masks) == want
    stacked = torch.tensor([[0, 10, LENGTH, LENGTH], [0, 1, 2, LENGTH]])
    found = documents({"input_ids": ids(rows=2), "cu_seqlens": stacked}, reads_masks=reads_masks)
    assert found is not None
    assert [row[0, 1] for row in found.rows] == [10, 1]
    segments = torch.tensor([4] * 10 + [9] + [5] * (LENGTH - 11))
    for shape in ((1, LENGTH), (LENGTH,)):
        batch = {"input_ids": ids(rows=1), "segment_ids": segments.view(shape)}
        dims: dict[str, Any] = {"segment_ids": len(shape) - 1}
        found = documents(batch, reads_masks=reads_masks, sequence_dims=dims)
        assert found is not None
        assert found.rows[0].tolist() == want.rows[0].tolist()


def test_masks_and_positions_only_where_the_model_reads_them() -> None:
    mask = torch.ones(ROWS, LENGTH, dtype=torch.long)
    mask[0, :4], mask[1, -6:] = 0, 0
    batch: dict[str, Any] = {"input_ids": ids(), "attention_mask": mask}
    found = documents(batch, reads_masks=True)
    assert found is not None
    assert [row.tolist() for row in found.rows] == [[[4, LENGTH]], [[0, LENGTH - 6]]]
    assert documents(batch, reads_masks=False) is None

    restarting = torch.cat([torch.arange(9), torch.arange(LENGTH - 9)]).expand(ROWS, -1)
    batch = {"input_ids": ids(), "position_ids": restarting}
    found = documents(batch, reads_masks=True)
    assert found is not None
    assert found.rows[1].tolist() == [[0, 9], [9, LENGTH]]
    assert documents(batch, reads_masks=False) is None


def test_a_mask_without_padding_says_nothing_and_silences_positions() -> None:
    """As in transformers, which looks for packed documents only where there is no mask."""
    mask = torch.ones(ROWS, LENGTH, dtype=torch.long)
    restarting = (torch.arange(LENGTH) % 10).expand(ROWS, -1)
    batch = {"input_ids": ids(), "attention_mask": mask, "position_ids": restarting}
    assert documents(batch, reads_masks=True) is None


def test_no_documents_without_a_word_about_them() -> None:
    assert documents({"input_ids": ids()}, reads_masks=True) is None
    whole = torch.arange(LENGTH).expand(ROWS, -1)
    found = documents({"input_ids": ids(), "position_ids": whole}, reads_masks=True)
    assert found is None or found.is_dense


def test_a_dense_mask_is_refused() -> None:
    batch = {"input_ids": ids(), "attention_mask": torch.ones(ROWS, 1, LENGTH, LENGTH)}
    with pytest.raises(
        ConfigError, match=r"attention_mask of shape \(2, 1, 29, 29\).*can be expressed"
    ):
        documents(batch, reads_masks=True)


def test_targets_on_padding_are_refused() -> None:
    """One process would let them see the row; here padding has no tiles."""
    mask = torch.ones(ROWS, LENGTH, dtype=torch.long)
    mask[1, -6:] = 0
    labels = ids()
    batch = {"input_ids": ids(), "attention_mask": mask, "labels": labels}
    with pytest.raises(ConfigError, match=r"5 target\(s\).*padding.*-100"):
        documents(batch, reads_masks=True, labels="shift")
    batch["labels"] = labels.masked_fill(mask == 0, IGNORED_LABEL)
    assert documents(batch, reads_masks=True, labels="shift") is not None


def test_a_target_on_the_last_left_padding_is_no_error() -> None:
    """Shifting puts the first token's label there, in one process too; both see nothing."""
    mask = torch.ones(ROWS, LENGTH, dtype=torch.long)
    mask[0, :4] = 0
    labels = ids().masked_fill(mask == 0, IGNORED_LABEL)
    batch = {"input_ids": ids(), "attention_mask": mask, "labels": labels}
    assert documents(batch, reads_masks=True, labels="shift") is not None


# -- outputs ----------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _ranks_return_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without other ranks: a tensor is the same on all of them if it is all 3."""

    def equal(output: Any, tensors: dict[str, torch.Tensor], mesh: Any) -> set[str]:
        return {name for name, x in tensors.items() if bool((x.flatten()[-1:] == 3.0).all())}

    monkeypatch.setattr("lightning_cp.batch.output._equal_on_all_ranks", equal)


class FakeMesh:
    """Puts every rank's part of a known whole together; no process group."""

    def __init__(self, wholes: dict[int, torch.Tensor]) -> None:
        self.wholes = wholes
        self.dims: list[int] = []

    def unshard(self, x: torch.Tensor, layout: SequenceLayout, dim: int) -> torch.Tensor:
        self.dims.append(dim)
        return self.wholes[id(x)]


def test_outputs_are_unsharded_by_rule_and_by_declaration() -> None:
    layout = SequenceLayout(LENGTH, 2, 2)
    local = layout.local_len
    logits, flipped = torch.ones(ROWS, local, 5), torch.ones(5, local)
    scores, left, loss = torch.ones(ROWS, 3, local), torch.ones(ROWS, local), torch.tensor(3.0)
    small, constant = torch.full((ROWS, 3), 3.0), torch.full((ROWS, local), 3.0)
    alike = (
        torch.arange(local).expand(ROWS, -1) + 4.0 - local
    )  # ends with a 3: the same on all ranks
    wholes = {id(x): torch.full_like(x, 2.0) for x in (logits, flipped, scores, constant)}
    mesh: Any = FakeMesh(wholes)
    output = {"logits": logits, "inner": (flipped, scores), "left": left, "loss": loss}
    output |= {"small": small, "constant": constant, "alike": alike}
    dims = {"inner.1": 2, "left": None}
    got = unshard_output(output, mesh, layout, dims)
    assert mesh.dims == [1, 1, 2, 1]
    assert got["logits"] is wholes[id(logits)]
    assert got["inner"] == (wholes[id(flipped)], wholes[id(scores)])
    assert got["constant"] is wholes[id(constant)]
    for name in ("left", "loss", "small", "alike"):
        assert got[name] is output[name]
    assert output["logits"] is logits


@pytest.mark.parametrize("output", [None, 3, "text", 1.5, object])
def test_outputs_that_are_no_container_stay(output: Any) -> None:
    layout = SequenceLayout(LENGTH, 2, 2)
    mesh: Any = FakeMesh({})
    assert unshard_output(output, mesh, layout, {}) is output


@pytest.mark.parametrize("shape", [(-1,), (ROWS, 3, -1), (-1, 3)])
def test_an_ambiguous_output_is_refused(shape: tuple[int, ...]) -> None:
    layout = SequenceLayout(LENGTH, 2, 2)
    x = torch.ones([layout.local_len if size == -1 else size for size in shape])
    mesh: Any = FakeMesh({})
    with pytest.raises(
        ConfigError, match=r"predict_step returned 'x\.0'.*context_parallel_output_dims"
    ):
        unshard_output({"x": [x]}, mesh, layout, {})


# -- refusals that no strategy test covers ----------------------------------------------------------


def test_a_declared_dimension_that_does_not_exist() -> None:
    match = r"'input_ids' has sequence dim 2.*\(2, 29\)\. Say .*its tokens, 0 or 1>}, or .*: None}"
    with pytest.raises(ShapeError, match=match):
        read_batch({"input_ids": ids()}, BatchRules({"input_ids": 2}), needs_labels=False)
    with pytest.raises(ShapeError, match=r"\(\)\. Say sequence_dims=\{'x': None\} to give"):
        read_batch({"x": torch.ones(())}, BatchRules({"x": 0}), needs_labels=False)


@pytest.mark.parametrize(("more", "what"), [(-1, "pad"), (1, "cut")])
def test_a_tensor_that_is_nearly_as_long_is_to_fit(more: int, what: str) -> None:
    batch = {"input_ids": ids(), "odd": torch.ones(ROWS, LENGTH + more)}
    with pytest.raises(ConfigError, match=rf"each token, {what} it to {LENGTH} and say"):
        read_batch(batch, BatchRules(), needs_labels=False)


def test_an_undeclared_sequence_inside_is_named_with_its_dimension() -> None:
    batch = {"input_ids": ids(), "inner": {"w": torch.ones(ROWS, 3, LENGTH)}}
    with pytest.raises(ConfigError, match=r"sequence_dims=\{'inner\.w': 2\}"):
        read_batch(batch, BatchRules(), needs_labels=False)
    rules = replace(BatchRules(), sequence_dims={"inner.w": None})
    assert set(read_batch(batch, rules, needs_labels=False).dims) == {"input_ids"}


@pytest.mark.parametrize("batch", [5, "text", None, {1, 2}, torch.nn.Linear(1, 1)])
def test_batches_of_unknown_type(batch: Any) -> None:
    with pytest.raises(ConfigError, match=f"cannot shard a batch of type {type(batch).__name__}"):
        read_batch(batch, BatchRules(), needs_labels=False)

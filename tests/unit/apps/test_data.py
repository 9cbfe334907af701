"""Files, their split, packing, and what each rank reads."""

from __future__ import annotations

import math
import sysconfig
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_cp.apps.data import (
    ByteDataModule,
    Document,
    PackedBytes,
    load_text,
    stdlib_files,
    text_files,
    unigram_entropy,
)
from lightning_cp.errors import ConfigError
from lightning_cp.layout import Documents
from lightning_cp.utils.labels import IGNORED_LABEL


def as_bytes(text: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.frombuffer(text.encode(), dtype=np.uint8)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Forty small files, a hidden one, and an empty one."""
    for index in range(40):
        path = tmp_path / f"part{index % 4}" / f"text{index}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"file {index} says: " + "abc " * (20 + index))
    (tmp_path / ".hidden.txt").write_text("not to be read")
    (tmp_path / "empty.txt").write_text("")
    return tmp_path


# Files


@pytest.mark.nightly
def test_standard_library_is_found_sorted_and_without_what_is_excluded() -> None:
    names = [document.name for document in stdlib_files(exclude=["encodings", "test"])]
    assert names == sorted(names)
    assert {"abc.py", "json/decoder.py"} <= set(names)
    assert not {folder for name in names for folder in name.split("/")[:-1]} & {"encodings", "test"}
    assert "encodings/utf_8.py" in {document.name for document in stdlib_files()}


def test_no_library_sources_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(ConfigError, match=r"found none under .* data=text_files"):
        stdlib_files()


def test_files_folders_and_patterns(folder: Path) -> None:
    from_folder = text_files([folder])
    assert len(from_folder) == 41
    assert [d.name for d in from_folder][:2] == ["empty.txt", "part0/text0.txt"]
    from_pattern = text_files([f"{folder}/**/*.txt"])
    assert from_pattern == from_folder
    assert [d.name for d in text_files([folder / "part1" / "text1.txt"])] == ["text1.txt"]
    assert len(text_files([folder, folder / "part1", f"{folder}/part*/*.txt"])) == 41


def test_relative_patterns_and_home(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", str(folder))
    assert len(text_files(["part2/*.txt"])) == 10
    assert len(text_files(["~/part2"])) == 10


@pytest.mark.parametrize("paths", [["nothing_here"], ["*.nothing"], ["part9/"]])
def test_a_path_that_matches_nothing_is_named(folder: Path, paths: list[str]) -> None:
    with pytest.raises(ConfigError, match=rf"'.*{paths[0].strip('*/')}.*', which matches no file"):
        text_files([f"{folder}/{path}" for path in paths])


@pytest.mark.parametrize("paths", [[], "one.txt"])
def test_paths_must_be_a_list(paths: Any) -> None:
    with pytest.raises(ConfigError, match=r"must be a list of files, folders or patterns, got"):
        text_files(paths)


# The split


def contents(texts: tuple[np.ndarray[Any, Any], ...]) -> set[bytes]:
    return {text.tobytes() for text in texts}


def test_split_is_disjoint_complete_and_the_same_every_time(folder: Path) -> None:
    documents = text_files([folder])
    text = load_text(documents, 0.3)
    training, validation = contents(text.training), contents(text.validation)
    assert not training & validation
    everything = {d.path.read_bytes() for d in documents} - {b""}
    assert training | validation == everything
    assert 0 < len(validation) < len(training)
    again = load_text(list(reversed(documents)), 0.3)
    assert contents(again.validation) == validation


def test_other_files_never_move_a_file_across_the_split(folder: Path) -> None:
    documents = text_files([folder])
    whole = contents(load_text(documents, 0.3).validation)
    half = documents[::2]
    kept = {document.path.read_bytes() for document in half}
    assert contents(load_text(half, 0.3).validation) == whole & kept


def test_split_goes_by_name_and_not_by_place(folder: Path, tmp_path: Path) -> None:
    moved = folder.rename(tmp_path.parent / f"{tmp_path.name}_moved")
    expected = contents(load_text(text_files([moved]), 0.3).validation)
    back = moved.rename(folder)
    assert contents(load_text(text_files([back]), 0.3).validation) == expected


@pytest.mark.parametrize("fraction", [1e-9, 0.5, 1 - 1e-9])
def test_two_documents_give_one_to_each_side(folder: Path, fraction: float) -> None:
    text = load_text(text_files([f"{folder}/part0/text?.txt"])[:2], fraction)
    assert (len(text.training), len(text.validation)) == (1, 1)


def test_one_document_cannot_be_split(folder: Path) -> None:
    one = text_files([folder / "part0" / "text0.txt", folder / "empty.txt"])
    with pytest.raises(ConfigError, match=r"at least two files with text are needed, got 1"):
        load_text(one, 0.1)


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.1])
def test_fraction_out_of_range(folder: Path, fraction: float) -> None:
    with pytest.raises(ConfigError, match=rf"between 0 and 1, got {fraction}"):
        load_text(text_files([folder]), fraction)


def test_unreadable_file_is_named(folder: Path) -> None:
    gone = Document("gone.txt", folder / "gone.txt")
    with pytest.raises(ConfigError, match=r"cannot read .*gone.txt: No such file"):
        load_text([*text_files([folder]), gone], 0.1)


# Entropy


def test_entropy_by_hand() -> None:
    # p(a) = 1/2, p(b) = p(c) = 1/4: 1/2 * 1 + 2 * 1/4 * 2
    assert unigram_entropy(as_bytes("aabc")) == pytest.approx(1.5, abs=1e-12)
    assert unigram_entropy(np.arange(256, dtype=np.uint8)) == pytest.approx(8.0, abs=1e-12)
    assert unigram_entropy(as_bytes("aaaa")) == 0.0
    share = 1 / 3
    expected = -(share * math.log2(share) + (1 - share) * math.log2(1 - share))
    assert unigram_entropy(as_bytes("abb")) == pytest.approx(expected, abs=1e-12)


# Packing


@pytest.mark.nightly
@given(st.lists(st.integers(1, 30), min_size=1, max_size=12), st.integers(2, 25), st.integers(0, 3))
def test_samples_agree_with_packing_byte_by_byte(
    lengths: list[int], seq_len: int, seed: int
) -> None:
    if sum(lengths) < seq_len:
        return
    documents = [
        (np.arange(length) + 7 * index).astype(np.uint8) for index, length in enumerate(lengths)
    ]
    packed = PackedBytes(documents, seq_len, seed)
    order = np.random.default_rng(seed).permutation(len(lengths))
    stream = [
        (int(byte), offset) for index in order for offset, byte in enumerate(documents[index])
    ]
    assert len(packed) == len(stream) // seq_len
    for index in range(len(packed)):
        sample, position = packed[index], -1
        for at in range(seq_len):
            byte, offset = stream[index * seq_len + at]
            starts_inside = offset == 0 and at > 0
            position = 0 if offset == 0 else position + 1
            assert sample["input_ids"][at] == byte
            assert sample["labels"][at] == (IGNORED_LABEL if starts_inside else byte)
            assert sample["position_ids"][at] == position


def test_position_ids_mark_the_documents_of_the_layout() -> None:
    packed = PackedBytes([as_bytes("a" * 5), as_bytes("b" * 3), as_bytes("c" * 8)], 16, seed=1)
    sample = packed[0]
    cuts = [0, *(sample["labels"] == IGNORED_LABEL).nonzero().flatten().tolist(), 16]
    documents = Documents.from_position_ids(sample["position_ids"])
    assert documents == Documents.from_cu_seqlens(cuts)
    assert len(cuts) == 4


def test_at_most_keeps_the_first_sequences_and_their_bytes() -> None:
    documents = [as_bytes("abcdefgh" * 9), as_bytes("xyz" * 11)]
    whole, some = PackedBytes(documents, 10, seed=0), PackedBytes(documents, 10, seed=0, at_most=3)
    assert (len(whole), len(some), some.bytes.size) == (10, 3, 30)
    assert torch.equal(whole[2]["input_ids"], some[2]["input_ids"])
    with pytest.raises(IndexError, match="sequence 3 of 3"):
        some[3]


@pytest.mark.parametrize("seq_len", [1, 9, 4096])
def test_too_little_text_says_how_much_there_is(seq_len: int) -> None:
    with pytest.raises(ConfigError, match=rf"seq_len={seq_len} .* the training text has 8 bytes"):
        PackedBytes([as_bytes("abc"), as_bytes("defgh")], seq_len, seed=0)


# The data module


def module(folder: Path, data_parallel: Any = None, **settings: Any) -> ByteDataModule:
    data = ByteDataModule(
        text_files([folder]), **{"seq_len": 32, "validation_fraction": 0.2, **settings}
    )
    if data_parallel is not None:
        size, rank = data_parallel
        kwargs = {"num_replicas": size, "rank": rank}
        progress = SimpleNamespace(total=SimpleNamespace(ready=0))
        data.trainer = SimpleNamespace(  # type: ignore[assignment]
            distributed_sampler_kwargs=kwargs,
            fit_loop=SimpleNamespace(epoch_loop=SimpleNamespace(batch_progress=progress)),
        )
    return data


def rows(loader: Any) -> list[tuple[int, ...]]:
    return [tuple(row.tolist()) for batch in loader for row in batch["input_ids"]]


def test_a_context_parallel_group_reads_what_one_process_reads(folder: Path) -> None:
    alone, rank = module(folder), module(folder, data_parallel=(1, 0))
    assert rows(alone.train_dataloader()) == rows(rank.train_dataloader())
    assert rows(alone.val_dataloader()) == rows(rank.val_dataloader())


def test_data_ranks_share_the_sequences_among_them(folder: Path) -> None:
    alone = rows(module(folder).train_dataloader())
    parts = [rows(module(folder, (2, rank)).train_dataloader()) for rank in range(2)]
    padded = alone + alone[: len(alone) % 2]  # an odd one out is read twice
    assert parts == [padded[0::2], padded[1::2]]


def test_runs_with_other_seeds_validate_on_the_same_text(folder: Path) -> None:
    first, second = (module(folder, validation_sequences=2, seed=seed) for seed in (0, 1))
    assert not np.array_equal(first.training.bytes, second.training.bytes)
    assert np.array_equal(first.validation.bytes, second.validation.bytes)


def test_training_order_is_seeded_and_validation_order_is_not_shuffled(folder: Path) -> None:
    first, again, other = (rows(module(folder, seed=seed).train_dataloader()) for seed in (0, 0, 1))
    assert first == again
    assert first != other
    data = module(folder)
    validation = [
        tuple(data.validation[i]["input_ids"].tolist()) for i in range(len(data.validation))
    ]
    assert rows(data.val_dataloader()) == validation


def test_batches_are_full_and_counted_in_tokens(folder: Path) -> None:
    data = module(folder, batch_size=3)
    assert data.tokens_per_batch == 96
    assert {batch["input_ids"].shape for batch in data.train_dataloader()} == {(3, 32)}


def test_entropy_is_that_of_the_text_validated_on(folder: Path) -> None:
    data = module(folder, validation_sequences=2)
    seen = np.array(rows(data.val_dataloader()), dtype=np.uint8)
    assert seen.shape == (2, 32)
    assert data.validation_entropy == unigram_entropy(seen)
    assert "2 sequences to validate on" in str(data)


@pytest.mark.parametrize("setting", ["batch_size", "validation_sequences"])
def test_sizes_below_one(folder: Path, setting: str) -> None:
    with pytest.raises(ConfigError, match="must be at least 1, got"):
        module(folder, **{setting: 0})


def test_short_validation_text_is_named(folder: Path) -> None:
    with pytest.raises(ConfigError, match="the validation text has"):
        module(folder, seq_len=2500, validation_fraction=0.05)


@pytest.mark.parametrize(("settings", "ranks"), [({"batch_size": 500}, (1, 0)), ({}, (500, 3))])
def test_less_text_than_one_step_needs(folder: Path, settings: Any, ranks: tuple[int, int]) -> None:
    data = module(folder, ranks, **settings)
    with pytest.raises(ConfigError, match=r"a step needs 500 sequences .* the training text has"):
        data.train_dataloader()

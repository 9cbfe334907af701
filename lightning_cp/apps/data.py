"""Text from files, each one a document: split into training and validation, packed into sequences, loaded.

Only a hash of a file's name decides its side, so adding or removing a file never moves another one across the
split. Documents are packed end to end and cut into sequences of one length. Shapes: every field of a sample
is int64 ``[S]``, batches are ``[B, S]``.
"""

from __future__ import annotations

import hashlib
import itertools
import sysconfig
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from lightning_cp.errors import ConfigError
from lightning_cp.utils.labels import IGNORED_LABEL

Bytes = npt.NDArray[np.uint8]

__path__: list[str] = []  # the names of its former modules stay importable

Batch = dict[str, torch.Tensor]
SEED_OF_VALIDATION = 0


@dataclass(frozen=True)
class Document:
    """One file: its name, which decides its side of the split, and its path."""

    name: str
    path: Path


@dataclass(frozen=True)
class Text:
    """The bytes of every document, split into training and validation, without empty documents."""

    training: tuple[Bytes, ...]
    validation: tuple[Bytes, ...]


def stdlib_files(exclude: Collection[str] = ()) -> list[Document]:
    """Return the sources of the running Python's standard library, sorted by name.

    Args:
        exclude: names of folders whose contents are left out, at any depth.

    Raises:
        ConfigError: this Python has no library sources on disk (it may be zipped).
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    found = [
        Document(path.relative_to(root).as_posix(), path)
        for path in root.rglob("*.py")
        if not set(path.relative_to(root).parts[:-1]) & set(exclude)
    ]
    if not found:
        raise ConfigError(
            f"data=python_stdlib reads the standard library's *.py files, but found none under "
            f"{root}. Use data=text_files data.paths=[...] with your own files."
        )
    return sorted(found, key=lambda document: document.name)


def text_files(paths: Sequence[str | Path]) -> list[Document]:
    """Return files named directly, by a pattern, or by a folder (every file in it except hidden ones).

    A document's name is its path below the folder or the pattern's fixed part, so the split does
    not depend on where the files lie.

    Raises:
        ConfigError: no paths, or one of them matches no file.
    """
    if isinstance(paths, str | Path) or not paths:
        raise ConfigError(
            f"data.paths must be a list of files, folders or patterns, got {paths!r}. "
            "Example: data.paths=[book.txt,notes/,'logs/*.log']."
        )
    found: dict[Path, Document] = {}
    for given in paths:
        for document in _matches(str(given)):
            found.setdefault(document.path.resolve(), document)
    return sorted(found.values(), key=lambda document: (document.name, document.path))


def load_text(documents: Sequence[Document], validation_fraction: float) -> Text:
    """Read the documents and split them by the hash of their names.

    If one side would be empty, the document with the nearest hash goes there.

    Args:
        documents: at least two.
        validation_fraction: the share of documents kept for validation, between 0 and 1.

    Raises:
        ConfigError: fewer than two documents with text, an unreadable one, a fraction out of range.
    """
    if not 0 < validation_fraction < 1:
        raise ConfigError(
            f"data.validation_fraction must lie between 0 and 1, got {validation_fraction}. "
            "Example: data.validation_fraction=0.05."
        )
    texts = [(_place(document.name), _read(document)) for document in documents]
    texts = [(place, text) for place, text in texts if text.size]
    if len(texts) < 2:
        raise ConfigError(
            f"the text is split into training and validation by file, so at least two files with "
            f"text are needed, got {len(texts)}. Name more files, or cut the one there is in two."
        )
    texts.sort(key=lambda entry: entry[0])
    below = sum(place < validation_fraction for place, _ in texts)
    held_out = min(max(below, 1), len(texts) - 1)
    return Text(
        training=tuple(text for _, text in texts[held_out:]),
        validation=tuple(text for _, text in texts[:held_out]),
    )


def unigram_entropy(text: Bytes) -> float:
    """Return the Shannon entropy of the byte frequencies, in bits per byte.

    The best model that ignores context reaches this on the text.
    """
    counts = np.bincount(text.reshape(-1), minlength=256)
    share = counts[counts > 0] / counts.sum()
    return float(-(share * np.log2(share)).sum())


def _matches(given: str) -> Iterable[Document]:
    path = Path(given).expanduser()
    if path.is_file():
        return [Document(path.name, path)]
    root, pattern = (path, "**/*") if path.is_dir() else _split_pattern(path)
    files = [(file.relative_to(root), file) for file in root.glob(pattern) if file.is_file()]
    found = [
        Document(name.as_posix(), file)
        for name, file in files
        if not any(part.startswith(".") for part in name.parts)
    ]
    if not found:
        raise ConfigError(
            f"data.paths names {given!r}, which matches no file (looked from {Path.cwd()}). "
            "Give an existing file, a folder with files, or a pattern such as 'texts/**/*.txt'."
        )
    return found


def _split_pattern(path: Path) -> tuple[Path, str]:
    """Return the leading folders without wildcards, and the pattern below them."""
    fixed = list(itertools.takewhile(lambda part: not set(part) & set("*?["), path.parts[:-1]))
    return Path(*fixed), str(Path(*path.parts[len(fixed) :]))


def _read(document: Document) -> Bytes:
    try:
        return np.frombuffer(document.path.read_bytes(), dtype=np.uint8)
    except OSError as error:
        raise ConfigError(
            f"cannot read {document.path}: {error.strerror}. Make it readable, or leave it out."
        ) from error


def _place(name: str) -> float:
    """Return a number in [0, 1) that depends only on the name."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "big") / 2**48


class PackedBytes(Dataset[dict[str, torch.Tensor]]):
    """Sequences of bytes, several documents in each, in a seeded order.

    A sample holds ``input_ids``, ``labels`` (the same bytes, *not* shifted; ``IGNORED_LABEL`` for
    the first byte of every document that starts inside the sequence, since nothing before it may
    predict it) and ``position_ids`` (0, 1, 2, ... restarting with every document).

    Args:
        documents: the bytes of each document, uint8, none empty.
        seq_len: S; what is left at the end and does not fill a sequence is dropped.
        seed: of the order of documents.
        at_most: how many sequences to keep, all if ``None``.
        part: what the text is for, named in errors.

    Raises:
        ConfigError: less text than one sequence.
    """

    def __init__(
        self,
        documents: Sequence[Bytes],
        seq_len: int,
        seed: int,
        at_most: int | None = None,
        part: str = "training",
    ) -> None:
        order = np.random.default_rng(seed).permutation(len(documents))
        lengths = np.array([documents[index].size for index in order], dtype=np.int64)
        total = int(lengths.sum())
        if seq_len < 2 or total < seq_len:
            raise ConfigError(
                f"data.seq_len={seq_len} asks for sequences of {seq_len} bytes, but the {part} "
                f"text has {total} bytes in {len(documents)} document(s). Give more text, or a "
                f"seq_len between 2 and {total}."
            )
        self.seq_len = seq_len
        self.sequences = min(total // seq_len, at_most or total)
        self.bytes = np.concatenate([documents[index] for index in order])[
            : self.sequences * seq_len
        ]
        self._starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])

    def __len__(self) -> int:
        return self.sequences

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"sequence {index} of {len(self)}")
        begin = index * self.seq_len
        inside = self._starts_within(begin)
        offsets = np.arange(self.seq_len)
        bounds = np.concatenate([[0], inside])
        input_ids = torch.from_numpy(self.bytes[begin : begin + self.seq_len].astype(np.int64))
        labels = input_ids.clone()
        labels[torch.from_numpy(inside)] = IGNORED_LABEL
        positions = offsets - bounds[np.searchsorted(bounds, offsets, side="right") - 1]
        return {
            "input_ids": input_ids,
            "labels": labels,
            "position_ids": torch.from_numpy(positions),
        }

    def _starts_within(self, begin: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Return offsets of the documents that begin inside the sequence at ``begin``, after its start."""
        first, last = np.searchsorted(self._starts, [begin + 1, begin + self.seq_len])
        return self._starts[first:last] - begin


class TrainingSampler(DistributedSampler[Any]):
    """A DistributedSampler that continues after the batches already trained on, also by a resumed run.

    Lightning counts batches over all runs, but with some checkpoints its epochs restart; so the position is
    taken from that count when the first sample is requested. A pass always has its whole length.
    """

    resumes_by_itself = True
    """Resuming must not skip the batches already trained on: the sampler does."""

    def __init__(self, data: ByteDataModule, **options: Any) -> None:
        super().__init__(data.training, **options)
        self.data = data
        self.used = len(self) // data.batch_size * data.batch_size
        """Samples of an epoch, without an incomplete last batch."""

    def __iter__(self) -> Iterator[Any]:
        trainer = self.data.trainer
        batches = trainer.fit_loop.epoch_loop.batch_progress.total.ready if trainer else 0
        epoch, begin = divmod(batches * self.data.batch_size, self.used)
        yield from islice(self._from(epoch), begin, begin + self.used)

    def _from(self, epoch: int) -> Iterator[Any]:
        for number in count(epoch):
            self.set_epoch(number)
            yield from islice(super().__iter__(), self.used)


class ByteDataModule(L.LightningDataModule):
    """Packed byte sequences from documents, split by document.

    The samplers are made here rather than injected, so that one process and a context-parallel
    group see the same sequences in the same order.

    Args:
        documents: the files to read.
        seq_len: tokens in a sequence.
        batch_size: sequences in a batch, on each data rank.
        validation_fraction: the share of documents kept for validation.
        validation_sequences: how many sequences are validated on; fewer if the text has fewer.
        seed: of the order of training documents and sequences. Validation is on the same text whatever it is,
            so that runs with other seeds can be compared.

    Raises:
        ConfigError: unreadable or too little text, here and not on the first batch.
    """

    def __init__(
        self,
        documents: Sequence[Document],
        seq_len: int = 4096,
        batch_size: int = 1,
        validation_fraction: float = 0.05,
        validation_sequences: int = 16,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if batch_size < 1 or validation_sequences < 1:
            raise ConfigError(
                f"data.batch_size and data.validation_sequences must be at least 1, got "
                f"{batch_size} and {validation_sequences}. "
                "Set both to 1 or more."
            )
        text = load_text(documents, validation_fraction)
        self.training = PackedBytes(text.training, seq_len, seed)
        self.validation = PackedBytes(
            *(text.validation, seq_len, SEED_OF_VALIDATION),
            at_most=validation_sequences,
            part="validation",
        )
        self.batch_size = batch_size
        self.seed = seed

    @property
    def tokens_per_batch(self) -> int:
        """Tokens in one batch of one data rank, before any sharding."""
        return self.batch_size * self.training.seq_len

    @property
    def validation_entropy(self) -> float:
        """Byte-unigram entropy of exactly the text validated on, in bits per byte."""
        return unigram_entropy(self.validation.bytes)

    def train_dataloader(self) -> DataLoader[Batch]:
        """Sequences in a seeded order, new every epoch; an incomplete last batch is dropped."""
        size, rank = data_parallel(self.trainer)
        if len(self.training) < size * self.batch_size:
            raise ConfigError(
                f"a step needs {size * self.batch_size} sequences (data.batch_size={self.batch_size} on "
                f"{size} data ranks), but the training text has {len(self.training)} of "
                f"{self.training.seq_len} bytes. Give more text, or smaller batches or sequences."
            )
        sampler = TrainingSampler(self, num_replicas=size, rank=rank, seed=self.seed)
        return DataLoader(self.training, self.batch_size, sampler=sampler, drop_last=True)

    def val_dataloader(self) -> DataLoader[Batch]:
        """The first ``validation_sequences`` sequences of the validation documents."""
        size, rank = data_parallel(self.trainer)
        sampler: DistributedSampler[Batch] = DistributedSampler(
            self.validation, num_replicas=size, rank=rank, shuffle=False
        )
        return DataLoader(self.validation, self.batch_size, sampler=sampler)

    def __str__(self) -> str:
        training, validation = self.training, self.validation
        return (
            f"text: {training.bytes.size / 2**20:.1f} MiB to train on, in sequences of "
            f"{training.seq_len} bytes; {len(validation)} sequences to validate on, of "
            f"{self.validation_entropy:.2f} bits byte-unigram entropy"
        )


def data_parallel(trainer: L.Trainer | None) -> tuple[int, int]:
    """Return the number of different batches per step, and the index of this rank's batch.

    Lightning's strategies give both in ``distributed_sampler_kwargs``; context-parallel ones count data ranks
    there, so the ranks of one group read the same batch.
    """
    kwargs = (trainer.distributed_sampler_kwargs if trainer is not None else None) or {}
    return int(kwargs.get("num_replicas", 1)), int(kwargs.get("rank", 0))


def python_stdlib(exclude: Sequence[str] = (), **settings: Any) -> ByteDataModule:
    """The Python standard library's sources: real text that every machine has.

    Args:
        exclude: folders left out.
        settings: see `ByteDataModule`.
    """
    return ByteDataModule(stdlib_files(exclude), **settings)


def user_text(paths: Sequence[str | Path] | None = None, **settings: Any) -> ByteDataModule:
    """The user's own files.

    Args:
        paths: files, folders or patterns; have to be given.
        settings: see `ByteDataModule`.
    """
    return ByteDataModule(text_files(paths or ()), **settings)

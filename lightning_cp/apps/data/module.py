"""The data module of the main job, and the functions that configs name to build it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count, islice
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader, DistributedSampler

from lightning_cp.apps.data.corpus import (
    Document,
    PackedBytes,
    load_text,
    stdlib_files,
    text_files,
    unigram_entropy,
)
from lightning_cp.errors import ConfigError

Batch = dict[str, torch.Tensor]
SEED_OF_VALIDATION = 0


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

"""Milliseconds of the host for a batch: reading, layout, counts, checksums, this rank's part.

    python -m benchmarks.batch_preparation --tokens 32768 1048576 --ranks 8 64

prints the least of ``--rounds`` rounds, for one document and for packed documents of 500 to 20,000 tokens,
others in each round, with one thread. A Trainer does this between the vote of an optimizer step and the next
forward, so that a GPU may be idle meanwhile; compare it with the seconds of a step.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch

from lightning_cp.batch import BatchRules, documents_of, read_batch, shard_batch
from lightning_cp.batch.sharder import valid_counts
from lightning_cp.comm.consensus import checksum
from lightning_cp.layout import SequenceLayout, schedule
from lightning_cp.layout.sequence import CAUSAL

RULES = BatchRules(labels="shift", reads_masks=True)


def batch_of(tokens: int, seed: int, *, packed: bool) -> dict[str, torch.Tensor]:
    """Make a batch of one row; packed documents are declared by restarting positions."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 150_000, (1, tokens), generator=generator)
    batch = {"input_ids": ids, "labels": ids.clone()}
    if packed:
        lengths = torch.randint(500, 20_000, (tokens // 500 + 1,), generator=generator)
        positions = [torch.arange(int(length)) for length in lengths]
        batch["position_ids"] = torch.cat(positions)[:tokens].unsqueeze(0)
    return batch


def prepare(batch: dict[str, torch.Tensor], ranks: int) -> dict[str, float]:
    """Return the seconds of each part of one preparation."""
    seconds: dict[str, float] = {}

    def timed(name: str, run: Callable[[], Any]) -> Any:
        began = time.perf_counter()
        result = run()
        seconds[name] = time.perf_counter() - began
        return result

    whole = timed("read", lambda: read_batch(batch, RULES, needs_labels=True))
    tokens = whole.seq_len
    documents = timed("documents", lambda: documents_of(whole, RULES))
    assert (documents is not None) == ("position_ids" in batch)
    layout = timed("layout", lambda: SequenceLayout(tokens, ranks, 1, "zigzag", documents))
    valid = timed("counts", lambda: valid_counts(whole, layout, RULES.labels))
    timed("checksums", lambda: [checksum(x) for x in batch.values()])
    timed("part", lambda: shard_batch(whole, layout, 1, RULES, valid))
    timed("schedule", lambda: schedule(layout, None, CAUSAL).rank(1).hops)
    return seconds


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[32_768, 1_048_576])
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--rounds", type=int, default=10)
    given = parser.parse_args()
    torch.set_num_threads(1)
    for tokens in given.tokens:
        for packed in (False, True):
            batches = [batch_of(tokens, seed, packed=packed) for seed in range(given.rounds)]
            for ranks in given.ranks:
                rounds = [prepare(batch, ranks) for batch in batches]
                least = {name: min(each[name] for each in rounds) * 1e3 for name in rounds[0]}
                parts = ", ".join(f"{name} {value:.1f}" for name, value in least.items())
                what = "packed" if packed else "one document"
                print(
                    f"{tokens} tokens, {what}, {ranks} ranks: {sum(least.values()):.1f} ms ({parts})"
                )


if __name__ == "__main__":
    main()

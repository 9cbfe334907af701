"""The tables of docs/guides/muon.md: ``python -m tests.helpers.optim.show``."""

from __future__ import annotations

from math import prod

import numpy as np
import torch

from lightning_cp.optim.work_list import assign_owners
from lightning_cp.utils.console import markdown_table
from tests.helpers.pool import run_ranks, shut_down
from tests.ranks.optim.test_counts import counted
from tests.ranks.optim.test_shardings import SHARDINGS, by_hand, by_torch, trained
from tests.unit.optim.test_owners import LLAMA_8B, imbalance, sizes

LAYERS = 32


def errors() -> str:
    """Worst of weights after 20 steps, by sharding; and how many differ from PyTorch's by a bit."""
    hand, theirs = by_hand(), by_torch()
    rows: list[list[str]] = []
    for name, shape in SHARDINGS.items():
        found = [
            max(
                np.abs(one[n].numpy() - want).max() / np.abs(want).max()
                for one in run_ranks(prod(shape), trained, name, dtype, dtype)
                for n, want in hand.items()
            )
            for dtype in (torch.float64, torch.float32)
        ]
        ours = run_ranks(prod(shape), trained, name, torch.float32, torch.bfloat16)
        differ = sum(not torch.equal(one[n], want) for one in ours for n, want in theirs.items())
        rows.append([name, *(f"{x:.1e}" for x in found), str(differ)])
    head = ("sharding", "float64", "float32", "bfloat16: tensors unlike torch.optim.Muon")
    return markdown_table(head, rows)


def costs() -> str:
    """Counted and planned, of the rank that sends, or computes, the most."""
    rows: list[list[str]] = []
    for name, shape in SHARDINGS.items():
        every = run_ranks(prod(shape), counted, name, torch.bfloat16)
        sent, flops = (max(of) for of in zip(*((x.sent, x.flops) for x in every), strict=True))
        most = [
            max(x.planned_bytes[rank] for rank, x in enumerate(every)),
            max(x.planned_flops[rank] for rank, x in enumerate(every)),
        ]
        rows.append([name, f"{sent:,}", f"{most[0]:,}", f"{flops:,}", f"{most[1]:,}"])
    head = ("sharding", "bytes sent", "planned", "FLOPs", "planned")
    return markdown_table(head, rows)


def llama() -> str:
    """Llama-8B, simulated: who owns what."""
    entries = LAYERS * sum(prod(shape) for shape in LLAMA_8B)
    rows: list[list[str]] = []
    for ranks in (8, 64, 128):
        owners = assign_owners(sizes(), list(range(ranks)), {})
        in_turn = [at % ranks for at in range(len(owners))]
        sent = 2 * 2 * entries * (ranks - 1) / ranks / ranks
        shares = (imbalance(owners, ranks), imbalance(in_turn, ranks))
        rows.append([str(ranks), *(f"{x:.3f}" for x in shares), f"{sent / 2**20:,.0f} MiB"])
    return markdown_table(("fsdp ranks", "imbalance", "in turn", "sent a step, bf16, mean"), rows)


def main() -> None:
    """All of them."""
    print(f"{errors()}\n\n{costs()}\n\n{llama()}")
    shut_down()


if __name__ == "__main__":
    main()

"""Bytes per token of a rank, by each setting that saves memory, and peak memory against length.

    python -m benchmarks.length                      # both tables
    python -m benchmarks.length --only kept          # bytes per token per layer
    python -m benchmarks.length --only peaks --lengths 1024 2048 4096 8192 --ranks 1 2 4
    python -m benchmarks.length --only long --long 131072
    python -m benchmarks.length --only peaks --vocabulary 1024 --picture docs/benchmarks/length.png

A step of a small Llama (bfloat16, a vocabulary of 131072) runs through the strategy's own core, on gloo ranks
of a ring. *Kept* are the bytes that forward saves for backward, taken from two numbers of layers and two
lengths, so that constants and costs that layers share drop out; ``planner/activations.py`` has the closed
form. *Peak* is the most bytes of tensors at once within the step, with gradients of parameters, without
parameters: every storage that is made and freed is counted, temporaries inside an operator are not.
*Resident* is the rise of the process's own peak, which includes those. All are of the rank that needs most.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.step_memory import StepMemory, step
from lightning_cp.bench.model_step import ModelSizes, config_of
from lightning_cp.bench.processes import on_ranks
from lightning_cp.planner import activations
from lightning_cp.planner.model import model_from_config
from lightning_cp.utils import console as table
from lightning_cp.utils.command_help import argument_parser

CHUNK, TILE = 128, 128
"""Tokens of a chunk of the loss and of a tile of the MLPs; few, so that short sequences show slopes."""

CHUNKED = {"chunked_loss": CHUNK}
TILED = {"tiled_mlp": TILE}
BLOCKS = {"activation_checkpointing": "blocks"}
KEEP = {"activation_checkpointing": "keep_attention"}
ALL: dict[str, Any] = {**CHUNKED, **TILED, **BLOCKS}
"""All settings, with whole blocks recomputed: one rank alone has no attention output to keep."""
WAYS: dict[str, dict[str, Any]] = {
    "none": {},
    "chunked_loss": CHUNKED,
    "tiled_mlp": TILED,
    "chunked_loss, tiled_mlp": {**CHUNKED, **TILED},
    'activation_checkpointing="blocks"': BLOCKS,
    'activation_checkpointing="keep_attention"': KEEP,
    '"keep_attention", activation_offload': {**KEEP, "activation_offload": True},
    '"blocks", chunked_loss, tiled_mlp': ALL,
    '"keep_attention", chunked_loss, tiled_mlp': {**CHUNKED, **TILED, **KEEP},
}
KEPT = (
    "settings",
    "per layer, predicted",
    "measured",
    "beside layers, predicted",
    "measured",
    "peak",
)
PEAKS = ("ranks", "tokens", "local tokens", "peak, MB", "resident, MB", "seconds", "loss")


def kept_per_layer(sizes: ModelSizes, settings: dict[str, Any]) -> int:
    """Return the bytes that forward saves per local token and layer."""
    return activations.saved_per_layer(_asked(sizes, settings))


def kept_beside(sizes: ModelSizes, settings: dict[str, Any]) -> int:
    """Return the bytes that forward saves per local token outside layers."""
    return activations.saved_outside_layers(_asked(sizes, settings))


def _asked(sizes: ModelSizes, settings: dict[str, Any]) -> activations.RankStep:
    """Return the planner's input for a rank of a ring, with enough tokens for tiles."""
    e = getattr(torch, sizes.dtype).itemsize
    return activations.RankStep(
        model_from_config(config_of(sizes), f"a small {sizes.family}"),
        tokens=1 << 20,
        cp_size=2,
        itemsize=e,
        parameter_itemsize=e,
        recompute=settings.get("activation_checkpointing", "none"),
        chunked_loss=settings.get("chunked_loss", 0),
        tiled_mlp=settings.get("tiled_mlp", 0),
    )


def measured(
    sizes: ModelSizes, settings: dict[str, Any], tokens: int = 512
) -> tuple[float, float, float]:
    """Return bytes per local token on this rank: saved per layer, saved outside layers, the peak's slope."""
    few, many = sizes.layers // 2, sizes.layers
    found = {
        (layers, factor): step(replace(sizes, layers=layers), factor * tokens, settings)
        for layers in (few, many)
        for factor in (1, 2)
    }
    slopes = {n: (found[n, 2].kept - found[n, 1].kept) / tokens for n in (few, many)}
    layer = (slopes[many] - slopes[few]) / (many - few)
    peak = (found[many, 2].peak - found[many, 1].peak) / tokens
    return layer, slopes[many] - many * layer, peak


def kept_rows(sizes: ModelSizes, ranks: int) -> Iterator[list[str]]:
    """Yield the rows of the first table."""
    for name, settings in WAYS.items():
        layer, beside, peak = on_ranks(ranks, measured, sizes, settings)[0]
        per_layer, rest = kept_per_layer(sizes, settings), kept_beside(sizes, settings)
        numbers = (per_layer, layer, rest, beside, peak)
        yield [name, *(f"{number:,.0f}" for number in numbers)]


def peaks(sizes: ModelSizes, lengths: Sequence[int], ranks: int) -> list[StepMemory]:
    """Return what steps of these numbers of local tokens need."""
    return [on_ranks(ranks, step, sizes, local, ALL)[0] for local in lengths]


def peak_rows(ranks: int, found: Sequence[StepMemory]) -> Iterator[list[str]]:
    """Yield the rows of the second table for a number of ranks; the last row is the slope."""
    for one in found:
        yield _row(ranks, one)
    if len(found) > 1:
        by_token = [
            np.polyfit([x.local_tokens for x in found], [getattr(x, name) for x in found], 1)[0]
            for name in ("peak", "resident")
        ]
        yield [str(ranks), "bytes a token", "", *(f"{slope:,.0f}" for slope in by_token), "", ""]


def _row(ranks: int, spent: StepMemory) -> list[str]:
    local = spent.local_tokens
    megabytes = (f"{n / 1e6:,.1f}" for n in (spent.peak, spent.resident))
    return [
        *(str(ranks), f"{ranks * local:,}", f"{local:,}", *megabytes),
        *(f"{spent.seconds:.1f}", f"{spent.loss:.4f}"),
    ]


COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")
"""Of Okabe and Ito, which differ for all kinds of colour vision."""


def draw(found: Mapping[int, Sequence[StepMemory]], path: Path) -> None:
    """Draw a rank's peak against the sequence's length, and the length at the same peak against ranks."""
    from matplotlib.figure import Figure  # needs no display
    from matplotlib.ticker import FuncFormatter, NullLocator

    figure: Any = Figure(figsize=(9, 3.4), layout="constrained")
    memory, length = figure.subplots(1, 2)
    for color, marker, (ranks, steps) in zip(
        cycle(COLORS), cycle("os^D"), found.items(), strict=False
    ):
        name = f"{ranks} ranks" if ranks > 1 else "one process"
        x, y = ([ranks * x.local_tokens for x in steps], [x.peak / 1e6 for x in steps])
        memory.plot(x, y, marker=marker, color=color, label=name)
    memory.set(
        xlabel="tokens in the sequence", ylabel="peak MB of a rank", title="Memory of a step"
    )
    limit = next(iter(found.values()))[-1].peak
    counts = list(found)
    fit = [
        max((n * x.local_tokens for x in found[n] if x.peak <= 1.01 * limit), default=float("nan"))
        for n in counts
    ]
    ideal = [fit[0] * n / counts[0] for n in counts]
    length.plot(counts, ideal, color="#cccccc", linewidth=7, label="in proportion to ranks")
    length.plot(counts, fit, marker="o", color=COLORS[0], label="measured")
    length.set(
        xlabel="ranks that share the sequence",
        ylabel="tokens in the sequence",
        title=f"Length at a peak of {limit / 1e6:,.0f} MB",
    )
    thousands = FuncFormatter(lambda value, _: f"{value:,.0f}")
    for panel, ticks in (
        (memory, sorted({x for line in memory.lines for x in line.get_xdata()})),
        (length, counts),
    ):
        panel.set_xscale("log", base=2)
        panel.set_yscale("log", base=2)
        panel.set_xticks(ticks)
        panel.xaxis.set_major_formatter(thousands)
        panel.yaxis.set_major_formatter(thousands)
        panel.xaxis.set_minor_locator(NullLocator())
        panel.yaxis.set_minor_locator(NullLocator())
        panel.grid(color="#dddddd")
        panel.legend(frameon=False)
    length.set_yticks(fit)
    figure.savefig(path, dpi=120)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print the tables."""
    parser = argument_parser(__doc__)
    parser.add_argument("--only", choices=("kept", "peaks", "long"), help="this part alone")
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=[1, 2, 4], help="ranks that share a row"
    )
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192], help="local tokens"
    )
    parser.add_argument("--long", type=int, default=131072, help="tokens of one long row")
    parser.add_argument(
        "--vocabulary", type=int, default=ModelSizes.vocabulary, help="of the model"
    )
    parser.add_argument("--picture", type=Path, help="draw the peaks into this file")
    given = parser.parse_args(arguments)
    if given.picture is not None and given.only in ("kept", "long"):
        parser.error("--picture draws the peaks; leave --only away, or say --only peaks")
    sizes = ModelSizes(vocabulary=given.vocabulary)
    if given.only in (None, "kept"):
        print(f"{sizes}, 2 ranks: bytes per local token\n")
        print(table.markdown_table(KEPT, kept_rows(sizes, 2)), end="\n\n", flush=True)
    if given.only in (None, "peaks"):
        print(f"{sizes}, {ALL}\n")
        found = {ranks: peaks(sizes, given.lengths, ranks) for ranks in given.ranks}
        rows = [row for ranks, steps in found.items() for row in peak_rows(ranks, steps)]
        print(table.markdown_table(PEAKS, rows), end="\n\n", flush=True)
        if given.picture is not None:
            draw(found, given.picture)
    if given.only == "long":
        ranks = max(given.ranks)
        rows = peak_rows(ranks, peaks(sizes, [given.long // ranks], ranks))
        print(table.markdown_table(PEAKS, rows))


if __name__ == "__main__":
    main()

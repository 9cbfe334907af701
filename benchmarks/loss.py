"""The loss after an output head, computed in several ways: the error and the memory of each.

    python -m benchmarks.loss

Errors are relative to float64 with all logits, of the same inputs: of the mean loss, and of the gradients of
hidden states and of the weight (by their norms). The peak counts all tensors made between the hidden states
and the weight and their gradients, relative to the logits in float32, which a model's own loss makes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.step_memory import PeakBytes
from lightning_cp.memory.chunked_loss import linear_cross_entropy
from lightning_cp.utils import console as table

TOKENS, FEATURES, VOCABULARY, CHUNK = 2048, 64, 4096, 128
HEAD = ("inputs", "way", "mean loss", "d hidden", "d weight", "peak / float32 logits")

Way = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Maps hidden [N, C], weight [V, C] and targets [N] to the mean loss."""


def all_logits(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the loss as models compute it: all logits, in float32 or wider."""
    logits = F.linear(hidden, weight)
    return F.cross_entropy(_wide(logits), targets)


def ours(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return this package's ``linear_cross_entropy``, which may choose PyTorch's."""
    return linear_cross_entropy(hidden, weight, None, targets, reduction="mean", chunk_tokens=CHUNK)


def of_pytorch(reduction: str) -> Way:
    """Return ``torch.nn.functional.linear_cross_entropy`` in chunks; it needs PyTorch 2.13 or later."""

    def way(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        options: Any = torch.nn.LinearCrossEntropyOptions(  # type: ignore[attr-defined]
            batch_chunk_size=CHUNK, chunking_method=None
        )
        made = F.linear_cross_entropy(  # type: ignore[attr-defined]
            hidden, weight, targets, reduction=reduction, options=options
        )
        return _wide(made) if reduction == "mean" else _wide(made).sum() / TOKENS

    return way


def ways() -> dict[str, Way]:
    """Return the ways that this PyTorch supports, by name."""
    found: dict[str, Way] = {"all logits": all_logits, "ours": ours}
    if hasattr(torch.nn, "LinearCrossEntropyOptions"):
        found |= {f"PyTorch's {kind}": of_pytorch(kind) for kind in ("none", "mean", "sum")}
    return found


def measure(way: Way, dtype: torch.dtype) -> tuple[list[float], float]:
    """Return relative errors of loss, d hidden and d weight, and the peak over float32 logits."""
    hidden, weight = _inputs(dtype)
    want = _results(all_logits, hidden.double(), weight.double())
    with PeakBytes() as found:
        got = _results(way, hidden, weight)
    errors = [float((a.double() - b).norm() / b.norm()) for a, b in zip(got, want, strict=True)]
    return errors, found.peak / (TOKENS * VOCABULARY * 4)


def _inputs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, FEATURES, generator=draw)
    weight = torch.randn(VOCABULARY, FEATURES, generator=draw) * 0.3
    return hidden.to(dtype), weight.to(dtype)


def _results(way: Way, hidden: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
    """Return the mean loss and its gradients."""
    targets = torch.randint(VOCABULARY, (TOKENS,), generator=torch.Generator().manual_seed(1))
    leaves = [x.detach().requires_grad_() for x in (hidden, weight)]
    mean = way(leaves[0], leaves[1], targets)
    return [mean.detach(), *torch.autograd.grad(mean, leaves)]


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def rows() -> Iterator[list[str]]:
    """Yield the rows of the table."""
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        for name, way in ways().items():
            errors, peak = measure(way, dtype)
            shown = [f"{error:.1e}" for error in errors]
            yield [str(dtype).removeprefix("torch."), name, *shown, f"{peak:.2f}"]


def main() -> None:
    """Print the table."""
    print(
        f"{TOKENS} tokens, {FEATURES} features, a vocabulary of {VOCABULARY}, chunks of {CHUNK} tokens\n"
    )
    print(table.markdown_table(HEAD, rows()))


if __name__ == "__main__":
    main()

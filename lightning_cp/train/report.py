"""What a run leaves behind, and the table it ends with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

BITS = "val/bits_per_byte"
PERPLEXITY = "val/perplexity"


@dataclass(frozen=True)
class Files:
    """Where a run writes; all of it inside the run's own folder."""

    folder: Path

    @property
    def metrics(self) -> Path:
        """Every step's and every validation's numbers."""
        return self.folder / "metrics" / "metrics.csv"

    @property
    def picture(self) -> Path:
        """The losses, drawn."""
        return self.folder / "loss.png"

    @property
    def checkpoints(self) -> Path:
        """The folder of ``last.ckpt`` and ``best.ckpt``."""
        return self.folder / "checkpoints"


@dataclass(frozen=True)
class Outcome:
    """What a run did."""

    strategy: str
    processes: int
    data_parallel_size: int
    steps: int
    tokens: int
    """Trained on; a token that several ranks worked on counts once."""
    seconds: float
    """From start to end, validation and start-up included."""
    step_seconds: float
    """Spent in training steps."""
    before: Mapping[str, float]
    """Validation before the first step; empty if that was in an earlier process and has left no line."""
    after: Mapping[str, float]
    """The last validation."""
    entropy: float
    """Byte-unigram entropy of the validation text, bits per byte."""

    def table(self, files: Files) -> str:
        """One line for each fact."""
        rows = {
            "strategy": self.strategy,
            "processes": f"{self.processes}, batches at a time: {self.data_parallel_size}",
            "trained": f"{self.steps} steps, {self.tokens:,} tokens",
            "time": f"{self.seconds:.0f} s, of which {self.step_seconds:.0f} s in training steps",
            "speed": f"{self.tokens / max(self.step_seconds, 1e-9):,.0f} tokens/s",
            "validation": f"{self._change(BITS, 3)} bits per byte",
            "byte-unigram entropy": f"{self.entropy:.3f} bits per byte",
            "perplexity": self._change(PERPLEXITY, 2),
            "metrics": files.metrics,
            "picture": files.picture,
            "checkpoint": files.checkpoints / "last.ckpt",
        }
        width = max(map(len, rows))
        return "\n".join(f"  {name:<{width}}  {value}" for name, value in rows.items())

    def _change(self, name: str, digits: int) -> str:
        before = f"{self.before[name]:.{digits}f}" if name in self.before else "?"
        return f"{before} -> {self.after[name]:.{digits}f}"

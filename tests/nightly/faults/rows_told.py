"""What all ranks are told of, so that all raise the same error at the same step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from tests.nightly.faults.rows_kills import FSDP
from tests.nightly.faults.run import Outcome, run_fault
from tests.nightly.faults.table import Row

BOUND = 10.0
Check = Callable[[Outcome], None]


def told(name: str, error: str, says: tuple[str, ...], *more: Check) -> Row:
    """Every rank has one error, and the first one shows it.

    Args:
        name: ``WAY: FAULT on RANK in WHERE``, as ``script.py`` takes them, and further settings.
        error: its class.
        says: what the message must contain.
        more: what is checked besides.
    """
    way, fault, rank, where, *settings = name.split()

    def check(done: Outcome) -> None:
        shown, *others = (text.rstrip().splitlines()[-1] for text in done.outputs)
        assert shown.startswith(f"{error}: "), done.output
        assert all(part in shown for part in says), done.output
        assert all(line.endswith(f" shows the {error}") for line in others), done.output
        assert done.statuses == (1,) * len(done.outputs), done.output
        for further in more:
            further(done)

    ranks = 4 if "data_parallel_size=2" in settings else 2
    run = partial(_run, way, fault, int(rank), where, settings, ranks)
    shown = f"{_SHOWN[fault]} on rank {rank} of {ranks}"
    among = f", {' '.join(settings)}" if settings else ""
    place = "" if where in ("data", "setup") else f" in {where}"
    return Row(f"{shown}{place} ({way}{among})", BOUND, run, check)


_SHOWN = {
    "nan": "NaN",
    "inf": "infinity",
    "values": "other values in the batch",
    "shape": "a shorter batch",
    "dtype": "a batch of another dtype",
    "early": "the loader ends early",
    "other": "other settings",
}


def _run(
    way: str, fault: str, rank: int, where: str, settings: list[str], ranks: int, folder: Path
) -> Outcome:
    return run_fault(folder, way, ranks, fault, rank, where, *settings, ranks=ranks)


def as_before(done: Outcome) -> None:
    """Weights and optimizer state are those of before the step, on every rank; nothing is saved."""
    assert all("AS BEFORE" in text and "CHANGED" not in text for text in done.outputs), done.output
    assert "A SAVE BEGINS" not in done.output
    assert not done.saved


NAN = ("step 3: NaN or inf in ",)
OTHER = ("disagree on", "rank 0", "rank 1")
TOLD = (
    told("trainer nan 1 loss saves=1", "NonFiniteError", NAN, as_before),
    told("trainer nan 0 forward saves=1", "NonFiniteError", NAN, as_before),
    told(f"trainer nan 1 backward {FSDP} saves=1", "NonFiniteError", NAN, as_before),
    told(f"trainer nan 1 loss {FSDP} data_parallel_size=2", "NonFiniteError", NAN, as_before),
    told(f"fabric inf 0 backward {FSDP}", "NonFiniteError", NAN, as_before),
    told("trainer nan 0 forward data_parallel=zero1", "NonFiniteError", NAN, as_before),
    told("manual inf 1 backward", "NonFiniteError", NAN, as_before),
    told("fabric nan 1 backward", "NonFiniteError", NAN, as_before),
    told("fabric nan 2 loss data_parallel_size=2", "NonFiniteError", NAN, as_before),
    told("trainer values 1 data", "BatchMismatchError", (*OTHER, "input_ids (values)")),
    told("fabric shape 1 data", "BatchMismatchError", OTHER),
    told("manual dtype 1 data", "BatchMismatchError", (*OTHER, "torch.int32")),
    told(
        "trainer early 1 data",
        "BatchMismatchError",
        ("the loader of rank 1 ended after 2 batches, but that of rank 0 has batch 3",),
    ),
    told("fabric early 0 data", "BatchMismatchError", ("the loader of rank 0 ended after 2",)),
    told("trainer other 1 setup", "ConfigError", ("different values of layout", "rank 1")),
    told("fabric other 0 setup", "ConfigError", ("different values of layout", "rank 0")),
)

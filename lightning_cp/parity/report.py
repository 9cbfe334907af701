"""The doctor's report: a line of a model that is well, a table of one that is not."""

from __future__ import annotations

from collections.abc import Mapping

from lightning_cp.loss_terms import DECLARE
from lightning_cp.parity.compare import Comparison, Difference
from lightning_cp.parity.diagnosis import CONTIGUOUS, REMEDY, Diagnosis

UNEVEN = (
    "With all of its labels the batch agrees; with some set to -100, so that ranks and rows have other "
    "numbers of targets, it does not, and neither would another batch. Take every mean over the targets "
    "that a rank has (labels != -100), not over its tokens or rows; or, if no label is ever -100, say what "
    "a rank's loss counts: count_targets(labels.numel())."
)
"""Of a difference that the batch alone does not show."""

SHOWN = 5
"""Gradients in a table."""


def begins(tokens: int) -> str:
    """One line, before what may take long."""
    return f"parity: comparing one process and context parallel on {tokens:,} tokens"


def healthy(
    found: Comparison,
    tokens: int,
    seconds: float,
    *,
    chunked: bool,
    evaluation: bool,
    uneven: bool,
) -> str:
    """One line.

    Args:
        found: that nothing differs.
        tokens: that were compared.
        seconds: that it took.
        chunked: the run makes no logits for its loss, unless the step asks for them.
        evaluation: training draws numbers that ranks have other ones of, so evaluation mode was looked at.
        uneven: they were compared with some labels left out as well.
    """
    worst, size = found.worst, len(found.gradients)
    unseen = "never made (chunked_loss)" if chunked else "not seen"
    logits = unseen if found.logits is None else f"{found.logits.error:.1e}"
    first = f"{found.gradients[0].error:.1e}" if size else "none"
    isolated = ", documents isolated as the batch declares them" * found.documents_isolated
    mode = ", in evaluation mode, as training draws numbers of its own for them" * evaluation
    labels = ", and with some of their labels left out" * uneven
    return (
        f"parity: one process and context parallel agree on {tokens:,} tokens{labels}{isolated}{mode} "
        f"({found.tolerance.dtype}; loss "
        f"{found.loss.error:.1e}, logits {logits}, worst of {size} gradients {first}; the nearest to its "
        f"tolerance, {worst.tolerance:.0e}, is {worst.name}; {seconds:.1f} s)"
    )


def table_of(found: Comparison) -> list[str]:
    """The loss, the logits, and the worst gradients."""
    rows = [found.loss, *([found.logits] if found.logits else []), *found.gradients[:SHOWN]]
    width = max(len(one.name) for one in rows)
    lines = [f"  {'tensor':<{width}}  {'relative error':>14}  {'tolerance':>9}"]
    return [*lines, *(_line(one, width) for one in rows)]


def _line(one: Difference, width: int) -> str:
    mark = "  <-" if one.is_fault else ""
    return f"  {one.name:<{width}}  {one.error:>14.1e}  {one.tolerance:>9.0e}{mark}"


def experiments_of(made: Mapping[str, Comparison | str]) -> list[str]:
    """What each did to the difference."""
    width = max(map(len, made), default=0)
    return [f"  {name:<{width}}  {_told(name, result)}" for name, result in made.items()]


def _told(name: str, result: Comparison | str) -> str:
    if isinstance(result, str):
        return result
    if name == CONTIGUOUS:
        verdict = "differs" if result.first_rank > result.tolerance.logits else "agrees"
        return f"{verdict}: logits {result.first_rank:.1e}"
    logits = "-" if result.logits is None else f"{result.logits.error:.1e}"
    verdict = "differs" if result.is_fault else "agrees"
    gradient = f"{result.gradients[0].error:.1e}" if result.gradients else "-"
    return f"{verdict}: loss {result.loss.error:.1e}, logits {logits}, worst gradient {gradient}"


def ill(
    found: Comparison,
    made: Mapping[str, Comparison | str],
    diagnosis: Diagnosis,
    tokens: int,
    *,
    uneven: bool,
) -> str:
    """The whole of an error."""
    labels = " with some labels left out" * uneven
    faults = sum(one.is_fault for one in found.gradients)
    lines = [
        f"context parallel, this model does not compute what it computes in one process (parity check on "
        f"{tokens:,} tokens of the batch{labels}, {found.tolerance.dtype}).",
        *table_of(found),
        f"  {faults} of {len(found.gradients)} gradients are beyond their tolerance.",
    ]
    if made:
        lines += ["What was tried:", *experiments_of(made)]
    lines += [
        f"Likely cause: {diagnosis.cause.value}.",
        f"  {diagnosis.because[:1].upper()}{diagnosis.because[1:]}.",
        f"  {REMEDY[diagnosis.cause]}",
        *([UNEVEN] if uneven else []),
    ]
    if diagnosis.besides is not None:
        lines.append(f"Besides, {diagnosis.besides}. {DECLARE}")
    return "\n".join(lines)

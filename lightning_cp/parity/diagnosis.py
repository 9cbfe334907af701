"""The likely cause of a difference, from where it begins and from what makes it go away."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum

from lightning_cp.loss.terms import DECLARE
from lightning_cp.parity.compare import Comparison, Difference, TokenGradients
from lightning_cp.parity.passes import Event


class Cause(Enum):
    """Known reasons for ranks to compute something else than one process."""

    DIFFERENT_DATA = "different data inside the cp group"
    UNSCALED_LOSS = "unscaled loss"
    OTHER_TARGETS = "a loss that counts other targets than the labels"
    OTHER_TOKENS = "a mean over other tokens than those with labels"
    LOCAL_LABELS = "local labels"
    OF_SEQUENCES = "a function of sums over sequences"
    NO_MEAN = "a loss that is no mean over targets"
    LOCAL_POSITIONS = "local positions"
    TRAINING_ONLY = "code of training alone"
    MIXES_THE_SEQUENCE = "a module that mixes the sequence"
    CROSS_DOCUMENT = "cross-document attention"
    UNKNOWN = "unknown"


REMEDY = {
    Cause.DIFFERENT_DATA: (
        "Ranks that share a sample have to compute the same: seed what the step draws alike on them (not by "
        "global_rank), and let nothing in it depend on the rank."
    ),
    Cause.UNSCALED_LOSS: (
        "Return the mean over the targets of this rank's tokens, not divided, summed or averaged over ranks: "
        "the strategy weighs it. A sum that is meant, of each row say, is computed from "
        "self.unshard(losses of tokens)."
    ),
    Cause.OTHER_TARGETS: DECLARE,
    Cause.OTHER_TOKENS: (
        "A rank's loss is weighed by its labels. Say before its backward what it is a mean over: "
        "count_targets(mask) of ContextParallelMixin, or of the strategy, with the mask of the tokens that "
        "it adds up; for all tokens, mask = self.token_mask(x).expand(x.shape[:2]). Or take the mean over "
        "tokens with labels alone."
    ),
    Cause.LOCAL_LABELS: (
        "Do not shift or cut labels in the step: a rank's last token has its target on another rank. Shift "
        "in the dataset and declare labels='aligned', or take batch['shift_labels']."
    ),
    Cause.NO_MEAN: (
        "The strategy weighs each rank's loss by its targets, which is exact for means over them. Terms that "
        "are none, such as a router's balance, a ratio of sums or a mean over other tokens, would have to "
        "see all tokens: gather what they are made of by self.unshard(x), or leave them out."
    ),
    Cause.OF_SEQUENCES: (
        "A rank has a part of each sequence, and so of its sum, its mean and its count. Put the values of "
        "tokens together before they are summed: self.unshard(x) of ContextParallelMixin, or "
        "fabric.strategy.unshard(x)."
    ),
    Cause.LOCAL_POSITIONS: (
        "Take positions from batch['position_ids'] or self.token_positions(x), which are global, and not "
        "from the length of what a rank has."
    ),
    Cause.TRAINING_ONLY: (
        "What only training does takes something from the tokens that a rank has: their number, as NEFTune "
        "scales its noise, or a mean over them. Take it from the whole sequence."
    ),
    Cause.MIXES_THE_SEQUENCE: (
        "Under context parallelism only attention sees other ranks' tokens. Leave this module out, or give "
        "it the whole sequence: self.unshard(x)."
    ),
    Cause.CROSS_DOCUMENT: (
        "In one process the model isolates other documents than the batch declares, or none. Have its "
        "attention function apply the mask that it is given, or take the declaration (position_ids that "
        "restart, segment_ids, cu_seqlens) out of the batch."
    ),
    Cause.UNKNOWN: "Nothing that is known explains it; the table says where it begins.",
}


@dataclass(frozen=True)
class Beginning:
    """Where the context-parallel forward leaves the other one."""

    event: Event
    behind_attention: bool
    """An attention call lies between the last tensor that agrees and this one."""
    other_tokens_matter: bool | None
    """Another first token changes it at other tokens, with no attention before; ``None``: not known."""

    def __str__(self) -> str:
        event = self.event
        kind = event.module if event.kind == "output" else event.parent or "the step"
        if event.kind == "output":
            return f"in the output of {event.name or 'the model'} ({kind})"
        return f"within {kind}, before {event.name or 'the model'} ({event.module})"


@dataclass(frozen=True)
class Evidence:
    """The findings of a check."""

    base: Comparison
    beginning: Beginning | None
    experiments: Mapping[str, Comparison | str]
    """By name; a text says why one could not be made."""
    positions_ignored: bool
    tokens: TokenGradients | None = None
    """``None``: not known."""
    other_counts: str | None = None
    """Both numbers of each rank, where a loss counted other targets than its rank is weighted by."""
    beside_other_terms: bool = False
    """The loss has means over targets, and another term."""
    counts_rows: bool = False
    """These targets are as many as the batch has rows, on every rank."""

    @property
    def seams_alone(self) -> bool:
        """Gradients at the last output are right but for those of a few tokens, as at a rank's last one."""
        return self.tokens is not None and self.tokens.most_agree and not self.tokens.all_along

    def cures(self, name: str) -> bool:
        """True if the difference is gone in that experiment."""
        found = self.experiments.get(name)
        return isinstance(found, Comparison) and not found.is_fault

    def cures_logits(self, name: str) -> bool:
        """The same, of the forward alone."""
        found = self.experiments.get(name)
        if not isinstance(found, Comparison):
            return False
        return found.logits is not None and not found.logits.is_fault


NO_PACKING, NO_PADDING, PLAIN_LOSS = "no packing", "no padding", "plain loss"
EVALUATION = "evaluation mode"
ULYSSES, RING, CONTIGUOUS = "Ulysses only", "ring only", "contiguous layout, first rank"


@dataclass(frozen=True)
class Diagnosis:
    """The most likely cause."""

    cause: Cause
    because: str
    besides: str | None = None
    """Another finding, which the cause does not explain."""


def diagnose(found: Evidence) -> Diagnosis:
    """The cause that explains all that was found; never a guess."""
    likely = _cause_of(found)
    of_counts = found.other_counts is not None and found.other_counts in likely.because
    if of_counts or likely.cause in (Cause.OTHER_TARGETS, Cause.LOCAL_LABELS):
        return likely
    return replace(likely, besides=found.other_counts)


def _cause_of(found: Evidence) -> Diagnosis:
    base = found.base
    if base.is_spread:
        return Diagnosis(
            Cause.DIFFERENT_DATA,
            f"the same batch, whole on every rank, has losses that are {base.spread:.1e} apart on the ranks "
            "of a group",
        )
    if found.beginning is None and found.other_counts is not None:
        return _of_counts(found, found.other_counts)
    if found.cures(EVALUATION):
        where = f"; the difference begins {found.beginning}" if found.beginning else ""
        return Diagnosis(Cause.TRAINING_ONLY, f"in evaluation mode both agree{where}")
    if found.beginning is not None:
        return _of_the_forward(found, found.beginning)
    return _of_the_loss(found)


def _of_counts(found: Evidence, counts: str) -> Diagnosis:
    """The logits agree, and a loss counted other targets than the labels."""
    if found.seams_alone and found.cures(PLAIN_LOSS):
        what = "logits agree, and with a loss that takes no labels gradients do too"
        return Diagnosis(Cause.LOCAL_LABELS, f"{what}; {counts}")
    if found.counts_rows and found.tokens is not None and not found.tokens.all_along:
        what = "logits agree, and a loss has a target for each row, of which a rank has a part"
        return Diagnosis(Cause.OF_SEQUENCES, f"{what}; {counts}")
    return Diagnosis(Cause.OTHER_TARGETS, f"logits agree, and {counts}")


def _of_the_loss(found: Evidence) -> Diagnosis:
    """Everything that modules put out agrees."""
    base = found.base
    off = abs(base.factor - 1.0)
    if base.residual <= 2 * base.tolerance.gradient and off > base.tolerance.gradient:
        return Diagnosis(
            Cause.UNSCALED_LOSS,
            f"logits agree, and all gradients are {base.factor:.4g} times those of one process",
        )
    if found.tokens is not None and found.tokens.all_along:
        return _of_factors(found.tokens)
    if found.cures(PLAIN_LOSS) and found.beside_other_terms:
        return Diagnosis(
            Cause.NO_MEAN,
            "logits agree, and with their mean square for a loss gradients do too; the step's own loss has "
            "a mean over as many targets as the labels have, and it has another term",
        )
    if found.cures(PLAIN_LOSS) and (found.tokens is None or found.tokens.most_agree):
        return Diagnosis(
            Cause.LOCAL_LABELS,
            "logits agree, and with a loss that takes no labels gradients do too",
        )
    if found.cures(PLAIN_LOSS):
        return Diagnosis(
            Cause.NO_MEAN,
            "logits agree, with their mean square for a loss gradients do too, and with the step's own loss "
            "those of most tokens differ, not of a rank's last ones alone",
        )
    tried = isinstance(found.experiments.get(PLAIN_LOSS), Comparison)
    also = ", with a plain loss neither" if tried else "; no other loss could be tried"
    return Diagnosis(Cause.UNKNOWN, f"logits agree, and gradients do not{also}")


def _of_factors(tokens: TokenGradients) -> Diagnosis:
    """Every token's gradient points where it should."""
    what = "logits agree, and the gradient of each token's is one process's times a factor"
    if tokens.of_other_tokens:
        by = "as the mean over other tokens than those with labels has it"
        return Diagnosis(Cause.OTHER_TOKENS, f"{what}, {by}")
    if tokens.one_factor:
        by = "which depends on how many targets its rank has, at most"
        return Diagnosis(Cause.UNSCALED_LOSS, f"{what}, {by}")
    return Diagnosis(Cause.OF_SEQUENCES, f"{what}, another one for each rank or row")


def _of_the_forward(found: Evidence, beginning: Beginning) -> Diagnosis:
    where = f"the difference begins {beginning}"
    if beginning.behind_attention:
        if found.cures_logits(NO_PACKING):
            return Diagnosis(
                Cause.CROSS_DOCUMENT, f"{where}, behind attention, and is gone without documents"
            )
        contiguous = found.experiments.get(CONTIGUOUS)
        first = isinstance(contiguous, Comparison) and (
            contiguous.first_rank <= contiguous.tolerance.logits
        )
        if first and found.positions_ignored:
            return Diagnosis(
                Cause.LOCAL_POSITIONS,
                f"{where}, behind attention; the first rank, whose tokens begin at 0, is right; and the step "
                "took no positions from the batch",
            )
        return Diagnosis(Cause.UNKNOWN, f"{where}, behind attention")
    if beginning.other_tokens_matter:
        return Diagnosis(
            Cause.MIXES_THE_SEQUENCE,
            f"{where}, which changes if another token does, before any attention of the layer",
        )
    if beginning.other_tokens_matter is False:
        return Diagnosis(
            Cause.LOCAL_POSITIONS,
            f"{where}, which does not depend on other tokens, but on where a token stands",
        )
    return Diagnosis(Cause.UNKNOWN, where)


# The doctor's report: a line of a model that is well, a table of one that is not.


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

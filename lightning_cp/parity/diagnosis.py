"""The likely cause of a difference, from its first tensor and from experiments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum

from lightning_cp.loss.terms import DECLARE
from lightning_cp.parity.compare import Comparison, Difference, TokenGradients
from lightning_cp.parity.passes import Event


class Cause(Enum):
    """Known reasons for which ranks compute other values than one process."""

    DIFFERENT_DATA = "different data inside the cp group"
    UNSCALED_LOSS = "unscaled loss"
    OTHER_TARGETS = "a loss that counts other targets than the labels"
    OTHER_TOKENS = "a mean over other tokens than those with labels"
    OTHER_COUNT = "a count of other tokens than those of the loss"
    OWN_NUMBER = "a loss of whole sequences, times a number of a rank's own tokens"
    LOCAL_PICK = "a token that each rank takes from its own part"
    LOCAL_LABELS = "local labels"
    OF_SEQUENCES = "a function of sums over sequences"
    NO_MEAN = "a loss that is not a mean over targets"
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
        "the strategy weighs it. For a sum write self.sequence_sum(losses of tokens, mask).sum(); for "
        "another function of whole rows use self.unshard(losses of tokens)."
    ),
    Cause.OTHER_COUNT: (
        "Call count_targets with the mask, or the weights, that the loss multiplies the values of tokens by, "
        "and divide by the number that it returns: (losses * mask).sum() / self.count_targets(mask)."
    ),
    Cause.OWN_NUMBER: (
        "A rank has a part of each sequence: its lengths (x.shape[1]) and its counts (mask.sum()) are not "
        "those of the whole. Count by self.sequence_sum(mask), or take self.sequence_mean(values, mask)."
    ),
    Cause.LOCAL_PICK: (
        "The first or the last token of a rank is not that of the sequence. Take it by "
        "self.sequence_pick(values, index), with -1 for the last one of each row, or from self.unshard(x)."
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
        "see all tokens: compute them from self.sequence_sum(values, mask), sequence_mean or "
        "self.unshard(x), or leave them out."
    ),
    Cause.OF_SEQUENCES: (
        "A rank has a part of each sequence, and so of its sum, its mean and its count. Take those of the "
        "whole sequence: self.sequence_sum(values, mask) or sequence_mean of ContextParallelMixin, with "
        "Fabric fabric.strategy.sequence_sum(values, mask); or put the values together, self.unshard(x)."
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
class FirstDifference:
    """The first tensor at which the context-parallel forward differs."""

    event: Event
    behind_attention: bool
    """True if an attention call lies between the last equal tensor and this one."""
    other_tokens_matter: bool | None
    """True if another first token changes it at other tokens, with no attention before; ``None`` if
    unknown.
    """

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
    first_difference: FirstDifference | None
    experiments: Mapping[str, Comparison | str]
    """Results by name; a text is the reason why one could not be made."""
    positions_ignored: bool
    tokens: TokenGradients | None = None
    """``None`` if unknown."""
    other_counts: str | None = None
    """Both numbers of each rank, if a loss counted other targets than those of its rank's weight."""
    beside_other_terms: bool = False
    """True if the loss has means over targets, and another term."""
    counts_rows: bool = False
    """True if the counted targets are as many as the batch's rows, on every rank."""
    is_declared: bool = False
    """True if the step called ``count_targets``."""
    is_of_sequences: bool = False
    """True if the loss is computed from values of whole sequences, and of no mean over targets."""

    @property
    def seams_alone(self) -> bool:
        """True if gradients at the last output are wrong only at a few tokens, such as a rank's last one."""
        return self.tokens is not None and self.tokens.most_agree and not self.tokens.all_along

    def cures(self, name: str) -> bool:
        """True if the experiment removes the difference."""
        result = self.experiments.get(name)
        return isinstance(result, Comparison) and not result.is_fault

    def cures_logits(self, name: str) -> bool:
        """True if the experiment removes the difference of the logits."""
        result = self.experiments.get(name)
        if not isinstance(result, Comparison):
            return False
        return result.logits is not None and not result.logits.is_fault


NO_PACKING, NO_PADDING, PLAIN_LOSS = "no packing", "no padding", "plain loss"
EVALUATION = "evaluation mode"
ULYSSES, RING, CONTIGUOUS = "Ulysses only", "ring only", "contiguous layout, first rank"


@dataclass(frozen=True)
class Diagnosis:
    """The most likely cause."""

    cause: Cause
    reason: str
    second_finding: str | None = None
    """Another finding that the cause does not explain."""


def diagnose(evidence: Evidence) -> Diagnosis:
    """The cause that explains all findings."""
    likely = _cause_of(evidence)
    of_counts = evidence.other_counts is not None and evidence.other_counts in likely.reason
    if of_counts or likely.cause in (Cause.OTHER_TARGETS, Cause.LOCAL_LABELS):
        return likely
    return replace(likely, second_finding=evidence.other_counts)


def _cause_of(evidence: Evidence) -> Diagnosis:
    base = evidence.base
    if base.is_spread:
        return Diagnosis(
            Cause.DIFFERENT_DATA,
            f"the same batch, whole on every rank, has losses that are {base.spread:.1e} apart on the ranks "
            "of a group",
        )
    if evidence.first_difference is None and evidence.other_counts is not None:
        return _count_cause(evidence, evidence.other_counts)
    if evidence.cures(EVALUATION):
        where = (
            f"; the difference begins {evidence.first_difference}"
            if evidence.first_difference
            else ""
        )
        return Diagnosis(Cause.TRAINING_ONLY, f"in evaluation mode both agree{where}")
    if evidence.first_difference is not None:
        return _forward_cause(evidence, evidence.first_difference)
    return _loss_cause(evidence)


def _count_cause(evidence: Evidence, counts: str) -> Diagnosis:
    """The cause if the logits agree, and a loss counted other targets than the labels."""
    if evidence.seams_alone and evidence.cures(PLAIN_LOSS):
        what = "logits agree, and with a loss that takes no labels gradients do too"
        return Diagnosis(Cause.LOCAL_LABELS, f"{what}; {counts}")
    if evidence.counts_rows and evidence.tokens is not None and not evidence.tokens.all_along:
        what = "logits agree, and a loss has a target for each row, of which a rank has a part"
        return Diagnosis(Cause.OF_SEQUENCES, f"{what}; {counts}")
    cause = Cause.OTHER_COUNT if evidence.is_declared else Cause.OTHER_TARGETS
    return Diagnosis(cause, f"logits agree, and {counts}")


def _loss_cause(evidence: Evidence) -> Diagnosis:
    """The cause if all outputs of modules agree."""
    base = evidence.base
    if base.loss.is_fault and not any(one.is_fault for one in base.gradients):
        what = (
            "logits and gradients agree, and the loss does not: a term without a gradient differs"
        )
        return Diagnosis(Cause.NO_MEAN, what)
    off = abs(base.factor - 1.0)
    if base.residual <= 2 * base.tolerance.gradient and off > base.tolerance.gradient:
        return Diagnosis(
            Cause.OWN_NUMBER if evidence.is_of_sequences else Cause.UNSCALED_LOSS,
            f"logits agree, and all gradients are {base.factor:.4g} times those of one process",
        )
    if evidence.tokens is not None and evidence.tokens.one_a_row:
        return Diagnosis(
            Cause.LOCAL_PICK,
            "logits agree, and in one process one token of each row has a gradient, which on ranks another "
            "one has",
        )
    if evidence.tokens is not None and evidence.tokens.all_along:
        return _factor_cause(evidence.tokens, is_declared=evidence.is_declared)
    if evidence.cures(PLAIN_LOSS) and evidence.beside_other_terms:
        return Diagnosis(
            Cause.NO_MEAN,
            "logits agree, and with their mean square for a loss gradients do too; the step's own loss has "
            "a mean over as many targets as the labels have, and it has another term",
        )
    if evidence.cures(PLAIN_LOSS) and (evidence.tokens is None or evidence.tokens.most_agree):
        return Diagnosis(
            Cause.LOCAL_LABELS,
            "logits agree, and with a loss that takes no labels gradients do too",
        )
    if evidence.cures(PLAIN_LOSS):
        return Diagnosis(
            Cause.NO_MEAN,
            "logits agree, with their mean square for a loss gradients do too, and with the step's own loss "
            "those of most tokens differ, not of a rank's last ones alone",
        )
    tried = isinstance(evidence.experiments.get(PLAIN_LOSS), Comparison)
    also = ", with a plain loss neither" if tried else "; no other loss could be tried"
    return Diagnosis(Cause.UNKNOWN, f"logits agree, and gradients do not{also}")


def _factor_cause(tokens: TokenGradients, *, is_declared: bool) -> Diagnosis:
    """The cause if every token's gradient has the right direction."""
    what = "logits agree, and the gradient of each token's is one process's times a factor"
    if is_declared and (tokens.of_other_tokens or tokens.one_factor):
        by = "another one for each rank, whose weight is the number that count_targets was given"
        return Diagnosis(Cause.OTHER_COUNT, f"{what}, {by}")
    if tokens.of_other_tokens:
        by = "as the mean over other tokens than those with labels has it"
        return Diagnosis(Cause.OTHER_TOKENS, f"{what}, {by}")
    if tokens.one_factor:
        by = "which depends on how many targets its rank has, at most"
        return Diagnosis(Cause.UNSCALED_LOSS, f"{what}, {by}")
    if not tokens.of_sequences:
        by = "another one for each token, as a term has that is neither a mean over targets nor a sum of rows"
        return Diagnosis(Cause.NO_MEAN, f"{what}, {by}")
    return Diagnosis(Cause.OF_SEQUENCES, f"{what}, another one for each rank or row")


def _forward_cause(evidence: Evidence, first_difference: FirstDifference) -> Diagnosis:
    where = f"the difference begins {first_difference}"
    if first_difference.behind_attention:
        if evidence.cures_logits(NO_PACKING):
            return Diagnosis(
                Cause.CROSS_DOCUMENT, f"{where}, behind attention, and is gone without documents"
            )
        contiguous = evidence.experiments.get(CONTIGUOUS)
        first = isinstance(contiguous, Comparison) and (
            contiguous.first_rank <= contiguous.tolerance.logits
        )
        if first and evidence.positions_ignored:
            return Diagnosis(
                Cause.LOCAL_POSITIONS,
                f"{where}, behind attention; the first rank, whose tokens begin at 0, is right; and the step "
                "took no positions from the batch",
            )
        return Diagnosis(Cause.UNKNOWN, f"{where}, behind attention")
    if first_difference.other_tokens_matter:
        return Diagnosis(
            Cause.MIXES_THE_SEQUENCE,
            f"{where}, which changes if another token does, before any attention of the layer",
        )
    if first_difference.other_tokens_matter is False:
        return Diagnosis(
            Cause.LOCAL_POSITIONS,
            f"{where}, which does not depend on other tokens, but on where a token stands",
        )
    return Diagnosis(Cause.UNKNOWN, where)


# The doctor's report: one line for a healthy model, a table for a faulty one.


UNEVEN = (
    "With all of its labels the batch agrees; with some set to -100, so that ranks and rows have other "
    "numbers of targets, it does not, and neither would another batch. Take every mean over the targets "
    "that a rank has (labels != -100), not over its tokens or rows; or, if no label is ever -100, say what "
    "a rank's loss counts: count_targets(labels.numel())."
)
"""Note for a difference that the unchanged batch does not show."""

SHOWN = 5
"""The number of gradients in a table."""


def begins(tokens: int) -> str:
    """The line before a check that may take long."""
    return f"parity: comparing one process and context parallel on {tokens:,} tokens"


def healthy(
    comparison: Comparison,
    tokens: int,
    seconds: float,
    *,
    chunked: bool,
    evaluation: bool,
    uneven: bool,
) -> str:
    """The line for a healthy model.

    Args:
        comparison: a comparison without faults.
        tokens: number of compared tokens.
        seconds: duration of the check.
        chunked: the run makes no logits for its loss, unless the step asks for them.
        evaluation: the check ran in evaluation mode, since ranks draw other random numbers in training.
        uneven: the check ran also with some labels left out.
    """
    worst, size = comparison.worst, len(comparison.gradients)
    unseen = "never made (chunked_loss)" if chunked else "not seen"
    logits = unseen if comparison.logits is None else f"{comparison.logits.error:.1e}"
    first = f"{comparison.gradients[0].error:.1e}" if size else "none"
    isolated = ", documents isolated as the batch declares them" * comparison.documents_isolated
    mode = ", in evaluation mode, as training draws numbers of its own for them" * evaluation
    labels = ", and with some of their labels left out" * uneven
    return (
        f"parity: one process and context parallel agree on {tokens:,} tokens{labels}{isolated}{mode} "
        f"({comparison.tolerance.dtype}; loss "
        f"{comparison.loss.error:.1e}, logits {logits}, worst of {size} gradients {first}; the nearest to "
        f"its tolerance, {worst.tolerance:.0e}, is {worst.name}; {seconds:.1f} s)"
    )


def table_of(comparison: Comparison) -> list[str]:
    """Lines for the loss, the logits, and the worst gradients."""
    rows = [
        comparison.loss,
        *([comparison.logits] if comparison.logits else []),
        *comparison.gradients[:SHOWN],
    ]
    width = max(len(one.name) for one in rows)
    lines = [f"  {'tensor':<{width}}  {'relative error':>14}  {'tolerance':>9}"]
    return [*lines, *(_line(one, width) for one in rows)]


def _line(one: Difference, width: int) -> str:
    mark = "  <-" if one.is_fault else ""
    return f"  {one.name:<{width}}  {one.error:>14.1e}  {one.tolerance:>9.0e}{mark}"


def experiments_of(experiments: Mapping[str, Comparison | str]) -> list[str]:
    """Lines for the effect of each experiment."""
    width = max(map(len, experiments), default=0)
    return [
        f"  {name:<{width}}  {_experiment_line(name, result)}"
        for name, result in experiments.items()
    ]


def _experiment_line(name: str, result: Comparison | str) -> str:
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
    comparison: Comparison,
    experiments: Mapping[str, Comparison | str],
    diagnosis: Diagnosis,
    tokens: int,
    *,
    uneven: bool,
) -> str:
    """The text of an error."""
    labels = " with some labels left out" * uneven
    faults = sum(one.is_fault for one in comparison.gradients)
    lines = [
        f"context parallel, this model does not compute what it computes in one process (parity check on "
        f"{tokens:,} tokens of the batch{labels}, {comparison.tolerance.dtype}).",
        *table_of(comparison),
        f"  {faults} of {len(comparison.gradients)} gradients are beyond their tolerance.",
    ]
    if experiments:
        lines += ["What was tried:", *experiments_of(experiments)]
    lines += [
        f"Likely cause: {diagnosis.cause.value}.",
        f"  {diagnosis.reason[:1].upper()}{diagnosis.reason[1:]}.",
        f"  {REMEDY[diagnosis.cause]}",
        *([UNEVEN] if uneven else []),
    ]
    if diagnosis.second_finding is not None:
        lines.append(f"Besides, {diagnosis.second_finding}. {DECLARE}")
    return "\n".join(lines)

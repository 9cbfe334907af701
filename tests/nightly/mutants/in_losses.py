"""Mistakes in values of whole rows: sums over ranks, padding, documents, heads, routers, and their checks.

Left out because no gradient depends on them: with ``labels="none"`` any weights of ranks that add up to their
number are exact.
"""

from __future__ import annotations

from tests.nightly.mutants.mutant import Mutant

SEQUENCE = "lightning_cp/loss/sequence.py"
WEIGHTING = "lightning_cp/loss/weighting.py"
COUNTS = "lightning_cp/loss/counts.py"
POOLING = "lightning_cp/models/hf/pooling.py"
ROUTER = "lightning_cp/models/hf/router_loss.py"
GATHER = "lightning_cp/comm/all_gather.py"
REVIEW = "lightning_cp/loss/review.py"
MIXIN = "lightning_cp/mixin.py"
STEP = "lightning_cp/runtime/step_context.py"

UNIT = "tests/unit/loss/test_sequence.py::test_"
VALUES = "tests/ranks/loss/test_sequence.py::test_"
LOOPS = "tests/ranks/loss/test_sequence_losses.py::test_"
ROW_CLASSES = "tests/ranks/loss/test_row_classes.py::test_weights_are_those_of_one_process"
HEADS = "tests/ranks/models/test_row_heads.py::test_a_head_takes_its_token_from_any_rank"
ROUTERS = "tests/ranks/models/test_router_loss.py::test_it_is_one_process_s"
UNSHARD = "tests/ranks/loss/test_unshard.py::test_"
OTHERS = "tests/ranks/loss/test_other_strategies.py::test_"
DECLARED = "tests/ranks/loss/test_counts.py::test_"
ROWS = "tests/ranks/parity/test_row_losses.py::test_"

LOSS_MUTANTS = (
    Mutant(
        "gradients of sums stay on their rank",
        SEQUENCE,
        "return all_sum(gradients[0].contiguous(), ctx.group), None",
        "return gradients[0], None",
        (f"{VALUES}values_and_gradients_equal_one_process",),
        "Each rank's tokens learn by its own weight: with equal weights half of the gradient on two ranks.",
    ),
    Mutant(
        "sums of a rank alone",
        SEQUENCE,
        "return all_sum(x.contiguous(), group)",
        "return x.clone()",
        (f"{VALUES}values_and_gradients_equal_one_process",),
        "DPO of the parts of answers: a loss off by 1%, gradients by 51%.",
    ),
    Mutant(
        "padding summed",
        SEQUENCE,
        "x = torch.where(is_padding.view(*self.owner.shape, *more), 0, x)",
        "x = torch.where(is_padding.view(*self.owner.shape, *more), x, x)",
        (f"{VALUES}values_and_gradients_equal_one_process",),
        "What a model says of padding counts for the last document of a pack, or for the row.",
    ),
    Mutant(
        "documents of all rows are those of the first",
        SEQUENCE,
        "owner[row, inside] = at[inside] + len(lengths)",
        "owner[row, inside] = at[inside]",
        (f"{VALUES}values_and_gradients_equal_one_process",),
        "Two answers in one number, in packed batches of several rows.",
    ),
    Mutant(
        "means over a rank's own mask",
        SEQUENCE,
        "return _divide(whole[:, :-1].view_as(sums), whole[:, -1]).to(dtype)",
        "return _divide(whole[:, :-1].view_as(sums), counted).to(dtype)",
        (f"{VALUES}values_and_gradients_equal_one_process",),
        "Embeddings that are several times too long, by another factor on each rank.",
    ),
    Mutant(
        "weights that learn from sums alone",
        SEQUENCE,
        "_divide(whole[:, :-1].view_as(sums), whole[:, -1])",
        "_divide(whole[:, :-1].view_as(sums), whole[:, -1].detach())",
        (f"{VALUES}values_and_gradients_equal_one_process", f"{UNIT}gradients_of_learned_weights"),
        "A pooling by attention whose weights grow, as a mean over them would not let them.",
    ),
    Mutant(
        "weights of 0 do not learn",
        SEQUENCE,
        "weighted if mask.requires_grad else torch.where(counts != 0, weighted, 0)",
        "torch.where(counts != 0, weighted, 0)",
        (f"{VALUES}values_and_gradients_equal_one_process", f"{UNIT}gradients_of_learned_weights"),
        "A gate that is exactly 0 stays so.",
    ),
    Mutant(
        "counts of a mask are true or false",
        SEQUENCE,
        "dtype = sums.dtype if _is_whole(x) else x.dtype",
        "dtype = x.dtype",
        (f"{UNIT}sums_of_whole_numbers_are_torch_s",),
        "A sum divided by sequence_sum(mask) is divided by 1.",
    ),
    Mutant(
        "a token of every rank",
        SEQUENCE,
        "torch.where(is_own, values, 0),\n",
        "torch.where(is_own, values, values),\n",
        (f"{VALUES}values_and_gradients_equal_one_process",),
        "A reward is the sum of the last token's, and of one of each other rank.",
    ),
    Mutant(
        "an index of a rank alone",
        SEQUENCE,
        "{**_arguments(x), **indices},",
        "_arguments(x),",
        (f"{LOOPS}arguments_that_differ_between_ranks", f"{ROWS}the_first_check_names_them"),
        "The last token of each rank's part: a reward that is the sum of several tokens, equal on all ranks.",
    ),
    Mutant(
        "arguments of a rank alone",
        "lightning_cp/models/rank_checks.py",
        "check_equal(facts or {}, group, what=what, error=error, remedy=remedy)",
        "check_equal({}, group, what=what, error=error, remedy=remedy)",
        (f"{LOOPS}arguments_that_differ_between_ranks",),
        "Messages of other sizes, which wait for ever or are read from memory that was not written.",
    ),
    Mutant(
        "documents of padding are sequences",
        SEQUENCE,
        "every = list(map(_with_tokens, every, real))",
        "pass",
        ("tests/ranks/loss/test_whole_values.py::test_a_document_of_padding_is_no_sequence",),
        "A mean over documents counts padding, and their last token cannot be picked.",
    ),
    Mutant(
        "dimensions of unshard are not compared",
        SEQUENCE,
        '"a dimension": dim % x.dim(), ',
        "",
        (f"{UNSHARD}values_that_differ_between_ranks[dimension-ring 2]",),
        "Parts of other dimensions are put together.",
    ),
    Mutant(
        "unshard takes any number of tokens",
        STEP,
        "partial(layout.check_shard, x, dim),",
        "lambda: None,",
        (f"{UNSHARD}values_of_some_tokens",),
        "The error does not say what is wrong with the values.",
    ),
    Mutant(
        "rows of other data ranks without a gradient",
        SEQUENCE,
        "return torch.cat(all_gather(x, group))",
        "own = group.rank()\n    every = enumerate(all_gather(x, group))\n"
        "    return torch.cat([y if i == own else y.detach() for i, y in every])",
        (f"{VALUES}a_loss_of_the_rows_of_all_data_ranks",),
        "A contrastive loss that pulls a row to others, and not those to it.",
    ),
    Mutant(
        "rows of a rank of ddp alone",
        MIXIN,
        "group = _data_group(strategy)",
        "group = None",
        (f"{OTHERS}rows_of_all_ranks_of_ddp",),
        "The same module has another contrastive loss under Lightning's own strategy.",
    ),
    Mutant(
        "a pick that knows no mask",
        STEP,
        "tokens = self._sequences_of(self.part, whole, x.device)",
        "tokens = self._sequences_of(self.part, None, x.device)",
        (f"{LOOPS}they_equal_one_process",),
        "A reward of the last token of a row, and not of its answer.",
    ),
    Mutant(
        "rows of data ranks are not compared",
        SEQUENCE,
        "if not all_equal(facts, group, device_type=device_type):",
        "if not all_equal(None, group, device_type=device_type):",
        (f"{OTHERS}rows_that_differ_between_ranks_are_refused[other_dtype]",),
        "A last batch of fewer rows, or rows of another dtype, are read as other numbers.",
    ),
    Mutant(
        "means of a rank without labels",
        REVIEW,
        "if means.counts or not _is_known(means):",
        "if means.counts:",
        (f"{LOOPS}other_losses_are_refused_without_labels",),
        "With labels='none' a mean over a rank's own tokens trains, with wrong weights.",
    ),
    Mutant(
        "a loss of no sequence without labels",
        REVIEW,
        "        if not means.gathered:\n            raise ConfigError(_NOT_OF_SEQUENCES)\n",
        "",
        (f"{LOOPS}other_losses_are_refused_without_labels",),
        "A step that forgot its loss trains by a regulariser alone.",
    ),
    Mutant(
        "second derivatives of sums without a word",
        SEQUENCE,
        "        check_first_derivative()\n",
        "",
        (f"{VALUES}second_derivatives_are_refused",),
        "A gradient penalty that adds nothing to gradients.",
    ),
    Mutant(
        "second derivatives of gathered values without a word",
        GATHER,
        "        check_first_derivative()\n",
        "",
        (f"{VALUES}second_derivatives_are_refused",),
        "The same penalty, of unsharded values or of the rows of other data ranks.",
    ),
    Mutant(
        "rows without a label count nothing",
        WEIGHTING,
        "elif not any(self._valid) and has_sequence_values(loss):",
        "elif not any(self._valid) and not has_sequence_values(loss):",
        (f"{LOOPS}in_a_batch_without_any_label",),
        "A preference is not learned from batches whose labels are all -100.",
    ),
    Mutant(
        "rows without a declared target count nothing",
        WEIGHTING,
        "uncounted = float(has_sequence_values(loss))",
        "uncounted = 0.0",
        (f"{LOOPS}in_a_batch_without_any_label",),
        "A preference is not learned from batches in which the step chooses no token.",
    ),
    Mutant(
        "a mask of whole rows is a number",
        WEIGHTING,
        "        self._check_tokens(counted)\n",
        "",
        (f"{DECLARED}masks_of_other_tokens_are_refused",),
        "Ranks weigh alike by a count of all tokens: gradients are divided by the number of ranks.",
    ),
    Mutant(
        "weights that add up to 1",
        WEIGHTING,
        "return valid[cp_rank] * len(valid) / total if total else 0.0",
        "return valid[cp_rank] / total if total else 0.0",
        (f"{LOOPS}beside_a_mean_over_labels",),
        "Gradients are divided by the number of ranks once too often.",
    ),
    Mutant(
        "noise of a rank alone",
        STEP,
        "return self.mesh.shard(whole, layout, dim=dim)",
        "return draw(x)",
        (f"{LOOPS}they_equal_one_process",),
        "Ranks draw the same noise for other tokens: correlated, and not one process's.",
    ),
    Mutant(
        "values of losses are not compared",
        COUNTS,
        "values.value = [norm_and_projection(whole)]",
        "values.value = []",
        (f"{LOOPS}losses_that_differ_between_ranks_are_refused",),
        "Each rank trains on a loss of its own.",
    ),
    Mutant(
        "means of losses are compared",
        WEIGHTING,
        "return loss if self._own is None else self._own\n\n    def global_loss",
        "return loss\n\n    def global_loss",
        (f"{ROWS}unequal_losses_are_refused_without_a_check",),
        "In a Trainer the loss that is compared is the mean of ranks, which is equal on all of them.",
    ),
    Mutant(
        "the last token of a rank",
        POOLING,
        "at = all_max(own, self._handle.mesh.group(Flat.CP))",
        "at = own",
        (HEADS,),
        "A classifier takes one token on each rank, and adds their scores.",
    ),
    Mutant(
        "padding that ranks added is a token",
        POOLING,
        "is_token = (ids != pad) & (positions < size)",
        "is_token = ids == ids",
        (HEADS,),
        "A class by the last padding of a row.",
    ),
    Mutant(
        "a router's balance of a rank",
        ROUTER,
        "finish).over(group)",
        "finish).over(None)",
        (ROUTERS,),
        "Experts are balanced within each part of a sequence: another loss, and one that a rank lowers.",
    ),
    Mutant(
        "a router's balance of padding",
        ROUTER,
        "weights = to_device(real, gate_logits[0].device).repeat(rows)",
        "weights = to_device(torch.ones_like(real), gate_logits[0].device).repeat(rows)",
        (ROUTERS,),
        "Experts are balanced with tokens that one process does not have.",
    ),
    Mutant(
        "what frozen layers computed has no origin",
        "lightning_cp/utils/autograd_notes.py",
        "elif torch.is_grad_enabled() and x.is_floating_point():",
        "elif not torch.is_grad_enabled():",
        (f"{ROW_CLASSES}[3-settings1-none-Frozen]",),
        "A head behind frozen layers is refused.",
    ),
    Mutant(
        "classes of rows are a mean over tokens",
        "lightning_cp/loss/derivatives.py",
        "if not is_of_rows(node):",
        "if is_shared(node) or not is_shared(node):",
        (f"{ROW_CLASSES}[3-settings1-none-Mixed]",),
        "A mean over tokens and a classifier of rows are refused together.",
    ),
)
"""All seeded mutants of losses."""

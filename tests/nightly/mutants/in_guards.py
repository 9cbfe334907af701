"""Mistakes in what stops a run: values that are not finite, and signals."""

from __future__ import annotations

from tests.nightly.mutants.mutant import Mutant

FINITE = "lightning_cp/consistency/step_vote.py"
TRAINER = "tests/ranks/consistency/test_step_vote.py::test_a_trainer_stops"

COUNTS = "lightning_cp/loss/counts.py"
KINDS = "tests/ranks/loss/test_loss_kinds.py::test_"
WHOLE = "tests/ranks/loss/test_whole_values.py::test_"
DIVISORS = "tests/ranks/loss/test_divisors.py::test_"
COUNTED = "tests/ranks/loss/test_counted_losses.py::test_"
LATER = "tests/ranks/parity/test_later_losses.py::test_"
SEVERAL = "tests/ranks/loss/test_several_counts.py::test_"
ENDS = "tests/ranks/strategies/test_fabric_ends.py::test_"

ERRORS = "tests/ranks/launch/test_errors.py::test_"
SHIFTS = "tests/ranks/models/test_shifts.py::test_a_metric_of_shifted_logits_is_told_once"

CLOSURES = "tests/ranks/strategies/test_closures.py::test_"

GUARD_MUTANTS = (
    Mutant(
        "a check leaves its passes in trained weights",
        "lightning_cp/parity/restore.py",
        "trained = (p for p in parameters if p.requires_grad and",
        "trained = (p for p in parameters if not p.requires_grad and",
        ("tests/ranks/parity/test_left_behind.py::test_the_run_is_the_one_without[MovesWeights]",),
        "A step that changes its weights trains on other ones than without the check.",
    ),
    Mutant(
        "numbers beside values of whole sequences are left out",
        "lightning_cp/loss/terms.py",
        "if factors or not _is_of_parameters(node):",
        "if factors:",
        ("tests/unit/loss/test_loss_terms.py::test_numbers_beside_whole_rows_are_told",),
        "Whole rows times a number that differs a little between ranks train on.",
    ),
    Mutant(
        "ranks combine a value by their own rule",
        "lightning_cp/logging/reduce.py",
        "call.rule if len({*of_ranks}) == 1 else ReductionRule.METRIC",
        "call.rule",
        (
            "tests/ranks/logging/test_log_kinds.py::test_ranks_that_log_a_name_with_other_kinds[ring3]",
        ),
        "A rank that logs an integer where another has a float ends the run.",
    ),
    Mutant(
        "closures return the plain mean of ranks",
        "lightning_cp/runtime/runtime.py",
        "        mean, is_known = self.step.weighted_mean(own) if one_batch else self._equal_sum(own)\n"
        "        if",
        "        mean, is_known = side_by_side([own], self.mesh)[0].mean(0), True\n        if",
        (f"{CLOSURES}a_search_along_a_closure_is_one_process_s[ring3-fabric]",),
        "A line search goes along another loss than that of its gradients.",
    ),
    Mutant(
        "data ranks weigh the same in what a closure returns",
        "lightning_cp/runtime/runtime.py",
        "mean * loss.data_weight",
        "mean",
        (f"{CLOSURES}ranks_with_other_samples_search_alike[tensor]",),
        "A line search goes along another loss than that of its gradients.",
    ),
    Mutant(
        "gradients of whole rows are not followed",
        COUNTS,
        "values.gradients = list(map(norm_and_projection, gradients))",
        "values.gradients = []",
        (f"{KINDS}whole_rows_with_a_rank_s_own_tensor_are_refused[ring 3-whole_by_its_count]",),
        "A whole sum over the number of a rank's own targets trains on, without a word.",
    ),
    Mutant(
        "near values are compared by the digits of a vote",
        COUNTS,
        "        own = [(each.texts(), each.digits) for each in self._shared]\n",
        "        own = [(each.votes, each.digits) for each in self._shared]\n",
        ("tests/ranks/loss/test_shared_values.py",),
        "Rounding that changes a digit refuses an exact loss.",
    ),
    Mutant(
        "a value that is used twice has one derivative",
        "lightning_cp/loss/derivatives.py",
        "sums[number] = x if before is None else before + x",
        "sums[number] = x",
        ("tests/unit/loss/test_derivatives.py::test_they_are_those_of_the_engine",),
        "Ranks compare a part of what a loss computes from values of whole rows.",
    ),
    Mutant(
        "nodes of parameters are called",
        "lightning_cp/loss/derivatives.py",
        "if node in nodes or any(source in found for source in inputs_of(node)):",
        "if True:",
        ("tests/unit/loss/test_derivatives.py::test_they_are_those_of_the_engine",),
        "The gradient of a regulariser is added twice.",
    ),
    Mutant(
        "weights of tokens in counted losses are not compared",
        "lightning_cp/loss/counts.py",
        "(1, GATHERED, fewest), (3, COUNTED, fewest))",
        "(1, GATHERED, fewest))",
        (f"{COUNTED}other_functions_of_tokens_are_refused[root-ring 2]",),
        "After count_targets any function of a rank's own mean trains on.",
    ),
    Mutant(
        "a mean of counted tokens weighs them as a sum",
        "lightning_cp/loss/derivatives.py",
        'if operator_of(node) != "Mean" and not reduces_by_mean(node):',
        "if True:",
        ("tests/unit/loss/test_derivatives.py::test_weights_of_tokens_times_six_targets",),
        "A penalty over all tokens beside a counted mean is accepted.",
    ),
    Mutant(
        "a regulariser is taken for a sum over tokens",
        "lightning_cp/loss/derivatives.py",
        "if whole_inputs or not is_shared(node):",
        "if True:",
        ("tests/unit/loss/test_derivatives.py::test_weights_of_tokens_times_six_targets",),
        "A right loss with weight decay of its own is refused.",
    ),
    Mutant(
        "functions of all tokens pass after a count",
        "lightning_cp/loss/review.py",
        "is_declared = weight.is_declared and not (sums is not None and sums.functions)",
        "is_declared = weight.is_declared",
        (f"{COUNTED}other_functions_of_tokens_are_refused[norm-ring 2]",),
        "A norm of a rank's own tokens trains on.",
    ),
    Mutant(
        "a refused loss is compared with the next one",
        "lightning_cp/loss/review.py",
        "        if self.question is not None:  # a loss",
        "        self.counts.note(means, weight.targets)\n"
        "        self.counts.note_shared(loss, weight.targets, None, factors_of(loss, weight.tokens))\n"
        "        if self.question is not None:  # a loss",
        (f"{COUNTED}a_refused_loss_leaves_nothing",),
        "The next loss, which is right, is refused with the numbers of the one before.",
    ),
    Mutant(
        "a declared count stands for values of whole rows too",
        "lightning_cp/loss/review.py",
        "compared = means if weight.is_declared or not passes else None",
        "compared = means if not passes else None",
        (f"{WHOLE}a_rank_s_own_count_is_refused[no label-beside_counted-hybrid]",),
        "A whole sum over the number of a rank's own tokens trains on beside a counted mean.",
    ),
    Mutant(
        "a counted mean times a value of whole rows is compared",
        COUNTS,
        "own = (*means.products, *sums.nodes)",
        "own = sums.nodes",
        (
            f"{WHOLE}they_equal_one_process[multiplied-ring 2]",
            f"{WHOLE}products_of_rows_and_tokens[ring 2-times_rows]",
        ),
        "A right loss is refused.",
    ),
    Mutant(
        "a row's value in each of its tokens is compared",
        COUNTS,
        "own = (*means.products, *sums.nodes)",
        "own = means.products",
        (f"{WHOLE}products_of_rows_and_tokens[ring 2-rows_in_tokens]",),
        "A clipped ratio of a row, averaged over tokens, is refused.",
    ),
    Mutant(
        "values of whole rows in products are not looked at",
        COUNTS,
        "if factors else [])",
        "if not factors else [])",
        (f"{WHOLE}a_rank_s_own_number_within_products_is_refused[2-times_own_rows]",),
        "A rank's own share of tokens in a weight of the loss trains on.",
    ),
    Mutant(
        "sums need no divisor where ranks count alike",
        "lightning_cp/loss/divisors.py",
        "is_right = _has_product(path, bounds, targets)",
        "is_right = True",
        (f"{DIVISORS}a_sum_that_its_count_does_not_divide_is_asked_about[sum-none-ring 2]",),
        "A sum over tokens that nothing divides is smaller by the number of ranks.",
    ),
    Mutant(
        "numbers of a rank's tokens divide whole rows",
        "lightning_cp/loss/divisors.py",
        "counts = {BY_TOKENS: {self.tokens, self.local_len}}",
        "counts = {BY_TOKENS: set[float]()}",
        (f"{DIVISORS}a_value_of_whole_rows_by_a_number_of_a_rank_is_asked_about[by numel-ring 2]",),
        "A sum of rows over x.numel() is larger by the number of ranks.",
    ),
    Mutant(
        "a count divides whole rows",
        "lightning_cp/loss/divisors.py",
        "counts |= {BY_TARGETS: {targets}, OWN: {targets}}",
        "counts |= {OWN: {targets}}",
        (
            f"{DIVISORS}a_sum_that_its_count_does_not_divide_is_asked_about[a whole sum by it-none-ring 2]",
        ),
        "A sum of rows over what count_targets returned is larger by the number of ranks.",
    ),
    Mutant(
        "features of tokens are the last sum",
        "lightning_cp/loss/derivatives.py",
        "elif _is_sum(node) and _is_over_tokens(node, rows, local_len):",
        "elif False and _is_over_tokens(node, rows, local_len):",
        (f"{COUNTED}sums_divided_by_the_count_equal_one_process[vector-ring 2]",),
        "A right loss of a mean vector is refused where counts differ.",
    ),
    Mutant(
        "a doubt ends no vote",
        "lightning_cp/consistency/step_vote.py",
        "dissents = not agrees or counts.asks or counts.has_doubts()",
        "dissents = not agrees or counts.asks",
        (f"{DIVISORS}one_check_answers[False]",),
        "A divisor that is wrong on all ranks alike trains on.",
    ),
    Mutant(
        "a check clears doubts on its own rank",
        "lightning_cp/parity/check.py",
        "counts.exact |= {x for of_rank in forms for x in of_rank}",
        "counts.exact |= set(forms[group.rank()])",
        (f"{DIVISORS}all_ranks_know_what_a_check_found",),
        "Some ranks raise, and others wait for them.",
    ),
    Mutant(
        "ranks without targets count unlike the others",
        "lightning_cp/loss/weighting.py",
        "return ((counts == counts.max()) | (counts == 0)).all()",
        "return (counts == counts.max()).all()",
        (
            "tests/unit/loss/test_divisors.py::test_ranks_without_targets_do_not_differ",
            f"{DIVISORS}each_loss_is_looked_at[4-of_first_tokens]",
        ),
        "A sum that rows divide trains on where some ranks have no target.",
    ),
    Mutant(
        "a check leaves the doubt",
        "lightning_cp/parity/check.py",
        "counts.exact |= {x for of_rank in forms for x in of_rank}",
        "counts.exact |= set()",
        (f"{DIVISORS}one_check_answers[True]",),
        "A loss that a check found exact is refused.",
    ),
    Mutant(
        "norms alone",
        "lightning_cp/loss/shared_values.py",
        "rows @ _position_weights(rows) + columns @ _position_weights(columns)",
        "norm",
        ("tests/unit/loss/test_loss_terms.py::test_a_small_part_of_another_tensor_is_told",),
        "A regulariser that is wrong in one row of a large table trains on.",
    ),
    Mutant(
        "factors of losses by hand are not compared",
        "lightning_cp/loss/review.py",
        "if follows and not is_known and not is_read else None",
        "if False else None",
        (f"{LATER}a_factor_that_ranks_do_not_share_is_compared_with_one_process[2-OfAMask]",),
        "A mask that leaves out tokens in a later batch trains on, silently.",
    ),
    Mutant(
        "a mean's count is no factor",
        "lightning_cp/loss/terms.py",
        "            found.divisors.append(sizes[0] / max(1, sizes[-1]))\n",
        "            pass\n",
        (f"{LATER}a_factor_that_ranks_do_not_share_is_compared_with_one_process[3-OfAMasksMean]",),
        "A mean squared error over chosen tokens trains on, silently.",
    ),
    Mutant(
        "numbers of targets are factors of a rank's own",
        COUNTS,
        "all(is_near(x, ratios[0], limit) for x in ratios)",
        "False",
        (f"{LATER}right_factors_cost_no_agreement",),
        "Right losses by hand are looked at again.",
    ),
    Mutant(
        "state that steps write to is not compared",
        "lightning_cp/consistency/step_vote.py",
        "total = vote(of=step.sample, own=own,",
        "total = vote(of=step.sample, own=own[:1],",
        (f"{LATER}state_of_a_rank_s_own_tokens_is_warned_of_by_name[3-settings1]",),
        "A buffer of a rank's own tokens is used with Fabric, without a word.",
    ),
    Mutant(
        "no second look",
        "lightning_cp/strategies/parity_checks.py",
        "            self._check_again(micro_batch)\n",
        "            pass\n",
        (f"{LATER}what_has_begun_by_the_third_step_is_compared_with_one_process[Centred]",),
        "State of a rank's own tokens, which the first step does not have, trains on.",
    ),
    Mutant(
        "factors of 0 are counted",
        "lightning_cp/loss/terms.py",
        "all(not x for zero, x in pairs if zero)",
        "sum(zeros) <= sum(self.zeros)",
        (f"{LATER}a_penalty_that_begins_later_is_compared_with_one_process[Switching]",),
        "A loss that switches from one term to another is not looked at.",
    ),
    Mutant(
        "a loop that ends leaves its step open",
        "lightning_cp/strategies/fabric_loops.py",
        "            self.end_step()\n",
        "            pass\n",
        (f"{ENDS}models_are_plain_after_a_loop[ring]",),
        "A model that no run knows attends over the ranks.",
    ),
    Mutant(
        "a declared loss clears others",
        "lightning_cp/loss/review.py",
        "        is_clear = is_known or passes\n",
        "        is_clear = is_known or passes\n"
        "        if weight.is_declared:\n"
        "            self.note_exact()\n",
        (f"{KINDS}a_declared_loss_clears_none_that_is_not_declared[3-declared once]",),
        "After one step that declares, any loss by hand trains on, silently.",
    ),
    Mutant(
        "a check of a declared loss clears others",
        "lightning_cp/parity/check.py",
        "[aside.zeros] if aside.needs_fewer_labels else []",
        "[] if aside.is_known else [aside.zeros]",
        (
            f"{LATER}a_penalty_that_begins_later_is_compared_with_one_process[Declaring]",
            f"{KINDS}a_declared_loss_clears_none_that_is_not_declared[2-checked and declared]",
        ),
        "The check of a step that declares lets any loss by hand pass.",
    ),
    Mutant(
        "whole rows are taken for a batch that waits",
        "lightning_cp/models/handle.py",
        "            if self.state.waits:\n",
        "            if False:\n",
        (f"{ENDS}whole_rows_after_a_batch_that_was_not_used[sharding-peeked]",),
        "After `break` whole rows attend over the ranks.",
    ),
    Mutant(
        "a call of another model takes up no step",
        "lightning_cp/models/handle.py",
        "self._stop_waiting = register_module_forward_pre_hook(look).remove\n",
        "pass\n",
        (f"{ENDS}a_step_is_not_ended_early[sharding]",),
        "A teacher that comes first attends to a rank's part alone.",
    ),
    Mutant(
        "own losses unseen",
        "lightning_cp/loss/weighting.py",
        "return loss if self._own is None else self._own",
        "return loss",
        (f"{TRAINER}[by norm-loss]",),
        "Every rank is blamed for one rank's loss.",
    ),
    Mutant(
        "finite after clipping only",
        "lightning_cp/strategies/trainer.py",
        "self._finalize_gradients(optimizer.optimizer if is_wrapped else optimizer)",
        "pass",
        (f"{TRAINER}[manual-infinite gradient]",),
        "Clipping by value makes a number of an infinite gradient, and weights step along it.",
    ),
    Mutant(
        "a norm that overflows is an error",
        FINITE,
        "finite = not bad_loss and all(",
        "finite = False and all(",
        ("tests/ranks/consistency/test_step_vote.py::test_large_is_not_infinite",),
        "A run in which nothing is wrong ends.",
    ),
    Mutant(
        "scalers guarded",
        FINITE,
        "looks = self._looks and scaler is None",
        "looks = self._looks",
        ("tests/ranks/consistency/test_step_vote.py::test_left_alone[fp16 scaler]",),
        "Mixed precision in fp16 ends at the first gradient that its scaler would have skipped.",
    ),
    Mutant(
        "one look per optimizer",
        FINITE,
        "        self._voted.clear()\n",
        "",
        (f"{TRAINER}[by norm-gradient]",),
        "Only the first step of a run is looked at.",
    ),
    Mutant(
        "dead ranks are answered once for all",
        "lightning_cp/launch/ranks.py",
        '            if store.check([f"{_FOLDER}/{own}/knows/{other}"]):',
        '            if store.check([f"{_FOLDER}/asks/{other}"]):',
        ("tests/unit/watchdog/test_restarts.py::test_questions_of_the_dead_do_not_count",),
        "After a restart a rank waits for an answer that rank 0 has given to a dead one.",
    ),
    Mutant(
        "the last count weights every loss of a step",
        "lightning_cp/loss/weighting.py",
        "if all(same or not share for same, share in zip(of_ranks, shares, strict=True)):",
        "if of_ranks is not None:",
        (
            f"{SEVERAL}each_loss_is_one_process_s[trained-end-ring3]",
            f"{SEVERAL}a_sum_of_losses_is_refused",
        ),
        "The first loss of a GAN's step is shown by the targets of the second.",
    ),
    Mutant(
        "a sum of losses is averaged by the last count",
        "lightning_cp/loss/weighting.py",
        "return self.shares if self._weigh_alike is not None and self._weigh_alike else None",
        "return self.shares",
        (f"{SEVERAL}a_sum_of_losses_is_refused",),
        "Of two losses of other targets a sum is shown that one process does not have.",
    ),
    Mutant(
        "NaN is for ranks without targets alone",
        "lightning_cp/logging/reduce.py",
        "[x and y > 0 for x, y in zip(nan, read_shares(shares), strict=True)]",
        "[x and not y for x, y in zip(nan, read_shares(shares), strict=True)]",
        (
            "tests/ranks/logging/test_evaluated_counts.py::test_rows_without_targets_on_a_rank_are_said",
        ),
        "A mean over rows shows NaN without a word, where one process has a number.",
    ),
    Mutant(
        "a check sees a loss that was kept from before setup as known",
        "lightning_cp/parity/restore.py",
        "func, given = original_function(func), kwargs or {}",
        "given = kwargs or {}",
        (
            "tests/ranks/loss/test_loss_kinds.py::"
            "test_a_function_that_is_kept_from_before_setup_is_exact_once_it_was_checked",
        ),
        "A cross-entropy in a partial is refused although the check agreed with it.",
    ),
    Mutant(
        "factors of each token are those of whole sequences",
        "lightning_cp/parity/compare.py",
        "return 2 * int(changes.sum()) < len(factors)",
        "return True",
        (
            "tests/ranks/parity/test_row_losses.py::"
            "test_the_first_check_names_them[own mean beside-aligned]",
        ),
        "The check names sums of sequences where a rank's own mean is the cause.",
    ),
    Mutant(
        "rolled labels are not looked at",
        "lightning_cp/models/guards/shifts.py",
        'elif name == "roll":',
        'elif name == "rolled":',
        (f"{SHIFTS}[rolled-2-1]",),
        "A metric of rolled labels is off at every seam without a word.",
    ),
    Mutant(
        "labels that are padded after a cut are not looked at",
        "lightning_cp/models/guards/shifts.py",
        "if at_the_end and any(one() is x for one in self._short):",
        "if not self._short:",
        (f"{SHIFTS}[padded_after-2-1]",),
        "A metric of labels that were cut and padded is off at every seam without a word.",
    ),
    Mutant(
        "calls of a root's parts are not named",
        "lightning_cp/watchdog/phase.py",
        "if is_unit(part) or part in gathering:",
        "if is_unit(part):",
        (
            "tests/ranks/watchdog/test_table.py::"
            "test_a_fault[rank 1 of 2 alone calls a part of the model between (trainer, data_parallel=fsdp)]",
        ),
        "Of a rank that alone calls generate the timeout says 'between steps'.",
    ),
    Mutant(
        "no rank waits until the others have shown whole errors",
        "lightning_cp/error_display.py",
        'self._leave("card", "full", self._place.name, "", "")\n        self._wait(',
        'self._leave("card", "full", self._place.name, "", "")\n        (lambda *_: None)(',
        (f"{ERRORS}no_rank_ends_before_all_have_shown_their_whole_errors",),
        "Lightning ends a rank before its traceback is shown.",
    ),
    Mutant(
        "a head's token is not looked up in the mask",
        "lightning_cp/models/hf/pooling.py",
        "            self._check_not_masked(at, pad)\n",
        "            pass\n",
        (
            "tests/ranks/models/test_row_heads.py::test_a_token_that_the_mask_excludes_is_refused_by_name",
        ),
        "A head over rows that are padded with another id takes its value from padding.",
    ),
    Mutant(
        "random numbers for a part of the tokens are not asked about",
        "lightning_cp/randomness/token_draws.py",
        "            self._warn_of_part(tuple(shape), rows, count)\n",
        "",
        ("tests/unit/models/test_token_draws.py::test_a_part_of_each_row_s_tokens_is_asked_about",),
        "Dropout of a chunk of tokens is the same on all ranks without a word.",
    ),
    Mutant(
        "numbers are logged in single precision",
        "lightning_cp/logging/module_logger.py",
        "as_logged(torch.tensor(value, dtype=torch.float64, device=self._module.device))",
        "torch.tensor(float(value), dtype=torch.float32, device=self._module.device)",
        (
            "tests/ranks/logging/test_logging.py::"
            "test_numbers_of_a_step_in_double_precision_are_logged_as_they_are",
        ),
        "A number of Python is logged with other digits than one process logs.",
    ),
    Mutant(
        "padding is no class that a loss ignores",
        "lightning_cp/models/swap.py",
        "if state is not None and counted is _count_cross_entropy:",
        "if state is None:",
        (
            "tests/ranks/loss/test_padding_targets.py::"
            "test_padding_is_ignored_by_a_loss_that_ignores_another_class",
        ),
        "ignore_index=0 at a length that does not divide ends in an IndexError.",
    ),
    Mutant(
        "tensors of a graph are known by is_compiling alone",
        "lightning_cp/utils/tracing.py",
        'return torch.compiler.is_compiling() or type(x).__name__ in ("FakeTensor", "FunctionalTensor")',
        "return torch.compiler.is_compiling()",
        ("tests/unit/utils/test_tracing.py",),
        "Before torch 2.12 a compiled model's losses are noted without values.",
    ),
)

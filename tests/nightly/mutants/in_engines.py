"""Mistakes in how engines reduce gradients and take norms: runs that go on, and train another model."""

from __future__ import annotations

from tests.nightly.mutants.mutant import Mutant

ENGINES = "lightning_cp/engines"
TESTS = "tests/ranks/engines/test_engines.py::"
ODD = TESTS + "test_odd_parameters_are_trained_as_in_one_process[fsdp]"

OUTSIDE = "tests/ranks/engines/test_calls_outside.py::"
CURRENT = OUTSIDE + "test_steps_and_hooks_see_current_weights"

WITHIN = "tests/ranks/engines/test_weights_within.py::test_what_a_step_changes_is_changed_as_in_one_process"

ENGINE_MUTANTS = (
    Mutant(
        "FSDP2's methods hide those of the user's class",
        f"{ENGINES}/fsdp.py",
        "            keep_methods(unit, users)\n",
        "",
        (
            "tests/ranks/engines/test_mixin_engines.py"
            "::test_methods_of_the_mixin_equal_those_of_one_process[fsdp]",
        ),
        "self.unshard(x) of the mixin ends in an error of PyTorch's.",
    ),
    Mutant(
        "a call between steps is no forward of the root",
        f"{ENGINES}/fsdp_gradients.py",
        "if self.entered or not is_idle(root):",
        "if root:",
        (OUTSIDE + "test_calls_in_hooks_equal_those_of_one_process[fsdp-on_train_batch_end-grad]",),
        "A hook that calls the model ends in an error of PyTorch's.",
    ),
    Mutant(
        "a call between steps that fails leaves its forward open",
        f"{ENGINES}/fsdp_gradients.py",
        "        if output is None:  # the call has failed\n            forget_step(root)\n",
        "        if output is None:\n",
        (CURRENT + "[fsdp-FailsOutside]",),
        "The next step is taken for a part of the call that failed.",
    ),
    Mutant(
        "whole parameters outlive a step within a method",
        f"{ENGINES}/fsdp_gradients.py",
        "            self._shard_all()  # also within a method\n",
        "",
        (WITHIN + "[zero1-Looks]",),
        "What follows the optimizer's step is computed with the weights before it.",
    ),
    Mutant(
        "what a step changes in whole parameters stays there",
        f"{ENGINES}/fsdp_internals.py",
        "            shard.copy_(each.all_gather_outputs[0][own : own + shard.numel()])\n",
        "            del own\n",
        (WITHIN + "[fsdp-Shrinks]",),
        "Weights that a step changes are lost.",
    ),
    Mutant(
        "memory that a step gives whole parameters is not looked at",
        f"{ENGINES}/fsdp_internals.py",
        " if x._unsharded_param._version != came or _is_replaced(x)]",
        " if x._unsharded_param._version != came]",
        (WITHIN + "[zero1-Replaces]",),
        "parameter.data = ... in a step is lost.",
    ),
    Mutant(
        "a step by hand begins with whole parameters, whatever gradients there are",
        f"{ENGINES}/fsdp_gradients.py",
        "if self._is_manual() and any(",
        "if not self._groups and any(",
        (WITHIN + "[fsdp-ClipsLate]",),
        "What clips an earlier batch's gradients leaves some out.",
    ),
    Mutant(
        "a look at the loss within a method leaves parameters whole",
        f"{ENGINES}/fsdp_gradients.py",
        "            if not torch.is_grad_enabled():\n                self._shard_all()\n",
        "",
        (WITHIN + "[fsdp-Clips]",),
        "What clips the step's gradients leaves some out.",
    ),
    Mutant(
        "recomputation is a call between steps",
        f"{ENGINES}/fsdp_internals.py",
        "    if in_backward():\n        return False\n",
        "",
        (OUTSIDE + "test_recomputation_is_no_call_between_steps[fsdp]",),
        "A backward that calls modules again shards what it is about to use.",
    ),
    Mutant(
        "whole parameters are made in inference mode",
        f"{ENGINES}/fsdp_internals.py",
        "            with torch.inference_mode(False), torch.no_grad():\n                own()",
        "            own()",
        (CURRENT + "[fsdp-InfersFirst]",),
        "Training after trainer.validate ends in an error of PyTorch's, on CUDA.",
    ),
    Mutant(
        "scalars stay on their ranks",
        f"{ENGINES}/gradients.py",
        "parameter.grad = all_mean(own, group)",
        "parameter.grad = own",
        (ODD,),
        "What FSDP2 ignores is trained apart by every rank.",
    ),
    Mutant(
        "steps along gradients that stayed on their ranks",
        "lightning_cp/strategies/fabric.py",
        "            self._check_reduced(optimizer)\n",
        "",
        (
            "tests/ranks/engines/test_fabric_kept_back.py"
            "::test_a_window_that_is_never_averaged_is_refused[steps-ddp]",
        ),
        "Copies of the model come apart.",
    ),
    Mutant(
        "what a program has averaged itself is not compared",
        f"{ENGINES}/ddp.py",
        "if not total or all_equal([_checksum(p.grad) for p in parameters], group):",
        "if not total:",
        (
            "tests/ranks/engines/test_fabric_kept_back.py"
            "::test_what_was_averaged_by_hand_is_stepped_along[summed_in_place-{}]",
        ),
        "Gradients that are right are refused.",
    ),
    Mutant(
        "zeros in place of no gradient",
        f"{ENGINES}/fsdp_gradients.py",
        "if not exists and id(parameter) in self._filled:",
        "if not exists and not self._filled:",
        (ODD,),
        "AdamW decays parameters that one process leaves alone.",
    ),
    Mutant(
        "replicated gradients count once per rank",
        f"{ENGINES}/gradients.py",
        "if not isinstance(placed, Replicate)",
        "if placed is not None",
        (TESTS + "test_the_norm_of_any_mixture_is_that_of_one_process",),
        "The norm is too large, so gradients are clipped too much.",
    ),
    Mutant(
        "each rank looks for infinity in its own parts",
        f"{ENGINES}/gradients.py",
        "        found_inf = all_max(found_inf, ranks)",
        "        all_max(found_inf, ranks)",
        (
            "tests/ranks/engines/test_sixteen_mixed.py::"
            "test_all_ranks_skip_a_step_whose_gradients_overflow_on_one[fsdp-by_trainer]",
        ),
        "With 16-mixed and sharded parameters some ranks step and others do not.",
    ),
    Mutant(
        "gloo groups split the world's communicator",
        "lightning_cp/comm/groups.py",
        "    world.bound_device_id = None\n",
        "",
        (
            "tests/ranks/comm/test_groups.py::test_gloo_groups_do_not_split_the_world_s_communicator",
        ),
        "Each start takes as many NCCL splits as there are groups; part of the ranks would wait forever.",
    ),
    Mutant(
        "float16 gradients are added as they are",
        f"{ENGINES}/ddp_comm_hook.py",
        "divisor = prescale(bucket.buffer(), group.size())",
        "divisor = group.size()",
        ("tests/ranks/engines/test_float16.py::test_large_gradients_do_not_overflow[2-ddp]",),
        "Large gradients become infinite, although their mean is not.",
    ),
    Mutant(
        "a bucket is added and not divided",
        f"{ENGINES}/ddp_comm_hook.py",
        "done.value()[0].div_(divisor)",
        "done.value()[0]",
        (TESTS + "test_options_change_nothing[per_parameter]",),
        "Gradients are as many times too large as there are ranks.",
    ),
    Mutant(
        "windows know of gradients in grad only",
        "lightning_cp/loss/accumulation.py",
        "for x in (p.grad, kept.get(id(p))))",
        "for x in (p.grad,))",
        (
            "tests/ranks/loss/test_token_weighting.py::"
            "test_sharded_loops_of_ones_own_equal_a_loop_by_hand[fabric, fsdp]",
        ),
        "FSDP2 keeps those of a window elsewhere, so that each batch begins another window.",
    ),
    Mutant(
        "what a step unfreezes is frozen again",
        f"{ENGINES}/fsdp_internals.py",
        "if any(form.requires_grad != before for form in forms):",
        "if not forms:",
        (
            "tests/ranks/engines/test_fabric_freezing.py::test_as_in_one_process[fsdp ThawingInTheStep]",
        ),
        "Layers that were unfrozen while they were gathered are never trained.",
    ),
    Mutant(
        "zero_grad leaves what ranks keep back",
        f"{ENGINES}/fsdp.py",
        "        kind.zero_grad(self, set_to_none)\n        drop(",
        "        kind.zero_grad(self, set_to_none)\n        set(",
        ("tests/ranks/engines/test_fabric_freezing.py::test_as_in_one_process[fsdp Discarding]",),
        "Gradients that were thrown away are stepped along.",
    ),
    Mutant(
        "norms of ranks added without their power",
        f"{ENGINES}/gradients.py",
        "total = all_sum(total**norm_type, group) ** (1.0 / norm_type)",
        "total = all_sum(total, group)",
        (f"{TESTS}test_the_norm_of_any_mixture_is_that_of_one_process",),
        "Under fsdp gradients are clipped by a norm up to the root of the ranks too large.",
    ),
    Mutant(
        "the norm of one dtype alone",
        "lightning_cp/utils/tensors.py",
        "return list(groups.values())",
        "return list(groups.values())[:1]",
        ("tests/unit/utils/test_tensors.py",),
        "Gradients of another dtype or device are neither clipped nor looked at for NaN.",
    ),
    Mutant(
        "an axis of all ranks has a group of its own beside GPUs",
        "lightning_cp/comm/groups.py",
        '    device_mesh.get_backend = lambda *_: "undefined"\n',
        "",
        (
            "tests/ranks/comm/test_groups.py::"
            "test_axes_of_all_ranks_take_the_world_s_group_of_gloo_beside_gpus",
        ),
        "With torch 2.10 ranks that share a GPU get a group of NCCL's, which refuses them.",
    ),
)
"""All seeded mutants of engines."""

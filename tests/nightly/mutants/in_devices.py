"""Mistakes that only a GPU punishes: a host that waits for it, and tensors of both."""

from __future__ import annotations

from tests.nightly.mutants.mutant import Mutant

RING = "lightning_cp/attention/ring.py"
WAITS = "tests/ranks/pretended/test_waits.py::test_waits_of_a_micro_batch[trainer]"
DECLARED = WAITS.replace("[trainer]", "[trainer, a mask is declared in a window]")
CHECKED = WAITS.replace("[trainer]", "[trainer, parity check]")
TRANSFERS = (
    "tests/ranks/pretended/test_transfers.py::test_transforms_see_whole_batches_where_they_saw_them"
)
REFUSALS = (
    "tests/ranks/pretended/test_refusals.py::"
    "test_a_step_is_refused_on_all_ranks_before_the_optimizer_steps"
)
GPU_CHECK = "tests/ranks/benchmarks/test_gpu_check.py::test_"
GPUS = "tests/ranks/benchmarks/test_gpus.py"
RUNS = "tests/ranks/pretended/test_training.py::test_losses_and_weights_are_those_of_one_cpu"
FEATURES = "tests/ranks/pretended/test_training.py::test_features_are_those_of_one_cpu"

ACTIVATIONS = "lightning_cp/memory/activations.py"
OFFLOAD = "tests/unit/memory/test_offload.py::test_"
PINNED = "lightning_cp/checkpoint/pinned_buffer.py"
SAVES = "tests/unit/checkpoint/test_pinned.py::test_"

DEVICE_MUTANTS = (
    Mutant(
        "offloaded tensors come when they are needed",
        ACTIVATIONS,
        "if before is not None and len(self._arriving) == 1:",
        "if before is None and len(self._arriving) == 1:",
        (f"{OFFLOAD}backward_waits_for_the_input_of_the_last_block_alone",),
        "Right, and backward waits for every copy.",
    ),
    Mutant(
        "offloaded tensors come on the computing stream",
        ACTIVATIONS,
        "        with device.stream(stream):\n            into",
        "        with device.stream(computing):\n            into",
        (f"{OFFLOAD}backward_waits_for_the_input_of_the_last_block_alone",),
        "Right, and nothing is computed while tensors travel.",
    ),
    Mutant(
        "memory of offloaded tensors is free before they have left",
        ACTIVATIONS,
        "            _wait(self._leaving)\n            self._leaving = []",
        "            self._leaving = []",
        (f"{OFFLOAD}gradients_are_those_without_offload[once-once-keep_attention]",),
        "On a GPU alone: later layers overwrite what is on its way, and gradients are wrong.",
    ),
    Mutant(
        "offloaded tensors are used before they have arrived",
        ACTIVATIONS,
        "        self.computing.wait_event(self.done)\n        return",
        "        return",
        (f"{OFFLOAD}gradients_are_those_without_offload[once-once-keep_attention]",),
        "On a GPU alone: gradients of whatever was in that memory.",
    ),
    Mutant(
        "copies of offloaded tensors do not wait for their memory",
        ACTIVATIONS,
        "        stream.wait_stream(computing)  # which made x",
        "        _ = computing  # which made x",
        (f"{OFFLOAD}gradients_are_those_without_offload[once-once-keep_attention]",),
        "On a GPU alone: a copy of values that are not computed yet.",
    ),
    Mutant(
        "what came for nothing stays",
        ACTIVATIONS,
        "Variable._execution_engine.queue_callback(self.release)",
        "Variable._execution_engine.queue_callback(bool)",
        (f"{OFFLOAD}what_came_for_nothing_leaves_with_the_backward",),
        "A layer's tensors stay on the device during the optimizer's step.",
    ),
    Mutant(
        "one half of the pinned buffer for all pieces",
        PINNED,
        "self._halves[number % 2]",
        "self._halves[0]",
        (f"{SAVES}the_next_piece_travels_while_this_one_is_used",),
        "Files of saves on a GPU have pieces of other pieces.",
    ),
    Mutant(
        "pieces that are read before they have arrived",
        PINNED,
        "    copied.synchronize()\n",
        "",
        (f"{SAVES}copies_are_those_of_pytorch[float64]",),
        "Files of saves on a GPU hold old values, and their hashes are right.",
    ),
    Mutant(
        "the next piece begins after this one was used",
        PINNED,
        "                before, arriving = arriving, (half, stream.record_event())\n"
        "                if before is not None:\n"
        "                    yield _arrived(*before)\n",
        "                yield _arrived(half, stream.record_event())\n",
        (f"{SAVES}the_next_piece_travels_while_this_one_is_used",),
        "Right, and the link rests while the host works.",
    ),
    Mutant(
        "host reads a value at each hop",
        RING,
        "    if tiles:\n        k, v = kernel_keys(",
        "    q_BLHD.sum().item()\n    if tiles:\n        k, v = kernel_keys(",
        (WAITS,),
        "Right, but the host cannot run ahead, and no transfer hides behind compute.",
    ),
    Mutant(
        "gradients of keys on the host",
        "lightning_cp/attention/keys.py",
        "self.dtype, self.device = dtype, keys.tensors[0].device",
        'self.dtype, self.device = dtype, torch.device("cpu")',
        (f"{RUNS}[ddp ring dense trainer]",),
        "The first backward on a GPU raises; on a CPU nothing shows.",
    ),
    Mutant(
        "parts of batches in pageable memory",
        "lightning_cp/utils/tensors.py",
        "x = x.pin_memory()",
        "pass",
        (WAITS,),
        "Right, but each copy to the device waits for all that was queued before it.",
    ),
    Mutant(
        "transforms on the device are left out",
        "lightning_cp/strategies/lightning_patches.py",
        "if hooks is not None and is_overridden(",
        "if hooks is None and is_overridden(",
        (f"{TRANSFERS}[after-cuda]",),
        "A user's transforms run on the host, where they may not work or take long.",
    ),
    Mutant(
        "whole batches travel to the device",
        "lightning_cp/strategies/trainer.py",
        "whole = by_callback or not self.runtime.enabled",
        "whole = True",
        (f"{TRANSFERS}[plain-]",),
        "Right, with cp times the bytes, and a batch that the host reads back from the device.",
    ),
    Mutant(
        "whole batches travel to the device while parity is checked",
        "lightning_cp/strategies/trainer.py",
        "whole = by_callback or not self.runtime.enabled",
        "whole = checks or by_callback or not self.runtime.enabled",
        (CHECKED,),
        "Right, but with the default settings the host reads every batch back from the device.",
    ),
    Mutant(
        "parity checks run on batches of the host",
        "lightning_cp/strategies/parity_checks.py",
        "check.run(_on_device(micro_batch.batch, module.trainer.strategy.root_device))",
        "check.run(micro_batch.batch)",
        (CHECKED,),
        "On a GPU the step of one process fails, and the check is left out.",
    ),
    Mutant(
        "windows read all gradients that are kept on their ranks",
        "lightning_cp/loss/accumulation.py",
        "for p, gradient in self.unreduced()}",
        "for p, gradient in self.unreduced() if _is_nonzero(gradient)}",
        (
            "tests/ranks/pretended/test_waits.py::"
            "test_global_weights_wait_once_in_the_later_micro_batches_of_a_window[fsdp]",
        ),
        "Right, but the host waits once for each parameter.",
    ),
    Mutant(
        "refusals of steps are not read",
        "lightning_cp/loss/counts.py",
        "(*self._padding, *self._refusals)",
        "self._padding",
        (f"{REFUSALS}[labels]",),
        "On a GPU alone a step that changes its labels trains on wrong ones at every seam.",
    ),
    Mutant(
        "the checks of several GPUs accept every number",
        "benchmarks/gpus/line.py",
        "if not error <= limit:",
        "if error < 0:",
        (f"{GPUS}::test_a_wrong_result_fails_the_line",),
        "The report of several GPUs says passed, whatever they compute.",
    ),
    Mutant(
        "no rank sleeps",
        "benchmarks/gpus/attention.py",
        "            for name in names if self.is_mine else ():",
        "            for name in ():",
        (f"{GPUS}::test_a_line_passes[oracle, ring 2 zigzag]",),
        "Messages arrive as soon as they are posted, and a missing wait is not noticed.",
    ),
    Mutant(
        "the checks of several GPUs accept lost keys in narrow numbers",
        "benchmarks/gpus/cells.py",
        "_enlarge_outputs(self.model)",
        "pass",
        (f"{GPUS}::test_a_wrong_result_fails_the_line",),
        "The kernels of long runs may lose what other ranks send, and the report says passed.",
    ),
    Mutant(
        "a device that hangs need not be named",
        "benchmarks/gpus/faults.py",
        'elif kind == "device" and',
        "elif False and",
        (f"{GPUS}::test_ranks_end_as_they_have_to_or_the_line_fails",),
        "The verdict may name the host, and the report says passed.",
    ),
    Mutant(
        "the check of one GPU accepts wrong exchanges of losses",
        "benchmarks/gpu_losses.py",
        "return not max(self.error, self.gradient_error) <= LIMITS[self.dtype]",
        "return False",
        (f"{GPU_CHECK}wrong_exchanges_of_losses_fail",),
        "Losses of whole sequences may be wrong with NCCL, and the report says passed.",
    ),
    Mutant(
        "a long step is scaled without its other layers",
        "benchmarks/long_step.py",
        "seconds = more.seconds + steps * (more.seconds - few.seconds)",
        "seconds = more.seconds",
        (f"{GPU_CHECK}the_long_step_is_scaled_from_its_layers",),
        "The report shows two layers' seconds beside others' whole model.",
    ),
    Mutant(
        "one rank trains without our attention",
        "benchmarks/gpu_one_rank.py",
        'ONE_RANK: dict[str, Any] = {"token_weighting": "global"}',
        "ONE_RANK: dict[str, Any] = {}",
        (f"{GPU_CHECK}one_rank_trains_with_the_packages_attention_and_wrong_losses_fail",),
        "The check of one GPU passes, and has run none of the package's kernels in a step.",
    ),
    Mutant(
        "memory of a step without our attention",
        "benchmarks/gpu_memory.py",
        "settings = {**ONE_RANK, **cell.settings}",
        "settings = {**cell.settings}",
        (f"{GPU_CHECK}a_section_rehearses[memory]",),
        "The planner is compared with a step of transformers.",
    ),
    Mutant(
        "the check of one GPU accepts any number of waits",
        "benchmarks/gpu_synchronisations.py",
        "self.per_step > self.limit or not self.kernels",
        "not self.kernels",
        (
            f"{GPU_CHECK}more_waits_than_a_step_has_are_a_failure",
            f"{GPU_CHECK}synchronisations_of_the_later_steps_are_counted",
        ),
        "A host that waits in every layer passes.",
    ),
    Mutant(
        "the check of one GPU counts waits of the package as those of libraries",
        "benchmarks/gpu_synchronisations.py",
        "return Place(shown, ours[-1] is callers[-1])",
        "return Place(shown, is_ours=False)",
        (f"{GPU_CHECK}synchronisations_of_the_later_steps_are_counted",),
        "The limit holds for nothing.",
    ),
    Mutant(
        "a forward waits for the check of its mask",
        "lightning_cp/batch/step_state.py",
        "if self.trains and found.is_cuda:",
        "if False:",
        (WAITS.replace("[trainer]", "[transformers, padded]"),),
        "Right, and each micro-batch drains the device.",
    ),
    Mutant(
        "a mask of the step's own is not refused",
        "lightning_cp/models/hf/masks.py",
        "    state.refuse_if(((mask.bool() != kept) & real).any(), _OTHER_MASK)\n",
        "",
        (f"{REFUSALS}[attention_mask]",),
        "The model's mask is ignored.",
    ),
    Mutant(
        "positions of tokens are copied from pageable memory",
        "lightning_cp/randomness/token_draws.py",
        "to_device(self._tokens.positions, device)",
        "self._tokens.positions.to(device)",
        ("tests/unit/randomness/test_draws.py::test_positions_of_tokens_travel_without_a_wait",),
        "Right, and the first dropout of each micro-batch waits for the device.",
    ),
    Mutant(
        "groups have PyTorch's timeout",
        "lightning_cp/comm/groups.py",
        "    _inherit_timeout(own)\n",
        "",
        ("tests/ranks/comm/test_groups.py::test_every_group_has_the_timeout_of_the_world",),
        "The strategy's timeout= does not hold for a ring: NCCL ends it after ten minutes.",
    ),
    Mutant(
        "metrics stay on the host",
        "lightning_cp/engines/fsdp.py",
        "        _move_metrics(module, device)\n",
        "",
        (f"{FEATURES}[validation and predict, zero1]",),
        "The first update of a metric of a sharded model raises.",
    ),
    Mutant(
        "shards go to the host after a stage",
        "lightning_cp/strategies/trainer.py",
        "is_on_meta(module) or is_sharded(module)",
        "is_on_meta(module)",
        (f"{FEATURES}[validation and predict, zero1]",),
        "The next stage, and whoever gathers weights, finds shards on the host.",
    ),
    Mutant(
        "shares of declared targets are read after forward",
        "lightning_cp/loss/weighting.py",
        "return torch.where(counts.sum() > 0, counts / counts.sum(), 1 / len(counts))",
        "return torch.where(counts.sum() > 0, counts / counts.sum(), 1 / len(counts)).tolist()",
        (DECLARED,),
        "Right, and each micro-batch drains the device.",
    ),
    Mutant(
        "the numbers of losses are read one by one",
        "lightning_cp/loss/counts.py",
        "            SharedValues.read(followed)\n",
        "            pass\n",
        (DECLARED,),
        "Right, and the vote waits once for each loss of a window.",
    ),
    Mutant(
        "a declared number is copied to the device",
        "lightning_cp/loss/weighting.py",
        "own.fill_(count.item()) if count.is_cpu else own.copy_(count)",
        "own.copy_(count)",
        (WAITS.replace("[trainer]", "[trainer, a number is declared]"),),
        "Right, and each micro-batch drains the device.",
    ),
    Mutant(
        "numbers of cp_log are copied from pageable memory",
        "lightning_cp/mixin.py",
        "return to_device(tensor.detach().to(torch.float64).reshape(()), device)",
        "return tensor.detach().to(device, torch.float64).reshape(())",
        (WAITS,),
        "Right, and each micro-batch drains the device.",
    ),
    Mutant(
        "weights of 0 keep NaN in a mean",
        "lightning_cp/logging/reduce.py",
        "mean = mean + torch.where(share > 0, share * row, 0.0)",
        "mean = mean + share * row",
        (
            "tests/unit/loss/test_shares.py::test_a_rank_without_targets_adds_nothing[on the device]",
        ),
        "One rank without declared tokens makes the logged mean NaN.",
    ),
)

"""Mistakes that only a GPU punishes: a host that waits for it, and tensors of both."""

from __future__ import annotations

from tests.nightly.mutants.mutant import Mutant

RING = "lightning_cp/attention/ring.py"
WAITS = "tests/ranks/pretended/test_waits.py::test_waits_of_a_micro_batch[trainer]"
RUNS = "tests/ranks/pretended/test_training.py::test_losses_and_weights_are_those_of_one_cpu"

DEVICE_MUTANTS = (
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
)

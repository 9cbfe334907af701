"""All seeded mutants of attention.

Left out because nothing can tell them from the code as it is: a ring that sends keys without
``contiguous()`` (what pairs K and V is contiguous, and so is what an all-to-all brings), and kernels
that do not replace the lse of queries without keys in backward (tiles of a schedule have none).
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Sequence

from lightning_cp.kernels.triton.launch import is_installed
from tests.nightly.mutants.in_checkpoints import CHECKPOINT_MUTANTS
from tests.nightly.mutants.in_devices import DEVICE_MUTANTS
from tests.nightly.mutants.in_engines import ENGINE_MUTANTS
from tests.nightly.mutants.in_exchanges import EXCHANGE_MUTANTS
from tests.nightly.mutants.in_faults import FAULT_MUTANTS
from tests.nightly.mutants.in_guards import GUARD_MUTANTS
from tests.nightly.mutants.in_kernels import KERNEL_MUTANTS
from tests.nightly.mutants.in_layouts import LAYOUT_MUTANTS
from tests.nightly.mutants.in_loading import LOADING_MUTANTS
from tests.nightly.mutants.in_losses import LOSS_MUTANTS
from tests.nightly.mutants.in_models import MODEL_MUTANTS
from tests.nightly.mutants.in_muon import MUON_MUTANTS
from tests.nightly.mutants.in_resume import RESUME_MUTANTS
from tests.nightly.mutants.in_streams import STREAM_MUTANTS
from tests.nightly.mutants.in_tensor_parallel import TENSOR_PARALLEL_MUTANTS
from tests.nightly.mutants.in_triton import TRITON_MUTANTS
from tests.nightly.mutants.in_votes import VOTE_MUTANTS
from tests.nightly.mutants.mutant import Mutant

EVERY = (
    *LAYOUT_MUTANTS,
    *EXCHANGE_MUTANTS,
    *STREAM_MUTANTS,
    *KERNEL_MUTANTS,
    *VOTE_MUTANTS,
    *RESUME_MUTANTS,
    *FAULT_MUTANTS,
    *CHECKPOINT_MUTANTS,
    *GUARD_MUTANTS,
    *TENSOR_PARALLEL_MUTANTS,
    *LOADING_MUTANTS,
    *ENGINE_MUTANTS,
    *LOSS_MUTANTS,
    *MODEL_MUTANTS,
    *MUON_MUTANTS,
    *DEVICE_MUTANTS,
    *(TRITON_MUTANTS if is_installed() else ()),  # without Triton their tests are skipped
)
MUTANTS: dict[str, Mutant] = {mutant.name: mutant for mutant in EVERY}
assert len(MUTANTS) == len(EVERY)


def seed_of_today() -> str:
    """Another one each day, unless ``MUTANTS_SEED`` is set."""
    return os.environ.get("MUTANTS_SEED") or time.strftime("%F")


def sample(mutants: Sequence[Mutant], count: int, seed: str) -> list[Mutant]:
    """Some mutants, the same ones for the same seed."""
    return random.Random(seed).sample(mutants, min(count, len(mutants)))

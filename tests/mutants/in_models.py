"""Mutants of what is asked of Hugging Face models."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

OWN = "lightning_cp/models/hf_own.py"
MATRIX = "tests/models/test_matrix.py::test_every_family"

MODEL_MUTANTS = (
    Mutant(
        "each rank looks at its own longest position",
        "lightning_cp/models/hf_rotary.py",
        "handle.state.positions.longest)",
        "int(positions.max()))",
        ("tests/models/test_rotary.py::test_ranks_use_the_frequencies_of_the_whole_sequence",),
        "Ranks rotate by other frequencies.",
    ),
    Mutant(
        "BLOOM without its bias",
        OWN,
        "        alibi_slopes=_slopes(module, q),\n",
        "",
        (f"{MATRIX}[bloom-ring 4]",),
        "Tokens far away count as much as near ones.",
    ),
    Mutant(
        "Falcon's bias is not scaled",
        OWN,
        "_slopes(module, q) * module.inv_norm_factor",
        "_slopes(module, q)",
        (f"{MATRIX}[falcon_alibi-ring 4]",),
        "Scores are scaled together with the bias.",
    ),
    Mutant(
        "Falcon's groups are mixed up",
        OWN,
        "parts[..., :-2, :].flatten(2, 3), parts[..., -2, :], parts[..., -1, :]",
        "parts[..., :-2, :].flatten(2, 3), parts[..., -1, :], parts[..., -2, :]",
        (f"{MATRIX}[falcon_new-ring 4]",),
        "Keys are taken for values.",
    ),
)
"""All seeded mutants of them."""

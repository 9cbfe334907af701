"""Mistakes in loading what others made: the wrong rows, trust in a file, a model left half-loaded."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

ROOM = "lightning_cp/checkpoint/pretrained"
TESTS = "tests/checkpoint/pretrained"
FILE = f"{TESTS}/test_bad_files.py::test_a_damaged_file_is_refused_before_anything_is_allocated"
FOLDER = f"{TESTS}/test_bad_files.py::test_a_folder_that_leads_elsewhere_is_refused"

LOADING_MUTANTS = (
    Mutant(
        "strided shards taken for whole ones",
        f"{ROOM}/local.py",
        'p if getattr(p, "dim", None) == dim else Replicate()',
        "p if p.is_shard(dim) else Replicate()",
        (f"{TESTS}/test_local.py",),
        "FSDP over tensor parallelism on one dimension is a placement that is_shard does not know.",
    ),
    Mutant(
        "overlapping tensors accepted",
        f"{ROOM}/header.py",
        "if entry.start < at:",
        "if entry.start < data:",
        (f"{FILE}[tensors that overlap]",),
        "A file may say that two tensors are the same bytes.",
    ),
    Mutant(
        "links followed anywhere",
        f"{ROOM}/index.py",
        "if not any(real.is_relative_to(root) for root in _roots(directory)):",
        "if not _roots(directory):",
        (f"{FOLDER}[a link outside]",),
        "A checkpoint from outside has any file of the machine read as weights.",
    ),
    Mutant(
        "a failed load forgotten",
        f"{ROOM}/incomplete.py",
        "    yield\n    for handle",
        "    try:\n        yield\n    finally:\n        pass\n    for handle",
        (f"{TESTS}/test_while_loading.py::test_ctrl_c_leaves_a_model_that_refuses_to_be_called",),
        "What was in memory is trained as weights.",
    ),
    Mutant(
        "buffers left as they are found",
        f"{ROOM}/fresh.py",
        "            unset = [name for name in names[module] if _poisoned(",
        "            unset = [name for name in () if _poisoned(",
        (f"{TESTS}/test_options.py::test_buffers_that_are_not_saved_are_made_again",),
        "Rotary frequencies are garbage, and training goes on with them.",
    ),
    Mutant(
        "rows between wide gaps read from one place",
        f"{ROOM}/reader.py",
        "start = entry.start + _first(offset, entry.shape) * entry.dtype.itemsize",
        "start = entry.start + _first(offsets, entry.shape) * entry.dtype.itemsize",
        (f"{TESTS}/test_reader.py",),
        "Every piece of a slice that is cut is the first one again.",
    ),
)

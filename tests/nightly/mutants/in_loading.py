"""Mistakes in loading what others made: the wrong rows, trust in a file, a model left half-loaded."""

from __future__ import annotations

from tests.nightly.mutants.mutant import Mutant

ROOM = "lightning_cp/checkpoint/pretrained"
UNIT, RANKS = "tests/unit/checkpoint/pretrained", "tests/ranks/checkpoint/pretrained"
FILE = f"{UNIT}/test_bad_files.py::test_a_damaged_file_is_refused_before_anything_is_allocated"
FOLDER = f"{UNIT}/test_bad_files.py::test_a_folder_that_leads_elsewhere_is_refused"

LOADING_MUTANTS = (
    Mutant(
        "strided shards taken for whole ones",
        f"{ROOM}/plan.py",
        'p if getattr(p, "dim", None) == dim else Replicate()',
        "p if p.is_shard(dim) else Replicate()",
        (f"{RANKS}/test_local.py",),
        "FSDP over tensor parallelism on one dimension is a placement that is_shard does not know.",
    ),
    Mutant(
        "overlapping tensors accepted",
        f"{ROOM}/files.py",
        "if entry.start < at:",
        "if entry.start < data:",
        (f"{FILE}[tensors that overlap]",),
        "A file may say that two tensors are the same bytes.",
    ),
    Mutant(
        "links followed anywhere",
        f"{ROOM}/files.py",
        "if not any(real.is_relative_to(root) for root in _roots(directory)):",
        "if not _roots(directory):",
        (f"{FOLDER}[a link outside]",),
        "A checkpoint from outside has any file of the machine read as weights.",
    ),
    Mutant(
        "a failed load forgotten",
        f"{ROOM}/options.py",
        "    if model not in _started:\n",
        "    if model is None:\n",
        (f"{RANKS}/test_while_loading.py::test_ctrl_c_leaves_a_model_that_refuses_to_be_called",),
        "What was in memory is trained as weights.",
    ),
    Mutant(
        "buffers left as they are found",
        f"{ROOM}/initial_values.py",
        "            name for name in names if name not in first and _any_nan(",
        "            name for name in () if name not in first and _any_nan(",
        (f"{UNIT}/test_buffers.py::test_buffers_that_are_not_saved_are_made_again",),
        "Rotary frequencies are garbage, and training goes on with them.",
    ),
    Mutant(
        "values that have no NaN left as they are found",
        f"{ROOM}/initial_values.py",
        "            _call(way, module, names, mark=1)",
        "            _call(way, module, names, mark=0)",
        (f"{UNIT}/test_buffers.py::test_buffers_of_any_type_are_made_again",),
        "A mask that nothing sets is whatever was in memory.",
    ),
    Mutant(
        "columns of every box begin where those of the first do",
        f"{ROOM}/reader.py",
        "yield ElementRun(begin + skipped, ",
        "yield ElementRun(begin, ",
        (f"{UNIT}/test_boxes.py",),
        "A stack of matrices is the first one again and again.",
    ),
    Mutant(
        "a short read taken for a whole one",
        f"{ROOM}/reader.py",
        "if self._pread(entry, views, begin) == (len(some) - 1) * step + size:",
        "if self._pread(entry, views, begin):",
        (f"{UNIT}/test_reader.py",),
        "The end of a tensor is whatever was in memory, when a signal comes.",
    ),
    Mutant(
        "files are read whatever has become of them",
        f"{ROOM}/reader.py",
        "if file_state(self._fd) != entry.state:",
        "if False:",
        (f"{UNIT}/test_reader.py",),
        "A file that is replaced while it is loaded is read by the old one's header.",
    ),
    Mutant(
        "the first of several parts that fit",
        f"{ROOM}/matching.py",
        "        if len(fits) != 1:",
        "        if False:",
        (f"{RANKS}/test_prefix.py::test_two_modules_of_which_the_files_may_be",),
        "The teacher is loaded into the student.",
    ),
    Mutant(
        "a last part of a name taken for the name",
        f"{ROOM}/matching.py",
        'return any(not part.isdigit() for part in name.split(".")[:-1])',
        "return bool(name)",
        (
            f"{RANKS}/test_prefix.py::test_a_last_part_that_happens_to_be_the_same_is_no_common_name",
        ),
        "Any weight of the files goes into any layer that has its shape.",
    ),
    Mutant(
        "ranks load what each has found",
        f"{ROOM}/plan.py",
        "if others != every[0]), None)",
        "if others is None), None)",
        (f"{RANKS}/test_ranks_differ.py::test_ranks_that_would_load_different_things_are_refused",),
        "Shards of one parameter come from different checkpoints.",
    ),
    Mutant(
        "own names of renamed parameters are passed over",
        f"{ROOM}/matching.py",
        "[key for key in self.files if key not in self.used and",
        "[key for key in self.files if key not in {*self.used, *self.tensors.by_name} and",
        (f"{UNIT}/test_keys.py",),
        "A tensor of the files is left unread without a word.",
    ),
    Mutant(
        "tied weights exported under their first name",
        f"{ROOM}/export.py",
        "for name in names for rule in rules if",
        "for name in names[:1] for rule in rules if",
        (f"{UNIT}/test_export_keys.py",),
        "Keys that load a model do not load its export.",
    ),
    Mutant(
        "what files hold made whole to set what they do not",
        f"{ROOM}/meta_init.py",
        "            return placeholder_like(x, device, name)",
        "            return nn.Parameter(torch.empty(x.shape, dtype=x.dtype, device=device), False)",
        (f"{RANKS}/test_siblings.py::test_what_files_hold_is_not_made_whole",),
        "An embedding is whole on every rank for the one number that scales it.",
    ),
    Mutant(
        "only names of what no file holds compared",
        f"{ROOM}/meta_init.py",
        'f"{list(x.shape)} {dtype_of(x)}"',
        '""',
        (f"{RANKS}/test_ranks_differ.py",),
        "Ranks share a message of another length: values of one tensor end up in the next.",
    ),
    Mutant(
        "a shared message not taken apart",
        "lightning_cp/comm/reduce.py",
        "        if part.data_ptr() != x.data_ptr():",
        "        if part.data_ptr() != x.data_ptr() and len(own) == 1:",
        ("tests/ranks/comm/test_from_first.py",),
        "Each rank keeps its own random values of small tensors.",
    ),
    Mutant(
        "a head on the meta device is never asked whether it is tied",
        "lightning_cp/consistency/model.py",
        "if embeddings is not None and head is not None and head is not embeddings:",
        "if embeddings is None and head is not None:",
        ("tests/unit/models/test_ties.py",),
        "With transformers 5.0 a model on the meta device trains a head of its own.",
    ),
)

"""Mistakes in going on where a run was: nothing fails, and another run than the saved one goes on."""

from __future__ import annotations

from tests.nightly.mutants.mutant import Mutant

ROOM = "lightning_cp/resume"
TRAINER = "tests/ranks/resume/test_trainer.py::test_goes_on_as_if_nothing_had_happened"
WINDOWS = "tests/ranks/resume/test_windows.py::test_is_replayed_from_its_beginning"
FABRIC = "tests/ranks/resume/test_fabric.py::test_goes_on_as_if_nothing_had_happened"

RESUME_MUTANTS = (
    Mutant(
        "random numbers not restored",
        f"{ROOM}/trainer.py",
        "        self._point.restore_random(device)\n",
        "",
        (f"{TRAINER}[mid-epoch]",),
        "A resumed run drops other activations than the one that was saved.",
    ),
    Mutant(
        "one sample skipped on resume",
        "lightning_cp/loaders/position.py",
        "islice(self._iterator, left)",
        "islice(self._iterator, left + 1)",
        (f"{TRAINER}[mid-epoch]",),
        "A batch is never trained on.",
    ),
    Mutant(
        "window resumed in its middle",
        f"{ROOM}/trainer.py",
        "        return accumulates(trainer) or",
        "        return False and accumulates(trainer) or",
        (f"{TRAINER}[inside a window]",),
        "The window steps along the gradients of its last batches only.",
    ),
    Mutant(
        "no window with manual optimization",
        f"{ROOM}/trainer.py",
        "return bool(trainer.optimizers) and not self._stepped",
        "return False",
        (f"{WINDOWS}[manual, first window]",),
        "Gradients of the batches before the save are lost.",
    ),
    Mutant(
        "a window that is replayed in the epoch after it",
        f"{ROOM}/trainer.py",
        '    fit[_EPOCH] = deepcopy(to["epochs"])\n',
        "",
        (f"{WINDOWS}[across epochs, after]",),
        "The epoch that goes on is not the one of the window's samples.",
    ),
    Mutant(
        "random numbers of a window taken after the hooks of its first batch",
        "lightning_cp/strategies/trainer.py",
        '("convert_input", self._convert_input),',
        '("backward", lambda own, *x, **y: (self._convert_input(len, ""), own(*x, **y))[1]),',
        (f"{WINDOWS}[hooks that draw]",),
        "A replayed batch is masked otherwise than it was.",
    ),
    Mutant(
        "a batch that was read again was read now",
        "lightning_cp/loaders/iterator.py",
        "self._place.before_read(self._loader, moment)",
        "self._place.before_read(self._loader)",
        ("tests/ranks/resume/test_windows.py::test_in_the_first_window_of_a_run_that_went_on",),
        "Saved once more in its first window, a run reads that batch with other random numbers.",
    ),
    Mutant(
        "validation that was due left out",
        f"{ROOM}/trainer.py",
        "loop.val_loop._restart_stage = EvaluationStage.RESTARTED_MID_EVALUATION  # the whole pass",
        "pass",
        (f"{TRAINER}[before a validation]",),
        "The numbers that validation draws are not drawn, and no best checkpoint is kept.",
    ),
    Mutant(
        "saved as after batches that no step has used",
        f"{ROOM}/fabric.py",
        "            self._begun = self._now()",
        "            self._begun = None",
        (f"{FABRIC}[inside a window]",),
        "The window's first batches are lost.",
    ),
    Mutant(
        "buffers of the end of what is replayed",
        f"{ROOM}/fabric.py",
        "            self._buffers.save(self._models)\n",
        "",
        (f"{FABRIC}[inside a window]",),
        "Counters and running statistics count replayed batches twice.",
    ),
    Mutant(
        "steps past Fabric's wrapper are not heard of",
        f"{ROOM}/fabric.py",
        "            state.note_step(optimizer)\n",
        "            pass\n",
        (f"{FABRIC}[past the wrapper]",),
        "Samples are trained on again, with later weights.",
    ),
    Mutant(
        "a loader takes the place of another one",
        f"{ROOM}/fabric.py",
        "if saved != there:",
        "if saved < there:",
        ("tests/ranks/resume/test_fabric.py::test_loaders_that_are_gone_have_no_place",),
        "Its samples come once more.",
    ),
    Mutant(
        "the first window belongs to the pass after it",
        "lightning_cp/loaders/iterator.py",
        "            self._place.request_batch(trains=True)\n",
        "",
        (f"{FABRIC}[inside a window]",),
        "A pass that was saved in its first window is left out.",
    ),
    Mutant(
        "buffers that are copied where they lie",
        f"{ROOM}/record.py",
        "copies[owned] = buffer.detach().clone()",
        "copies[owned] = buffer.detach()",
        ("tests/unit/resume/test_taken_back.py",),
        "What changes where it lies counts a replayed window twice.",
    ),
    Mutant(
        "buffers copied once",
        f"{ROOM}/record.py",
        "                torch._foreach_copy_(into, of)\n",
        "                pass\n",
        ("tests/unit/resume/test_taken_back.py",),
        "Running statistics go back to the first window of the run.",
    ),
    Mutant(
        "no buffers taken back without accumulation",
        f"{ROOM}/trainer.py",
        "        self._buffers.save([trainer.lightning_module])\n",
        "        if trainer.accumulate_grad_batches > 1:\n"
        "            self._buffers.save([trainer.lightning_module])\n",
        ("tests/ranks/resume/test_trainer.py::test_wherever_it_was_saved[in a step, no window]",),
        "Saved before its step, a batch is counted twice.",
    ),
    Mutant(
        "batches are skipped by another size",
        "lightning_cp/loaders/position.py",
        '        _check_same("a batch_size of", was, size)\n',
        "",
        ("tests/unit/resume/test_places.py",),
        "Samples are left out, or come twice.",
    ),
)
"""All seeded mutants of exact resume."""

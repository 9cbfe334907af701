"""Mistakes in saving and loading: checkpoints that seem to be there, and are not what they say."""

from __future__ import annotations

from tests.nightly.mutants.mutant import Mutant

DAMAGE = "tests/unit/checkpoint/test_damage.py"
FORMS = "tests/ranks/checkpoint/test_forms.py"
REFUSED = "tests/unit/checkpoint/test_refused.py"
ONE_RANK = "tests/ranks/checkpoint/test_one_rank.py"
SPREAD = "tests/ranks/checkpoint/test_spread.py"

CHECKPOINT_MUTANTS = (
    Mutant(
        "a refused load keeps the weights",
        "lightning_cp/strategies/trainer_checkpoints.py",
        "            if before is not None:",
        "            if before is None:",
        (
            "tests/ranks/checkpoint/test_loads.py::test_refused_loads_change_nothing[ddp-by_trainer]",
        ),
        "A run that goes on after the error trains another model.",
    ),
    Mutant(
        "what another rank alone saves is dropped",
        "lightning_cp/checkpoint/consistency.py",
        "if key not in first.parts and (value.tensors or not place):",
        "if key not in first.parts and value.tensors:",
        ("tests/ranks/checkpoint/test_same_states.py",),
        "A checkpoint lacks what a rank has saved, and nobody says so.",
    ),
    Mutant(
        "a folder is deleted while others write into it",
        "lightning_cp/checkpoint/atomic.py",
        "        folder.rename(renamed)\n    except OSError:",
        "        renamed = folder\n    except OSError:",
        ("tests/ranks/checkpoint/test_failed_together.py",),
        "A full disk stays full after a failed save.",
    ),
    Mutant(
        "nobody waits for links",
        "lightning_cp/checkpoint/manager.py",
        "self._run_on_all(running.target, self._run_postponed)",
        "self._run_postponed()",
        ("tests/ranks/checkpoint/test_background_saves.py",),
        "Ranks look for a link that the first one is still making.",
    ),
    Mutant(
        "the newest by its name",
        "lightning_cp/checkpoint/read.py",
        "    return max(times, key=lambda path: (times[path], path == named), default=None)",
        "    return max(times, default=None)",
        ("tests/unit/checkpoint/test_latest.py::test_what_was_completed_last_is_the_newest",),
        "A run goes on from an older checkpoint than its last one.",
    ),
    Mutant(
        "sizes compared, not hashes",
        "lightning_cp/checkpoint/manifest.py",
        "    if sha256_of(path) != entry.sha256:",
        "    if not sha256_of(path):",
        (f"{DAMAGE}::test_a_shard_of_another_step_is_named",),
        "A shard of another step is loaded with the others, without a word.",
    ),
    Mutant(
        "a manifest that is not hashed itself",
        "lightning_cp/checkpoint/manifest.py",
        "    if signed != text:",
        "    if not signed:",
        (f"{DAMAGE}::test_any_changed_character_of_a_manifest_is_found",),
        "A changed byte in the manifest passes.",
    ),
    Mutant(
        "no copy before the background",
        "lightning_cp/checkpoint/save.py",
        "planned.world.run_on_all(planned.copy, _error_elsewhere(planned))",
        "planned.world.run_on_all(bool, _error_elsewhere(planned))",
        (f"{FORMS}::test_spread_tensors_are_read_in_any_other_spread[sharded-background]",),
        "What is saved in the background is a mix of the steps that are made meanwhile.",
    ),
    Mutant(
        "removed though a link points to it",
        "lightning_cp/checkpoint/manager.py",
        "            return False\n        if is_foreign(target)",
        "            pass\n        if is_foreign(target)",
        (f"{REFUSED}::test_only_checkpoints_are_removed",),
        "A kill between removal and the new link leaves last.ckpt pointing nowhere; the run begins anew.",
    ),
    Mutant(
        "optimizers by number only",
        "lightning_cp/checkpoint/restore.py",
        "    return [place[name] for name in own]",
        "    return list(range(len(own)))",
        (f"{REFUSED}::test_optimizers_are_loaded_by_name",),
        "Parameters that are grouped in another order get each other's moments.",
    ),
    Mutant(
        "any folder is replaced",
        "lightning_cp/checkpoint/manifest.py",
        "    if is_foreign(path) and any(path.iterdir()):",
        "    if not path:",
        (
            "tests/ranks/checkpoint/test_in_the_way.py::test_a_folder_that_is_no_checkpoint_is_not_replaced",
        ),
        "A save under the name of a folder deletes what is in it.",
    ),
    Mutant(
        "one rank reads for itself",
        "lightning_cp/checkpoint/read.py",
        "        return _run_on_all(self.path, self.world, lambda: self._read(wanted, template))",
        "        return self._read(wanted, template)",
        (f"{ONE_RANK}::test_a_file_that_one_rank_cannot_read[full]",),
        "A rank that cannot read leaves the others waiting for it.",
    ),
    Mutant(
        "files dealt out over machines",
        "lightning_cp/checkpoint/read.py",
        "    near = [rank for rank, machine in enumerate(machines) if machine == machines[world.rank]]",
        "    near = list(range(len(machines)))",
        (f"{ONE_RANK}::test_every_machine_verifies_its_copy[sharded]",),
        "A changed byte in one machine's copy is loaded there, as another machine has verified its own.",
    ),
    Mutant(
        "places told apart by their dotted names",
        "lightning_cp/checkpoint/read.py",
        "            name = unique_name(place, stored)",
        "            name = unique_name(place, ())",
        (f"{SPREAD}::test_the_same_dotted_name_twice[full]",),
        "Of two tensors with the same dotted name one is read twice, the other is uninitialised memory.",
    ),
    Mutant(
        "a refused place is found after the weights are loaded",
        "lightning_cp/strategies/fabric_checkpoints.py",
        "        if isinstance(obj, RunState):",
        "        if not obj:",
        ("tests/ranks/resume/test_fabric.py::test_more_loaders_than_were_saved_are_refused",),
        "A load that is refused leaves other weights.",
    ),
    Mutant(
        "callbacks compared as weights are",
        "lightning_cp/strategies/trainer_checkpoints.py",
        "            may_differ=_MAY_DIFFER,\n",
        "",
        ("tests/ranks/logging/test_monitors_apart.py",),
        "A run whose data ranks have seen other values ends at the third save.",
    ),
    Mutant(
        "each data rank decides by its own value",
        "lightning_cp/strategies/lightning_patches.py",
        "    first = every[0]",
        "    first = every[World().rank]",
        ("tests/ranks/logging/test_monitors_apart.py",),
        "Ranks train with different learning rates, or wait for each other's checkpoints.",
    ),
    Mutant(
        "a folder that one rank alone sees",
        "lightning_cp/checkpoint/shards.py",
        "    while not folder.is_dir():",
        "    while False:",
        ("tests/ranks/checkpoint/test_same_states.py",),
        "The first rank waits half an hour for parts that were never written.",
    ),
)

"""Mistakes in who is named when a rank fails, and when."""

from __future__ import annotations

from tests.nightly.mutants.mutant import Mutant

VERDICT = "lightning_cp/watchdog/attribution.py"
TESTS = "tests/unit/watchdog/test_verdicts.py::test_"

FAULT_MUTANTS = (
    Mutant(
        "who noticed is blamed",
        VERDICT,
        "if self._note_of(rank).kind == OWN:",
        "if self._note_of(rank):",
        (TESTS + "a_broken_connection_is_not_blamed_on_who_noticed_it",),
        "A rank whose connection was closed is named, and not the one that has closed it.",
    ),
    Mutant(
        "timeouts ignored",
        VERDICT,
        "return limit is not None and seconds > limit",
        "return limit is not None and seconds > 1e9",
        (TESTS + "a_rank_without_signs_of_life", TESTS + "all_live_and_none_goes_on"),
        "A stopped rank is waited for, for ever.",
    ),
    Mutant(
        "who is ahead is named",
        VERDICT,
        "if made[rank] == min(made.values())",
        "if made[rank] == max(made.values())",
        (TESTS + "all_live_and_none_goes_on",),
        "The ranks that wait are named, and not the one that they wait for.",
    ),
    Mutant(
        "only the slowest rank's progress counts",
        VERDICT,
        "        if beat.count != member.beat.count:\n            self._progressed = now",
        "        if beat.count != member.beat.count and rank == 0:\n            self._progressed = now",
        (TESTS + "progress_of_one_rank_is_enough",),
        "A rank that works for long, with the others waiting for it, is taken for stuck.",
    ),
    Mutant(
        "the device's progress is not counted",
        "lightning_cp/watchdog/phase.py",
        "return self.count + (device.completed if device is not None else 0)",
        "return self.count",
        ("tests/unit/watchdog/test_device.py::test_hosts_may_wait_for_a_device_that_works",),
        "A healthy step that is long on the GPU is ended.",
    ),
    Mutant(
        "hosts alone are compared",
        "lightning_cp/watchdog/messages.py",
        "if device is not None and device.is_busy:",
        "if device is not None and device.place.step < 0:",
        (
            "tests/unit/watchdog/test_device.py::test_the_device_that_stands_still_is_named",
            "tests/unit/watchdog/test_device.py::test_a_device_that_waits_for_one_that_is_behind_is_not_named",
        ),
        "Of GPUs that wait for one that hangs, all are named.",
    ),
    Mutant(
        "GPUs that wait are taken for those that stand still",
        VERDICT,
        "return 2 if device.waits else 1",
        "return 1",
        (
            "tests/unit/watchdog/test_device.py::test_a_device_that_waits_in_a_collective_is_not_named",
        ),
        "All GPUs of a group are named where one of them hangs.",
    ),
    Mutant(
        "goodbyes not heard",
        VERDICT,
        "if not member.has_left and member.note is None:",
        "if member.note is None:",
        (TESTS + "who_has_said_goodbye_is_not_lost",),
        "A rank that ends a little earlier than the others fails the run.",
    ),
    Mutant(
        "setup compares nothing but settings",
        "lightning_cp/consistency/settings.py",
        "return {**stage, **versions, **chosen, **besides, **told}",
        "return {**stage, **chosen, **besides, **told}",
        ("tests/ranks/watchdog/test_same_start.py::test_what_differs_is_named[torch version-1]",),
        "Ranks of different versions train together.",
    ),
    Mutant(
        "settings of optimizers are not compared",
        "lightning_cp/consistency/model.py",
        "value_text(_plain(group[key]))",
        "value_text(None)",
        (
            "tests/ranks/watchdog/test_same_model.py::test_another_optimizer_is_named[ddp-rate-fabric]",
        ),
        "Replicas of a model drift apart, without a word.",
    ),
    Mutant(
        "what shapes do not show is not compared",
        "lightning_cp/consistency/model.py",
        "[model_facts(module), config_facts(module)]",
        "[model_facts(module)]",
        (
            "tests/ranks/watchdog/test_same_model.py::test_a_config_that_shapes_do_not_show_is_compared",
        ),
        "Ranks have other rotary positions, and train one model.",
    ),
    Mutant(
        "who is named is ended by its own watcher",
        "lightning_cp/watchdog/thread.py",
        "return self.is_named or (own",
        "return (own",
        ("tests/unit/watchdog/test_watchers.py",),
        "The only rank that knows why has no time to show its traceback.",
    ),
    Mutant(
        "time passes while a process is stopped",
        "lightning_cp/watchdog/thread.py",
        "self._suspended += gap",
        "self._suspended += 0",
        ("tests/unit/watchdog/test_clock.py",),
        "A job that was suspended is killed when it goes on.",
    ),
    Mutant(
        "bytes that move are no progress",
        "lightning_cp/watchdog/phase.py",
        "in _watched:\n        position.progress()",
        "in _watched:\n        pass",
        ("tests/unit/watchdog/test_signs.py",),
        "A save on a slow disk is taken for a hang, and cut.",
    ),
    Mutant(
        "who ends well in a forked process does not say so",
        "lightning_cp/strategies/base.py",
        "            Finalize(self, runtime.watch.stop, exitpriority=1)\n",
        "",
        (
            "tests/ranks/launch/test_workers.py"
            "::test_a_forked_worker_that_ends_before_the_others_is_not_taken_for_killed",
        ),
        "The others take it for killed, and end with status 1.",
    ),
    Mutant(
        "SIGTERM leaves no last words",
        "lightning_cp/watchdog/watch.py",
        "        self._watch.wait_for_verdict(LOSS_SECONDS)\n",
        "",
        (
            "tests/ranks/watchdog/test_table.py::test_a_fault"
            "[SIGKILL of rank 1 of 2 (fabric_spawn, started by Lightning, heard late)]",
        ),
        "On a busy machine nobody says where the lost rank was.",
    ),
    Mutant(
        "calls that an exception ends stay open",
        "lightning_cp/watchdog/phase.py",
        "part.register_forward_hook, end, always_call=True",
        "part.register_forward_hook, end",
        (
            "tests/unit/watchdog/test_verdicts.py::test_a_call_that_recomputation_ends_early_is_over",
        ),
        "A timeout's first line says that a rank is in a module that it left long ago.",
    ),
)

"""Who is named, from what ranks say of themselves; no processes, and a clock of our own."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_cp.errors import ConfigError, RankFailure
from lightning_cp.watchdog.attribution import NO_MESSAGE, PATIENCE, FailureAttribution
from lightning_cp.watchdog.messages import BROKEN, COMMON, OWN, Heartbeat, Note, Verdict
from lightning_cp.watchdog.phase import Phase, PhasePosition, Position, ProgressHooks

NAMES = [f"rank {rank}" for rank in range(4)]
AT = PhasePosition(7, 1, Phase.BACKWARD)


def new_attribution() -> FailureAttribution:
    """Of four ranks, all of which are in the seventh step's backward at second 0."""
    made = FailureAttribution(NAMES, 0.0)
    for rank in range(4):
        made.record_beat(rank, Heartbeat(5, 3, AT, 10.0), 0.0)
    return made


def line(found: Verdict | None) -> str:
    assert found is not None
    return found.line


def test_nothing_is_said_of_ranks_that_go_on() -> None:
    assert new_attribution().verdict(9.0) is None


def test_a_process_that_is_gone_is_lost() -> None:
    attribution = new_attribution()
    attribution.record_disconnect(2, PhasePosition(8, 1, Phase.FORWARD))
    assert line(attribution.verdict(0.1)) == f"rank 2 lost at step 8, in forward: {NO_MESSAGE}"
    attribution.record_disconnect(3)
    assert line(attribution.verdict(0.1)).endswith(
        f"; rank 3 lost at step 7, in backward: {NO_MESSAGE}"
    )


def test_a_rack_that_is_gone_is_said_in_a_line() -> None:
    attribution = FailureAttribution([f"rank {rank}" for rank in range(4096)], 0.0)
    for rank in range(1024):
        attribution.record_disconnect(rank)
    said = line(attribution.verdict(0.1))
    assert said.startswith("rank 0 lost")
    assert "rank 7 lost" in said
    assert said.endswith(f"; and 1016 more: {NO_MESSAGE}")


def test_who_has_said_goodbye_is_not_lost() -> None:
    attribution = new_attribution()
    attribution.record_leave(2)
    attribution.record_disconnect(2)
    assert attribution.verdict(9.0) is None


def test_ctrl_c_is_called_so() -> None:
    attribution = new_attribution()
    attribution.record_note(3, Note.of_error(KeyboardInterrupt(), AT), 1.0)
    assert (
        line(attribution.verdict(1.1)) == "rank 3 was interrupted (Ctrl-C) at step 7, in backward"
    )


def test_an_error_of_ours_is_named_with_its_message() -> None:
    """Another machine's ranks are not shown it besides."""
    attribution = new_attribution()
    error = ConfigError(f"too long. {'x' * 300}\nSecond line")
    attribution.record_note(3, Note.of_error(error, AT), 1.0)
    said = line(attribution.verdict(1.1))
    assert said.startswith("rank 3 raised at step 7, in backward: ConfigError: too long. xxx")
    assert said.endswith("xxx...")
    assert len(said) < 260


def test_a_broken_connection_is_not_blamed_on_who_noticed_it() -> None:
    attribution = new_attribution()
    attribution.record_note(0, Note("RuntimeError: closed by peer", kind=BROKEN, place=AT), 1.0)
    assert attribution.verdict(1.0 + PATIENCE / 2) is None
    attribution.record_note(3, Note("ValueError: mine", "trace", OWN, AT), 1.1)
    found = attribution.verdict(1.2)
    assert line(found) == "rank 3 raised at step 7, in backward: ValueError: mine"
    assert (found and found.details) == "trace"


def test_a_process_that_is_gone_goes_before_what_others_noticed() -> None:
    attribution = new_attribution()
    attribution.record_note(0, Note("RuntimeError: closed by peer", kind=BROKEN, place=AT), 1.0)
    attribution.record_disconnect(1)
    assert line(attribution.verdict(1.0)).startswith("rank 1 lost")


def test_who_ended_before_is_named_once_others_miss_it() -> None:
    attribution = new_attribution()
    attribution.record_leave(1)
    attribution.record_disconnect(1)
    attribution.record_note(0, Note("RuntimeError: closed by peer", kind=BROKEN, place=AT), 1.0)
    assert line(attribution.verdict(1.1 + PATIENCE)).startswith(
        "rank 1 ended, while others still run,"
    )


def test_an_error_that_is_told_to_all_ends_nobody() -> None:
    attribution = new_attribution()
    attribution.record_note(2, Note("ShapeError: odd", kind=OWN, place=AT), 1.0)
    assert not attribution.all_informed
    for rank in (0, 1, 3):
        attribution.record_note(rank, Note("RankFailure: rank 2", kind=COMMON, place=AT), 1.0)
    assert attribution.all_informed
    assert line(attribution.verdict(1.0)).startswith("rank 2 raised")


def test_a_rank_without_signs_of_life() -> None:
    attribution = new_attribution()
    for rank in (0, 1, 2):
        attribution.record_beat(rank, Heartbeat(5, 3, AT, 10.0), 9.9)
    found = attribution.verdict(10.5)
    assert line(found) == "rank 3 gave no sign of life for 10 s, at step 7, in backward"
    assert (found and found.kind) == "frozen"


def test_a_silent_rank_has_the_limit_of_where_it_is() -> None:
    """Its last word was half a second old, and from where everything may take long."""
    attribution = FailureAttribution(
        NAMES, 0.0, lambda rank, beat: replace(beat, place=AT, limit=10.0)
    )
    attribution.record_beat(3, Heartbeat(1, 0, PhasePosition(), 600.0), 0.0)
    for rank in (0, 1, 2):
        attribution.record_beat(rank, Heartbeat(5, 3, AT, 10.0), 9.9)
    assert attribution.verdict(9.9) is None
    found = attribution.verdict(10.5)
    assert line(found) == "rank 3 gave no sign of life for 10 s, at step 7, in backward"


def test_all_live_and_none_goes_on() -> None:
    attribution = new_attribution()
    for rank in range(4):
        behind = Heartbeat(5, 2 if rank == 1 else 3, AT, 10.0, "its stack")
        attribution.record_beat(rank, behind, 10.5)
    found = attribution.verdict(10.6)
    assert found is not None
    assert found.line == (
        "no rank made progress for 11 s; first to stop: rank 1 at step 7, in backward"
    )
    assert "its stack" in found.details


def test_who_does_not_wait_in_a_collective_is_waited_for() -> None:
    attribution = new_attribution()
    for rank in range(4):
        stack = "x.py, in sleep" if rank == 3 else "lightning_cp/comm/transfer.py, in wait"
        attribution.record_beat(rank, Heartbeat(5, 3, AT, 10.0, stack), 10.5)
    assert line(attribution.verdict(10.6)).endswith("first to stop: rank 3 at step 7, in backward")


def test_progress_of_one_rank_is_enough() -> None:
    """The others wait for it: a crawl."""
    attribution = new_attribution()
    for second in range(1, 60):
        for rank in range(4):
            attribution.record_beat(
                rank, Heartbeat(5 + (second if rank == 2 else 0), 3, AT, 10.0), second
            )
        assert attribution.verdict(second + 0.5) is None


@pytest.mark.parametrize("limit", [None, 600.0])
def test_a_rank_that_allows_itself_more_is_waited_for(limit: float | None) -> None:
    """Rank 0 saves, the others wait in the next step."""
    attribution = new_attribution()
    for rank in range(4):
        attribution.record_beat(rank, Heartbeat(5, 3, AT, limit if rank == 0 else 10.0), 100.0)
    assert attribution.verdict(100.1) is None


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ValueError("x"), OWN),
        (RuntimeError("shapes do not fit"), OWN),
        (ConfigError("x"), OWN),
        (RankFailure("rank 1 raised"), COMMON),
        (RuntimeError("[pair.cc:534] Connection closed by peer [127.0.0.1]:1234"), BROKEN),
        (dist.DistBackendError("x"), BROKEN),
        (ConnectionResetError(), BROKEN),
    ],
)
def test_kinds_of_errors(error: Exception, kind: str) -> None:
    assert Note.of_error(error, AT).kind == kind


def test_what_comes_of_a_broken_connection_is_none_of_ones_own() -> None:
    with pytest.raises(KeyError) as raised:
        _clean_up()
    assert Note.of_error(raised.value, AT).kind == BROKEN


def _clean_up() -> None:
    try:
        raise RuntimeError("Connection reset by peer")
    except RuntimeError:
        raise KeyError("cleaning up")  # noqa: B904


def test_messages_are_what_they_were() -> None:
    note, beat = Note("E: x", "trace", COMMON, AT), Heartbeat(4, 2, AT, None, "here")
    verdict = Verdict("lost", (1, 2), "line", "details")
    assert Note.of_message(note.as_message()) == note
    assert Heartbeat.of_message(beat.as_message()) == beat
    assert Verdict.of_message(verdict.as_message()) == verdict


def test_positions_follow_steps_and_micro_batches() -> None:
    position = Position()
    assert str(position.place) == "in setup"
    position.begin_micro_batch()
    position.enter(Phase.BACKWARD)
    position.begin_micro_batch()
    assert str(position.place) == "at step 1, in forward of micro-batch 2"
    position.end_step()
    assert str(position.place) == "after step 1, between steps"
    position.begin_micro_batch(after=40)
    assert str(position.place) == "at step 41, in forward"
    with position.during(Phase.SAVE):
        assert str(position.place) == "after step 41, in saving a checkpoint"
    assert position.place.phase == Phase.FORWARD


def test_the_line_of_a_timeout_says_which_call_each_rank_is_in() -> None:
    attribution, position = new_attribution(), Position()
    for name in ("net", "net.layers.0"):
        position.call(name)
    position.end_call()
    for name in ("net.layers.1", "net.layers.1"):
        position.call(name)
    for rank, within in enumerate(["call 1 of net.layers.0", position.module_call, "", ""]):
        attribution.record_beat(rank, Heartbeat(5, 3, AT, 10.0, module_call=within), 10.5)
    found = attribution.verdict(11.0)
    assert found is not None
    assert found.line == (
        "no rank made progress for 11 s; all of them: "
        + "; ".join(f"rank {rank} at step 7, in backward" for rank in range(4))
        + ". Ranks have to call these modules together: "
        "rank 0 at step 7, in backward, in call 1 of net.layers.0; "
        "rank 1 at step 7, in backward, in call 2 of net.layers.1; "
        "rank 2 at step 7, in backward, in none of them; rank 3 at step 7, in backward, in none of them"
    )
    position.begin_micro_batch()
    assert position.module_call == ""
    position.call("net")
    position.enter(Phase.BACKWARD)
    assert position.module_call == "call 1 of net"


class FSDPModule:
    """Known by its name."""


class Unit(FSDPModule, nn.Linear):
    """A unit of a sharded model."""


def test_a_call_that_recomputation_ends_early_is_over() -> None:
    position, model = Position(), nn.Sequential(Unit(2, 2), Unit(2, 2))
    ProgressHooks(position).follow(model, attention=False)
    x = torch.ones(1, 2, requires_grad=True)
    for unit in model:
        x = checkpoint(unit, x, use_reentrant=False)
    assert position.count
    x.sum().backward()
    assert not position.module_call

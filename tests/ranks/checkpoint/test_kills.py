"""SIGKILL in the middle of a save: the checkpoint before or the new one is read, bit by bit, never a mix."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.checkpoint.kill_places import PLACES

WAYS = [("full", False), ("full", True), ("sharded", False), ("sharded", True)]
IDS = ["full", "full-async", "sharded", "sharded-async"]


def kills(folder: Path, form: str, background: bool, points: str) -> list[dict[str, Any]]:
    command = [
        sys.executable,
        "-m",
        "tests.helpers.checkpoint.killing",
        str(folder),
        form,
        str(background),
        points,
    ]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("form", "background"),
    [pytest.param(*WAYS[1], marks=pytest.mark.nightly), WAYS[2]],
    ids=[IDS[1], IDS[2]],
)
def test_a_kill_at_each_point_of_a_save(form: str, background: bool, tmp_path: Path) -> None:
    found = kills(tmp_path, form, background, ",".join(PLACES))
    assert all(
        kill["killed"] for kill in found if kill["place"] != "while_replacing" or form == "sharded"
    )
    read = {kill["place"]: kill["read"] for kill in found if kill["killed"]}
    assert read["after_rename"] == "new"
    assert {place for place, which in read.items() if which == "old"} == set(read) - {
        "after_rename"
    }


@pytest.mark.nightly
@pytest.mark.parametrize(("form", "background"), WAYS, ids=IDS)
def test_kills_at_twenty_random_points(form: str, background: bool, tmp_path: Path) -> None:
    found = kills(tmp_path, form, background, "20")
    fired = [kill for kill in found if kill["killed"]]
    old = sum(kill["read"] == "old" for kill in fired)
    print(
        f"{form} background={background}: {len(fired)} of {len(found)} kills in a save, then {old} read "
        f"the old one, {len(fired) - old} the new one"
    )
    assert len(fired) == 20  # others came after the save
    assert all(kill["read"] == "new" for kill in found if not kill["killed"])
    assert old

"""Where an export cannot go is told on every rank: the place, why, and what to do."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from lightning_cp.checkpoint import export_pretrained
from lightning_cp.checkpoint.pretrained import export as export_module
from lightning_cp.errors import CheckpointError, ConfigError
from tests.helpers.pool import run_ranks
from tests.ranks.checkpoint.pretrained.test_one_rank import raised_by


def exports_to(rank: int, world: int, targets: list[Any]) -> str:
    return raised_by(lambda: export_pretrained(nn.Linear(2, 2), targets[rank]))


def test_a_place_that_cannot_be_written_ends_the_export_on_all(tmp_path: Path) -> None:
    """What there is to tidy up is refused as well."""
    (tmp_path / "file").write_text("years of work")
    target = tmp_path / "file" / "made"
    first, second = run_ranks(2, exports_to, [target, target], timeout=30)
    assert first.startswith("CheckpointError: the export could not be written to ")
    assert "file/made (Not a directory), and nothing of it is left. Name a folder that" in first
    assert "RankFailure: exporting weights ended on all ranks, because rank 0 raised" in second
    assert "file/made (Not a directory)" in second


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.EROFS, "Name a folder that can be written"),
        (errno.ENOSPC, "Free some space or name another folder"),
        (errno.EDQUOT, "Free some space or name another folder"),
    ],
)
def test_what_to_do_depends_on_why(
    number: int, advice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sweep(_: Path) -> None:
        raise OSError(number, os.strerror(number))

    def refuse(self: Path, **_: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(export_module, "sweep", sweep)
    monkeypatch.setattr(Path, "unlink", refuse)  # a read-only mount refuses what is not there, too
    with pytest.raises(CheckpointError, match=rf"made \({os.strerror(number)}\).*{advice}"):
        export_pretrained(nn.Linear(2, 2), tmp_path / "made")


@pytest.mark.nightly
def test_ranks_that_export_to_different_places_are_refused(tmp_path: Path) -> None:
    """Only the first one's would be there."""
    said = run_ranks(2, exports_to, [tmp_path / "a", tmp_path / "b"], timeout=30)
    assert said[0] == said[1]
    assert said[0].startswith("ConfigError: ranks export to different paths: ")
    assert "/a on rank 0, " in said[0]
    assert "/b on rank 1. " in said[0]
    assert list(tmp_path.iterdir()) == []


def test_a_path_that_is_none_on_one_rank_is_told_on_all(tmp_path: Path) -> None:
    first, second = run_ranks(2, exports_to, [tmp_path / "a", None], timeout=30)
    assert "because rank 1 raised ConfigError: a checkpoint is given by its path" in first
    assert second == (
        "ConfigError: a checkpoint is given by its path, got None. Pass text or a Path that is not empty."
    )


def test_a_state_dict_is_no_model(tmp_path: Path) -> None:
    model: Any = nn.Linear(2, 2).state_dict()
    with pytest.raises(ConfigError, match=r"model must be a module .*OrderedDict.*not its state"):
        export_pretrained(model, tmp_path / "made")

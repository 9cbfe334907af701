"""Which is better? Groups, the best of each, what is said of them, and what is refused."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

import pytest

from lightning_cp.apps.compare.groups import COLUMNS, compare_groups, final_bits, groups_of
from lightning_cp.apps.compare.runs import TrainRun, read_runs
from lightning_cp.errors import ConfigError
from tests.helpers.apps.folders import run_folder
from tests.ranks.apps.test_compare import command

BY = "model.optimizer._target_"
ADAMW, MUON = "torch.optim.AdamW", "lightning_cp.optim.Muon"
BIT = math.log(2)
ENDS = {
    ("adamw", 0.1): (3.0, 2.5),
    ("adamw", 0.2): (2.6, 2.2),
    ("adamw", 0.4): (2.0, 2.4),  # better than all others, but not at the end
    ("muon", 0.1): (2.7, 2.3),
    ("muon", 0.2): (2.5, 2.1),
    ("muon", 0.4): (2.15, 2.125),
}
"""Optimizer and rate -> bits per byte after steps 1 and 2."""


def made(folder: Path, name: str, lr: float, *bits: float, **options: Any) -> Path:
    """The folder of a run of one optimizer."""
    optimizer = {"_target_": MUON if name.startswith("muon") else ADAMW, "lr": lr}
    model = {"heads": options.pop("heads", 8), "optimizer": optimizer | options.pop("own", {})}
    validation = [one * BIT for one in bits]
    return run_folder(folder, before=8 * BIT, validation=validation, model=model, **options)


@pytest.fixture
def runs(tmp_path: Path) -> list[TrainRun]:
    return read_runs(
        [
            made(
                tmp_path / f"{name}_{lr}",
                name,
                lr,
                *bits,
                own={"nesterov": 1} if name == "muon" else {},
            )
            for (name, lr), bits in ENDS.items()
        ]
    )


def test_runs_are_grouped_by_the_settings_value_and_the_lowest_end_is_the_best(
    runs: list[TrainRun],
) -> None:
    muon, adamw = groups_of(runs, BY)
    assert (muon.name, adamw.name) == ("Muon", "AdamW")
    assert [run.name for run in adamw.runs] == ["adamw_0.1", "adamw_0.2", "adamw_0.4"]
    assert [run.name for run in muon.runs] == ["muon_0.1", "muon_0.2", "muon_0.4"]
    assert [run.name for run in adamw.best.runs] == ["adamw_0.2"]
    assert [run.name for run in muon.best.runs] == ["muon_0.2"]
    assert (adamw.bits, muon.bits) == pytest.approx((2.2, 2.1))
    assert adamw.swept == muon.swept == ["model.optimizer.lr"]
    assert not adamw.is_at_edge
    assert not muon.is_at_edge
    assert [step for step, _ in adamw.best.curve] == [1, 2]  # not before training


def test_the_groups_are_ordered_whatever_the_order_of_runs(runs: list[TrainRun]) -> None:
    assert [group.name for group in groups_of(runs[::-1], BY)] == ["Muon", "AdamW"]


def test_the_table(runs: list[TrainRun]) -> None:
    rows = {row["run"]: row for row in compare_groups(runs, BY).lines}
    assert list(rows) == [*(f"muon_{lr}" for lr in (0.1, 0.2, 0.4)), *list(rows)[3:]]
    assert rows["adamw_0.4"] == {
        "group": "AdamW",
        "run": "adamw_0.4",
        "settings": "lr=0.4",
        "final bits/byte": "2.4000",
        "best bits/byte": "2.0000",
        "tokens/s": "1001",
        "MiB/process": "321",
        "result": "",
    }
    best = [name for name, row in rows.items() if row["result"] == "best"]
    assert best == ["muon_0.2", "adamw_0.2"]


def test_the_verdict(runs: list[TrainRun]) -> None:
    assert compare_groups(runs, BY).verdict == (
        "Muon is better after 3 steps and 1,536 tokens: Muon 2.1000 bits per byte (lr=0.2, best of 3). AdamW "
        "2.2000 bits per byte (lr=0.2, best of 3), 0.1000 (4.8%) more; Muon was there by step 3. "
        "None was repeated with another seed."
    )


def test_when_the_better_one_was_where_the_other_ended(tmp_path: Path) -> None:
    runs = read_runs(
        [made(tmp_path / "a", "adamw", 0.1, 2.6, 2.2), made(tmp_path / "b", "muon", 0.1, 2.2, 2.0)]
    )
    said = compare_groups(runs, BY).verdict
    assert "0.2000 (10.0%) more; Muon was there by step 2." in said
    assert said.endswith(
        "Muon was not tuned. AdamW was not tuned. None was repeated with another seed."
    )


def test_equal_ends_have_no_winner(tmp_path: Path) -> None:
    runs = read_runs([made(tmp_path / name, name, 0.1, 2.2) for name in ("adamw", "muon")])
    said = compare_groups(runs, BY).verdict
    assert said.startswith("None is better after 3 steps")
    assert " more;" not in said


@pytest.mark.parametrize("lr", [0.1, 0.4])
def test_a_best_run_at_the_edge_of_its_sweep_is_told(runs: list[TrainRun], lr: float) -> None:
    kept = [run for run in runs if not run.name.startswith("muon")]
    muon = [run for run in runs if run.name in {"muon_0.2", f"muon_{lr}"}]
    said = compare_groups([*kept, *muon], BY).verdict
    assert "Muon may reach less: its best is at an edge of what was swept." in said
    assert "AdamW may" not in said
    assert "The groups were not swept over the same values." in said


def test_other_settings_that_groups_differ_in_are_told(
    tmp_path: Path, runs: list[TrainRun]
) -> None:
    assert "They also differ" not in compare_groups(runs, BY).verdict  # nesterov is Muon's alone
    other = made(tmp_path / "other" / "x", "muon", 0.2, 2.0, 1.9, heads=9, devices=2)
    runs = read_runs([*(run.folder for run in runs if run.name.startswith("adamw")), other])
    assert compare_groups(runs, BY).verdict.endswith("They also differ in model.heads.")


def test_any_setting_may_be_asked_about(runs: list[TrainRun]) -> None:
    first, *_ = groups = groups_of(runs, "model.optimizer.lr")
    assert [group.name for group in groups] == ["0.2", "0.4", "0.1"]
    assert [run.name for run in first.best.runs] == ["muon_0.2"]
    assert first.swept == [BY, "model.optimizer.nesterov"]
    assert not first.is_at_edge


ENDS_BY_SEED = {
    "adamw_0.1": (2.5, 2.3),
    "adamw_0.2": (2.0, 2.9),  # the luckiest run is not of the best rate
    "muon_0.1": (2.3, 2.2),
    "muon_0.2": (2.4, 2.2),
}


@pytest.fixture
def seeds(tmp_path: Path) -> dict[str, Path]:
    """Two rates for each optimizer, two seeds for each rate."""
    return {
        f"{name}_{seed}": made(
            tmp_path / f"{name}_{seed}", name, float(name[-3:]), 2.6 + seed, bits, seed=seed
        )
        for name, both in ENDS_BY_SEED.items()
        for seed, bits in enumerate(both)
    }


def read(seeds: dict[str, Path], *names: str) -> list[TrainRun]:
    return read_runs([seeds[name] for name in names or seeds])


def test_seeds_are_repetitions_and_count_by_their_mean(seeds: dict[str, Path]) -> None:
    muon, adamw = groups_of(read(seeds), BY)
    assert [run.name for run in muon.best.runs] == ["muon_0.1_0", "muon_0.1_1"]
    assert [run.name for run in adamw.best.runs] == ["adamw_0.1_0", "adamw_0.1_1"]
    assert muon.swept == adamw.swept == ["model.optimizer.lr"]
    assert (muon.bits, adamw.bits) == pytest.approx((2.25, 2.4))
    assert muon.best.deviation == pytest.approx(0.05 * math.sqrt(2))
    assert muon.best.curve == [(1, pytest.approx(3.1)), (2, pytest.approx(2.25))]
    answer = compare_groups(read(seeds), BY)
    assert answer.verdict == (
        "Muon is better after 3 steps and 1,536 tokens: Muon 2.2500 ± 0.0707 bits per byte (lr=0.1, best of "
        "2, mean of 2 seeds). AdamW 2.4000 ± 0.1414 bits per byte (lr=0.1, best of 2, mean of 2 seeds), "
        "0.1500 (6.7%) more; Muon was there by step 3. Muon may reach less: its best is at an edge of what "
        "was swept. AdamW may reach less: its best is at an edge of what was swept."
    )
    lines = [(line["settings"], line["result"]) for line in answer.lines]
    assert lines[:3] == [
        ("lr=0.1 seed=0", "best"),
        ("lr=0.1 seed=1", "best"),
        ("lr=0.2 seed=0", ""),
    ]


def test_a_seed_on_which_the_other_one_is_better_is_told(tmp_path: Path) -> None:
    ends = {("adamw", 0): 2.4, ("adamw", 1): 2.2, ("muon", 0): 2.0, ("muon", 1): 2.3}
    runs = [
        made(tmp_path / f"{name}{seed}", name, 0.1, bits, seed=seed)
        for (name, seed), bits in ends.items()
    ]
    said = compare_groups(read_runs(runs), BY).verdict
    assert said.startswith("Muon is better")
    assert said.endswith("Of seed 1 AdamW is as good or better: it may be chance.")


@pytest.mark.nightly
def test_seeds_that_some_lack_are_left_out(seeds: dict[str, Path]) -> None:
    """One run failed: its rate has the easy seed alone, and must not win by it."""
    names = [name for name in seeds if name != "adamw_0.2_1"]
    answer = compare_groups(read(seeds, *names), BY)
    assert "Left out, as not all were run with it: seed 1." in answer.verdict
    assert "None was repeated with another seed." in answer.verdict
    assert answer.verdict.startswith("AdamW is better")  # of seed 0
    left = [line["run"] for line in answer.lines if line["result"] == "left out"]
    assert left == ["adamw_0.1_1", "muon_0.1_1", "muon_0.2_1"]
    assert len(answer.lines) == len(names)
    answer.draw(seeds["muon_0.1_0"] / "picture.png")


def test_groups_of_other_seeds(seeds: dict[str, Path]) -> None:
    said = compare_groups(read(seeds, "adamw_0.1_0", "muon_0.1_1"), BY).verdict
    assert said.endswith("They also differ in seed.")


def test_a_run_that_is_given_twice(tmp_path: Path, seeds: dict[str, Path]) -> None:
    again = made(tmp_path / "again", "muon", 0.1, 2.6, 2.3, seed=0)
    with pytest.raises(
        ConfigError, match=r"muon_0\.1_0 and again have the same settings and the same"
    ):
        compare_groups(read_runs([*seeds.values(), again]), BY)


def test_seeds_may_be_asked_about(seeds: dict[str, Path]) -> None:
    answer = compare_groups(read(seeds), "seed")
    assert [line["group"] for line in answer.lines] == ["0"] * 4 + ["1"] * 4
    assert "seed=" not in answer.lines[0]["settings"]
    assert "repeated" not in answer.verdict


def test_classes_of_one_name_keep_their_modules(tmp_path: Path) -> None:
    own = {"_target_": "torch.optim.Muon"}
    folders = [
        made(tmp_path / "a", "muon", 0.1, 2.0),
        made(tmp_path / "b", "muon", 0.1, 2.1, own=own),
    ]
    assert [group.name for group in groups_of(read_runs(folders), BY)] == [MUON, "torch.optim.Muon"]


def test_a_setting_that_is_none(runs: list[TrainRun]) -> None:
    match = r"by=model.optimizer.target is not a setting of adamw_0.1. .*: model.optimizer._target_"
    with pytest.raises(ConfigError, match=match):
        groups_of(runs, "model.optimizer.target")
    match = "by=model.optimizer.nesterov is not a setting of adamw_0.1"
    with pytest.raises(ConfigError, match=match):
        groups_of(runs, "model.optimizer.nesterov")


def test_a_setting_with_one_value(runs: list[TrainRun]) -> None:
    with pytest.raises(ConfigError, match=r"model\.heads is 8 in every run, so none can be better"):
        groups_of(runs, "model.heads")


def test_other_tokens_or_steps(tmp_path: Path) -> None:
    one = made(tmp_path / "one", "adamw", 0.1, 2.0)
    more = made(tmp_path / "more", "muon", 0.1, 1.9, tokens=1024)
    match = "more had trained on 1024 tokens at step 0, one on 512: what they cost to train is different"
    with pytest.raises(ConfigError, match=match):
        groups_of(read_runs([one, more]), BY)
    short = made(tmp_path / "short", "muon", 0.1, 1.9, losses=(5.0, 4.0))
    match = "short and one have train/loss at different steps: 2 from 0 to 1, and 3 from 0 to 2"
    with pytest.raises(ConfigError, match=match):
        groups_of(read_runs([one, short]), BY)
    seldom = made(tmp_path / "seldom", "muon", 0.1, 1.9, 1.8)
    with pytest.raises(ConfigError, match="seldom and one have val/loss at different steps"):
        groups_of(read_runs([one, seldom]), BY)


@pytest.mark.nightly
def test_what_is_printed_and_written(tmp_path: Path, runs: list[TrainRun]) -> None:
    named = ",".join(str(run.folder) for run in runs)
    done = command(tmp_path, f"runs=[{named}]", f"by={BY}")
    assert done.returncode == 0, done.stderr
    assert "Muon is better after 3 steps" in done.stdout
    with (tmp_path / "out" / "comparison.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == list(COLUMNS)
    assert [row["run"] for row in rows if row["result"] == "best"] == ["muon_0.2", "adamw_0.2"]
    ends = {run.name: final_bits(run) for run in runs}
    for row in rows:
        assert float(row["final bits/byte"]) == pytest.approx(ends[row["run"]], abs=5e-5)
    lines = (tmp_path / "out" / "losses.csv").read_text().splitlines()
    assert lines[0] == "loss,step,tokens," + ",".join(run.name for run in runs)
    assert len(lines) == 1 + 3 + 3
    assert (tmp_path / "out" / "comparison.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.nightly
def test_the_two_questions_are_kept_apart(tmp_path: Path, runs: list[TrainRun]) -> None:
    named = ",".join(str(run.folder) for run in runs)
    for other in ("baseline=adamw_0.1", "tolerance=0.01"):
        done = command(tmp_path, f"runs=[{named}]", f"by={BY}", other)
        assert done.returncode == 1
        assert f"\nConfigError: by={BY} asks which of its values is better" in done.stderr


@pytest.mark.nightly
@pytest.mark.parametrize("heads", [(8, 8), (8, 9)], ids=["one run each", "two settings swept"])
def test_a_picture_without_one_number_that_was_swept(
    tmp_path: Path, heads: tuple[int, int]
) -> None:
    folders = [made(tmp_path / name, name, 0.1, 2.0) for name in ("adamw", "muon")]
    if heads[1] != heads[0]:
        folders.append(made(tmp_path / "muon_9", "muon", 0.2, 2.1, heads=heads[1]))
    answer = compare_groups(read_runs(folders), BY)
    answer.draw(tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")

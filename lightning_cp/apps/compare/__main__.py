"""Hydra entry point: read the runs, or make each in a new program; compare them, write the result."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from hydra_plugins.lightning_cp.command import quoted
from lightning_cp.apps.compare.agreement import compare_with_baselines
from lightning_cp.apps.compare.groups import compare_groups
from lightning_cp.apps.compare.runs import (
    ComparisonResult,
    TrainRun,
    find_runs,
    read_runs,
    write_losses,
)
from lightning_cp.errors import ConfigError
from lightning_cp.utils.command_help import explain_keys
from lightning_cp.utils.run_folder import config_dir
from lightning_cp.utils.subprocess import describe_status, run_job

OUTPUT = "output.txt"
LAST_LINES = 15
SEED = "seed="

INTERRUPTED = 130  # what a shell reports for Ctrl-C


def make_runs(
    overrides: Sequence[str], runs: Mapping[str, Sequence[str]], folder: Path
) -> tuple[list[Path], list[str]]:
    """Run the main job once for each name, in sequence; a failed run does not stop the next.

    Args:
        overrides: the overrides of all runs.
        runs: name -> its own overrides, which take precedence.
        folder: each run gets a subfolder of its name, with its output in ``output.txt``.

    Returns:
        The folders of the runs that finished, and the names of those that failed.

    Raises:
        ConfigError: names that cannot be folder names, or no runs.
    """
    if not runs or any(name != Path(name).name for name in runs):
        raise ConfigError(
            f"train.runs must map names to lists of overrides, and a run's folder is named like it; got "
            f"{list(runs)}. "
            "Write train.runs={a: [mode=ring], b: [mode=ulysses]}."
        )
    made, failed = [], []
    width = max(map(len, runs))
    for number, (name, own) in enumerate(runs.items(), 1):
        print(f"[{number}/{len(runs)}] {name:<{width}}  {' '.join(own)} ... ", end="", flush=True)
        began = time.monotonic()
        status = _train([*overrides, *own], folder / name)
        print(f"{describe_status(status)}, " if status else "", end="")
        print(f"{time.monotonic() - began:.0f} s", flush=True)
        if status:
            failed.append(name)
            print(_last_lines(folder / name / OUTPUT), flush=True)
        else:
            made.append(folder / name)
    return made, failed


def repeat_for_seeds(
    overrides: Sequence[str], runs: Mapping[str, Sequence[str]], seeds: object
) -> dict[str, list[str]]:
    """Repeat each run for each seed, named ``<name>_seed<seed>``.

    Raises:
        ConfigError: seeds that are not a list of different integers, or runs that already set a seed.
    """
    if not isinstance(seeds, list) or not seeds or any(type(seed) is not int for seed in seeds):
        raise ConfigError(
            f"train.seeds must be whole numbers, as [0,1,2]; got {seeds}. "
            "Write each seed as an integer."
        )
    if len(set(seeds)) < len(seeds):
        raise ConfigError(f"train.seeds has one twice: {seeds}. Name each seed once.")
    every = {"train.overrides": overrides, **runs}
    own = [name for name, of in every.items() if any(each.startswith(SEED) for each in of)]
    if own:
        raise ConfigError(
            f"train.seeds={seeds} goes over the seed that {', '.join(own)} has already. "
            "Leave the seed out of these runs, or leave out train.seeds."
        )
    return {
        f"{name}_seed{seed}": [*of, f"{SEED}{seed}"] for name, of in runs.items() for seed in seeds
    }


def _train(overrides: Sequence[str], folder: Path) -> int:
    place = f"hydra.run.dir={quoted(str(folder.absolute()))}"
    command = [sys.executable, "-m", "lightning_cp.train", *overrides, "hydra.mode=RUN", place]
    return run_job(command, output=folder / OUTPUT)


def _last_lines(file: Path) -> str:
    lines = file.read_text(errors="replace").splitlines()[-LAST_LINES:]
    return "\n".join(["", *(f"    {line}" for line in lines), f"    (all of it: {file})", ""])


def compare(config: DictConfig, folder: Path) -> bool:
    """Compare the configured runs.

    Args:
        config: see ``configs/compare/compare.yaml``.
        folder: receives ``comparison.csv``, ``losses.csv`` and ``comparison.png``.

    Returns:
        True if every run was made, and is within the tolerance if there is one.

    Raises:
        ConfigError: runs that are missing or cannot be compared.
    """
    folders, failed = _folders(config, folder)
    runs = read_runs(folders)
    answer = _answer(config, runs)

    answer.write_table(folder / "comparison.csv")
    write_losses(runs, folder / "losses.csv")
    answer.draw(folder / "comparison.png")
    print(f"\n{answer.table()}\n\n{answer.verdict}")
    if failed:
        print(f"FAIL: {len(failed)} runs did not come to their end: {', '.join(failed)}.")
    for name in ("comparison.csv", "losses.csv", "comparison.png"):
        print(f"  {folder / name}")
    return not failed and answer.passed


def _answer(config: DictConfig, runs: list[TrainRun]) -> ComparisonResult:
    if config.by is None:
        return compare_with_baselines(runs, _baselines(config.baseline), config.tolerance)
    if config.baseline is not None or config.tolerance != "auto":
        raise ConfigError(
            f"by={config.by} asks which of its values is better; baseline= and tolerance= are for runs that "
            "should agree. Leave one or the other."
        )
    return compare_groups(runs, str(config.by))


def _folders(config: DictConfig, folder: Path) -> tuple[list[Path], list[str]]:
    """Return the folders of the runs to compare, and the names of those that failed."""
    given = [name for name in ("runs", "sweep", "train") if config[name]]
    if len(given) != 1:
        raise ConfigError(
            f"one of runs=[folder,folder], sweep=folder and experiment=... (train=...) says what to "
            f"compare; got {' and '.join(given) or 'none'}."
        )
    if config.sweep:
        return find_runs(config.sweep), []
    if config.runs:
        return [Path(run) for run in config.runs], []
    train: Any = OmegaConf.to_container(config.train)
    overrides, given = train.get("overrides") or [], train.get("runs")
    runs = {str(k): of for k, of in given.items()} if isinstance(given, dict) else {}
    if train.get("seeds") is not None:
        runs = repeat_for_seeds(overrides, runs, train["seeds"])
    made, failed = make_runs(overrides, runs, folder / "runs")
    if len(made) < 2:
        raise ConfigError(
            f"there is nothing to compare: {', '.join(failed)} failed, as shown above. "
            "Correct these runs, and start again."
        )
    return made, failed


def _baselines(asked: object) -> list[str]:
    if asked is None:
        return []
    return [str(asked)] if isinstance(asked, str | int) else [str(one) for one in asked]  # type: ignore[attr-defined]


@hydra.main(version_base="1.3", config_path=str(config_dir() / "compare"), config_name="compare")
def main(config: DictConfig) -> None:
    """Compare, and exit with status 1 unless everything agrees."""
    try:
        agreed = compare(config, Path(HydraConfig.get().runtime.output_dir))
    except KeyboardInterrupt:
        print("\nInterrupted; the runs that were made so far are kept.", file=sys.stderr)
        raise SystemExit(INTERRUPTED) from None
    if not agreed:
        raise SystemExit(1)


if __name__ == "__main__":
    explain_keys()
    main()

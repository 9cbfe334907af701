"""Hydra entry point: read or make the runs, compare them, print and write the result."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from lightning_cp.apps.compare.agreement import compare_with_baselines
from lightning_cp.apps.compare.groups_report import compare_groups
from lightning_cp.apps.compare.matrix import make_runs, repeat_for_seeds
from lightning_cp.apps.compare.report import ComparisonResult, write_losses
from lightning_cp.apps.compare.runs import TrainRun, find_runs, read_runs
from lightning_cp.errors import ConfigError
from lightning_cp.utils.command_help import explain_keys
from lightning_cp.utils.run_folder import config_dir

INTERRUPTED = 130  # what a shell reports for Ctrl-C


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
            "Mend these runs, and start again."
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

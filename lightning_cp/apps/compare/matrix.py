"""Runs that are made for a comparison, each in a new program."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from hydra_plugins.lightning_cp.command import quoted
from lightning_cp.errors import ConfigError
from lightning_cp.utils.subprocess import describe_status, run_job

OUTPUT = "output.txt"
LAST_LINES = 15
SEED = "seed="


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

"""What is said of groups of runs of which one is better."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from lightning_cp.compare.answer import Answer, costs
from lightning_cp.compare.contest import Group, common_seeds, described, groups_of, unequal
from lightning_cp.compare.contest_picture import draw
from lightning_cp.compare.runs import Run
from lightning_cp.compare.trial import (
    SEED,
    VALIDATION,
    Trial,
    bits_at,
    final_bits,
    seed_of,
)

COLUMNS: tuple[str, ...] = (
    "group",
    "run",
    "settings",
    "final bits/byte",
    "best bits/byte",
    "tokens/s",
    "MiB/process",
    "result",
)


def contest(runs: Sequence[Run], by: str) -> Answer:
    """Which of a setting's values is better: each is as good as its best trial.

    Args:
        runs: all of them.
        by: the setting's dotted name.

    Raises:
        ConfigError: runs that cannot be compared.
    """
    groups = groups_of(runs, by)
    return Answer(
        columns=COLUMNS,
        lines=[
            _row(group, trial, run)
            for group in groups
            for trial in (*group.trials, None)
            for run in (trial.runs if trial else group.left_out)
        ],
        of_words={"group", "run", "settings", "result"},
        verdict=" ".join([verdict(groups), *doubts(groups, by)]),
        passed=True,
        draw=partial(draw, groups),
    )


def _row(group: Group, trial: Trial | None, run: Run) -> dict[str, str]:
    is_repeated = trial is None or len(trial.runs) > 1
    chance = f"{SEED}={seed_of(run)}" if is_repeated else ""
    settings = f"{described(group, run)} {chance}".strip()
    told = {"group": group.name, "run": run.name, "settings": settings}
    told["final bits/byte"] = f"{final_bits(run):.4f}"
    told["best bits/byte"] = f"{min(bits for _, bits in bits_at(run)):.4f}"
    told["result"] = "left out" if trial is None else "best" if trial is group.best else ""
    return dict.fromkeys(COLUMNS, "") | costs(run) | told


def verdict(groups: Sequence[Group]) -> str:
    """The outcome in sentences.

    Args:
        groups: best first.
    """
    first, *others = groups
    end = first.best.runs[0].curves[VALIDATION]
    outcome = f"{first.name} is better" if first.bits < others[0].bits else "None is better"
    after = f"after {end.steps[-1] + 1} steps and {end.tokens[-1]:,.0f} tokens"
    places = [f"{_place(group)}{_behind(first, group)}." for group in others]
    return " ".join([f"{outcome} {after}: {_place(first)}.", *places])


def doubts(groups: Sequence[Group], by: str) -> list[str]:
    """Sentences on what the outcome may owe to something else."""
    said = [
        f"{group.name} may reach less: its best is at an edge of what was swept."
        for group in groups
        if group.is_at_edge
    ]
    said += [f"{group.name} was not tuned." for group in groups if len(group.trials) == 1]
    if len({_values(group) for group in groups}) > 1:
        said.append("The groups were not swept over the same values.")
    said += _chance(groups) if by != SEED else []
    if other := unequal(groups, by):
        said.append(f"They also differ in {', '.join(other)}.")
    return said


def _chance(groups: Sequence[Group]) -> list[str]:
    """What is known of how much seeds matter."""
    seeds = sorted(common_seeds(groups), key=str)
    if not seeds:
        return [f"They also differ in {SEED}."]
    left = dict.fromkeys(str(seed_of(run)) for group in groups for run in group.left_out)
    said = [f"Left out, as not all were run with it: {SEED} {', '.join(left)}."] if left else []
    if len(seeds) == 1:
        return [*said, "None was repeated with another seed."]
    first, second = groups[:2]
    pairs = {seed: (first.best.of_seed[seed], second.best.of_seed[seed]) for seed in seeds}
    luck = [str(seed) for seed, (a, b) in pairs.items() if final_bits(a) >= final_bits(b)]
    if luck:
        said.append(
            f"Of {SEED} {', '.join(luck)} {second.name} is as good or better: it may be chance."
        )
    return said


def _place(group: Group) -> str:
    best = group.best
    own = described(group, best)
    notes = [own, f"best of {len(group.trials)}"] if own else []
    notes += [f"mean of {len(best.of_seed)} seeds"] if best.deviation is not None else []
    spread = "" if best.deviation is None else f" ± {best.deviation:.4f}"
    told = f" ({', '.join(notes)})" if notes else ""
    return f"{group.name} {group.bits:.4f}{spread} bits per byte{told}"


def _behind(first: Group, group: Group) -> str:
    """By how much, and when the first one was there."""
    if first.bits == group.bits:
        return ""
    more = group.bits - first.bits
    step = next(step for step, bits in first.best.curve if bits <= group.bits)
    return f", {more:.4f} ({more / first.bits:.1%}) more; {first.name} was there by step {step + 1}"


def _values(group: Group) -> frozenset[str]:
    return frozenset(described(group, trial) for trial in group.trials)

"""``python -m tests.nightly.mutants``: apply seeded mutants, one at a time, and report which are killed."""

from __future__ import annotations

import argparse
import sys
import time

from tests.nightly.mutants.run import judge
from tests.nightly.mutants.table import MUTANTS, sample, seed_of_today


def main() -> int:
    """0 if every mutant asked for was killed."""
    parser = argparse.ArgumentParser(prog="python -m tests.nightly.mutants", description=__doc__)
    parser.add_argument("names", nargs="*", help="mutants to apply; all by default")
    parser.add_argument("--sample", type=int, help="apply only so many of them")
    parser.add_argument("--seed", default=seed_of_today(), help="of the sample; today's date")
    parser.add_argument("--list", action="store_true", help="say what there is, and why")
    asked = parser.parse_args()
    if unknown := sorted(set(asked.names) - set(MUTANTS)):
        parser.error(f"no such mutant: {', '.join(map(repr, unknown))}. --list names them.")
    chosen = [MUTANTS[name] for name in asked.names or MUTANTS]
    if asked.list:
        for mutant in chosen:
            print(f"{mutant.name} ({mutant.file})\n    {mutant.why}")
        return 0
    if asked.sample is not None:
        print(f"seed {asked.seed}")
        chosen = sample(chosen, asked.sample, asked.seed)
    survivors, began = 0, time.monotonic()
    for verdict in judge(chosen):
        seconds, began = time.monotonic() - began, time.monotonic()
        print(f"{verdict.outcome:8} {verdict.mutant.name} ({seconds:.1f} s)", flush=True)
        if verdict.outcome != "killed":
            survivors += 1
            print("    " + "\n    ".join(verdict.details.splitlines()[-40:]))
    print(f"{len(chosen) - survivors} of {len(chosen)} mutants killed")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())

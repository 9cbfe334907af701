"""Verify a checkpoint, or write it in the other form: one file, or a folder of shards.

    python -m lightning_cp.checkpoint last.ckpt --verify
    python -m lightning_cp.checkpoint last.ckpt sharded.ckpt --sharded

The exit status is 1 if the checkpoint is refused or cannot be written.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from lightning_cp.checkpoint.convert import convert, describe
from lightning_cp.comm.objects import told
from lightning_cp.command_help import argument_parser
from lightning_cp.errors import CheckpointError


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 1 if the checkpoint is refused or cannot be written, which one line says."""
    parser = argument_parser(__doc__)
    parser.add_argument("source", type=Path, help="a checkpoint: a file or a folder")
    parser.add_argument("target", type=Path, nargs="?", help="the new checkpoint")
    parser.add_argument("--sharded", action="store_true", help="a folder instead of one file")
    parser.add_argument("--verify", action="store_true", help="verify and describe only")
    given = parser.parse_args(arguments)
    if given.verify == (given.target is not None):
        parser.error("give a target to be written, or --verify")
    try:
        if given.target is not None:
            convert(given.source, given.target, form="sharded" if given.sharded else "full")
        print(describe(given.target or given.source))
    except CheckpointError as refused:
        print(f"error: {refused}", file=sys.stderr)
        return 1
    except OSError as failed:
        print(f"error: {told(failed)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The note that a rank which saves in the background leaves for the first one, which waits for it."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning_cp.checkpoint.durable import discard, leave_note


def leave_failure(note: Path, why: str, part: Path) -> bool:
    """Tell the first rank of an error, on a disk that may be full; whether it still waits for that.

    Args:
        note: where it looks.
        why: the error.
        part: what was written so far, which goes first, to make room.
    """
    discard(part)
    try:
        leave_note(note, json.dumps({"failed": why}))
        return True
    except OSError:
        with suppress(OSError):
            note.touch()  # an empty one needs no room
        return note.parent.is_dir()


def read_note(note: Path) -> dict[str, Any]:
    """Its text; ``failed`` if there was no room to say why."""
    return json.loads(note.read_text() or '{"failed": "its part could not be written"}')

"""What the package says in its log."""

from __future__ import annotations

import logging


class Heard(logging.Handler):
    """What the package says, on this rank."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []
        names = ("lightning_cp", "lightning.fabric.utilities.rank_zero")
        names = (*names, "lightning.pytorch.utilities.rank_zero")
        self._logs = [logging.getLogger(name) for name in names]

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def __enter__(self) -> Heard:
        self._levels = [log.level for log in self._logs]
        for log in self._logs:
            log.addHandler(self)
            log.setLevel(logging.INFO)
        return self

    def __exit__(self, *_: object) -> None:
        for log, level in zip(self._logs, self._levels, strict=True):
            log.removeHandler(self)
            log.setLevel(level)

    @property
    def parity(self) -> list[str]:
        """What was found."""
        return [line for line in self.lines if line.startswith("parity") and line not in self.begun]

    @property
    def begun(self) -> list[str]:
        return [line for line in self.lines if line.startswith("parity: comparing")]

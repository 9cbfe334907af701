"""The package's errors. Each message says what was asked, what was found and what works."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, ClassVar, cast

from lightning_cp import error_display


class LightningCPError(Exception):
    """Base of this package's errors; if uncaught, one rank shows it (``error_display``)."""

    is_own: ClassVar[bool] = True
    """True if this rank failed itself; False for a report of another rank's error."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        error_display.install(LightningCPError)


class ConfigError(LightningCPError, ValueError):
    """A setting, or a combination of settings, that cannot be executed."""


class UndeclaredError(ConfigError):
    """Everything that a run would have to guess, and the strategy's arguments that declare it.

    Args:
        questions: one or more sentences each, the problem first.
        arguments: by name, with the values that look right.
    """

    def __init__(self, questions: Sequence[str], arguments: Mapping[str, Any]) -> None:
        self.questions, self.arguments = list(questions), dict(arguments)
        lines = list(self.questions)
        if len(lines) > 1:
            lines = [f"{len(lines)} things are not declared:", *(f"- {line}" for line in lines)]
        if arguments:
            given = ", ".join(f"{name}={_quoted(value)}" for name, value in self.arguments.items())
            lines += [
                "All of it at once, with values that look right; change those that are not:",
                f"  UlyssesRingStrategy({given})",
                "In YAML (Hydra: strategy; LightningCLI: trainer.strategy.init_args):",
                f"  {json.dumps(self.arguments, default=_quoted)}",
            ]
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.questions, self.arguments)


def _quoted(value: Any) -> str:
    """Return a value as Python code, with text in double quotes."""
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, Mapping):
        items = cast(Mapping[Any, Any], value).items()
        inside = ", ".join(f"{_quoted(key)}: {_quoted(item)}" for key, item in items)
        return f"{{{inside}}}"
    return "..." if value is ... else repr(value)


class ShapeError(LightningCPError, ValueError):
    """A tensor or a sequence whose size, dtype or device does not fit."""


class BatchMismatchError(LightningCPError, RuntimeError):
    """The ranks of one context-parallel group were given different batches."""


class ParityError(LightningCPError, RuntimeError):
    """A model whose results on ranks that share its sequences differ from those of one process."""


class NonFiniteError(LightningCPError, ArithmeticError):
    """A loss or a gradient that is NaN or infinite where it must not be."""


class RankFailure(LightningCPError, RuntimeError):  # noqa: N818 - the public name says what happened
    """Another rank failed; the message carries that rank's own error."""

    is_own = False


class CheckpointError(LightningCPError, RuntimeError):
    """A checkpoint that is missing, incomplete, damaged or belongs to something else."""


class MissingCheckpointError(CheckpointError, FileNotFoundError):
    """A path without a checkpoint."""


def advise_choice(value: object, known: Collection[str]) -> str:
    """Return what to do about an unknown name: take the nearest of the known ones, or choose one."""
    near = nearest_name(value, known)
    return f"Did you mean {near!r}?" if near else "Choose one of these."


def nearest_name(value: object, known: Collection[str]) -> str:
    """Return the known name that is most like another one; an empty text if none is."""
    return next(iter(get_close_matches(str(value), known, n=1)), "")


def without_home(text: str) -> str:
    """Replace the home directory by ``~`` in a text for other ranks or a report."""
    try:
        home = Path.home()
    except RuntimeError:  # no home directory
        return text
    return text if len(home.parts) < 2 else text.replace(str(home), "~")

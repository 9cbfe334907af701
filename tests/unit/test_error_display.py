"""Frames of errors that the package shows."""

from __future__ import annotations

import pytest

from lightning_cp import error_display
from lightning_cp.errors import ConfigError


def step_of_the_user() -> None:
    raise TypeError("no network")


def test_the_line_that_caused_an_error_is_shown() -> None:
    """A check that runs the user's step raises its own error from that of the step."""

    def check() -> None:
        try:
            step_of_the_user()
        except TypeError as failed:
            raise ConfigError("the step failed. Correct it.") from failed

    with pytest.raises(ConfigError) as caught:
        check()
    text = error_display.text_of(caught.value)
    assert 'raise TypeError("no network")' in text
    assert text.index("in check") < text.index("in step_of_the_user")
    assert text.endswith("ConfigError: the step failed. Correct it.")


def test_an_error_that_is_its_own_cause_is_shown_once() -> None:
    with pytest.raises(ConfigError) as caught:
        raise ConfigError("wrong. Correct it.")
    caught.value.__cause__ = caught.value
    assert error_display.user_frames(caught.value).count("Correct it") == 1

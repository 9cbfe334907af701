"""Warnings of other libraries are shown by the first rank; those that a rank alone may have, by that rank."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
from typing_extensions import deprecated

from lightning_cp import error_display
from lightning_cp.launch.library_warnings import LibraryWarnings


def module(name: str, path: str = "") -> Any:
    """A module of that name which warns, at its own line or at its caller's."""
    made = ModuleType(name)
    code = "import warnings\ndef warn(text, level=1, **k): warnings.warn(text, stacklevel=level, **k)\n"
    exec(compile(code, path or f"/site-packages/{name}.py", "exec"), made.__dict__)
    return made


@pytest.fixture
def printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[[], str]]:
    """What has reached the terminal, with Python's own way of showing warnings: pytest has another."""
    monkeypatch.delenv(error_display.FULL, raising=False)
    monkeypatch.setattr(error_display, "_asked_hydra", False)
    with warnings.catch_warnings():
        warnings.simplefilter("always")

        def show(said: Any) -> None:
            text = warnings.formatwarning(said.message, said.category, said.filename, said.lineno)
            sys.stderr.write(text)

        monkeypatch.setattr(warnings, "_showwarnmsg_impl", show)
        yield lambda: capsys.readouterr().err


@pytest.fixture
def hidden(printed: Callable[[], str]) -> Iterator[LibraryWarnings]:
    before = warnings.showwarning
    run = LibraryWarnings()
    run.hide()
    yield run
    run.show()
    assert warnings.showwarning is before


@pytest.mark.parametrize(
    "library", ["torch.utils.data", "lightning.pytorch", "transformers.models"]
)
def test_a_library_s_are_left_out(
    library: str, printed: Callable[[], str], hidden: LibraryWarnings
) -> None:
    module(library).warn("at its own line")
    module(library).warn("at its caller's", level=2)
    assert printed() == ""
    hidden.show()
    module(library).warn("afterwards")
    assert "afterwards" in printed()


def test_those_of_pytorch_s_operators_are_left_out(
    printed: Callable[[], str], hidden: LibraryWarnings
) -> None:
    warnings.warn("beta (Triggered internally at /pytorch/aten/src/ATen/x.cpp:9.)", stacklevel=1)
    assert printed() == ""


@deprecated("use the other one")
def old() -> None:
    """A function of a user's."""


def test_those_of_users_and_of_this_package_are_shown(
    printed: Callable[[], str], hidden: LibraryWarnings
) -> None:
    warnings.warn("of " + "this file", stacklevel=1)
    old()
    module("my_project.torch", "/home/me/site-packages/my_project/torch.py").warn("of a package")
    module("lightning_cp.batch", f"{error_display._OWN_FOLDER}/batch/x.py").warn("of ours")
    said = printed()
    for text in ("of this file", "use the other one", "of a package", "of ours"):
        assert said.count(text) == 1, said


def test_a_filter_that_raises_raises(hidden: LibraryWarnings) -> None:
    warnings.simplefilter("error")
    with pytest.raises(UserWarning, match="of torch"):
        module("torch").warn("of torch")


def test_what_records_warnings_gets_all(
    printed: Callable[[], str], hidden: LibraryWarnings
) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module("torch").warn("inside")
        other = LibraryWarnings()
        other.hide()  # a run that begins there
        module("torch").warn("in a run")
        other.show()
    with pytest.warns(UserWarning, match="of pytest"):
        module("torch").warn("of pytest")
    assert [str(one.message) for one in caught] == ["inside", "in a run"]
    module("torch").warn("after it")
    assert printed() == ""


@pytest.mark.parametrize("first", [True, False])
def test_a_program_s_own_hook_gets_all(
    first: bool, printed: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    run = LibraryWarnings()
    if not first:
        run.hide()
    own = lambda message, *_: said.append(str(message))  # noqa: E731
    monkeypatch.setattr(warnings, "showwarning", own)
    if first:
        run.hide()
    module("torch").warn("to it")
    run.show()
    assert warnings.showwarning is own
    assert said == ["to it"]


def test_runs_that_end_in_any_order_leave_nothing(printed: Callable[[], str]) -> None:
    before = warnings.showwarning
    first, second = LibraryWarnings(), LibraryWarnings()
    first.hide()
    second.hide()
    first.show()
    module("torch").warn("hidden")
    second.show()
    assert warnings.showwarning is before
    module("torch").warn("shown")
    assert "hidden" not in (said := printed())
    assert "shown" in said


def test_all_are_shown_on_request(
    printed: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(error_display.FULL, "1")
    run, before = LibraryWarnings(), warnings.showwarning
    run.hide()
    assert warnings.showwarning is before
    run.show()


def test_of_loggers_warnings_alone_are_left_out(
    printed: Callable[[], str], caplog: pytest.LogCaptureFixture
) -> None:
    library, own = logging.getLogger("transformers.of_a_test"), logging.getLogger("lightning_cp")
    handler = logging.StreamHandler(sys.stderr)
    run = LibraryWarnings()
    for one in (library, own):
        one.addHandler(handler)
    try:
        run.hide()
        run.hide()
        library.warning("a warning of a library")
        library.error("an error of a library")
        own.warning("a warning of ours")
        assert "a warning of a library" in caplog.text  # a user's handler, which is no terminal
        run.show()
        assert not handler.filters
        library.warning("afterwards")
    finally:
        for one in (library, own):
            one.removeHandler(handler)
    said = printed()
    assert "a warning of a library" not in said
    for text in ("an error of a library", "a warning of ours", "afterwards"):
        assert said.count(text) == 1, said

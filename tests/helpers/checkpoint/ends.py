"""A program whose last save in the background fails, and that ends in the ways that it is told.

Each one in a process of its own, which goes on from here: what is written is in files of the way's name.
"""

from __future__ import annotations

import atexit
import gc
import io
import os
import sys
import time
from pathlib import Path
from typing import Any


def theirs(*_: Any) -> None:
    print("their handler begins", flush=True)
    print("their handler ends")


atexit.register(theirs)  # before anything of ours is known: called after it
atexit.register(print, "called by nobody in Python", flush=True)

import torch  # noqa: E402

from lightning_cp.checkpoint import full  # noqa: E402
from lightning_cp.checkpoint.save import BackgroundSave, plan_save  # noqa: E402


def fail(*_: Any) -> None:
    if "slow" in sys.argv:
        time.sleep(0.3)  # the program has ended by then
    raise OSError(28, os.strerror(28))


def main() -> None:
    gc.freeze()  # or each end would look through all of PyTorch
    for at in range(1, len(sys.argv)):
        if not os.fork():
            sys.argv = ["", *sys.argv[at].split(", ")]
            break
        print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
    else:
        os._exit(0)
    name = ", ".join(sys.argv[1:])
    for stream in (sys.stdout, sys.stderr):
        with Path(f"{name}{stream.name}").open("w") as file:
            os.dup2(file.fileno(), stream.fileno())
    full.write_file = fail
    saved = BackgroundSave(plan_save({"w": torch.ones(3)}, Path(name))[0])
    if "asks" in sys.argv:
        saved.wait()
        assert saved.error is not None
    end(sys.argv[1])


def end(how: str) -> None:
    if how.startswith("exit"):
        sys.exit(eval(how.removeprefix("exit ")))
    if how == "caught":
        try:
            sys.exit(3)
        except SystemExit:
            return
    if how == "error":
        raise ValueError("their error")
    if how == "closed":
        sys.stdout.close()
    if how == "no output":
        sys.stdout = None  # type: ignore[assignment]
    if how == "put back":
        own, sys.stdout = sys.stdout, io.StringIO()
        atexit.register(lambda: setattr(sys, "stdout", own))


if __name__ == "__main__":
    main()

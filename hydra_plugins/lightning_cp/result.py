"""Carries what a job returns back to the sweep. Imports neither torch nor lightning."""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback
from hydra.types import TaskFunction
from omegaconf import DictConfig

RESULT = "LIGHTNING_CP_RESULT"
"""Names the file to pickle the value into; set by the launcher."""


class KeepResult(Callback):
    """Pickles what the job's first process returns.

    Ranks that Lightning starts inherit the command line and the environment, and have this callback as well;
    so the first process takes the file's name out of the environment before they are started.
    """

    def __init__(self) -> None:
        self.file: str | None = None

    def on_job_start(
        self, config: DictConfig, *, task_function: TaskFunction, **kwargs: Any
    ) -> None:
        """Called before the job's function."""
        self.file = os.environ.pop(RESULT, None)

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        """Called after it, also when it raised; then there is no value."""
        if self.file is None or job_return.status != JobStatus.COMPLETED:
            return
        try:
            content = pickle.dumps(job_return.return_value)
        except Exception as error:
            print(
                f"The sweep gets None of this job: what it returned cannot be pickled ({error}). Return a "
                "number, or several in a tuple or dict.",
                file=sys.stderr,
            )
            return
        Path(self.file).write_bytes(content)

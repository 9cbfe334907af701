"""RunRecords: counters and recorders of a run's steps; a probe step has separate ones."""

from __future__ import annotations

from lightning_cp.layout import LayoutChoice
from lightning_cp.loss.accumulation import AccumulatedTokens
from lightning_cp.profile.recorder import StepRecorder

_VALUE_LOOKS = 8
"""Number of training batches whose logged values are compared with loss functions; in evaluation all."""
_LABEL_CHECKS = 3
"""Number of batches to search for shifted labels, until one shows whether its dataset shifts them."""


class RunRecords:
    """Counters and recorders of steps.

    Args:
        recorder: recorder of profiled steps.
        accumulated: targets of an accumulation window, if all of them have equal weights.
        is_probe: the steps are not steps of the run: they count, record and print nothing.
    """

    def __init__(
        self,
        recorder: StepRecorder,
        accumulated: AccumulatedTokens | None = None,
        *,
        is_probe: bool = False,
    ) -> None:
        self.recorder, self.accumulated, self.is_probe = recorder, accumulated, is_probe
        self.batches = 0
        """Number of sharded batches."""
        self.positions_taken = False
        """True if a step read the positions of its tokens, or the warning about it was shown."""
        self.layout_choice: LayoutChoice | None = None
        """The choice of the current batch's layout, with ``layout="auto"``."""
        self.label_checks_left = _LABEL_CHECKS
        self._value_looks = _VALUE_LOOKS

    def looks_at_values(self, *, trains: bool) -> bool:
        """Return True if the logged values of the step that begins are compared with its losses."""
        looks = bool(self._value_looks) or not trains
        self._value_looks -= bool(trains and self._value_looks and not self.is_probe)
        return looks

    def for_probe(self) -> RunRecords:
        """Return the records of a probe step."""
        probe = RunRecords(StepRecorder((), self.recorder.folder), is_probe=True)
        probe._value_looks = self._value_looks
        return probe

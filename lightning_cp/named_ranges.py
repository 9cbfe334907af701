"""Named ranges: what a profiler shows of attention besides operators.

Whoever profiles sees them, be it the strategy's ``profile=``, Lightning's PyTorchProfiler or a
``torch.profiler`` of one's own. When nobody does, a range costs about 0.2 us and formats nothing.

Communication is asynchronous, so that one range cannot show it: there is one of *posting* and one of
*waiting*, and data is in flight from the one to the end of the other. What has one name is waited for in
the order in which it was posted; the profile view relies on that.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch.autograd.profiler as profiler
from torch._C._profiler import _RecordFunctionFast

PREFIX = "cp: "
"""Begins every name, so that they are found among thousands of operators."""

_NOTHING = nullcontext()


def named(name: str, of: object = None) -> AbstractContextManager[object]:
    """A range of a profile; nothing at all while no profiler is on.

    Args:
        name: without the prefix; ``{}`` in it stands for ``of``.
        of: which hop, chunk or collective.
    """
    if not profiler._is_profiler_enabled:
        return _NOTHING
    return _RecordFunctionFast(PREFIX + name.format(of))

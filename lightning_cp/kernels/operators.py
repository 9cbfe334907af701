"""Calling another library's functions by argument name, whatever its version calls them.

Versions reorder, split and add arguments. A function is inspected once; what it lacks, or demands and
we do not know, is said instead of called wrong.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

SPELLINGS: Mapping[str, str] = {"is_causal": "causal"}
"""Other names of arguments in some versions, and ours."""

_NOTHING = (
    *("alibi_slopes", "out", "out_", "k_new", "v_new", "qv", "cu_seqlens_k_new"),
    *("seqused_q", "seqused_k", "sequed_q", "sequed_k", "page_table", "kv_batch_idx", "leftpad_k"),
    *("rotary_cos", "rotary_sin", "seqlens_rotary", "q_descale", "k_descale", "v_descale"),
)
NEUTRAL: Mapping[str, object] = {"return_softmax": False, **dict.fromkeys(_NOTHING)}
"""Arguments that some versions demand, and the values that ask for nothing."""

WINDOW_SIDES = ("window_size_left", "window_size_right")


class Operator:
    """A function of another library that is called with ``wanted`` arguments.

    Raises:
        TypeError: it lacks one of them, or demands one that is not known; the message names it.
    """

    def __init__(self, function: Callable[..., Any], wanted: Iterable[str]) -> None:
        # A torch custom operator hides its signature; the function that it was made of shows it.
        parameters = inspect.signature(getattr(function, "_init_fn", function)).parameters
        self._function = function
        self._pairs_window = "window_size" in parameters
        self._names = {SPELLINGS.get(name, name): name for name in parameters}
        known = {*self._names, *(WINDOW_SIDES if self._pairs_window else ())}
        if missing := sorted(set(wanted) - known):
            raise TypeError(f"has no argument {', '.join(missing)}")
        demanded = {
            SPELLINGS.get(x.name, x.name)
            for x in parameters.values()
            if x.default is x.empty and x.kind in (x.POSITIONAL_OR_KEYWORD, x.KEYWORD_ONLY)
        }
        extra = demanded - set(wanted) - {"window_size"}
        if unknown := sorted(extra - NEUTRAL.keys()):
            raise TypeError(f"demands the unknown argument {', '.join(unknown)}")
        self._neutral = {self._names[name]: NEUTRAL[name] for name in extra}

    def __call__(self, **arguments: object) -> Any:
        """Call it; ``arguments`` are the ones wanted."""
        if self._pairs_window:
            arguments["window_size"] = tuple(arguments.pop(side) for side in WINDOW_SIDES)
        renamed = {self._names[name]: value for name, value in arguments.items()}
        return self._function(**self._neutral, **renamed)

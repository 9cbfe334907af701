"""The functions of ``torch.cuda`` for a pretended device: one stream, on which all is done at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch

from lightning_cp.utils.patching import load_compiler_rules

Note = Callable[[str], None]


@contextmanager
def cuda_functions(index: int, note: Note) -> Iterator[None]:
    """Patch ``torch.cuda``; what makes the host wait is noted."""
    load_compiler_rules()  # a table of torch's functions, which should not have those of here
    device = torch.device("cuda", index)

    class Event:
        """An event that has happened when it is recorded."""

        def __init__(self, *_: Any, **__: Any) -> None: ...

        def record(self, *_: Any) -> None: ...

        def wait(self, *_: Any) -> None: ...

        def query(self) -> bool:
            return True

        def synchronize(self) -> None:
            note("event.synchronize")

        def elapsed_time(self, end: Any) -> float:
            return 1.0

    class Stream:
        """A stream, all of which are one."""

        def __init__(self, *_: Any, **__: Any) -> None:
            self.device = device
            self.device_index, self.stream_id, self.cuda_stream = index, 0, 0

        def wait_stream(self, *_: Any) -> None: ...

        def wait_event(self, *_: Any) -> None: ...

        def record_event(self, *_: Any) -> Event:
            return Event()

        def query(self) -> bool:
            return True

        def synchronize(self) -> None:
            note("stream.synchronize")

        def __enter__(self) -> Stream:
            return self

        def __exit__(self, *_: object) -> None: ...

    def none(*_: Any, **__: Any) -> None: ...

    def said(value: Any) -> Callable[..., Any]:
        return lambda *_, **__: value

    def one_stream(*_: Any, **__: Any) -> Stream:
        return Stream()

    functions: dict[str, Any] = {
        "Event": Event,
        "Stream": Stream,
        "current_stream": one_stream,
        "default_stream": one_stream,
        "stream": lambda *_: nullcontext(),
        "device": lambda *_: nullcontext(),
        "set_stream": none,
        "synchronize": lambda *_: note("cuda.synchronize"),
        "is_available": said(True),
        "is_initialized": said(True),
        "init": none,
        "_lazy_init": none,
        "_lazy_call": none,
        "current_device": said(index),
        "device_count": said(8),
        "set_device": none,
        "get_device_name": said("pretended"),
        "get_device_capability": said((9, 0)),
        "is_bf16_supported": said(True),
        "get_rng_state": lambda *_, **__: torch.get_rng_state(),
        "set_rng_state": none,
        "get_rng_state_all": list,
        "set_rng_state_all": none,
        "manual_seed": none,
        "manual_seed_all": none,
        "initial_seed": said(0),
        "memory_allocated": said(0),
        "max_memory_allocated": said(0),
        "memory_reserved": said(0),
        "mem_get_info": said((2**36, 2**36)),
        "reset_peak_memory_stats": none,
        "empty_cache": none,
        "is_current_stream_capturing": said(False),
        "default_generators": [torch.default_generator] * 8,
    }
    with ExitStack() as stack:
        for name, instead in functions.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, instead))
        yield

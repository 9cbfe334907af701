"""Our calls of other libraries beside the signatures of their versions, recorded in ``signatures.json``.

The schemas of PyTorch's operators are compared in ``test_aten_cuda.py``, with those of the installed PyTorch.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_cp.attention import ring_flash_attn_support as support
from lightning_cp.attention.keys import Keys
from lightning_cp.attention.ring_flash_attn import ring_flash_attn_backward, ring_flash_attn_forward
from lightning_cp.attention.spec import AttentionSpec
from lightning_cp.kernels import flash_attn
from lightning_cp.kernels.devices import FA4_HAS_WINDOWS
from lightning_cp.kernels.flash_attn import FlashAttn2, FlashAttn3
from lightning_cp.kernels.merge import Accumulator, GradientSums
from lightning_cp.kernels.protocol import QKV, Kernel, Output, Scores
from lightning_cp.kernels.varlen import PackRule
from lightning_cp.layout import SequenceLayout
from lightning_cp.layout.mask import Mask
from lightning_cp.layout.tiles import ALL_ROWS, Tile

RECORDED = json.loads(
    (Path(__file__).parents[2] / "helpers" / "kernels" / "signatures.json").read_text()
)
Functions = Mapping[str, str]
"""Signatures by name: parameters with their defaults, between bars; ``*`` begins keywords."""


def versions(package: str) -> list[Any]:
    """The distinct signatures of a package, by the first version that has them."""
    cells = []
    for entry in RECORDED[package]["signatures"]:
        first = entry["versions"][0]
        cells.append(pytest.param(entry["functions"], id=first))
    return cells


def signature(text: str) -> inspect.Signature:
    """The signature of a recorded function."""
    parameters, kind = [], inspect.Parameter.POSITIONAL_OR_KEYWORD
    for part in text.split(" | "):
        name, given, default = part.partition("=")
        if name == "*":
            kind = inspect.Parameter.KEYWORD_ONLY
            continue
        value = ast.literal_eval(default) if given else inspect.Parameter.empty
        parameters.append(inspect.Parameter(name, kind, default=value))
    return inspect.Signature(parameters)


class Recorded:
    """A function with a recorded signature: binds its arguments, as the real one would, and keeps them."""

    def __init__(self, name: str, text: str) -> None:
        self.__name__ = name
        self.__signature__ = signature(text)
        self.calls: list[dict[str, Any]] = []

    def __call__(self, *args: object, **kwargs: object) -> tuple[Any, ...]:
        given = self.__signature__.bind(*args, **kwargs).arguments
        self.calls.append(given)
        q, k, v = given["q"], given["k"], given["v"]
        if "dout" in given:
            return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        out = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=q.dtype)
        heads = (q.shape[0], q.shape[2], q.shape[1]) if q.dim() == 4 else (q.shape[1], q.shape[0])
        lse = torch.zeros(heads)
        if "process_group" in given:
            return out, lse
        if "window_size" in self.__signature__.parameters and "dropout_p" in given:
            return out, q, k, v, out, lse, None, None  # flash-attn up to 2.6
        return out, lse, None, None


@pytest.fixture
def _forget() -> Iterator[None]:
    """Each version is loaded anew, and none is left behind."""
    loads = flash_attn.load_flash_attn_2, flash_attn.load_flash_attn_3
    for load in loads:
        load.cache_clear()
    yield
    for load in loads:
        load.cache_clear()


def install(
    monkeypatch: pytest.MonkeyPatch, name: str, functions: Functions
) -> dict[str, Recorded]:
    """Put a module with recorded functions where imports find it."""
    made = {each: Recorded(each, text) for each, text in functions.items()}
    for part in (name.partition(".")[0], name):
        module = ModuleType(part)
        module.__path__ = []
        monkeypatch.setitem(sys.modules, part, module)
    vars(sys.modules[name]).update(made)
    return made


def call_all(kernel: Kernel) -> None:
    """Forward and backward of a dense tile, of packed documents and of a window."""
    assert kernel.load().__class__.__name__ == "Library", kernel.load()  # type: ignore[attr-defined]
    q, k = torch.zeros(1, 32, 4, 16), torch.zeros(1, 32, 2, 16)
    inputs = QKV(q, k, k)
    documents = [Tile(0, 8 * n, 8, 8 * n, 8, 0, "causal") for n in range(4)]
    band = [Tile(ALL_ROWS, 0, 32, 0, 32, 0, "band")]
    for tiles in ([Tile(ALL_ROWS, 0, 32, 0, 32, 0, "full")], documents, band):
        scores, state = Scores(0.5, Mask(window=(7, 0))), Accumulator(q, torch.float32)
        kernel.forward(inputs, tiles, scores, state)
        merged = Output(q, *state.result(q.dtype))
        kernel.backward(merged, inputs, tiles, scores, GradientSums.like(inputs, torch.float32))


@pytest.mark.usefixtures("_forget")
@pytest.mark.parametrize("functions", versions("flash_attn_2"))
def test_flash_attn_2(functions: Functions, monkeypatch: pytest.MonkeyPatch) -> None:
    made = install(monkeypatch, "flash_attn.flash_attn_interface", functions)
    call_all(FlashAttn2(PackRule(fewest=2)))
    check_calls(made)


@pytest.mark.usefixtures("_forget")
@pytest.mark.parametrize("functions", versions("flash_attn_3"))
def test_flash_attn_3(functions: Functions, monkeypatch: pytest.MonkeyPatch) -> None:
    made = install(monkeypatch, "flash_attn_interface", functions)
    call_all(FlashAttn3(PackRule(fewest=2)))
    check_calls(made)


def check_calls(made: Mapping[str, Recorded]) -> None:
    """Every function was called, with the values that matter under the names of this version."""
    for name, function in made.items():
        assert function.calls, f"{name} was not called"
        for call in function.calls:
            assert call["softmax_scale"] == 0.5
            assert call["softcap"] == 0.0
            assert ("cu_seqlens_q" in call and call["cu_seqlens_q"] is not None) == (
                call["q"].dim() == 3
            )
            if "backward" in name:
                assert call["dq"].shape == call["q"].shape
                assert call["deterministic"] is False
    windows = {window_of(call) for function in made.values() for call in function.calls}
    assert windows == {(-1, -1), (7, 0)}
    causal = "is_causal" if any("is_causal" in f.calls[0] for f in made.values()) else "causal"
    assert any(call.get(causal) for function in made.values() for call in function.calls)


def window_of(call: Mapping[str, Any]) -> tuple[int, int]:
    if "window_size" in call:
        return call["window_size"]
    return call["window_size_left"], call["window_size_right"]


@pytest.mark.parametrize("functions", versions("flash_attn_4"))
def test_flash_attention_4_through_pytorch(
    functions: Functions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The arguments that PyTorch's registration passes for the call of ``aten_cuda_flash``."""
    fa4 = pytest.importorskip("torch.nn.attention._fa4")
    calls: dict[str, dict[str, Any]] = {}
    q = torch.zeros(1, 32, 4, 16)

    def bind(name: str) -> Any:
        def called(*args: object, **kwargs: object) -> Any:
            calls[name] = signature(functions[name]).bind(*args, **kwargs).arguments
            return (q, torch.zeros(1, 4, 32)) if "fwd" in name else (q, q, q)

        return called

    module = SimpleNamespace(**{name: bind(name) for name in functions})
    monkeypatch.setattr(fa4, "_FA4_MODULE_PATH", "recorded")
    monkeypatch.setattr(fa4, "_fa4_import_module", lambda path: module)
    window = {"window_size_left": 7, "window_size_right": 0} if FA4_HAS_WINDOWS else {}
    given = {
        **dict.fromkeys(("query", "key", "value", "out", "grad_out"), q),
        **dict.fromkeys(("cu_seq_q", "cu_seq_k", "seqused_k", "window_size_left")),
        **dict.fromkeys(("max_q", "max_k"), 32),
        **{"window_size_right": None, "logsumexp": torch.zeros(1, 4, 32)},
        **{"scale": 0.5, "is_causal": True, **window},
    }
    for run in (fa4._fa4_run_forward, fa4._fa4_run_backward):
        run(**{name: x for name, x in given.items() if name in inspect.signature(run).parameters})
    for call in calls.values():
        assert call["softmax_scale"] == 0.5
        assert call["causal"] is True
        assert call.get("window_size_left") == window.get("window_size_left")
        assert call.get("window_size_right") == window.get("window_size_right")
    assert calls.keys() == {"_flash_attn_fwd", "_flash_attn_bwd"}


@pytest.mark.parametrize("functions", versions("ring_flash_attn"))
@pytest.mark.parametrize("kind", ["zigzag", "contiguous"])
def test_ring_flash_attn(kind: Any, functions: Functions, monkeypatch: pytest.MonkeyPatch) -> None:
    made = {name: Recorded(name, text) for name, text in functions.items()}
    both = SimpleNamespace(**made)
    monkeypatch.setattr(support, "_modules", lambda: (both, both))
    monkeypatch.setattr(support, "DEVICE_TYPES", frozenset({"cpu"}))
    q, k = (torch.zeros(16, 1, heads, 8, dtype=torch.bfloat16) for heads in (4, 2))
    layout = SequenceLayout(32, ring_size=2, kind=kind)
    theirs = support.delegate(q.transpose(0, 1), k.transpose(0, 1), layout, AttentionSpec(), "auto")
    plan: Any = SimpleNamespace(
        delegate=theirs,
        mesh=SimpleNamespace(group=lambda axis: "the ring"),
        block=SimpleNamespace(kv_of_q=None),
        scores=Scores(0.5, Mask()),
    )
    keys = Keys((k, k), 8)
    out, lse, _ = ring_flash_attn_forward(q, keys, plan)
    ring_flash_attn_backward(q, q, keys, out, lse, plan)
    called = {name: function.calls for name, function in made.items() if function.calls}
    prefix = "zigzag_" if kind == "zigzag" else ""
    assert called.keys() == {f"{prefix}ring_flash_attn_{part}" for part in ("forward", "backward")}
    for (call,) in called.values():
        assert call["process_group"] == "the ring"
        assert call["softmax_scale"] == 0.5
        assert call["causal"] is True


def test_the_installed_ring_flash_attn_is_the_recorded_one() -> None:
    found = importlib.util.find_spec("ring_flash_attn")
    if found is None or found.submodule_search_locations is None:
        pytest.skip("needs ring-flash-attn")
    folder = Path(next(iter(found.submodule_search_locations)))
    (entry,) = RECORDED["ring_flash_attn"]["signatures"]
    for file in ("ring_flash_attn.py", "zigzag_ring_flash_attn.py"):
        for node in ast.walk(ast.parse((folder / file).read_text())):
            if isinstance(node, ast.FunctionDef) and node.name in entry["functions"]:
                recorded = entry["functions"][node.name]
                names = [part.partition("=")[0] for part in recorded.split(" | ")]
                assert [x.arg for x in node.args.args] == names


def test_a_missing_argument_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """What these tests rely on: a recorded function refuses a call that does not fit."""
    function = Recorded("forward", "q | k | v | softmax_scale | causal=False")
    q = torch.zeros(1, 2, 1, 8)
    with pytest.raises(TypeError, match="missing a required argument: 'softmax_scale'"):
        function(q, q, q)
    with pytest.raises(TypeError, match="unexpected keyword argument 'window_size'"):
        function(q, q, q, 1.0, window_size=(-1, -1))

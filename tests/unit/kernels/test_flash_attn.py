"""The flash-attn packages without a GPU: every supported signature, by stand-ins.

What the packages then compute is for a run on a GPU.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from lightning_cp.errors import ConfigError
from lightning_cp.kernels import devices, flash_attn
from lightning_cp.kernels.flash_attn import FlashAttn2, FlashAttn3, LibraryFunction
from lightning_cp.kernels.protocol import Kernel, Request
from lightning_cp.kernels.select import explain_kernels, select_kernel
from lightning_cp.kernels.varlen import PackRule
from lightning_cp.layout.mask import Mask
from lightning_cp.layout.tiles import ALL_ROWS, Tile
from tests.helpers import oracle
from tests.helpers.kernels import flash_attn_standin as standin
from tests.helpers.kernels.cells import DOCUMENTS, HEADS, LAYOUTS, MASKS, SEQ_LEN, WINDOWS
from tests.helpers.kernels.dense import Problem, check, in_dtype, is_wrong, run, sharded
from tests.helpers.kernels.flash_attn_standin import deterministic_flags, installed

KERNELS = {
    **dict.fromkeys(("2.6.0", "2.6.3", "2.8.3"), FlashAttn2),
    **dict.fromkeys(("3.old", "3"), FlashAttn3),
}
RECORDED = json.loads((Path(standin.__file__).parent / "signatures.json").read_text())
SIGNATURES: dict[str, dict[str, dict[str, str]]] = {
    package: {entry["versions"][0]: entry["functions"] for entry in RECORDED[package]["signatures"]}
    for package in ("flash_attn_2", "flash_attn_3")
}
"""Arguments of the packages' functions, by the first version that has them."""
ALWAYS = PackRule(fewest=1)
BF16 = Request("cuda", torch.bfloat16, 64, frozenset({"full", "causal"}))
WINDOW = frozenset({"full", "causal", "band"})


@pytest.fixture(params=KERNELS)
def version(request: pytest.FixtureRequest) -> Iterator[str]:
    with installed(request.param):
        yield request.param


@pytest.mark.pairwise
@pytest.mark.parametrize("rule", [PackRule(), ALWAYS], ids=["rule", "always"])
@pytest.mark.parametrize("layout", ["3_zigzag", "3_contiguous"])
@pytest.mark.parametrize("documents", ["packed", "rows"])
@pytest.mark.parametrize("mask", MASKS | WINDOWS)
def test_exact(mask: str, documents: str, layout: str, rule: PackRule, version: str) -> None:
    problem = Problem((MASKS | WINDOWS)[mask], HEADS["gqa"], DOCUMENTS[documents], seq_len=SEQ_LEN)
    check(sharded(problem, KERNELS[version](rule), LAYOUTS[layout]), problem)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype, version: str) -> None:
    problem = in_dtype(Problem(Mask(), intervals=DOCUMENTS["rows"]), dtype)
    check(sharded(problem, KERNELS[version](), LAYOUTS["2_zigzag"]), problem)


@pytest.mark.parametrize("value_dim", [8, 24])
@pytest.mark.parametrize("rule", [PackRule(), ALWAYS], ids=["rule", "always"])
def test_values_of_another_width(rule: PackRule, value_dim: int, version: str) -> None:
    how: dict[str, Any] = {"intervals": DOCUMENTS["rows"], "head_dim": 16, "value_dim": value_dim}
    problem = Problem(Mask(window=(7, -1)), **how)
    check(sharded(problem, KERNELS[version](rule), LAYOUTS["2_zigzag"]), problem)


@pytest.mark.parametrize("rule", [PackRule(), ALWAYS], ids=["rule", "always"])
def test_softcap(rule: PackRule, version: str) -> None:
    plain = Problem(Mask(), intervals=DOCUMENTS["rows"])
    capped = replace(plain, how=oracle.Scores(softcap=0.5))
    kernel = KERNELS[version](rule)
    check(sharded(capped, kernel, LAYOUTS["2_zigzag"]), capped)
    with pytest.raises(AssertionError):
        check(sharded(plain, kernel, LAYOUTS["2_zigzag"]), capped)


def test_queries_without_keys_are_minus_infinity(version: str) -> None:
    q, k, v, dout = Problem(Mask()).tensors()
    k[0] = -torch.inf  # every score of row 0 is -inf, as if no key were visible
    tiles = [Tile(ALL_ROWS, 0, 53, 0, 53, 0, "causal")]
    for rule in (PackRule(), ALWAYS):
        answer = run(KERNELS[version](rule), (q.abs(), k, v, dout), tiles, Mask())
        assert bool((answer.lse[0] == -torch.inf).all())
        assert not bool(answer.out[0].any())
        assert not bool(answer.dv[0].any())
        assert bool(answer.dv[1].any())


@pytest.mark.parametrize("wanted", [False, True])
def test_backward_is_as_deterministic_as_torch_is_asked_to_be(wanted: bool, version: str) -> None:
    deterministic_flags.clear()
    torch.use_deterministic_algorithms(wanted)
    try:
        check(sharded(Problem(Mask()), KERNELS[version](), LAYOUTS["1"]), Problem(Mask()))
    finally:
        torch.use_deterministic_algorithms(False)
    assert set(deterministic_flags) == {wanted}


def test_red_when_the_window_is_lost(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem(Mask(window=(7, -1)))
    kernel = KERNELS[version]()
    check(sharded(problem, kernel, LAYOUTS["2_zigzag"]), problem)
    arguments = type(kernel).arguments

    def without(self, call, scores):  # type: ignore[no-untyped-def]
        unbounded = {"window_size_left": -1, "window_size_right": -1}
        return {**arguments(self, call, scores), **unbounded}

    monkeypatch.setattr(type(kernel), "arguments", without)
    assert is_wrong(sharded(problem, kernel, LAYOUTS["2_zigzag"]), problem, "out")


@pytest.mark.parametrize(
    ("package", "name", "request_", "chosen"),
    [
        ("none", "auto", BF16, "aten_cuda_flash"),
        ("2.8.3", "auto", BF16, "aten_cuda_flash"),
        ("2.8.3", "flash_attn", BF16, "flash_attn_2"),
        ("2.6.0", "flash_attn", BF16, "flash_attn_2"),
        ("2.6.3", "flash_attn_2", replace(BF16, masks=WINDOW), "flash_attn_2"),
        ("2.8.3", "auto", replace(BF16, needs=frozenset({"softcap"})), "flash_attn_2"),
        ("3", "auto", BF16, "flash_attn_3"),
        ("3.old", "flash_attn", replace(BF16, masks=WINDOW, head_dim=256), "flash_attn_3"),
        ("3", "auto", replace(BF16, head_dim=264), "reference"),
    ],
)
def test_chosen(package: str, name: str, request_: Request, chosen: str) -> None:
    with installed(package):
        assert select_kernel(name, request_).name == chosen


@pytest.mark.parametrize(
    ("package", "name", "request_", "match"),
    [
        (
            "none",
            "flash_attn",
            BF16,
            "flash_attn_3 cannot run: flash-attn 3 is not installed: .*hopper.*; flash_attn_2 cannot "
            "run: flash-attn is not installed: pip install flash-attn",
        ),
        (
            "2.5.8",
            "flash_attn_2",
            BF16,
            "flash-attn 2.5.8 is not supported, 2.6 to 2.8 are: has no argument softcap",
        ),
        ("2.8.3", "flash_attn_2", replace(BF16, device_type="cpu"), "runs on cuda, not cpu"),
        ("2.8.3", "flash_attn_2", replace(BF16, dtype=torch.float32), "not torch.float32"),
        ("2.8.3", "flash_attn_2", replace(BF16, head_dim=264), "head dims up to 256, not 264"),
        ("3", "flash_attn_3", replace(BF16, head_dim=60), "head dims divisible by 8, not 60"),
        ("2.8.3", "flash_attn_2", replace(BF16, needs=frozenset({"alibi"})), "has no alibi"),
        ("3", "flash_attn_3", replace(BF16, needs=frozenset({"max_logits"})), "has no max_logits"),
    ],
)
def test_refused(package: str, name: str, request_: Request, match: str) -> None:
    with installed(package), pytest.raises(ConfigError, match=match):
        select_kernel(name, request_)


@pytest.mark.parametrize(
    ("kernel", "capability", "match"),
    [
        (FlashAttn2(), (7, 5), "flash-attn 2 needs a GPU of compute capability 8.0 or later, not 7.5"),
        (FlashAttn2(), (8, 0), None),
        (FlashAttn2(), (12, 0), None),
        (FlashAttn3(), (8, 9), "flash-attn 3 needs a GPU of compute capability 9.0, not 8.9"),
        (FlashAttn3(), (9, 0), None),
        (FlashAttn3(), (10, 0), "not 10.0"),
    ],
)  # fmt: skip
def test_gpus_that_are_too_old_or_too_new(
    kernel: Kernel, capability: tuple[int, int], match: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "has_nvidia_gpu", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    with installed("3" if isinstance(kernel, FlashAttn3) else "2.8.3"):
        reason = kernel.capabilities.refusal(BF16)
    assert reason is None if match is None else match in (reason or "")


def test_a_package_that_cannot_be_imported_says_why() -> None:
    with installed("none"):
        package = ModuleType("flash_attn")
        package.__path__ = []
        sys.modules["flash_attn"] = package  # its interface cannot be imported
        reason = FlashAttn2().capabilities.refusal(BF16)
    assert reason is not None
    assert "flash-attn cannot be imported: " in reason


def test_nothing_is_imported_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_attn.importlib, "import_module", pytest.fail)
    assert select_kernel("auto", replace(BF16, device_type="cpu")).name == "aten_cpu_flash"


def test_explained() -> None:
    with installed("none"):
        text = explain_kernels("auto", BF16)
    assert "flash_attn_2: cannot run: flash-attn is not installed: pip install flash-attn" in text


def test_a_function_that_demands_what_nobody_knows() -> None:
    def later(q, moon_phase):  # type: ignore[no-untyped-def]
        return q

    with pytest.raises(TypeError, match="demands the unknown argument moon_phase"):
        LibraryFunction(later, ("q",))
    with pytest.raises(TypeError, match="has no argument k, v"):
        LibraryFunction(later, ("q", "k", "v", "moon_phase"))


@pytest.mark.parametrize(
    ("package", "version"),
    [(package, version) for package in SIGNATURES for version in SIGNATURES[package]],
)
def test_every_recorded_signature_is_called_by_its_names(
    package: str, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each wanted argument arrives under its name, and those that a version demands besides are neutral."""
    called: list[dict[str, object]] = []

    class Recorded(LibraryFunction):
        def __init__(self, function: Any, wanted: Iterable[str]) -> None:
            self.wanted = set(wanted)
            super().__init__(function, self.wanted)

    module = ModuleType(package)
    for name, arguments in SIGNATURES[package][version].items():
        space: dict[str, Any] = {"called": called}
        exec(f"def {name}({arguments.replace(' | ', ', ')}):\n    called.append(locals())", space)
        setattr(module, name, space[name])
    monkeypatch.setattr(flash_attn, "LibraryFunction", Recorded)
    monkeypatch.setattr(flash_attn, "_import", lambda *_: module)
    load = getattr(flash_attn, f"load_{package}").__wrapped__
    library = load()
    assert not isinstance(library, str), library
    window = {"window_size_left": 5, "window_size_right": 7}
    for function in (
        library.forward_packed,
        library.backward_packed,
        library.forward,
        library.backward,
    ):
        assert isinstance(function, Recorded)
        wanted = dict.fromkeys(function.wanted - set(window), "given")
        function(**wanted, **window)
        got = {flash_attn.ARGUMENT_ALIASES.get(name, name): x for name, x in called.pop().items()}
        sides = got.pop("window_size", None) or (
            got.pop("window_size_left"),
            got.pop("window_size_right"),
        )
        assert sides == (5, 7)
        assert {name for name, x in got.items() if isinstance(x, str)} == set(wanted)
        besides = {name: x for name, x in got.items() if name not in wanted}
        defaults = {"softcap": 0.0, "rotary_interleaved": True, "num_splits": 1}
        assert all(not x or defaults.get(name) == x for name, x in besides.items()), besides

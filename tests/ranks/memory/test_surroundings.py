"""Tiled MLPs, recomputed blocks and host memory: models of many kinds have the gradients of one process."""

from __future__ import annotations

import sys
from functools import lru_cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_cp.attention.checkpointing import DeviceStore
from lightning_cp.config import StrategyConfig
from lightning_cp.errors import ConfigError
from lightning_cp.memory import activations as recomputed
from lightning_cp.memory import tiled_mlp as tiled
from lightning_cp.memory.activations import HostMemory
from lightning_cp.runtime.model_binding import make_step_patches
from tests.helpers.models.matrix import whole_sequence
from tests.helpers.models.steps import (
    Case,
    Outcome,
    make_batch,
    make_model,
    one_process,
    run_step,
    start,
    step,
)
from tests.helpers.pool import run_ranks

SIZES = {"alone": (1, 1), "ring 2": (1, 2), "ulysses 2": (2, 1), "hybrid 2x2": (2, 2)}
TILED = {"tiled_mlp": 6}
BLOCKS = {"activation_checkpointing": "blocks"}
KEEP = {"activation_checkpointing": "keep_attention"}
ALL: dict[str, Any] = {**TILED, **KEEP, "activation_offload": True}
OPTIONS = {"tiled": TILED, "blocks": BLOCKS, "keep": KEEP, "all": ALL}
MODELS = ("llama", "gemma2_capped", "cohere", "gpt_neox", "gpt2", "phi3", "bloom", "falcon")
FLOAT32 = {"cohere", "gpt_neox", "phi3", "falcon"}
"""Their norms or embeddings are."""


def parallel(
    rank: int, world_size: int, case: Case, ulysses: int, ring: int, options: Any
) -> tuple[Outcome, dict[str, int]]:
    """One step, and how often parts of it ran: tiles, attention exchanged in forward and recomputation."""
    model = make_model(case)
    runtime = start(ulysses, ring, model, **options)
    seen = Counted()
    try:
        with seen:
            got = run_step(runtime, model, world_size, make_batch(case), partial(step, case))
            runtime.end_step()
        swapped = sys.modules[
            "transformers"
        ].PreTrainedModel  # has a forward of ours until that is undone
        own = [part for part in model.modules() if "forward" in vars(part)]
        assert all(isinstance(part, swapped) for part in own)
    finally:
        runtime.detach()
    assert not any("forward" in vars(part) for part in model.modules())
    return got, seen.counts


class Counted:
    """Calls of what the settings are made of, while it is on."""

    def __init__(self) -> None:
        self.counts = {"tiles": 0, "recomputed": 0, "kept": 0, "inputs": 0}
        self._patch = pytest.MonkeyPatch()

    def __enter__(self) -> None:
        self._count(tiled._TiledCall, "gradients", "tiles")
        self._count(recomputed.RecomputedBlocks, "_forward", "recomputed")
        self._count(recomputed.SavedBytes, "put", "kept")
        self._count(recomputed.SavedBytes, "put_input", "inputs")

    def _count(self, owner: Any, method: str, name: str) -> None:
        own = getattr(owner, method)

        def counting(*args: Any, **kwargs: Any) -> Any:
            empty = any(isinstance(x, torch.Tensor) and not x.numel() for x in args)
            self.counts[name] += not empty  # torch 2.10 puts one beside each block's inputs
            return own(*args, **kwargs)

        self._patch.setattr(owner, method, counting)

    def __exit__(self, *_: object) -> None:
        self._patch.undo()


@lru_cache(maxsize=32)
def oracle(case: Case, alone: bool) -> Outcome:
    """In one process, without any of the settings."""
    return one_process(case) if alone else whole_sequence(case)


def compare(case: Case, size: str, options: Any) -> dict[str, int]:
    """Eager attention is float32 inside: what ranks share is compared with our reference kernel, alone."""
    ulysses, ring = SIZES[size]
    want = oracle(case, ulysses * ring == 1)
    tolerance = 1e-6 if case.model in FLOAT32 else 1e-12
    ranks = run_ranks(ulysses * ring, parallel, case, ulysses, ring, options, timeout=60)
    for got, _ in ranks:
        assert got.loss == pytest.approx(want.loss, rel=tolerance)
        assert got.gradients.keys() == want.gradients.keys()
        for name, gradient in want.gradients.items():
            scale = max(float(gradient.abs().max()), 1e-3)
            assert float((got.gradients[name] - gradient).abs().max()) <= tolerance * scale, name
    return ranks[0][1]


@pytest.mark.quick("gemma2_capped-tiled", "cohere-all", "gpt_neox-all")
@pytest.mark.parametrize("options", ["tiled", "all"])
@pytest.mark.parametrize("model", MODELS)
def test_gradients_of_models_are_those_of_one_process(model: str, options: str) -> None:
    case = Case(model=model, attention="eager" if model in ("bloom", "gemma2_capped") else "sdpa")
    counts = compare(case, "ring 2", OPTIONS[options])
    assert counts["tiles"] > 4, "of two layers, each in several"


@pytest.mark.quick(
    "hybrid 2x2-blocks",
    "ring 2-keep",
    "ulysses 2-all",
    "ulysses 2-tiled",
    "ring 2-blocks",
    "alone-*",
)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("size", SIZES)
def test_modes(size: str, options: str) -> None:
    counts = compare(Case(), size, OPTIONS[options])
    recomputes = options != "tiled"
    keeps = options in ("keep", "all") and size != "alone"
    assert counts["recomputed"] == 2 * recomputes, "of two blocks"
    assert counts["inputs"] == 2 * recomputes
    assert counts["kept"] == 4 * keeps, "out and lse of two"


@pytest.mark.quick("packed", "left")
@pytest.mark.parametrize("batch", ["right", "left", "packed"])
def test_padded_and_packed(batch: str) -> None:
    compare(Case(batch=batch, use_cache=False), "hybrid 2x2", ALL)


def exchanges(rank: int, world_size: int, options: Any) -> int:
    """How many times keys went round in a step."""
    counted = 0
    own = dist.batch_isend_irecv

    def counting(*args: Any) -> Any:
        nonlocal counted
        counted += 1
        return own(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "batch_isend_irecv", counting)
        parallel(rank, world_size, Case(), 1, 2, options)
    return counted


class Elsewhere(DeviceStore):
    """A stand-in for another device's memory: what is put is copied, and no tensor until it is asked for."""

    def __init__(self) -> None:
        self.put_bytes = self.got = 0

    def put(self, x: torch.Tensor) -> Any:
        self.put_bytes += x.nbytes
        return (x.detach().clone(),)

    def get(self, kept: Any) -> torch.Tensor:
        if isinstance(kept, torch.Tensor):
            return kept
        self.got += 1
        return kept[0].clone()


def elsewhere(rank: int, world_size: int) -> tuple[Outcome, int, int]:
    """A step whose kept tensors all go to another place and come back."""
    place = Elsewhere()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recomputed, "HostMemory", lambda: place)
        got, _ = parallel(rank, world_size, Case(), 1, world_size, ALL)
    return got, place.put_bytes, place.got


def test_everything_that_is_kept_may_be_elsewhere() -> None:
    want = oracle(Case(), False)
    local = 3 * 20  # rows and tokens of a rank, padding included
    inputs, out, lse = (local * n * 8 for n in (32, 32, 4))
    for got, put_bytes, taken in run_ranks(2, elsewhere, timeout=30):
        for name, gradient in want.gradients.items():
            torch.testing.assert_close(got.gradients[name], gradient, rtol=1e-11, atol=1e-14)
        assert put_bytes == 2 * (inputs + out + lse)
        assert taken == 2 * 3


def test_host_memory_leaves_what_is_there() -> None:
    x, host = torch.ones(3), HostMemory()
    assert host.get(host.put(x)) is x


def in_step(model: Any, **settings: Any) -> Any:
    """Patches of one process, entered."""
    patches = make_step_patches(nn.ModuleList([model]), StrategyConfig(**settings))
    patches.begin()
    return patches


def test_without_gradients_blocks_run_as_ever() -> None:
    model, batch = make_model(Case()), make_batch(Case())
    want = model(batch["input_ids"]).logits
    patches = in_step(model, **ALL)
    with torch.no_grad():
        got = model(batch["input_ids"]).logits
    patches.end()
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_what_a_step_keeps_is_told_once() -> None:
    model, batch = make_model(Case()), make_batch(Case())
    patches = in_step(model, **BLOCKS)
    with torch.no_grad():
        model(batch["input_ids"])
    assert patches.pop_reports() == []
    model(batch["input_ids"])
    kept = 2 * batch["input_ids"].numel() * 32 * 8 / 2**20
    (line,) = patches.pop_reports()
    assert line == (
        "activation checkpointing of 2 LlamaDecoderLayer: this rank keeps "
        f"{kept:.2f} MiB of their inputs"
    )
    assert patches.pop_reports() == []


def test_a_cache_is_not_filled_twice() -> None:
    """One process makes one in training too, unless its blocks are recomputed."""
    model, batch = make_model(Case()), make_batch(Case())
    want = model(batch["input_ids"]).logits
    patches = in_step(model, **BLOCKS)
    got = model(batch["input_ids"], use_cache=True).logits
    got.sum().backward()
    patches.end()
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "settings", "match"),
    [
        ("mixtral", TILED, r"layers.0.mlp \(MixtralSparseMoeBlock\) has experts"),
        ("gpt_oss", TILED, r"layers.0.mlp \(GptOssMLP\) has experts"),
        (
            "bert",
            TILED,
            "has a part called mlp, .*; its blocks have attention, intermediate, output",
        ),
        (
            "llama",
            {**TILED, "mlp_modules": "LLaMAMLP"},
            "'LLaMAMLP' is neither the class nor the name",
        ),
        (
            "llama",
            {**TILED, "mlp_modules": ["LlamaMLP", "*.down_proj"]},
            r"'0.model.layers.0.mlp.down_proj', which is inside '0.model.layers.0.mlp', too",
        ),
    ],
    ids=str,
)
def test_models_whose_mlps_are_not_cut(name: str, settings: Any, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        in_step(make_model(Case(model=name)), **settings)


def test_modules_may_be_named() -> None:
    """BERT's have two parts, of which the second takes what went into the first."""
    case = Case(model="bert")
    counts = compare(case, "ring 2", {**TILED, "mlp_modules": ["BertIntermediate", "BertOutput"]})
    assert counts["tiles"] > 8


def test_other_arguments_are_refused() -> None:
    model = make_model(Case())
    patches = in_step(model, tiled_mlp=6, mlp_modules="LlamaDecoderLayer")
    with pytest.raises(ConfigError, match=r"LlamaDecoderLayer\) was called with \[3, 37, 32\]"):
        model(make_batch(Case())["input_ids"])
    patches.end()


@pytest.mark.parametrize("checkpoint", ["keep", "reentrant"])
def test_blocks_that_are_checkpointed_already(checkpoint: str) -> None:
    with pytest.raises(ConfigError, match=r"0.model is checkpointed already"):
        in_step(make_model(Case(checkpoint=checkpoint)), **BLOCKS)


def test_models_without_blocks() -> None:
    with pytest.raises(ConfigError, match="ModuleList has no list of modules with attention"):
        in_step(nn.Sequential(nn.Linear(2, 2)), **BLOCKS)

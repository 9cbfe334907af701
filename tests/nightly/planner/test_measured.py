"""What a rank of a fake world holds is what closed forms say, and it is one process that finds out."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import pytest

from lightning_cp.planner.state import ModelShapes, Shape, state_bytes
from tests.helpers.planner.apart import Call, apart

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 50,
    "hidden_size": 40,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "tie_word_embeddings": False,
}
"""Hardly a size divides by 16, or by 8 once two ranks have shared it."""
LLAMA_405B: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "num_hidden_layers": 126,
    "num_attention_heads": 128,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
}


def shapes(config: dict[str, Any], tp: int = 1) -> ModelShapes:
    """Of what a rank of ``tp`` has of a Llama, by hand."""
    hidden, inner, vocabulary = (
        config[name] for name in ("hidden_size", "intermediate_size", "vocab_size")
    )
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    dim = config.get("head_dim", hidden // heads)
    query, kv = heads * dim // tp, kv_heads * dim // tp
    attention = ((query, hidden), (kv, hidden), (kv, hidden), (hidden, query))
    if config["model_type"] == "qwen3":  # norms within heads, of which all ranks have the weight
        attention = (*attention, (dim,), (dim,))
    mlp: tuple[Shape, ...] = ((inner // tp, hidden), (inner // tp, hidden), (hidden, inner // tp))
    experts = config.get("num_local_experts")
    if experts:
        mlp = ((experts, hidden), (experts, 2 * inner, hidden), (experts, hidden, inner))
    tokens = vocabulary // tp if vocabulary % tp == 0 else vocabulary
    head = () if config["tie_word_embeddings"] else ((tokens, hidden),)
    block = (*attention, *mlp, (hidden,), (hidden,))
    return ModelShapes(
        before=((tokens, hidden),),
        blocks=(block,) * config["num_hidden_layers"],
        after=((hidden,), *head),
    )


@dataclass(frozen=True)
class Case:
    """A run, and how many ranks cut a parameter."""

    engine: str
    sizes: dict[str, int]
    cut: int
    config: dict[str, Any]
    dtype: str = "float32"

    @property
    def ranks(self) -> int:
        return prod(self.sizes.values())

    @property
    def tp(self) -> int:
        return self.sizes.get("tp", 1)

    def arguments(self, rank: int) -> dict[str, Any]:
        given = {"config": self.config, "sizes": self.sizes, "engine": self.engine}
        return {**given, "rank": rank, "dtype": self.dtype}


QWEN3 = {**LLAMA, "model_type": "qwen3"}
TIED = {**LLAMA, "tie_word_embeddings": True}
EXPERTS = {**LLAMA, "model_type": "mixtral", "num_local_experts": 6}
ODD_VOCABULARY = {**LLAMA, "vocab_size": 51}
FSDP = {"dp_shard": 2, "ring": 4, "ulysses": 2}
HSDP = {"dp_replicate": 4, "dp_shard": 2, "ring": 2}
SHARED = {"dp_shard": 2, "ring": 2, "ulysses": 2, "tp": 2}
CASES = {
    "fsdp": Case("fsdp", FSDP, 16, LLAMA),
    "fsdp in bfloat16": Case("fsdp", FSDP, 16, LLAMA, dtype="bfloat16"),
    "fsdp, tied": Case("fsdp", FSDP, 16, TIED),
    "fsdp, fewer experts than ranks": Case("fsdp", FSDP, 16, EXPERTS),
    "hsdp": Case("hsdp", HSDP, 4, LLAMA),
    "zero1": Case("zero1", {"dp_replicate": 4, "ring": 2, "ulysses": 2}, 16, LLAMA),
    "ddp": Case("ddp", {"dp_replicate": 2, "ring": 8}, 1, LLAMA),
    "fsdp, tp 2": Case("fsdp", SHARED, 8, LLAMA),
    "fsdp, tp 2, tied": Case("fsdp", SHARED, 8, TIED),
    "fsdp, tp 2, norms in heads": Case("fsdp", SHARED, 8, QWEN3),
    "fsdp, tp 2, a vocabulary that stays whole": Case("fsdp", SHARED, 8, ODD_VOCABULARY),
    "hsdp, tp 2": Case("hsdp", {"dp_replicate": 2, "ulysses": 4, "tp": 2}, 4, LLAMA),
    "copies of what two ranks share": Case("hsdp", {"dp_replicate": 8, "tp": 2}, 1, LLAMA),
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "replicas of fsdp": (
        {"engine": "fsdp", "sizes": {"dp_replicate": 2, "ring": 8}},
        "data_parallel='fsdp' with 2 data-parallel ranks makes a mesh of dp_replicate=1 x dp_shard=2, got "
        "dp_replicate=2 x dp_shard=1",
    ),
    "shards of zero1": (
        {"engine": "zero1", "sizes": {"dp_shard": 2, "ring": 8}},
        "makes a mesh of dp_replicate=2 x dp_shard=1, got dp_replicate=1 x dp_shard=2",
    ),
    "shared layers of ddp": (
        {"engine": "ddp", "sizes": {"tp": 2, "ring": 8}},
        "tensor_parallel_size=2 does not go with data_parallel='ddp'",
    ),
    "heads that do not divide": (
        {"engine": "fsdp", "sizes": {"tp": 4, "ring": 4}},
        "tensor_parallel_size=4 does not divide the 4 attention heads and 2 key/value heads",
    ),
    "no such model": (
        {"engine": "fsdp", "sizes": {"ring": 16}, "config": {"model_type": "gpt405"}},
        "transformers makes no causal language model of model_type='gpt405'",
    ),
    "no such dtype": (
        {"engine": "fsdp", "sizes": {"ring": 16}, "dtype": "float31"},
        "dtype must be one of bfloat16, float16, float32, got 'float31'",
    ),
}


def by_hand(case: Case, rank: int) -> dict[str, int]:
    """Row by row: full numbers of rows are taken memory for, and those that are there are stepped."""
    model, size = shapes(case.config, case.tp), 2 if case.dtype == "bfloat16" else 4
    place = rank // case.tp % case.cut
    memory = held = 0
    for rows, *row in (*model.before, *(x for block in model.blocks for x in block), *model.after):
        each = (rows + case.cut - 1) // case.cut
        memory += each * prod(row) * size
        held += len(range(rows)[place * each : (place + 1) * each]) * prod(row) * size
    return {"parameters": memory, "gradients": memory, "optimizer": 2 * held}


@pytest.fixture(scope="module")
def answers() -> dict[tuple[str, int], Any]:
    """Of the first and the last rank of each case; one process plays all of them, one after the other."""
    calls: dict[tuple[str, int], Call] = {
        (name, rank): ("state", case.arguments(rank))
        for name, case in CASES.items()
        for rank in (0, case.ranks - 1)
    }
    for name, (given, _) in REFUSED.items():
        calls[name, 0] = ("state", {"config": LLAMA, "rank": 0, **given})
    return dict(zip(calls, apart([*calls.values()]), strict=True))


@pytest.mark.parametrize("last", [False, True], ids=["first", "last"])
@pytest.mark.parametrize("name", CASES)
def test_a_rank_holds_what_is_counted_by_hand(answers: Any, name: str, last: bool) -> None:
    case = CASES[name]
    rank = case.ranks - 1 if last else 0
    got = answers[name, rank]
    want = by_hand(case, rank)
    assert {kind: got[kind] for kind in want} == want
    size = 2 if case.dtype == "bfloat16" else 4
    assert got["parameter_count"] == by_hand(Case("ddp", {}, 1, case.config), 0)["parameters"] // 4
    closed = state_bytes(
        shapes(case.config, case.tp),
        case.engine,
        **{"rank": rank // case.tp % case.cut, "ranks": case.cut},
        **{"itemsize": size, "state_itemsize": size},
    )
    assert (closed.parameters, closed.gradients, closed.optimizer) == tuple(want.values())


def test_uneven_rows_make_the_last_rank_differ(answers: Any) -> None:
    """Or the cases would say nothing of it."""
    for name in ("fsdp", "hsdp", "zero1", "fsdp, tp 2", "hsdp, tp 2"):
        first, last = (answers[name, rank] for rank in (0, CASES[name].ranks - 1))
        assert last["optimizer"] < first["optimizer"] < 2 * first["parameters"] + 1
        assert last["parameters"] == first["parameters"]


def named(answer: Any, kind: str) -> dict[str, tuple[Shape, int, list[str]]]:
    """What a list of parameters says, by name."""
    return {x["name"]: (tuple(x["shape"]), x["nbytes"], x["cut_by"]) for x in answer[kind]}


def test_the_largest_parameters_and_who_cuts_them(answers: Any) -> None:
    """Two ranks share 72 features; of 36 each of eight has memory for 5, and the last one has 1."""
    axes = ["dp_shard", "ring", "ulysses"]
    for rank, features in ((0, 5), (15, 1)):
        found = named(answers["fsdp, tp 2", rank], "largest")
        assert [each[1] for each in found.values()] == [800] * 6 + [720] * 2
        assert found["model.layers.0.mlp.gate_proj.weight"] == ((features, 40), 800, [*axes, "tp"])
        assert found["model.layers.0.mlp.down_proj.weight"] == ((5, 36), 720, [*axes, "tp"])
    down = named(answers["fsdp", 0], "largest")["model.layers.2.mlp.down_proj.weight"]
    assert down == ((3, 72), 864, axes)
    down = named(answers["hsdp, tp 2", 0], "largest")["model.layers.0.mlp.down_proj.weight"]
    assert down == ((10, 36), 1440, ["ulysses", "tp"])


def test_parameters_that_no_axis_cuts(answers: Any) -> None:
    assert answers["fsdp", 0]["whole"] == answers["fsdp, tp 2", 0]["whole"] == []
    assert len(answers["ddp", 0]["whole"]) == 3 * 9 + 3
    whole = named(answers["copies of what two ranks share", 15], "whole")
    assert set(whole) == {
        "model.norm.weight",
        *(f"model.layers.{i}.input_layernorm.weight" for i in range(3)),
        *(f"model.layers.{i}.post_attention_layernorm.weight" for i in range(3)),
    }
    assert set(map(str, whole.values())) == {str(((40,), 160, []))}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_run_can_have(answers: Any, name: str) -> None:
    assert REFUSED[name][1] in answers[name, 0]["error"]


def test_a_thousand_ranks_of_the_405b_model() -> None:
    """The first and the last, in a minute and 2 GB."""
    case = Case("fsdp", {"dp_shard": 4, "ring": 4, "ulysses": 8, "tp": 8}, 128, LLAMA_405B)
    calls: list[Call] = [("state", case.arguments(rank)) for rank in (0, 1023)]
    *found, spent = apart([*calls, ("spent", {})])
    for rank, got in zip((0, 1023), found, strict=True):
        assert got["parameter_count"] == 405_853_388_800
        assert got["whole"] == []
        assert {kind: got[kind] for kind in by_hand(case, rank)} == by_hand(case, rank)
    assert spent["cpu_seconds"] < 60
    assert spent["peak_bytes"] < 2e9

"""Modules that call ``context_parallel_attention`` themselves, within a step of a strategy and without."""

from __future__ import annotations

from functools import lru_cache
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.fabric import Fabric
from torch import nn

from lightning_cp import AttentionSpec, SequenceLayout, context_parallel_attention
from lightning_cp.attention import api
from lightning_cp.errors import BatchMismatchError, ConfigError, LightningCPError, ShapeError
from lightning_cp.fabric import UlyssesRingStrategy
from lightning_cp.models import handle as handles
from tests.helpers.pool import expect_on_every_rank, run_ranks
from tests.helpers.pool.environment import PoolEnvironment
from tests.helpers.strategies.small import (
    HYBRID,
    LENGTH,
    LET_EMPTY,
    RING,
    RING3,
    ULYSSES,
    VOCAB,
    Batch,
    Settings,
    Small,
    close,
    loader,
    trainer_of,
    weights,
)

pytestmark = LET_EMPTY
HEADS, WIDTH, LEFT, CAP = 4, 8, 6, 3.0


class Windowed(nn.Module):
    """Attention with a window, a cap and sinks, which PyTorch's function does not have.

    Args:
        by_hand: computes all scores of these tokens, and masks them: for one process.
    """

    def __init__(self, *, by_hand: bool) -> None:
        super().__init__()
        self.by_hand = by_hand
        self.qkv = nn.Linear(HEADS * WIDTH, 3 * HEADS * WIDTH)
        self.out = nn.Linear(HEADS * WIDTH, HEADS * WIDTH)
        self.sinks = nn.Parameter(torch.linspace(-1, 1, HEADS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, WIDTH)).unbind(2)
        if self.by_hand:
            return x + self.out(self.all_scores(q, k, v).flatten(2))
        spec = AttentionSpec(window=(LEFT, 0), softcap=CAP, sinks=self.sinks)
        return x + self.out(context_parallel_attention(q, k, v, spec=spec).flatten(2))

    def all_scores(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / WIDTH**0.5
        scores = CAP * torch.tanh(scores / CAP)
        at = torch.arange(q.shape[1])
        behind = at[:, None] - at
        scores = scores.masked_fill((behind < 0) | (behind > LEFT), -torch.inf)
        sinks = self.sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        shares = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
        return torch.einsum("bhqk,bkhd->bqhd", shares, v)


class Own(Small):
    """A model of two such layers, one of them called by a module that Fabric or the Trainer wraps."""

    def __init__(self, *, by_hand: bool = False) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.model: Any = nn.ModuleDict(
            {
                "embed": nn.Embedding(VOCAB, HEADS * WIDTH),
                "blocks": nn.ModuleList(Windowed(by_hand=by_hand) for _ in range(2)),
                "head": nn.Linear(HEADS * WIDTH, VOCAB),
            }
        )

    def logits(self, batch: Batch) -> torch.Tensor:
        x = self.model["embed"](batch["input_ids"])
        for block in self.model["blocks"]:
            x = block(x)
        return self.model["head"](x)

    def forward(self, batch: Batch) -> torch.Tensor:
        return self.loss(batch)


def trained(
    rank: int, world_size: int, settings: Settings | None, *, by_hand: bool = False
) -> torch.Tensor:
    module = Own(by_hand=by_hand)
    trainer_of(world_size, settings).fit(module, loader(6))
    assert not api._steps
    return weights(module)


@lru_cache(maxsize=1)
def alone() -> torch.Tensor:
    torch.manual_seed(0)
    return run_ranks(1, trained, None, by_hand=True)[0]


GRIDS: dict[str, tuple[int, Settings]] = {
    "ring 2": (2, RING),
    "ring 3": (3, RING3),
    "ulysses 2": (2, ULYSSES),
    "hybrid": (4, HYBRID),
    "llama3": (2, {**RING, "mode": "zigzag_llama3"}),
    "balanced": (3, {**RING3, "layout": "balanced"}),
    "fsdp": (2, {**RING, "data_parallel": "fsdp"}),
    "recomputed": (2, {**RING, "activation_checkpointing": "keep_attention"}),
    "blocks": (2, {**ULYSSES, "activation_checkpointing": "blocks"}),
    "checked": (2, {**RING, "parity_check": "first_batch"}),
}


@pytest.mark.quick("ring 3", "ulysses 2", "checked")
@pytest.mark.parametrize("grid", GRIDS)
def test_a_module_s_own_call_attends_over_the_whole_row(grid: str) -> None:
    ranks, settings = GRIDS[grid]
    want = alone()
    for got in run_ranks(ranks, trained, {"parity_check": "off", **settings}):
        close(got, want)


def test_outside_of_a_step_the_tokens_are_the_whole_row() -> None:
    """As in one process, which has no strategy."""
    close(run_ranks(1, trained, None)[0], alone())


def looped(rank: int, world_size: int, settings: Settings) -> torch.Tensor:
    """A loop of Fabric; between steps a rank alone evaluates a row."""
    strategy, module = UlyssesRingStrategy(labels="aligned", **settings), Own()
    fabric = Fabric(
        accelerator="cpu", devices=world_size, strategy=strategy, plugins=[PoolEnvironment()]
    )
    fabric.launch()
    model, optimizer = fabric.setup(module, module.configure_optimizers())
    row = {"input_ids": torch.arange(LENGTH)[None] % VOCAB}
    for whole in loader(6):
        fabric.backward(model(strategy.shard_batch(whole)))
        optimizer.step()
        optimizer.zero_grad()
        strategy.end_step()
        if rank == 0:
            with torch.no_grad():
                own = module.logits(row)
                for block in module.model["blocks"]:
                    block.by_hand = True
                close(own, module.logits(row))
                for block in module.model["blocks"]:
                    block.by_hand = False
    return weights(module)


def test_a_loop_of_fabric() -> None:
    for got in run_ranks(3, looped, RING3):
        close(got, alone())


class Shared(Own):
    """A module beside the layers attends over a memory that all ranks have, and so has its own part alone."""

    def __init__(self, *, by_hand: bool = False) -> None:
        super().__init__(by_hand=by_hand)
        self.memory = Windowed(by_hand=by_hand)
        self.memory.context_parallel_local = True  # type: ignore[assignment]

    def logits(self, batch: Batch) -> torch.Tensor:
        memory = self.memory(self.model["embed"](torch.arange(8)[None]))
        return super().logits(batch) + memory.mean() * batch["input_ids"][..., None]


def beside(
    rank: int, world_size: int, settings: Settings | None, *, by_hand: bool = False
) -> torch.Tensor:
    module = Shared(by_hand=by_hand)
    trainer_of(world_size, settings).fit(module, loader(6))
    return weights(module)


def test_a_local_module_attends_by_itself() -> None:
    (want,) = run_ranks(1, beside, None, by_hand=True)
    for got in run_ranks(2, beside, {**RING, "parity_check": "off"}):
        close(got, want)


DOCUMENTS = torch.tensor([[0] * 11 + [1] * (LENGTH - 11)])


class Packed(Own):
    """One row of two documents; by hand, two rows."""

    def __init__(self, *, by_hand: bool = False) -> None:
        super().__init__(by_hand=by_hand)
        for block in self.model["blocks"]:
            block.documents = by_hand

    def logits(self, batch: Batch) -> torch.Tensor:
        if not self.model["blocks"][0].by_hand:
            return super().logits(batch)
        parts = [batch["input_ids"][:, :11], batch["input_ids"][:, 11:]]
        return torch.cat([super(Packed, self).logits({"input_ids": x}) for x in parts], 1)


def packed(
    rank: int, world_size: int, settings: Settings | None, *, by_hand: bool = False
) -> torch.Tensor:
    module = Packed(by_hand=by_hand)
    rows = [{**row, "segment_ids": DOCUMENTS} for row in loader(6, rows=1)]
    batches: Any = torch.utils.data.DataLoader(rows, batch_size=None)  # type: ignore[arg-type]
    trainer_of(world_size, settings).fit(module, batches)
    return weights(module)


@pytest.mark.parametrize("settings", [RING, ULYSSES], ids=["ring", "ulysses"])
def test_documents_of_the_batch_are_isolated(settings: Settings) -> None:
    (want,) = run_ranks(1, packed, None, by_hand=True)
    for got in run_ranks(2, packed, {**settings, "parity_check": "off"}):
        close(got, want)


def stepped(rank: int, world_size: int, first: Any, later: Any) -> None:
    """Two steps, each with a call of ``first(rank)``, then one of ``later(rank, step)``."""
    strategy = UlyssesRingStrategy(labels="none", **RING)
    fabric = Fabric(
        accelerator="cpu", devices=world_size, strategy=strategy, plugins=[PoolEnvironment()]
    )
    fabric.launch()
    layer = nn.Linear(8, 8)
    model, optimizer = fabric.setup(layer, torch.optim.SGD(layer.parameters(), lr=0.1))
    for step in range(2):
        batch = strategy.shard_batch({"input_ids": torch.arange(16)[None]})
        q = model(torch.ones(1, batch["input_ids"].shape[1], 2, 8))
        out = context_parallel_attention(q, q, q, spec=first(rank))
        out = context_parallel_attention(out, q, q, spec=later(rank, step))
        fabric.backward(strategy.sequence_sum(out.flatten(2)).sum())
        optimizer.step()


def same(rank: int, step: int = 0) -> AttentionSpec:
    return AttentionSpec()


def own_cap(rank: int, step: int = 0) -> AttentionSpec:
    return AttentionSpec(softcap=2.0 + rank)


def own_window(rank: int, step: int = 0) -> AttentionSpec:
    return AttentionSpec(window=(3 + 8 * rank, 0))


def own_cap_later(rank: int, step: int) -> AttentionSpec:
    """In the second step rank 1 leaves out a cap that both know."""
    return AttentionSpec(softcap=0.0 if step and rank else 2.0)


def new_cap(rank: int, step: int = 0) -> AttentionSpec:
    """Another cap in every call, as of a schedule."""
    new_cap.calls = getattr(new_cap, "calls", 0) + 1  # type: ignore[attr-defined]
    return AttentionSpec(softcap=2.0 + new_cap.calls)  # type: ignore[attr-defined]


def annealed(rank: int, world_size: int) -> int:
    """The kinds that are known after four calls, of which two are kept."""
    with (
        mock.patch.object(handles, "_KINDS", 2),
        mock.patch.object(
            handles.SwapHandle,
            "_agree_on_plan",
            autospec=True,
            side_effect=handles.SwapHandle._agree_on_plan,
        ) as agree,
    ):
        stepped(rank, world_size, new_cap, new_cap)
        return max(len(call.args[0].ranks.agreed) for call in agree.call_args_list)


def test_settings_that_change_with_every_call_are_not_kept_for_ever() -> None:
    assert run_ranks(2, annealed) == [2, 2]


@pytest.mark.parametrize(
    ("first", "later", "error", "match"),
    [
        (own_cap, same, BatchMismatchError, r"softcap=2\.0.*softcap=3\.0"),
        (own_window, same, BatchMismatchError, r"window=\(3, 0\).*window=\(11, 0\)"),
        (
            same,
            own_cap_later,
            ConfigError,
            r"attention call 1 of a step differs .*rank 0: .*softcap=2\.0.*rank 1: .*softcap=0\.0",
        ),
    ],
)
def test_calls_that_differ_between_ranks(
    first: Any, later: Any, error: type[LightningCPError], match: str
) -> None:
    expect_on_every_rank(2, stepped, first, later, error=error, match=match, timeout=60)


def wrong(rank: int, world_size: int, kind: str) -> None:
    module = Own()
    q = torch.randn(1, 15, 2, 8)
    call = {
        "dims": lambda: context_parallel_attention(q[0], q[0], q[0]),
        "array": lambda: context_parallel_attention(q.numpy(), q, q),  # type: ignore[arg-type]
        "spec": lambda: context_parallel_attention(q, q, q, spec={"causal": True}),  # type: ignore[arg-type]
        "length": lambda: context_parallel_attention(*[q[:, :3]] * 3),
    }[kind]
    module.training_step = lambda batch, batch_idx: call()  # type: ignore[method-assign]
    trainer_of(world_size, {**RING, "parity_check": "off"}).fit(module, loader(2))


@pytest.mark.parametrize(
    ("kind", "error", "match"),
    [
        ("dims", ShapeError, r"must be \[batch, local tokens, heads, head dim\], got \(15, 2, 8\)"),
        ("array", ConfigError, "q_BLHD must be a torch Tensor, got ndarray"),
        ("spec", ConfigError, "spec must be a lightning_cp AttentionSpec, got dict"),
        ("length", ShapeError, "the layout gives each rank 16 of 29 tokens"),
    ],
)
def test_bad_arguments_in_a_step(kind: str, error: type[LightningCPError], match: str) -> None:
    expect_on_every_rank(2, wrong, kind, error=error, match=match, timeout=60)


def test_autocast_casts_as_for_pytorch_s_attention() -> None:
    q = torch.randn(1, 4, 2, 8)
    with torch.autocast("cpu", torch.bfloat16):
        assert context_parallel_attention(q, q, q).dtype == torch.bfloat16
    assert context_parallel_attention(q, q, q).dtype == torch.float32


def asked(rank: int, world_size: int, **options: Any) -> None:
    q = torch.randn(1, 4, 2, 8)
    context_parallel_attention(q, q, q, **options)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"return_lse": True}, "without mesh= and layout= takes a spec only"),
        ({"kernel": "reference"}, "settings of the strategy.*Leave these arguments out"),
        ({"layout": SequenceLayout(4, 1, 1)}, "one of mesh= and layout=. Pass both, or neither"),
    ],
)
def test_arguments_that_do_not_go_together(options: dict[str, Any], match: str) -> None:
    expect_on_every_rank(1, asked, **options, error=ConfigError, match=match)

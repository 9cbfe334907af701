"""When the check is made, on how much, and what is said where it cannot be made."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from lightning_cp.errors import ConfigError, LightningCPError, ParityError
from tests.helpers.models.steps import Case
from tests.helpers.parity import modules
from tests.helpers.pool import expect_on_every_rank, run_ranks
from tests.helpers.strategies.small import RING, trainer_of
from tests.ranks.parity.test_healthy import CHECKED, Heard, huggingface


class ByHand(modules.Healthy):
    """Manual optimization: each step changes the model."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(self.logits(batch), batch))
        optimizer.step()
        self.counted += 1


class OfOneLength(modules.Healthy):
    """Needs its sequences whole."""

    def logits(self, batch: Any) -> torch.Tensor:
        if batch["input_ids"].shape[1] < modules.LENGTH // 2:
            raise ValueError("too short")
        return super().logits(batch)


class PartlyTrained(modules.Healthy):
    """A frozen layer, and one that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].requires_grad_(False)
        self.unused = torch.nn.Linear(3, 3)


class FaultyAtLast(modules.Healthy):
    """Well until its second step."""

    def positions(self, batch: Any) -> torch.Tensor:
        if self.trainer.global_step < 2:
            return batch["position_ids"]
        return torch.arange(batch["input_ids"].shape[1])


class PromptFirst(modules.Healthy):
    """Fails where a prefix has no target; its own loss would be NaN."""

    def loss(self, logits: torch.Tensor, batch: Any) -> torch.Tensor:
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="none")
        kept = batch["labels"].flatten() != -100
        return loss[kept].sum() / kept.sum() if kept.any() else logits.sum() * 0


lengths_seen: list[int] = []
"""A global, which the check does not put back."""


class Dropping(modules.Attention):
    """Drops out scores, which no config tells; notes the lengths that it is called with."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        lengths_seen.append(x.shape[1])
        q = x.unflatten(-1, (modules.HEADS, -1)).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, q, q, dropout_p=0.1, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class DropsScores(modules.Healthy):
    attention = Dropping


class TellsThatItDropsScores(DropsScores):
    """By a module of PyTorch's."""

    def __init__(self) -> None:
        super().__init__()
        self.own = torch.nn.MultiheadAttention(8, 2, dropout=0.1)


KINDS = {
    cls.__name__: cls
    for cls in (ByHand, OfOneLength, PartlyTrained, FaultyAtLast, PromptFirst, modules.Healthy)
}


def fit(rank: int, world_size: int, name: str, settings: Any) -> tuple[int, list[str]]:
    module, rows = KINDS[name](), modules.rows(8)
    if name == "PromptFirst":
        for row in rows:
            row["labels"][:30] = -100
    with Heard() as heard:
        trainer_of(world_size, {**RING, **settings}).fit(module, DataLoader(rows, batch_size=2))  # type: ignore[arg-type]
    return module.counted, heard.parity


def refused(rank: int, world_size: int, kind: Any) -> tuple[str, list[int], list[str]]:
    """What is refused; the lengths of its steps until then; and how often a check began."""
    lengths_seen.clear()
    loader: Any = DataLoader(modules.rows(8), batch_size=2)  # type: ignore[arg-type]
    with Heard() as heard, pytest.raises(ConfigError, match="attention dropout") as found:
        trainer_of(world_size, {**RING, **CHECKED}).fit(kind(), loader)
    return str(found.value), lengths_seen, heard.begun


def test_what_a_step_refuses_is_refused_before_one_process_runs_it() -> None:
    for _, lengths, begun in run_ranks(2, refused, DropsScores, timeout=60):
        assert lengths == [modules.LENGTH // 2]
        assert len(begun) < 2


def test_what_modules_tell_is_refused_before_the_check() -> None:
    for said, lengths, begun in run_ranks(2, refused, TellsThatItDropsScores, timeout=60):
        assert "dropout of own (MultiheadAttention)" in said
        assert lengths == begun == []


def heard(name: str, **settings: Any) -> list[str]:
    (steps, first), (_, second) = run_ranks(2, fit, name, {**CHECKED, **settings}, timeout=60)
    assert steps == 4
    assert second == [], "one rank says it"
    return first


def test_manual_optimization_is_said() -> None:
    (line,) = heard("ByHand")
    assert "parity_check was left out because with manual optimization" in line


def refused_at_once(rank: int, world_size: int) -> tuple[str, list[str]]:
    rows = [{**row, "odd": torch.zeros(modules.LENGTH)} for row in modules.rows(4)]
    loader: Any = DataLoader(rows, batch_size=2)  # type: ignore[arg-type]
    with Heard() as heard, pytest.raises(LightningCPError) as found:
        trainer_of(world_size, {**RING, **CHECKED}).fit(modules.Healthy(), loader)
    return str(found.value), heard.parity


def test_a_batch_that_is_refused_at_once_is_not_said_to_be_left_out() -> None:
    """The error that ends the run says it once."""
    for said, heard in run_ranks(2, refused_at_once, timeout=60):
        assert "'odd' of shape (2, 48)" in said
        assert heard == []


@pytest.mark.nightly
def test_a_step_that_fails_on_a_prefix_is_said() -> None:
    (line,) = heard("OfOneLength", parity_tokens=16)
    assert "the step fails on 16 tokens (ValueError: too short)" in line
    assert "agree on 96 tokens" in heard("OfOneLength")[0]


@pytest.mark.parametrize("more", [{"find_unused_parameters": True}, {"data_parallel": "fsdp"}])
def test_frozen_and_unused_parameters(more: Any) -> None:
    (line,) = heard("PartlyTrained", **more)
    assert "agree on 96 tokens" in line


def test_a_prefix_is_cut() -> None:
    (line,) = heard("Healthy", parity_tokens=40)
    assert "agree on 40 tokens" in line


@pytest.mark.nightly
def test_a_prefix_has_targets() -> None:
    """The first 30 tokens have none: the window is another one."""
    (line,) = heard("PromptFirst", parity_tokens=40)
    assert "agree on 40 tokens" in line
    assert "worst of 30 gradients" in line


@pytest.mark.nightly
def test_every_nth_step() -> None:
    assert len(heard("Healthy", parity_check="every_2")) == 2
    assert len(heard("Healthy", parity_check="every_1")) == 4
    assert heard("Healthy", parity_check="off") == []


@pytest.mark.nightly
@pytest.mark.parametrize("settings", [{"parity_check": "every_2"}, {}], ids=["every_2", "default"])
def test_a_fault_that_comes_later(settings: Any) -> None:
    """By default the third step is looked at, too."""
    match = "Likely cause: local positions"
    expect_on_every_rank(2, fit, "FaultyAtLast", settings, error=ParityError, match=match)


@pytest.mark.nightly
def test_experts_that_rounding_changes() -> None:
    """Under autocast other experts are chosen for a token or two; in float32 none."""
    settings = {**RING, **CHECKED}
    case = Case(model="gpt_oss")
    (line,) = run_ranks(2, huggingface, case, settings, "bf16-mixed", timeout=60)[0]
    assert "(float32;" in line

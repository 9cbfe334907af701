"""Ordinary modules are well, and a run that was checked is the one that was not, whatever a step does."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import transformers
from lightning.pytorch.loggers import Logger
from torch.utils.data import DataLoader

from lightning_cp import ContextParallelMixin
from lightning_cp.errors import ParityError
from lightning_cp.utils.dtensor import local_part
from tests.helpers.models.steps import Case, make_batch
from tests.helpers.parity import modules, ordinary
from tests.helpers.pool import expect_on_every_rank, run_ranks
from tests.helpers.strategies.small import HYBRID, RING, trainer_of
from tests.ranks.parity.test_healthy import CHECKED, Heard, HuggingFace, worst

OFF = {"parity_check": "off"}


class Told(Logger):
    """Keeps what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    @property
    def name(self) -> str:
        return "told"

    @property
    def version(self) -> int:
        return 0

    @property
    def experiment(self) -> Any:
        return self

    def write(self, line: str) -> None:
        self.lines.append(line)

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.lines += [name for name in metrics if name == "own"]

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass


class Pairs(ContextParallelMixin, ordinary.Pairs):
    """Knows the positions of its tokens."""


def data_of(name: str) -> list[Any]:
    rows = modules.rows(8)
    if name == "Pairs":
        return [(row["input_ids"], row["labels"]) for row in rows]
    for row in rows if name == "TakesApart" else ():
        row["position_ids"] = torch.arange(modules.LENGTH)
        row["table"] = torch.ones(3)
    return rows


def fit(
    rank: int, world_size: int, name: str, settings: dict[str, Any]
) -> tuple[dict[str, Any], list[float], list[str], list[str]]:
    """Everything that a module has after a run; losses; what was said; what a logger was told."""
    module = Pairs() if name == "Pairs" else getattr(ordinary, name)()
    loader: Any = DataLoader(data_of(name), batch_size=2)  # type: ignore[arg-type]
    told = Told()
    with Heard() as heard:
        options = {"logger": told, "log_every_n_steps": 1}
        trainer_of(world_size, settings, **options).fit(module, loader)
    state = {key: local_part(x).clone() for key, x in module.state_dict().items()}
    state.update(
        {
            key: vars(module)[key]
            for key in ("seen", "weight", "notes", "drawn")
            if key in vars(module)
        }
    )
    return state, module.losses, heard.parity, told.lines


def same(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


@pytest.mark.nightly
@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
@pytest.mark.parametrize(
    "name", ["Counts", "Draws", "TakesApart", "Follows", "WritesToItsLogger", "Pairs"]
)
def test_the_run_is_the_one_without(name: str, engine: str) -> None:
    settings = {**RING, "data_parallel": engine}
    if name == "Pairs":
        settings |= {"sequence_dims": {"0": 1, "1": 1}, "label_key": "1"}
    want = run_ranks(2, fit, name, {**settings, **OFF}, timeout=60)
    got = run_ranks(2, fit, name, {**settings, **CHECKED}, timeout=60)
    (line,) = got[0][2]
    assert worst(line) < 1e-10, line
    for (a, losses, _, told), (b, losses_without, _, told_without) in zip(got, want, strict=True):
        assert a.keys() == b.keys()
        assert [key for key in a if not same(a[key], b[key])] == []
        assert losses == losses_without
        assert told == told_without


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["HalfLoss", "OwnAutocast"])
def test_half_precision_within_a_step(name: str) -> None:
    """Its rounding is no fault, although the parameters are float32."""
    (line,) = run_ranks(2, fit, name, {**RING, **CHECKED}, timeout=60)[0][2]
    assert "agree on 96 tokens (bfloat16;" in line


@pytest.mark.nightly
def test_a_fault_in_half_precision() -> None:
    match = "Likely cause: unscaled loss"
    expect_on_every_rank(2, fit, "HalfSum", {**RING, **CHECKED}, error=ParityError, match=match)


@pytest.mark.nightly
def test_noise_of_each_token_is_the_same_on_both_sides() -> None:
    (line,) = run_ranks(2, fit, "Noisy", {**RING, **CHECKED}, timeout=60)[0][2]
    assert worst(line) < 1e-10, line


@pytest.mark.nightly
def test_noise_that_is_not_seen_cannot_be_compared() -> None:
    """A rank draws other numbers than one process: no fault, and said."""
    got = run_ranks(2, fit, "NoisyUnseen", {**RING, **CHECKED}, timeout=60)
    (line,) = got[0][2]
    assert "parity_check was left out because the step draws random numbers" in line


@pytest.mark.nightly
@pytest.mark.parametrize(("ranks", "mode"), [(2, RING), (4, HYBRID)], ids=["ring", "hybrid"])
def test_a_loss_that_is_no_mean_over_targets(ranks: int, mode: dict[str, Any]) -> None:
    match = "Likely cause: a loss that is not a mean over targets"
    settings = {**mode, **CHECKED}
    expect_on_every_rank(ranks, fit, "Balanced", settings, error=ParityError, match=match)


@pytest.mark.nightly
def test_lengths_that_padding_would_fill() -> None:
    """``padding=False`` holds for the prefix as well."""
    settings = {**HYBRID, **CHECKED, "padding": False, "parity_tokens": 70}
    (line,) = run_ranks(4, fit, "Draws", settings, timeout=60)[0][2]
    assert "agree on 64 tokens" in line


def of_transformers(
    rank: int, world_size: int, settings: dict[str, Any], kind: type[HuggingFace], case: Case
) -> list[str]:
    """What the check says of a case's one batch."""
    with Heard() as heard:
        trainer_of(world_size, settings).fit(
            kind(case),
            DataLoader([make_batch(case)], batch_size=None),  # type: ignore[arg-type]
        )
    return heard.parity


@pytest.mark.quick("reentrant")
@pytest.mark.parametrize("checkpoint", ["reentrant", "not reentrant"])
def test_checkpointing_of_packed_documents(checkpoint: str) -> None:
    """transformers makes no cache while it trains and recomputes, so that it isolates them."""
    case = Case(batch="packed", checkpoint=checkpoint)
    settings = {**RING, **CHECKED, "labels": "auto"}
    (line,) = run_ranks(2, of_transformers, settings, HuggingFace, case, timeout=60)[0]
    assert worst(line) < 1e-5


class Outside(HuggingFace):
    """Computes its loss from ``shift_labels``."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        logits = self.model(batch["input_ids"]).logits
        return torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), batch["shift_labels"].flatten()
        )


@pytest.mark.quick("ddp")
@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_targets_of_the_batch(engine: str) -> None:
    settings = {**RING, **CHECKED, "data_parallel": engine, "labels": "shift"}
    (line,) = run_ranks(2, of_transformers, settings, Outside, Case(), timeout=60)[0]
    assert worst(line) < 1e-5


class Experts(pl.LightningModule):
    """All in bfloat16: rounding chooses other experts for some tokens, and moves some gradients far."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        sizes: dict[str, Any] = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 64}
        heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2}
        experts: dict[str, Any] = {"num_local_experts": 16, "num_experts_per_tok": 2}
        layers: dict[str, Any] = {"num_hidden_layers": 4, "use_cache": False}
        config = transformers.MixtralConfig(**sizes, **heads, **experts, **layers)
        self.model = transformers.MixtralForCausalLM(config)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.model(**batch).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def experts(rank: int, world_size: int) -> list[str]:
    ids = torch.randint(0, 256, (2, 256), generator=torch.Generator().manual_seed(0))
    loader: Any = DataLoader([{"input_ids": ids, "labels": ids.clone()}], batch_size=None)  # type: ignore[arg-type]
    settings = {**RING, **CHECKED, "labels": "auto"}
    with Heard() as heard:
        trainer_of(world_size, settings, precision="bf16-true").fit(Experts(), loader)
    return heard.parity


@pytest.mark.nightly
def test_what_rounding_moves_far_is_no_fault() -> None:
    (line,) = run_ranks(2, experts, timeout=60)[0]
    assert worst(line) > 0.1, "its gradients are beyond their tolerance"

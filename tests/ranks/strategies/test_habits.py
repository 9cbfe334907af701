"""What users are used to from a Trainer: each habit gives what it gives in one process.

docs/guides/trainer.md lists them, with the test of each.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, cast

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import callbacks, loggers, profilers

from lightning_cp.errors import ConfigError
from tests.helpers.pool import expect_on_every_rank, run_ranks
from tests.helpers.strategies.small import (
    RING,
    Batch,
    Settings,
    Small,
    Staged,
    close,
    loader,
    samples,
    trainer_of,
    weights,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists:UserWarning"),
    pytest.mark.filterwarnings("ignore:You requested to overfit but enabled:UserWarning"),
    pytest.mark.filterwarnings("ignore:The PyTorch Profiler default schedule:UserWarning"),
    pytest.mark.filterwarnings("ignore:.torch.jit.*is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:torch.distributed.nn.functional.all_gather:FutureWarning"),
]


class Logged(Staged):
    """Logs its loss, so that the steps themselves are compared."""

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True, batch_size=1)
        return loss


@dataclass
class Seen(pl.Callback):
    """Losses of all steps, as callbacks are given them and as they are logged."""

    losses: list[float] = field(default_factory=list)

    def on_before_backward(self, trainer: pl.Trainer, pl_module: Any, loss: torch.Tensor) -> None:
        if pl_module.automatic_optimization:  # otherwise it is this rank's own
            self.losses.append(float(loss.detach()))

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Batch, batch_idx: int
    ) -> None:
        self.losses.append(float(outputs["loss"]))
        if "loss_step" in trainer.callback_metrics:
            self.losses.append(float(trainer.callback_metrics["loss_step"]))

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if "val_loss" in trainer.callback_metrics:
            self.losses.append(float(trainer.callback_metrics["val_loss"]))


Report = tuple[torch.Tensor, int, list[float], dict[str, float]]


def report(module: Any, trainer: pl.Trainer, seen: Seen) -> Report:
    """All that is compared."""
    metrics = {name: float(x) for name, x in trainer.callback_metrics.items()}
    return weights(module), trainer.global_step, seen.losses, metrics


def fitted(rank: int, world_size: int, settings: Settings | None, habit: str) -> Report:
    """Two epochs of four batches, validated after each."""
    kind, options = OPTIONS[habit]
    module, seen = kind(), Seen()
    more: Any = options() if callable(options) else dict(options)
    more["callbacks"] = [*more.get("callbacks", []), seen]
    trainer = trainer_of(world_size, settings, **{"max_epochs": 2, **more})
    shuffled = loader(8, shuffle=habit == "overfit_batches")
    trainer.fit(module, shuffled, None if habit == "barebones" else loader(4))
    return report(module, trainer, seen)


def compare(got: Report, want: Report) -> None:
    close(got[0], want[0])
    assert got[1] == want[1]
    assert got[2] == pytest.approx(want[2], rel=1e-10)
    assert got[3] == pytest.approx(want[3], rel=1e-10)


# -- options of the Trainer, and Lightning's own callbacks --------------------------------------------


class Scheduled(Logged):
    """A learning rate for every step, and one that looks at a monitored loss."""

    plateau = False

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        if self.plateau:
            rate: Any = torch.optim.lr_scheduler.ReduceLROnPlateau(
                optimizer, patience=0, threshold=9
            )
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": rate, "monitor": "val_loss"},
            }
        rate = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)
        return [optimizer], [{"scheduler": rate, "interval": "step"}]


class Plateau(Scheduled):
    plateau = True


class Closures(Logged):
    """Runs forward and backward several times a step."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


class OwnClipping(Logged):
    """Clips in its own way."""

    def configure_gradient_clipping(
        self,
        optimizer: Any,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        self.clip_gradients(optimizer, 0.02, "norm")


class Manual(Logged):
    """Steps its optimizer itself, and returns its loss for callbacks: a tensor, or in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False  # type: ignore[assignment]

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        loss, optimizer = super().training_step(batch, batch_idx), cast(Any, self.optimizers())
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return {"loss": loss, "index": batch_idx} if batch_idx % 2 else loss


class Gathers(Logged):
    """Uses ``all_gather`` inside the step."""

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.all_gather(loss.detach())
        return loss


class Freezing(callbacks.BaseFinetuning):
    """The embedding learns nothing in the first epoch."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.model.embed)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.model.embed, optimizer)


class Frozen(Logged):
    """For that, only what can be trained belongs to the optimizer."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.05)


class TakingTurns(pl.Callback):
    """One half of the layers learns in even epochs, the other in odd ones, and all in the last."""

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        parameters = list(pl_module.parameters())
        for index, parameter in enumerate(parameters):
            turn = (index < len(parameters) // 2) == (trainer.current_epoch % 2 == 0)
            parameter.requires_grad_(turn or trainer.current_epoch == 3)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.on_train_epoch_start(trainer, pl_module)


class Momentless(Logged):
    """An optimizer that leaves alone what has no gradient."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


class AnExample(Logged):
    """Knows an input for summaries and graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = samples(1)[0]["input_ids"][None]

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.logits({"input_ids": ids})


OPTIONS: dict[str, tuple[Any, Any]] = {
    "sanity check": (Logged, {"num_sanity_val_steps": 2}),
    "fast_dev_run": (Logged, {"fast_dev_run": 2}),
    "overfit_batches": (Logged, {"overfit_batches": 2}),
    "validation within an epoch": (Logged, {"val_check_interval": 0.5}),
    "limits": (Logged, {"limit_train_batches": 3, "limit_val_batches": 1}),
    "check_val_every_n_epoch": (Logged, {"check_val_every_n_epoch": 2, "max_steps": 7}),
    "reload": (Logged, {"reload_dataloaders_every_n_epochs": 1}),
    "accumulation that changes": (
        Logged,
        lambda: {"callbacks": [callbacks.GradientAccumulationScheduler({0: 1, 1: 3})]},
    ),
    "clip by value": (Logged, {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"}),
    "own clipping": (OwnClipping, {}),
    "schedule": (
        Scheduled,
        lambda: {
            "callbacks": [callbacks.LearningRateMonitor()],
            "log_every_n_steps": 1,
            "logger": True,
        },
    ),
    "plateau": (Plateau, {}),
    "LBFGS": (Closures, {}),
    "manual optimization": (Manual, {}),
    "all_gather": (Gathers, {}),
    "detect_anomaly": (Logged, {"detect_anomaly": True}),
    "deterministic": (Logged, {"deterministic": True}),
    "barebones": (
        Small,
        {
            "barebones": True,
            **dict.fromkeys(
                [
                    "logger",
                    "enable_checkpointing",
                    "enable_progress_bar",
                    "enable_model_summary",
                    "num_sanity_val_steps",
                ]
            ),
        },
    ),
    "simple profiler": (Logged, lambda: {"profiler": profilers.SimpleProfiler(".", "simple")}),
    "advanced profiler": (
        Logged,
        lambda: {"profiler": profilers.AdvancedProfiler(".", "advanced")},
    ),
    "pytorch profiler": (Logged, lambda: {"profiler": profilers.PyTorchProfiler(".", "torch")}),
    "summary": (AnExample, {"callbacks": [callbacks.ModelSummary(max_depth=-1)]}),
    "weight averaging": (Logged, lambda: {"callbacks": [callbacks.EMAWeightAveraging()]}),
    "stochastic weight averaging": (
        Logged,
        lambda: {
            "max_epochs": 3,
            "callbacks": [callbacks.StochasticWeightAveraging(0.01, swa_epoch_start=1)],
        },
    ),
    "finetuning": (Frozen, lambda: {"callbacks": [Freezing()]}),
    "taking turns": (Momentless, lambda: {"callbacks": [TakingTurns()], "max_epochs": 4}),
    "bars": (Logged, {"enable_progress_bar": True}),
    "timer": (Logged, lambda: {"callbacks": [callbacks.Timer("00:01:00:00")]}),
    "graph in TensorBoard": (
        AnExample,
        lambda: {
            "logger": loggers.TensorBoardLogger("graph", log_graph=True),
            "log_every_n_steps": 1,
        },
    ),
}


@lru_cache(maxsize=64)
def alone(habit: str) -> Report:
    return run_ranks(1, fitted, None, habit)[0]


@pytest.mark.quick("manual optimization")
@pytest.mark.parametrize("habit", OPTIONS)
def test_it_is_as_in_one_process(habit: str) -> None:
    want = alone(habit)
    assert not torch.equal(want[0], weights(Small())), "nothing was trained"
    for got in run_ranks(2, fitted, RING, habit):
        compare(got, want)


def average(rank: int, world_size: int, engine: str, kind: str) -> None:
    """Begin to train with a callback that averages weights."""
    given = {"swa_lrs": 0.01} if kind.startswith("Stochastic") else {}
    made = getattr(callbacks, kind)(**given)
    settings = {**RING, "data_parallel": engine}
    trainer_of(world_size, settings, callbacks=[made]).fit(Small(), loader(2))


@pytest.mark.parametrize(
    ("engine", "kind"),
    [
        ("fsdp", "EMAWeightAveraging"),
        pytest.param("zero1", "EMAWeightAveraging", marks=pytest.mark.nightly),
        pytest.param("fsdp", "StochasticWeightAveraging", marks=pytest.mark.nightly),
    ],
)
def test_averages_of_sharded_weights_are_refused(engine: str, kind: str) -> None:
    match = f"{kind} averages a whole copy.*data_parallel='{engine}'.*Train with"
    expect_on_every_rank(2, average, engine, kind, error=ConfigError, match=match)

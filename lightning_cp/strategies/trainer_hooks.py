"""Parts of Lightning's Trainer that the strategy reads, and takes over."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins import Precision
from lightning.pytorch.profilers import PyTorchProfiler
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch.optim import Optimizer

from lightning_cp.errors import ConfigError
from lightning_cp.strategies.engines import Engine
from lightning_cp.strategies.replaced import Replaced

STEPS = ("training_step", "validation_step", "test_step", "predict_step")


def refuse_dataloader_iter(module: LightningModule) -> None:
    """Refuse steps that are given no batch.

    Raises:
        ConfigError: one of them takes an iterator of batches.
    """
    for step in STEPS:
        hook = getattr(module, step, None)
        if callable(hook) and is_param_in_hook_signature(hook, "dataloader_iter", explicit=True):
            raise ConfigError(
                f"{step}(dataloader_iter) fetches batches by itself, so they are never sharded. Take the "
                f"batch instead: {step}(self, batch, batch_idx)."
            )


def refuse_averages(trainer: Trainer, engine: str) -> None:
    """Refuse callbacks that keep a whole copy of a model, to average it with parameters that are sharded.

    Raises:
        ConfigError: naming the first one.
    """
    kinds = (WeightAveraging, StochasticWeightAveraging)
    callbacks: list[Any] = trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
    for callback in callbacks:
        if isinstance(callback, kinds):
            raise ConfigError(
                f"{type(callback).__name__} averages a whole copy of the model, but with "
                f"data_parallel={engine!r} each rank holds a part of the parameters. Train with "
                "data_parallel='ddp', or leave the callback out."
            )


def place_of_profiles(trainer: Trainer, profile: object) -> Path:
    """Next to what is logged; ranks agree on that folder.

    Raises:
        ConfigError: the Trainer records steps itself.
    """
    if isinstance(getattr(trainer, "profiler", None), PyTorchProfiler):
        raise ConfigError(
            f"profile={profile} records steps with torch.profiler, and so does the Trainer's "
            "PyTorchProfiler, but there can be one at a time. Leave out profile=, or profiler=: it shows "
            "the same named ranges."
        )
    return Path(trainer.log_dir or trainer.default_root_dir, "profile")


def leave_samplers_alone(trainer: Trainer) -> None:
    """All ranks read the same samples, as one process does; Lightning's sampler would shuffle them."""
    connector: Any = trainer._accelerator_connector
    assert hasattr(connector, "use_distributed_sampler")  # Lightning's own, and private
    connector.use_distributed_sampler = False


def before_hooks_of_batch(
    replaced: Replaced, precision: Precision, act: Callable[[], object]
) -> None:
    """Call ``act()`` once a batch was read, before any hook is called with it."""

    def first(own: Callable[..., Any]) -> Callable[..., Any]:
        def convert_input(batch: Any) -> Any:
            act()
            return own(batch)

        return convert_input

    replaced.replace(precision, "convert_input", first)


def before_hooks_of_backward(
    replaced: Replaced, precision: Precision, scaled: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Go on with ``scaled(loss)``: a strategy's own hook there returns nothing."""

    def first(own: Callable[..., Any]) -> Callable[..., Any]:
        def pre_backward(tensor: torch.Tensor, *args: Any) -> torch.Tensor:
            return own(scaled(tensor), *args)

        return pre_backward

    replaced.replace(precision, "pre_backward", first)


def before_autograd(
    replaced: Replaced, precision: Precision, act: Callable[[torch.Tensor], object]
) -> None:
    """Call ``act(loss)`` between the hooks before a backward and autograd: Lightning has no hook there."""

    def after_hooks(own: Callable[..., Any]) -> Callable[..., Any]:
        def backward(loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            act(loss)
            own(loss, *args, **kwargs)

        return backward

    replaced.replace(precision, "backward", after_hooks)


def before_clipping(
    replaced: Replaced, precision: Precision, act: Callable[[Optimizer], object]
) -> None:
    """Call ``act(optimizer)`` before gradients are clipped, be it by hand."""

    def in_final_size(own: Callable[..., Any]) -> Callable[..., Any]:
        def clip(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            wrapped = isinstance(optimizer, LightningOptimizer)
            act(optimizer.optimizer if wrapped else optimizer)
            own(optimizer, *args, **kwargs)

        return clip

    replaced.replace(precision, "clip_gradients", in_final_size)


def after_toggling(replaced: Replaced, module: Any, act: Callable[[], object]) -> None:
    """Call ``act()`` once an optimizer's parameters were frozen or unfrozen: those of a step are others."""

    def then(own: Callable[..., Any]) -> Callable[..., Any]:
        def toggle(*args: Any, **kwargs: Any) -> None:
            own(*args, **kwargs)
            act()

        return toggle

    for name in ("toggle_optimizer", "untoggle_optimizer"):
        replaced.replace(module, name, then)


def clip_by(replaced: Replaced, precision: Any, engine: Engine) -> None:
    """Have gradients clipped by an engine that knows who holds which part of them."""

    def by_norm(own: Callable[..., Any]) -> Callable[..., Any]:
        def clip(optimizer: Optimizer, clip_val: float) -> None:
            engine.clip_norm(precision.main_params(optimizer), clip_val)

        return clip

    def by_value(own: Callable[..., Any]) -> Callable[..., Any]:
        def clip(optimizer: Optimizer, clip_val: float) -> None:
            engine.clip_value(precision.main_params(optimizer), clip_val)

        return clip

    replaced.replace(precision, "clip_grad_by_norm", by_norm)
    replaced.replace(precision, "clip_grad_by_value", by_value)

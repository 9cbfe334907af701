"""Parts of Lightning's Trainer that the strategy reads, and takes over."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeGuard

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import (
    Checkpoint,
    ModelCheckpoint,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins import Precision
from lightning.pytorch.profilers import PyTorchProfiler
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch.optim import Optimizer

from lightning_cp.comm.consensus import World
from lightning_cp.config import StrategyConfig
from lightning_cp.engines.base import Engine
from lightning_cp.errors import ConfigError
from lightning_cp.profile.recorder import StepRecorder
from lightning_cp.utils.patching import PatchSet

_log = logging.getLogger("lightning_cp")
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


def place_profiles(trainer: Trainer, settings: StrategyConfig, recorder: StepRecorder) -> None:
    """Record profiles where the Trainer logs, unless the user chose another folder.

    Raises:
        ConfigError: the Trainer records steps itself.
    """
    if not settings.profiled_steps:
        return
    if isinstance(getattr(trainer, "profiler", None), PyTorchProfiler):
        raise ConfigError(
            f"profile={settings.profile} records steps with torch.profiler, and so does the Trainer's "
            "PyTorchProfiler, but there can be one at a time. Leave out profile=, or profiler=: it shows "
            "the same named ranges."
        )
    folder = Path(trainer.log_dir or trainer.default_root_dir, "profile")  # all ranks ask for it
    if settings.profile_folder is None:
        recorder.folder = folder


def leave_samplers_alone(trainer: Trainer) -> None:
    """All ranks read the same samples, as one process does; Lightning's sampler would shuffle them."""
    connector: Any = trainer._accelerator_connector
    assert hasattr(connector, "use_distributed_sampler")  # Lightning's own, and private
    connector.use_distributed_sampler = False


def before_hooks_of_batch(
    replaced: PatchSet, precision: Precision, act: Callable[[], object]
) -> None:
    """Call ``act()`` once a batch was read, before any hook is called with it."""

    def first(own: Callable[..., Any]) -> Callable[..., Any]:
        def convert_input(batch: Any) -> Any:
            act()
            return own(batch)

        return convert_input

    replaced.replace(precision, "convert_input", first)


def before_hooks_of_backward(
    replaced: PatchSet, precision: Precision, scaled: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Go on with ``scaled(loss)``: a strategy's own hook there returns nothing."""

    def first(own: Callable[..., Any]) -> Callable[..., Any]:
        def pre_backward(tensor: torch.Tensor, *args: Any) -> torch.Tensor:
            return own(scaled(tensor), *args)

        return pre_backward

    replaced.replace(precision, "pre_backward", first)


def before_autograd(
    replaced: PatchSet, precision: Precision, act: Callable[[torch.Tensor], object]
) -> None:
    """Call ``act(loss)`` between the hooks before a backward and autograd: Lightning has no hook there."""

    def after_hooks(own: Callable[..., Any]) -> Callable[..., Any]:
        def backward(loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            act(loss)
            own(loss, *args, **kwargs)

        return backward

    replaced.replace(precision, "backward", after_hooks)


def before_clipping(
    replaced: PatchSet, precision: Precision, act: Callable[[Optimizer], object]
) -> None:
    """Call ``act(optimizer)`` before gradients are clipped, be it by hand."""

    def in_final_size(own: Callable[..., Any]) -> Callable[..., Any]:
        def clip(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            wrapped = isinstance(optimizer, LightningOptimizer)
            act(optimizer.optimizer if wrapped else optimizer)
            own(optimizer, *args, **kwargs)

        return clip

    replaced.replace(precision, "clip_gradients", in_final_size)


def after_toggling(replaced: PatchSet, module: Any, act: Callable[[], object]) -> None:
    """Call ``act()`` once an optimizer's parameters were frozen or unfrozen: those of a step are others."""

    def then(own: Callable[..., Any]) -> Callable[..., Any]:
        def toggle(*args: Any, **kwargs: Any) -> None:
            own(*args, **kwargs)
            act()

        return toggle

    for name in ("toggle_optimizer", "untoggle_optimizer"):
        replaced.replace(module, name, then)


def prevent_saves(replaced: PatchSet, trainer: Trainer) -> None:
    """Prevent saves by callbacks and by anybody else."""

    def warn(filepath: Any, *_: Any, **__: Any) -> None:
        _log.warning("after an error no checkpoint is saved: other ranks would have to take part.")

    def ignore(*_: Any, **__: Any) -> None:
        pass

    replaced.replace(trainer, "save_checkpoint", lambda _: warn)
    for callback in trainer.callbacks:  # pyright: ignore[reportAttributeAccessIssue]
        if isinstance(callback, Checkpoint):  # it would give up an older one for the new one
            replaced.replace(callback, "on_exception", lambda _: ignore)


def clip_by(replaced: PatchSet, precision: Any, engine: Engine) -> None:
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


# Decisions of Lightning by a value, and saves of callbacks, where several ranks do them together.
#
# A value that is logged without ``sync_dist`` is another one on each data rank. What it decides (which
# checkpoint is the best, its name, a learning rate) has to be the same on all of them: ranks that name
# other files wait for each other, and those with other learning rates train parts of what is no model. So
# the first rank's decides.


ALONE = (
    "a rank that leaves with an error cannot save for all, because the others are not going to take part. "
    "The last complete checkpoint is the one to resume from."
)


def adopt_callbacks(replaced: PatchSet, trainer: Trainer, saver: Any) -> None:
    """Have ranks decide by the same values, links made once they point to something, and nobody save alone.

    Args:
        replaced: gives back what is replaced.
        trainer: whose callbacks and loops decide.
        saver: makes the links, and warns.
    """
    replaced.undo()
    loop: Any = trainer.fit_loop.epoch_loop
    if World().size > 1:
        replaced.replace(loop, "_get_monitor_value", lambda own: _value_of_first(own, saver))
    callbacks: list[Any] = trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
    for callback in callbacks:
        if isinstance(callback, ModelCheckpoint) and hasattr(callback, "_link_checkpoint"):
            replaced.replace(callback, "_link_checkpoint", lambda own: _linking(saver))
        if World().size > 1 and isinstance(callback, ModelCheckpoint):
            _decide_by_first(replaced, callback, saver)
        saves = isinstance(callback, (ModelCheckpoint, OnExceptionCheckpoint))
        if saves and World().size > 1 and getattr(callback, "save_on_exception", True):
            replaced.replace(callback, "on_exception", lambda own: _not_alone)


def _decide_by_first(replaced: PatchSet, callback: Any, saver: Any) -> None:
    def replacement(own: Callable[..., Any]) -> Callable[..., Any]:
        return lambda trainer: _of_first(own(trainer), callback.monitor, saver)

    replaced.replace(callback, "_monitor_candidates", replacement)


def _value_of_first(own: Callable[[str], Any], saver: Any) -> Callable[[str], Any]:
    def value(key: str) -> Any:
        found = own(key)
        return _of_first({} if found is None else {key: found}, key, saver).get(key)

    return value


def _of_first(values: dict[str, Any], decides: str | None, saver: Any) -> dict[str, Any]:
    """The first rank's logged values, on this rank's devices. Collective.

    Args:
        values: this rank's.
        decides: the name of the one that is monitored; where ranks differ in it that is said once.
        saver: warns.
    """
    every = World().gather({k: x.cpu() if _is(x) else x for k, x in values.items()})
    first = every[0]
    for rank, other in enumerate(every):
        said = [_shown(found.get(decides)) for found in (first, other)] if decides else []
        if len(set(said)) > 1:
            saver.say_once(
                f"ranks have other values of {decides!r}, which is monitored: {said[0]} on rank 0, {said[1]} "
                f"on rank {rank}. That of rank 0 decides on all of them. "
                + (_LACKS if "none" in said else _MEAN),
                about=f"monitored {decides}",
            )
            break
    devices = {name: x.device for name, x in values.items() if _is(x)}
    return {
        name: x.to(devices[name]) if _is(x) and name in devices else x for name, x in first.items()
    }


_MEAN = "Log it with sync_dist=True to have the mean of all decide."
_LACKS = "To have the mean of all decide, log it on all of them, with sync_dist=True."


def _is(x: object) -> TypeGuard[torch.Tensor]:
    return isinstance(x, torch.Tensor)


def _shown(x: object) -> str:
    return "none" if x is None else f"{float(x):g}" if _is(x) and x.numel() == 1 else repr(x)


def _linking(saver: Any) -> Any:
    def link(trainer: Trainer, filepath: str, linkpath: str) -> None:
        saver.link(filepath, linkpath)

    return link


def _not_alone(trainer: Trainer, module: LightningModule, error: BaseException) -> None:
    rank_zero_info(f"no checkpoint is saved on {type(error).__name__}: {ALONE}")

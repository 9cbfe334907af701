"""Checks of Lightning's Trainer, and patches of it, its callbacks and its precision plugin."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import (
    Checkpoint,
    ModelCheckpoint,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.profilers import PyTorchProfiler
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch.optim import Optimizer

from lightning_cp.comm.consensus import World
from lightning_cp.config import StrategyConfig
from lightning_cp.engines.base import Engine
from lightning_cp.engines.gradients import unscale
from lightning_cp.errors import ConfigError
from lightning_cp.layout.axes import Axis, Flat
from lightning_cp.profile.recorder import StepRecorder
from lightning_cp.utils.containers import tensors_of
from lightning_cp.utils.patching import PatchSet

if TYPE_CHECKING:
    from lightning_cp.checkpoint.manager import CheckpointManager
    from lightning_cp.runtime.mesh_builder import MeshBuilder

_log = logging.getLogger("lightning_cp")
STEPS = ("training_step", "validation_step", "test_step", "predict_step")


def check_no_dataloader_iter(module: LightningModule) -> None:
    """Check that steps take a batch.

    Raises:
        ConfigError: a step takes an iterator of batches.
    """
    for step in STEPS:
        hook = getattr(module, step, None)
        if callable(hook) and is_param_in_hook_signature(hook, "dataloader_iter", explicit=True):
            raise ConfigError(
                f"{step}(dataloader_iter) fetches batches by itself, so they are never sharded. Take the "
                f"batch instead: {step}(self, batch, batch_idx)."
            )


def check_no_averages(trainer: Trainer, engine: str) -> None:
    """Check that no callback averages a whole copy of the model with sharded parameters.

    Raises:
        ConfigError: naming the first such callback.
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


def keep_samplers(trainer: Trainer) -> None:
    """Keep the user's sampler: Lightning's would shuffle, and all ranks read the same samples."""
    connector: Any = trainer._accelerator_connector
    assert hasattr(connector, "use_distributed_sampler")  # Lightning's own, and private
    connector.use_distributed_sampler = False


def device_of_hooks(batch: Any, trainer: Trainer, device: Any) -> Any:
    """Return the device on which Lightning's hooks see a batch: the host, unless it or a hook needs another.

    The hooks are called in both cases, so that profilers show the same ones for every batch.

    Args:
        batch: a batch of tensors.
        trainer: the owner of the hooks.
        device: the device of a batch that is there already, or that hooks of the module or its data move or
            change.
    """
    for _, x in tensors_of(batch):
        if x.device.type != "cpu":
            return device
    hooks = trainer._data_connector._datahook_selector
    for name in ("transfer_batch_to_device", "on_after_batch_transfer"):
        if hooks is not None and is_overridden(name, hooks.get_instance(name)):
            return device
    return torch.device("cpu")


def call_after_toggling(patches: PatchSet, module: Any, act: Callable[[], object]) -> None:
    """Call ``act()`` after an optimizer is toggled, which freezes or unfreezes parameters."""

    def then(own: Callable[..., Any]) -> Callable[..., Any]:
        def toggle(*args: Any, **kwargs: Any) -> None:
            own(*args, **kwargs)
            act()

        return toggle

    for name in ("toggle_optimizer", "untoggle_optimizer"):
        patches.replace(module, name, then)


def prevent_saves(patches: PatchSet, trainer: Trainer) -> None:
    """Prevent saves by callbacks and by user code."""

    def warn(filepath: Any, *_: Any, **__: Any) -> None:
        _log.warning("after an error no checkpoint is saved: other ranks would have to take part.")

    def ignore(*_: Any, **__: Any) -> None:
        pass

    patches.replace(trainer, "save_checkpoint", lambda _: warn)
    for callback in trainer.callbacks:  # pyright: ignore[reportAttributeAccessIssue]
        if isinstance(callback, Checkpoint):  # it would delete an older checkpoint for the new one
            patches.replace(callback, "on_exception", lambda _: ignore)


def clip_with_engine(
    patches: PatchSet, precision: Any, engine: Engine, meshes: MeshBuilder
) -> None:
    """Unscale and clip gradients with an engine that knows which rank holds which part of them."""

    def by_norm(own: Callable[..., Any]) -> Callable[..., Any]:
        def clip(optimizer: Optimizer, clip_val: float) -> None:
            engine.clip_norm(precision.main_params(optimizer), clip_val)

        return clip

    def by_value(own: Callable[..., Any]) -> Callable[..., Any]:
        def clip(optimizer: Optimizer, clip_val: float) -> None:
            engine.clip_value(precision.main_params(optimizer), clip_val)

        return clip

    patches.replace(precision, "clip_grad_by_norm", by_norm)
    patches.replace(precision, "clip_grad_by_value", by_value)
    unscale_with_ranks(patches, precision, meshes)


def unscale_with_ranks(patches: PatchSet, precision: Any, meshes: MeshBuilder) -> None:
    """Have a ``GradScaler`` unscale gradients that are spread over ranks; all ranks skip the same steps.

    Raises:
        ConfigError: another kind of scaler, which unscales in its own way.
    """
    scaler = getattr(precision, "scaler", None)
    if scaler is None:
        return
    own = getattr(type(scaler), "_unscale_grads_", None)
    if own is not torch.amp.GradScaler._unscale_grads_:
        raise ConfigError(
            f"the precision plugin has a {type(scaler).__name__}, which looks for infinite gradients in its "
            "own way, so ranks that share parameters could skip different steps. Pass a torch.amp.GradScaler."
        )

    def unscale_on_all_ranks(*args: Any) -> Any:
        groups = [meshes.mesh.group(each) for each in (Flat.LOSS, Axis.TP)]
        return unscale(*args, groups=[group for group in groups if group.size() > 1])

    patches.put_method(scaler, "_unscale_grads_", unscale_on_all_ranks)


# Decisions of Lightning by a logged value, and saves of callbacks, on several ranks.
#
# Data ranks have different values of what is logged without ``sync_dist``. The decisions that depend on it
# (the best checkpoint, its name, a learning rate) must be the same on all ranks: ranks that name different
# files wait for each other, and different learning rates break the model. So the first rank's value decides.


CANNOT_SAVE_ALONE = (
    "a rank that leaves with an error cannot save for all, because the others are not going to take part. "
    "The last complete checkpoint is the one to resume from."
)


def adopt_callbacks(patches: PatchSet, trainer: Trainer, saver: CheckpointManager) -> None:
    """Let ranks decide by the same values, link complete checkpoints only, and never save alone.

    Args:
        patches: receiver of the patches.
        trainer: the Trainer, whose callbacks and loops are patched.
        saver: maker of links and warnings.
    """
    patches.undo()
    loop: Any = trainer.fit_loop.epoch_loop
    if World().size > 1:
        patches.replace(loop, "_get_monitor_value", lambda own: _monitor_first_rank(own, saver))
    callbacks: list[Any] = trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
    for callback in callbacks:
        if isinstance(callback, ModelCheckpoint) and hasattr(callback, "_link_checkpoint"):
            patches.replace(callback, "_link_checkpoint", lambda own: _link_by(saver))
        if World().size > 1 and isinstance(callback, ModelCheckpoint):
            _rank_candidates_by_first(patches, callback, saver)
        saves = isinstance(callback, (ModelCheckpoint, OnExceptionCheckpoint))
        if saves and World().size > 1 and getattr(callback, "save_on_exception", True):
            patches.replace(callback, "on_exception", lambda own: _report_no_save)


def _rank_candidates_by_first(patches: PatchSet, callback: Any, saver: CheckpointManager) -> None:
    def replacement(own: Callable[..., Any]) -> Callable[..., Any]:
        return lambda trainer: _values_of_first_rank(own(trainer), callback.monitor, saver)

    patches.replace(callback, "_monitor_candidates", replacement)


def _monitor_first_rank(
    own: Callable[[str], Any], saver: CheckpointManager
) -> Callable[[str], Any]:
    def value(key: str) -> Any:
        found = own(key)
        return _values_of_first_rank({} if found is None else {key: found}, key, saver).get(key)

    return value


def _values_of_first_rank(
    values: dict[str, Any], monitored: str | None, saver: CheckpointManager
) -> dict[str, Any]:
    """Return the first rank's logged values, on this rank's devices. Collective.

    Args:
        values: this rank's.
        monitored: name of the monitored value; if ranks differ in it, a warning says so once.
        saver: source of the warning.
    """
    every = World().gather({k: x.cpu() if _is_tensor(x) else x for k, x in values.items()})
    first = every[0]
    for rank, other in enumerate(every):
        texts = [_value_text(found.get(monitored)) for found in (first, other)] if monitored else []
        if len(set(texts)) > 1:
            saver.warn_once(
                f"ranks have other values of {monitored!r}, which is monitored: {texts[0]} on rank 0, "
                f"{texts[1]} on rank {rank}. That of rank 0 decides on all of them. "
                + (_LOG_ON_ALL if "none" in texts else _LOG_MEAN),
                about=f"monitored {monitored}",
            )
            break
    devices = {name: x.device for name, x in values.items() if _is_tensor(x)}
    return {
        name: x.to(devices[name]) if _is_tensor(x) and name in devices else x
        for name, x in first.items()
    }


_LOG_MEAN = "Log it with sync_dist=True to have the mean of all decide."
_LOG_ON_ALL = "To have the mean of all decide, log it on all of them, with sync_dist=True."


def _is_tensor(x: object) -> TypeGuard[torch.Tensor]:
    return isinstance(x, torch.Tensor)


def _value_text(x: object) -> str:
    return "none" if x is None else f"{float(x):g}" if _is_tensor(x) and x.numel() == 1 else repr(x)


def _link_by(saver: CheckpointManager) -> Callable[[Trainer, str, str], None]:
    def link(trainer: Trainer, filepath: str, linkpath: str) -> None:
        saver.link(filepath, linkpath)

    return link


def _report_no_save(trainer: Trainer, module: LightningModule, error: BaseException) -> None:
    rank_zero_info(f"no checkpoint is saved on {type(error).__name__}: {CANNOT_SAVE_ALONE}")

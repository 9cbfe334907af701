"""Saves and loads of the Trainer's strategy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch.optim import Optimizer

from lightning_cp.checkpoint.checkpoint_io import open_anywhere, writer_for
from lightning_cp.checkpoint.manager import CheckpointManager, check_models_complete
from lightning_cp.checkpoint.manifest import SaveInfo
from lightning_cp.checkpoint.read import Checkpoint
from lightning_cp.checkpoint.restore import (
    fit_state,
    kinds_of,
    load_module,
    names_by_optimizer,
    names_of,
    templates_for,
)
from lightning_cp.comm.consensus import World
from lightning_cp.engines.base import Engine
from lightning_cp.errors import CheckpointError
from lightning_cp.runtime.runtime import ContextParallelRuntime
from lightning_cp.strategies.lightning_patches import CANNOT_SAVE_ALONE, adopt_callbacks
from lightning_cp.utils.patching import PatchSet

_HYPERPARAMETERS = tuple(
    name
    for kind in (LightningModule, LightningDataModule)
    for name in (kind.CHECKPOINT_HYPER_PARAMS_KEY, kind.CHECKPOINT_HYPER_PARAMS_TYPE)
)
_MAY_DIFFER = ("callbacks",)
"""Parts whose values differ on data ranks; the first rank's are saved."""
_DTYPES = {"64-true": torch.float64, "bf16-true": torch.bfloat16, "16-true": torch.float16}


class TrainerCheckpoints:
    """Saves and loads of one run: ``ModelCheckpoint`` and ``ckpt_path`` end up here.

    Args:
        manager: writer of checkpoints and their links.
        engine: owner of the parameters, sharded or not.
        runtime: of the run.
    """

    def __init__(
        self, manager: CheckpointManager, engine: Engine, runtime: ContextParallelRuntime
    ) -> None:
        self._manager, self._engine, self._runtime = manager, engine, runtime
        self._patches = PatchSet()
        self._in_training = False
        """True while saves may continue in the background."""
        self._weights_before: dict[str, Any] | None = None
        """Weights before a load, on the CPU, until the optimizers' state is found to fit, too."""
        self._names: dict[str, list[str]] = {}
        self._kinds: dict[str, list[str]] = {}

    @property
    def loads_after_setup(self) -> bool:
        """True if a checkpoint is loaded after the model's setup: into shards, or over pretrained weights."""
        return self._engine.shards or self._runtime.settings.pretrained is not None

    def adopt_callbacks(self, trainer: Trainer) -> None:
        """Patch callbacks, which save on several ranks."""
        adopt_callbacks(self._patches, trainer, self._manager)

    def begin_training(self) -> None:
        """Allow saves to continue in the background."""
        self._in_training, self._weights_before = True, None

    def end_training(self) -> None:
        """Wait for the save in the background.

        Raises:
            CheckpointError: on every rank: it failed on some.
        """
        self._in_training = False
        self._manager.finish()

    def teardown(self) -> None:
        """End the save in the background, and restore callbacks."""
        self._in_training, self._weights_before = False, None
        self._manager.abandon()
        self._patches.undo()

    def save(
        self,
        checkpoint: dict[str, Any],
        module: LightningModule,
        optimizers: Sequence[Optimizer],
        path: str | Path,
        io: Any,
        storage_options: Any,
    ) -> None:
        """Save the Trainer's state; called on every rank.

        Args:
            checkpoint: the state.
            module: the user's.
            optimizers: of the module.
            path: of the checkpoint.
            io: a plugin that writes it, or ours.
            storage_options: options of a store.

        Raises:
            CheckpointError: on every rank: it cannot be written; or this rank ends with an error, so that the
                others will not take part.
        """
        trainer = module._trainer
        interrupted = trainer is not None and trainer.state.status == TrainerStatus.INTERRUPTED
        if interrupted and World().size > 1:
            raise CheckpointError(f"{Path(path).name} is not saved: {CANNOT_SAVE_ALONE}")
        check_models_complete([module])
        named = dict(module.named_parameters())
        names = [names_of(optimizer, named) for optimizer in optimizers]
        kinds = [kinds_of(optimizer) for optimizer in optimizers]
        sizes, engine = self._runtime.meshes.sizes, self._runtime.settings.data_parallel
        self._manager.save(
            checkpoint,
            path,
            SaveInfo(checkpoint.get("global_step"), sizes, engine),
            {"parameters": names_by_optimizer(names), "kinds": names_by_optimizer(kinds)},
            may_lack=_HYPERPARAMETERS,
            may_differ=_MAY_DIFFER,
            elsewhere=writer_for(io, path, storage_options),
            wait=not self._in_training,
        )

    def read(
        self,
        module: LightningModule | None,
        optimizers: Sequence[Optimizer],
        path: str | Path,
        io: Any,
        weights_only: bool | None,
    ) -> dict[str, Any]:
        """Verify a checkpoint and read it, the optimizers' state only for a fit; called on every rank.

        Raises:
            CheckpointError: on every rank: it is missing, damaged, or was not saved by a Trainer.
        """
        opened = open_anywhere(io, path, weights_only)
        _check_from_trainer(opened)
        if opened.manifest is None:
            rank_zero_info(
                f"{opened.path.name} was written by another program: it has no manifest to be verified "
                "against."
            )
        self._names = dict(opened.ours.get("parameters", {}))
        self._kinds = dict(opened.ours.get("kinds", {}))
        trainer = None if module is None else module._trainer
        fits = trainer is None or trainer.state.fn == TrainerFn.FITTING
        keys = [key for key in opened.tree if fits or key != "optimizer_states"]
        if module is None or not self._engine.shards:
            return opened.read(keys=keys)
        named = {
            ("optimizer_states", at): (x, self._names.get(f"optimizer_states.{at}", []))
            for at, x in enumerate(optimizers)
        }
        return opened.read(templates_for({"state_dict": module}, named), keys)

    def load_model(
        self,
        checkpoint: Mapping[str, Any],
        module: LightningModule,
        optimizers: Sequence[Optimizer],
        precision: object,
        *,
        strict: bool,
    ) -> None:
        """Load the weights, after a check that the whole checkpoint fits.

        Without optimizers yet, ``load_optimizers`` restores the weights if their state does not fit.

        Raises:
            CheckpointError: a name, shape or dtype differs; the model and the optimizers are as they were.
        """
        trainer = module._trainer
        fitting = trainer is not None and trainer.state.fn == TrainerFn.FITTING
        state, dtype = checkpoint["state_dict"], _DTYPES.get(str(precision))
        # Weights first: with another model, its optimizer does not fit either.
        load_module(module, state, strict=strict, dtype=dtype, check_only=True)
        if fitting and self.loads_after_setup:
            self._fitting_states(checkpoint, module, optimizers)
        elif fitting:
            self._weights_before = _copy_to_cpu(module.state_dict())
        load_module(module, state, strict=strict, dtype=dtype)

    def load_optimizers(
        self,
        checkpoint: Mapping[str, Any],
        module: LightningModule,
        optimizers: Sequence[Optimizer],
    ) -> None:
        """Load the optimizers' state, all or none.

        Raises:
            CheckpointError: it belongs to other optimizers; the optimizers and the model are unchanged.
        """
        before, self._weights_before = self._weights_before, None
        try:
            states = self._fitting_states(checkpoint, module, optimizers)
        except CheckpointError:
            if before is not None:
                module.load_state_dict(before, strict=False)
            raise
        for optimizer, state in zip(optimizers, states, strict=bool(states)):
            optimizer.load_state_dict(state)

    def _fitting_states(
        self,
        checkpoint: Mapping[str, Any],
        module: LightningModule,
        optimizers: Sequence[Optimizer],
    ) -> list[dict[str, Any]]:
        states = checkpoint.get("optimizer_states", [])
        if not states and optimizers:
            self._manager.warn_once(
                "the checkpoint has no state of optimizers, as it was saved before a run or by the program "
                "that started the ranks: the optimizers start from zero. Save in the run, by ModelCheckpoint "
                "or a hook, to have their state."
            )
            return []
        if len(states) != len(optimizers):
            raise CheckpointError(
                f"the checkpoint has the state of {len(states)} optimizers, the module has "
                f"{len(optimizers)}. They have not changed. Configure as many optimizers as were saved."
            )
        named = dict(module.named_parameters())
        return [
            fit_state(
                state,
                optimizer,
                self._names.get(f"optimizer_states.{at}", []),
                names_of(optimizer, named),
                self._kinds.get(f"optimizer_states.{at}", []),
            )
            for at, (state, optimizer) in enumerate(zip(states, optimizers, strict=True))
        ]


def _check_from_trainer(opened: Checkpoint) -> None:
    """Check that a Trainer saved the checkpoint: Lightning itself would fail on any other."""
    missing = [key for key in ("state_dict", "pytorch-lightning_version") if key not in opened.tree]
    if missing:
        has = ", ".join(map(repr, list(opened.tree)[:8]))
        raise CheckpointError(
            f"{opened.path.name} was not saved by a Trainer: it has no {missing[0]!r}. It has: {has}. "
            "Nothing was loaded. Load what fabric.save saved with fabric.load; or pass its weights alone to "
            "module.load_state_dict(...) before fit, without ckpt_path."
        )


def _copy_to_cpu(state: Mapping[str, Any]) -> dict[str, Any]:
    """Copy a state to the CPU, without tensors on the meta device, which have no values."""
    return {
        name: x.detach().to("cpu", copy=True) if isinstance(x, torch.Tensor) else x
        for name, x in state.items()
        if not (isinstance(x, torch.Tensor) and x.is_meta)
    }

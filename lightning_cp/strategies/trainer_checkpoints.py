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

from lightning_cp.checkpoint.checkpoint_io import WriteFunction
from lightning_cp.checkpoint.manager import CheckpointManager, check_models_complete
from lightning_cp.checkpoint.manifest import SaveInfo
from lightning_cp.checkpoint.optimizers import fit_state, kinds_of, names_of
from lightning_cp.checkpoint.read import Checkpoint
from lightning_cp.checkpoint.restore import load_module, names_by_optimizer, templates_for
from lightning_cp.comm.consensus import World
from lightning_cp.engines.base import Engine
from lightning_cp.errors import CheckpointError
from lightning_cp.runtime.runtime import ContextParallelRuntime
from lightning_cp.strategies.lightning_patches import ALONE, adopt_callbacks
from lightning_cp.utils.patching import PatchSet

_HYPERPARAMETERS = tuple(
    name
    for kind in (LightningModule, LightningDataModule)
    for name in (kind.CHECKPOINT_HYPER_PARAMS_KEY, kind.CHECKPOINT_HYPER_PARAMS_TYPE)
)
_MAY_DIFFER = ("callbacks",)
"""Callbacks have seen other values: the first rank's are saved."""
_DTYPES = {"64-true": torch.float64, "bf16-true": torch.bfloat16, "16-true": torch.float16}


class TrainerCheckpoints:
    """Saves and loads of one run: ``ModelCheckpoint`` and ``ckpt_path`` end up here.

    Args:
        manager: writes, links and removes checkpoints.
        engine: tells whether parameters are sharded.
        runtime: of the run.
    """

    def __init__(
        self, manager: CheckpointManager, engine: Engine, runtime: ContextParallelRuntime
    ) -> None:
        self._manager, self._engine, self._runtime = manager, engine, runtime
        self._patches = PatchSet()
        self._in_training = False
        """Saves may continue in the background."""
        self._weights_before: dict[str, Any] | None = None
        """Weights before a load, on the CPU, until the optimizers' state is known to fit too."""
        self._names: dict[str, list[str]] = {}
        self._kinds: dict[str, list[str]] = {}

    @property
    def loads_after_setup(self) -> bool:
        """True if a checkpoint is loaded into the set-up model: as shards, or over pretrained weights."""
        return self._engine.shards or self._runtime.settings.pretrained is not None

    def adopt_callbacks(self, trainer: Trainer) -> None:
        """Let callbacks save as several ranks can."""
        adopt_callbacks(self._patches, trainer, self._manager)

    def begin_training(self) -> None:
        """Let saves continue in the background from here on."""
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
        path: str | Path,
        module: LightningModule,
        optimizers: Sequence[Optimizer],
        elsewhere: WriteFunction | None,
    ) -> None:
        """Save the Trainer's state; called on every rank.

        Args:
            checkpoint: the state.
            path: of the checkpoint.
            module: the user's.
            optimizers: of the module.
            elsewhere: writes to a store or by a plugin.

        Raises:
            CheckpointError: on every rank: it cannot be written; or this rank leaves with an error, and the
                others are not going to take part.
        """
        trainer = module._trainer
        interrupted = trainer is not None and trainer.state.status == TrainerStatus.INTERRUPTED
        if interrupted and World().size > 1:
            raise CheckpointError(f"{Path(path).name} is not saved: {ALONE}")
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
            elsewhere=elsewhere,
            wait=not self._in_training,
        )

    def read(
        self, opened: Checkpoint, module: LightningModule | None, optimizers: Sequence[Optimizer]
    ) -> dict[str, Any]:
        """Read a verified checkpoint, the optimizers' state only for a fit; called on every rank.

        Raises:
            CheckpointError: on every rank: it was not saved by a Trainer, or is damaged.
        """
        _check_trainers(opened)
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
        """Load the weights, once all of the checkpoint is known to fit.

        Where there are no optimizers yet, these weights are taken back if the state of those does not fit.

        Raises:
            CheckpointError: a name, shape or dtype differs; the model and the optimizers are as they were.
        """
        trainer = module._trainer
        fitting = trainer is not None and trainer.state.fn == TrainerFn.FITTING
        state, dtype = checkpoint["state_dict"], _DTYPES.get(str(precision))
        # Of another model, first of all: the optimizer of that does not fit either.
        load_module(module, state, strict=strict, dtype=dtype, check_only=True)
        if fitting and self.loads_after_setup:
            self._fitting_states(checkpoint, module, optimizers)
        elif fitting:
            self._weights_before = _copied(module.state_dict())
        load_module(module, state, strict=strict, dtype=dtype)

    def load_optimizers(
        self,
        checkpoint: Mapping[str, Any],
        module: LightningModule,
        optimizers: Sequence[Optimizer],
    ) -> None:
        """Load the optimizers' state, all or none.

        Raises:
            CheckpointError: it is of other optimizers; these are as they were, and so is the model.
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
            self._manager.say_once(
                "the checkpoint has no state of optimizers, as it was saved before a run or by the program "
                "that had started the ranks: the optimizers begin anew. Save in the run, by ModelCheckpoint "
                "or a hook, to have their state."
            )
            return []
        if len(states) != len(optimizers):
            raise CheckpointError(
                f"the checkpoint has the state of {len(states)} optimizers, the module has "
                f"{len(optimizers)}. They were left as they are."
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


def _check_trainers(opened: Checkpoint) -> None:
    """Refuse what Lightning itself would fail at."""
    missing = [key for key in ("state_dict", "pytorch-lightning_version") if key not in opened.tree]
    if missing:
        has = ", ".join(map(repr, list(opened.tree)[:8]))
        raise CheckpointError(
            f"{opened.path.name} was not saved by a Trainer: it has no {missing[0]!r}. It has: {has}. "
            "Nothing was loaded. What fabric.save saved goes on with fabric.load; of its weights alone a "
            "Trainer begins with module.load_state_dict(...) before fit, without ckpt_path."
        )


def _copied(state: Mapping[str, Any]) -> dict[str, Any]:
    """On the CPU; what is on the meta device has no values to be kept."""
    return {
        name: x.detach().to("cpu", copy=True) if isinstance(x, torch.Tensor) else x
        for name, x in state.items()
        if not (isinstance(x, torch.Tensor) and x.is_meta)
    }

"""Saves and loads of the Trainer's strategy."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_cp.checkpoint.checkpoint_io import open_anywhere, writer_for
from lightning_cp.checkpoint.manager import CheckpointingStrategy
from lightning_cp.checkpoint.manifest import SaveInfo
from lightning_cp.checkpoint.optimizers import fit_state, kinds_of, names_of
from lightning_cp.checkpoint.read import Checkpoint
from lightning_cp.checkpoint.restore import load_module, names_by_optimizer, templates_for
from lightning_cp.comm.consensus import World
from lightning_cp.errors import CheckpointError
from lightning_cp.strategies.lightning_patches import ALONE, adopt_callbacks

_HYPERPARAMETERS = tuple(
    name
    for kind in (LightningModule, LightningDataModule)
    for name in (kind.CHECKPOINT_HYPER_PARAMS_KEY, kind.CHECKPOINT_HYPER_PARAMS_TYPE)
)
_MAY_DIFFER = ("callbacks",)
"""Callbacks have seen other values: the first rank's are saved."""
_DTYPES = {"64-true": torch.float64, "bf16-true": torch.bfloat16, "16-true": torch.float16}


class TrainerSaves(CheckpointingStrategy):
    """Comes before a Trainer's ``DDPStrategy``: ``ModelCheckpoint`` and ``ckpt_path`` end up here."""

    def _adopt_callbacks(self, trainer: Trainer) -> None:
        """Have callbacks save as several ranks can."""
        adopt_callbacks(self._adopted, trainer, self._saver)

    _before: dict[str, Any] | None = None
    """The weights before a load, on the CPU, until the optimizers' state is known to fit too."""

    @property
    def restore_checkpoint_after_setup(self: Any) -> bool:
        """Spread parameters are loaded as shards, so they have to be spread first.

        And pretrained weights come with the setup: those of a checkpoint go over them.
        """
        return self._engine.shards or self._core.settings.pretrained is not None

    def save_checkpoint(
        self: Any, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None
    ) -> None:
        """Save the Trainer's state; called on every rank, or where there are none: before and after a run.

        Raises:
            CheckpointError: on every rank: it cannot be written; or this rank is leaving with an error, and
                the others are not going to take part.
        """
        if not dist.is_initialized() and not self.is_global_zero:
            return  # ranks do not know each other yet, and would all write the file
        trainer = self.lightning_module._trainer
        interrupted = trainer is not None and trainer.state.status == TrainerStatus.INTERRUPTED
        if interrupted and World().size > 1:
            raise CheckpointError(f"{Path(filepath).name} is not saved: {ALONE}")
        elsewhere = writer_for(self._checkpoint_io, filepath, storage_options)
        self._require_complete([self.lightning_module])
        named = dict(self.lightning_module.named_parameters())
        names = [names_of(optimizer, named) for optimizer in self.optimizers]
        kinds = [kinds_of(optimizer) for optimizer in self.optimizers]
        step = checkpoint.get("global_step")
        self._saver.save(
            checkpoint,
            filepath,
            SaveInfo(step, self._core.mesh_sizes, self._core.settings.data_parallel),
            {"parameters": names_by_optimizer(names), "kinds": names_by_optimizer(kinds)},
            may_lack=_HYPERPARAMETERS,
            may_differ=_MAY_DIFFER,
            elsewhere=elsewhere,
            wait=not self._trains_on,
        )

    def load_checkpoint(
        self: Any, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Verify a checkpoint and read it, the optimizers' state only for a fit; called on every rank.

        Args:
            checkpoint_path: the checkpoint.
            weights_only: ``False`` makes objects of a file that you trust, which runs code of it.

        Raises:
            CheckpointError: on every rank: it is missing, damaged or no checkpoint.
        """
        opened = open_anywhere(self._checkpoint_io, checkpoint_path, weights_only)
        _require_trainers(opened)
        if opened.manifest is None:
            rank_zero_info(
                f"{opened.path.name} was written by another program: it has no manifest to be verified "
                "against."
            )
        self._saved_names = dict(opened.ours.get("parameters", {}))
        self._saved_kinds = dict(opened.ours.get("kinds", {}))
        module = self.lightning_module
        trainer = None if module is None else module._trainer
        fits = trainer is None or trainer.state.fn == TrainerFn.FITTING
        keys = [key for key in opened.tree if fits or key != "optimizer_states"]
        if module is None or not self._engine.shards:
            return opened.read(keys=keys)
        optimizers = {
            ("optimizer_states", at): (x, self._saved_names.get(f"optimizer_states.{at}", []))
            for at, x in enumerate(self.optimizers)
        }
        return opened.read(templates_for({"state_dict": module}, optimizers), keys)

    def load_model_state_dict(
        self: Any, checkpoint: Mapping[str, Any], strict: bool = True
    ) -> None:
        """Load the weights, once all of the checkpoint is known to fit.

        Where there are no optimizers yet, these weights are taken back if the state of those does not fit.

        Raises:
            CheckpointError: a name, shape or dtype differs; the model and the optimizers are as they were.
        """
        module = self.lightning_module
        trainer = module._trainer
        fitting = trainer is not None and trainer.state.fn == TrainerFn.FITTING
        dtype = _DTYPES.get(str(self.precision_plugin.precision))
        # Of another model, first of all: the optimizer of that does not fit either.
        load_module(module, checkpoint["state_dict"], strict=strict, dtype=dtype, check_only=True)
        if fitting and self.restore_checkpoint_after_setup:
            self._fitting_states(checkpoint)
        elif fitting:
            self._before = _copied(module.state_dict())
        load_module(module, checkpoint["state_dict"], strict=strict, dtype=dtype)

    def load_optimizer_state_dict(self: Any, checkpoint: Mapping[str, Any]) -> None:
        """Load the optimizers' state, all or none.

        Raises:
            CheckpointError: it is of other optimizers; these are as they were, and so is the model.
        """
        before, self._before = self._before, None
        try:
            states = self._fitting_states(checkpoint)
        except CheckpointError:
            if before is not None:
                self.lightning_module.load_state_dict(before, strict=False)
            raise
        for optimizer, state in zip(self.optimizers, states, strict=bool(states)):
            optimizer.load_state_dict(state)

    def _fitting_states(self: Any, checkpoint: Mapping[str, Any]) -> list[dict[str, Any]]:
        states = checkpoint.get("optimizer_states", [])
        if not states and self.optimizers:
            self._saver.say_once(
                "the checkpoint has no state of optimizers, as it was saved before a run or by the program "
                "that had started the ranks: the optimizers begin anew. Save in the run, by ModelCheckpoint "
                "or a hook, to have their state."
            )
            return []
        if len(states) != len(self.optimizers):
            raise CheckpointError(
                f"the checkpoint has the state of {len(states)} optimizers, the module has "
                f"{len(self.optimizers)}. They were left as they are."
            )
        named = dict(self.lightning_module.named_parameters())
        return [
            fit_state(
                state,
                optimizer,
                self._saved_names.get(f"optimizer_states.{at}", []),
                names_of(optimizer, named),
                self._saved_kinds.get(f"optimizer_states.{at}", []),
            )
            for at, (state, optimizer) in enumerate(zip(states, self.optimizers, strict=True))
        ]

    def on_train_start(self: Any) -> None:
        """From here on saves may go on in the background."""
        super().on_train_start()  # type: ignore[misc]
        self._trains_on, self._before = True, None

    def on_train_end(self: Any) -> None:
        """The end waits for the save in the background.

        Raises:
            CheckpointError: on every rank: it failed on some.
        """
        super().on_train_end()  # type: ignore[misc]
        self._trains_on = False
        self._saver.finish()

    def teardown(self: Any) -> None:
        """Leave nothing running."""
        self._trains_on, self._before = False, None
        self._saver.abandon()
        self._adopted.undo()
        super().teardown()  # type: ignore[misc]


def _require_trainers(opened: Checkpoint) -> None:
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

"""Saves and loads of Fabric's strategy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.types import _Stateful
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_cp.checkpoint.atomic import local_path
from lightning_cp.checkpoint.checkpoint_io import open_anywhere, writer_for
from lightning_cp.checkpoint.consistency import check_same_states
from lightning_cp.checkpoint.lazy_tree import Remainder
from lightning_cp.checkpoint.manager import CheckpointingStrategy
from lightning_cp.checkpoint.manifest import SaveInfo
from lightning_cp.checkpoint.optimizers import (
    fit_state,
    kinds_of,
    named_parameters,
    names_as_saved,
    names_of,
)
from lightning_cp.checkpoint.restore import load_module, templates_for
from lightning_cp.comm.consensus import World
from lightning_cp.errors import CheckpointError, ConfigError
from lightning_cp.resume.fabric import RunState

State = dict[str, Any]
Filter = Mapping[str, Callable[[str, Any], bool]]
_STEPS = ("global_step", "step", "iteration", "iter_num")


class FabricSaves(CheckpointingStrategy):
    """Comes before Fabric's ``DDPStrategy``: ``fabric.save`` and ``fabric.load`` end up here."""

    def save_checkpoint(
        self: Any,
        path: str | Path,
        state: State,
        storage_options: Any = None,
        filter: Filter | None = None,
    ) -> None:
        """Save modules, optimizers and whatever else is in ``state``; called on every rank.

        Raises:
            CheckpointError: on every rank: it cannot be written, ranks have different states, or a model's
                weights are not all there.
            ConfigError: ``state`` is no dictionary.
        """
        elsewhere = writer_for(self._checkpoint_io, path, storage_options)
        check_same_states(
            World(),
            local_path(path) if elsewhere is None else Path(path),
            lambda: _dictionary(state),
            (nn.Module, Optimizer, _Stateful),
        )
        modules, optimizers = _modules(state), _optimizers(state)
        self._require_complete(modules.values() or self._models)
        named = named_parameters(modules or {"": _unwrapped(self._models)})
        names = {key: names_of(optimizer, named) for key, optimizer in optimizers.items()}
        tree = self._convert_stateful_objects_in_state(state, filter=dict(filter or {}))
        for run in (obj for obj in state.values() if isinstance(obj, RunState)):
            run.take_back(tree, modules)
        step = next((state[k] for k in _STEPS if type(state.get(k)) is int), None)
        sizes = self._core.mesh_sizes if modules else {}
        about = SaveInfo(step, sizes, self._core.settings.data_parallel)
        kinds = {key: kinds_of(optimizer) for key, optimizer in optimizers.items()}
        self._saver.save(
            tree, path, about, {"parameters": names, "kinds": kinds}, elsewhere=elsewhere
        )

    def load_checkpoint(
        self: Any,
        path: str | Path,
        state: Any = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Verify a checkpoint and load it, all or nothing; called on every rank.

        Args:
            path: the checkpoint.
            state: a dictionary of objects to be restored; one module or optimizer if the file is that one's
                state; or nothing: then the whole of it is returned.
            strict: every key of ``state`` must be in the checkpoint, and names of modules must be the same.
            weights_only: ``False`` makes objects of a file that you trust, which runs code of it.

        Returns:
            What was not restored into ``state``: read when it is looked at, so that no rank need hold a
            model or an optimizer whole.

        Raises:
            CheckpointError: on every rank: it is missing, damaged or does not fit; ``state`` is as it was.
        """
        self._saver.finish()
        opened = open_anywhere(self._checkpoint_io, path, weights_only)
        if not state:
            return opened.read()
        if isinstance(state, (nn.Module, Optimizer)):
            own = {"": state}
            optimizer = {("",): (state, [])} if isinstance(state, Optimizer) else {}
            template = templates_for(_modules(own), optimizer)
            read = opened.read(lambda place: template(("", *place)))
            _restore(own, {"": read}, {}, {}, strict=strict)
            return {}
        missing = [key for key in state if key not in opened.tree]
        if strict and missing:
            raise CheckpointError(
                f"the checkpoint has no {missing[0]!r}. It has: "
                f"{', '.join(map(str, list(opened.tree)[:20]))}. "
                "Nothing was loaded; strict=False loads what there is."
            )
        names = dict(opened.ours.get("parameters", {}))
        optimizers = {(key,): (x, names.get(key, [])) for key, x in _optimizers(state).items()}
        checkpoint = opened.read(templates_for(_modules(state), optimizers), state)
        _restore(state, checkpoint, names, opened.ours.get("kinds", {}), strict=strict)
        return Remainder.of(opened, [key for key in opened.tree if key not in state])


def _restore(
    state: State,
    checkpoint: State,
    names: Mapping[str, list[str]],
    kinds: Mapping[str, list[str]],
    *,
    strict: bool,
) -> None:
    """Check everything, then load."""
    present = {key: obj for key, obj in state.items() if key in checkpoint}
    modules, fitted = _modules(state), {}
    # of another model, first of all: the optimizer of that does not fit either
    check_modules(_modules(present), checkpoint, strict=strict)
    for key, obj in _optimizers(present).items():
        saved = names.get(key, [])
        own = names_as_saved(saved, obj, modules)
        fitted[key] = fit_state(checkpoint[key], obj, saved, own, kinds.get(key, []))
    for key, obj in present.items():
        if isinstance(obj, RunState):
            obj.fitting(checkpoint[key])
    load_modules(_modules(present), checkpoint, strict=strict)
    for key, obj in present.items():
        value = checkpoint[key]
        if isinstance(obj, Optimizer):
            obj.load_state_dict(fitted[key])
        elif isinstance(obj, nn.Module):
            continue
        elif isinstance(obj, _Stateful):
            obj.load_state_dict(value)
        else:
            state[key] = value


def load_modules(modules: Mapping[str, nn.Module], checkpoint: State, *, strict: bool) -> None:
    """All of them, or none."""
    check_modules(modules, checkpoint, strict=strict)
    for key, module in modules.items():
        load_module(module, checkpoint[key], strict=strict)


def check_modules(modules: Mapping[str, nn.Module], checkpoint: State, *, strict: bool) -> None:
    """Refuse what does not fit; nothing is loaded."""
    for key, module in modules.items():
        load_module(module, checkpoint[key], strict=strict, check_only=True)


def _dictionary(state: Any) -> Mapping[str, Any]:
    if isinstance(state, Mapping):
        return state
    raise ConfigError(
        f"fabric.save takes a dictionary of what is to be saved, got a {type(state).__name__}. Give each a "
        'name: fabric.save(path, {"model": model, "optimizer": optimizer}).'
    )


def _modules(state: Any) -> dict[str, nn.Module]:
    return {key: _unwrapped(obj) for key, obj in state.items() if isinstance(obj, nn.Module)}


def _optimizers(state: Any) -> dict[str, Optimizer]:
    return {key: obj for key, obj in state.items() if isinstance(obj, Optimizer)}


def _unwrapped(module: nn.Module) -> nn.Module:
    return module.module if isinstance(module, DistributedDataParallel) else module

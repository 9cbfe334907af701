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
from lightning_cp.checkpoint.manager import CheckpointManager, check_models_complete
from lightning_cp.checkpoint.manifest import SaveInfo
from lightning_cp.checkpoint.read import LazyEntries
from lightning_cp.checkpoint.restore import (
    fit_state,
    kinds_of,
    load_module,
    named_parameters,
    names_as_saved,
    names_of,
    templates_for,
)
from lightning_cp.comm.consensus import World
from lightning_cp.errors import CheckpointError, ConfigError
from lightning_cp.resume.fabric import RunState
from lightning_cp.runtime.runtime import ContextParallelRuntime

State = dict[str, Any]
_STEPS = ("global_step", "step", "iteration", "iter_num")


class FabricCheckpoints:
    """Saves and loads of one run: ``fabric.save`` and ``fabric.load`` end up here.

    Args:
        manager: writer of checkpoints.
        runtime: of the run.
    """

    def __init__(self, manager: CheckpointManager, runtime: ContextParallelRuntime) -> None:
        self._manager, self._runtime = manager, runtime

    def save(
        self,
        state: State,
        models: nn.ModuleList,
        convert: Callable[[], dict[str, Any]],
        path: str | Path,
        io: Any,
        storage_options: Any,
    ) -> None:
        """Save modules, optimizers and all else in ``state``; called on every rank.

        Args:
            state: the user's.
            models: that were set up.
            convert: returns the state with objects replaced by their states.
            path: of the checkpoint.
            io: a plugin that writes it, or ours.
            storage_options: options of a store.

        Raises:
            CheckpointError: on every rank: it cannot be written, ranks have different states, or a model's
                weights are not all there.
            ConfigError: ``state`` is not a dictionary.
        """
        elsewhere = writer_for(io, path, storage_options)
        check_same_states(
            World(),
            local_path(path) if elsewhere is None else Path(path),
            lambda: _mapping_of(state),
            (nn.Module, Optimizer, _Stateful),
        )
        modules, optimizers = _modules(state), _optimizers(state)
        check_models_complete(modules.values() or models)
        named = named_parameters(modules or {"": _unwrap(models)})
        names = {key: names_of(optimizer, named) for key, optimizer in optimizers.items()}
        tree = convert()
        for run in (obj for obj in state.values() if isinstance(obj, RunState)):
            run.restore_buffers(tree, modules)
        step = next((state[k] for k in _STEPS if type(state.get(k)) is int), None)
        sizes = self._runtime.meshes.sizes if modules else {}
        about = SaveInfo(step, sizes, self._runtime.settings.data_parallel)
        kinds = {key: kinds_of(optimizer) for key, optimizer in optimizers.items()}
        self._manager.save(
            tree, path, about, {"parameters": names, "kinds": kinds}, elsewhere=elsewhere
        )

    def load(
        self, state: Any, path: str | Path, io: Any, weights_only: bool | None, *, strict: bool
    ) -> dict[str, Any]:
        """Verify a checkpoint and load it, all or nothing; called on every rank.

        Args:
            state: a dictionary of objects to be restored; one module or optimizer if the file is that one's
                state; or nothing: then the whole of it is returned.
            path: of the checkpoint.
            io: a plugin that wrote it, or ours.
            weights_only: ``False`` makes objects of a trusted file, which runs code of it.
            strict: every key of ``state`` must be in the checkpoint, and names of modules must be the same.

        Returns:
            The entries that are not in ``state``. They are read on access, so that no rank must hold a
            whole model or optimizer.

        Raises:
            CheckpointError: on every rank: it is damaged or does not fit; ``state`` is as it was.
        """
        self._manager.finish()
        opened = open_anywhere(io, path, weights_only)
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
        return LazyEntries.of(opened, [key for key in opened.tree if key not in state])


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
    # modules first: with another model, its optimizer does not fit either
    check_modules(_modules(present), checkpoint, strict=strict)
    for key, obj in _optimizers(present).items():
        saved = names.get(key, [])
        own = names_as_saved(saved, obj, modules)
        fitted[key] = fit_state(checkpoint[key], obj, saved, own, kinds.get(key, []))
    for key, obj in present.items():
        if isinstance(obj, RunState):
            obj.state_to_resume(checkpoint[key])
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
    """Load the states of all modules, or none."""
    check_modules(modules, checkpoint, strict=strict)
    for key, module in modules.items():
        load_module(module, checkpoint[key], strict=strict)


def check_modules(modules: Mapping[str, nn.Module], checkpoint: State, *, strict: bool) -> None:
    """Check that states fit their modules, without a load."""
    for key, module in modules.items():
        load_module(module, checkpoint[key], strict=strict, check_only=True)


def _mapping_of(state: Any) -> Mapping[str, Any]:
    if isinstance(state, Mapping):
        return state
    raise ConfigError(
        f"fabric.save takes a dictionary of what is to be saved, got a {type(state).__name__}. Give each a "
        'name: fabric.save(path, {"model": model, "optimizer": optimizer}).'
    )


def _modules(state: Any) -> dict[str, nn.Module]:
    return {key: _unwrap(obj) for key, obj in state.items() if isinstance(obj, nn.Module)}


def _optimizers(state: Any) -> dict[str, Optimizer]:
    return {key: obj for key, obj in state.items() if isinstance(obj, Optimizer)}


def _unwrap(module: nn.Module) -> nn.Module:
    return module.module if isinstance(module, DistributedDataParallel) else module

"""A block that restores a model and its run: a check must not change the training."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch._C._autograd import _toggle_collection_dynamic
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity

from lightning_cp.loss.averages import RATIO_HOOK
from lightning_cp.models.swap import config_value, hf_models
from lightning_cp.parity.replay import is_strided
from lightning_cp.parity.snapshot import Snapshot, restore_values
from lightning_cp.randomness.functions import without_dropout
from lightning_cp.utils.dtensor import local_part
from lightning_cp.utils.patching import PatchSet, do_nothing, original_function

_LOGS = ("log", "log_dict", RATIO_HOOK)


@contextmanager
def restore_after(
    model: nn.Module, step: Any = None, *, seed: int | None = None, evaluation: bool = False
) -> Iterator[None]:
    """Within: no dropout, no gradients yet, no logging. Afterwards the state is as before.

    This covers gradients, buffers, modes, metrics, random numbers and other attributes of modules, and all
    objects that they and the step refer to, as far as a ``Snapshot`` reads them.

    Args:
        model: all of its modules are restored.
        step: the user's step, which may close over other state.
        seed: added to the run's seed, for other random numbers.
        evaluation: run in evaluation mode instead of the current modes.
    """
    with ExitStack() as stack:
        stack.enter_context(_same_random_numbers(model, seed))
        stack.enter_context(_unprofiled(model))
        # Nothing is compiled for a window's lengths, nor for recomputation in its backward.
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        found = Snapshot(model.modules(), step)
        stack.callback(found.restore)
        parameters = _parameters_of(found.modules)
        stack.callback(_keep_values(model, parameters))
        stack.callback(_keep_caches(model))
        stack.callback(_keep_modes(found.modules))
        stack.callback(_keep_parameters(parameters))
        stack.callback(_mute_logging(model))
        if evaluation:
            model.eval()
        stack.enter_context(without_dropout())
        stack.enter_context(_NoDropout())
        yield


class _NoDropout(TorchFunctionMode):
    """Disable dropout within the block, also where PyTorch's functions are not replaced.

    ``float(loss)`` does not warn within: the step itself will, with the user's line.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # PyTorch finds a function by its name, which may refer to a replacement: a loss that was kept from
        # before setup would be known here, and in no step.
        func, given = original_function(func), kwargs or {}
        if func in _DROPOUTS:
            return args[0] if args else given["input"]
        if func in _NUMBERS:
            return func(args[0].detach())
        return func(*args, **given)


_NUMBERS = {torch.Tensor.__float__, torch.Tensor.__int__, torch.Tensor.__complex__}
_KINDS = ("dropout", "alpha_dropout", "feature_alpha_dropout", "feature_dropout")
_DROPOUTS = {
    original_function(function)  # a run may have replaced it before this module is imported
    for function in (
        *(F.dropout, F.dropout1d, F.dropout2d, F.dropout3d),
        *(F.alpha_dropout, F.feature_alpha_dropout),
        *(getattr(torch, f"{kind}{end}") for kind in _KINDS for end in ("", "_")),
    )
}


@contextmanager
def _same_random_numbers(model: nn.Module, seed: int | None) -> Iterator[None]:
    """Restore the random state afterwards."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(_cuda_devices(model)):
            if seed is not None:
                torch.manual_seed(torch.initial_seed() + seed)
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


@contextmanager
def _unprofiled(model: nn.Module) -> Iterator[None]:
    """Exclude the block from a recording PyTorch profiler."""
    kinds = {ProfilerActivity.CPU} | ({ProfilerActivity.CUDA} if _cuda_devices(model) else set())
    if not torch.autograd._profiler_enabled():
        yield
        return
    _toggle_collection_dynamic(False, kinds)
    try:
        yield
    finally:
        _toggle_collection_dynamic(True, kinds)


class DrawRecord:
    """A record of the random numbers that were drawn within the block."""

    def __init__(self, model: nn.Module) -> None:
        self._devices = sorted(_cuda_devices(model))
        self.on_cpu = torch.empty(0)
        """State of the generator at the end; equal states mean equal numbers of draws."""
        self.on_cuda = False
        """True if any were drawn on CUDA; their number is unknown."""

    def __enter__(self) -> DrawRecord:
        self._before = self._states()
        return self

    def __exit__(self, *_: object) -> None:
        self.on_cpu, after = torch.get_rng_state(), self._states()
        self.on_cuda = any(not torch.equal(a, b) for a, b in zip(after, self._before, strict=True))

    def _states(self) -> list[torch.Tensor]:
        return [torch.cuda.get_rng_state(index) for index in self._devices]


def _cuda_devices(model: nn.Module) -> set[int]:
    return {p.device.index for p in model.parameters() if p.device.type == "cuda"}


def _parameters_of(modules: list[nn.Module]) -> list[nn.Parameter]:
    """All parameters, each once."""
    found = (p for module in modules for p in module._parameters.values() if p is not None)
    return list({id(p): p for p in found}.values())


def _keep_values(model: nn.Module, parameters: list[nn.Parameter]) -> Any:
    """Restore values of parameters, which a step may change by itself: noise on weights, or a moving-average
    teacher.

    Of frozen parameters at most as many elements are copied as are trained, the model's own first and then
    the smallest: adapters do not change the model below them, and a large teacher in a list must not displace
    the model's. Copies of trained parameters are on the host, since an optimizer's state may fill the device
    in a later check.
    """
    own = set(map(id, model.parameters()))
    frozen = [p for p in parameters if not p.requires_grad and is_strided(p)]
    frozen.sort(key=lambda p: (id(p) not in own, p.numel()))
    room = sum(p.numel() for p in parameters if p.requires_grad)
    sizes = itertools.accumulate(p.numel() for p in frozen)
    frozen = [p for p, size in zip(frozen, sizes, strict=True) if size <= room]
    kept = [(p, local_part(p).detach().clone()) for p in frozen]
    trained = (p for p in parameters if p.requires_grad and is_strided(p))
    kept += [(p, local_part(p).detach().to("cpu", copy=True)) for p in trained]

    def restore() -> None:
        for p, then in kept:
            restore_values(local_part(p).detach(), then.to(local_part(p).device))

    return restore


def _keep_caches(model: nn.Module) -> Any:
    """Switch the cache off: transformers makes none in training that recomputes, but does in evaluation."""
    patches = PatchSet()
    for root in hf_models(model):
        config = root.config.get_text_config()
        parts = [part for part in root.modules() if getattr(part, "gradient_checkpointing", False)]
        if any(part.training for part in parts) and config_value(config, "use_cache"):
            patches.put_value(config, "use_cache", False)
    return patches.undo


def _keep_modes(modules: list[nn.Module]) -> Any:
    kept = [(module, module.training) for module in modules]

    def restore() -> None:
        for module, training in kept:
            module.training = training

    return restore


def _keep_parameters(parameters: list[nn.Parameter]) -> Any:
    """Restore gradients, ``requires_grad``, and hooks on accumulated gradients."""
    kept = [(p, p.grad, p.requires_grad) for p in parameters]
    hooks = [p._post_accumulate_grad_hooks for p in parameters]
    called = [(each, dict(each)) for each in hooks if each]
    for p, *_ in kept:
        p.grad = None
    for each, _ in called:
        each.clear()

    def restore() -> None:
        for p, gradient, trained in kept:
            p.grad = gradient
            p.requires_grad_(trained)
        for each, then in called:
            each.update(then)

    return restore


def _mute_logging(model: nn.Module) -> Any:
    """Ignore logged values within the block."""
    patches = PatchSet()
    for name in _LOGS:
        if name in vars(model) or hasattr(type(model), name):
            patches.put_value(model, name, do_nothing)
    return patches.undo

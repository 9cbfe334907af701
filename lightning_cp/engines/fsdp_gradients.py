"""Gradients of a sharded model from backward to the optimizer step, and the parameters that its steps see."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lightning_cp.comm.reduce import any_rank
from lightning_cp.engines.fsdp_internals import (
    FsdpGroup,
    enter_forward,
    forget_step,
    groups_of,
    is_gathered,
    is_idle,
    leave_forward,
)
from lightning_cp.engines.gradients import average_present
from lightning_cp.errors import ConfigError
from lightning_cp.layout.axes import Flat
from lightning_cp.mesh import ContextParallelMesh
from lightning_cp.utils.autograd_notes import in_backward
from lightning_cp.utils.patching import add_hook


class FsdpGradients:
    """A sharded model, and its gradients between backward and the optimizer step."""

    def __init__(self, module: nn.Module, mesh: ContextParallelMesh) -> None:
        self._module = weakref.ref(module)
        self._group = mesh.group(Flat.LOSS)
        self._control = mesh.control_group(Flat.LOSS)
        self._had_gradient: dict[int, bool] = {}
        self._filled: set[int] = set()
        groups = groups_of(module)
        for group in groups:
            group.fill_missing(self._had_gradient, self._filled)
        self._held = [weakref.ref(group) for group in groups]  # the model holds the groups
        self._trained = self._trains()
        self.entered = False
        self._called: nn.Module | None = None
        self._regathering: nn.Module | None = None
        self._before_exchange: Callable[[], object] = list  # no listener

    @property
    def module(self) -> nn.Module | None:
        """The model; ``None`` once it was deleted."""
        return self._module()

    @property
    def _groups(self) -> list[FsdpGroup]:
        """The groups in which its parameters are gathered and reduced."""
        alive = (held() for held in self._held)
        return [group for group in alive if group is not None]

    def _trains(self) -> list[bool]:
        for group in self._groups:
            group.sync_requires_grad()
        module = self.module
        return [p.requires_grad for p in module.parameters()] if module is not None else []

    def is_current(self) -> bool:
        """True if the same parameters are trained as at the last ``record_trained``."""
        return self._trained == self._trains()

    def record_trained(self) -> None:
        """Record the parameters that are trained now; their dtypes decide in which dtype gradients are
        summed.
        """
        self._trained = self._trains()
        for group in self._groups:
            group.read_reduce_dtypes()

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Within one of the module's methods, with its own parameters gathered."""
        outermost, self.entered = not self.entered, True  # a step may call another step
        try:
            yield
        except BaseException:
            module = self.module
            if isinstance(module, FSDPModule):
                forget_step(module)
            raise
        finally:
            if outermost:
                self.entered = False
        if outermost:
            self.after_forward()

    def zero_gradients(self) -> None:
        """Zero the gradients of shards when a module's ``zero_grad`` reached only the whole parameters that
        it shows.
        """
        for group in self._groups:
            group.zero()

    def begin_method(self) -> None:
        """Show a step of manual optimization the shards, if these have gradients of an earlier step.

        Whole parameters have no gradients then, so clipping or changing those before the next backward would
        have no effect.
        """
        shards = (p for group in self._groups for p in group.parameters())
        if self._is_manual() and any(p.grad is not None for p in shards):
            self._shard_all()

    def apply_changes(self) -> None:
        """Copy changes of whole parameters to their shards, when the user's code of a step ends or a backward
        in it begins.
        """
        for group in self._groups:
            group.apply_changes()

    def _is_manual(self) -> bool:
        return not getattr(self.module, "automatic_optimization", True)

    def _shard_all(self) -> None:
        for group in self._groups:
            group.shard()

    def shard(self) -> None:
        """Free the whole parameters that a forward without a backward has left.

        A hook that changes weights between steps would otherwise change these, and not their shards.
        """
        module = self.module
        if isinstance(module, FSDPModule) and not self.entered and is_idle(module):
            self._shard_all()

    def after_forward(self) -> None:
        """End a forward: none of evaluation has a backward, nor has a step that contains its own."""
        if not torch.is_grad_enabled() or self._is_manual():
            self.shard()

    def follow_calls(
        self, modules: Iterable[nn.Module], before_exchange: Callable[[], object]
    ) -> None:
        """Make a call of one of these modules a forward of the root, where none is running.

        The root gathers parameters outside of its units (embeddings, the head) for its own forward only.
        Users call parts of it outside of steps: ``self.model.generate(...)`` in a hook of theirs.

        Args:
            modules: parts of the model whose parameters are gathered.
            before_exchange: called before the root gathers its own parameters.
        """
        self._before_exchange = before_exchange
        for module in modules:
            add_hook(module.register_forward_pre_hook, self._enter, prepend=True, with_kwargs=True)
            add_hook(module.register_forward_hook, self._leave, always_call=True)

    def _enter(self, called: nn.Module, args: Any, kwargs: Any) -> Any:
        root = self.module
        if torch.compiler.is_compiling() or not isinstance(root, FSDPModule):
            return None
        if self.entered and not is_gathered(root) and not in_backward():
            self._before_exchange()
            FSDPModule.unshard(root)  # a backward within the method has sharded them
            self._regathering = called
        if self.entered or not is_idle(root):
            return None
        self._called = called
        self._before_exchange()
        return enter_forward(root, args, kwargs)

    def _leave(self, called: nn.Module, args: Any, output: Any) -> Any:
        root = self.module
        if called is self._regathering:
            self._regathering = None
            if not torch.is_grad_enabled():
                self._shard_all()
        if called is not self._called or not isinstance(root, FSDPModule):
            return None
        self._called = None
        if output is None:  # the call has failed
            forget_step(root)
            return None
        output = leave_forward(root, args, output)
        self.shard()
        return output

    def after_optimizer_step(self) -> None:
        """Mark gathered parameters as out of date, after an optimizer has changed the shards.

        Raises:
            ConfigError: whole parameters were changed too, so one of the two changes would be lost.
        """
        module = self.module
        if isinstance(module, FSDPModule) and (self.entered or is_idle(module)):
            twice = [name for group in self._groups for name in group.names(group.changed())]
            if twice:
                raise ConfigError(_TWICE.format(names=", ".join(twice[:3])))
            self._shard_all()  # also within a method

    def unreduced_gradients(self) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        """Gradients of this rank alone, held for a later reduction."""
        for group in self._groups:
            yield from group.unreduced_gradients()

    def drop_unreduced(self, zeroed: Set[int]) -> None:
        """Drop the unreduced gradients of parameters with these ids."""
        for group in self._groups:
            group.drop_unreduced(zeroed)

    def finish_backward(self) -> None:
        """Finish a backward after all reductions."""
        if not self._had_gradient:
            return
        trained = [
            p for group in self._groups for p in group.parameters() if id(p) in self._had_gradient
        ]
        flags = [self._had_gradient[id(p)] for p in trained]
        for parameter, exists in zip(trained, any_rank(flags, self._control), strict=True):
            if not exists and id(parameter) in self._filled:
                parameter.grad = None
        self._had_gradient.clear()
        self._filled.clear()
        self._average_plain()

    def _average_plain(self) -> None:
        """Average gradients of parameters that cannot be sharded, such as scalars. Averaging twice changes
        nothing.
        """
        module = self.module
        assert module is not None
        # Parameters that were frozen since are included.
        plain = [p for p in module.parameters() if not isinstance(p, DTensor)]
        average_present(plain, self._control, self._group)


_TWICE = (
    "{names}: changed in place in the step before an optimizer stepped, with no backward in between, so that "
    "one of the two changes is lost. Change weights after optimizer.step(), or in a hook such as "
    "on_train_batch_end."
)

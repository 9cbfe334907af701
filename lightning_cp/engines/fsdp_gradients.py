"""A model that was sharded: its gradients from a backward to the step, and its steps' parameters."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lightning_cp.comm.reduce import all_sum
from lightning_cp.engines.fsdp_internals import (
    FsdpGroup,
    enter_forward,
    forget_step,
    groups_of,
    in_backward,
    is_gathered,
    is_idle,
    leave_forward,
)
from lightning_cp.engines.gradients import average_present
from lightning_cp.errors import ConfigError
from lightning_cp.layout.axes import Flat
from lightning_cp.mesh import ContextParallelMesh
from lightning_cp.utils.module_hooks import add_hook


class Root:
    """A model that was sharded, and its gradients between a backward and the step."""

    def __init__(self, module: nn.Module, mesh: ContextParallelMesh) -> None:
        self._module = weakref.ref(module)
        self._group = mesh.group(Flat.LOSS)
        self._control = mesh.control_group(Flat.LOSS)
        self._had: dict[int, bool] = {}
        self._filled: set[int] = set()
        groups = groups_of(module)
        for group in groups:
            group.complete(self._had, self._filled)
        self._held = [weakref.ref(group) for group in groups]  # by the model, which they hold
        self._trained = self._trains()
        self.entered = False
        self._called: nn.Module | None = None
        self._again: nn.Module | None = None
        self._before_data: Callable[[], object] = list  # no listener

    @property
    def module(self) -> nn.Module | None:
        """The model, as long as somebody else holds it."""
        return self._module()

    @property
    def _groups(self) -> list[FsdpGroup]:
        """The groups in which its parameters are gathered and reduced."""
        alive = (held() for held in self._held)
        return [group for group in alive if group is not None]

    def _trains(self) -> list[bool]:
        for group in self._groups:
            group.settle()
        module = self.module
        return [p.requires_grad for p in module.parameters()] if module is not None else []

    def is_current(self) -> bool:
        """True if the same parameters are trained as when ``settle`` was called last."""
        return self._trained == self._trains()

    def settle(self) -> None:
        """Take what is trained now for granted: gradients are added in the dtype of these."""
        self._trained = self._trains()
        for group in self._groups:
            group.settle_dtypes()

    @contextmanager
    def inside(self) -> Iterator[None]:
        """In one of the module's methods, with its own parameters gathered."""
        outermost, self.entered = not self.entered, True  # a step may call another one
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
        """A module's ``zero_grad`` has reached the whole parameters that it shows, and not their shards."""
        for group in self._groups:
            group.zero()

    def begin_method(self) -> None:
        """Show a step of manual optimization the shards, where these have gradients of an earlier one.

        Whole parameters have none, so what clips or changes them before the next backward would be lost.
        """
        shards = (p for group in self._groups for p in group.parameters())
        if self._is_manual() and any(p.grad is not None for p in shards):
            self._shard_all()

    def keep_changes(self) -> None:
        """The user's code of a step is over, or a backward in it begins: shards follow whole parameters."""
        for group in self._groups:
            group.keep()

    def _is_manual(self) -> bool:
        return not getattr(self.module, "automatic_optimization", True)

    def _shard_all(self) -> None:
        for group in self._groups:
            group.shard()

    def shard(self) -> None:
        """Free whole parameters that a forward without a backward has left.

        A hook that changes weights between steps would change these, and not the shards they came from.
        """
        module = self.module
        if isinstance(module, FSDPModule) and not self.entered and is_idle(module):
            self._shard_all()

    def after_forward(self) -> None:
        """A forward is over: no backward follows one of evaluation, nor a step that has its own in it."""
        if not torch.is_grad_enabled() or self._is_manual():
            self.shard()

    def follow_calls(self, modules: Iterable[nn.Module], before_data: Callable[[], object]) -> None:
        """Have a call of one of these be a forward of the root, where none is under way.

        The root gathers what is in none of its units (embeddings, the head) for its own forward only. Users
        call parts of it outside of steps: ``self.model.generate(...)`` in a hook of theirs.

        Args:
            modules: parts of the model with parameters that are gathered.
            before_data: called before the root gathers its own.
        """
        self._before_data = before_data
        for module in modules:
            add_hook(module.register_forward_pre_hook, self._enter, prepend=True, with_kwargs=True)
            add_hook(module.register_forward_hook, self._leave, always_call=True)

    def _enter(self, called: nn.Module, args: Any, kwargs: Any) -> Any:
        root = self.module
        if torch.compiler.is_compiling() or not isinstance(root, FSDPModule):
            return None
        if self.entered and not is_gathered(root) and not in_backward():
            self._before_data()
            FSDPModule.unshard(root)  # a backward within the method has sharded them
            self._again = called
        if self.entered or not is_idle(root):
            return None
        self._called = called
        self._before_data()
        return enter_forward(root, args, kwargs)

    def _leave(self, called: nn.Module, args: Any, output: Any) -> Any:
        root = self.module
        if called is self._again:
            self._again = None
            if not torch.is_grad_enabled():
                self._shard_all()
        if called is not self._called or not isinstance(root, FSDPModule):
            return None
        self._called = None
        if output is None:  # it has failed
            forget_step(root)
            return None
        output = leave_forward(root, args, output)
        self.shard()
        return output

    def after_step(self) -> None:
        """An optimizer has changed the shards: what is gathered is out of date.

        Raises:
            ConfigError: whole parameters were changed too, so that one of the two changes is lost.
        """
        module = self.module
        if isinstance(module, FSDPModule) and (self.entered or is_idle(module)):
            twice = [name for group in self._groups for name in group.names(group.changed())]
            if twice:
                raise ConfigError(_TWICE.format(names=", ".join(twice[:3])))
            self._shard_all()  # in a method too

    def unreduced(self) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        """Gradients of this rank alone, kept for a later reduction."""
        for group in self._groups:
            yield from group.unreduced()

    def drop_unreduced(self, zeroed: Set[int]) -> None:
        """Forget such gradients of parameters with these ids."""
        for group in self._groups:
            group.drop_unreduced(zeroed)

    def finish_backward(self) -> None:
        """Once all that was reduced has been."""
        if not self._had:
            return
        trained = [p for group in self._groups for p in group.parameters() if id(p) in self._had]
        flags = [self._had[id(p)] for p in trained]
        counts = all_sum(torch.tensor(flags, dtype=torch.int32), self._control).tolist()
        for parameter, count in zip(trained, counts, strict=True):
            if not count and id(parameter) in self._filled:
                parameter.grad = None
        self._had.clear()
        self._filled.clear()
        self._average_plain()

    def _average_plain(self) -> None:
        """Of parameters that cannot be sharded, such as scalars; averaged twice they stay the same."""
        module = self.module
        assert module is not None
        # also if frozen since
        plain = [p for p in module.parameters() if not isinstance(p, DTensor)]
        average_present(plain, self._control, self._group)


_TWICE = (
    "{names}: changed in place in the step before an optimizer stepped, with no backward in between, so that "
    "one of the two changes is lost. Change weights after optimizer.step(), or in a hook such as "
    "on_train_batch_end."
)

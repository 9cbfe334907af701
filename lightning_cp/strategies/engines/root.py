"""A model that was sharded: its gradients from a backward to the step, and its steps' parameters."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Set
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lightning_cp.comm.reduce import all_sum
from lightning_cp.mesh import ContextParallelMesh, Flat
from lightning_cp.strategies.engines.averages import average_present
from lightning_cp.strategies.engines.torch_fsdp2 import Group, forget_step, groups_of


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
        self._manual = False

    @property
    def module(self) -> nn.Module | None:
        """The model, as long as somebody else holds it."""
        return self._module()

    @property
    def _groups(self) -> list[Group]:
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
        self.entered = True
        try:
            yield
        except BaseException:
            module = self.module
            if isinstance(module, FSDPModule):
                forget_step(module)
            raise
        finally:
            self.entered = False
            self._shard_again()

    def stay_gathered(self) -> None:
        """A backward within a method: what follows in it may use the parameters again."""
        module = self.module
        assert isinstance(module, FSDPModule)
        self._manual = True
        module.set_reshard_after_backward(False, recurse=False)

    def _shard_again(self) -> None:
        module = self.module
        if self._manual and isinstance(module, FSDPModule):
            module.set_reshard_after_backward(True, recurse=False)
            module.reshard()
        self._manual = False

    def gather_anew(self) -> None:
        """Within a method, after an optimizer has changed the shards."""
        module = self.module
        if self._manual and isinstance(module, FSDPModule):
            module.reshard()
            module.unshard()

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

"""Tensors that a model needs and no file holds: who sets them, and the same values on every rank."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from lightning_cp.checkpoint.pretrained.initial_values import (
    Initialize,
    Names,
    copy_from_first_rank,
    initializers_of,
    run_initializers,
)
from lightning_cp.checkpoint.pretrained.memory import TensorMemory
from lightning_cp.checkpoint.pretrained.meta_init import WholeValues
from lightning_cp.checkpoint.pretrained.options import without_values
from lightning_cp.checkpoint.pretrained.plan import LoadPlan
from lightning_cp.comm.consensus import World, raise_on_all
from lightning_cp.errors import CheckpointError
from lightning_cp.utils.module_hooks import strip_wrappers

LOADING = "loading pretrained weights"
_TOGETHER = 2**20
"""Values of several small modules that are set before ranks exchange them."""


class UnsavedTensors:
    """Tensors on the meta device and in no file.

    Args:
        model: sharded already, if it is to be.
        plan: of what the files hold.
        initialize: the user's own way; by default that of modules or of their model.

    Raises:
        CheckpointError: a module that nothing sets.
    """

    def __init__(self, model: nn.Module, plan: LoadPlan, initialize: Initialize | None) -> None:
        in_files = {id(x) for k, x in plan.tensors.by_name.items() if k not in plan.missing}
        unset = _not_in_files(model, in_files)
        self._owners = [(path, x) for path, x in model.named_modules() if x in unset]
        self._unset = unset
        self._unread = {
            module: [name for name, x in module._buffers.items() if id(x) in in_files]
            for module in unset
        }
        if initialize is None:
            self._ways = initializers_of(model, unset)
        else:
            self._ways = {module: [initialize] for module in unset}
        for path, module in self._owners:
            if not self._ways[module]:
                raise CheckpointError(
                    f"{strip_wrappers(path) or 'the model'} ({type(module).__name__}) has buffers or "
                    "parameters on the meta device that the checkpoint does not hold "
                    f"({', '.join(unset[module])}), and nothing says what their values are. "
                    "Give the module a method reset_buffers() or "
                    "reset_parameters() that sets them, pass initialize=, or build it on a real device. "
                    "Nothing was loaded."
                )

    def require_same(self, dtype_of: Callable[[torch.Tensor], torch.dtype]) -> None:
        """Refuse ranks that lack different things, since they are set on all of them together. Collective.

        Args:
            dtype_of: what each tensor is going to have.

        Raises:
            CheckpointError: on every rank, naming one that differs.
        """
        own: dict[str, str] = {}
        for path, module in self._owners:
            for name in self._unset[module]:
                x: torch.Tensor = getattr(module, name)
                own[strip_wrappers(f"{path}.{name}" if path else name)] = (
                    f"{list(x.shape)} {dtype_of(x)}"
                )
        for rank, other in enumerate(every := World().gather([*own.items()])):
            if other != every[0]:
                raise CheckpointError(
                    f"no file holds {_difference(dict(every[0]), dict(other), rank)}. Build the model in the "
                    "same way on every rank, with the same options. Nothing was loaded."
                )

    def _groups(self) -> Iterator[list[WholeValues]]:
        """Modules that are whole at a time: one, or several small ones, as ranks wait for each group."""
        group: list[WholeValues] = []
        held = 0
        for path, module in self._owners:
            whole = WholeValues(
                module, self._unset[module], strip_wrappers(path), unread=self._unread[module]
            )
            held += (more := whole.numel())
            if group and held > _TOGETHER:
                yield group
                group, held = [], more
            group.append(whole)
        if group:
            yield group

    def parts(
        self, apart: bool, dtype_of: Callable[[torch.Tensor], torch.dtype]
    ) -> list[TensorMemory]:
        """The bytes that setting it takes beside the model: of the modules that take most together.

        Args:
            apart: values are set on another device than the model's.
            dtype_of: what each tensor is going to have.
        """
        every = [
            [part for whole in group for part in whole.parts(apart, dtype_of)]
            for group in self._groups()
        ]
        return max(every, key=lambda parts: sum(part.nbytes for part in parts), default=[])

    def set(self, device: torch.device, now: Callable[[str], None] = lambda doing: None) -> None:
        """Values for all of it, those of rank 0. Collective.

        Args:
            device: where they are drawn; ranks exchange tensors of this kind.
            now: told what is done.

        Raises:
            CheckpointError: a module that left something without a value.
            RankFailure: another rank has raised.
        """
        for group in self._groups():
            with torch.no_grad():
                self._set(group, device, now)

    def _set(
        self, group: Sequence[WholeValues], device: torch.device, now: Callable[[str], None]
    ) -> None:
        values: list[dict[str, torch.Tensor]] = []
        with raise_on_all_ranks(device):
            for whole in group:
                now(f"setting {whole.path or type(whole.module).__name__}")
                values.append(self._draw(whole, device))
                whole.keep(values[-1])  # which the next ones may read
        world = dist.group.WORLD if dist.is_initialized() else None
        if world is not None:
            every = [x for named in values for x in named.values()]
            copy_from_first_rank(every, device, world)
        with raise_on_all_ranks(device):
            for whole, named in zip(group, values, strict=True):
                whole.keep(named)

    def _draw(self, whole: WholeValues, device: torch.device) -> dict[str, torch.Tensor]:
        with whole.block(device):
            with whole.must_not_read(CheckpointError):
                left = run_initializers(
                    whole.module, whole.names, self._ways[whole.module], whole.path
                )
            _check_all_set(whole.module, left)
            return whole.values()


@contextmanager
def raise_on_all_ranks(device: torch.device) -> Iterator[None]:
    """Raise on all ranks after the block what one of them has raised in it.

    Args:
        device: whose tensors ranks exchange.
    """
    error = None
    try:
        yield
    except Exception as raised:  # of the user's function, say: the others are not to wait
        error = raised
    raise_on_all(error, device.type, what=LOADING)


def _difference(first: dict[str, str], other: dict[str, str], rank: int) -> str:
    """A line about what a rank lacks otherwise than the first one does."""
    names = (name for name in {**first, **other} if first.get(name) != other.get(name))
    name = next(names, None)
    if name is None:
        return "the same on all ranks, but in another order"
    if name in first and name in other:
        return f"{name}, which is {first[name]} on rank 0 and {other[name]} on rank {rank}"
    return f"{name}, which is on the meta device on one of the ranks 0 and {rank} only"


def _not_in_files(model: nn.Module, in_files: Collection[int]) -> Names:
    """Tensors with none now and, by their ids, in no file; tied ones once."""
    seen = set(in_files)
    found: Names = {}
    for module, names in without_values(model).items():
        for name in names:
            if id(getattr(module, name)) not in seen:
                seen.add(id(getattr(module, name)))
                found.setdefault(module, []).append(name)
    return found


def _check_all_set(module: nn.Module, left: list[str]) -> None:
    if left:
        raise CheckpointError(
            f"{type(module).__name__} left its {left[0]} without a value when it was made again. Have "
            "its reset_buffers() or reset_parameters() set it, or pass initialize=."
        )

"""``data_parallel="ddp"``: every rank holds the whole model; gradients are averaged in backward."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from lightning.pytorch.overrides.distributed import prepare_for_backward
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_cp.comm.consensus import all_equal, all_equal_sum
from lightning_cp.config import StrategyConfig
from lightning_cp.engines.ddp_comm_hook import CommHook, bucket_options
from lightning_cp.engines.gradients import average_present
from lightning_cp.errors import ConfigError
from lightning_cp.layout.axes import Flat
from lightning_cp.mesh import ContextParallelMesh
from lightning_cp.utils.patching import add_hook

# Parameters that share a model's values, so that hooks on the model's parameters see no backward.


@contextmanager
def aliases(model: nn.Module) -> Iterator[None]:
    """Replace each parameter of ``model`` within the block by another with the same values and no gradient.

    Hooks on a parameter are not on its alias. Neither are those of DistributedDataParallel, whose C++ reducer
    records every gradient, also when it is not to average. Changes to an alias, other than to its values, end
    with the block.
    """
    made: dict[int, nn.Parameter] = {}
    places = [
        (module, name, p)
        for module in model.modules()
        if not isinstance(module, torch.jit.ScriptModule)
        for name, p in module._parameters.items()
        if p is not None and (p.requires_grad or type(p) is nn.Parameter)
    ]
    for module, name, p in places:
        if id(p) not in made:  # tied parameters stay tied
            made[id(p)] = _alias(p)
        setattr(module, name, made[id(p)])  # PyTorch's LSTM keeps a list of its parameters
    try:
        yield
    finally:
        for module, name, p in places:
            setattr(module, name, p)


def _alias(p: nn.Parameter) -> nn.Parameter:
    alias: Any = torch.Tensor._make_subclass(type(p), p.detach(), p.requires_grad)
    vars(alias).update(vars(p))
    return alias


# Gradients that DistributedDataParallel has left unsynchronised, to be averaged by a later backward.


UNSYNCED = "gradients that were left on their ranks"


class UnsyncedGradients:
    """Gradients of one wrapped model that backward has left unsynchronised, as long as they are the same
    tensors.
    """

    def __init__(self) -> None:
        self._left: dict[int, int] = {}  # id of the gradient, by id of its parameter
        self._averages = False
        self.has_hooks = False
        """True if the program has ever left gradients unsynchronised; the same on all ranks."""

    def begin_backward(self, module: nn.Module, *, averages: bool) -> None:
        """Called at the start of a backward, which averages the gradients of this model or leaves them."""
        self._averages = averages
        if not averages and not self.has_hooks:
            self.has_hooks = True  # most programs need no hooks
            for parameter in module.parameters():
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(self._note)

    def unaveraged(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """The parameters whose gradient no backward has averaged."""
        if not self._left:
            return []
        return [p for p in parameters if p.grad is not None and self._left.get(id(p)) == id(p.grad)]

    def _note(self, parameter: torch.Tensor) -> None:
        if self._averages:
            self._left.clear()  # all gradients of the model are averaged together
        elif parameter.grad is not None:
            self._left[id(parameter)] = id(parameter.grad)


def count_unequal(count: int, parameters: Iterable[torch.Tensor], group: dist.ProcessGroup) -> int:
    """Count the gradients that differ between ranks; 0 if the program has averaged them. Collective.

    In-place changes of gradients cannot be observed: a collective leaves no trace, and clipping looks the
    same. But averaged gradients are equal on all ranks, bit by bit.

    Args:
        count: this rank's gradients that no backward has averaged.
        parameters: all parameters of the optimizer step.
        group: all ranks that hold copies of them; its backend moves CPU tensors.
    """
    total = all_equal_sum(UNSYNCED, group, number=count)
    assert total is not None
    if not total or all_equal([_checksum(p.grad) for p in parameters], group):
        return 0
    return max(1, count)


def _checksum(gradient: torch.Tensor | None) -> int | None:
    """The sum of the gradient's bits as integers, computed on its device."""
    if gradient is None:
        return None
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    as_real = torch.view_as_real(values) if values.is_complex() else values
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return int(as_real.detach().view(kinds[as_real.dtype.itemsize]).sum(dtype=torch.int64))


class DDPEngine:
    """PyTorch's DistributedDataParallel over the ``loss`` group (data x context parallel)."""

    name = "ddp"
    shards = False

    def __init__(self, settings: StrategyConfig, hook: CommHook | None = None) -> None:
        self.before_exchange: Callable[[], object] = list  # forward exchanges nothing
        self._bucket_options = bucket_options(settings.bucket_cap_mb)
        self._hook = hook or CommHook()
        self._averaged: dict[int, ref[nn.Parameter]] = {}  # by id: tensors do not hash by equality
        self._finds_unused: dict[int, ref[nn.Module]] = {}  # by id; pickled with the strategy
        self._wrapped: dict[int, ref[DistributedDataParallel]] = {}  # by id of their modules
        self._called: dict[int, bool] = {}  # by id: True after forward, until backward
        self._unsynced: dict[int, UnsyncedGradients] = {}  # by id of their modules
        self._mesh: ref[ContextParallelMesh] | None = None

    def wrap(
        self,
        module: nn.Module,
        mesh: ContextParallelMesh,
        device: torch.device,
        options: Mapping[str, Any],
        methods: Sequence[str] = ("forward",),
    ) -> DistributedDataParallel:
        """Broadcast the weights of the group's first rank, and average gradients from then on."""
        self._mesh = ref(mesh)
        for parameter in module.parameters():
            self._averaged.pop(id(parameter), None)
            if parameter.requires_grad:
                self._averaged[id(parameter)] = ref(parameter)
        self._finds_unused.pop(id(module), None)
        if options.get("find_unused_parameters"):
            self._finds_unused[id(module)] = ref(module)
        # A side stream, as PyTorch's CUDA notes ask for DDP construction.
        on_cuda = device.type == "cuda"
        with torch.cuda.stream(torch.cuda.Stream()) if on_cuda else nullcontext():
            wrapped = DistributedDataParallel(
                module,
                device_ids=[device.index] if on_cuda else None,
                process_group=mesh.group(Flat.LOSS),
                **{**self._bucket_options, **options},
            )
        self._hook.register(wrapped, mesh.group(Flat.LOSS))
        self._wrapped[id(module)] = ref(wrapped)
        self._called.pop(id(module), None)
        self._unsynced[id(module)] = UnsyncedGradients()
        add_hook(wrapped.register_forward_hook, self._note_forward)
        return wrapped

    def remap_optimizer(self, optimizer: Optimizer) -> None:
        """Do nothing: the optimizer's parameters are still the module's."""

    def accumulating(self, wrapped: nn.Module) -> AbstractContextManager[None]:
        """Leave gradients unsynchronised; the next backward outside the block averages all of them."""
        assert isinstance(wrapped, DistributedDataParallel)
        return wrapped.no_sync()

    def prepare_backward_after_rewrap(self, wrapped: nn.Module, loss: torch.Tensor) -> None:
        """Prepare backward as the forward of the new wrapper would have done."""
        assert isinstance(wrapped, DistributedDataParallel)
        prepare_for_backward(wrapped, loss)

    @contextmanager
    def isolated(self, model: nn.Module) -> Iterator[None]:
        """Replace the averaged parameters by aliases, and restore the wrappers afterwards."""
        with ExitStack() as stack:
            for wrapped in self._wrappers():
                synced = wrapped.require_forward_param_sync
                stack.callback(setattr, wrapped, "require_forward_param_sync", synced)
                stack.enter_context(wrapped.no_sync())
            stack.enter_context(aliases(model))
            yield

    def unreduced_gradients(self) -> Iterable[tuple[nn.Parameter, torch.Tensor]]:
        """Nothing: all gradients are in ``grad``."""
        return ()

    def count_unsynced(self, parameters: Iterable[torch.Tensor]) -> int:
        """Count the gradients that no rank has averaged since a backward without averaging."""
        asked, kept = list(parameters), [self._unsynced[id(x.module)] for x in self._wrappers()]
        mesh = self._mesh() if self._mesh is not None else None
        if mesh is None or not any(each.has_hooks for each in kept):
            return 0
        count = sum(len(each.unaveraged(asked)) for each in kept)
        return count_unequal(count, asked, mesh.control_group(Flat.LOSS))

    def after_optimizer_step(self) -> None:
        """Do nothing: parameters are changed in place."""

    def clip_norm(
        self,
        parameters: Iterable[torch.Tensor],
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
    ) -> torch.Tensor:
        """Clip with PyTorch's function, since every rank has all gradients."""
        return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite)

    def clip_value(self, parameters: Iterable[torch.Tensor], value: float) -> None:
        """Clip with PyTorch's function."""
        nn.utils.clip_grad_value_(parameters, value)

    def _note_forward(self, wrapped: DistributedDataParallel, *_: Any) -> None:
        if torch.is_grad_enabled() and wrapped.require_backward_grad_sync:
            self._called[id(wrapped.module)] = True

    def prepare_backward(self, loss: torch.Tensor) -> None:
        """Before backward: have gradients averaged also if one forward has several backward passes.

        DistributedDataParallel averages only the gradients of the first pass, and leaves those of the others
        unsynchronised.
        """
        for wrapped in self._wrappers():
            module, syncs = wrapped.module, wrapped.require_backward_grad_sync
            called = self._called.pop(id(module), False)
            if syncs and not called and _missing_message(wrapped) is None:
                prepare_for_backward(wrapped, loss)
            if dist.get_world_size(wrapped.process_group) > 1:
                self._unsynced[id(module)].begin_backward(module, averages=syncs or called)

    def finish_backward(self) -> None:
        """After backward: check that no gradients were left unsynchronised.

        DistributedDataParallel itself raises only at the next forward, after an optimizer has stepped, and
        never after the last step. With one rank every gradient is complete.

        Raises:
            ConfigError: parameters that it waits for got no gradient, so others were not averaged either.
        """
        for wrapped in self._wrappers():
            syncs = wrapped.require_backward_grad_sync
            shares = syncs and dist.get_world_size(wrapped.process_group) > 1
            said = _missing_message(wrapped) if shares else None
            if said is not None:
                raise ConfigError(self._without_gradient(wrapped.module, said))

    def _wrappers(self) -> list[DistributedDataParallel]:
        alive = self._wrapped.values()
        return [wrapped for known in alive if (wrapped := known()) is not None]

    def _without_gradient(self, module: nn.Module, said: str) -> str:
        """The names of the parameters that DistributedDataParallel numbers in its message."""
        listed = re.search(r"indices which did not receive grad for rank \d+: ([\d ]+)", said)
        names = [name for name, p in module.named_parameters() if self._averages(p)]
        missing = [names[int(at)] for at in listed[1].split()] if listed else []
        shown = f" ({', '.join(missing[:3])}{', ...' * (len(missing) > 3)})" if missing else ""
        return (
            f"backward brought no gradient to some parameters that are trained{shown}, so those of others "
            "were not averaged over the ranks either. Where a step uses parts of the model only, pass "
            "find_unused_parameters=True to the strategy; or freeze what is not trained before the forward."
        )

    def rewrap(
        self,
        wrapped: nn.Module,
        mesh: ContextParallelMesh,
        device: torch.device,
        options: Mapping[str, Any],
    ) -> DistributedDataParallel:
        """Wrap again, also within a step, all parameters that are trained now or ever were.

        DistributedDataParallel averages the parameters that were trained at its construction. It waits for
        each of them unless it looks for unused parameters, which it therefore must do if some are frozen now.
        Gradients left for the end of an accumulation window are averaged first, since the new wrapper does
        not know them; averaging them again at the end changes nothing.

        Raises:
            ConfigError: the graph was declared never to change.
        """
        assert isinstance(wrapped, DistributedDataParallel)
        if options.get("static_graph"):
            raise ConfigError(
                "static_graph=True says that every step trains the same parameters, but some were frozen or "
                "unfrozen since the model was wrapped. Leave static_graph away."
            )
        module: nn.Module = wrapped.module
        wrapped._remove_autograd_hooks()  # it may be waiting for gradients of this step
        known = [p for p in module.parameters() if p.requires_grad or self._averages(p)]
        average_present(known, mesh.control_group(Flat.LOSS), mesh.group(Flat.LOSS))
        more: dict[str, Any] = {
            "init_sync": False
        }  # equal on all ranks already, and in use by this step's graph
        if not all(p.requires_grad for p in known):
            more["find_unused_parameters"] = True
            warnings.filterwarnings("ignore", message="find_unused_parameters=True was specified")
        with _trained(known):
            return self.wrap(module, mesh, device, {**options, **more})

    def is_current(self, module: nn.Module) -> bool:
        """True if the averaged parameters are exactly those that are trained now."""
        known = self._finds_unused.get(id(module))
        finds_unused = known is not None and known() is module
        for parameter in module.parameters():  # twice a step: no call for each of them
            averaged = self._averaged.get(id(parameter))
            is_averaged = averaged is not None and averaged() is parameter
            if is_averaged != parameter.requires_grad and not (is_averaged and finds_unused):
                return False
        return True

    def frozen_at_wrap(self, module: nn.Module) -> list[str]:
        """Names of parameters that are trained now, but were frozen when their module was wrapped."""
        return [
            name
            for name, p in module.named_parameters()
            if p.requires_grad and not self._averages(p)
        ]

    def _averages(self, parameter: nn.Parameter) -> bool:
        known = self._averaged.get(id(parameter))
        return known is not None and known() is parameter


def _missing_message(wrapped: DistributedDataParallel) -> str | None:
    """DistributedDataParallel's message about missing gradients; ``None`` if none are missing."""
    try:
        wrapped._check_reducer_finalized()
    except RuntimeError as waiting:
        return str(waiting)
    return None


@contextmanager
def _trained(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Count all parameters as trained within the block."""
    frozen = [p for p in parameters if not p.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)

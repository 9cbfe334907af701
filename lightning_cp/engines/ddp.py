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

from lightning_cp.comm.consensus import tally, vote
from lightning_cp.config import StrategyConfig
from lightning_cp.engines.ddp_options import CommHook, bucket_options
from lightning_cp.engines.gradients import average_present
from lightning_cp.errors import ConfigError
from lightning_cp.layout.axes import Flat
from lightning_cp.mesh import ContextParallelMesh
from lightning_cp.utils.module_hooks import add_hook

# Other parameters with the memory of a model's own: nothing that follows those sees a backward.


@contextmanager
def aliases(model: nn.Module) -> Iterator[None]:
    """Within, each parameter of ``model`` is another one with the same values, and without a gradient.

    What was hung on a parameter is not on its alias: hooks, and those of DistributedDataParallel, which its
    C++ reducer notes also where it is not to average anything. What a step does to an alias, but to its
    values, is gone with it.
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
        if id(p) not in made:  # tied ones stay tied
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


# Gradients that DistributedDataParallel has left on their ranks, for a later backward to average.


WHAT = "gradients that were left on their ranks"


class KeptBack:
    """Of one wrapped model: what backward has left without averaging, as long as it is the same tensor."""

    def __init__(self) -> None:
        self._left: dict[int, int] = {}  # the gradient's id, by that of its parameter
        self._averages = False
        self.follows = False
        """The program has left some, ever; so it has on all ranks."""

    def begins(self, module: nn.Module, *, averages: bool) -> None:
        """A backward does, which averages gradients if it comes to this model, or leaves them."""
        self._averages = averages
        if not averages and not self.follows:
            self.follows = True  # most programs never get here, and have no hooks
            for parameter in module.parameters():
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(self._note)

    def among(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Those of them whose gradient no backward has averaged."""
        if not self._left:
            return []
        return [p for p in parameters if p.grad is not None and self._left.get(id(p)) == id(p.grad)]

    def _note(self, parameter: torch.Tensor) -> None:
        if self._averages:
            self._left.clear()  # all of the model's are averaged together
        elif parameter.grad is not None:
            self._left[id(parameter)] = id(parameter.grad)


def unequal(count: int, parameters: Iterable[torch.Tensor], group: dist.ProcessGroup) -> int:
    """The number of gradients that are some rank's alone; 0 where a program has averaged them. Collective.

    What a program does to gradients cannot be seen: a collective in place leaves no trace, and clipping does.
    But what was averaged is equal on all ranks, bit by bit.

    Args:
        count: gradients of this rank that no backward has averaged.
        parameters: all that are stepped along.
        group: all ranks that have copies of them, with a backend that moves CPU tensors.
    """
    total = tally(WHAT, group, number=count)
    assert total is not None
    if not total or vote([_checksum(p.grad) for p in parameters], group):
        return 0
    return max(1, count)


def _checksum(gradient: torch.Tensor | None) -> int | None:
    """A sum of its bits as integers, made where it is."""
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
        self.before_data: Callable[[], object] = list  # nothing is exchanged in forward
        self._bucket_options = bucket_options(settings.bucket_cap_mb)
        self._hook = hook or CommHook()
        self._averaged: dict[int, ref[nn.Parameter]] = {}  # by id: tensors do not hash by equality
        self._finds_unused: dict[int, ref[nn.Module]] = {}  # likewise; pickled with the strategy
        self._wrapped: dict[int, ref[DistributedDataParallel]] = {}  # by their modules
        self._called: dict[int, bool] = {}  # likewise: forward came, and no backward since
        self._kept: dict[int, KeptBack] = {}  # likewise
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
        self._kept[id(module)] = KeptBack()
        add_hook(wrapped.register_forward_hook, self._note_forward)
        return wrapped

    def adopt(self, optimizer: Optimizer) -> None:
        """Its parameters are the module's own still."""

    def accumulating(self, wrapped: nn.Module) -> AbstractContextManager[None]:
        """Leave gradients on their ranks; the next backward outside averages all of them."""
        assert isinstance(wrapped, DistributedDataParallel)
        return wrapped.no_sync()

    def rejoin(self, wrapped: nn.Module, loss: torch.Tensor) -> None:
        """As the forward of the new wrapper would have done."""
        assert isinstance(wrapped, DistributedDataParallel)
        prepare_for_backward(wrapped, loss)

    @contextmanager
    def aside(self, model: nn.Module) -> Iterator[None]:
        """Other parameters are in the place of those that are averaged, and wrappers are as they were."""
        with ExitStack() as stack:
            for wrapped in self._alive():
                synced = wrapped.require_forward_param_sync
                stack.callback(setattr, wrapped, "require_forward_param_sync", synced)
                stack.enter_context(wrapped.no_sync())
            stack.enter_context(aliases(model))
            yield

    def unreduced(self) -> Iterable[tuple[nn.Parameter, torch.Tensor]]:
        """None: all that there is of gradients is in ``grad``."""
        return ()

    def kept_back(self, parameters: Iterable[torch.Tensor]) -> int:
        """The number of those that no rank has averaged since a backward without averaging."""
        asked, kept = list(parameters), [self._kept[id(x.module)] for x in self._alive()]
        mesh = self._mesh() if self._mesh is not None else None
        if mesh is None or not any(each.follows for each in kept):
            return 0
        count = sum(len(each.among(asked)) for each in kept)
        return unequal(count, asked, mesh.control_group(Flat.LOSS))

    def after_step(self) -> None:
        """Parameters are changed in place."""

    def clip_norm(
        self,
        parameters: Iterable[torch.Tensor],
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
    ) -> torch.Tensor:
        """PyTorch's own: every rank has all gradients."""
        return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite)

    def clip_value(self, parameters: Iterable[torch.Tensor], value: float) -> None:
        """PyTorch's own."""
        nn.utils.clip_grad_value_(parameters, value)

    def _note_forward(self, wrapped: DistributedDataParallel, *_: Any) -> None:
        if torch.is_grad_enabled() and wrapped.require_backward_grad_sync:
            self._called[id(wrapped.module)] = True

    def expect(self, loss: torch.Tensor) -> None:
        """Before backward: have gradients averaged also if one forward has several backward passes.

        DistributedDataParallel averages what comes with the first one, and leaves what the others add on its
        rank.
        """
        for wrapped in self._alive():
            module, syncs = wrapped.module, wrapped.require_backward_grad_sync
            called = self._called.pop(id(module), False)
            if syncs and not called and _unfinished(wrapped) is None:
                prepare_for_backward(wrapped, loss)
            if dist.get_world_size(wrapped.process_group) > 1:
                self._kept[id(module)].begins(module, averages=syncs or called)

    def require_averaged(self) -> None:
        """After backward: refuse gradients that stayed on their ranks.

        DistributedDataParallel itself says so at the next forward only, after an optimizer has stepped, and
        not at all after the last one. With one rank nothing stays behind, and it has the only say.

        Raises:
            ConfigError: parameters that it waits for got no gradient, so others were not averaged either.
        """
        for wrapped in self._syncing():
            shares = dist.get_world_size(wrapped.process_group) > 1
            said = _unfinished(wrapped) if shares else None
            if said is not None:
                raise ConfigError(self._without_gradient(wrapped.module, said))

    def _syncing(self) -> list[DistributedDataParallel]:
        """The wrappers whose gradients are averaged in the next backward, or were in the last."""
        return [wrapped for wrapped in self._alive() if wrapped.require_backward_grad_sync]

    def _alive(self) -> list[DistributedDataParallel]:
        alive = (known() for known in self._wrapped.values())
        return [wrapped for wrapped in alive if wrapped is not None]

    def _without_gradient(self, module: nn.Module, said: str) -> str:
        """The names of the parameters that DistributedDataParallel numbers."""
        listed = re.search(r"indices which did not receive grad for rank \d+: ([\d ]+)", said)
        names = [name for name, p in module.named_parameters() if self._averages(p)]
        missing = [names[int(at)] for at in listed[1].split()] if listed else []
        shown = f" ({', '.join(missing[:3])}{', ...' * (len(missing) > 3)})" if missing else ""
        return (
            f"backward brought no gradient to some parameters that are trained{shown}, so those of others "
            "were not averaged over the ranks either. Where a step uses parts of the model only, pass "
            "find_unused_parameters=True to the strategy; or freeze what is not trained before the forward."
        )

    def follow(
        self,
        wrapped: nn.Module,
        mesh: ContextParallelMesh,
        device: torch.device,
        options: Mapping[str, Any],
    ) -> DistributedDataParallel:
        """Wrap anew, also within a step, with all parameters that are trained now or ever were.

        DistributedDataParallel averages those that it saw trained when it was made, and waits for each of
        them unless it looks for unused ones; so where some are frozen now, it has to look. Gradients that
        were kept back for the end of a window are averaged first, since the new one does not know of them;
        averaging them once more at the end changes nothing.

        Raises:
            ConfigError: it was told that the graph never changes.
        """
        assert isinstance(wrapped, DistributedDataParallel)
        if options.get("static_graph"):
            raise ConfigError(
                "static_graph=True says that every step trains the same parameters, but some were frozen or "
                "unfrozen since the model was wrapped. Leave static_graph away."
            )
        module: nn.Module = wrapped.module
        wrapped._remove_autograd_hooks()  # it may be waiting for gradients of this very step
        known = [p for p in module.parameters() if p.requires_grad or self._averages(p)]
        average_present(known, mesh.control_group(Flat.LOSS), mesh.group(Flat.LOSS))
        more: dict[str, Any] = {
            "init_sync": False
        }  # in step already, and in use by this step's graph
        if not all(p.requires_grad for p in known):
            more["find_unused_parameters"] = True
            warnings.filterwarnings("ignore", message="find_unused_parameters=True was specified")
        with _trained(known):
            return self.wrap(module, mesh, device, {**options, **more})

    def is_current(self, module: nn.Module) -> bool:
        """True if gradients of all parameters that are trained now are averaged, and no others waited for."""
        known = self._finds_unused.get(id(module))
        finds_unused = known is not None and known() is module
        return all(
            self._averages(p) if p.requires_grad else finds_unused or not self._averages(p)
            for p in module.parameters()
        )

    def left_out(self, module: nn.Module) -> list[str]:
        """Names of parameters that are trained now, but were frozen when their module was wrapped."""
        return [
            name
            for name, p in module.named_parameters()
            if p.requires_grad and not self._averages(p)
        ]

    def _averages(self, parameter: nn.Parameter) -> bool:
        known = self._averaged.get(id(parameter))
        return known is not None and known() is parameter


def _unfinished(wrapped: DistributedDataParallel) -> str | None:
    """Its message about gradients that it still waits for; ``None`` if it waits for none."""
    try:
        wrapped._check_reducer_finalized()
    except RuntimeError as waiting:
        return str(waiting)
    return None


@contextmanager
def _trained(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """All of them count as trained in the block."""
    frozen = [p for p in parameters if not p.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)

"""Private parts of PyTorch's FSDP2: everything of it that has no public name is used here only."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Set
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.tensor import DTensor

from lightning_cp.errors import ConfigError
from lightning_cp.watchdog.phase import sign_of_life


def two_dimensional(outer: DeviceMesh, inner: DeviceMesh) -> DeviceMesh:
    """The mesh of two of one root's axes, of which either may be flattened."""
    return DeviceMesh._concatenate([outer, inner])


def keep_methods(module: nn.Module, users: type[nn.Module]) -> None:
    """Have calls reach the user's methods too whose names are FSDP2's: its class comes before the user's.

    Args:
        module: was sharded just now.
        users: its class before that.
    """
    for name, own in vars(FSDPModule).items():
        theirs = None if name.startswith("_") else getattr(users, name, None)
        if callable(theirs):
            setattr(type(module), name, _either(own, theirs))


def _either(own: Callable[..., Any], users: Callable[..., Any]) -> Callable[..., Any]:
    """FSDP2's method for calls with nothing but switches, which is all that it takes; else the user's."""

    @wraps(users)
    def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        switches = all(isinstance(given, bool) for given in (*args, *kwargs.values()))
        return (own if switches else users)(self, *args, **kwargs)

    return method


class FsdpGroup:
    """Parameters that FSDP2 gathers and reduces together."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self._trained: list[bool] = []
        self._touched: set[int] = set()
        self._versions: list[int] = []
        self._shards: list[int] = []  # their versions
        self._memory = [_memory_of(each) for each in group.fsdp_params]
        self._settle_whenever_sharded()
        self._gather_for_training()
        self.settle()

    def shard(self) -> None:
        """Free the whole parameters, within a forward too; the next use gathers them from the shards."""
        self._group._to_sharded()

    def parameters(self) -> list[nn.Parameter]:
        """The sharded ones."""
        return [each.sharded_param for each in self._group.fsdp_params]

    def settle(self) -> None:
        """Freeze or unfreeze both forms of a parameter alike, the whole one and the sharded one.

        FSDP2 copies that from the sharded form when it gathers, and never back: what a step freezes of the
        parameters that it sees would be trained again afterwards. A form that differs from what both were has
        been changed, also a whole one that a step still holds after its memory was freed.
        """
        if not self._trained:
            self._trained = [p.requires_grad for p in self.parameters()]
        for at, each in enumerate(self._group.fsdp_params):
            whole = getattr(each, "_unsharded_param", None)
            forms = [each.sharded_param] if whole is None else [each.sharded_param, whole]
            before = self._trained[at]
            if any(form.requires_grad != before for form in forms):
                for form in forms:
                    form.requires_grad_(not before)
                self._trained[at] = not before

    def _settle_whenever_sharded(self) -> None:
        """Before the whole form goes, and when it has come."""
        group, to_sharded, to_unsharded = (
            self._group,
            self._group._to_sharded,
            self._group._to_unsharded,
        )

        def shard() -> None:
            self.settle()
            lost = self._write_changes() if group.is_unsharded else []
            to_sharded()
            if lost:
                raise ConfigError(_LOST.format(names=", ".join(lost[:3])))

        def unshard() -> None:
            came = not group.is_unsharded
            if came:
                self.settle()
            to_unsharded()
            if came:
                self._versions = [each._unsharded_param._version for each in group.fsdp_params]
                self._shards = [p._version for p in self.parameters()]
                self._refuse_ignored()

        group._to_sharded, group._to_unsharded = shard, unshard

    def changed(self) -> list[Any]:
        """FSDP2's records of whole parameters that were changed in place, or replaced, since they came."""
        if not self._group.is_unsharded:
            return []
        both = zip(self._group.fsdp_params, self._versions, strict=True)
        return [x for x, came in both if x._unsharded_param._version != came or _is_replaced(x)]

    def names(self, records: Iterable[Any]) -> list[str]:
        """Of the parameters of these records."""
        return [each._param_fqn or each._module_info.param_name for each in records]

    def _refuse_ignored(self) -> None:
        """Refuse ``parameter.data = ...`` of a shard: PyTorch changes what wraps the values, and not them."""
        records, before = self._group.fsdp_params, self._memory
        self._memory = [_memory_of(each) for each in records]
        both = zip(records, before, self._memory, strict=True)
        ignored = [x for x, (was, at), (now, to) in both if was is now and at._cdata != to._cdata]
        if ignored:
            raise ConfigError(_IGNORED.format(names=", ".join(self.names(ignored)[:3])))

    def keep(self) -> None:
        """Change the shards as a step changed whole parameters, seen or unseen (``parameter.data.mul_``).

        One copy of what this rank holds: what was not changed is the same. What a backward needs stays in
        its place; memory that was replaced follows when it is freed.
        """
        group = self._group
        if group.is_unsharded and not isinstance(group.offload_policy, CPUOffloadPolicy):
            both = zip(group.fsdp_params, self._shards, strict=True)
            own = [x for x, came in both if x.sharded_param._version == came]  # not changed itself
            self._write_back([x for x in own if _is_alike(x) and not _is_replaced(x)])

    def _write_changes(self) -> list[str]:
        """Change the shards as the whole parameters were; the names of those that cannot be.

        Whole parameters of another precision than the shards would round all of these.
        """
        changed = self.changed()
        self._write_back([each for each in changed if _is_alike(each)])
        self._versions = [each._unsharded_param._version for each in self._group.fsdp_params]
        return self.names(each for each in changed if not _is_alike(each))

    @torch.inference_mode(False)
    @torch.no_grad()
    def _write_back(self, records: list[Any]) -> None:
        """Each rank takes its part of what it has itself."""
        group = self._group
        for each in filter(_is_replaced, records):
            place = each.all_gather_outputs[0].as_strided(
                each._orig_size, each._contiguous_orig_stride
            )
            place.copy_(_local(each._unsharded_param))
            _local(each._unsharded_param).data = place
        shards = [each._sharded_param_data for each in records]
        rank = group.mesh_info.shard_mesh_rank
        for each, shard in zip(records, shards, strict=True):
            own = rank * shard.numel()
            shard.copy_(each.all_gather_outputs[0][own : own + shard.numel()])
        if records and group.device.type != "cpu":  # gathering, on another stream, waits for it
            group._reshard_after_forward_event = group.device_handle.Event()
            group._reshard_after_forward_event.record()

    def _gather_for_training(self) -> None:
        """Make whole parameters outside of inference mode: training uses those that an evaluation made."""
        own = self._group.wait_for_unshard

        def wait_for_unshard() -> None:
            with torch.inference_mode(False), torch.no_grad():
                own()

        self._group.wait_for_unshard = wait_for_unshard

    def complete(self, had: dict[int, bool], filled: set[int]) -> None:
        """Before every reduction: zeros where no gradient came, so that all ranks reduce the same.

        FSDP2 reduces what there is of gradients, and waits forever where ranks have other ones.

        Args:
            had: by id of each reduced parameter, whether this rank had a gradient.
            filled: ids of parameters whose gradient is nothing but zeros, as far as this rank knows.
        """
        group, own = self._group, self._group.post_backward

        def post_backward(*unused: Any) -> None:
            sign_of_life()
            self.settle()
            self._touched |= {id(p) for p in self.parameters() if p.requires_grad}
            for each in group.fsdp_params if group.reduce_grads else ():
                parameter, sharded = getattr(each, "_unsharded_param", None), each.sharded_param
                if parameter is None or id(sharded) not in self._touched:
                    continue
                has = parameter.grad is not None or each.unsharded_accumulated_grad is not None
                had[id(sharded)] = had.get(id(sharded), False) or has
                if not has:
                    if sharded.grad is None:
                        filled.add(id(sharded))
                    parameter.grad = torch.zeros_like(parameter)
            if group.reduce_grads:
                self._touched.clear()
            own(*unused)

        group.post_backward = post_backward

    def unreduced(self) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        """Gradients of this rank alone, kept for a later reduction, by their sharded parameters."""
        for each in self._group.fsdp_params:
            parameter = getattr(each, "_unsharded_param", None)
            kept = each.unsharded_accumulated_grad
            if kept is None and parameter is not None:
                kept = parameter.grad
            if kept is not None:
                yield each.sharded_param, kept

    def drop_unreduced(self, zeroed: Set[int]) -> None:
        """Forget such gradients of the sharded parameters with these ids."""
        for each in self._group.fsdp_params:
            if id(each.sharded_param) not in zeroed:
                continue
            each.unsharded_accumulated_grad = None
            parameter = getattr(each, "_unsharded_param", None)
            if parameter is not None:
                parameter.grad = None

    def zero(self) -> None:
        """Drop the gradients of shards, where a module shows whole parameters."""
        if self._group.is_unsharded:
            for parameter in self.parameters():
                parameter.grad = None

    def gathered(self) -> Iterator[torch.Tensor]:
        """Whole parameters, as long as this rank holds them."""
        for each in self._group.fsdp_params:
            parameter = getattr(each, "_unsharded_param", None)
            if parameter is not None:
                yield _local(parameter)

    def give_gradients(self) -> None:
        """Give what is trained gradients without values, placed as a backward leaves them.

        They are parts of one buffer for the whole group, with the rows that other ranks have more of.
        """
        trained = [each for each in self._group.fsdp_params if each.sharded_param.requires_grad]
        sizes = [each.padded_sharded_param_size.numel() for each in trained]
        if not trained:
            return
        buffer = trained[0].sharded_param.to_local().new_empty(sum(sizes))
        for each, part in zip(trained, buffer.split(sizes), strict=True):
            own = part[: each.sharded_size.numel()].view(each.sharded_size)
            each.sharded_param.grad = each.to_sharded_dtensor(own)

    def settle_dtypes(self) -> None:
        """Look anew at what is trained: gradients are added in the dtype of trained parameters."""
        self._group._init_mp_dtypes()


def _local(parameter: torch.Tensor) -> torch.Tensor:
    return parameter._local_tensor if isinstance(parameter, DTensor) else parameter


def _memory_of(record: Any) -> tuple[torch.Tensor, Any]:
    """The values of a shard, and the (empty) memory of the DTensor around them, which its ``data`` brings."""
    return record._sharded_local_tensor, record.sharded_param.untyped_storage()


def _is_replaced(record: Any) -> bool:
    """True if ``parameter.data = ...`` gave a whole parameter other memory than that it is gathered in."""
    gathered = record.all_gather_outputs
    return _local(record._unsharded_param).data_ptr() != gathered[0].data_ptr()


def _is_alike(record: Any) -> bool:
    """True if a whole parameter has the precision and the size that its shards are of."""
    gathered, *more = record.all_gather_outputs
    alike = gathered.dtype == record._sharded_param_data.dtype and not more
    return alike and _local(record._unsharded_param).shape == record._orig_size


_IGNORED = (
    "{names}: `parameter.data = ...` of a sharded parameter (a DTensor), which PyTorch ignores. "
    "Change the values in place, under torch.no_grad(): parameter.copy_(...), parameter.lerp_(...)."
)
_LOST = (
    "{names}: changed in place while gathered in another precision than the shards have, where the change "
    "would be lost. Change weights in a hook such as on_train_batch_end, or after the optimizer's step in "
    "manual optimization; there parameters are the shards."
)


def groups_of(root: nn.Module) -> list[FsdpGroup]:
    """Of a model and of all modules in it."""
    found: list[FsdpGroup] = []
    for module in root.modules():
        if isinstance(module, FSDPModule):
            found += [FsdpGroup(group) for group in _groups(module._get_fsdp_state())]
    return found


def _groups(state: Any) -> list[Any]:
    """Of one module's state; before torch 2.12 there was one at most."""
    several = getattr(state, "_fsdp_param_groups", None)
    if several is None:
        several = [state._fsdp_param_group] if state._fsdp_param_group else []
    return several


def in_backward() -> bool:
    """True within a backward, which may call modules again."""
    return torch._C._current_graph_task_id() != -1


def is_idle(root: FSDPModule) -> bool:
    """True if neither a forward of the root nor a backward, which may call modules again, is under way."""
    if in_backward():
        return False
    return root._get_fsdp_state()._training_state is TrainingState.IDLE


def is_gathered(root: FSDPModule) -> bool:
    """True if the root's own parameters, which are in none of its units, are whole."""
    return all(group.is_unsharded for group in _groups(root._get_fsdp_state()))


def enter_forward(root: FSDPModule, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Gather the root's own parameters, as its forward does; the arguments, in the dtype of its policy."""
    state: Any = root._get_fsdp_state()
    return state._pre_forward(root, args, kwargs)


def leave_forward(root: FSDPModule, args: Any, output: Any) -> Any:
    """End what ``enter_forward`` began; the output, which tells when its backward begins."""
    state: Any = root._get_fsdp_state()
    return state._post_forward(root, args, output)


def enter_backward(root: FSDPModule, gradient: torch.Tensor) -> None:
    """Have all groups of a root reduced at the end, as FSDP2 does when a gradient reaches its output."""
    state: Any = root._get_fsdp_state()
    state._pre_backward(gradient)


def forget_step(root: FSDPModule) -> None:
    """After an error in the middle of a forward: shard parameters, and have the next one begin anew."""
    reset = getattr(root, "reset_iter_state", None)
    if reset is not None:
        reset()
        return
    all_of: Any = root._get_fsdp_state()._state_ctx  # before torch 2.13
    all_of.iter_forward_root = None
    for state in all_of.all_states:
        state._training_state = TrainingState.IDLE
        for group in _groups(state):
            group._training_state = TrainingState.IDLE
            group._post_forward_indices.clear()
            group._to_sharded()

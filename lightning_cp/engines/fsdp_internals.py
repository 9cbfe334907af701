"""Private parts of PyTorch's FSDP2; no other file uses a name of it that is not public."""

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
from lightning_cp.utils.autograd_notes import in_backward
from lightning_cp.watchdog.phase import sign_of_work


def two_dimensional(outer: DeviceMesh, inner: DeviceMesh) -> DeviceMesh:
    """The mesh of two of one root's axes, of which either may be flattened."""
    return DeviceMesh._concatenate([outer, inner])


def keep_methods(module: nn.Module, users: type[nn.Module]) -> None:
    """Have calls reach the user's methods whose names FSDP2 uses too; its class precedes the user's.

    Args:
        module: a module that was just sharded.
        users: its former class.
    """
    for name, own in vars(FSDPModule).items():
        theirs = None if name.startswith("_") else getattr(users, name, None)
        if callable(theirs):
            setattr(type(module), name, _choose_method(own, theirs))


def _choose_method(own: Callable[..., Any], users: Callable[..., Any]) -> Callable[..., Any]:
    """Choose FSDP2's method for calls with only bool arguments, which are all it takes; else the user's."""

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
        self._shards: list[int] = []  # versions of the tensors
        self._memory = [_memory_of(each) for each in group.fsdp_params]
        self._hook_resharding()
        self._gather_for_training()
        self.sync_requires_grad()

    def shard(self) -> None:
        """Free the whole parameters, within a forward too; the next use gathers them from the shards."""
        self._group._to_sharded()

    def parameters(self) -> list[nn.Parameter]:
        """The sharded parameters."""
        return [each.sharded_param for each in self._group.fsdp_params]

    def sync_requires_grad(self) -> None:
        """Give the whole and the sharded form of each parameter the same ``requires_grad``.

        FSDP2 copies it from the sharded form when it gathers, and never back, so parameters that a step froze
        would be trained again afterwards. The form that differs from the former state was changed by the
        user, also a whole one whose memory was freed.
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

    def _hook_resharding(self) -> None:
        """Do this before the whole form is freed, and after it was gathered."""
        group, to_sharded, to_unsharded = (
            self._group,
            self._group._to_sharded,
            self._group._to_unsharded,
        )

        def shard() -> None:
            self.sync_requires_grad()
            lost = self._write_changes() if group.is_unsharded else []
            to_sharded()
            if lost:
                raise ConfigError(_LOST.format(names=", ".join(lost[:3])))

        def unshard() -> None:
            came = not group.is_unsharded
            if came:
                self.sync_requires_grad()
            to_unsharded()
            if came:
                self._versions = [each._unsharded_param._version for each in group.fsdp_params]
                self._shards = [p._version for p in self.parameters()]
                self._check_ignored()

        group._to_sharded, group._to_unsharded = shard, unshard

    def changed(self) -> list[Any]:
        """FSDP2's records of whole parameters that were changed in place, or replaced, since gathering."""
        if not self._group.is_unsharded:
            return []
        both = zip(self._group.fsdp_params, self._versions, strict=True)
        return [x for x, came in both if x._unsharded_param._version != came or _is_replaced(x)]

    def names(self, records: Iterable[Any]) -> list[str]:
        """The names of the parameters of these records."""
        return [each._param_fqn or each._module_info.param_name for each in records]

    def _check_ignored(self) -> None:
        """Raise for ``parameter.data = ...`` of a shard: PyTorch changes the wrapper of the values, and not
        the values.
        """
        records, before = self._group.fsdp_params, self._memory
        self._memory = [_memory_of(each) for each in records]
        both = zip(records, before, self._memory, strict=True)
        ignored = [x for x, (was, at), (now, to) in both if was is now and at._cdata != to._cdata]
        if ignored:
            raise ConfigError(_IGNORED.format(names=", ".join(self.names(ignored)[:3])))

    def apply_changes(self) -> None:
        """Apply a step's changes of whole parameters to the shards, also hidden ones
        (``parameter.data.mul_``).

        This rank's part is copied once; unchanged values stay the same. Memory that a backward needs stays in
        place; replaced memory follows when it is freed.
        """
        group = self._group
        if group.is_unsharded and not isinstance(group.offload_policy, CPUOffloadPolicy):
            both = zip(group.fsdp_params, self._shards, strict=True)
            own = [x for x, came in both if x.sharded_param._version == came]  # shard unchanged
            self._write_back([x for x in own if _is_alike(x) and not _is_replaced(x)])

    def _write_changes(self) -> list[str]:
        """Apply the changes of whole parameters to the shards; return the names of those that cannot be
        applied.

        Whole parameters of another precision than the shards would round all of these.
        """
        changed = self.changed()
        self._write_back([each for each in changed if _is_alike(each)])
        self._versions = [each._unsharded_param._version for each in self._group.fsdp_params]
        return self.names(each for each in changed if not _is_alike(each))

    @torch.inference_mode(False)
    @torch.no_grad()
    def _write_back(self, records: list[Any]) -> None:
        """Copy this rank's part of each whole parameter into its shard."""
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
        """Gather whole parameters outside of inference mode: training uses those that an evaluation
        gathered.
        """
        own = self._group.wait_for_unshard

        def wait_for_unshard() -> None:
            with torch.inference_mode(False), torch.no_grad():
                own()

        self._group.wait_for_unshard = wait_for_unshard

    def fill_missing(self, had_gradient: dict[int, bool], filled: set[int]) -> None:
        """Before every reduction: fill missing gradients with zeros, so that all ranks reduce the same
        parameters.

        FSDP2 reduces the gradients that exist, and hangs where ranks have different ones.

        Args:
            had_gradient: by id of each reduced parameter, True if this rank had a gradient.
            filled: ids of parameters whose gradient is only such zeros on this rank.
        """
        group, own = self._group, self._group.post_backward

        def post_backward(*unused: Any) -> None:
            sign_of_work()
            self.sync_requires_grad()
            self._touched |= {id(p) for p in self.parameters() if p.requires_grad}
            for each in group.fsdp_params if group.reduce_grads else ():
                parameter, sharded = getattr(each, "_unsharded_param", None), each.sharded_param
                if parameter is None or id(sharded) not in self._touched:
                    continue
                has = parameter.grad is not None or each.unsharded_accumulated_grad is not None
                had_gradient[id(sharded)] = had_gradient.get(id(sharded), False) or has
                if not has:
                    if sharded.grad is None:
                        filled.add(id(sharded))
                    parameter.grad = torch.zeros_like(parameter)
            if group.reduce_grads:
                self._touched.clear()
            own(*unused)

        group.post_backward = post_backward

    def unreduced_gradients(self) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        """Gradients of this rank alone, held for a later reduction, by their sharded parameters."""
        for each in self._group.fsdp_params:
            parameter = getattr(each, "_unsharded_param", None)
            kept = each.unsharded_accumulated_grad
            if kept is None and parameter is not None:
                kept = parameter.grad
            if kept is not None:
                yield each.sharded_param, kept

    def drop_unreduced(self, zeroed: Set[int]) -> None:
        """Drop the unreduced gradients of sharded parameters with these ids."""
        for each in self._group.fsdp_params:
            if id(each.sharded_param) not in zeroed:
                continue
            each.unsharded_accumulated_grad = None
            parameter = getattr(each, "_unsharded_param", None)
            if parameter is not None:
                parameter.grad = None

    def zero(self) -> None:
        """Drop the gradients of shards where a module shows whole parameters."""
        if self._group.is_unsharded:
            for parameter in self.parameters():
                parameter.grad = None

    def allocate_gradients(self) -> None:
        """Allocate gradients of trained parameters, without values, placed as a backward leaves them.

        They are views of one buffer of the whole group, padded to the rows of the ranks that hold more.
        """
        trained = [each for each in self._group.fsdp_params if each.sharded_param.requires_grad]
        sizes = [each.padded_sharded_param_size.numel() for each in trained]
        if not trained:
            return
        buffer = trained[0].sharded_param.to_local().new_empty(sum(sizes))
        for each, part in zip(trained, buffer.split(sizes), strict=True):
            own = part[: each.sharded_size.numel()].view(each.sharded_size)
            each.sharded_param.grad = each.to_sharded_dtensor(own)

    def read_reduce_dtypes(self) -> None:
        """Read which parameters are trained: gradients are summed in the dtype of trained parameters."""
        self._group._init_mp_dtypes()


def _local(parameter: torch.Tensor) -> torch.Tensor:
    return parameter._local_tensor if isinstance(parameter, DTensor) else parameter


def _memory_of(record: Any) -> tuple[torch.Tensor, Any]:
    """The values of a shard, and the (empty) memory of the DTensor around them, which its ``data``
    returns.
    """
    return record._sharded_local_tensor, record.sharded_param.untyped_storage()


def _is_replaced(record: Any) -> bool:
    """True if ``parameter.data = ...`` gave a whole parameter other memory than the gathered one."""
    gathered = record.all_gather_outputs
    return _local(record._unsharded_param).data_ptr() != gathered[0].data_ptr()


def _is_alike(record: Any) -> bool:
    """True if a whole parameter has the precision and the size of its shards."""
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
    """The groups of a model and of all modules in it."""
    found: list[FsdpGroup] = []
    for module in root.modules():
        if isinstance(module, FSDPModule):
            found += [FsdpGroup(group) for group in _groups(module._get_fsdp_state())]
    return found


def _groups(state: Any) -> list[Any]:
    """The groups of one module's state; before torch 2.12 there was one at most."""
    several = getattr(state, "_fsdp_param_groups", None)
    if several is None:
        several = [state._fsdp_param_group] if state._fsdp_param_group else []
    return several


def is_idle(root: FSDPModule) -> bool:
    """True if neither a forward of the root nor a backward, which may call modules again, is running."""
    if in_backward():
        return False
    return root._get_fsdp_state()._training_state is TrainingState.IDLE


def is_gathered(root: FSDPModule) -> bool:
    """True if the root's own parameters, outside of its units, are whole."""
    return all(group.is_unsharded for group in _groups(root._get_fsdp_state()))


def enter_forward(root: FSDPModule, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Gather the root's own parameters as its forward does; return the arguments in the dtype of its
    policy.
    """
    state: Any = root._get_fsdp_state()
    return state._pre_forward(root, args, kwargs)


def leave_forward(root: FSDPModule, args: Any, output: Any) -> Any:
    """End a forward that ``enter_forward`` began; return the output, hooked for the start of its backward."""
    state: Any = root._get_fsdp_state()
    return state._post_forward(root, args, output)


def enter_backward(root: FSDPModule, gradient: torch.Tensor) -> None:
    """Have all groups of a root reduced at the end, as FSDP2 does when a gradient reaches its output."""
    state: Any = root._get_fsdp_state()
    state._pre_backward(gradient)


def forget_step(root: FSDPModule) -> None:
    """After an error within a forward: shard parameters, and reset the state for the next forward."""
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

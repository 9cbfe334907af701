"""Checks that ranks build the same model and optimizers, before they exchange anything.

Collectives over parameters whose shapes or dtypes differ crash in native code, without a name. Differences
that shapes do not show (a learning rate, the base of rotary positions) would train different values on each
rank, without an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightning_cp import error_display
from lightning_cp.comm.consensus import World, stable_hash
from lightning_cp.consistency.settings import differences, value_text, values_by_rank
from lightning_cp.errors import ConfigError
from lightning_cp.loss.counts import gather_by_sample
from lightning_cp.loss.shared_values import first_difference, format_values, norm_and_projection

CONFIGS = ("PretrainedConfig", "PreTrainedConfig")
"""Classes of transformers, by name, so that it need not be imported."""
IGNORED = ("name_or_path", "transformers_version", "torch_dtype", "dtype", "attn_implementation")
"""Entries of a config about a model's source and execution, besides those that begin with _."""
MAX_ELEMENTS = 16
"""Limit of elements of a tensor that is an optimizer's setting."""


def check_same_model(module: nn.Module) -> None:
    """Check that names, shapes, dtypes, ties and configs of a model are the same on all ranks. Collective.

    Values are not compared, since the first rank's are broadcast.

    Raises:
        ConfigError: on every rank, naming the first parameter and the first entry of a config that differ;
            or a model of ``check_ties``.
    """
    if dist.get_world_size() > 1:
        _check_same_facts(
            [model_facts(module), config_facts(module)],
            "models",
            "Every rank has to build the same model: layers, shapes, dtypes, ties, what is frozen, and its "
            "config. Values may differ; those of the first rank count.",
        )
    check_ties(module)


def check_ties(module: nn.Module) -> None:
    """Check that models of transformers on the meta device share the weights that their configs tie.

    transformers 5.0 ties nothing there: head and embeddings would become two tensors, unlike on a device.

    Raises:
        ConfigError: naming the model.
    """
    for part in module.modules():
        config: Any = getattr(part, "config", None)
        if not (_is_config(config) and getattr(config, "tie_word_embeddings", False)):
            continue
        embeddings, head = (_embedding_weight(part, side) for side in ("input", "output"))
        if embeddings is not None and head is not None and head is not embeddings:
            raise ConfigError(
                f"{type(part).__name__} on the meta device does not share its embeddings with its head, "
                "as its config asks (tie_word_embeddings): transformers 5.0 does not tie them there. Call "
                "its tie_weights() when it is made."
            )


def _embedding_weight(model: nn.Module, side: str) -> torch.Tensor | None:
    """The weight on the meta device of a model's input or output embeddings, or ``None``."""
    embeddings: Any = None
    with suppress(AttributeError, NotImplementedError):  # a model without one
        embeddings = getattr(model, f"get_{side}_embeddings")()
    weight = getattr(embeddings, "weight", None)
    return weight if isinstance(weight, torch.Tensor) and weight.is_meta else None


def check_same_optimizers(
    optimizers: Sequence[Optimizer], module: nn.Module, schedulers: Iterable[object] = ()
) -> None:
    """Check that classes, groups and settings of optimizers are the same on all ranks. Collective.

    Args:
        optimizers: in their initial state.
        module: has the names of their parameters.
        schedulers: only their classes are compared.

    Raises:
        ConfigError: on every rank, naming the first difference.
    """
    if dist.get_world_size() > 1:
        names = {id(p): name for name, p in module.named_parameters()}
        facts = optimizer_facts(optimizers, names)
        facts.update((f"scheduler {at}", _class(each)) for at, each in enumerate(schedulers))
        _check_same_facts(
            [facts],
            "optimizers",
            "Each rank steps what it holds of one model, so all have to make the same optimizers, with the "
            "same groups of parameters and the same settings.",
        )


class ChangedState:
    """Buffers and frozen parameters that steps write to: ranks that share a sample must write the same.

    They are compared in the votes on steps 2, 4, 8, ... of a run. PyTorch counts the writes to a tensor, so
    unchanged tensors are not read. Sharded tensors have one copy, and are not compared.
    """

    def __init__(self) -> None:
        self._votes = 0
        self._known: dict[str, tuple[int, int]] = {}
        self._warned: set[str] = set()

    def numbers(self, model: nn.Module) -> list[tuple[str, list[str]]]:
        """Tensors written to since the last comparison, by name, with numbers; waits for the device if there
        are any.
        """
        self._votes += 1
        if self._votes & (self._votes - 1):
            return []
        tensors = dict(_whole_state(model))
        writes = {name: (id(x), x._version) for name, x in tensors.items()}
        moved = [name for name, x in writes.items() if self._known.get(name, x) != x]
        self._known = writes
        values = (norm_and_projection(tensors[name]) for name in moved)
        return [(name, format_values([x], 17)) for name, x in zip(moved, values, strict=True)]

    def warn(
        self, own: list[tuple[str, list[str]]], group: dist.ProcessGroup, sample_size: int
    ) -> None:
        """Warn once per tensor that differs between ranks which share a sample. Collective."""
        for _, (first, of_ranks) in gather_by_sample([dict(own)], group, sample_size):
            for name, values in of_ranks[0].items():
                others = ((rank, each[name]) for rank, each in enumerate(of_ranks) if name in each)
                found = ((rank, first_difference(values, other, 17)) for rank, other in others)
                apart = next(((first + rank, x) for rank, x in found if x is not None), None)
                if apart is not None and name not in self._warned:
                    self._warned.add(name)
                    if dist.get_rank() == first:
                        rank, (norm, other) = apart
                        error_display.warn(_DIFFERENT_STATE.format(name, norm, first, other, rank))


def _whole_state(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    frozen = ((name, p) for name, p in model.named_parameters() if not p.requires_grad)
    for name, x in (*model.named_buffers(), *frozen):
        plain = x.layout == torch.strided and not (isinstance(x, DTensor) or x.is_complex())
        if plain and not x.is_meta and x.numel():
            yield name.replace("_forward_module.", "").removeprefix("module."), x


_DIFFERENT_STATE = (
    "steps write to {} (a buffer, or a parameter that is not trained), and ranks that share a sample do not "
    "write the same: its norm is {:g} on rank {} and {:g} on rank {}. What is computed from it is then not "
    "what one process computes. Compute it from whole sequences (unshard), or average it over ranks."
)


def model_facts(module: nn.Module) -> dict[str, str]:
    """Facts about each parameter and buffer, in the order in which ranks exchange them."""
    first: dict[int, str] = {}
    parameters = module.named_parameters(remove_duplicate=False)
    facts = {name: _tensor(x, first.setdefault(id(x), name), name) for name, x in parameters}
    return {**facts, **{f"buffer {name}": _tensor(x) for name, x in module.named_buffers()}}


def _tensor(x: torch.Tensor, first: str = "", name: str = "") -> str:
    dtype = str(x.dtype).removeprefix("torch.")
    said = ["not initialised yet" if is_lazy(x) else f"{list(x.shape)} {dtype}"]
    if isinstance(x, nn.Parameter) and not x.requires_grad:
        said.append("frozen")
    if x.is_meta:
        said.append("on the meta device")
    if first != name:
        said.append(f"tied to {first}")
    return ", ".join(said)


def config_facts(module: nn.Module) -> dict[str, str]:
    """The entries of transformers' configs, each config once."""
    facts: dict[str, str] = {}
    seen: set[int] = set()
    for name, part in module.named_modules():
        config: Any = getattr(part, "config", None)
        if _is_config(config) and id(config) not in seen:
            seen.add(id(config))
            facts.update(_entries(config.to_dict(), f"{name}.config" if name else "config"))
    return dict(sorted(facts.items()))


def _is_config(value: object) -> bool:
    return any(base.__name__ in CONFIGS for base in type(value).__mro__)


def _entries(config: Mapping[Any, Any], path: str) -> Iterator[tuple[str, str]]:
    for key, value in config.items():
        if str(key).startswith("_") or key in IGNORED:
            continue
        if isinstance(value, Mapping):
            yield from _entries(cast(Mapping[Any, Any], value), f"{path}.{key}")
        else:
            yield f"{path}.{key}", value_text(value)


def optimizer_facts(optimizers: Sequence[Optimizer], names: Mapping[int, str]) -> dict[str, str]:
    """Facts about optimizers: classes, then groups, then their parameters."""
    facts: dict[str, str] = {}
    for at, optimizer in enumerate(optimizers):
        number = f" {at}" if len(optimizers) > 1 else ""
        facts[f"optimizer{number}"] = _class(optimizer)
        title = f"{type(optimizer).__name__}{number}"
        facts[f"{title}, groups of parameters"] = str(len(optimizer.param_groups))
        if (clip := getattr(optimizer, "qk_clip", None)) is not None:
            facts[f"{title}, qk_clip"] = repr(clip)
        for index, group in enumerate(optimizer.param_groups):
            facts.update((f"{title}, {key}", x) for key, x in _group(group, index, names))
    return facts


def _group(
    group: Mapping[str, Any], index: int, names: Mapping[int, str]
) -> Iterator[tuple[str, str]]:
    for key in sorted(group.keys() - {"params"}, key=lambda key: (key != "lr", key)):
        yield f"{key} of group {index}", value_text(_plain(group[key]))
    yield f"parameters of group {index}", str(len(group["params"]))
    for at, parameter in enumerate(group["params"]):
        name = names.get(id(parameter)) or f"a tensor of shape {list(parameter.shape)}"
        yield f"parameter {at} of group {index}", name


def _plain(value: Any) -> object:
    """The comparable part of a setting: values, and for anything else the class."""
    if isinstance(value, torch.Tensor):
        few = not isinstance(value, DTensor) and not value.is_meta and value.numel() <= MAX_ELEMENTS
        return value.tolist() if few else f"{list(value.shape)} {value.dtype}"
    if isinstance(value, (list, tuple)):
        return tuple(_plain(each) for each in cast(Sequence[Any], value))
    plain = value is None or isinstance(value, (bool, int, float, str))
    return value if plain else _class(value)


def _class(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _check_same_facts(parts: Sequence[Mapping[str, str]], what: str, remedy: str) -> None:
    """Name the first difference of each part; only a hash is exchanged if there is none."""
    own = [list(part.items()) for part in parts]
    world = World()
    if len(set(world.gather(stable_hash(own)))) == 1:
        return
    every = world.gather(own)
    found = [next(differences([dict(found[at]) for found in every]), "") for at in range(len(own))]
    listed = "; ".join(filter(None, found)) or _order([found[0] for found in every])
    raise ConfigError(f"ranks have different {what}: {listed}. {remedy}")


def _order(every: Sequence[Sequence[tuple[str, str]]]) -> str:
    """The names from the first fact on that has another position, if the facts are the same."""
    names = [[name for name, _ in found] for found in every]
    at = next(i for i in range(len(names[0])) if len({each[i] for each in names}) > 1)
    return (
        f"order of parameters ({values_by_rank([', '.join(each[at : at + 2]) for each in names])})"
    )

"""Adapters of peft: their first values, their files, and what cannot be merged into shards."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_cp.checkpoint.pretrained.keys import Tensors
from lightning_cp.errors import CheckpointError, ConfigError

Rule = Callable[[torch.Tensor], object]
"""A function that sets a tensor's values."""
ADAPTER_CONFIG = "adapter_config.json"
_OF_THEIR_OWN = (True, False, "gaussian", "eva")
"""LoRA's ways to begin that read no weight of the model."""


def adapters_of(network: nn.Module) -> Mapping[str, Any]:
    """Configs of a network's adapters by name, as peft and transformers store them."""
    configs = getattr(network, "peft_config", None)
    return configs if isinstance(configs, Mapping) else {}


def _adapted_layers(model: nn.Module) -> Iterator[tuple[Any, Mapping[str, Any]]]:
    """Modules that hold parts of adapters, with the configs."""
    for network in model.modules():
        if configs := adapters_of(network):
            for layer in network.modules():
                if getattr(layer, "adapter_layer_names", None):
                    yield layer, configs


# First values. Parts of adapters are ordinary layers, which by themselves get values that change the model.
# peft sets them from outside when it adds the adapter; on the meta device nothing of that is left.


def adapter_initializers(model: nn.Module) -> dict[nn.Module, list[Callable[[nn.Module], object]]]:
    """Functions that set parts of adapters as peft does; none for a part that only peft can set."""
    found: dict[nn.Module, list[Callable[[nn.Module], object]]] = {}
    for layer, configs in _adapted_layers(model):
        for owner, rules in _rules(layer, configs):
            known = {name: rule for name, rule in rules.items() if rule is not None}
            found[owner] = [partial(_apply, known)] if len(known) == len(rules) else []
    return found


def _rules(
    layer: Any, configs: Mapping[str, Any]
) -> Iterator[tuple[nn.Module, dict[str, Rule | None]]]:
    """Each part of a layer's adapters, with the rules of its own parameters."""
    for kind in layer.adapter_layer_names:
        parts = getattr(layer, kind, None)
        if isinstance(parts, nn.ParameterDict):
            yield parts, {name: _rule(layer, kind, name, configs) for name in parts}
        elif isinstance(parts, nn.ModuleDict):
            for name, part in parts.items():
                rule = _rule(layer, kind, name, configs)
                for owner in part.modules():
                    yield owner, dict.fromkeys(owner._parameters, rule)


def _rule(layer: Any, kind: str, name: str, configs: Mapping[str, Any]) -> Rule | None:
    """Return what peft's ``reset_lora_parameters`` does with a tensor; ``None`` of other adapters."""
    how = getattr(configs.get(name), "init_lora_weights", None)
    is_gaussian = isinstance(how, str) and how.lower() == "gaussian"
    if not _is_plain_lora(layer, name, configs) or not (how is True or is_gaussian):
        return None
    uniform: Rule = partial(nn.init.kaiming_uniform_, a=math.sqrt(5))
    rules: dict[str, Rule] = {
        "lora_A": partial(nn.init.normal_, std=1 / layer.r[name]) if is_gaussian else uniform,
        "lora_B": nn.init.zeros_,
        "lora_embedding_A": nn.init.zeros_,
        "lora_embedding_B": nn.init.normal_,
    }
    return rules.get(kind)


def _apply(rules: Mapping[str, Rule], module: nn.Module) -> None:
    for name, x in module._parameters.items():
        if x is not None:
            rules[name](x)


def _is_plain_lora(layer: Any, name: str, configs: Mapping[str, Any]) -> bool:
    """True if it only adds ``B @ A`` to a weight: not a variant, such as DoRA."""
    kind = getattr(configs.get(name), "peft_type", None)
    is_lora = kind == "LORA" and hasattr(layer, "lora_A")
    return is_lora and name not in getattr(layer, "lora_variant", ())


def check_made_of_loaded(model: nn.Module, in_files: Collection[int]) -> None:
    """Check that no adapter was made of weights which the files replace now, but not the adapter.

    Args:
        model: before it is loaded.
        in_files: ids of the tensors that files hold.

    Raises:
        CheckpointError: an adapter was.
    """
    for layer, configs in _adapted_layers(model):
        for name, config in configs.items():
            if not (how := _made_of_weights(config)):
                continue
            every = [getattr(layer, kind, None) for kind in layer.adapter_layer_names]
            own = [x[name] for x in every if isinstance(x, nn.ModuleDict) and name in x]
            values = [x for part in own for x in part.parameters()]
            if any(id(x) not in in_files and not x.is_meta for x in values):
                raise CheckpointError(
                    f"the adapter {name!r} ({how}) was made of the model's weights, which the files would "
                    "replace: it would begin from others. Nothing was loaded. Leave pretrained= out, and "
                    "add the adapter to a model of from_pretrained."
                )


def _made_of_weights(config: Any) -> str:
    """Name of what peft computes of the model's weights when it adds an adapter; empty if it reads none."""
    how = getattr(config, "init_lora_weights", True)
    if getattr(config, "use_dora", False):
        return "DoRA"
    return "" if how in _OF_THEIR_OWN else f"init_lora_weights={how!r}"


# Files.


def keep_adapters(held: Tensors, network: nn.Module) -> None:
    """Keep only adapters' tensors: their names contain the adapter's, or they are trained as well.

    Raises:
        ConfigError: there are none.
    """
    adapters = adapters_of(network)
    found = False
    for name, x in list(held.by_name.items()):
        named = any(adapters.keys() & set(alias.split(".")) for alias in held.aliases[name])
        found |= named
        if not (named or x.requires_grad):
            del held.by_name[name], held.aliases[name]
    if not found:
        kind = type(network).__name__.removeprefix("FSDP")
        raise ConfigError(
            f"{kind} has no tensors of its adapters ({', '.join(adapters)}): they are merged or removed. "
            "Export the model that merge_and_unload() returned."
        )


def save_adapters(network: Any, tensors: dict[str, torch.Tensor], folder: Path) -> None:
    """Save adapters with the network's own method, which knows the names in the files."""
    type(network).save_pretrained(network, str(folder), state_dict=tensors)


# Merging.


def guard_merge(model: nn.Module) -> None:
    """Make peft's merging raise with advice where it would be lost, as long as weights are sharded."""
    for module in model.modules():
        for method in ("merge_and_unload", "merge_adapter"):
            if adapters_of(module) and callable(getattr(type(module), method, None)):
                module.__dict__[method] = partial(_merge, module, method)


def _merge(module: Any, method: str, *given: Any, **options: Any) -> Any:
    """Replacement of a method of peft, which assigns ``weight.data`` of adapters other than plain LoRA.

    Raises:
        ConfigError: on shards (DTensors), where PyTorch ignores that.
    """
    own = getattr(type(module), method)
    safe_merge = inspect.signature(own).bind(module, *given, **options).arguments.get("safe_merge")
    sharded = any(isinstance(x, DTensor) for x in module.parameters())
    layers = [(x, c) for x, c in _adapted_layers(module) if hasattr(x, "base_layer")]
    plain = all(_is_plain_lora(x, name, c) for x, c in layers for name in c)
    if sharded and (safe_merge or not plain):
        what = "safe_merge=True" if safe_merge else "adapters other than plain LoRA"
        raise ConfigError(
            f"{method}() of sharded weights cannot merge {what}: PyTorch would ignore what peft assigns. "
            "Export the adapters with export_pretrained on all ranks, and merge them in one process: "
            "PeftModel.from_pretrained(base, folder).merge_and_unload()."
        )
    return own(module, *given, **options)

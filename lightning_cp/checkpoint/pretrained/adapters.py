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
_WEIGHT_FREE_INITS = (True, False, None, "gaussian", "eva", "orthogonal")
"""LoRA's initial values that peft computes without the model's weights."""
_MERGED_IN_PLACE = ("LORA", "ADALORA", "LOHA", "LN_TUNING")
"""Kinds of adapters that peft merges by operations which PyTorch applies to shards."""


def adapters_of(network: nn.Module) -> Mapping[str, Any]:
    """Configs of a network's adapters by name, as peft and transformers store them."""
    configs = getattr(network, "peft_config", None)
    return configs if isinstance(configs, Mapping) else {}


def _adapted_layers(model: nn.Module) -> dict[Any, Mapping[str, Any]]:
    """Modules that hold parts of adapters, with the configs of the innermost network around them."""
    found: dict[Any, Mapping[str, Any]] = {}
    for network in model.modules():  # inner ones come later
        if configs := adapters_of(network):
            layers = [x for x in network.modules() if getattr(x, "adapter_layer_names", None)]
            found.update(dict.fromkeys(layers, configs))
    return found


# First values. Parts of adapters are ordinary layers, which by themselves get values that change the model.
# peft sets them from outside when it adds the adapter; on the meta device nothing of that is left.


def adapter_initializers(model: nn.Module) -> dict[nn.Module, list[Callable[[nn.Module], object]]]:
    """Functions that set parts of adapters as peft does; none for a part that only peft can set."""
    found: dict[nn.Module, list[Callable[[nn.Module], object]]] = {}
    for layer, configs in _adapted_layers(model).items():
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
    config = configs.get(name)
    return getattr(config, "peft_type", None) == "LORA" and not _is_variant(layer, name, config)


def _is_variant(layer: Any, name: str, config: Any) -> bool:
    return getattr(config, "use_dora", False) or name in getattr(layer, "lora_variant", ())


def check_adapter_origin(model: nn.Module, in_files: Collection[int]) -> None:
    """Check that no adapter was computed from weights which the files replace now, but not the adapter.

    Args:
        model: before it is loaded.
        in_files: ids of the tensors that files hold.

    Raises:
        CheckpointError: an adapter was.
    """
    for layer, configs in _adapted_layers(model).items():
        for kind in layer.adapter_layer_names:
            parts = getattr(layer, kind, None)
            if not isinstance(parts, nn.ModuleDict | nn.ParameterDict):
                continue
            for name, part in parts.items():
                values = [*part.parameters()] if isinstance(part, nn.Module) else [part]
                how = _computed_from_weights(kind, configs.get(name))
                if how and any(id(x) not in in_files and not x.is_meta for x in values):
                    raise CheckpointError(
                        f"the adapter {name!r} ({how}) was computed from weights that the checkpoint would "
                        "replace. Nothing was loaded. Leave pretrained= out, and add the adapter to a model "
                        "of from_pretrained; or name what modules_to_save copies in keys=."
                    )


def _computed_from_weights(kind: str, config: Any) -> str:
    """Name of what peft computes from the model's weights when it adds an adapter; empty if it reads none."""
    if kind in ("modules_to_save", "trainable_tokens_delta"):
        return kind
    if getattr(config, "use_dora", False):
        return "DoRA"
    how = getattr(config, "init_lora_weights", None)
    known = how.lower() if isinstance(how, str) else how
    return "" if known in _WEIGHT_FREE_INITS else f"init_lora_weights={how!r}"


# Files.


def adapters_to_export(network: nn.Module) -> Mapping[str, Any]:
    """Configs of the adapters that an export writes; none of a merged model, whose config may stay.

    Raises:
        ConfigError: peft's wrapper of a merged model, which has neither.
    """
    adapters = adapters_of(network)
    is_lora = bool(adapters) and all(
        getattr(x, "peft_type", None) == "LORA" for x in adapters.values()
    )
    if not is_lora or _adapted_layers(network):
        return adapters
    if hasattr(type(network), "get_base_model"):
        kind = type(network).__name__.removeprefix("FSDP")
        raise ConfigError(
            f"{kind} has no tensors of its adapters ({', '.join(adapters)}): they are merged or removed. "
            "Export the model that merge_and_unload() returned."
        )
    return {}


def keep_adapters(held: Tensors, adapters: Collection[str]) -> None:
    """Keep only adapters' tensors: their names contain the adapter's, or they are trained as well."""
    for name, x in list(held.by_name.items()):
        named = any(set(adapters) & set(alias.split(".")) for alias in held.aliases[name])
        if not (named or x.requires_grad):
            del held.by_name[name], held.aliases[name]


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
    """Replacement of a method of peft, which for some adapters assigns ``weight.data``.

    Raises:
        ConfigError: on shards (DTensors), where PyTorch ignores that.
    """
    own = getattr(type(module), method)
    arguments = inspect.signature(own).bind(module, *given, **options).arguments
    if any(isinstance(x, DTensor) for x in module.parameters()):
        if arguments.get("safe_merge"):
            raise ConfigError(
                f"{method}(safe_merge=True) of sharded weights would change nothing: PyTorch ignores what "
                "peft assigns. Leave safe_merge out."
            )
        names = arguments.get("adapter_names") or getattr(module, "active_adapters", ())
        refused = [name for name in names if not _is_merged_in_place(module, name)]
        if refused:
            raise ConfigError(
                f"{method}() of sharded weights cannot merge the adapter {refused[0]!r}, which is no plain "
                "LoRA: PyTorch may ignore what peft assigns. Export the adapters with export_pretrained on "
                "all ranks, and merge them in one process: PeftModel.from_pretrained(base, "
                "folder).merge_and_unload()."
            )
    return own(module, *given, **options)


def _is_merged_in_place(module: nn.Module, name: str) -> bool:
    config = adapters_of(module).get(name)
    variants = (_is_variant(layer, name, config) for layer in _adapted_layers(module))
    return getattr(config, "peft_type", None) in _MERGED_IN_PLACE and not any(variants)

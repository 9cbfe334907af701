"""``keys=``: other names, and fused parameters in separate tensors or the other way round."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from lightning_cp.errors import CheckpointError, ConfigError
from tests.helpers.checkpoint.pretrained.models import PARTS, WHOLE, Apart, Fused, load


def test_a_fused_parameter_is_put_together(tmp_path: Path) -> None:
    torch.manual_seed(1)
    apart = Apart(device="cpu")
    save_file(dict(apart.state_dict()), tmp_path / "model.safetensors")
    fused = Fused()
    load(fused, tmp_path, keys={WHOLE: PARTS})
    for made, layer in zip(fused.layers, apart.layers, strict=True):
        parts: Any = layer
        wanted = torch.cat([parts[name].weight for name in "qkv"])
        assert torch.equal(made["qkv"].weight, wanted)  # type: ignore[index]


def test_a_fused_tensor_is_taken_apart(tmp_path: Path) -> None:
    torch.manual_seed(1)
    fused = Fused(device="cpu")
    save_file(dict(fused.state_dict()), tmp_path / "model.safetensors")
    apart = Apart()
    load(apart, tmp_path, keys={PARTS: WHOLE})
    for made, layer in zip(apart.layers, fused.layers, strict=True):
        parts: Any = made
        whole: Any = layer
        assert torch.equal(torch.cat([parts[name].weight for name in "qkv"]), whole["qkv"].weight)


def test_what_does_not_make_the_fused_parameter_is_refused(tmp_path: Path) -> None:
    save_file(dict(Apart((6, 4, 5), "cpu").state_dict()), tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"side by side do not make \[14, 5\]"):
        load(Fused(), tmp_path, keys={WHOLE: PARTS})


def test_other_names_are_declared(tmp_path: Path) -> None:
    torch.manual_seed(1)
    made = nn.Linear(3, 2)
    save_file({"old.w": made.weight, "old.b": made.bias}, tmp_path / "model.safetensors")
    model = nn.Linear(3, 2)
    with pytest.raises(CheckpointError, match=r"lacks 2 parameters of the model \(weight, bias\)"):
        load(model, tmp_path)
    load(model, tmp_path, keys={"weight": "old.w", "bias": "old.b"})
    assert torch.equal(model.weight, made.weight)
    assert torch.equal(model.bias, made.bias)


def test_a_network_inside_a_module_is_found_by_other_names_too(tmp_path: Path) -> None:
    weight = torch.arange(12.0).view(6, 2)
    save_file({"qkv.weight": weight}, tmp_path / "model.safetensors")
    names = " + ".join(f"{name}.weight" for name in "qkv")
    layers = {name: nn.Linear(2, 2, bias=False) for name in "qkv"}
    load(nn.ModuleDict({"net": nn.ModuleDict(layers)}), tmp_path, keys={names: "qkv.weight"})
    assert torch.equal(torch.cat([layers[name].weight for name in "qkv"]), weight)


def test_a_line_with_a_parameter_that_the_model_lacks_is_refused(tmp_path: Path) -> None:
    save_file({"qkv.weight": torch.zeros(6, 2)}, tmp_path / "model.safetensors")
    model = nn.ModuleDict({"q": nn.Linear(2, 2, bias=False), "k": nn.Linear(2, 2, bias=False)})
    keys = {"q.weight + k.weight + v.weight": "qkv.weight"}
    with pytest.raises(ConfigError, match=r"keys has a line for v.weight, and no parameter"):
        load(model, tmp_path, keys=keys)


def test_a_dimension_in_keys_is_the_only_one(tmp_path: Path) -> None:
    save_file(dict(Apart(device="cpu").state_dict()), tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"do not make \[14, 5\] along dimension 1"):
        load(Fused(), tmp_path, keys={WHOLE: PARTS.replace(" + ", " +1 ")})
    with pytest.raises(ConfigError, match="joins along one dimension"):
        load(Fused(), tmp_path, keys={WHOLE: "layers.*.q.weight +0 layers.*.k.weight +1 x.*"})


def test_a_parameters_own_name_is_unexpected_where_keys_say_another(tmp_path: Path) -> None:
    old, new = torch.ones(2, 2), torch.zeros(2, 2)
    save_file({"weight": new, "old": old}, tmp_path / "model.safetensors")
    model = nn.Linear(2, 2, bias=False)
    with pytest.raises(CheckpointError, match=r"it has 1 tensors that the model lacks \(weight\)"):
        load(model, tmp_path, keys={"weight": "old"})
    loaded = load(model, tmp_path, keys={"weight": "old"}, allow_unexpected=["weight"])
    assert loaded.unexpected == ("weight",)
    assert torch.equal(model.weight, old)


def test_every_tensor_of_the_files_is_used_compared_or_unexpected(tmp_path: Path) -> None:
    held = ("a.weight", "b.weight", "c", "d")
    save_file({name: torch.ones(2, 2) for name in held}, tmp_path / "model.safetensors")
    model = nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in "ab"})
    tied: Any = model["b"]
    tied.weight = model["a"].weight
    loaded = load(model, tmp_path, strict=False, keys={"a.weight": "c"})
    assert set(loaded.unexpected) == {"a.weight", "b.weight", "d"}  # the second as a twin
    loaded = load(model, tmp_path, keys={"a.weight": "c"}, allow_unexpected=["a.*", "d"])
    assert set(loaded.unexpected) == {"a.weight", "d"}

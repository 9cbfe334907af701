"""Adapters of peft begin with peft's own values or are refused; their export loses no tensor."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import ResNetConfig, ResNetModel

from lightning_cp.checkpoint import export_pretrained
from lightning_cp.errors import ConfigError
from tests.helpers.checkpoint.pretrained.adapters import IN, OUT, RANK, Network
from tests.helpers.checkpoint.pretrained.models import load, make, refuse


def on(device: str, path: Path, *arguments: Any, **given: Any) -> Any:
    """A model, and a checkpoint of all but its adapters."""
    save_file({"layer.base_layer.weight": torch.ones(OUT, IN)}, path / "model.safetensors")
    with torch.device(device):
        return Network(*arguments, **given)


@pytest.mark.parametrize("how", [True, "gaussian"])
def test_an_adapter_begins_as_peft_begins_it(how: object, tmp_path: Path) -> None:
    model = on("meta", tmp_path, how)
    load(model, tmp_path, allow_missing=["*lora_*"])
    layer = model.layer
    down, up = layer.lora_A["default"].weight, layer.lora_B["default"]
    deviation = 1 / RANK if how == "gaussian" else 1 / (3 * IN) ** 0.5
    torch.testing.assert_close(down.std().item(), deviation, rtol=0.1, atol=0)
    assert (down.abs().max() < 1 / IN**0.5) == (how is True)
    assert not up.weight.any()
    assert not up.bias.any()
    assert not layer.lora_embedding_A["default"].any()
    torch.testing.assert_close(
        layer.lora_embedding_B["default"].std().item(), 1.0, rtol=0.1, atol=0
    )
    assert torch.equal(layer.base_layer.weight, torch.ones(OUT, IN))


@pytest.mark.parametrize("arguments", [("pissa",), (False,), (None,), (True, "LOHA")])
def test_values_that_only_peft_can_compute_are_refused(
    arguments: tuple[Any, ...], tmp_path: Path
) -> None:
    model = on("meta", tmp_path, *arguments)
    refuse(model, tmp_path, "lora_A.*build it on a real device", allow_missing=["*lora_*"])


@pytest.mark.parametrize("variant", ["of its weights", "of its own parts"])
def test_variants_of_lora_are_refused(variant: str, tmp_path: Path) -> None:
    model = on("meta", tmp_path)
    if variant == "of its weights":
        model.layer.lora_variant["default"] = object()
    else:
        with torch.device("meta"):
            model.layer.magnitude["default"] = nn.Linear(1, OUT)
    allowed = ["*lora_*", "*magnitude*"]
    refuse(model, tmp_path, "build it on a real device", allow_missing=allowed)


def test_adapters_on_a_real_device_keep_their_values(tmp_path: Path) -> None:
    model = on("meta", tmp_path)
    with torch.device("cpu"):
        model.layer.lora_B["default"] = nn.Linear(RANK, OUT)
    before = model.layer.lora_B["default"].weight.clone()
    load(model, tmp_path, allow_missing=["*lora_*"])
    assert torch.equal(model.layer.lora_B["default"].weight, before)


@pytest.mark.parametrize("given", [{"how": "pissa"}, {"how": "olora"}, {"dora": True}], ids=str)
def test_adapters_computed_from_weights_that_are_replaced_are_refused(
    given: dict[str, Any], tmp_path: Path
) -> None:
    model = on("cpu", tmp_path, **given)
    refuse(model, tmp_path, "was computed from weights", allow_missing=["*lora_*"])
    for how in (True, False, None, "Gaussian", "orthogonal"):
        load(on("cpu", tmp_path, how), tmp_path, allow_missing=["*lora_*"])


class Copied(nn.Module):
    """A trained copy of a layer, as peft makes for ``modules_to_save``."""

    adapter_layer_names = ("modules_to_save",)

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.original_module = layer
        self.modules_to_save = nn.ModuleDict({"default": copy.deepcopy(layer)})


def test_copies_of_weights_that_are_replaced_are_refused(tmp_path: Path) -> None:
    save_file({"head.weight": torch.ones(3, 3)}, tmp_path / "model.safetensors")
    model: Any = nn.Module()
    head: Any = Copied(nn.Linear(3, 3, bias=False))
    model.head = head
    model.peft_config = Network().peft_config
    keys = {"head.original_module.weight": "head.weight"}
    refuse(model, tmp_path, "modules_to_save.*keys=", keys=keys, allow_missing=["*to_save*"])
    keys["head.modules_to_save.default.weight"] = "head.weight"
    load(model, tmp_path, keys=keys)
    assert head.modules_to_save["default"].weight.eq(1).all()


def test_adapters_within_a_model_with_others_keep_their_own_config(tmp_path: Path) -> None:
    save_file({"layer.base_layer.weight": torch.ones(OUT, IN)}, tmp_path / "model.safetensors")
    with torch.device("meta"):
        outer: Any = nn.Module()
        inner: Any = Network()
        outer.base_model = inner
    outer.peft_config = {"prompt": SimpleNamespace(peft_type="PROMPT_TUNING")}
    load(outer, tmp_path, allow_missing=["*lora_*"])
    assert not inner.layer.lora_B["default"].weight.any()


def written(path: Path) -> dict[str, torch.Tensor]:
    return load_file(path / "adapter_model.safetensors")


def test_only_adapters_are_written_under_each_of_their_names(tmp_path: Path) -> None:
    model: Any = Network()
    model.again = nn.ModuleDict({"default": model.layer.lora_B["default"]})  # tied
    export_pretrained(model, tmp_path / "made")
    found = written(tmp_path / "made")
    assert "layer.base_layer.weight" not in found
    own = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    assert found.keys() == {name for name in own if "default" in name}
    assert torch.equal(found["again.default.weight"], found["layer.lora_B.default.weight"])


def test_an_export_of_merged_adapters_is_refused(tmp_path: Path) -> None:
    model = Network()
    model.layer = model.layer.base_layer  # type: ignore[assignment]
    with pytest.raises(ConfigError, match=r"no tensors of its adapters \(default\)"):
        export_pretrained(model, tmp_path / "made")
    assert not (tmp_path / "made").exists()


def test_adapters_do_not_replace_a_model(tmp_path: Path) -> None:
    model: Any = Network()
    (tmp_path / "model.safetensors").write_bytes(b"base")
    with pytest.raises(ConfigError, match=r"holds model.safetensors, which this export does not"):
        export_pretrained(model, tmp_path, overwrite=True)
    assert (tmp_path / "model.safetensors").read_bytes() == b"base"
    model.folder = "mine"
    with pytest.raises(ConfigError, match=r"holds model.safetensors, which this export does not"):
        export_pretrained(model, tmp_path, overwrite=True)
    model.folder = "."
    export_pretrained(model, tmp_path / "own")
    nn.init.ones_(model.layer.lora_A["default"].weight)
    export_pretrained(model, tmp_path / "own", overwrite=True)
    assert written(tmp_path / "own")["layer.lora_A.default.weight"].eq(1).all()


def test_a_config_that_outlives_its_adapters_does_not_hide_the_model(tmp_path: Path) -> None:
    """As older releases of peft leave it on the merged model."""
    model = make()
    model.peft_config = Network().peft_config
    export_pretrained(model, tmp_path / "made")
    assert load_file(tmp_path / "made/model.safetensors").keys() >= {"model.norm.weight"}


def test_trained_tensors_without_the_name_of_an_adapter_are_written(tmp_path: Path) -> None:
    model: Any = Network(kind="ADAPTION_PROMPT")
    model.layer = nn.Linear(2, 2)  # trained, as peft's adaption_prompt
    export_pretrained(model, tmp_path / "made")
    assert written(tmp_path / "made").keys() == {"layer.weight", "layer.bias"}


def test_a_model_without_words_is_exported(tmp_path: Path) -> None:
    config = ResNetConfig(embedding_size=8, hidden_sizes=[8], depths=[1])
    config.tie_word_embeddings = True
    export_pretrained(ResNetModel(config), tmp_path / "made")
    assert (tmp_path / "made/config.json").is_file()


@pytest.mark.parametrize("tied", [True, False])
def test_an_untied_head_is_written_as_untied(tied: bool, tmp_path: Path) -> None:
    """As of ``modules_to_save``: the config still says that embeddings and head are one."""
    model = make(tie_word_embeddings=True)
    if not tied:
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach() + 1)
    export_pretrained(model, tmp_path / "made")
    assert json.loads((tmp_path / "made/config.json").read_text())["tie_word_embeddings"] == tied
    assert model.config.tie_word_embeddings
    again = make(tie_word_embeddings=tied)
    load(again, tmp_path / "made")
    assert torch.equal(again.lm_head.weight, model.lm_head.weight)

"""Names, dtypes, ties and buffers: what a model and a checkpoint need not have alike, and what they must."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from safetensors.torch import save_file
from torch import nn

from lightning_cp.checkpoint import load_pretrained
from lightning_cp.errors import CheckpointError, ConfigError
from tests.helpers.checkpoint.pretrained.models import Wrapped, load, make, refuse, save


def test_a_network_inside_a_module_is_found(tmp_path: Path) -> None:
    wanted = save(tmp_path, seed=6)
    model = Wrapped(make())
    before = model.metric.weight.clone()
    refuse(
        model, tmp_path, r"lacks 2 parameters of the model \(metric.weight, metric.bias\).*prefix="
    )
    loaded = load(model, tmp_path, allow_missing=["metric.*"])
    assert loaded.missing == ("metric.weight", "metric.bias")
    assert all(torch.equal(x, wanted[name]) for name, x in model.net.state_dict().items())
    assert torch.equal(model.metric.weight, before)


def test_a_model_is_not_taken_for_its_bare_encoder(tmp_path: Path) -> None:
    make(seed=6).model.save_pretrained(tmp_path)
    model = make()
    refuse(model, tmp_path, r"lacks 1 parameters of the model \(lm_head.weight\)")
    head = model.lm_head.weight.clone()
    assert load(model, tmp_path, strict=False).missing == ("lm_head.weight",)
    assert torch.equal(model.lm_head.weight, head)
    load(model, tmp_path, prefix="model.")
    tied = make(tie_word_embeddings=True)  # nothing is left without a value
    assert load(tied, tmp_path).missing == ()


def test_a_model_as_fabric_and_compile_return_it(tmp_path: Path) -> None:
    wanted = save(tmp_path, seed=6)
    model = make()
    wrapped = Fabric(accelerator="cpu", devices=1).setup(model)
    compiled: Any = torch.compile(model, backend="eager")
    for given in (wrapped, compiled):
        for x in model.parameters():
            x.data.fill_(0)
        load(given, tmp_path)
        assert all(torch.equal(x, wanted[name]) for name, x in model.state_dict().items())


def test_a_bare_encoder_takes_its_part_of_a_larger_model(tmp_path: Path) -> None:
    wanted = save(tmp_path, seed=6)
    model = make().model
    with pytest.raises(CheckpointError, match=r"1 tensors that the model lacks \(lm_head.weight\)"):
        load(model, tmp_path)
    loaded = load(model, tmp_path, allow_unexpected=["lm_head.*"])
    assert loaded.unexpected == ("lm_head.weight",)
    assert all(torch.equal(x, wanted[f"model.{name}"]) for name, x in model.state_dict().items())


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("dtype", [None, "bfloat16", torch.float64])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_dtypes_change_on_the_way(stored: Any, dtype: Any, device: str, tmp_path: Path) -> None:
    wanted = save(tmp_path, stored, seed=6)
    model = make(device=device)
    load(model, tmp_path, dtype=dtype)
    kind = {None: torch.float32, "bfloat16": torch.bfloat16}.get(dtype, dtype)
    for name, x in model.state_dict().items():
        assert x.dtype == kind
        assert torch.equal(x, wanted[name].to(kind)), name
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32


def test_shapes_that_differ_are_named(tmp_path: Path) -> None:
    save(tmp_path)
    says = r"mlp.gate_proj.weight has shape \[37, 24\], but '.*' in model-.* has \[36, 24\]"
    refuse(make(intermediate_size=37), tmp_path, says)


def test_integers_are_not_converted(tmp_path: Path) -> None:
    save_file(
        {"weight": torch.ones(2, 3, dtype=torch.int32), "bias": torch.zeros(2)},
        tmp_path / "model.safetensors",
    )
    refuse(nn.Linear(3, 2), tmp_path, r"weight has dtype torch.float32, but .* has torch.int32")


def test_eight_bits_are_looked_at_too(tmp_path: Path) -> None:
    values = torch.tensor([1.0, float("nan")])
    save_file({"weight": values.to(torch.float8_e4m3fn)}, tmp_path / "model.safetensors")
    model: Any = nn.Module()
    model.weight = nn.Parameter(torch.ones(2).to(torch.float8_e4m3fn), requires_grad=False)
    with pytest.raises(CheckpointError, match=r"weight in .* has 1 values that are NaN"):
        load(model, tmp_path, check_finite=True)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"stric": True}, "unknown option.*stric"),
        ({"dtype": "float33"}, "floating-point dtype"),
        ({"dtype": torch.int8}, "floating-point dtype"),
        ({"check_finite": "no"}, "check_finite must be True or False"),
        ({"keys": {"a": 3}}, "text to text"),
        ({"keys": "a"}, "keys is a mapping .* got 'a'"),
        (
            {"keys": {"a.*.b": "c.*"}},
            r"keys has a line for a.\*.b, and no parameter .* model.embed",
        ),
        ({"allow_missing": 3}, "allow_missing must be a list of patterns"),
        ({"initialize": 1}, "initialize must be a function"),
        ({"prefix": "nowhere."}, "no parameter of the model begins with"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], says: str, tmp_path: Path) -> None:
    save(tmp_path)
    with pytest.raises(ConfigError, match=says):
        load_pretrained(make(), tmp_path, **options)


def test_an_empty_line_of_a_file_of_settings_is_the_default(tmp_path: Path) -> None:
    save(tmp_path, seed=6)
    load(make(), tmp_path, allow_missing=None, allow_unexpected=None, keys=None)
    with pytest.raises(ConfigError, match="a checkpoint is given by its path, got None"):
        load_pretrained(make(), None)  # type: ignore[arg-type]


def test_transformers_reads_the_same_values(tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    save(tmp_path, seed=6)
    theirs, ours = LlamaForCausalLM.from_pretrained(tmp_path), make(device="meta")
    load(ours, tmp_path)
    ids = torch.arange(7)[None]
    assert torch.equal(ours(ids).logits, theirs(ids).logits)

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
from lightning_cp.checkpoint.pretrained.incomplete import require_complete
from lightning_cp.checkpoint.pretrained.index import open_checkpoint
from lightning_cp.errors import CheckpointError, ConfigError
from tests.checkpoint.pretrained.models import Wrapped, make, save, without


def load(model: nn.Module, path: Path, **options: Any) -> Any:
    return load_pretrained(model, path, progress=False, **options)


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


def test_what_is_beside_the_network_on_the_meta_device_gets_values_too(tmp_path: Path) -> None:
    save(tmp_path)
    with torch.device("meta"):
        model = Wrapped(make(device="meta"))
    load(model, tmp_path, allow_missing=["metric.*"])
    torch.manual_seed(0)
    for name, x in model.metric.named_parameters():  # within what nn.Linear draws, and not garbage
        assert 0 < x.abs().max() < 1, name
    with torch.device("meta"):
        model.metric = Unsaved()  # type: ignore[assignment]
    refuse(
        model, tmp_path, r"metric \(Unsaved\) has .* does not hold \(weight, rates\)", strict=False
    )


def test_a_bare_encoder_takes_its_part_of_a_larger_model(tmp_path: Path) -> None:
    wanted = save(tmp_path, seed=6)
    model = make().model
    with pytest.raises(CheckpointError, match=r"1 tensors that the model lacks \(lm_head.weight\)"):
        load(model, tmp_path)
    loaded = load(model, tmp_path, allow_unexpected=["lm_head.*"])
    assert loaded.unexpected == ("lm_head.weight",)
    assert all(torch.equal(x, wanted[f"model.{name}"]) for name, x in model.state_dict().items())


def test_tied_weights_are_read_once_and_stay_tied(tmp_path: Path) -> None:
    wanted = save(tmp_path, seed=6, tie_word_embeddings=True)
    assert "lm_head.weight" not in open_checkpoint(tmp_path).entries
    model = make(device="meta", tie_word_embeddings=True)
    loaded = load(model, tmp_path)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert all(torch.equal(x, wanted[name]) for name, x in model.state_dict().items())
    assert loaded.nbytes == open_checkpoint(tmp_path).nbytes


def test_a_tie_is_found_under_its_other_name(tmp_path: Path) -> None:
    weights = {name: x.clone() for name, x in make(seed=6).state_dict().items()}
    del weights["model.embed_tokens.weight"]
    save_file(weights, tmp_path / "model.safetensors")
    model = make(device="meta", tie_word_embeddings=True)
    load(model, tmp_path)
    assert torch.equal(model.model.embed_tokens.weight, weights["lm_head.weight"])


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


def refuse(model: nn.Module, path: Path, says: str, **options: Any) -> None:
    """A refused load leaves the model as it was."""
    before = {name: x.clone() for name, x in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=says):
        load(model, path, **options)
    for name, x in model.state_dict().items():
        assert x.is_meta or torch.equal(x, before[name])
    require_complete(model)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    without(tmp_path, "lm_head.weight", "model.norm.weight")
    refuse(
        make(), tmp_path, r"lacks 2 parameters of the model \(model.norm.weight, lm_head.weight\)"
    )
    refuse(make(), tmp_path, r"1 parameters of the model \(model.n", allow_missing=["lm_head.*"])
    model = make()
    kept = model.lm_head.weight.clone()
    loaded = load(model, tmp_path, allow_missing=["lm_head.*", "model.norm.*"])
    assert set(loaded.missing) == {"lm_head.weight", "model.norm.weight"}
    assert torch.equal(model.lm_head.weight, kept)


def test_what_is_missing_on_the_meta_device_is_initialised(tmp_path: Path) -> None:
    without(tmp_path, "lm_head.weight", "model.norm.weight")
    model = make(device="meta")
    load(model, tmp_path, strict=False)
    assert model.model.norm.weight.eq(1).all()  # as transformers' _init_weights says
    assert 0.01 < model.lm_head.weight.std() < 0.04


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


class Unsaved(nn.Module):
    """A buffer that no checkpoint holds."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("rates", torch.arange(3.0), persistent=False)


class Sets(Unsaved):
    """Knows how it is made."""

    def reset_buffers(self) -> None:
        self.rates = torch.arange(3.0, device=self.rates.device)


class Kinds(nn.Module):
    """Buffers of types that have no NaN, with the values that memory has by chance."""

    def __init__(self, forgets: str = "") -> None:
        super().__init__()
        self.forgets = forgets
        self.weight = nn.Parameter(torch.ones(2))
        for name, value in self.values().items():
            self.register_buffer(name, value, persistent=False)

    def values(self) -> dict[str, torch.Tensor]:
        shuffled = torch.randperm(4, device=self.weight.device)
        return {
            "mask": torch.tensor([True, False, True]),
            "bytes": torch.tensor([0, 1, 0], dtype=torch.uint8),
            "order": shuffled,
            "eight": torch.ones(2).to(torch.float8_e4m3fn),
        }

    def reset_buffers(self) -> None:
        with torch.device(self.weight.device):
            for name, value in self.values().items():
                if name != self.forgets:
                    setattr(self, name, value)


class Forgets(Unsaved):
    """Says so, and does not."""

    def reset_buffers(self) -> None:
        return


def test_buffers_that_are_not_saved_are_made_again(tmp_path: Path) -> None:
    save_file({"weight": torch.full((2,), 5.0)}, tmp_path / "model.safetensors")
    with torch.device("meta"):
        models = [Unsaved(), Sets(), Forgets()]
    refuse(models[0], tmp_path, r"\(Unsaved\) has buffers .* reset_buffers\(\)")
    load(models[1], tmp_path)
    assert models[1].rates.tolist() == [0, 1, 2]
    with pytest.raises(CheckpointError, match="Forgets left its rates without a value"):
        load(models[2], tmp_path)
    load(models[0], tmp_path, initialize=lambda module: module.rates.copy_(torch.arange(3.0)))
    assert models[0].rates.tolist() == [0, 1, 2]


@pytest.mark.parametrize("forgets", ["", "mask", "bytes", "order", "eight"])
def test_buffers_of_any_type_are_made_again(forgets: str, tmp_path: Path) -> None:
    save_file({"weight": torch.full((2,), 5.0)}, tmp_path / "model.safetensors")
    with torch.device("meta"):
        model: Any = Kinds(forgets)
    if forgets:
        with pytest.raises(CheckpointError, match=f"Kinds left its {forgets} without a value"):
            load(model, tmp_path)
        return
    torch.manual_seed(3)
    load(model, tmp_path)
    assert model.mask.tolist() == [True, False, True]
    assert model.bytes.tolist() == [0, 1, 0]
    assert model.eight.float().tolist() == [1, 1]
    after = torch.rand(1)
    torch.manual_seed(3)
    assert torch.equal(model.order, torch.randperm(4))  # drawn as if once
    assert torch.equal(torch.rand(1), after)


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
        ({"initialize": 1}, "initialize must be a function"),
        ({"prefix": "nowhere."}, "no parameter of the model begins with"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], says: str, tmp_path: Path) -> None:
    save(tmp_path)
    with pytest.raises(ConfigError, match=says):
        load_pretrained(make(), tmp_path, **options)


def test_transformers_reads_the_same_values(tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    save(tmp_path, seed=6)
    theirs, ours = LlamaForCausalLM.from_pretrained(tmp_path), make(device="meta")
    load(ours, tmp_path)
    ids = torch.arange(7)[None]
    assert torch.equal(ours(ids).logits, theirs(ids).logits)

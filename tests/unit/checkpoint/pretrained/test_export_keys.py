"""Fused tensors that an export makes of several parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_cp.checkpoint import export_pretrained, load_pretrained
from lightning_cp.errors import ConfigError
from tests.helpers.checkpoint.pretrained.models import PARTS, WHOLE, Apart, Fused
from tests.ranks.checkpoint.pretrained.test_export import stored


def test_parts_are_written_as_one(tmp_path: Path) -> None:
    apart = Apart(device="cpu")
    export_pretrained(apart, tmp_path / "made", keys={PARTS: WHOLE})
    layer: Any = apart.layers[1]
    wanted = torch.cat([layer[name].weight for name in "qkv"])
    assert torch.equal(stored(tmp_path / "made")["layers.1.qkv.weight"], wanted)
    with pytest.raises(ConfigError, match="nothing says where one ends"):
        export_pretrained(Fused(device="cpu"), tmp_path / "other", keys={WHOLE: PARTS})


def parts(*shapes: tuple[int, int]) -> nn.Module:
    """Parameters of these shapes, as q, k and v."""
    model = nn.Module()
    for name, shape in zip("qkv", shapes, strict=True):
        model.register_module(name, nn.Module())
        model.get_submodule(name).weight = nn.Parameter(torch.rand(shape))
    return model


@pytest.mark.parametrize(("joined", "dim"), [(" + ", 1), (" +1 ", 1), (" +0 ", 0)])
def test_parts_are_joined_along_the_dimension_that_they_were_taken_from(
    joined: str, dim: int, tmp_path: Path
) -> None:
    sizes = (4, 2, 3) if joined == " + " else (4, 4, 4)  # equal ones say nothing of the dimension
    model = parts(*((4, size) for size in sizes))
    wanted = torch.cat([x.detach() for x in model.parameters()], dim)
    keys = {joined.join(f"{name}.weight" for name in "qkv"): "c_attn.weight"}
    export_pretrained(model, tmp_path / "made", keys=keys, file_bytes=1)
    assert torch.equal(stored(tmp_path / "made")["c_attn.weight"], wanted)
    again = parts(*((4, size) for size in sizes))
    load_pretrained(again, tmp_path / "made", keys=keys, prefix="", progress=False)
    assert all(map(torch.equal, again.parameters(), model.parameters()))


def test_parts_whose_shapes_do_not_say_how_they_are_joined_are_refused(tmp_path: Path) -> None:
    model, names = parts((4, 4), (4, 4), (4, 4)), [f"{name}.weight" for name in "qkv"]
    with pytest.raises(ConfigError, match=r"c.weight: parts of .* dimension 0 and 1.* \+0 "):
        export_pretrained(model, tmp_path / "made", keys={" + ".join(names): "c.weight"})
    with pytest.raises(ConfigError, match=r"side by side along one dimension"):
        export_pretrained(model, tmp_path / "made", keys={" +2 ".join(names): "c.weight"})


class Tied(nn.Module):
    """A weight under two names, and one beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 5, bias=False)
        self.mid = nn.Linear(3, 2, bias=False)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight


@pytest.mark.parametrize(
    ("keys", "names"),
    [
        ({"head.weight": "output.weight"}, {"output.weight", "mid.weight"}),
        ({"embed.weight": "wte.weight"}, {"wte.weight", "mid.weight"}),
        ({"embed.weight": "wte", "head.weight": "output"}, {"wte", "mid.weight"}),
        ({"head.weight + mid.weight": "both"}, {"both"}),
        ({"*.weight": "*.w"}, {"embed.w", "mid.w"}),
    ],
)
def test_tied_weights_are_written_under_the_keys_that_load_takes(
    keys: dict[str, str], names: set[str], tmp_path: Path
) -> None:
    model = Tied()
    export_pretrained(model, tmp_path / "made", keys=keys)
    assert stored(tmp_path / "made").keys() == names
    again = Tied()
    assert load_pretrained(again, tmp_path / "made", keys=keys, progress=False).missing == ()
    assert again.head.weight is again.embed.weight
    assert all(map(torch.equal, again.parameters(), model.parameters()))


class Adapter(nn.Module):
    """A linear layer with a trained product beside it, by hand."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, 2, bias=False)


TINY = {
    "vocab_size": 16,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


def test_names_that_from_pretrained_would_not_read_are_named(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(**TINY)
    network = transformers.LlamaForCausalLM(config)
    export_pretrained(network, tmp_path / "plain")  # no warning
    attention = network.model.layers[0].self_attn
    attention.q_proj = Adapter(attention.q_proj)
    name = "model.layers.0.self_attn.q_proj"
    with pytest.warns(
        UserWarning,
        match=rf"LlamaForCausalLM.from_pretrained would not read 2 tensors .*{name}.base.weight.*"
        rf"new values for {name}.weight: .* Merge adapters",
    ):
        export_pretrained(network, tmp_path / "adapted")
    merged = {f"{name}.base.weight": f"{name}.weight", f"{name}.down.weight": "beside"}
    export_pretrained(network, tmp_path / "named", keys=merged)
    assert stored(tmp_path / "named").keys() == {*stored(tmp_path / "plain"), "beside"}


def test_a_class_that_takes_more_than_its_config_is_exported(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(**TINY)

    class Own(transformers.LlamaForCausalLM):
        def __init__(self, config: Any, size: int) -> None:
            super().__init__(config)
            self.head = nn.Linear(8, size)

    network, before = Own(config, 2), torch.get_rng_state()
    export_pretrained(network, tmp_path / "own")
    assert "head.weight" in stored(tmp_path / "own")
    assert torch.equal(torch.get_rng_state(), before)

"""Adapters of peft, trained and exported under every engine: the files and values of one process.

``make test-trl`` installs peft beside the environment; without it these tests are skipped.
"""

from __future__ import annotations

import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from safetensors.torch import load_file

from lightning_cp.checkpoint import export_pretrained
from lightning_cp.errors import ConfigError
from lightning_cp.fabric import UlyssesRingStrategy
from tests.helpers.checkpoint.pretrained.models import make
from tests.helpers.pool import run_ranks
from tests.helpers.pool.environment import PoolEnvironment
from tests.helpers.strategies.small import alone

IDS = torch.randint(0, 32, (3, 2, 24), generator=torch.Generator().manual_seed(3))


def adapted() -> Any:
    peft: Any = import_module("peft")
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated")  # peft's call
    torch.manual_seed(5)
    targets = ["q_proj", "v_proj"]
    config = peft.LoraConfig(r=2, target_modules=targets, task_type="CAUSAL_LM")
    return peft.get_peft_model(make(torch.float64, seed=6), config)


BASE = {
    f"model.layers.*.self_attn.{name}.base_layer.weight": f"model.layers.*.self_attn.{name}.weight"
    for name in ("q_proj", "v_proj")
}
"""Names of wrapped layers in a checkpoint of the base model; peft's own prefix is found."""


def trained(
    rank: int, world: int, engine: str | None, folder: Path, *, base: Path | None = None
) -> None:
    """Three steps, then the adapters' files; with ``base`` the strategy loads the frozen weights."""
    strategy: Any = "auto"
    if engine is None:
        alone()
    else:
        loads = {"path": str(base), "keys": BASE, "allow_missing": ["*lora_*"], "progress": False}
        strategy = UlyssesRingStrategy(
            mode="ring", data_parallel=engine, pretrained=None if base is None else loads
        )
    plugins: Any = [] if engine is None else [PoolEnvironment()]
    fabric = Fabric(accelerator="cpu", devices=world, strategy=strategy, plugins=plugins)
    fabric.launch()
    network = adapted()
    if base is not None:
        for name, parameter in network.named_parameters():
            parameter.data.mul_("lora_" in name)  # the checkpoint has the other values
    learns = [p for p in network.parameters() if p.requires_grad]
    model: Any
    model, optimizer = fabric.setup(network, torch.optim.SGD(learns, lr=0.5))
    for ids in IDS:
        batch = {"input_ids": ids, "labels": ids}
        part = batch if engine is None else strategy.shard_batch(batch)
        fabric.backward(model(**part).loss)
        optimizer.step()
        optimizer.zero_grad()
    if engine is not None:
        strategy.end_step()
    if engine in ("fsdp", "zero1"):
        with pytest.raises(ConfigError, match="of a model with adapters it writes the adapters"):
            network.save_pretrained(folder / "peft")
    export_pretrained(network, folder / "exported")


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
@pytest.mark.parametrize("engine", ["ddp", "fsdp", "zero1"])
def test_exported_adapters_are_those_of_one_process(engine: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed: make test-trl")
    found: list[dict[str, torch.Tensor]] = []
    for name, world, how in (("alone", 1, None), ("ranks", 2, engine)):
        (tmp_path / name).mkdir()
        run_ranks(world, trained, how, tmp_path / name)
        exported = tmp_path / name / "exported"
        assert sorted(x.name for x in exported.iterdir() if x.suffix != ".md") == [
            "adapter_config.json",
            "adapter_model.safetensors",
        ]
        found.append(load_file(exported / "adapter_model.safetensors"))
        again = peft.PeftModel.from_pretrained(make(torch.float64, seed=6), str(exported))
        of_loaded = {n: p for n, p in again.named_parameters() if "lora_" in n}
        assert len(of_loaded) == len(found[-1]) > 2
    want, got = found
    assert want.keys() == got.keys()
    for name, x in want.items():
        torch.testing.assert_close(got[name], x, rtol=1e-7, atol=1e-10)
        assert x.abs().max() > 1e-6, name


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
def test_weights_under_adapters_come_from_a_checkpoint(engine: str, tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="peft is not installed: make test-trl")
    make(torch.float64, seed=6).save_pretrained(tmp_path / "base")
    found: list[dict[str, torch.Tensor]] = []
    for name, world, how, base in (
        ("alone", 1, None, None),
        ("ranks", 2, engine, tmp_path / "base"),
    ):
        (tmp_path / name).mkdir()
        run_ranks(world, trained, how, tmp_path / name, base=base)
        found.append(load_file(tmp_path / name / "exported" / "adapter_model.safetensors"))
    want, got = found
    assert want.keys() == got.keys()
    for name, x in want.items():
        torch.testing.assert_close(got[name], x, rtol=1e-7, atol=1e-10)

"""Adapters, trained and exported under every engine, alone or merged: the files and values of one process.

``make test-trl`` installs peft beside the environment; without it the tests of peft are skipped.
"""

from __future__ import annotations

import runpy
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from safetensors.torch import load_file
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from lightning_cp.checkpoint import export_pretrained
from lightning_cp.errors import CheckpointError, ConfigError
from lightning_cp.fabric import UlyssesRingStrategy
from tests.helpers.checkpoint.pretrained.adapters import Network
from tests.helpers.checkpoint.pretrained.models import make
from tests.helpers.installed import ROOT
from tests.helpers.pool import run_ranks
from tests.helpers.pool.environment import PoolEnvironment
from tests.helpers.strategies.small import alone, trainer_of

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
    """Three steps, then adapters and merged model; with ``base`` the strategy loads the frozen weights."""
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
    export_pretrained(network.merge_and_unload(), folder / "merged")


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
        require_merged(found[-1], tmp_path / name / "merged")
    want, got = found
    assert want.keys() == got.keys()
    for name, x in want.items():
        torch.testing.assert_close(got[name], x, rtol=1e-7, atol=1e-10)
        assert x.abs().max() > 1e-6, name


def built_on_meta(rank: int, world: int, engine: str, folder: Path, given: dict[str, Any]) -> None:
    """A model of no values of its own, loaded; then what its adapters hold, and the merged model."""
    peft: Any = import_module("peft")
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated")
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", **given)
    with torch.device("meta"):
        network = peft.get_peft_model(make(torch.float64, device="meta"), lora)
    keys = BASE
    if "modules_to_save" in given:
        keys = {**BASE, "lm_head.original_module.weight": "lm_head.weight"}
    loads = {"path": str(folder / "base"), "keys": keys, "progress": False}
    loads["allow_missing"] = ["*lora_*", "*modules_to_save*"]
    strategy = UlyssesRingStrategy(mode="ring", data_parallel=engine, pretrained=loads)
    fabric = Fabric(
        accelerator="cpu", devices=world, strategy=strategy, plugins=[PoolEnvironment()]
    )
    fabric.launch()
    learns = [p for p in network.parameters() if p.requires_grad]
    if given.keys() - {"init_lora_weights"}:
        with pytest.raises(
            CheckpointError, match=r"(lora_A|modules_to_save)\.default .*real device"
        ):
            fabric.setup(network, torch.optim.SGD(learns, lr=0.5))
        return
    fabric.setup(network, torch.optim.SGD(learns, lr=0.5))
    export_pretrained(network, folder / "adapters")
    export_pretrained(network.merge_and_unload(), folder / "merged")


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
@pytest.mark.parametrize("engine", ["ddp", "fsdp"])
@pytest.mark.parametrize(
    "given",
    [
        {},
        {"init_lora_weights": "gaussian"},
        {"use_dora": True},
        {"modules_to_save": ["lm_head"]},
    ],
    ids=str,
)
def test_adapters_on_the_meta_device_begin_with_no_effect(
    given: dict[str, Any], engine: str, tmp_path: Path
) -> None:
    pytest.importorskip("peft", reason="peft is not installed: make test-trl")
    base = make(torch.float64, seed=6)
    base.save_pretrained(tmp_path / "base")
    run_ranks(2, built_on_meta, engine, tmp_path, given)
    if given.keys() - {"init_lora_weights"}:
        return
    adapters = load_file(tmp_path / "adapters" / "adapter_model.safetensors")
    assert all(bool(x.any()) == ("lora_A" in name) for name, x in adapters.items())
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    for name, x in merged.items():
        assert torch.equal(x, base.state_dict()[name]), name


def merges(rank: int, world: int, how: str) -> list[str]:
    """What methods of a sharded model answer, and of a whole one."""
    model: Any = Network(kind="LORA" if how in ("plain", "dora", "variant") else how)
    model.peft_config["default"].use_dora = how == "dora"
    if how == "variant":
        model.layer.lora_variant["default"] = object()
    strategy = UlyssesRingStrategy(mode="ring", data_parallel="fsdp")
    fabric = Fabric(
        accelerator="cpu", devices=world, strategy=strategy, plugins=[PoolEnvironment()]
    )
    fabric.launch()
    fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.5))
    found: list[str] = []
    for method in (model.merge_and_unload, model.merge_adapter):
        for given in ((), (None, True), (None, False)):
            try:
                method(*given)
                found.append("merged")
            except ConfigError as raised:
                found.append(str(raised))
    return found


@pytest.mark.parametrize("how", ["plain", "LOHA", "dora", "variant", "IA3"])
def test_merging_that_pytorch_would_ignore_is_refused(how: str) -> None:
    for answers in run_ranks(2, merges, how):
        merged = [answer == "merged" for answer in answers]
        assert merged == [how in ("plain", "LOHA"), False, how in ("plain", "LOHA")] * 2
        assert "Leave safe_merge out" in answers[1]
        assert answers[0] == "merged" or "merge them in one process" in answers[0]


def require_merged(adapters: dict[str, torch.Tensor], folder: Path) -> None:
    """The base model's names and values, with those products added that peft defines."""
    want = make(torch.float64, seed=6).state_dict()
    for key, down in adapters.items():
        if key.endswith("lora_A.weight"):
            name = key.removeprefix("base_model.model.").replace(".lora_A", "")
            scale = 8 / len(down)  # peft's lora_alpha / r
            want[name] += scale * adapters[key.replace("lora_A", "lora_B")] @ down
    loads: Any = AutoModelForCausalLM.from_pretrained
    merged, report = loads(folder, output_loading_info=True)
    assert not any(report.values())
    torch.testing.assert_close(dict(merged.state_dict()), dict(want), rtol=1e-9, atol=1e-12)


def merged_by_hand(rank: int, world: int, engine: str | None, folder: Path) -> None:
    """Two steps of the example's model, and its export."""
    engines = {"mode": "ring", "data_parallel": engine, "labels": "auto"}
    trainer = trainer_of(world, engines if engine else None, precision="64-true", max_steps=2)
    example = runpy.run_path(str(ROOT / "examples/lora.py"))
    torch.manual_seed(5)
    model = example["Model"]()
    trainer.fit(model, DataLoader(example["rows"]()))
    export_pretrained(model.merge(), folder)


@pytest.mark.parametrize("engine", ["fsdp", "zero1"])
def test_adapters_of_your_own_merge_into_sharded_weights(engine: str, tmp_path: Path) -> None:
    run_ranks(1, merged_by_hand, None, tmp_path / "alone")
    run_ranks(2, merged_by_hand, engine, tmp_path / "ranks")
    want, got = (load_file(tmp_path / x / "model.safetensors") for x in ("alone", "ranks"))
    assert want.keys() == got.keys()
    for name, x in want.items():
        torch.testing.assert_close(got[name], x, rtol=1e-7, atol=1e-9)


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

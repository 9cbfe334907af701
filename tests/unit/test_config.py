"""Settings: one declaration of each, alone and in groups, and no stale copy of them."""

from __future__ import annotations

import inspect
import re
import runpy
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate

from lightning_cp import UlyssesRingStrategy
from lightning_cp import fabric as fabric_twin
from lightning_cp.config import (
    GROUPS,
    BatchSettings,
    DiagnosticsSettings,
    MemorySettings,
    MeshSettings,
    ShardingSettings,
    StrategyConfig,
)
from lightning_cp.errors import ConfigError
from lightning_cp.strategies.validation import given_settings
from lightning_cp.utils.run_folder import config_dir

ROOT = Path(__file__).parents[2]
GENERATED: dict[Path, str] = runpy.run_path(str(ROOT / "docs/generate_settings.py"))["files"]()
NAMES = [item.name for item in fields(StrategyConfig)]


def settings_of(**arguments: Any) -> StrategyConfig:
    return UlyssesRingStrategy(**arguments)._settings


@pytest.mark.parametrize("path", GENERATED, ids=lambda path: path.name)
def test_no_copy_of_the_settings_is_stale(path: Path) -> None:
    assert path.read_text() == GENERATED[path], "run python docs/generate_settings.py"


def test_every_setting_is_of_one_group_and_described() -> None:
    of_groups = [item.name for kind in GROUPS.values() for item in fields(kind)]
    assert of_groups == NAMES
    assert len(set(of_groups)) == len(of_groups)
    assert not set(GROUPS) & set(NAMES)
    for item in fields(StrategyConfig):
        assert item.metadata["text"].endswith("."), item.name


def test_guides_of_settings_exist() -> None:
    for item in fields(StrategyConfig):
        page, _, heading = item.metadata["guide"].partition("#")
        if not page:
            continue
        text = (ROOT / "docs" / page).read_text()
        titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
        anchors = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
        assert not heading or heading in anchors, item.name


def test_the_signature_keeps_its_order_and_groups_are_keywords() -> None:
    parameters = inspect.signature(UlyssesRingStrategy).parameters
    first = ["context_parallel_size", "mode", "ulysses_size", "ring_size", "num_heads", "exchange"]
    assert list(parameters)[:6] == first
    assert sorted(parameters) == sorted([*NAMES, *GROUPS, "kwargs"])
    assert {parameters[name].kind for name in GROUPS} == {inspect.Parameter.KEYWORD_ONLY}
    settings = UlyssesRingStrategy(4, "ring")._settings
    assert (settings.context_parallel_size, settings.mode) == (4, "ring")


def test_the_signature_has_the_defaults() -> None:
    assert StrategyConfig.from_flat({}) == StrategyConfig() == settings_of()


@pytest.mark.parametrize("twin", [UlyssesRingStrategy, fabric_twin.UlyssesRingStrategy])
@pytest.mark.parametrize(
    "memory", [{"tiled_mlp": True}, MemorySettings(tiled_mlp=True)], ids=["mapping", "object"]
)
def test_a_group_is_its_settings(twin: Any, memory: Any) -> None:
    grouped = twin(mode="ring", activation_checkpointing="blocks", memory=memory)
    alone = twin(mode="ring", activation_checkpointing="blocks", tiled_mlp=True)
    assert grouped._settings == alone._settings
    assert alone._settings.mlp_tile_tokens == 4096


def test_all_groups_at_once() -> None:
    settings = settings_of(
        mesh=MeshSettings(mode="ring_only", data_parallel="fsdp"),
        attention={"kernel": "aten"},
        batch=BatchSettings(sequence_dims={"frames": 1}),
        sharding={"wrap_modules": "Block"},
        memory={},
        checkpoints={"checkpoint": "sharded", "async_save": True},
        diagnostics=DiagnosticsSettings(parity_check=None),
    )
    expected = StrategyConfig(
        mode="ring",
        data_parallel="fsdp",
        kernel="aten",
        sequence_dims={"frames": 1},
        wrap_modules="Block",
        checkpoint="sharded",
        async_save=True,
        parity_check="off",
    )
    assert settings == expected


def test_an_argument_at_its_default_is_not_set() -> None:
    assert settings_of(tiled_mlp=False, memory={"tiled_mlp": True}).tiled_mlp is True
    assert settings_of(tiled_mlp=True, memory=MemorySettings(chunked_loss=True)).tiled_mlp is True


def test_given_settings_are_those_alone_and_in_mappings() -> None:
    groups = {"memory": {"tiled_mlp": False}, "diagnostics": DiagnosticsSettings(), "mesh": None}
    given = given_settings({"mode": "ring", **groups})
    assert given & {*NAMES} == {"mode", "tiled_mlp"}


def defaults_through(last: str) -> list[Any]:
    parameters = [*inspect.signature(UlyssesRingStrategy).parameters.values()]
    names = [each.name for each in parameters]
    return [each.default for each in parameters[: names.index(last) + 1]]


@pytest.mark.parametrize(
    ("positional", "named"),
    [
        (defaults_through("parity_check"), {}),
        ([], {"parity_check": "first_batch"}),
        ([], {"diagnostics": {"parity_check": "first_batch"}}),
    ],
    ids=["positional", "alone", "in a group"],
)
def test_fabric_warns_of_a_parity_check_given_in_any_form(
    positional: list[Any], named: dict[str, Any]
) -> None:
    with pytest.warns(UserWarning, match="checks nothing by itself with Fabric"):
        fabric_twin.UlyssesRingStrategy(*positional, **named)


def test_fabric_is_silent_about_defaults() -> None:
    fabric_twin.UlyssesRingStrategy(
        *defaults_through("batch_sync"), diagnostics={"parity_tokens": 8}
    )


@pytest.mark.parametrize("memory", [{"tiled_mlp": 512}, MemorySettings(tiled_mlp=512)])
def test_a_setting_that_is_set_twice_is_refused(memory: Any) -> None:
    match = r"tiled_mlp is set twice: tiled_mlp=True, and in memory= tiled_mlp=512\. Leave one"
    with pytest.raises(ConfigError, match=match):
        settings_of(tiled_mlp=True, memory=memory)
    with pytest.raises(ConfigError, match=r"tiled_mlp is set twice.*in memory= tiled_mlp=False"):
        settings_of(tiled_mlp=True, memory={"tiled_mlp": False})


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (
            {"memory": {"tiled_mlps": True}},
            r"memory= has no setting 'tiled_mlps'\. Did you mean tiled_mlp\? Its settings are chunked_",
        ),
        (
            {"memory": {"ring_size": 2}},
            r"'ring_size'\. It is a setting of mesh=\. Its settings are",
        ),
        ({"memory": {1: True}}, r"memory= has no setting 1\. Its settings are chunked_loss"),
        ({"mesh": 4}, r"mesh must be a MeshSettings or a mapping of its settings, got 4\. Its set"),
        ({"memory": MeshSettings()}, r"memory must be a MemorySettings or a mapping .*MeshSett"),
        ({"memory": StrategyConfig()}, r"memory must be a MemorySettings or a mapping .*Strategy"),
        ({"memry": {}}, r"unknown argument\(s\) memry\. Did you mean memory instead of memry\?"),
        ({"ring": 2}, r"Did you mean ring_size instead of ring\?$"),
        ({"cp_size": 2}, r"Did you mean context_parallel_size instead of cp_size\?$"),
        ({"checkpointing": "blocks"}, r"Did you mean activation_checkpointing instead of"),
        ({"precision": 16}, r"Did you mean mixed_precision .* precision= belongs to the Trainer"),
        ({"kernel": "flash_attn2"}, r"got 'flash_attn2'\. Did you mean 'flash_attn_2'\?$"),
        ({"kernel": "magic"}, r"kernel must be one of .*, got 'magic'\. Choose one of these\.$"),
        ({"mesh": {"mode": "rings"}}, r"mode must be one of auto, ulysses, .*, got 'rings'"),
        (
            {"sharding": ShardingSettings(cpu_offload=True)},
            "cpu_offload=True is for engines that shard parameters",
        ),
        (
            {"mesh": {"data_parallel": "fsdp"}, "static_graph": True},
            "static_graph: an option of data_parallel='ddp', got data_parallel='fsdp'",
        ),
        ({"data_parallel_size": None}, "data_parallel_size must be an integer of at least 1, got"),
        ({"padding": None}, r"padding must be True or False, got None\. Leave it out for True"),
    ],
)
def test_bad_settings_are_refused_by_name(arguments: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        UlyssesRingStrategy(**arguments)


def test_groups_of_hydra() -> None:
    overrides = ["strategy=ring", "+strategy.memory.tiled_mlp=true", "+strategy.mesh.num_heads=4"]
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        strategy = instantiate(compose("train", overrides).strategy)
    assert (strategy._settings.mode, strategy._settings.num_heads) == ("ring", 4)
    assert strategy._settings.tiled_mlp is True


def test_groups_of_lightning_cli() -> None:
    jsonargparse = pytest.importorskip("jsonargparse")
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(UlyssesRingStrategy, "strategy")
    arguments = ["--strategy.mode=ring", "--strategy.memory.tiled_mlp=true"]
    given = parser.parse_args([*arguments, '--strategy.mesh={"num_heads": 4}'])
    make = getattr(parser, "instantiate", parser.instantiate_classes)  # newer and older versions
    strategy = make(given).strategy
    assert (strategy._settings.mode, strategy._settings.num_heads) == ("ring", 4)
    assert strategy._settings.tiled_mlp is True

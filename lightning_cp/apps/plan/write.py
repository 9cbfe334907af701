"""The best plan in files, as a choice of Hydra's ``strategy`` group, and the command that runs it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from lightning_cp.config import StrategyConfig
from lightning_cp.planner.job import PlanCase
from lightning_cp.planner.search import SearchResult

MOMENTUM = 0.9


def write(found: SearchResult, folder: Path, model: Sequence[str]) -> str:
    """Write ``strategy/plan.yaml`` if a plan fits.

    Args:
        found: all plans.
        folder: the run's folder.
        model: the overrides that chose the model.

    Returns:
        The commands that use the file, and the paths of all files.
    """
    files = [folder / name for name in ("plan.txt", "plan.png")]
    lines: list[str] = []
    file = folder / "strategy" / "plan.yaml"
    file.unlink(missing_ok=True)  # of an earlier run
    if found.plans and found.plans[0].case.job.trains:
        case = found.plans[0].case
        file.parent.mkdir(exist_ok=True)
        file.write_text(as_yaml(case))
        files.append(file)
        same = shlex.join([*model, f"data.seq_len={case.job.seq_len}", *optimizer_overrides(case)])
        lines = [
            "Run it:",
            f"  python -m lightning_cp.train --config-dir {folder} strategy=plan {same}",
            f"or, without the file:\n  python -m lightning_cp.train {as_overrides(case)} {same}",
            f"or, in a script:\n  {as_call(case)}",
        ]
        if case.job.machine.name == "tpu_v4":
            lines = [
                "This package does not run on TPUs: strategy/plan.yaml is for the same mesh elsewhere."
            ]
    return "\n".join([*lines, *(f"  {file}" for file in files)])


def strategy_settings(case: PlanCase) -> dict[str, object]:
    """Return the strategy's settings; all others stay at their defaults."""
    job, choice, mesh = case.job, case.choice, case.choice.mesh
    given: dict[str, object] = {
        "data_parallel": choice.engine,
        "data_parallel_size": mesh.data,
        "tensor_parallel_size": mesh.tp,
        "ring_size": mesh.ring,
        "ulysses_size": mesh.ulysses,
        "exchange": choice.exchange,
        "activation_checkpointing": choice.checkpointing,
        "activation_offload": choice.offload,
        "chunked_loss": choice.chunked_loss or False,
        "tiled_mlp": choice.tiled_mlp or False,
    }
    if choice.engine == "hsdp":
        given["data_parallel_replicate_size"] = mesh.dp_replicate
    if job.precision == "bf16-mixed" and choice.engine != "ddp":
        given["mixed_precision"] = "bfloat16"
    return given


def trainer_settings(case: PlanCase) -> dict[str, object]:
    """Return the Trainer's arguments."""
    job, devices = case.job, case.devices_per_node
    given: dict[str, object] = {
        "accelerator": "cpu" if job.machine.is_cpu else "gpu",
        "devices": devices,
        "num_nodes": case.choice.mesh.devices // devices,
        "accumulate_grad_batches": case.sequences,
    }
    if job.precision == "bf16-true" or (
        job.precision == "bf16-mixed" and case.choice.engine == "ddp"
    ):
        given["precision"] = job.precision
    return given


def optimizer_overrides(case: PlanCase) -> list[str]:
    """Return the overrides for a planned optimizer other than the models' AdamW."""
    name = case.job.optimizer
    if name == "adamw":
        return []
    given = ["model.optimizer._target_=torch.optim.SGD", "~model.optimizer.betas"]
    return given + [f"+model.optimizer.momentum={MOMENTUM}"] * (name == "momentum")


def as_yaml(case: PlanCase) -> str:
    """Return the text of ``strategy/plan.yaml``."""
    lines = [
        "# @package _global_",
        f"# {case.job.model.name} on {case.job.devices} x {case.job.machine.name}: {case.choice.mesh}",
        "defaults: [auto, _self_]",
    ]
    for group, given in (
        ("trainer", trainer_settings(case)),
        ("strategy", strategy_settings(case)),
    ):
        lines.append(f"{group}:")
        lines += [f"  {name}: {_text(value)}" for name, value in given.items()]
    return "\n".join(lines) + "\n"


def as_overrides(case: PlanCase) -> str:
    """Return the plan as overrides for a command line with ``strategy=auto``."""
    groups = (("trainer", trainer_settings(case)), ("strategy", strategy_settings(case)))
    return " ".join(
        ["strategy=auto"]
        + [
            f"{'++' * (name == 'num_nodes')}{group}.{name}={_text(value)}"  # not in the group's config
            for group, given in groups
            for name, value in given.items()
        ]
    )


def as_call(case: PlanCase) -> str:
    """Return the plan as Python, without what a strategy has by default."""
    defaults = StrategyConfig()
    given = strategy_settings(case)
    sizes = [f"{name}={given[name]!r}" for name in given if given[name] != getattr(defaults, name)]
    trainer = [f"{name}={value!r}" for name, value in trainer_settings(case).items()]
    return f"Trainer({', '.join(trainer)}, strategy=UlyssesRingStrategy({', '.join(sizes)}))"


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)

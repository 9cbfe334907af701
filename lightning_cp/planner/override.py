"""A plan as a choice of Hydra's ``strategy`` group, which the main job runs as it is."""

from __future__ import annotations

from lightning_cp.planner.job import Case

MOMENTUM = 0.9


def settings(case: Case) -> dict[str, object]:
    """What the strategy is given; all else stays at its default."""
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


def trainer(case: Case) -> dict[str, object]:
    """What the Trainer is given."""
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


def optimizer(case: Case) -> list[str]:
    """Overrides for the optimizer that was planned, where it is another than the models' AdamW."""
    name = case.job.optimizer
    if name == "adamw":
        return []
    given = ["model.optimizer._target_=torch.optim.SGD", "~model.optimizer.betas"]
    return given + [f"+model.optimizer.momentum={MOMENTUM}"] * (name == "momentum")


def as_yaml(case: Case) -> str:
    """The file ``strategy/plan.yaml``."""
    lines = [
        "# @package _global_",
        f"# {case.job.model.name} on {case.job.devices} x {case.job.machine.name}: {case.choice.mesh}",
        "defaults: [auto, _self_]",
    ]
    for group, given in (("trainer", trainer(case)), ("strategy", settings(case))):
        lines.append(f"{group}:")
        lines += [f"  {name}: {_shown(value)}" for name, value in given.items()]
    return "\n".join(lines) + "\n"


def as_overrides(case: Case) -> str:
    """The same, for a command line on which ``strategy=auto`` is chosen."""
    groups = (("trainer", trainer(case)), ("strategy", settings(case)))
    return " ".join(
        ["strategy=auto"]
        + [
            f"{'++' * (name == 'num_nodes')}{group}.{name}={_shown(value)}"  # no group has it
            for group, given in groups
            for name, value in given.items()
        ]
    )


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)

"""What one rank computes in a step of a case, as the planner's closed forms of memory are asked."""

from __future__ import annotations

from lightning_cp.planner.activations import RankStep
from lightning_cp.planner.job import Case


def rank_step(case: Case, attention: tuple[int, int] = (0, 0)) -> RankStep:
    """Of one sequence of its own; ``attention`` are peaks of an attention call in forward and backward."""
    job, choice = case.job, case.choice
    shards = choice.engine != "ddp"
    return RankStep(
        job.model,
        case.local_tokens,
        choice.mesh.cp,
        choice.mesh.tp,
        itemsize=job.compute_itemsize,
        parameter_itemsize=job.itemsize,
        recompute=choice.checkpointing,
        offload=choice.offload,
        chunked_loss=choice.chunked_loss,
        tiled_mlp=choice.tiled_mlp,
        attention=attention,
        engine=choice.engine,
        shard_ranks=choice.shard_ranks,
        reduce_itemsize=job.reduced_itemsize if shards else 0,
    )
